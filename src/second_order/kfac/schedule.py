"""When statistics and refreshes come: as numbers, callables, drift and the throttle say.

Refreshes by drift come as often as each layer changes by them:

at a refresh    P₀ = old inverse ∇, P = new inverse ∇         of the step's own mean gradient
                c = cos(P₀, P)                                all ranks receive it
interval        halved where c is low, doubled where it is high; 1 at first, 32 steps at most
due             every interval-th step, and no oftener than three layers of four want to be

Intervals are powers of two and due steps their multiples, so that layers come due together and the
ranks that solve are busy at the same steps. A layer's solves cost, on average, no more than the
passes through the model. Let k be the cost of a layer's solve and W the work of a step's passes.
The least interval of a layer is sqrt(k) Σ sqrt(k) / W. Then Σ k / interval is W, and no other
choice with that cost has a smaller sum of intervals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.kfac.layers import Layers
from second_order.kronecker.block import KroneckerBlock
from second_order.optimizers.config import KFACOptions, PerStep, check_decay
from second_order.training.context import Training
from second_order.training.throttle import TIMED_REFRESHES, Throttle
from second_order.utils.checks import Interval, check_interval, value_at

__all__ = [
    "ADAPTIVE",
    "DRIFT",
    "LONGEST",
    "PLAIN",
    "UPDATED_AT",
    "Bounds",
    "Cadence",
    "Change",
    "Drift",
    "Schedule",
    "least_intervals",
    "past_at",
]

DRIFT = ("drift_interval", "drift_alike", "drift_least")
"""The entries of a checkpoint, in the part of every layer: the interval that it has shown to need,
refreshes in a row that were alike, and the least interval that its cost allows."""

UPDATED_AT = "updated_at"
"""The entry of a checkpoint, the same for all layers: the step of the averages' last update."""

INVERSE_STEPS, FACTOR_STEPS = "inv_update_steps", "factor_update_steps"
LONGEST = 32  # interval
WANTED_BY = 0.25  # of the layers, at least, for a refresh to come oftener
SMALL = 5e8  # operations that take as long as what a step costs besides its products
TIMED_INTERVAL = 2  # steps between refreshes while the throttle times both kinds of steps


@dataclass(frozen=True)
class Bounds:
    """When an interval changes."""

    apart: float  # cosine below which it is halved
    alike: float  # cosine above which it is doubled
    patience: int  # number of refreshes in a row that have to be so much alike


# Chosen on the tasks and seeds that benchmarks/progress/tuned_rivals.py tunes its rivals on. The
# bounds over SGD are stricter: SGD does not rescale its steps, and the averages of the factors
# remember longer over it, so they change less from one refresh to the next.
PLAIN, ADAPTIVE = Bounds(0.95, 0.985, 2), Bounds(0.9, 0.97, 1)


