"""Numbers to log of a step along eigenvectors.

All are of this process, and nothing is sent. A number that is not known here is NaN, so that every
process has the same names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from second_order.fosi.eigenpairs import Tally
from second_order.fosi.subspace import RowBasis, Subspace
from second_order.fosi.trust import TrustRegion
from second_order.report import EpochReport
from second_order.stages import ELSEWHERE

__all__ = ["ACCOUNTS", "EPOCH_NAMES", "NAMES", "epoch_statistics", "newton_share", "statistics_of"]

ACCOUNTS = (
    "lanczos",
    "average_gradients",
    "split",
    "base",
    "newton",
    "exchange",
    "final_update",
    "wait",
    "compare",
    ELSEWHERE,
)
"""The accounts of seconds and bytes."""

NAMES = (
    "pairs",
    "eigenvalue/largest",
    "eigenvalue/smallest",
    "age/pairs",
    "lanczos/products",
    "lanczos/total_products",
    "refreshes",
    "failed",
    "rest_scale",
    "gradient_share",
    "newton_share",
    "trust_radius",
    "trust_scale",
    "undone",
)
"""The names of the numbers, but those by account."""

EPOCH_NAMES = ("epoch/number", "epoch/waited", "epoch/applied")
"""Further names of a system with epochs."""


def statistics_of(
    subspace: Subspace | None, values: Tensor, tally: Tally, step: int, trust: TrustRegion | None
) -> dict[str, float]:
    """Numbers on eigenpairs and the refreshes that found them.

    Args:
        subspace: The span of the eigenpairs in use; None without.
        values: û of the last eigenpairs that came, on the CPU.
        tally: The counts of refreshes.
        step: The number of the last step, from 0; -1 before it.
        trust: What bounds Newton steps; None without.
    """
    found = dict.fromkeys(NAMES, math.nan)
    found |= {
        "pairs": float(len(values)),
        "lanczos/products": float(tally.products),
        "lanczos/total_products": float(tally.total_products),
        "refreshes": float(tally.refreshes),
        "failed": float(tally.failures),
        "rest_scale": 1.0 if subspace is None else float(subspace.rest_scale),
    }
    if len(values):
        found["eigenvalue/largest"] = float(values.max())
        found["eigenvalue/smallest"] = float(values.min())
        found["age/pairs"] = float(step - tally.step)
    if trust is not None:
        found |= {
            "trust_radius": trust.radius,
            "trust_scale": trust.scale,
            "undone": float(trust.undone),
        }
    return found


def epoch_statistics(number: int, reports: Sequence[EpochReport]) -> dict[str, float]:
    """Numbers on the epochs of a system whose eigenpairs come by epoch.

    Args:
        number: The number of the epoch under way.
        reports: Reports of the epochs that have ended.
    """
    found = dict.fromkeys(EPOCH_NAMES, math.nan)
    found["epoch/number"] = float(number)
    if reports:
        found["epoch/waited"] = reports[-1].waited
        found["epoch/applied"] = float(reports[-1].applied)
    return found


def newton_share(subspace: Subspace, moved: Sequence[Tensor], of: Sequence[int]) -> float:
    """‖d₁‖² / (‖d₁‖² + ‖s (d₂ − V̂V̂ᵀd₂)‖²) of the last step: the Newton part's share of it.

    Of the rows that are here; NaN where whole vectors are spread over processes, and nobody has
    all of d₁.

    Args:
        subspace: The span of the eigenpairs of that step.
        moved: What :meth:`Subspace.correct` left of the base's step d₂, by chunk.
        of: Index of each chunk's group.
    """
    if subspace.taken is None or not moved or not isinstance(subspace.basis, RowBasis):
        return math.nan
    step, c, scales = subspace.taken
    stretch = subspace.rest_scale - 1.0
    rest = [d / stretch if stretch else d.clone() for d in moved]
    subspace.basis.add(rest, [-c])
    newton = [torch.zeros_like(d) for d in moved]
    subspace.basis.add(newton, [-scale * step for scale in scales], of)
    first, second = (sum(map(_square, parts)) for parts in (newton, rest))
    whole = first + subspace.rest_scale**2 * second
    return first / whole if whole > 0 else math.nan


def _square(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
