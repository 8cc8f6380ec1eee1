"""How long the steps of preconditioned weights are: τ times the base's.

Over a base that scales its steps itself τ is 2 while a schedule moves the learning rate, and 1 at a
constant one, where longer steps end in more noise. Over others it follows what the last step did:

after a step Δ          s = -∇·Δ at the next step, whose mean gradient ∇ is not preconditioned yet:
                        the loss still falls along Δ where s > 0, and rises where the step was too
                        long
S, Z                    <- running averages of s and of |s|, debiased
τ                       <- τ exp(a (S / Z + b)), and at once by exp(s / 2 Z) where -s > 2 Z
w                       <- w + (τ - 1) Δ                after the base's step, which sees nothing

S / Z tells how often s has one sign, whatever the scale of the loss. It is looked at where layers
are refreshed, at each step of a young training and seldom later, and so is the rate; in between
nothing is done while τ is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.sharded import local

__all__ = [
    "PLAIN",
    "RATE",
    "STEP_LENGTH",
    "STEP_SIGN",
    "Lengths",
    "ScheduledLength",
    "StepLength",
]

STEP_SIGN = "step_sign"
STEP_LENGTH = ("step_length", STEP_SIGN, "step_size", "step_weight")
"""The entries of a checkpoint, in the part of every layer: τ, S, Z and the weight of these two."""

RATE = (STEP_LENGTH[0], "step_rate", "step_rate_changed")
"""The entries over an adaptive base: τ, the rate at the last refresh, and when it last moved."""

PAST = 0.8  # weight of the past in S and Z
RISES = 2.0  # times Z: a rise that shortens steps at once
# An adaptive base makes all steps equally long; those along P, which spreads over more directions
# than the gradient, change predictions less.
LONGER, RECENT = 2.0, 0.1


@dataclass(frozen=True)
class Lengths:
    """Bounds of τ, and how fast it changes.

    Attributes:
        least: The least τ.
        most: The largest.
        longer: How fast it grows: a of the top of the file where the sum is positive.
        shorter: How fast it falls: a where it is negative.
        level: b, the larger, the oftener the loss may rise along a step.
    """

    least: float
    most: float
    longer: float
    shorter: float
    level: float


PLAIN = Lengths(0.02, 1.0, 0.2, 1.0, 0.1)  # chosen as the bounds of drift are


class StepLength:
    """The factor of the steps of preconditioned weights; the same on every rank.

    Args:
        lengths: Bounds and rates; None for the same τ throughout.

    Attributes:
        factor: τ.
    """

    def __init__(self, lengths: Lengths | None = None) -> None:
        self._lengths = lengths
        self.factor = 1.0
        self._sign, self._size, self._weight = 0.0, 0.0, 0.0
        self._before: dict[Tensor, Tensor] = {}
        self._step: dict[Tensor, Tensor] = {}  # -Δ

    @property
    def follows(self) -> bool:
        """Whether τ follows what steps do."""
        return self._lengths is not None

    def measured(self, params: Iterable[Tensor]) -> Tensor | None:
        """Compute s of this rank's parameters, a scalar; None where the last step is not known.

        Args:
            params: Parameters whose mean gradients are here.
        """
        step, self._step = self._step, {}
        found = [
            torch.vdot(local(p.grad).flatten(), step[p].flatten().to(p.grad.dtype)).float()
            for p in params
            if p.grad is not None and p in step
        ]
        return torch.stack([each.to(found[0].device) for each in found]).sum() if found else None

    def keep(self, params: Sequence[Tensor], asked: bool) -> None:
        """Keep what the base's step is scaled from.

        Args:
            params: The preconditioned parameters.
            asked: Whether the step that is about to come may be looked at after it.
        """
        self._step = {}
        self._before = {}
        if (self.follows and asked) or self.factor != 1.0:
            self._before = {p: local(p).detach().clone() for p in params}

    def follow(self, s: float, rate: float, step: int) -> None:
        """Change τ at a refresh.

        Args:
            s: What the last step did; NaN tells nothing.
            rate: The learning rate.
            step: The step of the refresh.
        """
        bounds = self._lengths
        if bounds is None or not math.isfinite(s):
            return
        rises = -s > RISES * self._size > 0
        change = max(s / self._size, -4.0) / 2 if rises else 0.0
        self._weight = PAST * self._weight + 1
        self._sign += (s - self._sign) / self._weight
        self._size += (abs(s) - self._size) / self._weight
        level = self._sign / self._size + bounds.level if self._size else 0.0
        if level < 0 or not rises:
            change += level * (bounds.longer if level > 0 else bounds.shorter)
        factor = self.factor * math.exp(change)
        self.factor = min(max(factor, bounds.least), bounds.most)

    def scale(self, asked: bool) -> None:
        """Scale the base's step by τ.

        Args:
            asked: Whether it is looked at at the next step.
        """
        before, self._before = self._before, {}
        if not before:
            return
        now = [local(p) for p in before]
        old = list(before.values())
        if self.factor != 1.0:
            torch._foreach_lerp_(now, old, 1.0 - self.factor)
        if asked and self.follows:
            torch._foreach_sub_(old, now)
            self._step = before

    # ------------------------------------------------------------------------------- checkpoints

    def saved(self) -> dict[str, float]:
        """What a checkpoint has with every layer."""
        if not self.follows:
            return {}
        numbers = self.factor, self._sign, self._size, self._weight
        return dict(zip(STEP_LENGTH, numbers, strict=True))

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over what a checkpoint has; the step before is not known."""
        self._step, self._before = {}, {}
        wanted = set(STEP_LENGTH)
        found = next((part for part in saved.values() if part.keys() >= wanted), None)
        if self._lengths is None or found is None:
            return
        numbers = (found.number(name) for name in STEP_LENGTH)
        factor, self._sign, self._size, self._weight = numbers
        self.factor = min(max(factor, self._lengths.least), self._lengths.most)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before": {}, "_step": {}}


class ScheduledLength(StepLength):
    """The factor over a base that scales its steps itself: 2 while a schedule moves the rate."""

    def __init__(self) -> None:
        super().__init__()
        self._rate, self._changed = math.nan, -1

    def follow(self, s: float, rate: float, step: int) -> None:
        """Let τ be 2 if the rate has moved within the last tenth of the steps so far, else 1."""
        if rate != self._rate and not math.isnan(self._rate):
            self._changed = step
        self._rate = rate
        moves = self._changed >= 0 and step - self._changed <= RECENT * step
        self.factor = LONGER if moves else 1.0

    def saved(self) -> dict[str, float]:
        """What the length of the coming steps follows from."""
        rate = 0.0 if math.isnan(self._rate) else self._rate
        return dict(zip(RATE, (self.factor, rate, self._changed + 1), strict=True))

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over what a checkpoint has."""
        found = next((part for part in saved.values() if part.keys() >= set(RATE)), None)
        self.factor, self._rate, self._changed = 1.0, math.nan, -1
        if found is not None:
            factor, rate, changed = (found.number(name, 0.0) for name in RATE)
            self.factor = LONGER if factor > 1 else 1.0
            self._rate, self._changed = rate or math.nan, int(changed) - 1