@dataclass(frozen=True)
class Change:
    """What the last refresh of a layer changed."""

    interval: int = 1  # steps from a refresh to the next, as drift has it
    cosine: float = math.nan  # between P₀ and P
    alike: int = 0  # number of refreshes in a row after which the two were alike
    least: int = 1  # the least interval that the layer's cost allows

    def then(self, cosine: float, bounds: Bounds, least: int = 1) -> Change:
        """What the next refresh makes of it, the interval having been ``least`` at least."""
        interval = max(self.interval, least)
        alike = self.alike + 1 if cosine > bounds.alike else 0
        if cosine < bounds.apart:
            interval = max(interval // 2, 1)
        elif alike >= bounds.patience:
            interval = min(2 * interval, max(LONGEST, least))
            alike = 0
        return replace(self, interval=interval, cosine=cosine, alike=alike)


def least_intervals(costs: Sequence[float], work: float) -> list[int]:
    """Least intervals, powers of two, by which solves cost no more than the passes of a step.

    Args:
        costs: Operations of the solves of each layer, on the rank that does most.
        work: Operations of a step's passes on a rank; 0 where they are not known: no bound.
    """
    if not work:
        return [1] * len(costs)
    total = sum(map(math.sqrt, costs))
    found: list[int] = []
    for cost in costs:
        wanted = math.sqrt(cost) * total / (work + SMALL)
        found.append(2 ** min(max(round(math.log2(wanted)), 0), 10) if wanted > 0 else 1)
    return found


@dataclass(frozen=True)
class Schedule:
    """When layers are due, until their intervals change."""

    least: int  # steps between refreshes that the throttle allows at least
    tick: int  # steps between refreshes of any layer
    intervals: tuple[int, ...]  # of each layer


class Drift:
    """The intervals of layers that are refreshed as they drift; the same on every rank."""

    def __init__(self, bounds: Bounds = PLAIN, throttle: Throttle | None = None) -> None:
        self._bounds = bounds
        self._throttle = throttle
        self.changes: dict[KroneckerBlock, Change] = {}  # by each layer's last refresh
        self._schedule: Schedule | None = None  # as long as it holds

    @property
    def least(self) -> int:
        """Steps between refreshes at least, a power of two as all intervals are."""
        if self._throttle is None:
            return 1
        steps = self._throttle.interval or TIMED_INTERVAL
        return 1 << (steps - 1).bit_length()

    def interval(self, block: KroneckerBlock) -> int:
        """Steps from a layer's refresh to the next, as drift, throttle and work allow."""
        change = self.changes.get(block, Change())
        return max(change.interval, change.least, self.least)

    def due(self, blocks: Sequence[KroneckerBlock], step: int) -> list[KroneckerBlock]:
        """The layers that are due at a step; those without an inverse are whenever any could be."""
        schedule = self._current(blocks)
        tick = schedule.tick
        if step % tick != 0:
            return []
        found: list[KroneckerBlock] = []
        for block, every in zip(blocks, schedule.intervals, strict=True):
            if not block.solved or step % max(every, tick) == 0:
                found.append(block)
        return found

    def _current(self, blocks: Sequence[KroneckerBlock]) -> Schedule:
        """The schedule of the layers; made when intervals have changed."""
        schedule = self._schedule
        if schedule is None or schedule.least != self.least:
            intervals = tuple(map(self.interval, blocks))
            solved = [n for n, block in zip(intervals, blocks, strict=True) if block.solved]
            solved.sort()
            tick = solved[int(len(solved) * WANTED_BY)] if solved else 1
            schedule = self._schedule = Schedule(self.least, tick, intervals)
        return schedule

    def hear(
        self,
        blocks: Sequence[KroneckerBlock],
        cosines: Sequence[float],
        work: float,
        costs: Sequence[float],
    ) -> None:
        """Follow what a refresh has changed: the cosine of each layer, NaN where there is none.

        ``work`` and ``costs`` are those of :func:`least_intervals`.
        """
        affordable = least_intervals(costs, work)
        for block, cosine, least in zip(blocks, cosines, affordable, strict=True):
            change = self.changes.get(block, Change())
            if math.isfinite(cosine):
                bounded = max(min(cosine, 1.0), -1.0)
                change = change.then(bounded, self._bounds, max(change.least, self.least))
            self.changes[block] = replace(change, least=least)
        self._schedule = None

    def follow(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Keep what is known of these layers, and of no others."""
        kept = set(blocks)
        self.changes = {b: change for b, change in self.changes.items() if b in kept}
        self._schedule = None

    def intervals(self, blocks: Sequence[KroneckerBlock]) -> tuple[int, ...]:
        """The intervals, which must be equal on all ranks."""
        return self._current(blocks).intervals

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """What a checkpoint keeps of a layer."""
        change = self.changes.get(block, Change())
        return dict(zip(DRIFT, (change.interval, change.alike, change.least), strict=True))

    def load(self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]) -> None:
        """Take over the intervals of a checkpoint."""
        self.follow(())
        for block in blocks:
            part = saved.get(block.weight)
            if part is not None and part.keys() >= set(DRIFT):
                interval, alike, least = (part.whole(name, 0) for name in DRIFT)
                self.changes[block] = Change(max(interval, 1), alike=alike, least=max(least, 1))

    @property
    def said(self) -> str:
        """A part of a line of the summary; "" before anything has drifted."""
        if not self.changes:
            return ""
        every = sorted(map(self.interval, self.changes))
        first, last = ("step" if n == 1 else f"{n:.0f} steps" for n in (every[0], every[-1]))
        return f"refreshes by drift, every {first} to {last}"

    @property
    def metrics(self) -> dict[str, float]:
        """Cosines and intervals at the layers' last refreshes, to log."""
        cosines = [change.cosine for change in self.changes.values()]
        cosines = [cosine for cosine in cosines if not math.isnan(cosine)]
        return {
            "drift/interval": _median([self.interval(block) for block in self.changes]),
            "drift/cosine": _median(cosines),
            "drift/cosine/min": min(cosines, default=math.nan),
        }


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values)) if values else math.nan


