"""torch's Muon with its Newton-Schulz iteration in float32 on a CPU.

`torch.optim.Muon` iterates in bfloat16. Processors without bfloat16 products emulate them, so a
step of Muon takes 5 to 150 times as long there. Everything else is torch's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import _muon

__all__ = ["Muon"]

in_bfloat16 = _muon._zeropower_via_newtonschulz


def newton_schulz(
    gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Push the singular values of a matrix towards 1 by X <- a X + (b X Xᵀ + c (X Xᵀ)²) X."""
    if gradient.device.type != "cpu":
        return in_bfloat16(gradient, coefficients, steps, eps)
    a, b, c = coefficients
    tall = gradient.shape[0] > gradient.shape[1]
    x = (gradient.T if tall else gradient).float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, in float32 on a CPU."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as torch's."""
        with patch.object(_muon, in_bfloat16.__name__, newton_schulz):
            return super().step(closure)  # type: ignore[no-untyped-call]
