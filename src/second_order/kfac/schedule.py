"""When statistics and refreshes come: as numbers, callables, the budget or drift say.

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

from second_order.budget import IntervalBudget
from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.kfac.layers import Layers
from second_order.kronecker.block import KroneckerBlock
from second_order.optimizers.config import KFACOptions, PerStep, check_decay
from second_order.options import AUTO, check_interval, value_at
from second_order.stages import ELSEWHERE

__all__ = [
    "ADAPTIVE",
    "DRIFT",
    "DRIFT_ALIKE",
    "DRIFT_INTERVAL",
    "DRIFT_LEAST",
    "JUDGED",
    "LONGEST",
    "PLAIN",
    "UPDATED_AT",
    "Bounds",
    "Cadence",
    "Change",
    "Drift",
    "least_intervals",
    "multiple",
    "past_at",
]

DRIFT_INTERVAL, DRIFT_ALIKE = DRIFT = ("drift_interval", "drift_alike")
DRIFT_LEAST = "drift_least"
"""The entries of a checkpoint, in the part of every layer: the interval that it has shown to need,
refreshes in a row that were alike, and the least interval that its cost allows; 0 for the first
where nothing has been compared, and for the last in checkpoints of older versions."""

UPDATED_AT = "updated_at"
"""The entry of a checkpoint, the same for all layers: the step of the averages' last update."""

LONGEST = 32  # interval
LATEST = 2**62  # step
WANTED_BY = 0.25  # of the layers, at least, for a refresh to come oftener
SMALL = 5e8  # operations that take as long as what a step costs besides its products
COSTLY, SHORT = 10, 0.5  # a refresh that is told of: in steps of the base, and in seconds
JUDGED = 100  # steps whose refreshes may be told of, for which a device is waited for
BY_DRIFT, BY_BUDGET = 5, 20  # number of steps that are measured


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


class Drift:
    """The intervals of layers that are refreshed as they drift; the same on every rank."""

    def __init__(self, bounds: Bounds = PLAIN) -> None:
        self._bounds = bounds
        self.changes: dict[KroneckerBlock, Change] = {}  # by each layer's last refresh
        self.least = 1  # steps that the budget leaves between refreshes, at least
        self.held = 0  # number of layers that want to be refreshed oftener than that
        self._affordable: dict[KroneckerBlock, int] = {}
        # Made anew once anything changes: what it is for, steps between refreshes, intervals.
        self._schedule: tuple[int, int, tuple[int, ...]] | None = None

    def interval(self, block: KroneckerBlock) -> int:
        """Steps from a layer's refresh to the next, as drift, budget and work allow."""
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

    def next_due(self, blocks: Sequence[KroneckerBlock], step: int) -> int:
        """The first step, from this one on, at which :meth:`due` has any layer."""
        tick, intervals = self._scheduled(blocks)
        found = [LATEST]
        for block, every in zip(blocks, intervals, strict=True):
            found.append(multiple(max(every, tick) if block.solved else tick, step))
        return min(found)

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
        self.held = 0
        for change in self.changes.values():
            self.held += change.interval < self.least
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
        return {DRIFT_INTERVAL: change.interval, DRIFT_ALIKE: change.alike, DRIFT_LEAST: least}

    def load(self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]) -> None:
        """Take over the intervals of a checkpoint."""
        self.follow(())
        self.held = 0
        for block in blocks:
            part = saved.get(block.weight)
            if part is None or not part.keys() >= set(DRIFT):
                continue
            interval, alike = part.whole(DRIFT_INTERVAL, 0), part.whole(DRIFT_ALIKE, 0)
            if interval:
                self.changes[block] = Change(interval, alike=alike)
            if least := part.whole(DRIFT_LEAST, 0) if DRIFT_LEAST in part else 0:
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


