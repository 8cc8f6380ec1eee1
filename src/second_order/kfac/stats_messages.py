"""What gradient workers and stats workers say to each other.

    want        k, by a stats worker: the number of the point that it wants next
    point/k     the newest parameters and buffers, by worker 0,
                which of them train, and which are optimized        ->  to that stats worker
    point/k/r   the rows of worker r, where FSDP2 has sharded them  ->  to that stats worker
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
from second_order.distributed.spread import Spread, pack_parts, taken
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.sharded import is_dtensor

__all__ = [
    "in_groups",
    "model_tensors",
    "parts_of",
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


def point_of(model: nn.Module, groups: Groups, edition: int, rank: int) -> Message:
    """Make a worker's part of a point: copies of tensors, and a note of what becomes of each.

    Args:
        model: The model.
        groups: The parameter groups.
        edition: Number of changes of the layers so far.
        rank: The worker, of which the first sends what is whole on all.
    """
    newest = model_tensors(model)
    note = {
        "edition": edition,
        "train": [t.requires_grad for t in newest],
        "optimized": in_groups(newest, groups),
        "sharded": [is_dtensor(t) for t in newest],
    }
    return pack_parts(newest, first=rank == 0), note


def parts_of(message: Message, name: str, workers: int) -> list[str]:
    """Names of the other workers' parts of a point; none where the first sends all.

    Raises:
        MalformedError: If the message is no first part of a point.
    """
    note = message[1]
    require_form(note, edition=int, train=[bool], optimized=[bool], sharded=[bool])
    tensors_there = len(note["train"])
    for key in ("optimized", "sharded"):
        if len(note[key]) != tensors_there:
            raise MalformedError(
                f"{tensors_there} tensors train or not, {len(note[key])} are said to be {key}"
            )
    return [f"{name}/{worker}" for worker in range(1, workers)] if any(note["sharded"]) else []


def point_in(parts: Sequence[Message], into: Sequence[Tensor]) -> Message:
    """Check that messages are a point, and return it whole; it fits the model, or another one.

    Args:
        parts: What each worker has sent; the first part has been checked by :func:`parts_of`.
        into: The model's tensors.

    Raises:
        MalformedError: If the messages are no point.
    """
    for _, each in parts:
        require_form(each)  # which could not be read, perhaps
    note, flats = parts[0][1], [tensors for tensors, _ in parts]
    kinds = [[(t.dtype, t.dim()) for t in tensors] for tensors in flats]
    if any(kind != kinds[0] for kind in kinds) or any(dim != 1 for _, dim in kinds[0]):
        raise MalformedError(f"the workers' tensors are {kinds}, not vectors of the same dtypes")
    alike: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(into):
        alike.setdefault(t.dtype, []).append(i)
    found = [(of[0].dtype, sum(map(len, of))) for of in zip(*flats, strict=True)]
    sizes = [(dtype, sum(into[i].numel() for i in which)) for dtype, which in alike.items()]
    total = sum(size for _, size in sizes)
    same_model = len(note["train"]) == len(into) and sum(size for _, size in found) == total
    if not same_model:
        return [torch.cat(of) for of in zip(*flats, strict=True)], note
    if found != sizes:
        raise MalformedError(f"its tensors are {found}, the model's {sizes}")
    whole = []
    for which, of in zip(alike.values(), zip(*flats, strict=True), strict=True):
        shapes = [into[i].shape for i in which]
        theirs = Spread(shapes, [note["sharded"][i] for i in which], len(parts))
        try:
            whole.append(taken(of, theirs, [(0, theirs.size)]))
        except ValueError as error:
            raise MalformedError(f"of the workers {error}") from None
    return whole, note


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
