"""What gradient workers and stats workers say to each other.

    want        k, by a stats worker: the number of the point that it wants next
    point/k     the newest parameters and buffers, by worker 0,
                which of them train, and which are optimized        ->  to that stats worker
    stats/k/r   the statistics at point k of the layers of worker r ->  to worker r

Points are sent on demand: nobody waits, and no more than one message of a kind is under way.
Whoever gets a message checks its form before anything is done with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from second_order.distributed.messages import MalformedError, Message, require_form
from second_order.distributed.parcels import pack_by_dtype
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums

__all__ = [
    "in_groups",
    "model_tensors",
    "point_in",
    "point_of",
    "statistics_in",
    "statistics_of",
    "unpack_statistics",
]

Groups: TypeAlias = Sequence[Mapping[str, Any]]


def model_tensors(model: nn.Module) -> list[Tensor]:
    """A model's parameters and buffers, which points hold."""
    return [*model.parameters(), *model.buffers()]


def in_groups(tensors: Sequence[Tensor], groups: Groups) -> list[bool]:
    """Which of the tensors the groups have."""
    ours = {id(p) for group in groups for p in group["params"]}
    return [id(t) in ours for t in tensors]


def point_of(model: nn.Module, groups: Groups, edition: int) -> Message:
    """Make a point: copies of a model's tensors, and a note of what becomes of each.

    Args:
        model: The model.
        groups: The parameter groups.
        edition: Number of changes of the layers so far.
    """
    newest = model_tensors(model)
    train = [t.requires_grad for t in newest]
    note = {"edition": edition, "train": train, "optimized": in_groups(newest, groups)}
    return pack_by_dtype(newest), note


def point_in(message: Message, into: Sequence[Tensor]) -> Message:
    """Check that a message is a point, and return it; its tensors fit the model, or another one.

    Raises:
        MalformedError: If the message is no point.
    """
    tensors, note = message
    require_form(note, edition=int, train=[bool], optimized=[bool])
    tensors_there = len(note["train"])
    if len(note["optimized"]) != tensors_there:
        raise MalformedError(
            f"{tensors_there} tensors train or not, {len(note['optimized'])} are known"
        )
    sizes = dict.fromkeys((t.dtype for t in into), 0)
    for t in into:
        sizes[t.dtype] += t.numel()
    found, total = [(t.dtype, t.numel()) for t in tensors], sum(sizes.values())
    same_model = tensors_there == len(into) and sum(size for _, size in found) == total
    if same_model and (any(t.dim() != 1 for t in tensors) or found != list(sizes.items())):
        raise MalformedError(f"its tensors are {found}, the model's {list(sizes.items())}")
    return message


def statistics_of(sums: Mapping[str, StatisticsSums], edition: int) -> Message:
    """Make a message of statistics: all heads and all factors in a flat tensor each.

    Args:
        sums: The sums by layer; none where there is nothing to tell.
        edition: Number of changes of the layers so far.
    """
    heads = [each.head for each in sums.values()]
    factors = [t for each in sums.values() for t in each.factors.values()]
    flat = [torch.cat([t.reshape(-1) for t in part]) for part in (heads, factors) if part]
    return flat, {"layers": list(sums), "edition": edition}


def statistics_in(message: Message) -> Message:
    """Check that a message is statistics, of any layers, and return it.

    Raises:
        MalformedError: If the message is no statistics.
    """
    tensors, note = message
    require_form(note, edition=int, layers=[str])
    if len(tensors) != (2 if note["layers"] else 0):
        raise MalformedError(f"{len(note['layers'])} layers have {len(tensors)} tensors, not 2")
    strange = [t for t in tensors if t.dim() != 1 or not t.is_floating_point()]
    if strange:
        raise MalformedError(f"a tensor is {strange[0].dtype} of shape {list(strange[0].shape)}")
    if len(set(note["layers"])) < len(note["layers"]):
        raise MalformedError("it names a layer twice")
    return message


def unpack_statistics(
    tensors: Sequence[Tensor], layers: Sequence[str], mine: Mapping[str, KroneckerBlock]
) -> dict[str, StatisticsSums | None]:
    """The sums of a message by layer; empty if its layers or their sizes are not this process's.

    Sums are None where they are not finite, or of no example.
    """
    if not layers or any(layer not in mine for layer in layers):
        return {}
    blocks = [mine[layer] for layer in layers]
    head_sizes = [1 + len(b.shape.letters) * b.shape.groups for b in blocks]
    shapes = [[b.stored_shape(letter) for letter in b.shape.letters] for b in blocks]
    sizes = [torch.Size(shape).numel() for each in shapes for shape in each]
    heads, factors = tensors
    if heads.numel() != sum(head_sizes) or factors.numel() != sum(sizes):
        return {}
    device = blocks[0].weight.device
    flat = iter(factors.split(sizes))
    found: dict[str, StatisticsSums | None] = {}
    for block, head, each in zip(blocks, heads.split(head_sizes), shapes, strict=True):
        parts = [next(flat).view(shape).clone() for shape in each]
        sound = bool(head[0] > 0) and all(bool(t.isfinite().all()) for t in (head, *parts))
        moved = [part.to(device, non_blocking=True) for part in parts]
        by_letter = dict(zip(block.shape.letters, moved, strict=True))
        sums = StatisticsSums(by_letter, head.to(device, non_blocking=True))
        found[block.name] = sums if sound else None
    return found
