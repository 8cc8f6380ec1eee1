"""How curvature is stored: equal tensors as slices of a stack, symmetric matrices as triangles.

What layers keep are tensors of their own, which may be read, loaded, moved or freed one by one.
Where they are slices of one tensor, in order, that tensor is used; else they are stacked anew.

The triangle of an n x n matrix is laid out as two rectangles, so that packing and unpacking a large
one are a few block copies instead of a gather with n(n+1)/2 indices; of a small one those cost more
than the gather, and indices are few. With h = n // 2 and m = n - h,

    X = [ X11  X12 ]   X11: h x h      first rectangle:  X12                      (h x m)
        [  .   X22 ]   X22: m x m      second rectangle: tril(X22) | triu(X11)    (m x (h + 1))

where triu(X11) is shifted one column to the right, into the room that tril(X22) leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "GATHERED_UP_TO",
    "DeviceRead",
    "Numbers",
    "as_stack",
    "group_equal",
    "max_stacked_elements",
    "merge_numbers",
    "pack_upper_triangular",
    "packed_length",
    "read_numbers",
    "stack_in_place",
    "unpack_upper_triangular",
]

_base_of: Any = vars(torch._C.TensorBase)["_base"].__get__
"""The tensor that one is a view of, or None."""


def max_stacked_elements(device: torch.device) -> int:
    """Elements up to which tensors are stacked: beyond, an operation pays for being launched."""
    return 2**16 if device.type == "cpu" else 2**24


def group_equal(
    keys: Sequence[Hashable], sizes: Sequence[float] | None = None, most: float = 0
) -> list[list[int]]:
    """The positions of equal keys, together; of those with ``sizes`` no more than ``most``."""
    groups: list[list[int]] = []
    newest: dict[Hashable, list[int]] = {}  # group of each key
    filled: dict[Hashable, float] = {}  # its size
    for i, key in enumerate(keys):
        size = 0 if sizes is None else sizes[i]
        filled[key] = filled.get(key, 0.0) + size
        if key not in newest or filled[key] > most:
            newest[key] = []
            filled[key] = size
            groups.append(newest[key])
        newest[key].append(i)
    return groups


def read_numbers(*groups: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of groups of tensors; a device is waited for once."""
    flat = [tensor.reshape(-1) for group in groups for tensor in group]
    if not flat:
        return [[] for _ in groups]
    numbers = iter(torch.cat([each.to(flat[0].device) for each in flat]).tolist())
    return [list(islice(numbers, sum(map(Tensor.numel, group)))) for group in groups]


Numbers: TypeAlias = Callable[[], list[float]]
"""Returns numbers that may still be on a device until it is called."""


class DeviceRead:
    """One device-to-host copy of the numbers of many tensors, when the first of them is needed.

    The host synchronizes with the device once for everything that has been added until then.
    """

    def __init__(self) -> None:
        self._tensors: list[Sequence[Tensor]] = []
        self._numbers: list[list[float]] = []

    def add(self, tensors: Sequence[Tensor]) -> Numbers:
        """Add tensors. Returns a function that returns all their numbers, one after the other."""
        index = len(self._tensors)
        self._tensors.append(tensors)

        def numbers() -> list[float]:
            known = len(self._numbers)
            if index >= known:
                self._numbers += read_numbers(*self._tensors[known:])
            return self._numbers[index]

        return numbers


def merge_numbers(numbers: Sequence[Tensor | float], like: Tensor) -> Tensor | float:
    """The number that all layers have, as it is; else the numbers of all, ``(n,)``.

    A device gets a number that all have once.
    """
    if len({*numbers}) == 1:
        return numbers[0]
    return torch.stack(
        [n.to(like) if isinstance(n, Tensor) else like.new_full((), n) for n in numbers]
    )


