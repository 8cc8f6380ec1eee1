"""Bounds on Newton steps: how far the quadratic model of the loss is to be trusted.

    promise     q = nᵀ|û|⁻¹n, the square of a full Newton step's length, in units of the loss
    radius      τ <= Δ / √q, with Δ² a hundred times the usual q of the steps taken
    curvature   α κ = Σ τ nᵀ|û|⁻¹(c − c₊) / Σ τ² q over the last steps
    scale       where α τ κ comes near the limit of stability, τ is cut to half of it; then it grows

n is what momentum makes of c = V̂ᵀg, c₊ the next step's c, and −α τ |û|⁻¹ n the step that is taken.
So κ is the curvature along the steps over that which the eigenvalues tell: with exact pairs of a
quadratic at most 1. A step of which κ says that c has been thrown far across, or after which the
gradient is not finite, is taken back.

On the CPU the numbers are plain ones, as fifty operations on tensors take as long as a step of a
small model. On a device they are tensors, so that nobody waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from second_order.fosi.fused import fused

__all__ = [
    "Flag",
    "Number",
    "TrustRegion",
    "TrustVerdict",
    "choose",
    "judged",
    "largest_scale",
    "newton_step",
    "newton_terms",
    "settled",
    "stability_limit",
    "taken_in",
]

Number: TypeAlias = float | Tensor
Flag: TypeAlias = bool | Tensor

RADIUS = 100.0  # Δ² in usual promises: a step may be ten times as long as usual
USUAL_DECAY = 0.99  # of the running mean of promises; Δ doubles in two steps at most
SUMS_DECAY = 0.8  # of the sums of κ: one step of three times the length outweighs the rest
NEAR, AIM = 0.75, 0.5  # shares of the limit of stability: where τ is cut, and to what
GROWTH = 1.05  # of τ, at a step below that
EXPLODED = 100.0  # times the limit of stability
AFTER_UNDOING = 0.1  # times τ, where nothing tells how much too long a step was
RENEWED = 2.0  # times τ with new pairs


def stability_limit(decay: float, gain: float, nesterov: bool) -> float:
    """The bound on α τ κ below which steps come to rest on a quadratic.

    With mom <- decay · mom + gain · V̂ᵀg, which a step looks ahead by once more if ``nesterov``.
    """
    ahead = 1.0 + 2.0 * decay if nesterov else 1.0
    return 2.0 * (1.0 + decay) / (gain * ahead)


def largest_scale(scales: Sequence[Number]) -> Number:
    """The largest |α| of the groups."""
    tensors = [scale for scale in scales if isinstance(scale, Tensor)]
    if not tensors:
        return max(abs(float(scale)) for scale in scales)
    return torch.stack(
        [torch.as_tensor(s, device=tensors[0].device).to(tensors[0]).abs() for s in scales]
    ).max()


@fused
def taken_in(
    c: Tensor,
    momentum: Tensor,
    rates: Tensor,
    last: Tensor,
    decay: float,
    gain: float,
    nesterov: bool,
    bounded: bool,
) -> list[Tensor]:
    """The momentum that has taken in c = V̂ᵀg, and |û|⁻¹ n of it.

    If steps are ``bounded``, the results of :func:`newton_terms`, too.
    """
    momentum = torch.add(momentum * decay, c, alpha=gain)
    newton = momentum * decay + gain * c if nesterov else momentum
    step = newton * rates
    return [momentum, step, *([newton_terms(newton, step, c, last)] if bounded else [])]


def newton_terms(newton: Tensor, step: Tensor, c: Tensor, last: Tensor) -> Tensor:
    """The sums over vectors that :meth:`TrustRegion.judge` needs, ``(3,)``.

    Of n, |û|⁻¹ n, V̂ᵀg, and |û|⁻¹ n of the last step.
    """
    return torch.stack([step @ newton, step @ c, last @ c])


@fused
def settled(
    witness: Tensor,
    gradient: Tensor,
    c: Tensor,
    old: Tensor,
    momentum: Tensor,
    step: Tensor,
    *bounds: Any,
) -> list[Tensor]:
    """What becomes of a step on a device, by the rule of :meth:`TrustRegion.judge`.

    Where the sum of ``witness`` is not finite V̂ᵀg is not, and where that of ``gradient`` is not the
    gradient is not; ``old`` is the momentum before. The ``bounds``, if there are, are the results
    of :func:`newton_terms`, the last step, numbers, how many are undone, α and the limit. Returns
    −c, the step to take, NaN for none, whether V̂ᵀg is finite, and the momentum from now on; with
    bounds also last, each number, undone, and whether the last step is taken back.
    """
    sound = witness.sum().abs() < math.inf
    if not bounds:
        return [-c, torch.where(sound, step, math.nan), sound, torch.where(sound, momentum, old)]
    terms, last, numbers, undone, alpha, limit = bounds
    finite = gradient.sum().abs() < math.inf
    after, verdict = judged(numbers.unbind(), terms.unbind(), alpha, limit, sound, finite)
    undo = torch.as_tensor(verdict.undo, device=step.device)
    new = torch.where(undo, verdict.back * last, step * verdict.share)
    new = torch.where(sound | undo, new, math.nan)
    momentum = torch.where(undo, 0.0, torch.where(sound, momentum, old))
    last = torch.where(undo, 0.0, torch.where(sound, step, last))
    kept = cast(list[Tensor], after)
    return [-c, new, sound, momentum, last, *kept, undone + undo, undo]


@fused
def newton_step(
    c: Tensor,
    momentum: Tensor,
    rates: Tensor,
    last: Tensor,
    gradient: Tensor,
    decay: float,
    gain: float,
    nesterov: bool,
    *bounds: Any,
) -> list[Tensor]:
    """:func:`taken_in` and :func:`settled` of coefficients that are whole on every process."""
    new, step, *terms = taken_in(c, momentum, rates, last, decay, gain, nesterov, bool(bounds))
    witness = c.sum() + 0.0 * step.sum()
    known = (*terms, last, *bounds) if bounds else ()
    return list(settled(witness, gradient, c, momentum, new, step, *known))


def choose(condition: Flag, yes: Number, no: Number) -> Number:
    """One of two values, numbers or tensors."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _no(flag: Flag) -> Flag:
    return ~flag if isinstance(flag, Tensor) else not flag


