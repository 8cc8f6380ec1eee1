"""Decides which rows of a backward pass are terms of its loss, and which rows take part in it.

The loss is a mean over N terms. N is one number for all layers of a pass, and G = N Σ d dᵀ. A is
the mean of x xᵀ over the rows that take part. A gradient may happen to vanish at one layer: dead
units, dropped paths, a hinge, tokens that went to another expert. This must change neither N nor A.
A leaves out only what the loss does not count at all: padding, and labels that the loss ignores.

Layers whose inputs have the same leading dimensions see the same rows. A layer that sees these
rows flattened sees the same rows too. Rows are of one of three types. The leading dimensions of
all layers decide the type once the pass is over:

    positions   Shape (B, T, ...), or B T rows where another layer has (B, T), or tokens of fused
                experts. A row takes part if it has a gradient at any layer that sees it.
    examples    Shape (B, ...) at a convolution, or B rows otherwise. All take part, even without a
                gradient: the loss may be flat for an example (hinge, clipped ratios) and is still
                a mean over the batch. Examples whose label a cross-entropy ignores are left out.
    selected    n rows, where other layers have positions and neither B nor B T is n. These are
                tokens that were picked, for example for an expert. A row takes part if it has a
                gradient at this very layer.

The layer called last receives its gradient first. It shows the terms: its examples, or those of its
positions that have a gradient. It may be called several times in one pass. The terms are those of
all its calls if the calls have different numbers of rows, or if they add up to the rows of another
layer. Tokens without a label, such as a prompt's, are not terms, but they take part. If the terms
are examples and an example has no gradient at any position, all its positions take part.

A cross-entropy is recognized by its gradients, c (p - y), where p is the softmax of the layer's
outputs. If a row has no gradient, and p is not rounded to 0 and 1, its label is ignored. If c is
one over the number of all rows, the loss is a mean over all rows, and all rows are terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from second_order.kronecker.autograd import is_attention
from second_order.kronecker.experts import Routed
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    LayerKind,
    LiveRows,
    all_rows,
    gram,
    live_rows,
    rows_in,
)
from second_order.sharded import is_dtensor

__all__ = [
    "BackwardPass",
    "LateCount",
    "LatePair",
    "LateRows",
    "Ledger",
    "PairRows",
    "RowGroup",
    "Terms",
    "next_serial",
    "rows_of",
]

CHANNELS_SECOND = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm),
)
"""Norms with channels in dimension 1. Their rows are whole examples."""

PLAIN, ROUTED, ATTENTION = "", "routed", "attention"
"""Families of rows: an attention's are ``(batch, positions)`` however its inputs lie."""

MOST_PASSES = 256  # a step keeps fewer passes than this without pruning
COMPARED = 64  # the most rows that are compared to recognize a cross-entropy
SAME = 1e-3  # relative tolerance of that comparison, in float32
SATURATED = 1e-6  # 1 - p below which a gradient of p - y may be rounded to zero


class PairRows(NamedTuple):
    """The rows of a captured pair."""

    family: str
    shape: tuple[int, ...]  # leading dimensions
    gradient: Tensor  # (parts rows, out)
    examples: bool = False  # known to be a batch's examples, whatever other layers see
    parts: int = 1  # 3 for queries, keys and values that have inputs of their own


def rows_of(module: nn.Module, kind: LayerKind | None, x: Any, d: Tensor) -> PairRows:
    """The rows of a module's pair (x, d). The ``kind`` of a norm is None."""
    if isinstance(x, Routed):
        return PairRows(ROUTED, (len(d),), d)
    if isinstance(module, CONVOLUTIONS):
        batched = d.dim() > len(module.kernel_size) + 1
        whole = d if batched else d.unsqueeze(0)
        return PairRows(PLAIN, (len(whole),), whole.flatten(1), True)
    if isinstance(module, CHANNELS_SECOND):
        return PairRows(PLAIN, (len(d),), d.flatten(1), True)
    if kind is not None and kind.rows is not None:
        _, d = kind.rows(module, x, d)
    family, parts, leading = PLAIN, 1, d.shape[:-1]
    if is_attention(module) or isinstance(module, NonDynamicallyQuantizableLinear):
        family = ATTENTION
        parts = 3 if len(leading) == 3 and is_attention(module) else 1
        leading = leading[-2:]
    elif kind is None:  # of a norm: its gain may have several dimensions
        gain = cast(Tensor, next(iter(module._parameters.values())))
        leading = d.shape[: max(d.dim() - gain.dim(), 0)]
    # (B, 1, ...) has the examples of (B, ...).
    while len(leading) > 1 and leading[-1] == 1:
        leading = leading[:-1]
    number = parts * math.prod(leading)
    # -1 is ambiguous if a rank has an empty batch.
    flat = d.reshape(number, -1) if number > 0 else d.reshape(0, d.shape[-1])
    return PairRows(family, tuple(leading) or (1,), flat, parts=parts)


