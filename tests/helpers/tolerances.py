"""How near tensors are to one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def close(actual: Iterable[Tensor], expected: Iterable[Tensor], rtol: float = 1e-8) -> None:
    """Equal up to rounding, elements measured by their tensor's largest."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=rtol, atol=rtol * float(b.detach().abs().max()) + 1e-14
        )


def near(actual: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    """As `close`, of one tensor."""
    close([actual], [expected], rtol)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((actual - expected).norm() / expected.norm())