def _finite(x: Number) -> Flag:
    return x.isfinite() if isinstance(x, Tensor) else math.isfinite(x)


def _ratio(a: Number, b: Number) -> Number:
    """The quotient a / b; a where b is 0."""
    return a / (b + (b == 0.0))


class TrustVerdict(NamedTuple):
    """What is to be done at a step; plain values on the CPU, tensors elsewhere."""

    share: Number  # τ, the share of the Newton step to take
    undo: Flag  # whether to take the last Newton step back instead
    back: Number  # the share of |û|⁻¹n of the last step that does so, at this α


def judged(
    numbers: Sequence[Number],
    terms: Sequence[Number],
    alpha: Number,
    limit: float,
    sound: Flag,
    finite: Flag,
) -> tuple[list[Number], TrustVerdict]:
    """The rule of :meth:`TrustRegion.judge`: the numbers after the step, and what to do."""
    promise, descent, last = terms
    usual, scale, change, model, before, length = numbers
    back = -_ratio(before * length, alpha)
    change = change - before * last
    excess = scale * _ratio(change, model * limit)
    far_off = (excess > EXPLODED) | _no(_finite(promise + descent + last))
    undo = (_no(finite) | (sound & far_off)) & (before * length > 0.0) & (alpha > 0.0)
    grown = scale * GROWTH
    grown = choose(grown > 1.0, 1.0, grown)
    scale = choose(excess > NEAR, scale * _ratio(AIM, excess), grown)

    square, bound = scale * scale * promise, RADIUS * usual
    far = (square > bound) & (usual > 0.0)
    share = choose(far, scale * _ratio(bound, square) ** 0.5, scale)
    taken = choose(far, bound, square)
    mean = USUAL_DECAY * usual + (1.0 - USUAL_DECAY) * taken
    usual = choose(usual > 0.0, mean, taken)

    change = SUMS_DECAY * change + share * descent
    model = SUMS_DECAY * model + share * share * promise
    after = [usual, scale, change, model, share, alpha + 0.0 * share]
    kept = sound & _finite(usual + change + model)
    first, second, *others = numbers
    less = [first * AFTER_UNDOING**2, second * AFTER_UNDOING, *(0.0 * each for each in others)]
    chosen = [
        choose(undo, cut, choose(kept, new, old))
        for cut, new, old in zip(less, after, numbers, strict=True)
    ]
    return chosen, TrustVerdict(share, undo, back)


class TrustRegion:
    """What the steps so far tell of the model: six numbers, and how many steps are taken back."""

    def __init__(self) -> None:
        # The usual promise, 0 before there is one; the bound on τ by the curvature along the steps;
        # the two sums of κ, the first without what the coming c₊ adds; τ and α of the last step.
        # A list of numbers on the CPU, a tensor elsewhere.
        self.numbers: list[Number] | Tensor = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        self.undone: Number = 0

    def follow(self, like: Tensor) -> None:
        """Go on with numbers of a tensor's device and dtype."""
        if like.device.type == "cpu":
            self.numbers, self.undone = [float(x) for x in self.numbers], int(self.undone)
        elif not isinstance(self.numbers, Tensor):
            self.numbers = torch.tensor(self.numbers, dtype=like.dtype, device=like.device)
            self.undone = like.new_full((), float(self.undone))

    def judge(
        self, terms: Tensor, alpha: float, limit: float, sound: bool, finite: bool
    ) -> TrustVerdict:
        """Look at what the last step has done, and bound the one to come, on the CPU.

        By the results of :func:`newton_terms` over all vectors and of :func:`stability_limit`, α,
        which is not negative, whether V̂ᵀg is finite, ``sound``, and whether the gradient is.
        """
        self.numbers, verdict = judged(
            list(self.numbers), terms.tolist(), alpha, limit, sound, finite
        )
        self.undone = self.undone + verdict.undo
        return verdict

    def renewed(self, *, risen: bool) -> None:
        """Go on with new pairs, which get twice the trust that the last ones had at the end.

        But no more where the loss of the curvature batch has ``risen`` since the last refresh:
        every step promised that it would fall.
        """
        usual, scale, *others = self.numbers
        twice = RENEWED * scale
        scale = scale if risen else choose(twice > 1.0, 1.0, twice)
        found = [usual, scale, *(0.0 * other for other in others)]
        on_device = isinstance(self.numbers, Tensor)
        self.numbers = torch.stack(cast(list[Tensor], found)) if on_device else found
