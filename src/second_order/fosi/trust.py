"""The trust region of DHO2: it bounds Newton steps that the eigenpairs predict wrongly.

    predicted decrease   q = nᵀ|û|⁻¹n, the squared length of a full Newton step, in units of loss
    radius               τ <= Δ / √q, where Δ² is a hundred times the typical q of the taken steps
    curvature            α κ = Σ τ nᵀ|û|⁻¹(c − c₊) / Σ τ² q, summed over the last steps
    scale                if α τ κ comes near the limit of stability, τ is cut to half of that limit;
                         otherwise it grows again

c is V̂ᵀg, n is c with momentum, c₊ is the c of the next step, and the step taken is −α τ |û|⁻¹n.
κ is the curvature measured along the steps, relative to the curvature that the eigenvalues predict.
On a quadratic with exact eigenpairs it is at most 1. A step is rejected, and the next step reverts
it, if κ shows that c has exploded or if the gradient after the step is not finite.

The rule works with single numbers. On the CPU they are Python floats, which are ten times as fast
as tensors of one element. On a device they are tensors, so the host does not synchronize with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = [
    "MomentumRule",
    "NewtonStep",
    "Proposal",
    "TrustState",
    "bound_step",
    "compiled_on_devices",
    "larger",
    "propose_step",
    "trust_after_refresh",
]

T = TypeVar("T")
Number: TypeAlias = Any  # a float, or a tensor of one element
Flag: TypeAlias = Any  # a bool, or a tensor of one

RADIUS = 100.0  # Δ² in typical predicted decreases: a step is at most ten times its typical length
TYPICAL_DECAY = 0.99  # decay of the running mean of q; with it, Δ doubles in two steps at most
SUMS_DECAY = 0.8  # decay of the sums of κ, so that one step of triple length outweighs the others
NEAR_LIMIT = 0.75  # τ is cut above this fraction of the limit of stability
TARGET = 0.5  # and it is cut to this fraction
GROWTH = 1.05  # factor on τ at every step below the limit
EXPLOSION = 100.0  # a step is rejected above this multiple of the limit of stability
CUT_AFTER_REJECTION = 0.1  # factor on τ: the rule cannot know by how much the step was too long
GROWTH_AT_REFRESH = 2.0  # factor on τ when new eigenpairs arrive
TINY = 1e-300  # avoids a division by 0, which raises an error in Python


class MomentumRule(NamedTuple):
    """The rule m <- decay m + gain V̂ᵀg of the momentum in the subspace.

    With ``nesterov``, the step applies the rule once more to the new momentum.
    """

    decay: float
    gain: float
    nesterov: bool

    @property
    def stability_limit(self) -> float:
        """The bound on α τ κ below which the steps converge on a quadratic."""
        lookahead = 1.0
        if self.nesterov:
            lookahead = 1.0 + 2.0 * self.decay
        return 2.0 * (1.0 + self.decay) / (self.gain * lookahead)


class TrustState(NamedTuple):
    """What the previous steps say about the quadratic model. Checkpoints store it as one tensor."""

    typical_decrease: Number = 0.0  # running mean of q; 0 before the first step
    scale: Number = 1.0  # bound on τ from the curvature along the steps
    observed: Number = 0.0  # the numerator of α κ; the next step subtracts its part with c₊
    predicted: Number = 0.0  # the denominator of α κ
    tau: Number = 0.0  # τ of the last step
    alpha: Number = 0.0  # α of the last step
    rejected: Number = 0.0  # number of rejected steps

    def to_tensor(self, like: Tensor) -> Tensor:
        """Return all numbers in one tensor, with the dtype and the device of ``like``."""
        if like.device.type == "cpu":
            return like.new_tensor(self)
        return torch.stack([like.new_zeros(()) + number for number in self])


class NewtonStep(NamedTuple):
    """A Newton step, and the state that the next step needs."""

    step: Tensor  # (r,) coefficients, to be multiplied by −α; 0 if the step is left out
    gradient_change: Tensor  # (r,) −V̂ᵀg, to be added to the gradient; 0 if no new step is taken
    momentum: Tensor  # (r,)
    full_step: Tensor  # (r,) |û|⁻¹n of this step, before τ
    trust: Tensor  # the TrustState


class Proposal(NamedTuple):
    """A full Newton step, before the trust region bounds it."""

    c: Tensor  # (r,) V̂ᵀg
    momentum: Tensor  # (r,) updated with c
    full_step: Tensor  # (r,) |û|⁻¹n
    products: Tensor  # (3,) the full step times n, the full step times c, the last one times c


# -------------------------------------------------------------------------------- single numbers


def to_numbers(tensor: Tensor) -> Sequence[Number]:
    """Return the elements of a small tensor: floats on the CPU, tensors on a device."""
    if tensor.device.type != "cpu":
        return tensor.unbind()
    numbers: Sequence[Number] = tensor.tolist()
    return numbers


def select(condition: Flag, value: T, other: T) -> T:
    """Return ``value`` if the condition holds, otherwise ``other``."""
    if isinstance(condition, Tensor):
        selected: Any = torch.where(condition, value, other)  # type: ignore[call-overload]
        return selected  # type: ignore[no-any-return]
    return value if condition else other


def larger(a: Number, b: Number) -> Any:
    """Return the larger of two numbers, and the second one if the first is NaN."""
    return select(a > b, a, b)


def smaller(a: Number, b: Number) -> Any:
    """Return the smaller of two numbers, and the second one if the first is NaN."""
    return select(a < b, a, b)


def compiled_on_devices(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function of small tensors for calls whose first tensor is not on the CPU.

    The fifty operations of the rule would be fifty kernel launches there (see ``make launches``).
    If ``torch.compile`` fails, for example because there is no C++ compiler, the function runs
    uncompiled.
    """
    compiled: Callable[..., T] | None = None

    def call(*args: Any) -> T:
        nonlocal compiled
        if args[0].device.type == "cpu":
            return function(*args)
        if compiled is None:
            compiled = torch.compile(function)
        try:
            return compiled(*args)
        except Exception:  # if the function itself is at fault, the next line raises its error
            compiled = function
            return function(*args)

    return call


