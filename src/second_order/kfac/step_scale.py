"""The step scale τ: steps of preconditioned weights are τ times as long as the base's.

The base is the base optimizer, Δ₀ the step that it takes, and Δ = τ Δ₀. The effect of
the last step Δ decides how τ changes at a refresh:

slope    s = -∇·Δ, with the mean gradient ∇ of the next step before preconditioning. The
         loss still falls along Δ if s > 0. It rises if s < 0, because the step was too
         long.
S, Z     <- running averages of the sign of s and of |s|, debiased
τ        <- τ exp(c)
w        <- w + (τ - 1) Δ₀, at every step, after the base's own step

c follows from the evidence S - b, for a threshold b, and from the slope itself:

    S > b       c = 0.2 (S - b) k    τ grows slowly; k <= 4 steps since the last slope
    S < b       c = S - b            τ falls fast
    -s > 2 Z    min(-s / Z, 4) / 2 is subtracted from c, or from 0 if S > b: the loss
                has risen by far more than usual (Z is that before this step)

The threshold b keeps τ near 1 as long as s is mostly noise, when S is near 0. If τ > 1,
b is 0.3: τ grows further only if at least 65% of the recent slopes are positive. If τ
<= 1, b is -0.3: τ falls further only if more than 65% of them are negative. While a
schedule changes the learning rate, b is -0.3 for every τ: τ grows unless most slopes
are negative, because a smaller rate already makes the noise of the steps smaller.

τ is between 0.02 and 5. Over a base that scales its steps itself, such as Adam, or
while a schedule changes the rate, it is at most 2. If both hold, it is exactly 2.

S and τ are updated when layers are refreshed: at every step in the beginning, rarely
later. While τ is 1, only steps that may precede an update cost anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.fsdp import (
    dtensor_from_rows,
    is_dtensor,
    local_tensor,
    shard_like,
)
from second_order.distributed.world import flatten
from second_order.kfac.plan import StepPlan
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.storage import group_equal

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
"""The checkpoint entry of a parameter's last step, scaled by τ and negated: -Δ."""

LAST_STEP_KNOWN = "last_step_known"
"""The checkpoint entry that is 1 if the next refresh may measure that step, else 0."""

DECAY = 0.9  # of the running averages S and Z
GROWTH = 0.2  # factor of (S - b) k in c, if τ grows
SHRINKAGE = 1.0  # factor of S - b in c, if τ falls
MAX_GROWTH_STEPS = 4  # steps since the last measured slope that count if τ grows
THRESHOLD = 0.3  # |b|
MAX_SCHEDULED_SCALE = 2.0  # upper bound of τ while a schedule changes the learning rate
LARGE_RISE = 2.0  # -s in units of Z, above which τ falls immediately
MAX_RISE = 4.0  # -s in units of Z that count in the fall of τ
# A learning rate that changed in this last share of all steps follows a schedule.
RECENT = 0.1

# Bytes of gradients and steps whose products are computed together. On a CPU, to copy
# larger ones costs more than the calls that it saves.
PRODUCT_BYTES = 64 * 2**20
CPU_PRODUCT_BYTES = 2**17


class ScaleBounds(NamedTuple):
    """The bounds of τ.

    While a schedule changes the rate, the bounds are ``low_scheduled`` and
    MAX_SCHEDULED_SCALE.
    """

    low: float
    high: float
    low_scheduled: float


# docs/evidence/benchmarks.md lists the tasks on which each number was chosen. Over
# adaptive bases, low_scheduled equals MAX_SCHEDULED_SCALE, so that τ is 2.
PLAIN_BOUNDS = ScaleBounds(low=0.02, high=5.0, low_scheduled=0.02)
ADAPTIVE_BOUNDS = ScaleBounds(low=0.02, high=2.0, low_scheduled=2.0)

SCALE_ENTRIES = (
    "step_scale",
    "step_sign",  # mean_sign
    "step_size",  # mean_size
    "step_weight",
    "step_measured_at",
    "step_rate",  # rate, the learning rate
    "step_rate_changed",
)
"""The checkpoint entries of :class:`ScaleState`'s fields, in order; shared numbers."""


