"""Tensors of equal shape that lie behind one another, so that one operation works on all of them.

What layers keep are tensors of their own, which may be read, loaded, moved or freed one by one.
Where they are slices of one tensor, in order, that tensor is used; else they are stacked anew.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from functools import reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_stack", "in_groups", "most_elements", "numbers_of", "own_stack"]

_base_of: Any = vars(torch._C.TensorBase)["_base"].__get__
"""The tensor that one is a view of, or None."""


def most_elements(device: torch.device) -> int:
    """Elements up to which tensors are stacked: beyond, an operation pays for being launched."""
    return 2**16 if device.type == "cpu" else 2**24


def in_groups(
    keys: Sequence[Hashable], sizes: Sequence[float] | None = None, most: float = 0
) -> list[list[int]]:
    """The positions of equal keys, together; of those with ``sizes`` no more than ``most``."""
    groups: list[list[int]] = []
    at: dict[Hashable, int] = {}
    filled: list[float] = []
    for i, key in enumerate(keys):
        size = 0 if sizes is None else sizes[i]
        place = at.get(key)
        if place is None or filled[place] + size > most:
            at[key] = place = len(groups)
            groups.append([])
            filled.append(0)
        groups[place].append(i)
        filled[place] += size
    return groups


def numbers_of(*groups: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of groups of tensors; a device is waited for once."""
    flat = [tensor.reshape(-1) for group in groups for tensor in group]
    if not flat:
        return [[] for _ in groups]
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in flat))
    numbers = iter(torch.cat([tensor.to(flat[0].device, wide) for tensor in flat]).tolist())
    return [list(islice(numbers, sum(map(Tensor.numel, group)))) for group in groups]


def as_stack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of a shape as ``(n, *shape)``: a view of them where they lie in order, or a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first.unsqueeze(0)
    base, at = _base_of(first), first.storage_offset()
    step = parts[1].storage_offset() - at
    if base is None or step < first.numel() or not first.is_contiguous():
        return torch.stack(list(parts))
    for part in parts:
        if _base_of(part) is not base or part.storage_offset() != at or part.dtype != first.dtype:
            return torch.stack(list(parts))
        at += step
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))


def own_stack(owners: Sequence[MutableMapping[str, Any]], name: str) -> Tensor:
    """The tensors that owners have by a name as one, of which each has a slice from now on."""
    parts = [owner[name] for owner in owners]
    whole = as_stack(parts)
    if _base_of(whole) is None:  # a copy
        for owner, part in zip(owners, whole.unbind(), strict=True):
            owner[name] = part
    return whole
