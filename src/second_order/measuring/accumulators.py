"""Accumulate sums over the data: A, A and G, or EK-FAC's eigenvalues.

    InputAccumulator        A += Σ x xᵀ over the rows of inputs that count
    PairAccumulator         the same A, and G += Σ d dᵀ over all rows of gradients
    EigenvalueAccumulator   Λ += Σ_b (Q_Gᵀ ∇_b Q_A)², elementwise (George et al. 2018,
                            equation 9)

∇_b = Σ_t d_t x_tᵀ is the gradient of example b of the batch, a sum over the rows t of
all calls of the layer. A and G of convolutions are those of Grosse & Martens 2016: A
sums over the locations of an image.

In each batch, ``measure`` calls ``begin_batch``, runs the model, and calls
``end_batch``. Hooks on the layers call ``receive`` or ``consume`` in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError, warn
from second_order.kronecker.autograd import to_compute_dtype
from second_order.kronecker.block import to_matrices
from second_order.kronecker.capture import NOT_ACCUMULATED
from second_order.kronecker.experts import Routed
from second_order.kronecker.layer_curvature import Eigen
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    PairOptions,
    gram,
    matrix_layout,
    nonzero_row_mask,
)
from second_order.kronecker.solvers import ieee_matmul
from second_order.measuring.batches import Batch
from second_order.measuring.hooks import capture_inputs, capture_pairs
from second_order.measuring.layers import Layer
from second_order.measuring.sums import Sums, full_precision

__all__ = ["EigenvalueAccumulator", "InputAccumulator", "PairAccumulator"]

SHARED_INDICES = (
    "all examples of a batch share its indices of shape {shape}, so the gradients of single "
    "examples are not known; give each example its own, for example by position_ids of shape "
    "(examples, positions) in the batch"
)
ROWS_AS_EXAMPLES = (
    "measure: rows of layer {name!r} cannot be assigned to examples of a batch, so its corrected "
    "eigenvalues count rows as examples; call it with the examples first, choose a batch size that "
    "no other dimension has, or pass mask= if the number of examples is unknown"
)

CHUNK_BYTES = 2**26
"""Bound on the memory of gradients of single examples at one time: 64 MiB."""


class Accumulator:
    """Adds what the calls of layers contribute to sums, batch by batch.

    Args:
        layers: The layers to measure.
        sums: The sums of their matrices.

    Attributes:
        rows: By layer, the number of rows in the sum of A. For experts a tensor
            ``(experts,)`` of the numbers of each.
        failed: By layer, why it has no factors.
        num_terms: The number of loss terms so far, or a tensor on the device; 0 without
            a backward pass.
        num_examples: The number of examples so far. A batch of unknown size counts as
            one.
        num_batches: The number of batches so far.
        batch: The current batch.
        counts: Whether the current batch counts.
    """

    batch: Batch

    def __init__(self, layers: Sequence[Layer], sums: Sums) -> None:
        self.sums = sums
        self.num_terms: int | Tensor = 0
        self.num_examples = 0
        self.num_batches = 0
        self.counts = True
        self.rows: dict[str, int | Tensor] = {}
        self.failed: dict[str, str] = {}
        # A module of fused experts has several layers, one for each of its weights.
        self._layers_of: dict[nn.Module, list[Layer]] = {}
        for layer in layers:
            self.rows[layer.name] = 0
            if layer.shape.routed:
                num_experts = layer.shape.groups
                rows = torch.zeros(num_experts, dtype=torch.int64, device=sums.device)
                self.rows[layer.name] = rows
            for module in layer.block.modules:
                self._layers_of.setdefault(module, []).append(layer)

    def begin_batch(self, batch: Batch, counts: bool) -> None:
        """Begin a batch. With ``counts=False`` its inputs and pairs are ignored."""
        self.batch = batch
        self.counts = counts

    def count_batch(self, terms: int | Tensor) -> None:
        """Count a batch and its loss terms."""
        self.num_terms = self.num_terms + terms
        self.num_examples += self.batch.size or 1
        self.num_batches += 1

    def end_batch(self) -> None:
        """End a batch. Collective with ``keep="owner"``."""
        self.sums.end_batch()


# ------------------------------------------------------------------------------- inputs


class InputAccumulator(Accumulator):
    """Accumulates A of layers, from forward passes."""

    def capture(
        self, model: nn.Module, is_sharded: bool
    ) -> AbstractContextManager[None]:
        """Capture the inputs of the layers within the block, without backward."""
        return capture_inputs(self._layers_of, self.receive)

    def receive(self, module: nn.Module, x: Any) -> None:
        """Add the input of a call of a module."""
        if not self.counts:
            return
        layers = self._layers_of[module]
        if isinstance(x, Routed):
            self._add_routed(layers, module, x)
            return
        (layer,) = layers
        if not isinstance(x, Tensor):
            raise SecondOrderError(
                f"layer {layer.name!r} was not called with one tensor; leave it out with layers="
            )
        # If the input does not have the size of the layer, the model itself will raise.
        if x.shape[-1] == layer.shape.dims["A"]:
            rows = self.batch.rows.gather(x)
            self.rows[layer.name] += len(rows)
            self.sums.add_gram((layer.name, "A"), to_compute_dtype(rows))

    def _add_routed(
        self, layers: Sequence[Layer], module: nn.Module, x: Routed
    ) -> None:
        """Add the rows that each of the fused experts multiplies."""
        routed = x.products(module, self.batch.rows.token_mask(x.hidden)).inputs
        for layer in layers:
            rows = routed.by_weight[layer.weight_name].to(self.sums.dtype)
            rows_by_expert = rows.unsqueeze(0).split(routed.counts, dim=1)
            with full_precision(rows.device):
                a = torch.cat([gram(expert_rows) for expert_rows in rows_by_expert])
            self.rows[layer.name] += torch.tensor(routed.counts, device=a.device)
            self.sums.add((layer.name, "A"), a)


# -------------------------------------------------------------------------------- pairs


class PairAccumulator(Accumulator):
    """Accumulates A and G of layers, from pairs of inputs and output gradients."""

    @contextmanager
    def capture(
        self, model: nn.Module, is_sharded: bool
    ) -> Iterator[Callable[[Tensor], None]]:
        """Capture the layers' pairs within the block; yield the backward function."""
        modules = list(self._layers_of)
        with capture_pairs(model, is_sharded, modules, consumer=self) as captured:
            yield captured.backward
            for module, reason in captured.missed.items():
                if reason == NOT_ACCUMULATED:
                    continue  # derivatives that the model computes itself
                for layer in self._layers_of.get(module, ()):
                    self.failed[layer.name] = reason

    def wants(self, module: nn.Module) -> bool:
        """Return whether to capture pairs of a module."""
        return module in self._layers_of and self.counts

    def count_call(self, module: nn.Module) -> None:
        """Do nothing: only eigenvalues depend on the number of calls."""

    def consume(
        self, module: nn.Module, x: Any, d: Tensor, pass_id: int, again: bool
    ) -> None:
        """Add a pair."""
        for layer in self._layers_of[module]:
            if self._shares_indices(layer, x):
                self.failed[layer.name] = SHARED_INDICES.format(shape=tuple(x.shape))
            else:
                self._add_pair(layer, module, x, d)

    def _shares_indices(self, layer: Layer, x: Any) -> bool:
        """Return whether all examples share an embedding's indices, as of positions.

        They have their own indices if the first dimension is that of the batch, or if
        there are as many indices as a tensor of the batch has elements.
        """
        if not layer.shape.diagonal_a or self.batch.size < 2:
            return False
        batch_numels = {shape.numel() for shape in self.batch.shapes}
        has_own_indices = x.shape[:1] == (self.batch.size,)
        return not has_own_indices and x.numel() not in batch_numels

    def _add_pair(self, layer: Layer, module: nn.Module, x: Any, d: Tensor) -> None:
        if layer.kinds[module].multiplies_rows:
            rows = self.batch.rows.gather(x, homogeneous=layer.has_bias)
            self.rows[layer.name] += len(rows)
            self.sums.add_gram((layer.name, "A"), rows)
            self.sums.add_gram((layer.name, "G"), d.reshape(-1, d.shape[-1]))
            return

        # Other layers compute their statistics as they do in training. There, rows
        # without a gradient are padding.
        pair = Pair.widened(module, x, d)
        kind = layer.kinds[module]
        row_mask = nonzero_row_mask(kind.gradient_rows(module, pair.x, pair.d).gradient)
        options = PairOptions(layer.has_bias, "expand", row_mask)
        with ieee_matmul(d.device):
            statistics = kind.statistics(module, pair.x, pair.d, options)
        if statistics.examples_per_group is None:
            self.rows[layer.name] += statistics.num_examples
        else:
            self.rows[layer.name] += statistics.examples_per_group.long()
        for name, factor in statistics.factors.items():
            self.sums.add((layer.name, name), factor)


