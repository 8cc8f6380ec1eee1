"""Decides which rows of a backward pass are terms of its loss, and which rows take part in it.

The loss is a mean over N terms. N is one number for all layers of a pass, and G = N Σ d dᵀ. A is
the mean of x xᵀ over the rows that take part. A gradient may happen to vanish at one layer: dead
units, dropped paths, a hinge, tokens that went to another expert. This must change neither N nor A.
A leaves out only what the loss does not count at all: padding, and positions without a label.

Layers whose inputs have the same leading dimensions see the same rows. A layer that sees these
rows flattened sees the same rows too. Rows are of one of three types. The leading dimensions of
all layers decide the type once the pass is over:

    positions   Shape (B, T, ...), or B T rows where another layer has (B, T), or tokens of fused
                experts. A row takes part if it has a gradient at any layer that sees it.
    examples    Shape (B, ...) at a convolution, or B rows otherwise. All take part, even without a
                gradient: the loss may be flat for an example (hinge, clipped ratios) and is still
                a mean over the batch.
    selected    n rows, where other layers have positions and neither B nor B T is n. These are
                tokens that were picked, for example for an expert. A row takes part if it has a
                gradient at this very layer.

The layer called last receives its gradient first. It shows the terms: its examples, or those of its
positions that have a gradient. It may be called several times in one pass. The terms are those of
all its calls if the calls have different numbers of rows, or if they add up to the rows of another
layer. Tokens without a label, such as a prompt's, are not terms, but they take part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from second_order.kronecker.layers import (
    ATTENTION,
    ROUTED,
    LiveRows,
    PairRows,
    all_rows,
    live_rows,
    rows_in,
)

__all__ = [
    "BackwardPass",
    "RowGroup",
    "StepPasses",
    "Terms",
    "next_serial",
]


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

    @property
    def certain(self) -> bool:
        """Whether all rows are known to take part."""
        return self.examples or self.everything

    def add(self, live: LiveRows) -> None:
        """Take in which rows have a gradient at another layer."""
        if live.mask is not None and not self.everything:
            self.alive = _either(self.alive, live.mask)
            if self.alive.device.type == "cpu":
                live = rows_in(self.alive)
        if live.mask is None:
            self.everything = True
            self.alive = None


def _either(first: Tensor | None, second: Tensor) -> Tensor:
    """The rows of one mask or the other."""
    return second if first is None else first | second.to(first.device)


class _Call(NamedTuple):
    """A call of the layer called last."""

    group: RowGroup
    live: LiveRows  # its rows with a gradient
    all_terms: bool  # whether labels were drawn for all its rows


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
    """

    def __init__(self, number: int, reduce: bool = False) -> None:
        self.number = number
        self.serial = next_serial()
        self.again = False
        self.layers: dict[int, Any] = {}
        self._first: nn.Module | None = None  # the layer called last
        self._reduce = reduce
        self._ends = False  # autograd settles it as its pass ends
        self._terms: float | Tensor | None = None
        self._groups: dict[Hashable, RowGroup] = {}
        self._positions: set[int] = set()  # numbers of rows that are known to be positions
        self._batches: set[int] = set()  # numbers that may be those of examples
        self._calls: list[_Call] = []  # of the layer called last

    # ------------------------------------------------------------------------------- pair by pair

    def group_of(self, rows: PairRows) -> RowGroup:
        """The group of a pair's rows."""
        key: Hashable = (rows.family, rows.shape, rows.examples)
        group = self._groups.get(key)
        if group is None:
            group = RowGroup(rows.family, rows.shape, rows.examples)
            if self._type(group) == "selected":  # as is known when its layer arrives
                group = RowGroup(rows.family, rows.shape, selected=True)
                key = len(self._groups)
            self._groups[key] = group
            if len(rows.shape) > 1 or rows.family == ROUTED:
                self._positions.add(group.number)
            if len(rows.shape) > 1:
                self._batches.update(rows.shape[:2])
            if rows.examples:
                self._batches.add(group.number)
        return group

    def see(
        self, rows: PairRows, group: RowGroup, module: nn.Module, *, drawn: bool, reads: bool
    ) -> None:
        """See a pair of a module; ``reads`` which of its rows have had a gradient so far.

        On a device, gradients are not read before the end of the pass. ``drawn``: a label was drawn
        for each of its rows, if it is the layer called last.
        """
        self._first = module if self._first is None else self._first
        live = all_rows(group.number)
        if not group.examples and (module is self._first or (reads and not group.everything)):
            live = live_rows(rows.gradient)
        if reads and not group.certain:
            if live.mask is not None and bool(live.mask.all()):
                live = all_rows(group.number)
            group.add(live)
        if module is self._first:
            self._calls.append(_Call(group, live, drawn))

    def alive(self, group: RowGroup) -> LiveRows:
        """The rows that have had a gradient so far."""
        if group.certain or group.alive is None:
            return all_rows(group.number)
        return rows_in(group.alive)

    def will_end(self) -> bool:
        """Note that the end of autograd's pass settles this one; whether that is new."""
        before, self._ends = self._ends, True
        return not before

    def repeat(self) -> bool:
        """Note that an earlier pass went through the same calls; whether that is new."""
        before, self.again = self.again, True
        return not before

    @property
    def unsettled(self) -> bool:
        """Whether pairs have come since the pass was settled."""
        return bool(self._groups)

    @property
    def decided(self) -> bool:
        """Whether layers that are still to come can, as a rule, change nothing."""
        certain = all(group.certain for group in self._groups.values())
        return bool(self._calls) and certain

    # ------------------------------------------------------------------------------ as a whole

    def _type(self, group: RowGroup) -> str:
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
        return not group.everything and self._type(group) != "examples"

    def mask(self, group: RowGroup) -> Tensor | None:
        """The rows that take part, ``(rows,)``, as the pass is over; None if all do."""
        if not self.masked(group):
            return None
        same = [group]
        if self._type(group) == "positions" and group.family != ATTENTION:
            same = self._same_rows(group)
        if any(each.everything for each in same):
            return None
        alive: Tensor | None = None
        for each in same:
            if each.alive is not None:
                alive = _either(alive, each.alive)
        return alive

    def live(self, group: RowGroup) -> LiveRows:
        """The rows that take part, as the pass is over."""
        mask = self.mask(group)
        return all_rows(group.number) if mask is None else rows_in(mask)

    def _same_rows(self, group: RowGroup) -> list[RowGroup]:
        """The groups whose rows are those of a group, flattened or not."""
        same = []
        for each in self._groups.values():
            flat = 1 in (len(each.shape), len(group.shape))
            fits = each.shape == group.shape or (flat and each.number == group.number)
            if fits and each.family != ATTENTION and not each.examples:
                same.append(each)
        return same

    def terms(self) -> float | Tensor:
        """N, as the pass is over; on a device it may be a scalar tensor."""
        if self._terms is None:
            calls = self._calls if self._in_parts() else self._calls[:1]
            seen = _sum_of([self._count(call, call.live, call.all_terms) for call in calls])
            if isinstance(seen, Tensor) or seen == 0.0:
                # The layer called last has no gradient: its terms are the rows that take part.
                other = _sum_of([self._count(call, self.live(call.group)) for call in calls])
                if isinstance(seen, Tensor):
                    seen = torch.where(seen > 0, seen, torch.as_tensor(other, device=seen.device))
                else:
                    seen = other
            self._terms = seen
        return self._terms

    def _in_parts(self) -> bool:
        """Whether each call of the layer called last has its own part of the terms.

        This holds if the calls' numbers of rows differ (sequences one by one), or add up to the
        rows of another layer (logits in chunks). Otherwise one call may follow the other.
        """
        numbers = [call.group.number for call in self._calls]
        if len(numbers) < 2:
            return False
        total = sum(numbers)
        return len({*numbers}) > 1 or any(g.number == total for g in self._groups.values())

    def _count(self, call: _Call, live: LiveRows, all_terms: bool = False) -> float | Tensor:
        """The number of terms that some rows of a call are."""
        group = call.group
        if all_terms or self._type(group) == "examples":
            live = all_rows(group.number)
        if self._reduce and len(group.shape) > 1:
            live = live.parts(group.shape[0])
        return live.count

    def end(self) -> None:
        """Count the terms, and let go of what is not needed once the pass is over."""
        self.terms()
        self._ends = False
        self._groups.clear()
        self._positions.clear()
        self._batches.clear()
        self._calls.clear()


