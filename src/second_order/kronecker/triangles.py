"""Symmetric matrices stored as their upper triangle, without index tensors.

The triangle of an n x n matrix is laid out as two rectangles, so that packing and unpacking are a
few block copies instead of a gather with n(n+1)/2 indices. With h = n // 2 and m = n - h,

    X = [ X11  X12 ]   X11: h x h      first rectangle:  X12                      (h x m)
        [  .   X22 ]   X22: m x m      second rectangle: tril(X22) | triu(X11)    (m x (h + 1))

where triu(X11) is shifted one column to the right, into the room that tril(X22) leaves.
"""

from __future__ import annotations

from torch import Tensor

__all__ = [
    "pack_upper_triangular",
    "packed_length",
    "packed_trace",
    "unpack_upper_triangular",
]


def packed_length(dim: int) -> int:
    """Elements in the triangle of a ``dim`` x ``dim`` matrix: dim (dim + 1) / 2."""
    return dim * (dim + 1) // 2


def pack_upper_triangular(matrix: Tensor) -> Tensor:
    """Pack symmetric matrices of shape ``(..., n, n)`` into ``(..., n (n + 1) / 2)``."""
    *batch, n, _ = matrix.shape
    h, m = n // 2, n - n // 2
    packed = matrix.new_empty(*batch, packed_length(n))
    first = packed[..., : h * m].view(*batch, h, m)
    second = packed[..., h * m :].view(*batch, m, h + 1)
    first.copy_(matrix[..., :h, h:])
    second[..., m:].zero_()
    second[..., :m].copy_(matrix[..., h:, h:].tril())
    second[..., :h, 1:].add_(matrix[..., :h, :h].triu())
    return packed


def packed_trace(packed: Tensor, dim: int) -> Tensor:
    """Traces, shape ``(...)``, of packed matrices of shape ``(..., dim (dim + 1) / 2)``."""
    h, m = dim // 2, dim - dim // 2
    second = packed[..., h * m :].view(*packed.shape[:-1], m, h + 1)
    lower: Tensor = second[..., :m].diagonal(dim1=-2, dim2=-1).sum(-1)
    upper: Tensor = second[..., :h, 1:].diagonal(dim1=-2, dim2=-1).sum(-1)
    return lower + upper


def unpack_upper_triangular(packed: Tensor, dim: int) -> Tensor:
    """Undo :func:`pack_upper_triangular`: ``(..., dim (dim + 1) / 2)`` to ``(..., dim, dim)``.

    Raises:
        ValueError: If the last dimension is not ``dim (dim + 1) / 2``.
    """
    if packed.shape[-1] != packed_length(dim):
        raise ValueError(
            f"a packed triangle of dimension {dim} has {packed_length(dim)} elements, "
            f"got {packed.shape[-1]}"
        )
    batch = packed.shape[:-1]
    h, m = dim // 2, dim - dim // 2
    first = packed[..., : h * m].view(*batch, h, m)
    second = packed[..., h * m :].view(*batch, m, h + 1)
    matrix = packed.new_empty(*batch, dim, dim)
    matrix[..., :h, h:].copy_(first)
    matrix[..., h:, :h].copy_(first.mT)
    lower = second[..., :m].tril()
    matrix[..., h:, h:].copy_(lower).add_(lower.tril(-1).mT)
    upper = second[..., :h, 1:].triu()
    matrix[..., :h, :h].copy_(upper).add_(upper.triu(1).mT)
    return matrix
