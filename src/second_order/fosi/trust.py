"""Bounds on Newton steps: how far the quadratic model of the loss is to be trusted.

    promise     q = nᵀ|û|⁻¹n, the square of a full Newton step's length, in units of the loss
    radius      τ <= Δ / √q, with Δ² a hundred times the usual q of the steps taken
    curvature   κ = sᵀy / sᵀ|û|s over some steps, y being what V̂ᵀg has changed by
    scale       where α τ κ comes near the limit of stability, τ is cut to half of it; then it grows

n is what momentum makes of c = V̂ᵀg, and s = −α τ |û|⁻¹ n the step that is taken. With exact pairs
of a quadratic κ is at most 1. A step of which κ says that c has been thrown far across, or after
which the gradient is not finite, is taken back.

The numbers are tensors, which stay on the device of the parameters: nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart

__all__ = [
    "TrustRegion",
    "Verdict",
    "check_numbers",
    "largest_scale",
    "newton_terms",
    "stability_limit",
]

RADIUS = 100.0  # Δ² in usual promises: a step may be ten times as long as usual
USUAL_DECAY = 0.99  # of the running mean of promises; Δ doubles in two steps at most
SUMS_DECAY = 0.8  # of the sums of κ: one step of ten times the length outweighs the rest
NEAR, AIM = 0.75, 0.5  # shares of the limit of stability: where τ is cut, and to what
GROWTH = 1.05  # of τ, at a step below that
EXPLODED = 100.0  # times the limit of stability
AFTER_UNDOING = 0.1  # times τ, where nothing tells how much too long a step was
RENEWED = 2.0  # times τ with new pairs


def stability_limit(decay: float, gain: float, nesterov: bool) -> float:
    """The bound on α τ κ below which steps with momentum come to rest on a quadratic.

    Args:
        decay: β of mom <- β mom + gain · V̂ᵀg.
        gain: The factor of what is added.
        nesterov: Whether a step looks ahead by one more decay.
    """
    ahead = 1.0 + 2.0 * decay if nesterov else 1.0
    return 2.0 * (1.0 + decay) / (gain * ahead)


def largest_scale(scales: Sequence[float | Tensor]) -> float | Tensor:
    """The largest |α| of the groups."""
    tensors = [scale for scale in scales if isinstance(scale, Tensor)]
    if not tensors:
        return max(abs(scale) for scale in scales)
    like = tensors[0]
    return torch.stack([torch.as_tensor(s).to(like).abs() for s in scales]).max()


def newton_terms(newton: Tensor, step: Tensor, c: Tensor, last: Tensor) -> Tensor:
    """The sums over vectors that :meth:`TrustRegion.judge` needs, ``(3,)``.

    Args:
        newton: n, the coefficients with momentum.
        step: |û|⁻¹ n.
        c: V̂ᵀg.
        last: −s of the last step.
    """
    return torch.stack([step @ newton, step @ c, last @ c])


def check_numbers(part: SavedPart, key: str) -> None:
    """Raise ValueError unless an entry of a checkpoint has the numbers of a region."""
    usual, scale, _, model = part.tensor(key, (4,)).tolist()
    if not (usual >= 0.0 and 0.0 <= scale <= 1.0 and model >= 0.0):
        raise part.wrong(
            key,
            f"has a usual promise of {usual:g}, a scale of {scale:g} and a model of {model:g}, "
            f"where numbers of at least 0 are needed, and a scale of at most 1",
        )


@dataclass
class Verdict:
    """What is to be done at a step.

    Attributes:
        share: τ, the share of the Newton step to take.
        undo: Whether to take the last Newton step back instead.
    """

    share: Tensor
    undo: Tensor


@dataclass
class TrustRegion:
    """What the steps so far tell of the model.

    Attributes:
        numbers: ``(4,)`` the usual promise, 0 before there is one; the bound on τ by the curvature
            along the steps; Σ sᵀy without what the coming gradient adds, and Σ sᵀ|û|s, both with
            decay.
        undone: How many steps have been taken back.
    """

    numbers: Tensor
    undone: Tensor

    @classmethod
    def new(cls) -> TrustRegion:
        """Make one that takes the model at its word."""
        return cls(torch.tensor([0.0, 1.0, 0.0, 0.0]).double(), torch.zeros(()))

    def follow(self, like: Tensor) -> None:
        """Go on with numbers of a tensor's device and dtype."""
        self.numbers, self.undone = self.numbers.to(like), self.undone.to(like.device)

    @property
    def radius(self) -> float:
        """Δ, in units of the root of the loss; infinite before the first step."""
        usual = float(self.numbers[0])
        return (RADIUS * usual) ** 0.5 if usual > 0.0 else torch.inf

    @property
    def scale(self) -> float:
        """The bound on τ by the curvature along the steps."""
        return float(self.numbers[1])

    def judge(
        self, terms: Tensor, alpha: float | Tensor, limit: float, sound: Tensor, finite: Tensor
    ) -> Verdict:
        """Look at what the last step has done, and bound the one to come.

        Args:
            terms: The result of :func:`newton_terms`, over all vectors.
            alpha: α, not negative.
            limit: The bound on α τ κ, of :func:`stability_limit`.
            sound: Whether c is finite.
            finite: Whether the gradient is.
        """
        promise, descent, last = terms.unbind()
        usual, scale, change, model = self.numbers.unbind()
        change = change - last
        excess = alpha * scale * change / (model * limit)  # not a number without a last step
        undo = ~finite | (excess > EXPLODED) | (sound & ~terms.isfinite().all())
        undo = undo & (model > 0.0) & (alpha > 0.0)
        grown = (scale * GROWTH).clamp(max=1.0)
        scale = torch.where(excess > NEAR, scale * AIM / excess, grown)

        square, bound = scale * scale * promise, RADIUS * usual
        far = (square > bound) & (usual > 0.0)
        share = torch.where(far, scale * (bound / square).sqrt(), scale)
        taken = torch.where(far, bound, square)
        mean = USUAL_DECAY * usual + (1.0 - USUAL_DECAY) * taken
        usual = torch.where(usual > 0.0, mean, taken)

        length = alpha * share
        change = SUMS_DECAY * change + length * descent
        model = SUMS_DECAY * model + length * length * promise
        after = torch.stack([usual, scale, change, model])
        sound = sound & after.isfinite().all()
        self.numbers = torch.where(undo, self._undone(), torch.where(sound, after, self.numbers))
        self.undone = self.undone + undo
        return Verdict(share, undo)

    def _undone(self) -> Tensor:
        """The numbers after a step has been taken back."""
        usual, scale, *_ = self.numbers.unbind()
        zero = torch.zeros_like(usual)
        return torch.stack([usual * AFTER_UNDOING**2, scale * AFTER_UNDOING, zero, zero])

    def renewed(self, *, risen: bool) -> None:
        """Go on with new pairs, which get twice the trust that the last ones had at the end.

        Args:
            risen: Whether the loss of the curvature batch has risen since the last refresh, where
                every step promised that it would fall. The new pairs get no more trust then.
        """
        usual, scale, *_ = self.numbers.unbind()
        scale = scale if risen else (RENEWED * scale).clamp(max=1.0)
        zero = torch.zeros_like(usual)
        self.numbers = torch.stack([usual, scale, zero, zero])
