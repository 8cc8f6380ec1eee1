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
    "may_be",
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
    undone: Tensor  # how many steps have been taken back

    @staticmethod
    def start(device: torch.device, dtype: torch.dtype) -> Tensor:
        """The numbers before the first step, in one tensor, as all functions here keep them."""
        numbers = torch.zeros(len(TrustState._fields), dtype=dtype, device=device)
        numbers[1] = 1.0
        return numbers


class NewtonStep(NamedTuple):
    """A Newton step, and what it leaves for the next one."""

    step: Tensor  # (r,) coefficients, to be multiplied by −α; 0 if the step is left out
    taken_out: Tensor  # (r,) −V̂ᵀg, to be added to the gradient; 0 unless the step goes forward
    momentum: Tensor  # (r,)
    last: Tensor  # (r,) |û|⁻¹ n of this step, before τ
    numbers: Tensor  # the trust region's
    taken: Tensor  # whether there is a step, forward or back
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
    c: Tensor,
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
    sound = terms.sum().abs() < math.inf
    taken = sound
    if bounded:
        numbers, share, undo, back = judge(numbers, terms, alpha, limit, sound)
        new = torch.where(sound, step * share, 0.0)
        new = torch.where(undo, back * last, new)
        taken = sound | undo
        sound = sound & ~undo
        old_momentum = torch.where(undo, 0.0, old_momentum)
        last = torch.where(undo, 0.0, last)
    else:
        new = torch.where(sound, step, 0.0)
        undo = torch.zeros_like(sound)
        numbers = numbers.clone()
    momentum = torch.where(sound, momentum, old_momentum)
    last = torch.where(sound, step, last)
    return new, torch.where(sound, -c, 0.0), momentum, last, numbers, taken, undo


@compiled_on_devices
def corrections(
    c: Tensor,
    step: Tensor,
    check: Tensor,
    taken: Tensor,
    rest_scale: float,
    *scales: float | Tensor,
) -> tuple[Tensor, ...]:
    """S − 1, and the coefficients −α step − s V̂ᵀd₂ for each α.

    All are 0 unless a step is ``taken``, and the sum ``check`` of V̂ᵀd₂ over all vectors is finite.
    """
    taken = taken & (check.abs() < math.inf)
    steps = [torch.where(taken, -scale * step - rest_scale * c, 0.0) for scale in scales]
    return torch.where(taken, rest_scale - 1.0, torch.zeros_like(check)), *steps


def may_be(flag: Tensor) -> bool:
    """Whether a flag may be true: on the CPU it costs nothing to look."""
    return flag.device.type != "cpu" or bool(flag)


def judge(
    numbers: Tensor, terms: Tensor, alpha: Tensor, limit: float, sound: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Look at what the last step has done, and bound the one to come.

    Returns:
        The numbers after this step; τ, the share of the Newton step to take; whether to take the
        last step back instead; and the share of that step's |û|⁻¹n that does so, at this α.
    """
    state = TrustState(*numbers.unbind())
    predicted, descent, last = terms.unbind()

    # What has the last step done to V̂ᵀg? Without a last step the excess is 0 / 0.
    change = state.change - state.share * last
    excess = state.scale * change / (state.model * limit)
    length = state.share * state.alpha
    undo = (~sound | (excess > EXPLODED)) & (length > 0.0) & (alpha > 0.0)

    # Bound τ by the curvature along the steps.
    grown = (state.scale * GROWTH).clamp(max=1.0)
    scale = torch.where(excess > NEAR, state.scale * AIM / excess, grown)

    # Bound it by the radius.
    square = scale * scale * predicted
    known = state.usual > 0.0
    bound = torch.where(known, RADIUS * state.usual, math.inf)
    share = scale * (bound / square).clamp(max=1.0).sqrt()
    taken = torch.minimum(square, bound)

    # The numbers after this step; after a step back; or as they were, if this one is left out.
    after = state._replace(
        usual=torch.where(known, torch.lerp(state.usual, taken, 1.0 - USUAL_DECAY), taken),
        scale=scale,
        change=SUMS_DECAY * change + share * descent,
        model=SUMS_DECAY * state.model + share * share * predicted,
        share=share,
        alpha=alpha,
    )
    none = torch.zeros_like(share)
    cut = TrustState(
        usual=state.usual * AFTER_UNDOING**2,
        scale=state.scale * AFTER_UNDOING,
        change=none,
        model=none,
        share=none,
        alpha=none,
        undone=state.undone + 1.0,
    )
    numbers = torch.where(sound, torch.stack(after), numbers)
    numbers = torch.where(undo, torch.stack(cut), numbers)
    return numbers, share, undo, -length / alpha


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
