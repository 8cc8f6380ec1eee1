"""Handle the tensors of many layers together, and pack symmetric matrices.

**Groups and numbers.** :func:`group_equal` finds the layers that one kernel can handle
together. :class:`DeviceRead` copies the numbers of many tensors to the host in one
transfer.

**Stacks.** Each layer owns its tensors, which code may read, load, move or free one by
one. If the tensors of several layers are consecutive slices of one tensor,
:func:`as_stack` returns a view of it. Otherwise it copies them into a new stack, and
:func:`stack_in_place` then gives each layer its slice of that stack, so that the next
call finds a view.

**Triangles.** The triangle of an n x n matrix is stored as two rectangles. Packing and
unpacking a large matrix then take a few block copies instead of a gather, whose indices
take memory. For a small matrix the gather is faster. With h = n // 2 and m = n - h,

    X = [ X11  X12 ]    X11: h x h    first:  X12                       h x m
        [  .   X22 ]    X22: m x m    second: tril(X22) | triu(X11)     m x (h + 1)

where triu(X11) is shifted one column to the right, into the entries that tril(X22)
leaves free. For n = 4, with capital letters for X11 and X22:

        [ A  B  c  d ]                                  [ E  A  B ]
    X = [ B  D  f  g ]    first: [ c  d ]    second:    [ F  G  D ]
        [ c  f  E  F ]           [ f  g ]
        [ d  g  F  G ]                       packed: c d f g E A B F G D

This is not the order of ``torch.triu_indices``, which would be A B c d D f g E F G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "GATHERED_UP_TO",
    "DeviceRead",
    "as_stack",
    "group_equal",
    "join_groups",
    "max_stacked_elements",
    "merge_numbers",
    "pack_from_blocks",
    "pack_upper_triangular",
    "packed_length",
    "read_numbers",
    "stack_in_place",
    "unpack_upper_triangular",
]

# ------------------------------------------------------------------- groups and numbers


def max_stacked_elements(device: torch.device) -> int:
    """Return how many elements a stack may have if tensors must be copied into it.

    One kernel on a stack replaces one launch per tensor. On larger tensors, a kernel
    takes much longer than its launch, so a stack would save little.
    """
    return 2**16 if device.type == "cpu" else 2**24


def group_equal(
    keys: Sequence[Hashable],
    sizes: Sequence[float] | None = None,
    max_size: float = math.inf,
) -> list[list[int]]:
    """Group the indices of equal keys, in the order in which the keys first appear.

    For example, the keys ``"a", "b", "a"`` have the groups ``[0, 2], [1]``.

    Args:
        keys: The keys.
        sizes: The size of each entry, for ``max_size``.
        max_size: The limit of a group's total size. A larger entry has its own group.
    """
    groups: list[list[int]] = []
    totals: list[float] = []  # the sizes of the groups
    newest_group: dict[Hashable, int] = {}
    for i, key in enumerate(keys):
        size = 0.0 if sizes is None else sizes[i]
        index = newest_group.get(key)
        if index is None or totals[index] + size > max_size:
            index = len(groups)
            groups.append([])
            totals.append(0.0)
            newest_group[key] = index
        groups[index].append(i)
        totals[index] += size
    return groups


def read_numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Read the numbers of tensors on any devices, with one device-to-host copy."""
    if not tensors:
        return []
    device = tensors[0].device
    flat = torch.cat([tensor.flatten().to(device) for tensor in tensors])
    numbers: list[float] = flat.tolist()
    return numbers


class DeviceRead:
    """Collects tensors, and copies all their numbers to the host in one transfer.

    The first call of :meth:`numbers` copies everything that was added before it:

        losses = read.add(loss_tensors)
        norms = read.add(norm_tensors)
        read.numbers(losses)    # copies the numbers of both lists
        read.numbers(norms)     # copies nothing
    """

    def __init__(self) -> None:
        self._unread: list[Tensor] = []
        self._numbers: list[float] = []  # read so far, in order
        self._size = 0  # how many numbers were added

    def add(self, tensors: Iterable[Tensor]) -> slice:
        """Add tensors, and return the place of their numbers for :meth:`numbers`."""
        start = self._size
        for tensor in tensors:
            self._unread.append(tensor)
            self._size += tensor.numel()
        return slice(start, self._size)

    def numbers(self, place: slice) -> list[float]:
        """Return the numbers at a place. Read the device if they were not read yet."""
        if place.stop > len(self._numbers):
            self._numbers += read_numbers(self._unread)
            self._unread = []
        return self._numbers[place]