@dataclass
class RowGroup:
    """Rows that several layers see."""

    family: str
    shape: tuple[int, ...]
    examples: bool = False
    selected: bool = False  # of one call alone
    alive: Tensor | None = None  # those with a gradient at any layer so far, (rows,)
    everything: bool = False  # all have had a gradient

    @property
    def number(self) -> int:
        """The number of rows."""
        return math.prod(self.shape)

    def add(self, live: LiveRows) -> None:
        """Take in which rows have a gradient at another layer."""
        if self.everything:
            return
        if live.mask is None:
            self.everything = True
            self.alive = None
            return
        before = self.alive
        self.alive = live.mask if before is None else before | live.mask.to(before.device)
        if self.alive.device.type == "cpu" and bool(self.alive.all()):
            self.everything = True
            self.alive = None


class _Last(NamedTuple):
    """A call of the layer called last."""

    group: RowGroup
    live: LiveRows  # its rows with a gradient
    all_terms: bool  # whether labels were drawn for all its rows


@dataclass
class LateRows:
    """Inputs of rows without a gradient so far. The end of the pass decides if A has them."""

    group: RowGroup
    index: Tensor  # of the rows in the group
    x: Tensor  # (rows, in)
    bias: bool
    packed: bool
    groups: int  # copies of A
    add: Callable[[Tensor, int | Tensor], None]

    def settle(self, ended: BackwardPass) -> None:
        """Add those that take part after all."""
        mask = ended.mask(self.group)
        live = all_rows(len(self.x))
        if mask is not None:
            live = rows_in(mask.to(self.x.device)[self.index])
        if isinstance(live.count, int) and live.count == 0:
            return
        a = gram(live.pick(self.x).unsqueeze(0), self.bias, self.packed, live.count)
        self.add(a.expand(self.groups, *a.shape[1:]).clone() if self.groups > 1 else a, live.count)


@dataclass
class LateCount:
    """Rows without a gradient so far of a layer whose A is 1."""

    group: RowGroup
    index: Tensor  # of the rows in the group
    ones: Tensor  # (groups, 1)
    add: Callable[[Tensor, int | Tensor], None]

    def settle(self, ended: BackwardPass) -> None:
        """Count those that take part after all."""
        mask = ended.mask(self.group)
        live = all_rows(len(self.index))
        if mask is not None:
            live = rows_in(mask.to(self.index.device)[self.index])
        self.add(self.ones * live.count, live.count)


@dataclass
class LatePair:
    """A pair that waits as a whole, because its A is not a sum over single rows."""

    groups: Sequence[RowGroup]
    staged: Any  # the statistics that expect it
    add: Callable[[LiveRows], None]

    def __post_init__(self) -> None:
        self.cleared = self.staged.cleared

    def settle(self, ended: BackwardPass) -> None:
        """Add the pair, if it is still expected."""
        if self.cleared == self.staged.cleared:
            self.add(ended.rows_in(self.groups))


_serials = itertools.count(1)


def next_serial() -> int:
    """A number that is larger than all before."""
    return next(_serials)


