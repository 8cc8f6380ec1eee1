"""Bounds on Newton steps: how far the quadratic model of the loss is to be trusted.

    predicted decrease   q = nᵀ|û|⁻¹n, the square of a full Newton step's length, in units of loss
    radius               τ <= Δ / √q, with Δ² a hundred times the usual q of the steps taken
    curvature            α κ = Σ τ nᵀ|û|⁻¹(c − c₊) / Σ τ² q over the last steps
    scale                where α τ κ comes near the limit of stability, τ is cut to half of it; then
                         it grows

n is what momentum makes of c = V̂ᵀg, c₊ the next step's c, and −α τ |û|⁻¹ n the step that is taken.
So κ is the curvature along the steps over that which the eigenvalues tell: with exact pairs of a
quadratic at most 1. A step of which κ says that c has been thrown far across, or after which the
gradient is not finite, is taken back.

The rule works with single numbers. On the CPU they are Python's, which are ten times as quick as
tensors of one element. On a device they are such tensors, so that the host does not synchronize.
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
    "compiled_on_devices",
    "larger",
    "propose",
    "renewed",
    "settle",
]

T = TypeVar("T")
Number: TypeAlias = Any  # a float, or a tensor of one element
Flag: TypeAlias = Any  # a bool, or a tensor of one

RADIUS = 100.0  # Δ² in usual predicted decreases: a step may be ten times as long as usual
USUAL_DECAY = 0.99  # of the running mean of predicted decreases; Δ doubles in two steps at most
SUMS_DECAY = 0.8  # of the sums of κ: one step of three times the length outweighs the rest
NEAR, AIM = 0.75, 0.5  # shares of the limit of stability: where τ is cut, and to what
GROWTH = 1.05  # of τ, at a step below that
EXPLODED = 100.0  # times the limit of stability
AFTER_UNDOING = 0.1  # times τ, where nothing tells how much too long a step was
RENEWED = 2.0  # times τ with new pairs
TINY = 1e-300  # Python does not divide by 0


class MomentumRule(NamedTuple):
    """The rule m <- decay m + gain V̂ᵀg of the momentum in the subspace.

    A step looks ahead by once more of the rule if ``nesterov``.
    """

    decay: float
    gain: float
    nesterov: bool

    @property
    def stability_limit(self) -> float:
        """The bound on α τ κ below which steps come to rest on a quadratic."""
        ahead = 1.0 + 2.0 * self.decay if self.nesterov else 1.0
        return 2.0 * (1.0 + self.decay) / (self.gain * ahead)


class TrustState(NamedTuple):
    """What the steps so far say about the model; stored as one tensor."""

    usual: Number = 0.0  # the usual predicted decrease; 0 before there is one
    scale: Number = 1.0  # the bound on τ by the curvature along the steps
    change: Number = 0.0  # the sums of κ; this one without what the coming c₊ adds
    model: Number = 0.0
    share: Number = 0.0  # τ of the last step
    alpha: Number = 0.0  # α of the last step
    undone: Number = 0.0  # how many steps have been taken back

    def packed(self, like: Tensor) -> Tensor:
        """One tensor of all numbers, with a tensor's dtype and device."""
        if like.device.type == "cpu":
            return like.new_tensor(self)
        return torch.stack([like.new_zeros(()) + number for number in self])


class NewtonStep(NamedTuple):
    """A Newton step, and what it leaves for the next one."""

    step: Tensor  # (r,) coefficients, to be multiplied by −α; 0 if the step is left out
    taken_out: Tensor  # (r,) −V̂ᵀg, to be added to the gradient; 0 unless the step goes forward
    momentum: Tensor  # (r,)
    last: Tensor  # (r,) |û|⁻¹ n of this step, before τ
    trust: Tensor


class Proposal(NamedTuple):
    """A full Newton step, before the trust region."""

    c: Tensor  # (r,) V̂ᵀg
    momentum: Tensor  # (r,) with c
    step: Tensor  # (r,) |û|⁻¹ n
    terms: Tensor  # (3,) products of |û|⁻¹ n with n and with c, and of the last step with c


# -------------------------------------------------------------------------------- single numbers


def numbers_of(tensor: Tensor) -> Sequence[Number]:
    """The elements of a small tensor; on a device they stay there."""
    found: Sequence[Number] = tensor.tolist() if tensor.device.type == "cpu" else tensor.unbind()
    return found


def choose(condition: Flag, value: T, other: T) -> T:
    """``value`` if the condition holds, otherwise ``other``."""
    if isinstance(condition, Tensor):
        chosen: Any = torch.where(condition, value, other)  # type: ignore[call-overload]
        return chosen  # type: ignore[no-any-return]
    return value if condition else other


def larger(a: Number, b: Number) -> Any:
    """The larger of two numbers; the second if the first is NaN."""
    return choose(a > b, a, b)


