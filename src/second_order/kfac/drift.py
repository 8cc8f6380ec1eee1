"""How often each layer is refreshed, by what its refreshes change.

at a refresh    P₀ = old inverse ∇, P = new inverse ∇         of the step's own mean gradient
                c = cos(P₀, P), r = |P₀| / |P|                all ranks hear them
interval        halved where c is low, doubled where it is high; 1 at first, 32 steps at most
due             every interval-th step, and no oftener than three layers of four want to be

Intervals are powers of two and due steps their multiples, so that layers come due together and the
ranks that solve are busy at the same steps. A layer's solves cost, on average, no more than the
passes through the model: with cost c of a solve and work W of a step's passes, the least interval
of a layer is sqrt(c) Σ sqrt(c) / W, by which Σ c / interval is W, and the sum of intervals least.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.kronecker.block import KroneckerBlock

__all__ = [
    "ADAPTIVE",
    "DRIFT",
    "DRIFT_ALIKE",
    "DRIFT_INTERVAL",
    "LONGEST",
    "PLAIN",
    "Bounds",
    "Change",
    "Drift",
    "least_intervals",
]

DRIFT_INTERVAL, DRIFT_ALIKE = DRIFT = ("drift_interval", "drift_alike")
"""The entries of a checkpoint, in the part of every layer."""

LONGEST = 32
WANTED_BY = 0.25  # of the layers, at least, for a refresh to come oftener
SMALL = 5e8  # operations that take as long as what a step costs besides its products


@dataclass(frozen=True)
class Bounds:
    """When an interval changes.

    Attributes:
        apart: Cosine below which it is halved.
        alike: Cosine above which it is doubled.
        patience: Number of refreshes in a row that have to be so much alike.
    """

    apart: float
    alike: float
    patience: int


# Chosen on the tasks and seeds that benchmarks/progress/tuned_rivals.py tunes its rivals on. SGD
# takes steps as they are, and its averages remember longer: they change less from one to the next.
PLAIN, ADAPTIVE = Bounds(0.95, 0.985, 2), Bounds(0.9, 0.97, 1)


@dataclass(frozen=True)
class Change:
    """What the last refresh of a layer changed.

    Attributes:
        interval: Steps from a refresh to the next.
        cosine: Between the gradient as the old inverse preconditions it, and as the new one does.
        length: The length of the former over that of the latter.
        alike: Number of refreshes in a row after which the two were alike.
    """

    interval: int = 1
    cosine: float = math.nan
    length: float = math.nan
    alike: int = 0

    def then(self, cosine: float, length: float, bounds: Bounds, least: int = 1) -> Change:
        """What the next refresh makes of it.

        Args:
            cosine: The cosine that it finds.
            length: The length.
            bounds: When an interval changes.
            least: The interval that it had to keep at least.
        """
        alike = self.alike + 1 if cosine > bounds.alike else 0
        interval = max(self.interval, least)
        if cosine < bounds.apart:
            return Change(max(interval // 2, 1), cosine, length)
        if alike < bounds.patience:
            return Change(interval, cosine, length, alike)
        return Change(min(2 * interval, max(LONGEST, least)), cosine, length)


def least_intervals(costs: Sequence[float], work: float) -> list[int]:
    """Least intervals, powers of two, by which solves cost no more than the passes of a step.

    Args:
        costs: Operations of the solves of each layer, on the rank that does most.
        work: Operations of a step's passes on a rank; 0 where they are not known: no bound.
    """
    if not work:
        return [1] * len(costs)
    total = sum(map(math.sqrt, costs))
    wanted = [math.sqrt(cost) * total / (work + SMALL) for cost in costs]
    return [2 ** min(max(round(math.log2(w)), 0), 10) if w > 0 else 1 for w in wanted]


class Drift:
    """The intervals of layers that are refreshed as they drift; the same on every rank.

    Args:
        bounds: When an interval changes.

    Attributes:
        changes: What the last refresh of each layer changed.
        held: Number of layers that want to be refreshed oftener than that.
    """

    def __init__(self, bounds: Bounds = PLAIN) -> None:
        self._bounds = bounds
        self.changes: dict[KroneckerBlock, Change] = {}
        self._least = 1
        self.held = 0
        self._affordable: dict[KroneckerBlock, int] = {}
        self._schedule: tuple[int, tuple[int, ...]] | None = None  # tick, and layers' intervals

    @property
    def least(self) -> int:
        """Steps that the budget leaves between refreshes, at least."""
        return self._least

    @least.setter
    def least(self, steps: int) -> None:
        """Have the budget leave so many."""
        if steps != self._least:
            self._least, self._schedule = steps, None

    def interval(self, block: KroneckerBlock) -> int:
        """Steps from a layer's refresh to the next, as drift, budget and work allow."""
        wanted = self.changes.get(block, Change()).interval
        return max(wanted, self._affordable.get(block, 1), self.least)

    def due(self, blocks: Sequence[KroneckerBlock], step: int) -> list[KroneckerBlock]:
        """The layers that are due at a step; those without an inverse are whenever any could be."""
        tick, intervals = self._scheduled(blocks)
        if step % tick:
            return []
        pairs = zip(blocks, intervals, strict=True)
        return [b for b, every in pairs if not b.solved or step % max(every, tick) == 0]

    def _scheduled(self, blocks: Sequence[KroneckerBlock]) -> tuple[int, tuple[int, ...]]:
        """Steps between refreshes of any layer, and the layers' intervals; kept while they hold."""
        if self._schedule is None:
            intervals = tuple(map(self.interval, blocks))
            known = sorted(i for b, i in zip(blocks, intervals, strict=True) if b.solved)
            self._schedule = known[int(len(known) * WANTED_BY)] if known else 1, intervals
        return self._schedule

    def late(self, block: KroneckerBlock, age: int) -> bool:
        """Whether a solve of factors of so many steps ago is to be waited for."""
        return age >= self.interval(block) - 1

    def changes_of(
        self, blocks: Iterable[KroneckerBlock], mine: Collection[KroneckerBlock]
    ) -> list[Tensor | None]:
        """P₀ · P, |P₀|² and |P|² of layers, ``(3,)``; None where another rank tells, or nobody."""
        found = {block: block.take_change() for block in blocks}
        return [change if block in mine else None for block, change in found.items()]

    def hear(
        self,
        blocks: Sequence[KroneckerBlock],
        changes: Sequence[float],
        work: float,
        costs: Sequence[float],
    ) -> None:
        """Follow what a refresh has changed.

        Args:
            blocks: All layers that train.
            changes: Of each layer P₀ · P, |P₀|² and |P|², one after the other; zeros for nothing.
            work: Operations of a step's passes on a rank.
            costs: Operations of the solves of each layer, on the rank that does most.
        """
        parts = (iter(changes),) * 3
        for block, product, old, new in zip(blocks, *parts, strict=True):
            apart, length = _change(product, old, new)
            if length > 0:
                before, least = self.changes.get(block, Change()), self._affordable.get(block, 1)
                least = max(least, self.least)
                self.changes[block] = before.then(1 - apart, length, self._bounds, least)
        self.held = sum(change.interval < self.least for change in self.changes.values())
        self._affordable = dict(zip(blocks, least_intervals(costs, work), strict=True))
        self._schedule = None

    def follow(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Keep what is known of these layers, and of no others."""
        kept = set(blocks)
        for known in (self.changes, self._affordable):
            for block in known.keys() - kept:
                del known[block]
        self._schedule = None

    # ------------------------------------------------------------------------ state and summary

    def facts(self, blocks: Sequence[KroneckerBlock]) -> tuple[int, ...]:
        """The intervals, which must be equal on all ranks."""
        return self._scheduled(blocks)[1]

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """What a checkpoint keeps of a layer."""
        alike = self.changes.get(block, Change()).alike
        return {DRIFT_INTERVAL: self.interval(block), DRIFT_ALIKE: alike}

    def load(self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]) -> None:
        """Take over the intervals of a checkpoint."""
        self.changes.clear()
        self._affordable.clear()
        self.held, self._schedule = 0, None
        for block in blocks:
            part = saved.get(block.weight)
            if part is not None and part.keys() >= set(DRIFT):
                alike = part.whole(DRIFT_ALIKE, 0)
                self.changes[block] = Change(part.whole(DRIFT_INTERVAL, 1), alike=alike)

    @property
    def said(self) -> str:
        """A part of a line of the summary; "" before anything has drifted."""
        if not self.changes:
            return ""
        every = sorted(map(self.interval, self.changes))
        held = f", {self.held} held back by overhead" if self.held else ""
        return f"refreshes by drift, every {_plural(every[0])} to {_plural(every[-1])}{held}"

    @property
    def metrics(self) -> dict[str, float]:
        """Cosines, lengths and intervals at the layers' last refreshes, to log."""
        changes = list(self.changes.values())
        known = [change for change in changes if not math.isnan(change.cosine)]
        found = {"drift/interval": _median(map(self.interval, self.changes))}
        found["drift/cosine"] = _median(change.cosine for change in known)
        found["drift/cosine/min"] = min((c.cosine for c in known), default=math.nan)
        found["drift/length"] = _median(change.length for change in known)
        return found


def _plural(steps: float) -> str:
    return "step" if steps == 1 else f"{steps:.0f} steps"


def _change(product: float, before: float, now: float) -> tuple[float, float]:
    """1 - c and r, of P₀ · P, |P₀|² and |P|²; zeros where one of the two vanishes."""
    both = math.sqrt(before) * math.sqrt(now)
    if not 0 < both < math.inf:
        return 0.0, 0.0
    return 1 - max(min(product / both, 1.0), -1.0), math.sqrt(before / now)


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return float(statistics.median(listed)) if listed else math.nan
