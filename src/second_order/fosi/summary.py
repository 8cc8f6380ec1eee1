"""The lines of ``summary()``: a parameter each, and whether eigenvectors span it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.fosi.pieces import Piece
from second_order.report import CurvatureReport, LayerRow

__all__ = ["eigenpair_notes", "parameter_rows"]


def parameter_rows(
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[int, str],
    pieces: Sequence[Piece],
    vectors: Tensor | None,
) -> list[LayerRow]:
    """A line for each parameter.

    Args:
        groups: The optimizer's parameter groups.
        names: Names of the parameters, by their id.
        pieces: This process's pieces of the parameters.
        vectors: Eigenvectors here, a row each; None before the first refresh.
    """
    here = {piece.param: piece.size for piece in pieces}
    rows = []
    for p in (p for group in groups for p in group["params"]):
        spanned = p.requires_grad and vectors is not None
        size = 0 if vectors is None else len(vectors) * here.get(p, 0) * vectors.element_size()
        base = "base" if p.requires_grad else "frozen"
        rows.append(
            LayerRow(
                name=names.get(id(p), "(not in the model)"),
                kind="x".join(map(str, p.shape)) or "scalar",
                parameters=p.numel(),
                status="preconditioned" if spanned else base,
                detail="spanned by the eigenvectors" if spanned else "",
                factor_bytes=size,
            )
        )
    return rows


def eigenpair_notes(report: CurvatureReport, share: float) -> list[str]:
    """Closing lines of the summary: the eigenvalues, and the products and seconds they took.

    Args:
        report: What the refreshes have found.
        share: Seconds of all refreshes, as a share of those of the base alone; or NaN.
    """
    found = "no eigenpairs yet: the base steps alone"
    if len(report.eigenvalues):
        values = ", ".join(f"{value:.3g}" for value in report.eigenvalues.tolist())
        found = f"eigenvalues at step {report.step}: {values}"
    taken = f"; {share:.1%} of the time of the base alone" if report.refreshes else ""
    return [
        found,
        f"refreshes: {report.refreshes}, not finite: {report.failures}; Hessian-vector products: "
        f"{report.total_products}" + taken,
    ]
