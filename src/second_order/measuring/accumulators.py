"""What is summed over the data: second moments of inputs, of pairs, and EK-FAC's eigenvalues.

inputs    A += Σ x xᵀ over the rows that count
pairs     A, and G += Σ d dᵀ over all rows
ekfac     Λ += Σ_b (Q_Gᵀ ∇_b Q_A)², elementwise, ∇_b = Σ_t d_t x_tᵀ of an example b of the batch,
          over all rows t of all calls of the layer (George et al. 2018, equation 9)

A and G of convolutions are those of Grosse and Martens 2016: A is a sum over an image's locations.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError, SecondOrderWarning
from second_order.kronecker.autograd import to_compute_dtype
from second_order.kronecker.block import to_matrices
from second_order.kronecker.experts import Routed
from second_order.kronecker.layer_curvature import Eigen
from second_order.kronecker.layers import CONVOLUTIONS, Form, gram, layout_of, live_rows
from second_order.kronecker.solvers import ieee_matmul
from second_order.measuring.batches import Batch
from second_order.measuring.hooks import capturing_inputs, capturing_pairs
from second_order.measuring.layers import Layer
from second_order.measuring.sums import Sums, full_precision

__all__ = ["Eigenvalues", "Inputs", "Pairs"]

SHARED = (
    "all examples of a batch share its indices of shape {shape}, so the gradients of single "
    "examples are not known; give each example its own, for example by position_ids of shape "
    "(examples, positions) in the batch"
)
BY_ROW = (
    "measure: rows of some layers cannot be assigned to examples of a batch, so their corrected "
    "eigenvalues count rows as examples"
)
CHUNK_BYTES = 2**26
"""Of the gradients of single examples of a batch that exist at the same time."""


class Accumulator:
    """Adds what the calls of layers contribute, batch by batch.

    Attributes:
        rows: By layer, the number of rows in A's sum; of experts ``(experts,)``, each one's own.
        failed: By layer, why it has no factors.
    """

    def __init__(self, layers: Sequence[Layer], sums: Sums) -> None:
        self.layers = list(layers)
        self.sums = sums
        self.rows: dict[str, int | Tensor] = {}
        self.failed: dict[str, str] = {}
        self.layers_of: dict[nn.Module, list[Layer]] = {}  # fused experts are two layers
        for layer in layers:
            experts = torch.zeros(layer.shape.groups, dtype=torch.int64, device=sums.device)
            self.rows[layer.name] = experts if layer.shape.routed else 0
            for module in layer.block.modules:
                self.layers_of.setdefault(module, []).append(layer)
        self.batch: Batch
        self.counts = True

    def begin(self, batch: Batch, counts: bool) -> None:
        """Begin a batch, which may count for nothing."""
        self.batch = batch
        self.counts = counts

    def end(self) -> None:
        """End a batch. Collective with ``keep="owner"``."""
        self.sums.end_batch()


# ------------------------------------------------------------------------------------------ inputs


class Inputs(Accumulator):
    """A of layers, by forward passes."""

    @contextmanager
    def capturing(self, model: nn.Module, is_sharded: bool) -> Iterator[None]:
        """Capture the inputs of the layers in a block."""
        with capturing_inputs(self.layers_of, self.take):
            yield None

    def take(self, module: nn.Module, x: Any) -> None:
        """Add the input of a call."""
        if not self.counts:
            return
        layers = self.layers_of[module]
        if isinstance(x, Routed):
            # Add the rows that each of the fused experts multiplies.
            routed, _, _ = x.rows(module, self.batch.rows.mask_of(x.hidden))
            for layer in layers:
                rows = routed.of[layer.weight_name].to(self.sums.dtype)
                by_expert = rows.unsqueeze(0).split(routed.counts, dim=1)
                with full_precision(rows.device):
                    a = torch.cat([gram(each) for each in by_expert])
                self.rows[layer.name] += torch.tensor(routed.counts, device=a.device)
                self.sums.add((layer.name, "A"), a)
            return
        (layer,) = layers
        if not isinstance(x, Tensor):
            raise SecondOrderError(f"layer {layer.name!r} was not called with one tensor")
        if x.shape[-1] == layer.shape.dims["A"]:  # else the model itself will raise
            rows, number = self.batch.rows.pick(x)
            self.rows[layer.name] += number
            self.sums.add_gram((layer.name, "A"), to_compute_dtype(rows))


# ------------------------------------------------------------------------------------------- pairs


class Pairs(Accumulator):
    """A and G of layers; a consumer of :class:`~second_order.kronecker.capture.Capture`."""

    @contextmanager
    def capturing(self, model: nn.Module, is_sharded: bool) -> Iterator[Callable[[Tensor], None]]:
        """Capture the pairs of the layers in a block; yields what runs the backward pass."""
        modules = list(self.layers_of)
        with capturing_pairs(model, is_sharded, modules, self) as (backward, missed):
            yield backward
            for module, why in missed.items():
                self.failed |= {layer.name: why for layer in self.layers_of.get(module, ())}

    def wants(self, module: nn.Module) -> bool:
        """Whether pairs of a module are wanted."""
        return module in self.layers_of and self.counts

    def count_call(self, module: nn.Module) -> None:
        """See a call of a module in a forward pass."""

    def consume(self, module: nn.Module, x: Any, d: Tensor, *_: Any, **__: Any) -> None:
        """Add a pair."""
        for layer in self.layers_of[module]:
            if self._is_shared(layer, x):
                self.failed[layer.name] = SHARED.format(shape=tuple(x.shape))
            self._add(layer, module, x, d)

    def _is_shared(self, layer: Layer, x: Any) -> bool:
        """Whether all examples of a batch share an embedding's indices, such as positions.

        Else their first dimension is that of the batch, or there are as many as a tensor of the
        batch has elements.
        """
        if not layer.shape.diagonal_a or self.batch.size < 2:
            return False
        known_sizes = {shape.numel() for shape in self.batch.shapes}
        return len(x) != self.batch.size and x.numel() not in known_sizes

    def _add(self, layer: Layer, module: nn.Module, x: Any, d: Tensor) -> None:
        if layer.is_linear(module):
            rows, number = self.batch.rows.pick(x, homogeneous=layer.has_bias)
            self.rows[layer.name] += number
            self.sums.add_gram((layer.name, "A"), rows)
            self.sums.add_gram((layer.name, "G"), d.reshape(-1, d.shape[-1]))
            return
        pair = Pair.widened(module, x, d)
        kind = layer.kind(module)
        live = live_rows(kind.rows_of(module, pair.x, pair.d).gradient)
        form = Form(bias=layer.has_bias, approximation="expand", rows=live)
        with ieee_matmul(d.device):
            found = kind.statistics(module, pair.x, pair.d, form)
        self.rows[layer.name] += found.examples if found.routed is None else found.routed.long()
        for name, factor in found.factors.items():
            self.sums.add((layer.name, name), factor)


# ------------------------------------------------------------------------------------- eigenvalues


@dataclass(frozen=True, eq=False)
class Pair:
    """A pair of a module, in float32 at least."""

    module: nn.Module
    x: Any
    d: Tensor

    @classmethod
    def widened(cls, module: nn.Module, x: Any, d: Tensor) -> Pair:
        """A pair as it was captured, which may be narrower."""
        d = d.to(torch.promote_types(d.dtype, torch.float32))
        is_real = isinstance(x, Tensor) and x.is_floating_point()
        return cls(module, x.to(d.dtype) if is_real else x, d)


class Eigenvalues(Pairs):
    """The second moment of the gradients of examples in the eigenbasis of A and G.

    An example's gradient is that of all calls of a layer. So the pairs of a layer that is called
    several times are kept until the last of them has come. If the rows of a pair cannot be assigned
    to examples of the batch, each one counts as an example, with a warning.
    """

    def __init__(self, layers: Sequence[Layer], sums: Sums, bases: Mapping[str, Eigen]) -> None:
        super().__init__(layers, sums)
        self._bases = bases
        self._calls: Counter[Layer] = Counter()  # in this batch
        self._kept: dict[Layer, list[Pair]] = {}

    def count_call(self, module: nn.Module) -> None:
        """See a call of a module in a forward pass."""
        self._calls.update(self.layers_of.get(module, ()))

    def consume(self, module: nn.Module, x: Any, d: Tensor, *_: Any, **__: Any) -> None:
        """Keep a pair, or add the layer's if it is the last."""
        pair = Pair.widened(module, x, d)
        for layer in self.layers_of[module]:
            kept = self._kept.setdefault(layer, [])
            kept.append(pair)
            if len(kept) >= self._calls[layer]:
                self._add_squares(layer, self._kept.pop(layer))

    def end(self) -> None:
        """End a batch, with the pairs of layers of which some calls have no gradient."""
        for layer in list(self._kept):
            self._add_squares(layer, self._kept.pop(layer))
        self._calls.clear()
        super().end()

    def _add_squares(self, layer: Layer, pairs: Sequence[Pair]) -> None:
        """Add the squares of the rotated gradients of all examples of a batch."""
        size = self.batch.size
        by_example = [pair for pair in pairs if self._num_examples(layer, pair) == size]
        groups = [(size, by_example)] if by_example else []
        for pair in pairs:
            if pair not in by_example:
                warnings.warn(BY_ROW, SecondOrderWarning, stacklevel=2)
                groups.append((self._num_examples(layer, pair), [pair]))
        all_linear = all(layer.is_linear(pair.module) for pair in pairs)
        squares = _squares_of_rows if all_linear else _squares_of_gradients
        with torch.no_grad(), full_precision(pairs[0].d.device):
            for examples, group in groups:
                total = squares(layer, self._bases[layer.name], group, examples)
                self.sums.add((layer.name, "F"), total)

    def _num_examples(self, layer: Layer, pair: Pair) -> int:
        """The number of examples that the rows of a pair belong to.

        If there is no multiple of the batch size of rows, each row counts as an example.
        """
        size = self.batch.size
        rows = pair.d.numel() // pair.d.shape[-1]
        leading = pair.d.shape[_batch_dim(layer, pair)]
        in_rows = layer.is_linear(pair.module) or layer.shape.diagonal_a
        if in_rows and leading == 1:
            leading = rows
        if size and leading % size == 0:
            return size
        return rows if in_rows else leading


