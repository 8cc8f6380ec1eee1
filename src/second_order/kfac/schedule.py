"""When statistics and refreshes come: as numbers, callables, drift and the throttle say.

Refreshes by drift come as often as each layer changes by them:

at a refresh    P₀ = old inverse ∇, P = new inverse ∇         of the step's own mean gradient
                c = cos(P₀, P), r = |P₀| / |P|                all ranks hear them
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
from dataclasses import dataclass
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
    "least_intervals",
    "past_at",
]

DRIFT = ("drift_interval", "drift_alike", "drift_least")
"""The entries of a checkpoint, in the part of every layer: the interval that it has shown to need,
refreshes in a row that were alike, and the least interval that its cost allows. They are 0 before
anything has been compared."""

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

    interval: int = 1  # steps from a refresh to the next
    cosine: float = math.nan  # between P₀ and P
    length: float = math.nan  # |P₀| / |P|
    alike: int = 0  # number of refreshes in a row after which the two were alike

    def then(self, cosine: float, length: float, bounds: Bounds, least: int = 1) -> Change:
        """What the next refresh makes of it, the interval having been ``least`` at least."""
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
    total, found = sum(map(math.sqrt, costs)), []
    for cost in costs:
        wanted = math.sqrt(cost) * total / (work + SMALL)
        found.append(2 ** min(max(round(math.log2(wanted)), 0), 10) if wanted > 0 else 1)
    return found


def least_steps(throttle: Throttle | None) -> int:
    """Steps between refreshes that a throttle allows at least."""
    if throttle is None:
        return 1
    return throttle.interval or TIMED_INTERVAL


class Drift:
    """The intervals of layers that are refreshed as they drift; the same on every rank."""

    def __init__(self, bounds: Bounds = PLAIN, throttle: Throttle | None = None) -> None:
        self._bounds = bounds
        self._throttle = throttle
        self.changes: dict[KroneckerBlock, Change] = {}  # by each layer's last refresh
        self._affordable: dict[KroneckerBlock, int] = {}
        # Made anew once anything changes: what it is for, steps between refreshes, intervals.
        self._schedule: tuple[int, int, tuple[int, ...]] | None = None

    @property
    def least(self) -> int:
        """Steps between refreshes at least, a power of two as all intervals are."""
        return 1 << (least_steps(self._throttle) - 1).bit_length()

    @property
    def held(self) -> int:
        """Number of layers that want to be refreshed more often than that."""
        least = self.least
        return sum(change.interval < least for change in self.changes.values())

    def interval(self, block: KroneckerBlock) -> int:
        """Steps from a layer's refresh to the next, as drift, throttle and work allow."""
        wanted = self.changes.get(block, Change()).interval
        return max(wanted, self._affordable.get(block, 1), self.least)

    def due(self, blocks: Sequence[KroneckerBlock], step: int) -> list[KroneckerBlock]:
        """The layers that are due at a step; those without an inverse are whenever any could be."""
        tick, intervals = self._scheduled(blocks)
        found: list[KroneckerBlock] = []
        for block, every in zip(blocks, intervals, strict=True) if step % tick == 0 else ():
            if not block.solved or step % max(every, tick) == 0:
                found.append(block)
        return found

    def _scheduled(self, blocks: Sequence[KroneckerBlock]) -> tuple[int, tuple[int, ...]]:
        """Steps between refreshes of any layer, and the layers' intervals; kept while they hold."""
        if self._schedule is None or self._schedule[0] != self.least:
            intervals, known = tuple(map(self.interval, blocks)), []
            for block, every in zip(blocks, intervals, strict=True):
                if block.solved:
                    known.append(every)
            known.sort()
            tick = known[int(len(known) * WANTED_BY)] if known else 1
            self._schedule = self.least, tick, intervals
        return self._schedule[1:]

    def hear(
        self,
        blocks: Sequence[KroneckerBlock],
        changes: Sequence[float],
        work: float,
        costs: Sequence[float],
    ) -> None:
        """Follow what a refresh has changed: P₀ · P, |P₀|² and |P|² of each layer; 0 for nothing.

        ``work`` and ``costs`` are those of :func:`least_intervals`.
        """
        for i, block in enumerate(blocks):
            product, old, new = changes[3 * i : 3 * i + 3]
            both = math.sqrt(old) * math.sqrt(new)
            if 0 < both < math.inf:
                cosine = max(min(product / both, 1.0), -1.0)
                before, least = self.changes.get(block, Change()), self._affordable.get(block, 1)
                least = max(least, self.least)
                self.changes[block] = before.then(cosine, math.sqrt(old / new), self._bounds, least)
        self._affordable = dict(zip(blocks, least_intervals(costs, work), strict=True))
        self._schedule = None

    def follow(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Keep what is known of these layers, and of no others."""
        kept = set(blocks)
        for known in (self.changes, self._affordable):
            for block in known.keys() - kept:
                del known[block]
        self._schedule = None

    def intervals(self, blocks: Sequence[KroneckerBlock]) -> tuple[int, ...]:
        """The intervals, which must be equal on all ranks."""
        return self._scheduled(blocks)[1]

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """What a checkpoint keeps of a layer."""
        change = self.changes.get(block, Change(interval=0))
        least = self._affordable.get(block, 0)
        return dict(zip(DRIFT, (change.interval, change.alike, least), strict=True))

    def load(self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]) -> None:
        """Take over the intervals of a checkpoint."""
        self.follow(())
        for block in blocks:
            part = saved.get(block.weight)
            if part is None or not part.keys() >= set(DRIFT):
                continue
            interval, alike, least = (part.whole(name, 0) for name in DRIFT)
            if interval:
                self.changes[block] = Change(interval, alike=alike)
            if least:
                self._affordable[block] = least

    @property
    def said(self) -> str:
        """A part of a line of the summary; "" before anything has drifted."""
        if not self.changes:
            return ""
        every = sorted(map(self.interval, self.changes))
        first, last = ("step" if n == 1 else f"{n:.0f} steps" for n in (every[0], every[-1]))
        held = f", {self.held} held back by overhead" if self.held else ""
        return f"refreshes by drift, every {first} to {last}{held}"

    @property
    def metrics(self) -> dict[str, float]:
        """Cosines, lengths and intervals at the layers' last refreshes, to log."""
        known = [change for change in self.changes.values() if not math.isnan(change.cosine)]
        return {
            "drift/interval": _median([*map(self.interval, self.changes)]),
            "drift/cosine": _median([change.cosine for change in known]),
            "drift/cosine/min": min((change.cosine for change in known), default=math.nan),
            "drift/length": _median([change.length for change in known]),
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
            self.throttle = Throttle(training, options.overhead, fewest=TIMED_REFRESHES)
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

    def intervals(self, step: int) -> dict[str, float]:
        """Both intervals at a step, to log; the median over layers if refreshes follow drift."""
        refreshes, statistics = self._options.refresh_interval, self._options.statistics_interval
        if refreshes is not None:
            every = float(interval_at(refreshes, step, INVERSE_STEPS))
        else:
            assert self.drift is not None
            every = self.drift.metrics["drift/interval"]
        found = {INVERSE_STEPS: every, FACTOR_STEPS: every}
        if statistics is not None:
            found[FACTOR_STEPS] = float(interval_at(statistics, step, FACTOR_STEPS))
        return found

    def warn_if_held(self) -> None:
        """Warn, once, that the overhead keeps drifting layers waiting."""
        training, drift = self._training, self.drift
        if self.throttle is None or not self.throttle.interval:
            return
        if drift is not None and drift.held and training.first_time("drift is held"):
            training.warn(
                f"overhead={self._options.overhead} leaves a refresh every {drift.least} steps, "
                f"and {drift.held} layers have drifted so far that they want one oftener; a larger "
                f"overhead allows it, and skip_layers=[...] spares wide layers"
            )

    def decay(self, age: int | None = None) -> float:
        """The averages' weight of the past at an update."""
        past, steps = self._options.factor_decay, self._training.steps
        since = steps - self.updated_at if age is None else age
        if isinstance(past, PerStep):
            return past_at(past, since, steps)
        decay: float = value_at(past, steps)
        check_decay(decay)
        return decay
