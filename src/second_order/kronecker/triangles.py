"""Symmetric matrices stored as their upper triangle.

The triangle of an n x n matrix is laid out as two rectangles, so that packing and unpacking a large
one are a few block copies instead of a gather with n(n+1)/2 indices; of a small one those cost more
than the gather, and indices are few. With h = n // 2 and m = n - h,

    X = [ X11  X12 ]   X11: h x h      first rectangle:  X12                      (h x m)
        [  .   X22 ]   X22: m x m      second rectangle: tril(X22) | triu(X11)    (m x (h + 1))

where triu(X11) is shifted one column to the right, into the room that tril(X22) leaves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "GATHERED_UP_TO",
    "Blocks",
    "blocks_of",
    "empty_symmetric",
    "pack_from_upper",
    "pack_upper_triangular",
    "packed_length",
    "packed_trace",
    "times_packed",
    "unpack_upper_triangular",
    "write_band",
    "write_last_row",
]

MIRROR_BLOCK = 256
# Packed by a gather: on one core 5 µs instead of 70 at n = 65, 45 instead of 120 at 320, 160 of 260
# at 577. The indices of a size take 6 n² bytes.
GATHERED_UP_TO = 320


def packed_length(dim: int) -> int:
    """Elements in the triangle of a ``dim`` x ``dim`` matrix: dim (dim + 1) / 2."""
    return dim * (dim + 1) // 2


def pack_upper_triangular(matrix: Tensor) -> Tensor:
    """Pack symmetric matrices of shape ``(..., n, n)`` into ``(..., n (n + 1) / 2)``."""
    if matrix.shape[-1] <= GATHERED_UP_TO:
        return pack_from_upper(matrix)
    return _pack_by_blocks(matrix)


def pack_from_upper(matrix: Tensor) -> Tensor:
    """Pack as :func:`pack_upper_triangular`, without reading elements below the diagonal."""
    indices = _gathers(matrix.shape[-1], matrix.device)
    return matrix.flatten(-2).index_select(-1, indices.pack)


class _Gathers(NamedTuple):
    """Indices of a triangle's elements in its matrix, the reverse, and of the diagonal."""

    pack: Tensor
    unpack: Tensor
    diagonal: Tensor


@lru_cache(maxsize=256)
def _gathers(dim: int, device: torch.device) -> _Gathers:
    with torch.inference_mode(False):
        places = torch.arange(dim * dim, device="cpu").view(dim, dim)
        pack = _pack_by_blocks(torch.minimum(places, places.T))
        unpack = _unpack_by_blocks(torch.arange(packed_length(dim), device="cpu"), dim)
        found = (pack, unpack.flatten(), unpack.diagonal())
        return _Gathers(*(i.to(device, torch.int32) for i in found))


def _pack_by_blocks(matrix: Tensor) -> Tensor:
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


def empty_symmetric(like: Tensor, groups: int, dim: int, triangular: bool) -> Tensor:
    """An empty target for :func:`write_band`: ``(groups, n, n)``, or that as a triangle."""
    return like.new_empty(groups, *((packed_length(dim),) if triangular else (dim, dim)))


class Blocks(NamedTuple):
    """Views of X12, of a square with X11 in its upper triangle, and X22 in its lower one."""

    first: Tensor
    upper: Tensor
    lower: Tensor


def write_band(target: Tensor | Blocks, dim: int, start: int, band: Tensor) -> None:
    """Put some rows of a symmetric n x n matrix in their place; it need not exist as a whole.

    The ``target`` is of :func:`empty_symmetric`, or :func:`blocks_of` a triangle. The band
    ``(groups, rows, columns)`` begins at row and column ``start``, and goes to column n or less.
    """
    h, (rows, columns) = dim // 2, band.shape[-2:]
    stop, end = start + rows, start + columns
    if isinstance(target, Tensor) and target.dim() == 3:
        target[:, start:stop, start:end] = band
        target[:, stop:end, start:stop] = band[..., rows:].mT
        return
    if isinstance(target, Tensor):
        target = blocks_of(target, dim)
    if start < h < stop:
        write_band(target, dim, start, band[..., : h - start, :])
        write_band(target, dim, h, band[..., h - start :, h - start :])
    else:
        first, upper, lower = target
        corner, rest = band[..., :rows], band[..., rows:]
        if start < h:
            _write_triangle(upper[..., start:stop, start:stop], corner, lower=False)
            upper[..., start:stop, stop : min(h, end)].copy_(rest[..., : max(0, h - stop)])
            first[..., start:stop, : max(0, end - h)].copy_(rest[..., h - stop :])
        else:
            here = slice(start - h, stop - h)
            _write_triangle(lower[..., here, here], corner.mT, lower=True)
            lower[..., stop - h : end - h, here].copy_(rest.mT)