# -------------------------------------------------------------------------------------- the rule


@compiled_on_devices
def propose_step(
    c: Tensor, previous: NewtonStep, inverse_eigenvalues: Tensor, rule: MomentumRule
) -> Proposal:
    """Add c = V̂ᵀg to the momentum, and return the full Newton step that follows from it."""
    momentum = torch.add(previous.momentum * rule.decay, c, alpha=rule.gain)
    n = momentum
    if rule.nesterov:
        n = momentum * rule.decay + rule.gain * c
    full_step = n * inverse_eigenvalues
    products = torch.stack([full_step @ n, full_step @ c, previous.full_step @ c])
    return Proposal(c, momentum, full_step, products)


@compiled_on_devices
def bound_step(
    products: Tensor, proposal: Proposal, previous: NewtonStep, alpha: Number, limit: float
) -> tuple[NewtonStep, Flag]:
    """Return the Newton step that the trust region allows, and whether it reverts the last one.

    Args:
        products: The products of the proposal, ``(3,)``, summed over all vectors. They are not
            finite if V̂ᵀg is not finite on any process.
        proposal: The step to bound.
        previous: The last step.
        alpha: The largest |α| of the groups.
        limit: The limit of stability. Infinite: no trust region.
    """
    predicted_decrease, along_c, last_along_c = to_numbers(products)
    total = predicted_decrease + along_c + last_along_c
    non_finite = total - total != 0.0  # infinite or NaN
    c, momentum, full_step, _ = proposal
    zeros = torch.zeros_like(full_step)
    no_step = NewtonStep(zeros, zeros, previous.momentum, previous.full_step, previous.trust)
    if limit == math.inf:
        accepted = NewtonStep(full_step, -c, momentum, full_step, previous.trust)
        return _select_step(non_finite, no_step, accepted), False

    # Compare the curvature along the last steps with the limit of stability.
    state = TrustState(*to_numbers(previous.trust))
    observed = state.observed - state.tau * last_along_c
    predicted = state.predicted * limit
    ratio = state.scale * observed / select(predicted > 0.0, predicted, math.inf)
    last_length = state.tau * state.alpha
    exploded = non_finite | (ratio > EXPLOSION)
    reject_last = exploded & (last_length > 0.0) & (alpha > 0.0)

    # Bound τ by that curvature.
    grown = smaller(state.scale * GROWTH, 1.0)
    scale = select(ratio > NEAR_LIMIT, state.scale * TARGET / larger(ratio, NEAR_LIMIT), grown)

    # Bound τ by the radius.
    scaled_decrease = scale * scale * predicted_decrease
    has_typical = state.typical_decrease > 0.0
    max_decrease = select(has_typical, RADIUS * state.typical_decrease, math.inf)
    tau = scale * smaller(max_decrease / larger(scaled_decrease, TINY), 1.0) ** 0.5
    decrease = smaller(scaled_decrease, max_decrease)

    # Take the step,
    typical = state.typical_decrease + (1.0 - TYPICAL_DECAY) * (decrease - state.typical_decrease)
    state_after_step = state._replace(
        typical_decrease=select(has_typical, typical, decrease),
        scale=scale,
        observed=SUMS_DECAY * observed + tau * along_c,
        predicted=SUMS_DECAY * state.predicted + tau * tau * predicted_decrease,
        tau=tau,
        alpha=alpha,
    )
    trust = state_after_step.to_tensor(previous.trust)
    accepted = NewtonStep(full_step * tau, -c, momentum, full_step, trust)

    # or revert the last one, or take no step at all.
    state_after_rejection = TrustState(
        typical_decrease=state.typical_decrease * CUT_AFTER_REJECTION**2,
        scale=state.scale * CUT_AFTER_REJECTION,
        rejected=state.rejected + 1.0,
    )
    trust = state_after_rejection.to_tensor(previous.trust)
    way_back = -last_length / select(alpha > 0.0, alpha, 1.0) * previous.full_step
    reverted = NewtonStep(way_back, zeros, zeros, zeros, trust)
    newton = _select_step(reject_last, reverted, _select_step(non_finite, no_step, accepted))
    return newton, reject_last


def _select_step(condition: Flag, step: NewtonStep, other: NewtonStep) -> NewtonStep:
    """Return one of two steps, by a condition that may be on a device."""
    return NewtonStep(
        step=select(condition, step.step, other.step),
        gradient_change=select(condition, step.gradient_change, other.gradient_change),
        momentum=select(condition, step.momentum, other.momentum),
        full_step=select(condition, step.full_step, other.full_step),
        trust=select(condition, step.trust, other.trust),
    )


def trust_after_refresh(trust: Tensor, *, loss_has_risen: bool) -> Tensor:
    """Return the trust state for new eigenpairs: twice the scale that the old ones had at the end.

    If the loss of the curvature batch has risen since the last refresh, the scale stays as it is,
    because every step predicted that the loss would fall.
    """
    state = TrustState(*to_numbers(trust))
    scale = state.scale
    if not loss_has_risen:
        scale = smaller(GROWTH_AT_REFRESH * state.scale, 1.0)
    new_state = TrustState(
        typical_decrease=state.typical_decrease, scale=scale, rejected=state.rejected
    )
    return new_state.to_tensor(trust)