class ScaleState(NamedTuple):
    """τ, and what its next value depends on.

    Steps are counted from 1; 0 means never.
    """

    scale: float = 1.0  # τ
    mean_sign: float = 0.0  # S
    mean_size: float = 0.0  # Z
    weight: float = 0.0  # sum of the weights in S and Z
    measured_at: float = 0.0  # the last step that updated S and Z
    rate: float = 0.0  # the learning rate at the last refresh; 0 before the first
    # The last refresh with another learning rate than before.
    rate_changed_at: float = 0.0

    def next_state(
        self, slope: float, rate: float, step: int, bounds: ScaleBounds
    ) -> ScaleState:
        """Return the state after a refresh.

        Args:
            slope: s; NaN if the last step is not known.
            rate: The learning rate.
            step: The number of steps before this one.
            bounds: The bounds of τ.
        """
        now = step + 1.0

        # Does a schedule change the learning rate?
        rate_changed_at = self.rate_changed_at
        has_last_rate = self.rate != 0.0
        if has_last_rate and rate != self.rate:
            rate_changed_at = now
        is_scheduled = rate_changed_at > 0 and now - rate_changed_at <= RECENT * step
        state = self._replace(rate=rate, rate_changed_at=rate_changed_at)

        # Add s to the running averages S and Z.
        log_change = 0.0
        if math.isfinite(slope):
            weight = DECAY * self.weight + 1
            sign = (slope > 0) - (slope < 0)
            state = state._replace(
                mean_sign=self.mean_sign + (sign - self.mean_sign) / weight,
                mean_size=self.mean_size + (abs(slope) - self.mean_size) / weight,
                weight=weight,
                measured_at=now,
            )
            log_change = self._log_change(slope, state.mean_sign, now, is_scheduled)

        # Change τ within its bounds.
        low = bounds.low
        high = bounds.high
        if is_scheduled:
            low = bounds.low_scheduled
            high = MAX_SCHEDULED_SCALE
        scale = min(max(self.scale * math.exp(log_change), low), high)
        return state._replace(scale=scale)

    def _log_change(
        self, slope: float, new_mean_sign: float, now: float, is_scheduled: bool
    ) -> float:
        """Return c, the change of log τ.

        S is ``new_mean_sign``. Z and the step of the last slope are those before it.
        """
        # Fall immediately if the loss has risen far more than usual.
        has_risen = self.mean_size > 0 and -slope > LARGE_RISE * self.mean_size
        immediate = 0.0
        if has_risen:
            immediate = -min(-slope / self.mean_size, MAX_RISE) / 2

        # If the evidence is negative, also fall by it.
        b = THRESHOLD
        if is_scheduled or self.scale <= 1.0:
            b = -THRESHOLD
        evidence = new_mean_sign - b
        if evidence < 0:
            return immediate + SHRINKAGE * evidence

        # If it is not, the loss must not have risen for τ to grow.
        if has_risen:
            return immediate

        # Grow in proportion to the steps since the last measured slope, up to a bound.
        steps = 1.0
        if self.measured_at > 0:
            steps = min(max(now - self.measured_at, 1.0), MAX_GROWTH_STEPS)
        return GROWTH * evidence * steps