class BackwardPass:
    """The rows that the layers of a backward pass see.

    With ``reduce``, all positions of an example make one term.

    Attributes:
        number: The number of the pass, which all its pairs share.
        again: Whether an earlier pass went through the same calls of layers.
        layers: The staged statistics that it has pairs of.
        terms: N, once it is counted. On a device it may be a scalar tensor.
    """

    def __init__(
        self,
        number: int,
        reduce: bool = False,
        gradient_scale: Callable[[Tensor], Tensor | float] = lambda gradient: 1.0,
    ) -> None:
        self.number = number
        self._reduce = reduce
        self._gradient_scale = gradient_scale
        self.serial = next_serial()
        self.again = False
        self.layers: dict[int, Any] = {}
        self.terms: float | Tensor | None = None
        self.ending = False  # it will be settled when autograd's pass ends
        self.first: nn.Module | None = None
        self._groups: dict[Hashable, RowGroup] = {}
        self._positions: set[int] = set()  # numbers of rows that are known to be positions
        self._batches: set[int] = set()  # numbers that may be those of examples
        self._last: _Last | None = None
        self._earlier: list[_Last] = []  # the other calls of that layer
        self._labeled: LiveRows | None = None  # examples whose labels count, if not all do
        self._unread: Callable[[], Tensor | None] | None = None  # finds them, on a device
        self.late: list[LateRows | LateCount | LatePair] = []

    # ------------------------------------------------------------------------------- pair by pair

    def groups_of(self, rows: PairRows) -> list[RowGroup]:
        """The groups of a pair's rows, one group for each part."""
        family, shape = rows.family, rows.shape
        found = []
        for part in range(rows.parts):
            key: Hashable = (family, shape, part, rows.examples)
            group = self._groups.get(key)
            if group is None:
                group = RowGroup(family, shape, rows.examples)
                if self._what(group) == "selected":  # as is known when its layer arrives
                    group.selected, key = True, len(self._groups)
                self._groups[key] = group
                if len(shape) > 1 or family == ROUTED:
                    self._positions.add(group.number)
                if len(shape) > 1:
                    self._batches.update(shape[:2])
                if group.examples:
                    self._batches.add(group.number)
            found.append(group)
        return found

    def see(
        self,
        rows: PairRows,
        groups: list[RowGroup],
        module: nn.Module,
        x: Any,
        drawn: bool,
    ) -> LiveRows:
        """See a pair, and read which of its rows have had a gradient so far."""
        gradients = rows.gradient.chunk(rows.parts) if rows.parts > 1 else (rows.gradient,)
        for group, gradient in zip(groups, gradients, strict=True):
            if group.everything or group.examples:
                live = all_rows(group.number)
            else:
                live = _read(live_rows(gradient))
                group.add(live)
            if self._last is None:
                self._begin(_Last(group, live, drawn), module, x, gradient)
            elif module is self.first and len(groups) == 1:
                self._earlier.append(_terms_of_call(group, gradient, drawn))
        return self.alive_in(groups)

    def begin(
        self, rows: PairRows, group: RowGroup, module: nn.Module, x: Any, drawn: bool
    ) -> None:
        """See the layer called last on a device, whose gradients are not read before the end."""
        gradient = rows.gradient[: group.number]
        if self._last is None:
            self._begin(_terms_of_call(group, gradient, drawn), module, x, gradient)
        elif module is self.first and rows.parts == 1:
            self._earlier.append(_terms_of_call(group, gradient, drawn))

    def _begin(self, last: _Last, module: nn.Module, x: Any, gradient: Tensor) -> None:
        self._last, self.first = last, module
        flat = len(last.group.shape) == 1 and not last.group.examples and not last.all_terms
        if flat and last.live.mask is not None:
            scale = self._gradient_scale
            self._unread = partial(counted_labels, module, x, gradient, last.live, scale)
            if gradient.device.type == "cpu":
                self.read_labels()

    def read_labels(self) -> None:
        """Find labels that are ignored, if rows are examples; the host waits for a device once."""
        unread, self._unread = self._unread, None
        last = self._last
        if unread is None or last is None or self._what(last.group) != "examples":
            return
        if int(last.live.count) < last.group.number:
            counted = unread()
            self._labeled = None if counted is None else rows_in(counted)

    def alive(self, group: RowGroup) -> LiveRows:
        """The rows that have had a gradient so far."""
        if group.everything or group.examples:
            live = all_rows(group.number)
            return self._with_labels(group, live) if group.examples else live
        if group.alive is None:
            return LiveRows(torch.zeros(group.number, dtype=torch.bool, device="cpu"), 0)
        return rows_in(group.alive)

    def _with_labels(self, group: RowGroup, live: LiveRows) -> LiveRows:
        labeled = self._labeled
        if labeled is None or labeled.mask is None or len(labeled.mask) != group.number:
            return live
        return labeled

    def alive_in(self, groups: Sequence[RowGroup]) -> LiveRows:
        """The rows of some groups, one after the other, that have had a gradient so far."""
        each = list(map(self.alive, groups))
        return each[0] if len(each) == 1 else _joined(each)

    def rows_in(self, groups: Sequence[RowGroup]) -> LiveRows:
        """The rows of some groups, one after the other, that take part, as the pass is over."""
        each = []
        for group in groups:
            mask = self.mask(group)
            each.append(all_rows(group.number) if mask is None else rows_in(mask))
        return each[0] if len(each) == 1 else _joined(each)

    @property
    def unsettled(self) -> bool:
        """Whether pairs have come since the pass was settled."""
        return bool(self._groups)

    @property
    def decided(self) -> bool:
        """Whether layers that are still to come can, as a rule, change nothing."""
        whole = all(group.everything or group.examples for group in self._groups.values())
        return self._last is not None and whole and not self.late and self._labeled is None

    # ------------------------------------------------------------------------------ as a whole

    def _what(self, group: RowGroup) -> str:
        """What rows are: "examples", "positions" or "selected"."""
        if group.examples:
            return "examples"
        if len(group.shape) > 1 or group.family == ROUTED:
            return "positions"
        if group.number in self._positions:
            return "positions"
        if not self._positions:
            return "examples"
        if group.selected or group.number not in self._batches:
            return "selected"
        return "examples"

    def masked(self, group: RowGroup) -> bool:
        """Whether rows may be left out, as the pass is over."""
        if group.everything:
            return False
        return self._what(group) != "examples" or self._labeled is not None

    def mask(self, group: RowGroup) -> Tensor | None:
        """The rows that take part, ``(rows,)``, as the pass is over; None if all do."""
        what = self._what(group)
        if group.everything:
            return None
        if what == "examples":
            labeled = self._labeled
            if labeled is None or labeled.mask is None or len(labeled.mask) != group.number:
                return None
            return labeled.mask if group.alive is None else labeled.mask | group.alive
        if what == "selected" or group.family == ATTENTION:
            same = [group]
        else:
            same = self._same_rows(group)
        if any(each.everything for each in same):
            return None
        masks = [each.alive for each in same if each.alive is not None]
        if not masks:
            return None
        alive = masks[0]
        for other in masks[1:]:
            alive = alive | other.to(alive.device)
        shape = next((each.shape for each in same if len(each.shape) > 1), group.shape)
        return alive if what == "selected" else self._with_whole_examples(alive, shape)

    def _same_rows(self, group: RowGroup) -> list[RowGroup]:
        """The groups whose rows are those of a group, flattened or not."""
        number = group.number
        plain = [g for g in self._groups.values() if g.number == number and g.family != ATTENTION]
        shapes = [g.shape for g in plain if len(g.shape) > 1]
        flat = [g for g in plain if len(g.shape) == 1 and not g.examples]
        if len(group.shape) == 1:
            return flat + [g for g in plain if shapes and g.shape == shapes[0]]
        same = [g for g in plain if g.shape == group.shape]
        return same + flat if group.shape == shapes[0] else same

    def _with_whole_examples(self, alive: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Adds all positions of examples without any gradient, if the terms are examples."""
        last = self._last
        if last is None or len(shape) < 2 or self._what(last.group) != "examples":
            return alive
        number = last.group.number
        if number not in shape[:2]:
            return alive
        dim = shape[:2].index(number)
        parts = alive.view(shape).movedim(dim, 0).flatten(1)
        whole = ~parts.any(1)
        if self._labeled is not None and self._labeled.mask is not None:
            whole = whole & self._labeled.mask.to(whole.device)
        expanded = [1] * len(shape)
        expanded[dim] = number
        return (alive.view(shape) | whole.view(expanded)).flatten()

    def count_terms(self) -> float | Tensor:
        """N, as the pass is over."""
        if self.terms is not None:
            return self.terms
        last = self._last
        if last is None:
            return 0.0
        calls = [last, *self._earlier] if self._in_parts() else [last]
        seen = _sum_of([self._rows_seen(call) for call in calls])
        if isinstance(seen, Tensor) or seen == 0.0:
            # The layer called last has no gradient: its terms are the rows that take part.
            other = _sum_of([self._rows_of_call(call) for call in calls])
            seen = _first_positive(seen, other)
        self.terms = seen
        return self.terms

    def _in_parts(self) -> bool:
        """Whether each call of the layer called last has its own part of the terms.

        This holds if the calls' numbers of rows differ (sequences one by one), or add up to the
        rows of another layer (logits in chunks). Otherwise one call may follow the other.
        """
        last = self._last
        if last is None or not self._earlier:
            return False
        numbers = [call.group.number for call in (last, *self._earlier)]
        if len({*numbers}) > 1:
            return True
        return any(group.number == sum(numbers) for group in self._groups.values())

    def _rows_seen(self, call: _Last) -> float | Tensor:
        """The terms that the gradient of a call shows."""
        group = call.group
        pooled = self._reduce and len(group.shape) > 1
        if call.all_terms:
            return float(group.shape[0] if pooled else group.number)
        if self._what(group) == "examples":
            counted = self._labeled if call is self._last else None
            return float(group.number) if counted is None else counted.count
        live = call.live.parts(group.shape[0]) if pooled else call.live
        return live.count

    def _rows_of_call(self, call: _Last) -> float | Tensor:
        """The rows of a call that take part."""
        group = call.group
        alive = self.mask(group)
        live = all_rows(group.number) if alive is None else rows_in(alive)
        pooled = self._reduce and len(group.shape) > 1
        return live.parts(group.shape[0]).count if pooled else live.count

    def forget(self) -> None:
        """Let go of what is not needed once the pass is over."""
        self._groups.clear()
        self._positions.clear()
        self._batches.clear()
        self._earlier.clear()
        self.late.clear()


def _terms_of_call(group: RowGroup, gradient: Tensor, drawn: bool) -> _Last:
    """A call of the layer called last."""
    live = all_rows(group.number) if group.examples else live_rows(gradient)
    return _Last(group, live, drawn)


def _first_positive(first: float | Tensor, second: float | Tensor) -> float | Tensor:
    """The first of two numbers unless it is zero."""
    if isinstance(first, Tensor):
        return torch.where(first > 0, first, torch.as_tensor(second, device=first.device))
    return first if first > 0 else second


def _read(live: LiveRows) -> LiveRows:
    """Live rows without a mask, if the host finds that all rows on a device count."""
    if live.mask is None or live.mask.device.type == "cpu":
        return live
    return LiveRows(None, len(live.mask)) if bool(live.mask.all()) else live


def _joined(each: list[LiveRows]) -> LiveRows:
    if all(live.mask is None for live in each):
        return all_rows(sum(int(live.count) for live in each))
    device = next(live.mask.device for live in each if live.mask is not None)
    masks = []
    for live in each:
        if live.mask is None:
            masks.append(torch.ones(int(live.count), dtype=torch.bool, device=device))
        else:
            masks.append(live.mask)
    return rows_in(torch.cat(masks))


def counted_labels(
    module: nn.Module,
    x: Any,
    d: Tensor,
    live: LiveRows,
    gradient_scale: Callable[[Tensor], Tensor | float] = lambda gradient: 1.0,
) -> Tensor | None:
    """The mask of rows whose labels a cross-entropy counts, or None if all rows are terms.

    The cross-entropy is of a Linear's outputs. The result is also None if none is recognized.

    ``d`` are gradients ``(rows, classes)``, some of them zero. ``gradient_scale`` undoes what a
    GradScaler does. A loss may be divided by the number of all rows, for example if examples have
    weights of 0 or 1. Then all rows are terms.
    """
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or is_dtensor(weight) or not isinstance(x, Tensor):
        return None
    if not x.is_floating_point():
        return None
    if live.mask is None or d.shape[1] < 2 or weight.shape[0] != d.shape[1]:
        return None
    if x.shape[-1] != weight.shape[-1] or weight.dim() != 2 or x.numel() != len(d) * x.shape[-1]:
        return None
    wide = torch.promote_types(d.dtype, torch.float32)
    x = x.reshape(len(d), x.shape[-1])

    def probabilities(rows: Tensor) -> Tensor:
        shift = None if bias is None else bias.detach().to(wide)
        logits: Tensor = nn.functional.linear(x[rows].to(wide), weight.detach().to(wide), shift)
        return logits.softmax(-1)

    alive, dead = live.mask.nonzero().squeeze(1), (~live.mask).nonzero().squeeze(1)
    some = alive[:COMPARED]
    if len(some) == 0:
        return None
    p, found = probabilities(some), d[some].to(wide)
    label = found.argmin(1, keepdim=True)
    others = p.scatter(1, label, 0.0)
    rest = found.scatter(1, label, 0.0)
    # d = c (p - y), where c is one number for all classes and rows.
    c = rest.sum() / others.sum().clamp_min(torch.finfo(wide).tiny)
    expected = c * (p - torch.zeros_like(p).scatter(1, label, 1.0))
    tolerance = SAME if d.dtype in (torch.float32, torch.float64) else 0.05
    off = (found - expected).norm() > tolerance * found.norm()
    if bool(off) or not float(c) > 0:
        return None
    divided_by_all = abs(float(c * gradient_scale(d)) * len(d) - 1.0)
    divided_by_live = abs(float(c * gradient_scale(d)) * int(live.count) - 1.0)
    if divided_by_all < min(tolerance, divided_by_live):
        return None
    certain = probabilities(dead[:COMPARED]).amax(1) > 1.0 - SATURATED
    return None if bool(certain.all()) else live.mask


# ------------------------------------------------------------------------------ passes of a step


class Terms(NamedTuple):
    """The number of loss terms of some passes."""

    number: float | Tensor
    passes: tuple[int, ...]


@dataclass
class Ledger:
    """The passes of a step."""

    passes: dict[int, BackwardPass] = field(default_factory=dict)

    def prune(self, layers: Iterable[Any]) -> None:
        """Forget passes older than all that ``layers`` still need, once there are many."""
        if len(self.passes) < MOST_PASSES:
            return
        since = min((staged.since for staged in layers if not staged.empty), default=math.inf)
        self.passes = {k: p for k, p in self.passes.items() if p.serial > since}

    def of(self, staged: Any) -> list[BackwardPass]:
        """The passes whose terms count for a layer, including passes that do not reach it.

        Passes that have a layer in common have parts of one loss. A pass that goes through the
        same calls again has terms that were counted before. It is left out unless there is no
        other pass.
        """
        own = [p for p in self.passes.values() if staged.knows(p.number)]
        known = [p for p in self.passes.values() if p in own or p.serial > staged.since]
        if own:
            related = list(own)
            layers = set().union(*(p.layers for p in own))
            rest = [p for p in known if p not in own]
            while more := [p for p in rest if not layers.isdisjoint(p.layers)]:
                related += more
                layers.update(*(p.layers for p in more))
                rest = [p for p in rest if p not in more]
            known = related
        first = [p for p in known if not p.again]
        return first or known[:1]

    def terms(self, layers: Iterable[Any]) -> list[Terms]:
        """N of a step's passes, by layer."""
        totals: dict[tuple[int, ...], Terms] = {}
        found: list[Terms] = []
        for staged in layers:
            passes = self.of(staged)
            key = tuple(p.serial for p in passes)
            if key not in totals:
                totals[key] = Terms(_sum_of([p.count_terms() for p in passes]), key)
            found.append(totals[key])
        return found


def _sum_of(numbers: list[float | Tensor]) -> float | Tensor:
    tensors = [n for n in numbers if isinstance(n, Tensor)]
    plain = sum(n for n in numbers if not isinstance(n, Tensor))
    if not tensors:
        return float(plain)
    total = tensors[0]
    for other in tensors[1:]:
        total = total + other.to(total.device)
    return total + plain if plain else total