def smaller(a: Number, b: Number) -> Any:
    """The smaller of two numbers; the second if the first is NaN."""
    return choose(a < b, a, b)


def compiled_on_devices(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function of small tensors where its first one is not on the CPU.

    Its fifty operations on single numbers would be fifty launches there (`make launches`). If
    ``torch.compile`` fails, as without a compiler, the function runs as it is.
    """
    chosen: list[Callable[..., T]] = []

    def call(*args: Any) -> T:
        if args[0].device.type == "cpu":
            return function(*args)
        if not chosen:
            chosen.append(torch.compile(function))
        try:
            return chosen[0](*args)
        except Exception:  # an error of the function itself comes again
            chosen[0] = function
            return function(*args)

    return call


# -------------------------------------------------------------------------------------- the rule


@compiled_on_devices
def propose(c: Tensor, before: NewtonStep, rates: Tensor, rule: MomentumRule) -> Proposal:
    """Let the momentum of the last step take in c = V̂ᵀg."""
    momentum = torch.add(before.momentum * rule.decay, c, alpha=rule.gain)
    newton = momentum
    if rule.nesterov:
        newton = momentum * rule.decay + rule.gain * c
    step = newton * rates
    terms = torch.stack([step @ newton, step @ c, before.last @ c])
    return Proposal(c, momentum, step, terms)


@compiled_on_devices
def settle(
    terms: Tensor, proposal: Proposal, before: NewtonStep, alpha: Number, limit: float
) -> tuple[NewtonStep, Flag]:
    """The Newton step that becomes of a proposal, and whether it takes the last one back.

    Args:
        terms: Those of the proposal, summed over all vectors. They are not finite if V̂ᵀg is not,
            on any process.
        proposal: The step to bound.
        before: The last step.
        alpha: The largest |α| of the groups.
        limit: The limit of stability; infinite if there is no trust region.
    """
    predicted, descent, crossed = numbers_of(terms)
    total = predicted + descent + crossed
    broken = total - total != 0.0  # infinite or NaN
    c, momentum, step, _ = proposal
    zeros = torch.zeros_like(step)
    left_out = NewtonStep(zeros, zeros, before.momentum, before.last, before.trust)
    if limit == math.inf:
        forward = NewtonStep(step, -c, momentum, step, before.trust)
        return _chosen(broken, left_out, forward), False

    # What has the last step done to V̂ᵀg?
    state = TrustState(*numbers_of(before.trust))
    change = state.change - state.share * crossed
    model = state.model * limit
    excess = state.scale * change / choose(model > 0.0, model, math.inf)
    length = state.share * state.alpha
    undo = (broken | (excess > EXPLODED)) & (length > 0.0) & (alpha > 0.0)

    # Bound τ by the curvature along the steps.
    grown = smaller(state.scale * GROWTH, 1.0)
    scale = choose(excess > NEAR, state.scale * AIM / larger(excess, NEAR), grown)

    # Bound it by the radius.
    square = scale * scale * predicted
    known = state.usual > 0.0
    bound = choose(known, RADIUS * state.usual, math.inf)
    share = scale * smaller(bound / larger(square, TINY), 1.0) ** 0.5
    taken = smaller(square, bound)

    # Go forward, go back, or leave this step out.
    usual = state.usual + (1.0 - USUAL_DECAY) * (taken - state.usual)
    after = state._replace(
        usual=choose(known, usual, taken),
        scale=scale,
        change=SUMS_DECAY * change + share * descent,
        model=SUMS_DECAY * state.model + share * share * predicted,
        share=share,
        alpha=alpha,
    )
    cut = TrustState(
        usual=state.usual * AFTER_UNDOING**2,
        scale=state.scale * AFTER_UNDOING,
        undone=state.undone + 1.0,
    )
    forward = NewtonStep(step * share, -c, momentum, step, after.packed(before.trust))
    way_back = -length / choose(alpha > 0.0, alpha, 1.0) * before.last
    back = NewtonStep(way_back, zeros, zeros, zeros, cut.packed(before.trust))
    return _chosen(undo, back, _chosen(broken, left_out, forward)), undo


def _chosen(condition: Flag, step: NewtonStep, other: NewtonStep) -> NewtonStep:
    """One of two steps, by a condition that may be on a device."""
    fields = zip(step, other, strict=True)
    return NewtonStep(*[choose(condition, value, another) for value, another in fields])


def renewed(trust: Tensor, *, risen: bool) -> Tensor:
    """The numbers with new pairs, which get twice the trust that the last ones had at the end.

    But no more if the loss of the curvature batch has ``risen`` since the last refresh: every step
    predicted that it would fall.
    """
    state = TrustState(*numbers_of(trust))
    scale = state.scale if risen else smaller(RENEWED * state.scale, 1.0)
    return TrustState(usual=state.usual, scale=scale, undone=state.undone).packed(trust)