class StepScale:
    """Scales the steps of preconditioned weights by τ; the same on every rank.

    :meth:`take_step` takes each step of the base. At a refresh, :meth:`measure_slope`
    comes before gradients are preconditioned, and :meth:`update` after the ranks have
    summed the slopes.

    Attributes:
        state: τ, which is ``state.scale``, and what its next value depends on.
    """

    def __init__(self, bounds: ScaleBounds) -> None:
        self._bounds = bounds
        self.state = ScaleState()
        # -Δ of the last step, if it was kept.
        self._negative_step: dict[Tensor, Tensor] = {}

    def measure_slope(
        self, step_plan: StepPlan, groups: Iterable[Mapping[str, Any]]
    ) -> list[Tensor]:
        """Measure s = ∇·(-Δ) of the parameters that this rank reports.

        Then Δ is dropped.

        Args:
            step_plan: The layers, and those that this rank reports. Each rank reports
                its rows of the layers that FSDP2 shards.
            groups: The parameter groups. Some of them may have ``maximize=True``.

        Returns:
            s, a scalar in a list; an empty list if the last step was not kept.
        """
        negative_step = self._negative_step
        self._negative_step = {}
        if not negative_step:
            return []

        # With maximize=True, the direction of descent has the other sign.
        for group in groups:
            if group.get("maximize"):
                for p in negative_step.keys() & group["params"]:
                    # Not in place, because a state_dict() may share the kept tensor.
                    negative_step[p] = -negative_step[p]

        reporting = set(step_plan.reporting)
        gradients: list[Tensor] = []
        negative_steps: list[Tensor] = []
        for block in step_plan.layers:
            # Each parameter counts once. If it is sharded, each rank counts its rows.
            is_reported = block in reporting or is_dtensor(block.weight)
            # Layers that fall back to the base optimizer from now on do not count.
            if not is_reported or block.has_lost_factor or block.unverified:
                continue
            for p in block.params:
                step = negative_step.get(p)
                if p.grad is None or step is None:
                    continue
                gradients.append(local_tensor(p.grad))
                negative_steps.append(step)
        return _sum_products(gradients, negative_steps)

    def take_step(
        self,
        step: Callable[[], None],
        blocks: Iterable[KroneckerBlock],
        keep_step: bool,
    ) -> None:
        """Take the base's step, and scale it by τ for layers with an inverse.

        If τ is 1 and the next refresh will not measure the step, this only calls
        ``step``.

        Args:
            step: The base's step.
            blocks: The layers.
            keep_step: Whether the next refresh may measure this step.
        """
        self._negative_step = {}  # no refresh has measured the previous step
        scale = self.state.scale
        # List each parameter once, because layers may share a bias.
        params: dict[Tensor, None] = {}
        if keep_step or scale != 1.0:
            for block in blocks:
                if block.solved:
                    params.update(dict.fromkeys(block.params))
        weights = [local_tensor(p) for p in params]
        before: tuple[Tensor, ...] = ()
        if weights:
            before = torch._foreach_mul(weights, 1.0)  # a copy, in few kernels

        # Take the step, scale it, and keep it.
        step()
        if not weights:
            return
        if scale != 1.0:
            torch._foreach_lerp_(weights, before, 1.0 - scale)
        if keep_step:
            torch._foreach_sub_(before, weights)  # -Δ, in the memory of the copy
            self._negative_step = dict(zip(params, before, strict=True))

    def update(self, slope: float, rate: float, step: int) -> None:
        """Update τ at a refresh.

        Args:
            slope: s of all ranks; NaN if the last step was not kept.
            rate: The learning rate.
            step: The number of steps before this one.
        """
        self.state = self.state.next_state(slope, rate, step, self._bounds)

    def saved(self) -> dict[str, float]:
        """Return the shared numbers of a checkpoint."""
        return dict(zip(SCALE_ENTRIES, self.state, strict=True))

    def saved_step(self, p: Tensor, fill: bool) -> dict[str, Any]:
        """Return the entries of a checkpoint with -Δ of a parameter, sharded as it is.

        If ``fill`` is true, a step that is not known is zeros.
        """
        step = self._negative_step.get(p)
        entries: dict[str, Any] = {LAST_STEP_KNOWN: int(step is not None)}
        if step is None and fill:
            step = torch.zeros_like(local_tensor(p))
        if step is not None:
            entries[LAST_STEP] = dtensor_from_rows(p, step)
        return entries

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load the entries of a checkpoint. Without them, τ does not change."""
        self._negative_step = {}
        names = set(SCALE_ENTRIES)
        part = next((part for part in saved.values() if part.keys() >= names), None)
        if part is None:
            return
        state = ScaleState(*[part.number(name) for name in SCALE_ENTRIES])
        scale = min(max(state.scale, self._bounds.low), self._bounds.high)
        self.state = state._replace(scale=scale)
        for p, part in saved.items():
            if part.get(LAST_STEP_KNOWN, 0) and LAST_STEP in part:
                step = local_tensor(shard_like(p, part[LAST_STEP]))
                self._negative_step[p] = step.to(p.device, p.dtype, copy=True)


def _sum_products(gradients: Sequence[Tensor], steps: Sequence[Tensor]) -> list[Tensor]:
    """Sum the scalar products of gradients and steps, in the dtypes of the gradients.

    Returns a float32 scalar in a list, or an empty list if there are no products.
    """
    # Compute products of small tensors together, up to a number of bytes, of which each
    # product has a share. The shares of a group add up to 1 at most.
    kinds: list[Hashable] = []
    shares: list[float] = []
    for gradient, step in zip(gradients, steps, strict=True):
        kinds.append((gradient.device, gradient.dtype, step.device, step.dtype))
        max_bytes = CPU_PRODUCT_BYTES if gradient.is_cpu else PRODUCT_BYTES
        shares.append((gradient.nbytes + step.nbytes) / max_bytes)

    sums: list[Tensor] = []
    for group in group_equal(kinds, shares, max_size=1):
        if len(group) == 1:  # needs no copy
            gradient = gradients[group[0]].flatten()
            step = steps[group[0]].flatten()
        else:
            gradient = flatten([gradients[i] for i in group])
            step = flatten([steps[i] for i in group])
        result = torch.vdot(gradient, step.to(gradient)).float()
        sums.append(result.to(sums[0].device) if sums else result)
    return [torch.stack(sums).sum()] if len(sums) > 1 else sums
