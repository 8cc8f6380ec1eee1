"""The lines of ``summary()``: a layer each, with its factors, or why it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.model_blocks import LeftToBase
from second_order.report import LayerRow
from second_order.sharded import plain_type

__all__ = ["layer_rows"]

NONE_CAME = "no statistics have arrived: "
SILENT = f"{NONE_CAME}its forward is not called, or does not reach the loss"


def layer_rows(
    blocks: Iterable[KroneckerBlock],
    left: Mapping[LeftToBase, bool],
    computed_by: Mapping[str, str],
    why_silent: Callable[[KroneckerBlock], str],
) -> list[LayerRow]:
    """A line for each block and for each module left to the base.

    Args:
        blocks: Preconditioned and frozen layers.
        left: The parameters that the base trains alone, and whether any of them trains now.
        computed_by: The ranks that work on a block, in words, by its name; not of frozen blocks.
        why_silent: Says why no statistics of a block have come, if that is known.
    """
    rows = [
        LayerRow(
            name=block.name,
            kind=plain_type(block.modules[0]).__name__,
            parameters=block.size,
            status=_status(block),
            detail=_silence(block, why_silent) if block.state.silent else _factors(block.shape),
            computed_by=computed_by.get(block.name, ""),
            factor_bytes=block.factor_bytes,
            inverse_bytes=block.inverse_bytes,
        )
        for block in blocks
    ]
    rows.extend(
        LayerRow(r.name, r.kind, r.parameters, "base" if trains else "frozen", r.reason)
        for r, trains in left.items()
    )
    return rows


def _factors(shape: FactorShape) -> str:
    """The sizes of a layer's factors, in words."""
    if shape.exact:
        size = shape.groups * shape.out_dim
        return f"exact, diagonal {size}" if shape.groups > 1 else f"exact {size}²"
    groups = f"{shape.groups} x " if shape.groups > 1 else ""
    squares = {k: "" if shape.is_diagonal(k) else "²" for k in shape.letters}
    groups = "of gradients: " if shape.marginal else groups
    return groups + ", ".join(f"{k} {shape.dim(k)}{square}" for k, square in squares.items())


def _silence(block: KroneckerBlock, why_silent: Callable[[KroneckerBlock], str]) -> str:
    reason, unexplained = why_silent(block), block.state.unexplained
    if unexplained:
        return f"{unexplained:.0%} of its gradient unexplained: {reason}"
    return f"{NONE_CAME}{reason}" if reason else SILENT


def _status(block: KroneckerBlock) -> str:
    if not block.trainable:
        return "frozen"
    return "base" if block.state.silent else "preconditioned"