def as_stack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of a shape as ``(n, *shape)``: a view of them where they lie in order, or a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first.unsqueeze(0)
    base = _base_of(first)
    at = first.storage_offset()
    step = parts[1].storage_offset() - at
    if base is None or step < first.numel() or not first.is_contiguous():
        return torch.stack(list(parts))
    for part in parts:
        if _base_of(part) is not base or part.storage_offset() != at or part.dtype != first.dtype:
            return torch.stack(list(parts))
        at += step
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))


def stack_in_place(owners: Sequence[MutableMapping[str, Tensor]], name: str) -> Tensor:
    """The tensors that owners have by a name as one, of which each has a slice from now on."""
    whole = as_stack([owner[name] for owner in owners])
    if _base_of(whole) is None:  # a copy
        for owner, part in zip(owners, whole.unbind(), strict=True):
            owner[name] = part
    return whole


# Packed by a gather: on one core 5 µs instead of 70 at n = 65, 45 instead of 120 at 320, 160 of 260
# at 577. The indices of a size take 6 n² bytes.
GATHERED_UP_TO = 320


def packed_length(dim: int) -> int:
    """Elements in the triangle of a ``dim`` x ``dim`` matrix: dim (dim + 1) / 2."""
    return dim * (dim + 1) // 2


def pack_upper_triangular(matrix: Tensor) -> Tensor:
    """Pack symmetric matrices of shape ``(..., n, n)`` into ``(..., n (n + 1) / 2)``."""
    dim = matrix.shape[-1]
    if dim <= GATHERED_UP_TO:
        return matrix.flatten(-2).index_select(-1, _gathers(dim, matrix.device).pack)
    return _pack_by_blocks(matrix)


class _Gathers(NamedTuple):
    """Indices of a triangle's elements in its matrix, and the reverse."""

    pack: Tensor
    unpack: Tensor


@lru_cache(maxsize=256)
def _gathers(dim: int, device: torch.device) -> _Gathers:
    with torch.inference_mode(False):
        places = torch.arange(dim * dim, device="cpu").view(dim, dim)
        pack = _pack_by_blocks(torch.minimum(places, places.T))
        unpack = _unpack_by_blocks(torch.arange(packed_length(dim), device="cpu"), dim)
        found = (pack, unpack.flatten())
        return _Gathers(*(i.to(device, torch.int32) for i in found))


def _pack_by_blocks(matrix: Tensor) -> Tensor:
    *batch, n, _ = matrix.shape
    h = n // 2
    packed = matrix.new_empty(*batch, packed_length(n))
    first, upper, lower = _blocks_of(packed, n)
    first.copy_(matrix[..., :h, h:])
    # Of a square, its lower triangle stays: X11 is written over the rest.
    lower.copy_(matrix[..., h:, h:])
    mask = torch.ones(h, h, dtype=torch.bool, device=matrix.device).triu_()
    upper.copy_(torch.where(mask, matrix[..., :h, :h], upper))
    return packed


class _Blocks(NamedTuple):
    """Views of X12, of a square with X11 in its upper triangle, and X22 in its lower one."""

    first: Tensor
    upper: Tensor
    lower: Tensor


def _blocks_of(packed: Tensor, dim: int) -> _Blocks:
    """The blocks of a triangle, as views."""
    batch = packed.shape[:-1]
    h, m = dim // 2, dim - dim // 2
    first = packed[..., : h * m].view(*batch, h, m)
    second = packed[..., h * m :].view(*batch, m, h + 1)
    return _Blocks(first, second[..., :h, 1:], second[..., :m])


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
    first, upper, lower = _blocks_of(packed, dim)
    h = dim // 2
    matrix = packed.new_empty(*packed.shape[:-1], dim, dim)
    matrix[..., :h, h:] = first
    matrix[..., h:, :h] = first.mT
    matrix[..., :h, :h] = upper.triu() + upper.triu(1).mT
    matrix[..., h:, h:] = lower.tril() + lower.tril(-1).mT
    return matrix