def _batch_dim(layer: Layer, pair: Pair) -> int:
    """The dimension of the examples of a pair that is no matrix's."""
    is_attention = isinstance(pair.module, nn.MultiheadAttention)
    return int(is_attention and pair.d.dim() > 3)  # 1 if q, k and v come first


def _squares_of_rows(layer: Layer, basis: Eigen, pairs: Sequence[Pair], examples: int) -> Tensor:
    """Λ of a Linear, from rows ``(..., in)`` and ``(..., out)``."""
    a = cast(Tensor, basis["A"][1])
    g = cast(Tensor, basis["G"][1])
    total = pairs[0].d.new_zeros(1, g.shape[-1], a.shape[-1])
    with_rows = [pair for pair in pairs if pair.d.numel()]
    if not with_rows:
        return total

    # Rotate the rows, which are fewer numbers than the gradients.
    x = torch.cat([p.x.reshape(examples, -1, p.x.shape[-1]) for p in with_rows], dim=1)
    d = torch.cat([p.d.reshape(examples, -1, p.d.shape[-1]) for p in with_rows], dim=1)
    a = a[0].to(x)
    x = x @ a[:-1] + a[-1] if layer.has_bias else x @ a
    d = d @ g[0].to(d)
    if d.shape[1] == 1:
        return (d[:, 0].square().mT @ x[:, 0].square()).unsqueeze(0)
    chunk = max(1, CHUNK_BYTES // total.nbytes)
    for xs, ds in zip(x.split(chunk), d.split(chunk), strict=True):
        total[0].add_((ds.mT @ xs).square_().sum(0))
    return total


def _squares_of_gradients(
    layer: Layer, basis: Eigen, pairs: Sequence[Pair], examples: int
) -> Tensor:
    """Λ of a layer of any kind, from one example of the batch after the other."""
    a = basis["A"][1]
    g = cast(Tensor, basis["G"][1])
    total = g.new_zeros(layer.shape.gradient_size, device=pairs[0].d.device)
    for parts in zip(*(_split(layer, pair, examples) for pair in pairs), strict=True):
        gradient = torch.stack([_gradient(layer, part) for part in parts]).sum(0)
        rotated = g.to(gradient).mT @ gradient
        if a is not None:
            rotated = rotated @ a.to(gradient)
        total.add_(rotated.square())
    return total


def _split(layer: Layer, pair: Pair, examples: int) -> list[Pair]:
    """The parts of a pair that belong to single examples."""
    dim = _batch_dim(layer, pair)
    each = max(1, pair.d.shape[dim] // max(examples, 1))
    if isinstance(pair.x, Routed):
        tensors = (pair.x.hidden, pair.x.index, pair.x.weights)
        xs: Sequence[Any] = [
            Routed(*part) for part in zip(*(t.split(each) for t in tensors), strict=True)
        ]
    else:
        xs = pair.x.split(each, dim)
    return [Pair(pair.module, x, d) for x, d in zip(xs, pair.d.split(each, dim), strict=True)]


def _gradient(layer: Layer, pair: Pair) -> Tensor:
    """The gradient of a layer's parameters as a matrix ``(groups, out, in)``."""
    gradients = [layer.kind(pair.module).gradient(pair.module, pair.x, pair.d)]
    if layer.has_bias:
        gradients.append(_bias_gradient(layer, pair))
    sizes = [shape.numel() for shape in layer.shapes.values()]
    return to_matrices(gradients, layout_of(layer.shape, sizes))


def _bias_gradient(layer: Layer, pair: Pair) -> Tensor:
    d = pair.d
    if isinstance(pair.x, Routed):
        _, routed = pair.x.pairs(pair.module, d)
        by_expert = routed.of[layer.weight_name].split(routed.counts)
        return torch.stack([rows.sum(0) for rows in by_expert])
    if isinstance(pair.module, CONVOLUTIONS):
        return d.flatten(2).sum((0, 2))
    if _batch_dim(layer, pair) == 1:
        return d.flatten(1, -2).sum(1).flatten()
    return d.reshape(-1, d.shape[-1]).sum(0)
