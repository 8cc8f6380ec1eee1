"""Numbers to log of a step along eigenvectors, and the rows of its summary.

Numbers are of this process, and nothing is sent. One that is not known here is NaN, so that every
process has the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.fosi.eigenpairs import Tally
from second_order.fosi.pieces import ParamPiece
from second_order.fosi.subspace import RowBasis, Subspace
from second_order.fosi.trust import TrustRegion
from second_order.report import EpochReport, LayerRow
from second_order.stages import ELSEWHERE

__all__ = [
    "ACCOUNTS",
    "EPOCH_NAMES",
    "NAMES",
    "epoch_metrics",
    "newton_share",
    "pair_metrics",
    "parameter_rows",
    "refresh_share",
]

BASE_ACCOUNTS = ("average_gradients", "base", "exchange", "compare", ELSEWHERE)
"""The accounts of a step of the base alone."""

ACCOUNTS = ("lanczos", "split", "newton", "final_update", "wait", *BASE_ACCOUNTS)
"""The accounts of seconds and bytes."""

NAMES = (
    *("pairs", "eigenvalue/largest", "eigenvalue/smallest", "age/pairs"),
    *("lanczos/products", "lanczos/total_products", "refreshes", "curvature_interval"),
    *("refresh_share", "failed", "rest_scale", "gradient_share", "newton_share"),
    *("trust_radius", "trust_scale", "undone"),
)
"""The names of the numbers, but those by account."""

EPOCH_NAMES = ("epoch/number", "epoch/waited", "epoch/applied")
"""Further names of a system with epochs."""


def pair_metrics(
    subspace: Subspace | None, values: Tensor, tally: Tally, step: int, trust: TrustRegion | None
) -> dict[str, float]:
    """Numbers on eigenpairs and the refreshes that found them.

    ``values`` are û of the last ones that came; ``step`` is that of the last step, -1 before it.
    """
    found = dict.fromkeys(NAMES, math.nan)
    found["pairs"] = float(len(values))
    found["lanczos/products"] = float(tally.products)
    found["lanczos/total_products"] = float(tally.total_products)
    found["refreshes"], found["failed"] = float(tally.refreshes), float(tally.failures)
    found["rest_scale"] = 1.0 if subspace is None else float(subspace.rest_scale)
    if len(values):
        found["eigenvalue/largest"] = float(values.max())
        found["eigenvalue/smallest"] = float(values.min())
        found["age/pairs"] = float(step - tally.step)
    if trust is not None:
        found["trust_radius"], found["trust_scale"] = trust.radius, trust.scale
        found["undone"] = float(trust.undone)
    return found


def refresh_share(seconds: Mapping[str, float]) -> float:
    """Seconds of all refreshes, of those of the base alone; NaN before the first step.

    Of the numbers of :meth:`~second_order.stages.Meter.read`.
    """
    base = sum(seconds[f"total_seconds/{name}"] for name in BASE_ACCOUNTS)
    return seconds["total_seconds/lanczos"] / base if base > 0.0 else math.nan


def epoch_metrics(number: int, reports: Sequence[EpochReport]) -> dict[str, float]:
    """Numbers on the epoch under way, and on the last of those that have ended."""
    last = (reports[-1].waited, float(reports[-1].applied)) if reports else (math.nan, math.nan)
    return dict(zip(EPOCH_NAMES, (float(number), *last), strict=True))


def newton_share(subspace: Subspace, moved: Sequence[Tensor], of: Sequence[int]) -> float:
    """‖d₁‖² / (‖d₁‖² + ‖s (d₂ − V̂V̂ᵀd₂)‖²) of the last step: the Newton part's share of it.

    Of the rows that are here; NaN where whole vectors are spread over processes, and nobody has
    all of d₁. ``moved`` is what :meth:`Subspace.correct` left of the base's step d₂, by chunk,
    ``of`` the index of each chunk's group.
    """
    if subspace.taken is None or not moved or not isinstance(subspace.basis, RowBasis):
        return math.nan
    step, c, scales = subspace.taken
    stretch = subspace.rest_scale - 1.0
    rest = [d / stretch if stretch else d.clone() for d in moved]
    subspace.basis.add(rest, [-c])
    newton = [torch.zeros_like(d) for d in moved]
    subspace.basis.add(newton, [-scale * step for scale in scales], of)
    first, second = (
        sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)
        for parts in (newton, rest)
    )
    whole = first + subspace.rest_scale**2 * second
    return first / whole if whole > 0 else math.nan


def parameter_rows(
    training: Training, pieces: Sequence[ParamPiece], vectors: Tensor | None
) -> list[LayerRow]:
    """A line of the summary for each parameter; ``vectors`` are the eigenvectors here, if any."""
    here, names = {piece.param: piece.size for piece in pieces}, training.names()
    rows = []
    for p in (p for group in training.groups for p in group["params"]):
        spanned = p.requires_grad and vectors is not None
        base = "base" if p.requires_grad else "frozen"
        name, kind = names.get(id(p), "(not in the model)"), "x".join(map(str, p.shape)) or "scalar"
        status = "preconditioned" if spanned else base
        detail = "spanned by the eigenvectors" if spanned else ""
        size = 0 if vectors is None else vectors[:, :1].nbytes * here.get(p, 0)
        rows.append(LayerRow(name, kind, p.numel(), status, detail, factor_bytes=size))
    return rows
