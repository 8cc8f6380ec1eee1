"""Numbers to log of a step along eigenvectors, and its summary.

Numbers are of this process, and nothing is sent. One that is not known here is NaN, so that every
process has the same names.
"""

from __future__ import annotations

import math

from second_order.fosi.eigenpairs import RefreshedPairs
from second_order.fosi.flat_params import FlatParams
from second_order.fosi.trust import TrustState
from second_order.optimizers.config import FOSIOptions
from second_order.reporting.summary import CurvatureReport, LayerRow, Summary
from second_order.training.context import Training

__all__ = ["pair_metrics", "pair_summary"]


def pair_metrics(
    training: Training, options: FOSIOptions, pairs: RefreshedPairs, report: CurvatureReport
) -> dict[str, float]:
    """Numbers on the eigenpairs, the refreshes that found them, and the trust region."""
    values, last = report.eigenvalues, training.steps - 1
    found = len(values) > 0
    scale = undone = math.nan
    if options.trust_region and pairs.subspace is not None:
        state = TrustState(*pairs.subspace.newton.trust.tolist())
        scale = state.scale
        undone = state.undone
    share = report.gradient_share
    return {
        "pairs": float(len(values)),
        "eigenvalue/largest": float(values.max()) if found else math.nan,
        "eigenvalue/smallest": float(values.min()) if found else math.nan,
        "age/pairs": float(last - report.step) if found else math.nan,
        "lanczos/products": float(report.products),
        "lanczos/total_products": float(report.total_products),
        "refreshes": float(report.refreshes),
        "curvature_interval": float(pairs.interval(max(last, 0))),
        "failed": float(report.failures),
        "rest_scale": report.rest_scale,
        "gradient_share": math.nan if share is None else share,
        "trust_scale": scale,
        "undone": undone,
    }


def pair_summary(
    training: Training,
    vector: FlatParams,
    options: FOSIOptions,
    pairs: RefreshedPairs,
    report: CurvatureReport,
) -> Summary:
    """A table of every parameter, and of the eigenvalues of the last pairs."""
    names = training.names()
    vectors = None if pairs.subspace is None else pairs.subspace.basis.vectors
    here = {piece.param: piece.rows.stop - piece.rows.start for piece in vector.mine}
    rows = []
    for p in (p for group in training.groups for p in group["params"]):
        spanned = p.requires_grad and vectors is not None
        base = "base" if p.requires_grad else "frozen"
        rows.append(
            LayerRow(
                name=names.get(id(p), "(not in the model)"),
                kind="x".join(map(str, p.shape)) or "scalar",
                parameters=p.numel(),
                status="preconditioned" if spanned else base,
                detail="spanned by the eigenvectors" if spanned else "",
                factor_bytes=0 if vectors is None else vectors[:, :1].nbytes * here.get(p, 0),
            )
        )
    listed = ", ".join(f"{value:.3g}" for value in report.eigenvalues.tolist())
    notes = [
        f"eigenvalues at step {report.step}: {listed}"
        if listed
        else "no eigenpairs yet: the base steps alone",
        f"refreshes: {report.refreshes}, not finite: {report.failures}; Hessian-vector products: "
        f"{report.total_products}",
    ]
    if pairs.throttle is not None:
        notes.append(pairs.throttle.said)
    title = f"{options.largest} largest and {options.smallest} smallest eigenpairs"
    layout = "row" if vector.sharded else options.layout
    return Summary(training.titled(title, f"layout {layout}"), rows, lines=notes)
