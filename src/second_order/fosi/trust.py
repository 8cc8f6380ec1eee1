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

All numbers are tensors on the eigenvectors' device, so that the host does not synchronize with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = [
    "MomentumRule",
    "NewtonStep",
    "TrustState",
    "compiled_on_devices",
    "corrections",
    "judge",
    "largest_scale",
    "propose",
    "renewed",
    "settle",
]

T = TypeVar("T")

RADIUS = 100.0  # Δ² in usual predicted decreases: a step may be ten times as long as usual
USUAL_DECAY = 0.99  # of the running mean of predicted decreases; Δ doubles in two steps at most
SUMS_DECAY = 0.8  # of the sums of κ: one step of three times the length outweighs the rest
NEAR, AIM = 0.75, 0.5  # shares of the limit of stability: where τ is cut, and to what
GROWTH = 1.05  # of τ, at a step below that
EXPLODED = 100.0  # times the limit of stability
AFTER_UNDOING = 0.1  # times τ, where nothing tells how much too long a step was
RENEWED = 2.0  # times τ with new pairs


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


@dataclass(frozen=True)
class MomentumRule:
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
    """What the steps so far say about the model: tensors of one element."""

    usual: Tensor  # the usual predicted decrease; 0 before there is one
    scale: Tensor  # the bound on τ by the curvature along the steps
    change: Tensor  # the sums of κ; this one without what the coming c₊ adds
    model: Tensor
    share: Tensor  # τ of the last step
    alpha: Tensor  # α of the last step
    undone: Tensor  # how many steps have been taken back, or left out

    @staticmethod
    def start(device: torch.device, dtype: torch.dtype) -> Tensor:
        """The numbers before the first step, in one tensor, as all functions here keep them."""
        numbers = torch.zeros(len(TrustState._fields), dtype=dtype, device=device)
        numbers[1] = 1.0
        return numbers


class Verdict(NamedTuple):
    """The decision on a step."""

    state: TrustState  # from now on
    share: Tensor  # τ, the share of the Newton step to take
    undo: Tensor  # whether to take the last Newton step back instead
    back: Tensor  # the share of |û|⁻¹n of the last step that does so, at this α


class NewtonStep(NamedTuple):
    """A Newton step, and what it leaves for the next one."""

    step: Tensor  # (r,) coefficients, to be multiplied by −α; 0 if the step is left out
    momentum: Tensor  # (r,)
    last: Tensor  # (r,) |û|⁻¹ n of this step, before τ
    numbers: Tensor  # the trust region's
    taken: Tensor  # whether the step is finite
    undo: Tensor  # whether it takes the last one back


