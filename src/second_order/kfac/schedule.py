"""When statistics and refreshes are due: by numbers, callables, drift and the throttle.

Refreshes by drift compare a layer's old and new inverse, and adapt its interval:

    at a refresh   P₀ = (old inverse) ∇, P = (new inverse) ∇   for the mean gradient ∇
                   c = cos(P₀, P)                              all ranks receive c
    interval       halved if c is low, doubled if c is high; between 1 and 32 steps, or
                   more if the bounds below require it
    tick           the lower quartile of the intervals of layers with an inverse: no
                   layer is due more often
    due            at the common multiples of interval and tick. All layers are also
                   due once after a layer became trainable

A layer without an inverse is due at each tick, until eight refreshes in a row have
computed none. Its interval is then 2 steps, and each further such refresh doubles it,
up to 64 steps, because the layer may never have statistics. If no layer has an inverse,
the shortest of these intervals is the tick. Once every pass calls the layer again, it
gets an inverse within 64 steps, or within one tick if the tick is longer.

Intervals are powers of two and layers are due at their multiples, so that many layers
are due at the same step and the inverse ranks work at the same time.

Two bounds, which are shortest intervals, make intervals longer. The throttle's bound
follows from ``overhead=``. With the cost bound, all refreshes together cost about as
much per step as the rest of the step, W, or less: the operations of the passes, summed
over the ranks, plus ``STEP_OVERHEAD`` for everything else. If the refresh of a layer
costs k operations, its bound is sqrt(k) Σ sqrt(k) / W, rounded to a power of two.
Before rounding, these are the intervals with the smallest sum whose cost per step, Σ k
/ interval, is W. ``STEP_OVERHEAD`` counts once and not per rank, so the bounds do not
depend on the number of ranks that share a batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    "DRIFT_ENTRIES",
    "MAX_INTERVAL",
    "PLAIN",
    "CosineThresholds",
    "Drift",
    "LayerDrift",
    "Schedule",
    "cost_bounds",
    "per_step_decay",
]

DRIFT_ENTRIES = ("drift_interval", "drift_alike", "drift_least", "drift_missing")
"""Checkpoint entries of each layer. :meth:`Drift.saved` fills them."""

# Longest interval by drift, in steps. The cost of refreshes or the throttle may
# require a longer one.
MAX_INTERVAL = 32
MAX_COST_EXPONENT = 10  # cost bounds are at most 2 ** 10 steps
# Refreshes in a row without an inverse, after which the interval doubles.
NUM_FREQUENT_TRIES = 8
MAX_EXPONENT_WITHOUT_INVERSE = 6  # it doubles up to 2 ** 6 steps
# The tick is this quantile of the intervals of layers with an inverse.
TICK_QUANTILE = 0.25
# Operations in the time that a step spends outside of matrix products.
STEP_OVERHEAD = 5e8
# The interval while the throttle measures steps with and without a refresh.
TIMED_INTERVAL = 2


# ------------------------------------------------------------------- drift of one layer


@dataclass(frozen=True)
class CosineThresholds:
    """The cosines at which a layer's interval changes.

    Attributes:
        halve_below: A smaller cosine halves the interval.
        double_above: A larger cosine at ``patience`` refreshes in a row doubles it.
        patience: Number of such refreshes.
    """

    halve_below: float
    double_above: float
    patience: int


# Chosen on the tasks and seeds on which benchmarks/progress/tuned_rivals.py tunes the
# optimizers that we compare with. PLAIN is for base optimizers such as SGD, which do
# not rescale their steps. It is stricter than ADAPTIVE, which is for Adam and others.
# If the base optimizer is SGD, the running averages of A and G also remember more
# steps, and so change less between two refreshes.
PLAIN = CosineThresholds(halve_below=0.95, double_above=0.985, patience=2)
ADAPTIVE = CosineThresholds(halve_below=0.9, double_above=0.97, patience=1)


class LayerDrift(NamedTuple):
    """The refresh interval of a layer by its drift, and what it was adapted from.

    Attributes:
        interval: Steps between two refreshes, without the tick. Each refresh halves,
            keeps or doubles it, or the bound if that was longer, so it may contain an
            earlier bound. The present bounds are applied where it is used.
        cosine: Between P₀ and P; NaN before the second refresh.
        num_stable: Refreshes in a row whose cosine exceeded ``double_above``.
        cost_bound: The shortest interval that the cost of the layer's refresh allows.
        num_without_inverse: Refreshes in a row that left the layer without an inverse.
    """

    interval: int = 1
    cosine: float = math.nan
    num_stable: int = 0
    cost_bound: int = 1
    num_without_inverse: int = 0

    @property
    def interval_without_inverse(self) -> int:
        """Steps between two refreshes while the layer has no inverse."""
        exponent = self.num_without_inverse - NUM_FREQUENT_TRIES + 1
        return 1 << min(max(exponent, 0), MAX_EXPONENT_WITHOUT_INVERSE)

    def after_refresh(
        self, cosine: float, thresholds: CosineThresholds, bound: int = 1
    ) -> LayerDrift:
        """Return the state after another refresh.

        Args:
            cosine: Between P₀ and P.
            thresholds: The cosines at which the interval changes.
            bound: The shortest interval that cost and throttle allowed until now.
        """
        interval = max(self.interval, bound)
        num_stable = 0
        if cosine > thresholds.double_above:
            num_stable = self.num_stable + 1
        if cosine < thresholds.halve_below:
            interval = max(interval // 2, 1)
        elif num_stable >= thresholds.patience:
            interval = min(2 * interval, max(MAX_INTERVAL, bound))
            num_stable = 0
        return self._replace(interval=interval, cosine=cosine, num_stable=num_stable)


NOT_REFRESHED = LayerDrift()


def cost_bounds(costs: Sequence[float], work: float) -> list[int]:
    """Return each layer's shortest interval, a power of two, by the cost of refreshes.

    Args:
        costs: Operations of each layer's refresh.
        work: Operations of a step's passes on all ranks together. If it is 0, it is
            unknown, and nothing is bounded.
    """
    if not work:
        return [1] * len(costs)
    total = sum(map(math.sqrt, costs))
    intervals: list[int] = []
    for cost in costs:
        bound = math.sqrt(cost) * total / (work + STEP_OVERHEAD)
        exponent = 0
        if bound > 0:
            exponent = min(max(round(math.log2(bound)), 0), MAX_COST_EXPONENT)
        intervals.append(2**exponent)
    return intervals


# ------------------------------------------------------------------ drift of all layers


@dataclass(frozen=True)
class DriftIntervals:
    """The intervals of all layers that train.

    Attributes:
        throttle_bound: The throttle's bound, for which these intervals were computed.
        tick: No layer is due more often than every ``tick`` steps.
        by_layer: The interval of each layer. The two bounds do not apply to a layer
            without an inverse.
    """

    throttle_bound: int
    tick: int
    by_layer: tuple[int, ...]


class Drift:
    """The refresh intervals of layers that are refreshed by drift; equal on all ranks.

    Every step needs the intervals, so they are stored until they change. After a
    refresh, call :meth:`count_without_inverse`, and :meth:`record` if it installed
    inverses. Call :meth:`keep_only` if the layers that train change, and
    :meth:`invalidate` if layers lose their inverses.

    Attributes:
        states: The drift of each layer; of none before the first refresh.
    """

    def __init__(
        self, thresholds: CosineThresholds = PLAIN, throttle: Throttle | None = None
    ) -> None:
        self._thresholds = thresholds
        self._throttle = throttle
        self.states: dict[KroneckerBlock, LayerDrift] = {}
        self._stored: DriftIntervals | None = None  # None after a change

    def invalidate(self) -> None:
        """Recompute the intervals when they are needed, because layers have changed."""
        self._stored = None

    def _throttle_bound(self) -> int:
        """Return the throttle's shortest interval, rounded up to a power of two."""
        if self._throttle is None:
            return 1
        steps = self._throttle.interval
        if steps == 0:  # the throttle still measures
            steps = TIMED_INTERVAL
        return 1 << (steps - 1).bit_length()

    def interval(self, block: KroneckerBlock) -> int:
        """Return a layer's interval by drift, cost and throttle, in steps.

        If it has no inverse, this is its :attr:`~LayerDrift.interval_without_inverse`.
        """
        state = self.states.get(block, NOT_REFRESHED)
        if not block.solved:
            return state.interval_without_inverse
        return max(state.interval, state.cost_bound, self._throttle_bound())

    def layers_due(
        self, blocks: Sequence[KroneckerBlock], step: int
    ) -> list[KroneckerBlock]:
        """Return the layers that are due at a step, of all layers that train."""
        intervals = self.intervals(blocks)
        tick = intervals.tick
        if step % tick != 0:
            return []
        due: list[KroneckerBlock] = []
        for block, interval in zip(blocks, intervals.by_layer, strict=True):
            if step % max(interval, tick) == 0:
                due.append(block)
        return due

    def intervals(self, blocks: Sequence[KroneckerBlock]) -> DriftIntervals:
        """Return the intervals of all layers that train, equal on all ranks.

        ``blocks`` are these layers. They are not read while the intervals are stored.
        """
        throttle_bound = self._throttle_bound()
        if self._stored is not None and self._stored.throttle_bound == throttle_bound:
            return self._stored

        # Compute them again. If any layers have an inverse, these decide the tick.
        by_layer: list[int] = []
        of_solved: list[int] = []
        for block in blocks:
            interval = self.interval(block)
            by_layer.append(interval)
            if block.solved:
                of_solved.append(interval)
        of_solved.sort()
        tick = min(by_layer, default=1)
        if of_solved:
            tick = of_solved[int(len(of_solved) * TICK_QUANTILE)]
        self._stored = DriftIntervals(throttle_bound, tick, tuple(by_layer))
        return self._stored

    def count_without_inverse(self, due: Iterable[KroneckerBlock]) -> None:
        """Count the refreshes in a row that left layers without an inverse.

        Args:
            due: The layers that a refresh has just tried. All ranks know which are
                solved.
        """
        for block in due:
            state = self.states.get(block, NOT_REFRESHED)
            number = 0 if block.solved else state.num_without_inverse + 1
            if number != state.num_without_inverse:
                self.states[block] = state._replace(num_without_inverse=number)
                self._stored = None

    def record(
        self,
        costs: Mapping[KroneckerBlock, float],
        cosines: Sequence[float],
        work: float,
    ) -> None:
        """Adapt the intervals to a refresh.

        Args:
            costs: Number of operations of a refresh, for each layer that trains.
            cosines: cos(P₀, P) of each layer; NaN if it was not refreshed.
            work: Operations of a step's passes, as in :func:`cost_bounds`.
        """
        throttle_bound = self._throttle_bound()
        new_bounds = cost_bounds(list(costs.values()), work)
        for block, cosine, new_bound in zip(costs, cosines, new_bounds, strict=True):
            state = self.states.get(block, NOT_REFRESHED)
            if math.isfinite(cosine):
                # The cosine was measured over an interval with the old cost bound.
                clamped = max(min(cosine, 1.0), -1.0)
                bound = max(state.cost_bound, throttle_bound)
                state = state.after_refresh(clamped, self._thresholds, bound)
            self.states[block] = state._replace(cost_bound=new_bound)
        self._stored = None

    def keep_only(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Drop the drift of all other layers."""
        remaining = set(blocks)
        self.states = {b: state for b, state in self.states.items() if b in remaining}
        self._stored = None

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """Return the checkpoint entries of a layer."""
        state = self.states.get(block, NOT_REFRESHED)
        return {
            "drift_interval": state.interval,
            "drift_alike": state.num_stable,
            "drift_least": state.cost_bound,
            "drift_missing": state.num_without_inverse,
        }

    def load(
        self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]
    ) -> None:
        """Load the intervals of a checkpoint."""
        self.keep_only(())
        for block in blocks:
            part = saved.get(block.weight)
            if part is None or not part.keys() >= set(DRIFT_ENTRIES):
                continue
            self.states[block] = LayerDrift(
                interval=max(part.whole("drift_interval", 0), 1),
                num_stable=part.whole("drift_alike", 0),
                cost_bound=max(part.whole("drift_least", 0), 1),
                num_without_inverse=part.whole("drift_missing", 0),
            )

    def _reported_intervals(self) -> list[int]:
        """Return the intervals of layers with an inverse; of all if none has one."""
        solved = [block for block in self.states if block.solved]
        return [self.interval(block) for block in solved or self.states]

    @property
    def summary_line(self) -> str:
        """A part of a line of the summary; "" before the first refresh."""
        if not self.states:
            return ""
        intervals = self._reported_intervals()
        shortest = min(intervals)
        longest = max(intervals)
        if longest == 1:
            return "refreshes by drift, at every step"
        if shortest == longest:
            return f"refreshes by drift, every {longest} steps"
        return f"refreshes by drift, every {shortest} to {longest} steps"

    @property
    def metrics(self) -> dict[str, float]:
        """The cosines and intervals of the layers' last refreshes."""
        cosines = [c.cosine for c in self.states.values() if not math.isnan(c.cosine)]
        return {
            "drift/interval": _median(self._reported_intervals()),
            "drift/cosine": _median(cosines),
            "drift/cosine/min": min(cosines, default=math.nan),
        }


def _median(values: Sequence[float]) -> float:
    """Return the median; NaN without values."""
    if not values:
        return math.nan
    return float(statistics.median(values))


# ----------------------------------------------------------------------------- schedule


def per_step_decay(decay: PerStep, age: int, step: int) -> float:
    """Return the weight of the past in an update ``age`` steps after the last one.

    The averages of a ``PerStep`` remember 1 / (1 - decay) steps, but at most ``share``
    of the steps so far, or two steps if that is more. With n remembered steps, the past
    is multiplied by 1 - 1 / n per step. For example, ``PerStep(0.9)`` multiplies it by
    0.9 ** 5 if the last update was five steps ago. Two updates at one step count as one
    step apart.
    """
    per_step = decay.decay
    if decay.share is not None:
        remembered = max(2.0, decay.share * step)
        per_step = min(per_step, 1 - 1 / remembered)
    return float(per_step ** max(age, 1))


def interval_at(interval: Interval, step: int, name: str) -> int:
    """Return the interval that an option, a number or a callable, gives at a step."""
    if not callable(interval):
        return int(interval)
    value = interval(step)
    check_interval(f"{name} at step {step}: {name}", value)
    return int(value)


class Schedule:
    """When statistics and refreshes are due, and how much of the past an update keeps.

    Attributes:
        throttle: Bounds the cost of refreshes; None without ``overhead=``.
        drift: The layers' own intervals; None if a number or a callable sets them.
    """

    def __init__(
        self, training: Training, options: KFACOptions, layers: Layers
    ) -> None:
        self._training = training
        self._layers = layers
        self._refresh_interval = options.refresh_interval  # None: by drift
        self._statistics_interval = options.statistics_interval  # None: at each refresh
        self._factor_decay = options.factor_decay
        self.throttle: Throttle | None = None
        if options.overhead is not None:
            self.throttle = Throttle(
                training, options.overhead, min_refreshes=TIMED_REFRESHES
            )
        self.drift: Drift | None = None
        if options.by_drift:
            thresholds = ADAPTIVE if options.adaptive else PLAIN
            self.drift = Drift(thresholds, self.throttle)

    def layers_due(self, step: int) -> Sequence[KroneckerBlock]:
        """Return the layers whose inverses are recomputed at a step."""
        layers = self._layers.active
        if step == self._layers.newly_trainable_at:
            return layers
        if self.drift is not None:
            return self.drift.layers_due(layers, step)
        interval = self._refresh_interval
        assert interval is not None
        if step % interval_at(interval, step, "inv_update_steps") == 0:
            return layers
        return ()

    def statistics_due(self, step: int, layers_due: Sequence[KroneckerBlock]) -> bool:
        """Return whether A and G are updated from a step's batches.

        Args:
            step: The step.
            layers_due: As :meth:`layers_due` returned them for this step.
        """
        interval = self._statistics_interval
        if interval is None:
            return len(layers_due) > 0
        if step == self._layers.newly_trainable_at:
            return True
        return step % interval_at(interval, step, "factor_update_steps") == 0

    def refresh_may_be_due(self, step: int) -> bool:
        """Return whether layers may be due at a step that has not begun yet.

        A callable is not called before its step: if it raised on one rank, the other
        ranks would block.
        """
        return callable(self._refresh_interval) or len(self.layers_due(step)) > 0

    def statistics_may_be_due(self, step: int) -> bool:
        """Return whether to capture the passes of a step that has not begun yet.

        The passes come before the step, so a callable is called here. If it raises, the
        answer is True: in the step itself, the ranks compare what the callable does,
        and all of them raise.
        """
        layers_due: Sequence[KroneckerBlock] = ()
        # The options have no statistics interval only if refreshes are by drift. Then
        # layers_due() calls no callable.
        if self._statistics_interval is None:
            layers_due = self.layers_due(step)
        try:
            return self.statistics_due(step, layers_due)
        except Exception:
            return True

    def factor_decay(self, age: int) -> float:
        """Return the weight of the past in an update at this step.

        Args:
            age: Steps since the last update. Only a decay per step depends on it.
        """
        decay = self._factor_decay
        step = self._training.steps
        if isinstance(decay, PerStep):
            return per_step_decay(decay, age, step)
        value: float = value_at(decay, step)
        check_decay(value)
        return value