def write_last_row(target: Tensor | Blocks, dim: int, row: Tensor) -> None:
    """Write the last row and column, ``(groups, n)``, of a target of :func:`write_band`."""
    if isinstance(target, Tensor) and target.dim() == 3:
        target[:, -1] = target[:, :, -1] = row
        return
    first, _, lower = blocks_of(target, dim) if isinstance(target, Tensor) else target
    first[..., -1] = row[..., : dim // 2]
    lower[..., -1, :] = row[..., dim // 2 :]


def _write_triangle(target: Tensor, square: Tensor, *, lower: bool) -> None:
    """Write one triangle of a square and leave the other as it is, whatever it is."""
    target.copy_(torch.where(_triangle(square, lower=lower), square, target))


def _triangle(square: Tensor, *, lower: bool) -> Tensor:
    ones = torch.ones(square.shape[-2:], dtype=torch.bool, device=square.device)
    return ones.tril_() if lower else ones.triu_()


def packed_trace(packed: Tensor, dim: int) -> Tensor:
    """Traces, shape ``(...)``, of packed matrices of shape ``(..., dim (dim + 1) / 2)``."""
    if dim <= GATHERED_UP_TO:
        return packed.index_select(-1, _gathers(dim, packed.device).diagonal).sum(-1)
    _, upper, lower = blocks_of(packed, dim)
    traces: Tensor = upper.diagonal(dim1=-2, dim2=-1).sum(-1)
    return traces + lower.diagonal(dim1=-2, dim2=-1).sum(-1)


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
    if dim <= GATHERED_UP_TO:
        matrix = packed.index_select(-1, _gathers(dim, packed.device).unpack)
        return matrix.view(*packed.shape[:-1], dim, dim)
    return _unpack_by_blocks(packed, dim)


def _unpack_by_blocks(packed: Tensor, dim: int) -> Tensor:
    first, upper, lower = blocks_of(packed, dim)
    h = dim // 2
    matrix = packed.new_empty(*packed.shape[:-1], dim, dim)
    matrix[..., :h, h:].copy_(first)
    matrix[..., h:, :h].copy_(first.mT)
    matrix[..., :h, :h].copy_(_mirrored(upper, lower=False))
    matrix[..., h:, h:].copy_(_mirrored(lower, lower=True))
    return matrix


def times_packed(left: Tensor, packed: Tensor) -> Tensor:
    """``left @ X``, left ``(groups, m, n)``, for a packed X; a quarter is unpacked at a time."""
    dim = left.shape[-1]
    first, upper, lower = blocks_of(packed, dim)
    left1, left2 = left[..., : dim // 2], left[..., dim // 2 :]
    right = torch.baddbmm(left1 @ first, left2, _mirrored(lower, lower=True))
    return torch.cat(
        [torch.baddbmm(left2 @ first.mT, left1, _mirrored(upper, lower=False)), right], -1
    )


def blocks_of(packed: Tensor, dim: int) -> Blocks:
    """The blocks of a triangle, as views."""
    batch = packed.shape[:-1]
    h, m = dim // 2, dim - dim // 2
    first = packed[..., : h * m].view(*batch, h, m)
    second = packed[..., h * m :].view(*batch, m, h + 1)
    return Blocks(first, second[..., :h, 1:], second[..., :m])


def _mirrored(square: Tensor, *, lower: bool) -> Tensor:
    """A new symmetric matrix from the lower, or the upper, triangle of ``(..., n, n)``.

    In blocks, since a transposed copy of a large matrix misses the cache at every element.
    """
    size = square.shape[-1]
    matrix = square.clone(memory_format=torch.contiguous_format)
    for i in range(0, size, MIRROR_BLOCK):
        j = min(i + MIRROR_BLOCK, size)
        block = square[..., i:j, i:j]
        matrix[..., i:j, i:j] = torch.where(_triangle(block, lower=lower), block, block.mT)
        if lower:
            matrix[..., i:j, j:] = square[..., j:, i:j].mT
        else:
            matrix[..., j:, i:j] = square[..., i:j, j:].mT
    return matrix