# -------------------------------------------------------------------------- eigenvalues


@dataclass(frozen=True, eq=False)
class Pair:
    """A pair of a module: input x and output gradient d, in float32 or float64."""

    module: nn.Module
    x: Any
    d: Tensor

    @classmethod
    def widened(cls, module: nn.Module, x: Any, d: Tensor) -> Pair:
        """Return a pair in at least float32. An input of indices keeps its dtype."""
        d = d.to(torch.promote_types(d.dtype, torch.float32))
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(d.dtype)
        return cls(module, x, d)


class EigenvalueAccumulator(PairAccumulator):
    """Accumulates squares of the examples' gradients in the eigenbasis of A ⊗ G.

    An example's gradient is a sum over all calls of a layer. Therefore, if a layer is
    called several times in a forward pass, its pairs are stored until the last one
    arrives.

    The first dimension of a pair has the examples, and may have several rows of each
    one after the other. If it is not a multiple of the batch size, or if it differs from
    the batch size and a later dimension has that size, each row counts as an example,
    with a warning.

    Args:
        layers: The layers to measure.
        sums: The sums of their eigenvalues "F".
        bases: By layer, the eigenvectors of the factors.
    """

    def __init__(
        self, layers: Sequence[Layer], sums: Sums, bases: Mapping[str, Eigen]
    ) -> None:
        super().__init__(layers, sums)
        self._bases = bases
        self._num_calls: Counter[Layer] = Counter()  # in this batch
        self._pairs: dict[Layer, list[Pair]] = {}

    def count_call(self, module: nn.Module) -> None:
        """Count a call of a module in a forward pass."""
        self._num_calls.update(self._layers_of.get(module, ()))

    def consume(
        self, module: nn.Module, x: Any, d: Tensor, pass_id: int, again: bool
    ) -> None:
        """Store a pair. After a layer's last pair, add the squares of its gradients."""
        pair = Pair.widened(module, x, d)
        for layer in self._layers_of[module]:
            pairs = self._pairs.setdefault(layer, [])
            pairs.append(pair)
            if len(pairs) >= self._num_calls[layer]:
                self._add_squares(layer, self._pairs.pop(layer))

    def end_batch(self) -> None:
        """Add the pairs of layers with a call without a gradient, and end the batch."""
        for layer in list(self._pairs):
            self._add_squares(layer, self._pairs.pop(layer))
        self._num_calls.clear()
        super().end_batch()

    def _add_squares(self, layer: Layer, pairs: Sequence[Pair]) -> None:
        """Add the squares of the rotated gradients of all examples of a batch."""
        pairs = [pair for pair in pairs if pair.d.numel()]
        if not pairs:
            return

        # Pairs with the same examples belong together. Others are groups by themselves.
        groups: list[ExampleGroup] = []
        by_example: list[Pair] = []
        for pair in pairs:
            row_dims = _row_dims(layer, pair)
            if self._begins_with_examples(row_dims):
                by_example.append(pair)
            else:
                warn(ROWS_AS_EXAMPLES.format(name=layer.name))
                groups.append(ExampleGroup(math.prod(row_dims), [pair]))
        if by_example:
            groups.append(ExampleGroup(self.batch.size, by_example))

        # If the layer is a Linear, rows are rotated, and otherwise gradients.
        basis = self._bases[layer.name]
        is_linear = all(layer.kinds[pair.module].multiplies_rows for pair in pairs)
        compute_squares = _squares_of_rows if is_linear else _squares_of_gradients
        with torch.no_grad(), full_precision(pairs[0].d.device):
            for group in groups:
                self.sums.add((layer.name, "F"), compute_squares(layer, basis, group))

    def _begins_with_examples(self, row_dims: Sequence[int]) -> bool:
        """Return whether the first dimension of rows has the examples of the batch."""
        first, *others = row_dims
        size = self.batch.size
        if size == 0 or first % size:
            return False
        return first == size or size not in others


