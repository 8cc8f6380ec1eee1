"""The step scale τ: steps of preconditioned weights are τ times as long as the base's.

The effect of the last step Δ decides how τ changes at a refresh:

slope    s = -∇·Δ, with the mean gradient ∇ of the next step before it is preconditioned. The loss
         still falls along Δ if s > 0. It rises if s < 0, because the step was too long.
S, Z     <- running averages of the sign of s and of |s|, debiased
τ        <- τ exp(a (S - b)), and in the same step also τ exp(s / 2 Z) if -s > 2 Z
w        <- w + (τ - 1) Δ₀, after the base's own step Δ₀, so that Δ = τ Δ₀

If τ > 1, b is 0.3, because longer steps need more evidence. If τ <= 1, b is -0.3, because s is
mostly noise when the loss falls slowly. While a schedule changes the learning rate, b is -0.3 for
every τ, because the noise falls with the rate.

τ is at most 5. Over a base that scales its steps itself, or while a schedule changes the rate, it
is at most 2. If both hold, it is exactly 2.

S and τ are updated when layers are refreshed: at every step in the beginning, rarely later. If τ
grows, a is multiplied by the steps since the last update, at most 4. While τ is 1, only the step
before an update costs anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.fsdp import dtensor_from_rows, is_dtensor, local_tensor, shard_like
from second_order.distributed.world import flatten, split_into_buckets
from second_order.kfac.plan import StepPlan
from second_order.kronecker.block import KroneckerBlock

__all__ = [
    "ADAPTIVE_BOUNDS",
    "LAST_STEP",
    "LAST_STEP_KNOWN",
    "PLAIN_BOUNDS",
    "SCALE_ENTRIES",
    "ScaleBounds",
    "ScaleState",
    "StepScale",
]

LAST_STEP = "last_step"
"""The entry of a checkpoint with the last step of a parameter, scaled by τ and negated: -Δ."""

LAST_STEP_KNOWN = "last_step_known"
"""The entry of a checkpoint that is 1 if the next refresh may measure the last step, else 0."""

DECAY = 0.9  # of the running averages S and Z
GROWTH = 0.2  # a, per step, if τ grows
SHRINKAGE = 1.0  # a, if τ falls
MAX_GROWTH_STEPS = 4  # steps since the last update that count if τ grows
EVIDENCE = 0.3  # |b|
MAX_SCHEDULED_SCALE = 2.0  # upper bound of τ while a schedule changes the learning rate
LARGE_RISE = (
    2.0  # -s in units of Z, above which the loss has risen so much that τ falls immediately
)
MAX_RISE = 4.0  # -s in units of Z that count in the fall of τ
RECENT = 0.1  # share of all steps; a learning rate that changed within it follows a schedule

PRODUCT_BYTES = 64 * 2**20  # gradients and steps whose products are computed together


class ScaleBounds(NamedTuple):
    """The bounds of τ. While a schedule changes the rate, MAX_SCHEDULED_SCALE is the upper one."""

    low: float
    high: float
    low_scheduled: float


# Chosen on the same tasks and seeds as the bounds in schedule.py.
PLAIN_BOUNDS = ScaleBounds(low=0.02, high=5.0, low_scheduled=0.02)
ADAPTIVE_BOUNDS = ScaleBounds(low=0.02, high=2.0, low_scheduled=2.0)


@dataclass(frozen=True)
class ScaleState:
    """τ, and what its next value depends on.

    The names are those of the entries in a checkpoint. Steps are counted from 1; 0 means never.
    """

    step_scale: float = 1.0  # τ
    step_sign: float = 0.0  # S
    step_size: float = 0.0  # Z
    step_weight: float = 0.0  # sum of the weights in S and Z
    step_measured_at: float = 0.0  # the last step that updated S and Z
    step_rate: float = 0.0  # the learning rate at the last refresh
    step_rate_changed: float = 0.0  # the last refresh with another learning rate than before

    def update(self, slope: float, rate: float, step: int, bounds: ScaleBounds) -> ScaleState:
        """Return the state after a refresh.

        Args:
            slope: s; NaN if the last step is not known.
            rate: The learning rate.
            step: The number of steps before this one.
            bounds: The bounds of τ.
        """
        rate_changed = self.step_rate_changed
        if self.step_rate not in (rate, 0.0):
            rate_changed = step + 1.0
        is_scheduled = rate_changed > 0 and step + 1 - rate_changed <= RECENT * step
        state = replace(self, step_rate=rate, step_rate_changed=rate_changed)

        log_change = 0.0
        if math.isfinite(slope):
            state = state._update_averages(slope, step)
            log_change = state._log_change(slope, is_scheduled, previous=self)

        low = bounds.low
        high = bounds.high
        if is_scheduled:
            low = bounds.low_scheduled
            high = MAX_SCHEDULED_SCALE
        scale = min(max(self.step_scale * math.exp(log_change), low), high)
        return replace(state, step_scale=scale)

    def _update_averages(self, slope: float, step: int) -> ScaleState:
        """Add s to the running averages S and Z."""
        weight = DECAY * self.step_weight + 1
        sign = (slope > 0) - (slope < 0)
        return replace(
            self,
            step_sign=self.step_sign + (sign - self.step_sign) / weight,
            step_size=self.step_size + (abs(slope) - self.step_size) / weight,
            step_weight=weight,
            step_measured_at=step + 1.0,
        )

    def _log_change(self, slope: float, is_scheduled: bool, previous: ScaleState) -> float:
        """The change of log τ. S is that of this state, Z that of the ``previous`` one."""
        # Fall immediately if the loss has risen far more than usual.
        has_risen = -slope > LARGE_RISE * previous.step_size > 0
        immediate = 0.0
        if has_risen:
            immediate = max(slope / previous.step_size, -MAX_RISE) / 2

        # Average signs above the bound are evidence for longer steps.
        b = EVIDENCE
        if is_scheduled or self.step_scale <= 1.0:
            b = -EVIDENCE
        evidence = self.step_sign - b
        if evidence < 0:
            return immediate + SHRINKAGE * evidence
        if has_risen:
            return immediate

        # Grow in proportion to the steps since the last measurement, up to a bound.
        steps = 1.0
        if previous.step_measured_at > 0:
            steps = min(
                max(self.step_measured_at - previous.step_measured_at, 1.0), MAX_GROWTH_STEPS
            )
        return GROWTH * evidence * steps


SCALE_ENTRIES = tuple(entry.name for entry in fields(ScaleState))
"""The entries of a checkpoint with the state, in the part of each layer."""


class _Factors(NamedTuple):
    """The two factors of a scalar product."""

    gradient: Tensor
    step: Tensor


class StepScale:
    """Scales the steps of preconditioned weights by τ; the same on every rank.

    At each step, ``keep_weights`` comes before the base's step and ``scale_step`` after it. At a
    refresh, ``measure_slope`` comes before gradients are preconditioned, and ``update`` after the
    ranks have summed the slopes.
    """

    def __init__(self, bounds: ScaleBounds) -> None:
        self._bounds = bounds
        self.state = ScaleState()
        self._weights: dict[Tensor, Tensor] = {}  # before the base's step
        self._last_step: dict[Tensor, Tensor] = {}  # -Δ

    @property
    def factor(self) -> float:
        """τ."""
        return self.state.step_scale

    def measure_slope(
        self, step_plan: StepPlan, sharded: bool, groups: Iterable[Mapping[str, Any]]
    ) -> list[Tensor]:
        """Measure s of the parameters that this rank reports. The last step is dropped.

        Args:
            step_plan: The layers, and those that this rank reports.
            sharded: Whether FSDP2 has sharded gradients. Each rank then reports its rows.
            groups: The parameter groups. Some of them may have ``maximize=True``.

        Returns:
            s, a scalar in a list; an empty list if the last step was not kept.
        """
        last_step = self._last_step
        self._last_step = {}
        if not last_step:
            return []

        # With maximize=True, the direction of descent has the other sign.
        maximized: set[Tensor] = set()
        for group in groups:
            if group.get("maximize"):
                maximized.update(group["params"])

        reporting = set(step_plan.reporting)
        products: list[_Factors] = []
        for block in step_plan.layers:
            # Each parameter counts once over all ranks; of a sharded one, each rank has rows.
            is_reported = block in reporting or (sharded and is_dtensor(block.weight))
            if not is_reported or block.has_lost_factor or block.unverified:
                continue
            for p in block.params:
                if p.grad is None or p not in last_step:
                    continue
                gradient = local_tensor(p.grad)
                if p in maximized:
                    gradient = -gradient
                products.append(_Factors(gradient, last_step[p].to(p.device)))
        return _sum_products(products)

    def keep_weights(self, blocks: Iterable[KroneckerBlock], keep_step: bool) -> None:
        """Copy the weights of layers with an inverse before the base's step.

        Nothing is copied if τ is 1 and the next refresh will not measure the step. The step before
        is dropped.

        Args:
            blocks: The layers.
            keep_step: Whether the next refresh may measure this step.
        """
        self._last_step = {}
        self._weights = {}
        params = [p for block in blocks if block.solved for p in block.params]
        if params and (keep_step or self.factor != 1.0):
            copies = torch._foreach_mul([local_tensor(p).detach() for p in params], 1.0)
            self._weights = dict(zip(params, copies, strict=True))

    def scale_step(self, keep_step: bool) -> None:
        """Scale the base's step by τ.

        Args:
            keep_step: Whether the next refresh may measure this step.
        """
        weights = self._weights
        self._weights = {}
        if not weights:
            return
        after = [local_tensor(p) for p in weights]
        before = list(weights.values())
        if self.factor != 1.0:
            torch._foreach_lerp_(after, before, 1.0 - self.factor)
        if keep_step:
            torch._foreach_sub_(before, after)
            self._last_step = weights

    def update(self, slope: float, rate: float, step: int) -> None:
        """Update τ at a refresh.

        Args:
            slope: s of all ranks; NaN if the last step was not kept.
            rate: The learning rate.
            step: The number of steps before this one.
        """
        self.state = self.state.update(slope, rate, step, self._bounds)

    def saved(self) -> dict[str, float]:
        """The entries of a checkpoint in the part of each layer."""
        return asdict(self.state)

    def saved_step(self, p: Tensor, fill: bool) -> dict[str, Any]:
        """The entries of a checkpoint with the last step of a parameter, sharded as it is.

        If ``fill`` is true, a step that is not known is zeros.
        """
        step = self._last_step.get(p)
        entries: dict[str, Any] = {LAST_STEP_KNOWN: int(step is not None)}
        if step is None and fill:
            step = torch.zeros_like(local_tensor(p))
        if step is not None:
            entries[LAST_STEP] = dtensor_from_rows(p, step)
        return entries

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load the entries of a checkpoint. Without them, τ does not change."""
        self._last_step = {}
        self._weights = {}
        names = set(SCALE_ENTRIES)
        part = next((part for part in saved.values() if part.keys() >= names), None)
        if part is None:
            return
        state = ScaleState(**{name: part.number(name) for name in SCALE_ENTRIES})
        scale = min(max(state.step_scale, self._bounds.low), self._bounds.high)
        self.state = replace(state, step_scale=scale)
        for p, part in saved.items():
            if part.get(LAST_STEP_KNOWN, 0) and LAST_STEP in part:
                step = local_tensor(shard_like(p, part[LAST_STEP]))
                self._last_step[p] = step.to(p.device, p.dtype, copy=True)


def _sum_products(products: Iterable[_Factors]) -> list[Tensor]:
    """Sum scalar products. Returns a float32 scalar in a list; an empty list without products."""

    def nbytes(factors: _Factors) -> int:
        # On the CPU a copy costs more than a call, so every product is a bucket of its own.
        if factors.gradient.is_cpu:
            return PRODUCT_BYTES
        return factors.gradient.nbytes + factors.step.nbytes

    buckets = split_into_buckets(
        products,
        kind=lambda factors: (factors.gradient.device, factors.gradient.dtype, factors.step.dtype),
        nbytes=nbytes,
        max_bytes=PRODUCT_BYTES,
    )
    sums: list[Tensor] = []
    for bucket in buckets:
        if len(bucket) == 1:
            gradient = bucket[0].gradient.flatten()
            step = bucket[0].step.flatten()
        else:
            gradient = flatten([factors.gradient for factors in bucket])
            step = flatten([factors.step for factors in bucket])
        product = torch.vdot(gradient, step.to(gradient.dtype)).float()
        sums.append(product.to(sums[0].device) if sums else product)
    return [torch.stack(sums).sum()] if sums else []
