"""The lines of ``summary()``: layers with Kronecker factors, parameters that eigenvectors span."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.finding import LeftToBase
from second_order.kronecker.layers import FactorShape
from second_order.optimizers.flat import Piece
from second_order.report import CurvatureReport, LayerRow

__all__ = ["eigenpair_notes", "layer_rows", "parameter_rows"]


SILENT = "no statistics have arrived: its forward is not called, or does not reach the loss"


def layer_rows(
    blocks: Iterable[KroneckerBlock], left: Iterable[LeftToBase], computed_by: Mapping[str, str]
) -> list[LayerRow]:
    """A line for each block and for each module left to the base.

    Args:
        blocks: Preconditioned and frozen layers.
        left: What the base trains alone.
        computed_by: Who works on a block, by its name; absent for frozen ones.
    """
    rows = [
        LayerRow(
            name=block.name,
            kind=type(block.modules[0]).__name__,
            parameters=block.size,
            status=_status(block),
            detail=SILENT if block.silent else _factors(block.shape),
            computed_by=computed_by.get(block.name, ""),
            factor_bytes=block.factor_bytes,
            inverse_bytes=block.inverse_bytes,
        )
        for block in blocks
    ]
    rows.extend(LayerRow(r.name, r.kind, r.parameters, "base", r.reason) for r in left)
    return rows


def _factors(shape: FactorShape) -> str:
    """The sizes of a layer's factors."""
    if shape.exact:
        size = shape.groups * shape.out_dim
        return f"exact, diagonal {size}" if shape.groups > 1 else f"exact {size}²"
    groups = f"{shape.groups} x " if shape.groups > 1 else ""
    squares = {k: "" if shape.is_diagonal(k) else "²" for k in shape.letters}
    return groups + ", ".join(f"{k} {shape.dim(k)}{square}" for k, square in squares.items())


def _status(block: KroneckerBlock) -> str:
    if not block.trainable:
        return "frozen"
    return "base" if block.silent else "preconditioned"


def parameter_rows(
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[int, str],
    pieces: Sequence[Piece],
    vectors: Tensor | None,
) -> list[LayerRow]:
    """A line for each parameter.

    Args:
        groups: Of the optimizer.
        names: Of the parameters, by their id.
        pieces: What this process has of the parameters.
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


def eigenpair_notes(report: CurvatureReport) -> list[str]:
    """The eigenvalues, and what they took."""
    found = "no eigenpairs yet: the base steps alone"
    if len(report.eigenvalues):
        values = ", ".join(f"{value:.3g}" for value in report.eigenvalues.tolist())
        found = f"eigenvalues at step {report.step}: {values}"
    return [
        found,
        f"refreshes: {report.refreshes}, not finite: {report.failures}; Hessian-vector products: "
        f"{report.total_products}",
    ]
