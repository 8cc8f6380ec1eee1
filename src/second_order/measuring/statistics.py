"""What is summed up over the data: of layers' inputs, of pairs, and EK-FAC's eigenvalues.

inputs    A += Σ x xᵀ over the rows that count
pairs     A, and G += Σ d dᵀ over all rows
ekfac     Λ += Σ_b (Q_Gᵀ ∇_b Q_A)², elementwise, ∇_b = Σ_t d_t x_tᵀ of an entry b of the batch,
          over all rows t of all calls of the layer (George et al. 2018, equation 9)

A and G of convolutions are those of Grosse and Martens 2016: A is a sum over an image's locations.

In the first batch the pairs are compared with the gradients of the weights, as
:mod:`second_order.kronecker.explanation` does it: a weight that is used outside of calls of its
module has a gradient that the pairs do not explain.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError
from second_order.kronecker.autograd import as_used
from second_order.kronecker.bank import as_matrices
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.experts import Routed
from second_order.kronecker.explanation import TOLERANCE, Explanation, residuals
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    KINDS,
    FactorShape,
    Form,
    LayerKind,
    Layout,
    gram,
    layout_of,
    linear_statistics,
)
from second_order.measuring.batches import Entries, Rows
from second_order.measuring.sums import Sums

__all__ = [
    "Basis",
    "Eigenvalues",
    "Inputs",
    "Layer",
    "Pairs",
    "Statistics",
    "guessed",
    "leaders_of",
    "read",
]

OTHERWISE = 0.05  # relative difference of a Linear's output from W x + b
UNEXPLAINED = (
    "its calls do not explain {residual:.0%} of its weight's gradient: if the weight is used "
    "outside of the module's calls, as F.linear(x, module.weight) does, call the module there"
)
WITHOUT_GRADIENTS = (
    "it was called where gradients are off, as in torch.no_grad() and in checkpoint(..., "
    "use_reentrant=True); use checkpoint(..., use_reentrant=False)"
)
SHARED = (
    "all entries of a batch share its input of shape {shape}, so the gradients of single entries "
    "are not known; give it a row for each entry, for example by position_ids of shape (entries, "
    "positions) in the batch"
)
POSITIONS_OR_ENTRIES = (
    "a batch has {number} entries and {number} positions, and a layer of the model reads positions "
    "first, so the two cannot be distinguished. Give batches of another size, or leave this one out"
)
CHUNK_BYTES = 2**26
"""Of the gradients of single entries of a batch that are there at once."""


@dataclass(eq=False)
class Layer:
    """A layer that is measured.

    Attributes:
        block: Its modules, and what they are.
        shape: Sizes of its factors; of the weight alone where inputs alone are measured.
        shapes: Shapes of its parameters, by name.
        letters: The names of its factors that are measured.
        assigned: The process that gets them, unless they share with a leader.
        leader: The layer whose A is this one's, as it reads the same tensor.
        rows: The number of rows in A's sum; of fused experts ``(groups,)``, each one's own.
        missing: Dimensions of A that so few rows cannot fill.
    """

    block: KroneckerBlock
    shape: FactorShape
    shapes: dict[str, torch.Size]
    letters: Sequence[str]
    assigned: int = 0
    leader: Layer | None = None
    rows: Any = 0
    missing: int = 0

    @property
    def name(self) -> str:
        """Its name."""
        return self.block.name

    @property
    def weight(self) -> nn.Parameter:
        """Its weight."""
        return self.block.weight

    @property
    def bias(self) -> bool:
        """Whether A has the homogeneous coordinate."""
        return len(self.shapes) > 1

    @property
    def owner(self) -> int:
        """The process that gets its factors."""
        return self.assigned if self.leader is None else self.leader.assigned

    def size(self, letter: str, packed: bool = True) -> torch.Size:
        """The shape of a factor as it is kept, a triangle if ``packed``."""
        return torch.Size(self.shape.stored_shape(letter, packed))

    def kind(self, module: nn.Module) -> LayerKind:
        """The rules for one of its modules."""
        key = self.block.keys[self.block.modules.index(module)]
        assert key is not None
        return KINDS[key]

    def linear(self, module: nn.Module) -> bool:
        """Whether one of its modules multiplies rows, as they are, by a matrix."""
        return self.kind(module).statistics is linear_statistics

    def no_rows(self, device: torch.device) -> Any:
        """What :attr:`rows` begins with."""
        if not self.shape.routed:
            return 0
        return torch.zeros(self.shape.groups, dtype=torch.int64, device=device)

    @property
    def letter(self) -> str:
        """The name of its weight within its module."""
        return self.kind(self.block.modules[0]).weight


def leaders_of(layers: Iterable[Layer]) -> dict[str, str]:
    """By name, the layers that share, and whose A is theirs."""
    return {each.name: each.leader.name for each in layers if each.leader is not None}


def guessed(layers: Iterable[Layer]) -> dict[nn.Module, bool]:
    """The modules that are taken for Linears by their sizes alone, and whether transposed."""
    return {
        module: layer.shape.transposed
        for layer in layers
        for module, key in zip(layer.block.modules, layer.block.keys, strict=True)
        if isinstance(key, str) and layer.linear(module)
    }


NOTHING = Entries(0, frozenset(), frozenset())
"""Before any batch."""


class Statistics:
    """What takes in the calls of layers, batch by batch."""

    def __init__(self, layers: Sequence[Layer], sums: Sums) -> None:
        self.layers, self.sums = list(layers), sums
        self.of: dict[nn.Module, list[Layer]] = {}  # fused experts are two
        for layer in layers:
            for module in layer.block.modules:
                self.of.setdefault(module, []).append(layer)
        self.rows = Rows((), torch.device("cpu"))  # of this batch
        self.batch = NOTHING
        self.idle = False  # calls count for nothing

    leaders: Mapping[str, str] | None = None
    """What :func:`leaders_of` tells of the layers; None before the first batch."""
    apart: Collection[str] = ()
    """Names of layers that share nothing."""
    differences: Mapping[nn.Module, Tensor] = {}
    """By module, how far it is from a Linear that it is taken for."""
    known_wrong: Mapping[str, str] = {}
    """By layer, what was wrong before a measurement was interrupted."""
    missed: Mapping[nn.Module, str] = {}
    """By module, why a call of it could not be taken in."""

    def wrong(self) -> dict[str, str]:
        """Layers that do not compute what a Linear does, or of which calls were lost, and why."""
        far = dict(zip(self.differences, read(list(self.differences.values())), strict=True))
        wrong = {
            layer.name: "it does not multiply its input by its weight, as its sizes suggest; "
            "tell how it computes by register_layer"
            for layer in self.layers
            for module in layer.block.modules
            if module in far and not far[module][0] < OTHERWISE
        }
        for module, why in self.missed.items():
            wrong |= {layer.name: why for layer in self.of[module]}
        return {**self.known_wrong, **wrong}

    def begin(self, rows: Rows, batch: Entries, idle: bool) -> None:
        """Begin a batch; an ``idle`` one counts for nothing."""
        self.rows = rows
        self.batch = batch
        self.idle = idle

    def end(self) -> None:
        """End a batch."""
        self.sums.end_batch()


class Inputs(Statistics):
    """A of layers, of which those that read one tensor share one.

    Which do, the first batch tells. ``apart``: names of layers that share nothing.
    """

    def __init__(self, layers: Sequence[Layer], sums: Sums, apart: Iterable[str]) -> None:
        super().__init__(layers, sums)
        self.apart: set[str] = set(apart)
        self._begun = False
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Layer]] = {}
        self._calls: Counter[Layer] = Counter()

    def begin(self, rows: Rows, batch: Entries, idle: bool) -> None:
        """Begin a batch."""
        super().begin(rows, batch, idle)
        self._begun |= not idle

    def take(self, module: nn.Module, x: Any, output: Any) -> None:
        """Take in a call of a module."""
        if self.idle:
            return
        if isinstance(x, Routed):
            self._of_experts(module, x)
            return
        (layer,) = self.of[module]
        self._calls[layer] += 1
        if layer.linear(module):
            if not isinstance(x, Tensor):
                raise SecondOrderError(f"layer {layer.name!r} was not called with one tensor")
            if x.shape[-1] != layer.shape.dims["A"] or self._is_led(layer, x):
                return  # the model will say what is wrong
            rows, number = self.rows.pick(x)
            layer.rows += number
            self.sums.gram((layer.name, "A"), as_used(rows))
            return
        a, examples = self._of_kind(layer, module, x, output)
        layer.rows += examples
        self.sums.add((layer.name, "A"), a)

    def _of_experts(self, module: nn.Module, call: Routed) -> None:
        """Take in the rows that experts multiply."""
        mask = self.rows.ones(call.hidden.shape[:1], call.hidden) != 0
        xs, _, _ = call.rows(module, mask)
        for layer in self.of[module]:
            wide = xs.of[layer.letter].to(self.sums.dtype).unsqueeze(0).split(xs.counts, 1)
            with _plainly(call.hidden.device):
                a = torch.cat([gram(rows, False, False) for rows in wide])
            layer.rows = layer.rows + torch.tensor(xs.counts, device=a.device)
            self.sums.add((layer.name, "A"), a)

    def _is_led(self, layer: Layer, x: Tensor) -> bool:
        """Whether another layer has taken this tensor in, in this batch."""
        known = self._seen.get(id(x))
        leader = None
        if known is not None and known[0]() is x and known[1] == x._version:
            leader = known[2]
        else:
            self._seen[id(x)] = weakref.ref(x), x._version, layer
        if self.leaders is None and self._calls[layer] == 1 and layer.name not in self.apart:
            layer.leader = leader if leader is not layer else None
        if layer.leader is not None and layer.leader is not leader:
            self.apart.add(layer.name)
        return layer.leader is not None

    def end(self) -> None:
        """End a batch; note layers that were called otherwise than those that share with them."""
        for layer in self.layers:
            if layer.leader is not None and self._calls[layer] != self._calls[layer.leader]:
                self.apart.add(layer.name)
        self._calls.clear()
        self._seen.clear()
        if self._begun:
            self.leaders = leaders_of(self.layers)
        super().end()

    def _of_kind(
        self, layer: Layer, module: nn.Module, x: Any, output: Any
    ) -> tuple[Tensor, int | Tensor]:
        """A's sum, and the number of its rows, by a layer's own rule.

        The rule leaves out rows whose gradient is zero: it is shown gradients of few ones.
        """
        kind, rows = layer.kind(module), self.rows
        if kind is KINDS[nn.MultiheadAttention]:
            counted = [rows.ones(t.shape[:2], t).unsqueeze(-1) for t in x]
            x, d = torch.stack(_padded(x)), torch.stack(_padded(counted))
        elif isinstance(module, CONVOLUTIONS):
            whole = (*output.shape,) if output.dim() == x.dim() else (1, *output.shape)
            lone = len(whole) == len(module.kernel_size) + 1
            spatial = whole[1:] if lone else whole[2:]
            entries = (1,) if lone else whole[:1]
            x = x.unsqueeze(0) if lone else x
            ones = rows.ones(torch.Size(entries), x)
            d = ones.view(-1, *[1] * (1 + len(spatial))).expand(-1, module.groups, *spatial)
        elif layer.shape.diagonal_a:
            d = rows.ones(x.shape, output).unsqueeze(-1)
        else:  # of a user's class
            d = rows.ones(output.shape[:-1], output).unsqueeze(-1).expand(output.shape)
        wide = torch.promote_types(d.dtype, torch.float32)
        x = as_used(x).to(wide) if x.is_floating_point() else x
        with _plainly(d.device):
            form = Form(bias=False, approximation="expand")
            pair = kind.statistics(module, x, d.to(wide), form)
        return pair.factors["A"], pair.examples


def _padded(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys and values of one batch and one length, filled up by zeros."""
    most, longest = (max(t.shape[i] for t in inputs) for i in (0, 1))
    whole = (t.expand(most, *t.shape[1:]) for t in inputs)
    return [nn.functional.pad(t, (0, 0, 0, longest - t.shape[1])) for t in whole]


@contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """A block of products in full float32: without TF32 and without autocast."""
    with ieee_matmul(device), torch.autocast(device.type, enabled=False):
        yield


class Pairs(Statistics):
    """A and G of layers; a consumer of :class:`~second_order.kronecker.capture.Capture`.

    Args:
        layers: The layers.
        sums: Their sums.
        by_entry: The gradients of single entries are wanted, now or in a later pass.
        comparable: Pairs are to be compared with gradients in the first batch.

    Attributes:
        entries: The number of entries of this batch.
        compares: Whether pairs are compared with the gradients of the weights in this batch.
    """

    def __init__(
        self, layers: Sequence[Layer], sums: Sums, by_entry: bool, comparable: bool
    ) -> None:
        super().__init__(layers, sums)
        self.entries = 0
        self.compares = False
        self._comparable = comparable
        self._by_entry = by_entry
        self._positions_first = False  # a module of the model reads positions before entries
        self._paired: set[Layer] = set()
        self._without_gradients: set[Layer] = set()
        self._explanations: dict[Layer, Explanation] = {}
        self._unexplained: dict[str, str] = {}
        self._shared: dict[str, str] = {}
        self._single: dict[str, str] = {}  # layers of which a call had one row, and the same
        self._several: set[str] = set()  # layers of which a call had another number of rows
        self._last: tuple[tuple[int, int, bool], tuple[Tensor, int]] | None = None

    def begin(self, rows: Rows, batch: Entries, idle: bool) -> None:
        """Begin a batch."""
        super().begin(rows, batch, idle)
        self.entries = batch.number
        self.compares = self._comparable and batch.number > 0 and not idle
        self._last = None  # rows of one tensor

    def end(self) -> None:
        """End a batch; compare its pairs with gradients, if that is due."""
        if self.compares:
            self._comparable = False
        self.compares = False
        known = {layer: each for layer, each in self._explanations.items() if each.known}
        self._explanations = {}
        found = residuals(list(known.values())) if known else []
        for layer, residual in zip(known, found, strict=True):
            if residual > TOLERANCE:
                self._unexplained[layer.name] = UNEXPLAINED.format(residual=residual)
        super().end()

    def wrong(self) -> dict[str, str]:
        """Layers without factors, and why."""
        never = self._without_gradients - self._paired
        without = {layer.name: WITHOUT_GRADIENTS for layer in never}
        # A call of a single row may be of one entry, if others have more: those of a router.
        shared = {name: why for name, why in self._single.items() if name not in self._several}
        return {**without, **shared, **self._shared, **self._unexplained, **super().wrong()}

    def wants(self, module: nn.Module) -> bool:
        """Whether pairs of a module are wanted."""
        return module in self.of and not self.idle

    def see_call(self, module: nn.Module) -> None:
        """See a call of a module in a forward pass."""
        if not torch.is_grad_enabled():
            self._without_gradients.update(self.of.get(module, ()))

    def see_positions_first(self, positions: int, entries: int) -> None:
        """See a call of a module that reads ``(positions, entries, ...)``.

        Raises:
            ValueError: If the two cannot be distinguished, and gradients of entries are wanted.
        """
        self._positions_first = True
        if entries != self.batch.number and entries in self.batch.seconds:
            self.entries = entries
        if self._by_entry and positions == entries == self.entries > 1:
            raise ValueError(POSITIONS_OR_ENTRIES.format(number=entries))

    def consume(
        self,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        pass_id: int,
        source: int = -1,
        again: bool = False,
    ) -> None:
        """Take in a pair."""
        for layer in self.of[module]:
            self._paired.add(layer)
            single = layer.linear(module) and x.dim() == 2 and len(x) == 1
            if self._is_shared(layer, module, x):
                shared = self._single if single else self._shared
                shared[layer.name] = SHARED.format(shape=tuple(x.shape))
            elif self.entries > 1 and not single:
                self._several.add(layer.name)
            if self.compares:
                self._compare(layer, module, x, d)
            self._add(layer, module, x, d, (source, pass_id))

    def _is_shared(self, layer: Layer, module: nn.Module, x: Any) -> bool:
        """Whether the entries of a batch share an input, as the indices of positions."""
        number = self.entries
        indices = layer.shape.diagonal_a
        if number < 2 or not (indices or layer.linear(module)):
            return False
        rows = x.shape if indices else x.shape[:-1]
        tensors = [of for of in self.batch.shapes if of[0] == self.batch.number]
        flattened = {size for of in tensors for size in (of.numel(), of[:-1].numel())}
        if len(rows) == 0:
            return True
        if rows[0] == 1:
            packed = rows.numel() > number and rows.numel() in flattened
            one_position = self._positions_first or x.shape in self.batch.shapes
            return not (packed or (number in rows[1:2] and one_position))
        if not indices:
            return False
        if rows == (number,) and rows not in self.batch.shapes:
            return bool((x.diff() == 1).all())  # as many positions as entries
        if number in rows[:2] or rows.numel() in flattened:
            return False
        return len(rows) > 1 or bool((x.diff() == 1).all())

    def _compare(self, layer: Layer, module: nn.Module, x: Any, d: Tensor) -> None:
        """Compare a pair with the weight's gradient, which is about to arrive."""
        if layer.weight.requires_grad and layer.block.fits_pair(module, x, d):
            rows = x if isinstance(x, Tensor) else x.hidden
            with ieee_matmul(d.device):
                product = layer.block.product(module, x, d)
                explanation = self._explanations.setdefault(layer, Explanation())
                explanation.add(product, rows, d, layer.weight)

    def _add(self, layer: Layer, module: nn.Module, x: Any, d: Tensor, of: tuple[int, int]) -> None:
        sums = self.sums
        if layer.linear(module):
            key = *of, layer.bias
            if self._last is None or self._last[0] != key or of[0] < 0:
                pick = self.rows.pick_homogeneous if layer.bias else self.rows.pick
                self._last = key, pick(x)
            rows, number = self._last[1]
            layer.rows += number
            sums.gram((layer.name, "A"), rows)
            sums.gram((layer.name, "G"), d.reshape(-1, d.shape[-1]))
            return
        wide = torch.promote_types(d.dtype, torch.float32)
        with ieee_matmul(d.device):
            form = Form(layer.bias, approximation="expand")
            pair = layer.kind(module).statistics(module, _widened(x, wide), d.to(wide), form)
        if pair.routed is None:
            layer.rows = layer.rows + pair.examples
        else:
            layer.rows = layer.rows + pair.routed.to(torch.int64)
        for letter, factor in pair.factors.items():
            sums.add((layer.name, letter), factor)


