"""The numbers and the table that DHO2 and MRDHO2 show of their eigenpairs."""

from __future__ import annotations

import math

from torch import Tensor

from second_order.fosi.flat_params import FlatParams
from second_order.fosi.subspace import Basis, TrustState
from second_order.reporting.summary import CurvatureReport, LayerRow
from second_order.training.context import Training

__all__ = ["curvature_metrics", "summary_lines", "summary_rows"]


def curvature_metrics(
    report: CurvatureReport, *, last_step: int, interval: float, trust: Tensor | None
) -> dict[str, float]:
    """Return numbers to log.

    Numbers that this process does not have are NaN, so that every
    process has the same names.

    Args:
        report: The report of the last refresh.
        last_step: The number of the last step.
        interval: The number of steps from a refresh to the next one; NaN if there is
            none.
        trust: The TrustState as a tensor; None if this process has none.
    """
    largest = smallest = age = math.nan
    if len(report.eigenvalues):
        largest = float(report.eigenvalues.max())
        smallest = float(report.eigenvalues.min())
        age = last_step - report.step
    gradient_share = math.nan
    if report.gradient_share is not None:
        gradient_share = report.gradient_share
    trust_state = TrustState(scale=math.nan, rejected=math.nan)
    if trust is not None:
        trust_state = TrustState(*trust.tolist())

    numbers = {
        "pairs": len(report.eigenvalues),
        "eigenvalue/largest": largest,
        "eigenvalue/smallest": smallest,
        "age/pairs": age,
        "lanczos/products": report.products,
        "lanczos/total_products": report.total_products,
        "refreshes": report.refreshes,
        "curvature_interval": interval,
        "failed": report.failures,
        "base_scale": report.base_scale,
        "gradient_share": gradient_share,
        "trust_scale": trust_state.scale,
        "rejected": trust_state.rejected,
    }
    return {name: float(number) for name, number in numbers.items()}


def summary_rows(
    training: Training, flat_params: FlatParams, basis: Basis | None
) -> list[LayerRow]:
    """Return the summary's row for each parameter, with the bytes stored here."""
    local_sizes = {piece.param: piece.size for piece in flat_params.local_pieces}
    names = training.param_names()
    bytes_per_element = 0
    if basis is not None:
        bytes_per_element = basis.vectors[:, :1].nbytes

    rows = []
    for group in training.groups:
        for p in group["params"]:
            status = "base" if p.requires_grad else "frozen"
            detail = ""
            if p.requires_grad and basis is not None:
                status = "preconditioned"
                detail = "spanned by the eigenvectors"
            row = LayerRow(
                name=names.get(id(p), "(not in the model)"),
                kind="x".join(map(str, p.shape)) or "scalar",
                parameters=p.numel(),
                status=status,
                detail=detail,
                factor_bytes=bytes_per_element * local_sizes.get(p, 0),
            )
            rows.append(row)
    return rows


def summary_lines(report: CurvatureReport) -> list[str]:
    """Return the lines below the table of the summary."""
    eigenvalues = "no eigenpairs yet: the base steps alone"
    if len(report.eigenvalues):
        listed = ", ".join(f"{value:.3g}" for value in report.eigenvalues.tolist())
        eigenvalues = f"eigenvalues at step {report.step}: {listed}"
    products = (
        f"refreshes: {report.refreshes}, failed: {report.failures}; Hessian-vector products: "
        f"{report.total_products}"
    )
    return [eigenvalues, products]