def largest_scale(scales: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """The largest |α| of the groups, on a tensor's device."""
    tensors = [scale.to(like).reshape(()) for scale in scales if isinstance(scale, Tensor)]
    numbers = [abs(scale) for scale in scales if not isinstance(scale, Tensor)]
    if not tensors:
        return like.new_full((), max(numbers))
    return torch.stack(tensors).abs().max().clamp(min=max(numbers, default=0.0))


@compiled_on_devices
def propose(
    c: Tensor,
    momentum: Tensor,
    rates: Tensor,
    last: Tensor,
    decay: float,
    gain: float,
    nesterov: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Let the momentum take in c = V̂ᵀg.

    Returns the momentum, |û|⁻¹ n, and the sums over vectors that :func:`judge` needs: the products
    of |û|⁻¹ n with n and with c, and that of the last step with c.
    """
    momentum = torch.add(momentum * decay, c, alpha=gain)
    newton = momentum * decay + gain * c if nesterov else momentum
    step = newton * rates
    return momentum, step, torch.stack([step @ newton, step @ c, last @ c])


@compiled_on_devices
def settle(
    terms: Tensor,
    step: Tensor,
    momentum: Tensor,
    old_momentum: Tensor,
    last: Tensor,
    numbers: Tensor,
    alpha: Tensor,
    limit: float,
    bounded: bool,
) -> tuple[Tensor, ...]:
    """The fields of the :class:`NewtonStep` that becomes of what :func:`propose` returns.

    ``terms`` are the sums over all vectors. They are not finite if V̂ᵀg is not, on any process.
    """
    state = TrustState(*numbers.unbind())
    sound = terms.sum().abs() < math.inf
    if not bounded:
        after = state._replace(undone=state.undone + ~sound)
        kept = torch.where(sound, momentum, old_momentum)
        nothing = torch.zeros_like(sound)
        step = torch.where(sound, step, 0.0)
        return step, kept, last.clone(), torch.stack(after), sound, nothing
    verdict = judge(state, terms, alpha, limit, sound)
    undo = verdict.undo
    new = torch.where(sound, step * verdict.share, 0.0)
    new = torch.where(undo, verdict.back * last, new)
    momentum = torch.where(undo, 0.0, torch.where(sound, momentum, old_momentum))
    last = torch.where(undo, 0.0, torch.where(sound, step, last))
    return new, momentum, last, torch.stack(verdict.state), sound | undo, undo


@compiled_on_devices
def corrections(
    c: Tensor, step: Tensor, rest_scale: float, *scales: float | Tensor
) -> tuple[Tensor, ...]:
    """The coefficients −α step − s V̂ᵀd₂ for each α, and a sum that is finite if they are."""
    steps = [-scale * step - rest_scale * c for scale in scales]
    return *steps, torch.stack(steps).sum()


def judge(state: TrustState, terms: Tensor, alpha: Tensor, limit: float, sound: Tensor) -> Verdict:
    """Look at what the last step has done, and bound the one to come."""
    predicted, descent, last = terms.unbind()

    # What has the last step done to V̂ᵀg? Without a last step the excess is 0 / 0.
    change = state.change - state.share * last
    excess = state.scale * change / (state.model * limit)
    moved = (state.share * state.alpha > 0.0) & (alpha > 0.0)
    undo = (~sound | (excess > EXPLODED)) & moved
    back = -state.share * state.alpha / alpha

    # Bound τ by the curvature along the steps.
    grown = (state.scale * GROWTH).clamp(max=1.0)
    scale = torch.where(excess > NEAR, state.scale * AIM / excess, grown)

    # Bound it by the radius.
    square = scale * scale * predicted
    known = state.usual > 0.0
    bound = torch.where(known, RADIUS * state.usual, math.inf)
    share = scale * (bound / square).clamp(max=1.0).sqrt()
    taken = torch.minimum(square, bound)
    mean = USUAL_DECAY * state.usual + (1.0 - USUAL_DECAY) * taken

    # The numbers after this step; after a step back; or as they were, if this one is left out.
    none = torch.zeros_like(share)
    after = state._replace(
        usual=torch.where(known, mean, taken),
        scale=scale,
        change=SUMS_DECAY * change + share * descent,
        model=SUMS_DECAY * state.model + share * share * predicted,
        share=share,
        alpha=alpha + none,
    )
    cut = TrustState(
        usual=state.usual * AFTER_UNDOING**2,
        scale=state.scale * AFTER_UNDOING,
        change=none,
        model=none,
        share=none,
        alpha=none,
        undone=state.undone + 1.0,
    )
    left_out = state._replace(undone=state.undone + 1.0)
    numbers = torch.where(sound, torch.stack(after), torch.stack(left_out))
    numbers = torch.where(undo, torch.stack(cut), numbers)
    return Verdict(TrustState(*numbers.unbind()), share, undo, back)


def renewed(numbers: Tensor, *, risen: bool) -> Tensor:
    """The numbers with new pairs, which get twice the trust that the last ones had at the end.

    But no more if the loss of the curvature batch has ``risen`` since the last refresh: every step
    predicted that it would fall.
    """
    state = TrustState(*numbers.unbind())
    none = torch.zeros_like(state.scale)
    scale = state.scale if risen else (RENEWED * state.scale).clamp(max=1.0)
    fresh = state._replace(scale=scale, change=none, model=none, share=none, alpha=none)
    return torch.stack(fresh)