def multiple(interval: int, step: int) -> int:
    """The first step, from this one on, that is a multiple of an interval."""
    return -(-step // interval) * interval


def past_at(past: PerStep, since: int, step: int) -> float:
    """The weight of the past at an update at ``step``, so many steps after the last one."""
    decay = past.decay
    if past.share is not None:
        decay = min(decay, 1 - 1 / max(2.0, past.share * step))
    return float(decay ** max(since, 1))


class Cadence:
    """When statistics and refreshes are due, and how much of the past an update keeps."""

    def __init__(
        self, training: Training, options: KFACOptions, layers: Layers, helped: bool, waits: bool
    ) -> None:
        self._training, self._options, self._layers = training, options, layers
        self.updated_at = 0  # the step of the last update of the running averages
        self.drift = None  # the layers' intervals where refreshes follow what they change
        self.given = {
            "factor_update_steps": options.statistics_interval,
            "inv_update_steps": options.refresh_interval,
        }
        given: dict[str, Any] = dict(self.given)
        if options.by_drift:
            self.drift = Drift(ADAPTIVE if options.adaptive else PLAIN)
            given["inv_update_steps"] = None if options.overhead is None else AUTO
        kinds = {"wait": "R" if waits else "apart"}
        for stage, kind in (("statistics", "S"), ("solve", "R"), ("precondition", "apart")):
            kinds |= {stage: kind, f"{stage}_exchange": kind}
        if helped:
            kinds["statistics"] = kinds["statistics_exchange"] = "apart"
            given["factor_update_steps"] = 1  # the steps of these statistics are not known here
        steps = BY_DRIFT if options.by_drift else BY_BUDGET
        self.budget = IntervalBudget(training, options.overhead, given, kinds, steps)

    def takes_statistics(self) -> bool:
        """Whether statistics are due at this step."""
        name, step = "factor_update_steps", self._training.steps
        if self._options.statistics_interval is None:
            return bool(self.due())
        return self.dense(step) or step % self.interval(name, step) == 0

    def dense(self, step: int) -> bool:
        """Whether statistics and refreshes are due whatever the intervals."""
        return step == self._layers.newcomers_at or self.budget.measuring

    def due(self, coming: int = 0) -> list[KroneckerBlock]:
        """The layers that are to be solved at this step, or as many steps later."""
        step, drift, layers = self._training.steps + coming, self.drift, self._layers.active
        if self.dense(step):
            return [*layers]
        if drift is None:
            return [*layers] if step % self.interval("inv_update_steps", step) == 0 else []
        return self._afforded(drift).due(layers, step)

    def _afforded(self, drift: Drift) -> Drift:
        allowed = self.budget.chosen.get("inv_update_steps", 1)
        drift.least = 1 << (allowed - 1).bit_length()  # a power of two, as all intervals are
        return drift

    @property
    def quiet_until(self) -> int:
        """The first step, from the coming one on, that takes statistics, refreshes, or may do so.

        The step before a refresh counts where the length of steps follows what they do: it keeps
        the parameters to look at it by. Callables are not asked before their turn.
        """
        step, options, drift = self._training.steps, self._options, self.drift
        of_step = options.kl_clip, *self.given.values()
        if self.dense(step) or any(map(callable, of_step)):
            return step
        if drift is not None:
            refresh = self._afforded(drift).next_due(self._layers.active, step)
        else:
            refresh = multiple(self.interval("inv_update_steps", step), step)
        found = [refresh - options.follows_steps]
        if options.statistics_interval is not None:
            found.append(multiple(self.interval("factor_update_steps", step), step))
        if self._layers.newcomers_at > step:
            found.append(self._layers.newcomers_at)
        return max(step, min(found))

    def may_come(self) -> bool:
        """Whether a refresh may be due at the next step.

        A callable is not asked before its turn: one that raises on one rank would part the others.
        """
        return callable(self._options.refresh_interval) or bool(self.due(coming=1))

    def interval(self, option: str, step: int) -> int:
        """What an option says of a step, or the budget has chosen for it; 1 while it measures."""
        every = self.budget.chosen.get(option) or self.given[option] or AUTO
        if callable(every):
            every = every(step)
            check_interval(f"{option} at step {step}: {option}", every)
        return 1 if every == AUTO else int(every)

    def tell(self) -> None:
        """Warn, once each, of a budget that keeps drifting layers waiting, and of a dear refresh.

        Seconds are the host's; a device has been waited for before the refresh.
        """
        training, options, drift = self._training, self._options, self.drift
        if drift is not None and drift.held and training.first_time("drift is held"):
            training.warn(
                f"overhead={options.overhead} leaves a refresh every {drift.least} steps, and "
                f"{drift.held} layers have drifted so far that they want one oftener; a larger "
                f"overhead allows it, and skip_layers=[...] spares wide layers"
            )
        if training.steps >= JUDGED:
            return
        base = training.meter.spent(ELSEWHERE, "average_gradients", "base")
        refresh = training.meter.spent("solve", "solve_exchange")
        loading = training.steps == 0 and training.device.type != "cpu"  # a device's libraries
        costly = not loading and refresh >= max(SHORT, COSTLY * base)
        if not costly or not training.first_time("cost of a refresh"):
            return
        every, remedy = options.refresh_interval, "a larger inv_update_steps makes them rarer"
        when = f"every {every} steps" if isinstance(every, int) else "as inv_update_steps says"
        if drift is not None:
            when, remedy = "as often as layers drift", "overhead=0.5 or the like makes them rarer"
        if training.steps + 1 < self.budget.until:
            when = f"at every step until step {self.budget.until}, then {when}"
        cheaper = "solver='inverse' is cheaper, " if options.solver == "eigen" else ""
        training.warn(
            f"a refresh of the inverses took {refresh:.3g} s, and a step of {training.base_name} "
            f"alone {base:.2g} s: one comes {when}; {remedy}, {cheaper}skip_layers=[...] spares "
            f"the widest layers"
        )

    def decay(self, age: int | None = None, *, exactly: bool = False) -> float:
        """The averages' weight of the past at an update."""
        past, steps = self._options.factor_decay, self._training.steps
        since = steps - self.updated_at if age is None else age
        if self._options.statistics_interval is not None and not exactly:
            since = 1
            if not self.dense(steps):
                every = self.interval("factor_update_steps", steps)
                since = min(every, steps - self.budget.until + 1)
        if isinstance(past, PerStep):
            return past_at(past, since, steps)
        decay: float = value_at(past, steps)
        check_decay(decay)
        return decay