@dataclass(frozen=True, eq=False)
class ExampleGroup:
    """Pairs of a layer whose rows belong to the same examples."""

    num_examples: int
    pairs: Sequence[Pair]


def _row_dims(layer: Layer, pair: Pair) -> list[int]:
    """Return the sizes of a pair's dimensions of rows, without those of size 1.

    If the layer is neither a Linear nor an embedding, there is one: the examples.
    """
    if layer.kinds[pair.module].multiplies_rows or layer.shape.diagonal_a:
        return [size for size in pair.d.shape[:-1] if size > 1] or [1]
    return [pair.d.shape[_batch_dim(pair)]]


def _batch_dim(pair: Pair) -> int:
    """Return the dimension of the examples."""
    # The in-projection of an attention may have q, k and v before them.
    is_attention = isinstance(pair.module, nn.MultiheadAttention)
    return 1 if is_attention and pair.d.dim() > 3 else 0


def _squares_of_rows(layer: Layer, basis: Eigen, group: ExampleGroup) -> Tensor:
    """Return Λ ``(1, out, in)`` of a Linear, from rows of all examples together."""
    q_a = cast(Tensor, basis["A"].vectors)
    q_g = cast(Tensor, basis["G"].vectors)
    pairs = group.pairs
    total = pairs[0].d.new_zeros(1, q_g.shape[-1], q_a.shape[-1])

    # Rotate the rows x Q_A and d Q_G, which have fewer entries than the gradients. With
    # a bias, the last row of Q_A belongs to the 1 that is appended to x.
    num_examples = group.num_examples
    x = torch.cat([p.x.reshape(num_examples, -1, p.x.shape[-1]) for p in pairs], dim=1)
    d = torch.cat([p.d.reshape(num_examples, -1, p.d.shape[-1]) for p in pairs], dim=1)
    q_a = q_a[0].to(x)
    x = x @ q_a[:-1] + q_a[-1] if layer.has_bias else x @ q_a
    d = d @ q_g[0].to(d)

    # With one row per example, (d xᵀ)² = d² (x²)ᵀ.
    if d.shape[1] == 1:
        return (d[:, 0].square().mT @ x[:, 0].square()).unsqueeze(0)

    # Otherwise sum over the rows of each example before squaring.
    chunk_size = max(1, CHUNK_BYTES // total.nbytes)
    for x_chunk, d_chunk in zip(x.split(chunk_size), d.split(chunk_size), strict=True):
        total[0].add_((d_chunk.mT @ x_chunk).square_().sum(0))
    return total


def _squares_of_gradients(layer: Layer, basis: Eigen, group: ExampleGroup) -> Tensor:
    """Return Λ ``(groups, out, in)`` of any layer, from one example after the other."""
    q_a = basis["A"].vectors
    q_g = cast(Tensor, basis["G"].vectors)
    total = q_g.new_zeros(layer.shape.gradient_shape, device=group.pairs[0].d.device)
    split_pairs = [
        _split_examples(layer, pair, group.num_examples) for pair in group.pairs
    ]
    for example_pairs in zip(*split_pairs, strict=True):
        gradients = [_gradient(layer, pair) for pair in example_pairs]
        gradient = torch.stack(gradients).sum(0)
        rotated = q_g.to(gradient).mT @ gradient
        if q_a is not None:
            rotated = rotated @ q_a.to(gradient)
        total.add_(rotated.square())
    return total


def _split_examples(layer: Layer, pair: Pair, num_examples: int) -> list[Pair]:
    """Split a pair into one pair for each example."""
    x = pair.x
    d = pair.d
    if layer.shape.diagonal_a:
        # As for a Linear, any leading dimensions can have the rows of the examples.
        x = x.reshape(num_examples, -1)
        d = d.reshape(num_examples, -1, d.shape[-1])
    dim = _batch_dim(pair)
    size = d.shape[dim] // num_examples
    ds = d.split(size, dim)
    xs: Sequence[Any]
    if isinstance(x, Routed):
        hidden = x.hidden.split(size, dim)
        index = x.index.split(size, dim)
        weights = x.weights.split(size, dim)
        xs = [Routed(*parts) for parts in zip(hidden, index, weights, strict=True)]
    else:
        xs = x.split(size, dim)
    return [Pair(pair.module, x, d) for x, d in zip(xs, ds, strict=True)]


def _gradient(layer: Layer, pair: Pair) -> Tensor:
    """Return the gradient of a layer's parameters as a matrix ``(groups, out, in)``."""
    gradients = [layer.kinds[pair.module].weight_gradient(pair.module, pair.x, pair.d)]
    if layer.has_bias:
        gradients.append(_bias_gradient(layer, pair))
    numels = [shape.numel() for shape in layer.shapes.values()]
    return to_matrices(gradients, matrix_layout(layer.shape, numels))


def _bias_gradient(layer: Layer, pair: Pair) -> Tensor:
    """Return the gradient of a layer's bias: the sum of the output gradients."""
    d = pair.d
    if isinstance(pair.x, Routed):
        _, routed = pair.x.pairs(pair.module, d)
        rows_by_expert = routed.by_weight[layer.weight_name].split(routed.counts)
        return torch.stack([rows.sum(0) for rows in rows_by_expert])
    if isinstance(pair.module, CONVOLUTIONS):
        return d.flatten(2).sum((0, 2))
    if _batch_dim(pair) == 1:
        return d.flatten(1, -2).sum(1).flatten()
    return d.reshape(-1, d.shape[-1]).sum(0)