def merge_numbers(numbers: Sequence[Tensor | float], like: Tensor) -> Tensor | float:
    """Return the number that all layers share; if they differ, stack them as ``(n,)``.

    A shared number is returned as it is, and not moved to the device of ``like``. Then
    the caller can move it once instead of n times.
    """
    # Tensors are equal here only if they are one object: to compare their values, the
    # host would have to synchronize with the device.
    if len(set(numbers)) == 1:
        return numbers[0]
    scalars: list[Tensor] = []
    for number in numbers:
        if isinstance(number, Tensor):
            scalars.append(number.to(like))
        else:
            scalars.append(like.new_full((), number))
    return torch.stack(scalars)


# ------------------------------------------------------------------------------- stacks


def as_stack(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape as ``(n, *shape)``.

    Returns a view of consecutive slices of one tensor, and a copy of other tensors.
    """
    first = parts[0]
    if len(parts) == 1:
        return first.unsqueeze(0)

    # Consecutive slices have the same base, and equal distances in its memory. The
    # distance is shorter than a slice if one slice is repeated, or if slices overlap.
    base = first._base
    offset = first.storage_offset()
    distance = parts[1].storage_offset() - offset
    if base is None or distance < first.numel():
        return torch.stack(list(parts))
    for part in parts:
        is_next = part._base is base and part.storage_offset() == offset
        # A slice that is not contiguous may be transposed or expanded.
        if not is_next or part.dtype != first.dtype or not part.is_contiguous():
            return torch.stack(list(parts))
        offset += distance
    return first.as_strided((len(parts), *first.shape), (distance, *first.stride()))


def join_groups(parts: Sequence[Tensor]) -> Tensor:
    """Join layers' tensors ``(groups, ...)`` to ``(layers x groups, ...)``.

    Returns a view whenever :func:`as_stack` does. If there is only one tensor, returns
    that tensor.
    """
    if len(parts) == 1:
        return parts[0]
    return as_stack(parts).flatten(0, 1)


def stack_in_place(owners: Sequence[MutableMapping[str, Tensor]], name: str) -> Tensor:
    """Stack the owners' tensors of a name, and give each owner its slice of the stack.

    If the tensors are slices of one stack already, or if there is only one tensor,
    nothing is copied or replaced.
    """
    if len(owners) == 1:
        return owners[0][name].unsqueeze(0)
    stack = as_stack([owner[name] for owner in owners])
    # A view has a base. The result of torch.stack has none.
    is_copy = stack._base is None
    if is_copy:
        for owner, part in zip(owners, stack.unbind(), strict=True):
            owner[name] = part
    return stack


# ---------------------------------------------------------------------------- triangles


# Largest n whose triangles are packed by a gather. For n = 320, packing and unpacking
# take 85 µs on one core by gathers, and 137 by block copies. The indices of a gather
# take 6 n² bytes for each n, which would be too much for large n. The gathers work on
# two dimensions, because on a CPU ``index_select`` is ten times slower along the last
# of three or more.
GATHERED_UP_TO = 320


def packed_length(dim: int) -> int:
    """Number of elements in the triangle of a ``dim`` x ``dim`` matrix."""
    return dim * (dim + 1) // 2


def pack_upper_triangular(matrix: Tensor) -> Tensor:
    """Pack symmetric matrices of shape ``(..., n, n)`` into ``(..., n (n + 1) / 2)``.

    Products such as xᵀ x may be asymmetric in the last bit. This reads the elements
    above the diagonal, with one exception: if n > GATHERED_UP_TO, it reads those of X22
    below the diagonal.
    """
    dim = matrix.shape[-1]
    if dim <= GATHERED_UP_TO:
        indices = _gather_indices(dim, matrix.device)
        rows = matrix.reshape(-1, dim * dim)
        packed = rows.index_select(1, indices.pack)
        return packed.view(*matrix.shape[:-2], packed.shape[1])
    return _pack_by_blocks(matrix)


class _GatherIndices(NamedTuple):
    """Indices that gather a triangle from its matrix, and the reverse."""

    pack: Tensor  # (n (n + 1) / 2,)
    unpack: Tensor  # (n²,)


@lru_cache(maxsize=256)
def _gather_indices(dim: int, device: torch.device) -> _GatherIndices:
    """The indices of the gathers for one dimension.

    If each element of a matrix is its own index, then its packed triangle lists the
    indices that packing reads. Likewise, an unpacked triangle of indices lists those
    that unpacking reads.
    """
    # Leave inference mode, so that the cached tensors can be used with autograd.
    with torch.inference_mode(False):
        indices = torch.arange(dim * dim, device="cpu").view(dim, dim)
        # An element above the diagonal has a smaller index than its mirror image.
        pack = _pack_by_blocks(torch.minimum(indices, indices.T))
        unpack = _unpack_by_blocks(torch.arange(packed_length(dim), device="cpu"), dim)
        return _GatherIndices(
            pack=pack.to(device, torch.int32),
            unpack=unpack.flatten().to(device, torch.int32),
        )


def _pack_by_blocks(matrix: Tensor) -> Tensor:
    """Pack by three block copies, of X12, X22 and X11."""

    def block(rows: slice, columns: slice) -> Tensor:
        return matrix[..., rows, columns]

    return pack_from_blocks(matrix.shape[-1], block)


def pack_from_blocks(dim: int, block: Callable[[slice, slice], Tensor]) -> Tensor:
    """Pack symmetric matrices ``(..., dim, dim)``, with one block in memory at a time.

    Args:
        dim: The dimension of the matrices.
        block: Returns ``matrix[..., rows, columns]``. It is called three times.
    """
    h = dim // 2
    first = slice(0, h)
    last = slice(h, dim)
    x12 = block(first, last)
    packed = x12.new_empty(*x12.shape[:-2], packed_length(dim))
    blocks = _view_blocks(packed, dim)
    blocks.x12.copy_(x12)
    del x12  # frees its memory

    # X22 fills a square. X11's upper triangle then replaces the entries above X22's
    # diagonal.
    blocks.x22.copy_(block(last, last))
    mask = torch.ones(h, h, dtype=torch.bool, device=packed.device).triu_()
    torch.where(mask, block(first, first), blocks.x11, out=blocks.x11)
    return packed


class _Blocks(NamedTuple):
    """Views of a packed triangle. The squares of X11 and X22 overlap."""

    x12: Tensor  # (h, m)
    x11: Tensor  # (h, h); its upper triangle is that of X11
    x22: Tensor  # (m, m); its lower triangle is that of X22


def _view_blocks(packed: Tensor, dim: int) -> _Blocks:
    """Return views of the blocks, which are stored in two rectangles."""
    batch = packed.shape[:-1]
    h = dim // 2
    m = dim - h
    first = packed[..., : h * m].view(*batch, h, m)
    second = packed[..., h * m :].view(*batch, m, h + 1)
    return _Blocks(x12=first, x11=second[..., :h, 1:], x22=second[..., :m])


def unpack_upper_triangular(packed: Tensor, dim: int) -> Tensor:
    """Unpack triangles ``(..., dim (dim + 1) / 2)`` to matrices ``(..., dim, dim)``.

    Raises:
        ValueError: If the last dimension is not ``dim (dim + 1) / 2``.
    """
    length = packed_length(dim)
    if packed.shape[-1] != length:
        raise ValueError(
            f"a packed triangle of dimension {dim} has {length} elements, "
            f"got {packed.shape[-1]}"
        )
    if dim <= GATHERED_UP_TO:
        indices = _gather_indices(dim, packed.device)
        matrices = packed.reshape(-1, length).index_select(1, indices.unpack)
        return matrices.view(*packed.shape[:-1], dim, dim)
    return _unpack_by_blocks(packed, dim)


def _unpack_by_blocks(packed: Tensor, dim: int) -> Tensor:
    """Unpack by block copies: X12 twice, and X11 and X22 with mirrored triangles."""
    x12, x11, x22 = _view_blocks(packed, dim)
    h = dim // 2
    matrix = packed.new_empty(*packed.shape[:-1], dim, dim)
    matrix[..., :h, h:] = x12
    matrix[..., h:, :h] = x12.mT
    matrix[..., :h, :h] = x11.triu() + x11.triu(1).mT
    matrix[..., h:, h:] = x22.tril() + x22.tril(-1).mT
    return matrix