def past_at(past: PerStep, since: int, step: int) -> float:
    """The weight of the past at an update at ``step``, so many steps after the last one."""
    decay = past.decay
    if past.share is not None:
        decay = min(decay, 1 - 1 / max(2.0, past.share * step))
    return float(decay ** max(since, 1))


def interval_at(interval: Interval, step: int, name: str) -> int:
    """The number of steps that an option, which may be a callable, gives at a step."""
    if not callable(interval):
        return int(interval)
    every = interval(step)
    check_interval(f"{name} at step {step}: {name}", every)
    return int(every)


class Cadence:
    """When statistics and refreshes are due, and how much of the past an update keeps."""

    def __init__(self, training: Training, options: KFACOptions, layers: Layers) -> None:
        self._training = training
        self._options = options
        self._layers = layers
        self.updated_at = 0  # the step of the last update of the running averages
        self.throttle: Throttle | None = None
        if options.overhead is not None:
            self.throttle = Throttle(training, options.overhead, min_refreshes=TIMED_REFRESHES)
        self.drift: Drift | None = None  # the layers' intervals, if refreshes follow drift
        if options.by_drift:
            self.drift = Drift(ADAPTIVE if options.adaptive else PLAIN, self.throttle)

    def note_update(self, step: int | None = None) -> None:
        """Note that the running averages were updated at a step; None for this one."""
        self.updated_at = self._training.steps if step is None else step

    def takes_statistics(self) -> bool:
        """Whether statistics are due at this step."""
        step = self._training.steps
        every = self._options.statistics_interval
        if every is None:
            return bool(self.due())
        return self._all_due(step) or step % interval_at(every, step, FACTOR_STEPS) == 0

    def _all_due(self, step: int) -> bool:
        """Whether newly trainable layers have their first statistics at a step."""
        return step == self._layers.newcomers_at

    def due(self, coming: int = 0) -> list[KroneckerBlock]:
        """The layers that are to be solved at this step, or as many steps later."""
        step = self._training.steps + coming
        layers = self._layers.active
        every = self._options.refresh_interval
        if self._all_due(step):
            return [*layers]
        if self.drift is not None:
            return self.drift.due(layers, step)
        assert every is not None
        return [*layers] if step % interval_at(every, step, INVERSE_STEPS) == 0 else []

    def may_come(self) -> bool:
        """Whether a refresh may be due at the next step.

        A callable is not called before its step: if it raised on one rank, the others would wait.
        """
        return callable(self._options.refresh_interval) or bool(self.due(coming=1))

    def decay(self, age: int | None = None) -> float:
        """The averages' weight of the past at an update."""
        past, steps = self._options.factor_decay, self._training.steps
        since = steps - self.updated_at if age is None else age
        if isinstance(past, PerStep):
            return past_at(past, since, steps)
        decay: float = value_at(past, steps)
        check_decay(decay)
        return decay
