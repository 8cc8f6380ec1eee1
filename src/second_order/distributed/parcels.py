"""Many tensors of known shapes in flat messages, one for each pair of ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.distributed.collectives import Delivery, World
from second_order.errors import SecondOrderError

__all__ = ["Parts", "Shapes", "deliver_parts", "pack_by_dtype", "take_model"]

Parts: TypeAlias = tuple[Tensor, ...]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Key = TypeVar("Key", bound=Hashable)


def deliver_parts(
    world: World,
    shapes: Mapping[Key, Shapes],
    routes: Mapping[Key, tuple[int, Sequence[int]]],
    mine: Mapping[Key, Parts],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[Key, Parts]:
    """Send tuples of tensors from their sources to their destinations, in one collective.

    Args:
        world: The processes that the ranks below belong to.
        shapes: Shapes of the parts of each item; the same on every rank.
        routes: The source and the destinations of each item, in one order on every rank.
        mine: The items that this rank has. Items missing on their source arrive as zeros.
        dtype: Dtype of all parts.
        device: Device of all parts.

    Returns:
        All items that this rank has or has received; received parts are views of the message.
    """
    items = []
    for key, (source, destinations) in routes.items():
        size = sum(math.prod(shape) for shape in shapes[key])
        content = None
        if source == world.rank and any(rank != source for rank in destinations):
            content = _flat(mine.get(key), size, dtype, device)
        items.append(Delivery(source, destinations, size, content))
    received = world.all_to_all(items, dtype, device)
    everything = dict(mine)
    for key, item, flat in zip(routes, items, received, strict=True):
        if flat is None or world.rank not in item.destinations:
            continue
        # What has gone by shares is in the message on its source, too: one of the two is enough.
        twice = key in mine and item.content is not None and flat is not item.content
        if item.source != world.rank or twice:
            pieces = flat.split([math.prod(shape) for shape in shapes[key]])
            everything[key] = tuple(p.view(s) for p, s in zip(pieces, shapes[key], strict=True))
    return everything


def pack_by_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors in one flat tensor for each dtype, on the device of the first."""
    return [
        torch.cat([t.detach().reshape(-1).to(tensors[0].device) for t in alike])
        for alike in _by_dtype(tensors)
    ]


@torch.no_grad()
def take_model(flats: Sequence[Tensor], train: Sequence[bool], into: Sequence[Tensor]) -> None:
    """Set a helper's parameters and buffers to the workers', and freeze those frozen there.

    Args:
        flats: The workers' parameters and buffers, by :func:`pack_by_dtype`.
        train: Which of them train.
        into: The parameters and buffers here.

    Raises:
        SecondOrderError: If the workers have others.
    """
    theirs, ours = (sum(t.numel() for t in each) for each in (flats, into))
    if (len(train), theirs) != (len(into), ours):
        raise SecondOrderError(
            f"the workers' model has {len(train)} parameters and buffers of {theirs} numbers, this "
            f"helper's {len(into)} of {ours}: build and change the same model on every rank"
        )
    for flat, alike in zip(flats, _by_dtype(into), strict=True):
        parts = flat.split([t.numel() for t in alike])
        for target, part in zip(alike, parts, strict=True):
            target.copy_(part.view(target.shape))
    for tensor, trains in zip(into, train, strict=True):
        if tensor.requires_grad != trains:
            tensor.requires_grad_(trains)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    dtypes = dict.fromkeys(t.dtype for t in tensors)
    return [[t for t in tensors if t.dtype == dtype] for dtype in dtypes]


def _flat(parts: Parts | None, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if parts is None:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.cat([part.to(dtype).reshape(-1) for part in parts])