def _sum_of(numbers: Iterable[float | Tensor]) -> float | Tensor:
    total: float | Tensor = 0.0
    for number in numbers:
        if not isinstance(total, Tensor) and total == 0.0:
            total = number
        elif isinstance(total, Tensor) and isinstance(number, Tensor):
            total = total + number.to(total.device)
        else:
            total = total + number
    return total


# ------------------------------------------------------------------------------ passes of a step


class Terms(NamedTuple):
    """The number of loss terms of some passes."""

    number: float | Tensor
    passes: tuple[int, ...]


@dataclass
class StepPasses:
    """The passes of a step."""

    passes: dict[int, BackwardPass] = field(default_factory=dict)

    def of(self, staged: Any) -> list[BackwardPass]:
        """The passes whose terms count for a layer, including passes that do not reach it.

        Passes that have a layer in common have parts of one loss. A pass that goes through the
        same calls again has terms that were counted before. It is left out unless there is no
        other pass.
        """
        layers: set[int] = set()
        known: list[BackwardPass] = []
        for each in self.passes.values():
            reaches = staged.has_pass(each.number)
            if reaches:
                layers |= each.layers.keys()
            if reaches or each.serial > staged.cleared_at:
                known.append(each)
        if layers:
            known = [each for each in known if not layers.isdisjoint(each.layers)]
        first = [each for each in known if not each.again]
        return first or known[:1]

    def terms(self, layers: Iterable[Any]) -> list[Terms]:
        """N of a step's passes, by layer."""
        totals: dict[tuple[int, ...], Terms] = {}
        found: list[Terms] = []
        for staged in layers:
            passes = self.of(staged)
            key = tuple([each.serial for each in passes])
            if key not in totals:
                totals[key] = Terms(_sum_of([each.terms() for each in passes]), key)
            found.append(totals[key])
        return found
