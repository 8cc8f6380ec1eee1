"""The lines of ``summary()`` for optimizers with Kronecker factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from second_order.kronecker.block import KroneckerBlock, LeftToBase
from second_order.report import LayerRow

__all__ = ["layer_rows"]


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
    rows = []
    for block in blocks:
        shape = block.shape
        groups = f"{shape.groups} x " if shape.groups > 1 else ""
        a = f"A {shape.in_dim}" if shape.diagonal_a else f"A {shape.in_dim}²"
        bias = block.bias.numel() if block.bias is not None and block.trains_bias else 0
        rows.append(
            LayerRow(
                name=block.name,
                kind=type(block.modules[0]).__name__,
                parameters=block.weight.numel() + bias,
                status=_status(block),
                detail=SILENT if block.silent else f"{groups}{a}, G {shape.out_dim}²",
                computed_by=computed_by.get(block.name, ""),
                factor_bytes=block.factor_bytes,
                inverse_bytes=block.inverse_bytes,
            )
        )
    rows.extend(LayerRow(r.name, r.kind, r.parameters, "base", r.reason) for r in left)
    return rows


def _status(block: KroneckerBlock) -> str:
    if not block.trainable:
        return "frozen"
    return "base" if block.silent else "preconditioned"