@dataclass(frozen=True)
class Basis:
    """Eigenvectors of A, None where it is diagonal, and of G: ``(groups, n, n)``."""

    a: Tensor | None
    g: Tensor


@dataclass(frozen=True)
class Pair:
    """A pair of a module, in float32 at least."""

    module: nn.Module
    x: Any
    d: Tensor


class Eigenvalues(Pairs):
    """The second moment of entries' gradients in the eigenbasis of A and G.

    An entry's gradient is that of all calls of a layer, so the pairs of one that is called more
    than once are kept until the last of them has come.
    """

    def __init__(self, layers: Sequence[Layer], sums: Sums, bases: Mapping[str, Basis]) -> None:
        super().__init__(layers, sums, by_entry=True, comparable=False)
        self._bases = bases
        self._calls: Counter[Layer] = Counter()  # in this batch
        self._waiting: dict[Layer, list[Pair]] = {}
        self.scattered: set[str] = set()  # layers whose rows have unknown entries

    def see_call(self, module: nn.Module) -> None:
        """See a call of a module in a forward pass."""
        self._calls.update(self.of.get(module, ()))

    def consume(
        self,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        pass_id: int,
        source: int = -1,
        again: bool = False,
    ) -> None:
        """Take in a pair."""
        wide = torch.promote_types(d.dtype, torch.float32)
        pair = Pair(module, _widened(x, wide), d.to(wide))
        for layer in self.of[module]:
            waiting = self._waiting.setdefault(layer, [])
            waiting.append(pair)
            if len(waiting) >= self._calls[layer]:
                self._take_in(layer, self._waiting.pop(layer))

    def end(self) -> None:
        """End a batch, with the pairs of layers of which some calls have no gradient."""
        for layer in list(self._waiting):
            self._take_in(layer, self._waiting.pop(layer))
        self._calls.clear()
        super().end()

    def _take_in(self, layer: Layer, pairs: Sequence[Pair]) -> None:
        """Add the squares of the gradients of all entries of a batch."""
        basis = self._bases[layer.name]
        by_rows = all(layer.linear(pair.module) for pair in pairs)
        square = self._of_rows if by_rows else self._of_gradients
        device = pairs[0].d.device
        with torch.no_grad(), ieee_matmul(device), torch.autocast(device.type, enabled=False):
            whole = [pair for pair in pairs if self._entries_in(layer, pair) == self.entries]
            total = square(layer, basis, whole, self.entries) if whole else None
            for pair in pairs:
                entries = self._entries_in(layer, pair)
                if entries != self.entries:
                    self.scattered.add(layer.name)
                    found = square(layer, basis, [pair], entries)
                    total = found if total is None else total.add_(found)
        assert total is not None
        self.sums.add((layer.name, "F"), total)

    def _entries_in(self, layer: Layer, pair: Pair) -> int:
        """The number of entries that the rows of a pair belong to.

        If that is not known, each row counts as an entry.
        """
        d = pair.d
        if layer.linear(pair.module) or layer.shape.diagonal_a:
            count = d.numel() // d.shape[-1]
            flat = d.dim() == 2 or len(d) == 1
            mixed = flat and count > self.entries > 1 and self._positions_first
            leading = count if flat else len(d)
            known = self._entries_second(d) or (self.entries and not leading % self.entries)
            return self.entries if known and not mixed else count
        along = self._along(layer, pair)
        return (
            self.entries if self.entries and not d.shape[along] % self.entries else d.shape[along]
        )

    def _entries_second(self, d: Tensor) -> bool:
        """Whether the entries of ``(positions, entries, ...)`` come second.

        If there are so many rows in windows ``(entries * windows, rows, ...)``, they do not.
        """
        if d.dim() < 3 or not len(d) != self.entries == d.shape[1]:
            return False
        in_batch = any(len(d) in shape[:2] for shape in self.batch.shapes)
        return self._positions_first or in_batch or len(d) % self.entries > 0

    def _along(self, layer: Layer, pair: Pair) -> int:
        """The dimension of the entries of a pair that is no matrix's."""
        attention = layer.kind(pair.module) is KINDS[nn.MultiheadAttention]
        return int(pair.d.dim() > 3 and attention)  # after the thirds

    def _of_rows(self, layer: Layer, basis: Basis, pairs: Sequence[Pair], entries: int) -> Tensor:
        """Λ of a matrix's rows, ``(..., in)`` and ``(..., out)``."""
        assert basis.a is not None
        a, g = basis.a[0], basis.g[0]
        inputs, gradients = [], []
        for pair in pairs:
            x, d = pair.x, pair.d
            if self._entries_second(d):
                x, d = x.transpose(0, 1), d.transpose(0, 1)
            if d.numel():
                inputs.append(x.reshape(entries, -1, x.shape[-1]))
                gradients.append(d.reshape(entries, -1, d.shape[-1]))
        if not inputs:
            return pairs[0].d.new_zeros(1, *g.shape[1:], a.shape[-1])
        x = torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]
        d = torch.cat(gradients, 1) if len(gradients) > 1 else gradients[0]

        a = a.to(x.dtype)
        x = x @ a[:-1] + a[-1] if layer.bias else x @ a
        d = d @ g.to(d.dtype)
        if d.shape[1] == 1:
            return (d[:, 0].square().mT @ x[:, 0].square()).unsqueeze(0)
        total = x.new_zeros(1, d.shape[-1], x.shape[-1])
        each = max(1, CHUNK_BYTES // (total.nbytes or 1))
        for xs, ds in zip(x.split(each), d.split(each), strict=True):
            total[0].add_((ds.mT @ xs).square_().sum(0))
        return total

    def _of_gradients(
        self, layer: Layer, basis: Basis, pairs: Sequence[Pair], entries: int
    ) -> Tensor:
        """Λ of any kind of layer, one entry of the batch after the other."""
        layout = layout_of(layer.shape, _sizes(layer))
        split = [self._by_entry_of(layer, pair, entries) for pair in pairs]
        total: Tensor | None = None
        for of_entry in zip(*split, strict=True):
            matrix = torch.stack([_gradient(layer, part, layout) for part in of_entry]).sum(0)
            rotated = basis.g.to(matrix.dtype).mT @ matrix
            rotated = rotated if basis.a is None else rotated @ basis.a.to(matrix.dtype)
            total = rotated.square() if total is None else total.add_(rotated.square())
        if total is None:
            return basis.g.new_zeros(layer.shape.gradient_size)
        return total

    def _by_entry_of(self, layer: Layer, pair: Pair, entries: int) -> list[Pair]:
        """The parts of a pair that are those of single entries."""
        module, x, d = pair.module, pair.x, pair.d
        along = self._along(layer, pair)
        if (layer.shape.diagonal_a or layer.linear(module)) and self._entries_second(d):
            x, d = x.transpose(0, 1), d.transpose(0, 1)
        each = max(1, d.shape[along] // max(entries, 1))
        parts = zip(_split(x, each, along), d.split(each, along), strict=True)
        return [Pair(module, xs, ds) for xs, ds in parts]


def _gradient(layer: Layer, pair: Pair, layout: Layout) -> Tensor:
    """The gradient of a layer's parameters as a matrix ``(groups, out, in)``."""
    parts = [layer.kind(pair.module).gradient(pair.module, pair.x, pair.d)]
    if layer.bias:
        attention = layer.kind(pair.module) is KINDS[nn.MultiheadAttention]
        thirds = int(pair.d.dim() > 3 and attention)
        parts.append(_gradient_of_bias(layer, pair.module, pair.x, pair.d, thirds))
    return as_matrices(parts, layout)


def _sizes(layer: Layer) -> list[int]:
    return [size.numel() for size in layer.shapes.values()]


def _widened(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _split(x: Any, each: int, along: int) -> Sequence[Any]:
    if not isinstance(x, Routed):
        return cast(Sequence[Any], x.split(each, along))
    parts = (x.hidden.split(each), x.index.split(each), x.weights.split(each))
    return [Routed(*part) for part in zip(*parts, strict=True)]


def _gradient_of_bias(layer: Layer, module: nn.Module, x: Any, d: Tensor, thirds: int) -> Tensor:
    """The gradient of a bias, of one entry's input and output gradient."""
    if isinstance(x, Routed):
        _, ds = x.pairs(module, d)
        return torch.stack([rows.sum(0) for rows in ds.of[layer.letter].split(ds.counts)])
    if isinstance(module, CONVOLUTIONS):
        return d.flatten(2).sum((0, 2))
    if thirds:
        return d.flatten(1, -2).sum(1).flatten()
    return d.reshape(-1, d.shape[-1]).sum(0)


def read(numbers: Sequence[Any]) -> list[list[float]]:
    """Numbers, of which some may be scalars or vectors on a device, in one look at it."""
    tensors = [n.reshape(-1) for n in numbers if isinstance(n, Tensor)]
    known = iter(torch.cat([t.double().cpu() for t in tensors]).tolist() if tensors else ())
    return [
        [next(known) for _ in range(n.numel())] if isinstance(n, Tensor) else [float(n)]
        for n in numbers
    ]
