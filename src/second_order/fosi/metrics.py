"""Numbers to log of a step along eigenvectors, and its summary.

Numbers are of this process, and nothing is sent. One that is not known here is NaN, so that every
process has the same names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.fosi.eigenpairs import RefreshedPairs
from second_order.fosi.subspace import Subspace
from second_order.fosi.trust import RADIUS
from second_order.fosi.vector import ParameterVector
from second_order.optimizers.config import FOSIOptions
from second_order.options import AUTO, value_at
from second_order.report import LayerRow, Summary

__all__ = [
    "EPOCH_NAMES",
    "NAMES",
    "newton_share",
    "pair_metrics",
    "pair_summary",
]

NAMES = (
    *("pairs", "eigenvalue/largest", "eigenvalue/smallest", "age/pairs"),
    *("lanczos/products", "lanczos/total_products", "refreshes", "curvature_interval"),
    *("failed", "rest_scale", "gradient_share", "newton_share"),
    *("trust_radius", "trust_scale", "undone"),
)
"""The names of the numbers."""

EPOCH_NAMES = ("epoch/number", "epoch/waited", "epoch/applied")
"""Further names of a system with epochs."""


def pair_metrics(
    training: Training,
    options: FOSIOptions,
    pairs: RefreshedPairs,
    values: Tensor,
    share: Tensor | None,
    moved: Sequence[Tensor],
) -> dict[str, float]:
    """Numbers on eigenpairs, the refreshes that found them, and the last step.

    ``values`` are û of the last refresh, ``share`` that of the gradient; ``moved`` is of
    :func:`newton_share`.
    """
    tally, last, subspace = pairs.tally, training.steps - 1, pairs.subspace
    found = dict.fromkeys(NAMES, math.nan)
    found["pairs"] = float(len(values))
    found["rest_scale"] = 1.0 if subspace is None else float(subspace.rest_scale)
    found["lanczos/products"] = float(tally.products)
    found["lanczos/total_products"] = float(tally.total_products)
    found["refreshes"], found["failed"] = float(tally.refreshes), float(tally.failures)
    if len(values):
        found["eigenvalue/largest"] = float(values.max())
        found["eigenvalue/smallest"] = float(values.min())
        found["age/pairs"] = float(last - tally.step)
    if options.trust_region:
        usual, found["trust_scale"] = map(float, pairs.trust.numbers[:2])
        found["trust_radius"] = math.sqrt(RADIUS * usual) or math.inf  # before the first step
        found["undone"] = float(pairs.trust.undone)
    interval = options.curvature_interval
    if interval == AUTO:
        found["curvature_interval"] = float(pairs.least_interval())
    else:
        found["curvature_interval"] = float(value_at(interval, max(last, 0)))
    if share is not None:
        found["gradient_share"] = float(share)
    if subspace is not None:
        found["newton_share"] = newton_share(subspace, moved)
    return found


def newton_share(subspace: Subspace, moved: Sequence[Tensor]) -> float:
    """‖d₁‖² / (‖d₁‖² + ‖s (d₂ − V̂V̂ᵀd₂)‖²) of the last step: the Newton part's share of it.

    Of the rows that are here; NaN where whole vectors are spread over processes, and nobody has
    all of d₁. ``moved`` is what :meth:`Subspace.correct` left of the base's step d₂, by chunk.
    """
    if subspace.taken is None or not moved or not subspace.basis.by_rows:
        return math.nan
    step, c, scales = subspace.taken
    stretch = subspace.rest_scale - 1.0
    rest = [d / stretch if stretch else d.clone() for d in moved]
    subspace.basis.add(rest, [-c])
    newton = [torch.zeros_like(d) for d in moved]
    subspace.basis.add(newton, [-scale * step for scale in scales])
    first, second = (
        sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)
        for parts in (newton, rest)
    )
    whole = first + subspace.rest_scale**2 * second
    return first / whole if whole > 0 else math.nan


def pair_summary(
    training: Training,
    vector: ParameterVector,
    options: FOSIOptions,
    pairs: RefreshedPairs,
    values: Tensor,
) -> Summary:
    """A table of every parameter; ``values`` are û of the last pairs."""
    tally, names = pairs.tally, training.names()
    vectors = None if pairs.subspace is None else pairs.subspace.basis.vectors
    here, rows = {piece.param: piece.size for piece in vector.mine}, []
    for p in (p for group in training.groups for p in group["params"]):
        spanned = p.requires_grad and vectors is not None
        base = "base" if p.requires_grad else "frozen"
        name, kind = names.get(id(p), "(not in the model)"), "x".join(map(str, p.shape)) or "scalar"
        status = "preconditioned" if spanned else base
        detail = "spanned by the eigenvectors" if spanned else ""
        size = 0 if vectors is None else vectors[:, :1].nbytes * here.get(p, 0)
        rows.append(LayerRow(name, kind, p.numel(), status, detail, factor_bytes=size))
    listed = ", ".join(f"{value:.3g}" for value in values.tolist())
    found = f"eigenvalues at step {tally.step}: {listed}"
    taken = (
        f"refreshes: {tally.refreshes}, not finite: {tally.failures}; Hessian-vector products: "
        f"{tally.total_products}"
    )
    notes = [found if len(values) else "no eigenpairs yet: the base steps alone", taken]
    title = f"{options.largest} largest and {options.smallest} smallest eigenpairs"
    layout = "row" if vector.sharded else options.layout
    if pairs.throttle is not None:
        notes.append(pairs.throttle.said)
    return Summary(training.titled(title, f"layout {layout}"), rows, notes=notes)
