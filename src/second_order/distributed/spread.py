"""Which elements of flat tensors each process of a team has, as another team computes it.

FSDP2 leaves process i of P rows ⌈n/P⌉ i to ⌈n/P⌉ (i + 1) of each tensor; a plain one is whole on
each. A process sends what it has, the first one what is whole on all; whoever gets the parts takes
what it wants of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.distributed.buckets import pack_by_dtype
from second_order.sharded import chunk, is_dtensor, local

__all__ = ["Run", "Spread", "common", "count", "pack_parts", "pick", "place", "taken"]

Run: TypeAlias = tuple[int, int]
"""The first element of a run, and the one after its last."""


@dataclass(frozen=True)
class Spread:
    """How the processes of a team have tensors that are flat, one after the other.

    Attributes:
        shapes: The tensors' shapes, whole.
        sharded: Whether each has been sharded; the others are whole on every process.
        processes: Number of processes.
    """

    shapes: Sequence[torch.Size]
    sharded: Sequence[bool]
    processes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], processes: int) -> Spread:
        """Tell how tensors are spread over processes, of which this is one."""
        return cls([t.shape for t in tensors], [is_dtensor(t) for t in tensors], processes)

    @property
    def size(self) -> int:
        """Number of elements in all."""
        return sum(shape.numel() for shape in self.shapes)

    def runs(self, process: int, *, once: bool = False) -> list[Run]:
        """The elements that a process has, in order.

        Args:
            process: The process, by its rank in the team.
            once: Whether to count plain tensors with the first process alone, who sends them.
        """
        found: list[Run] = []
        offset = 0
        for shape, sharded in zip(self.shapes, self.sharded, strict=True):
            start, stop = 0, shape.numel()
            if sharded:
                width = shape[1:].numel()
                first, last = chunk(shape[0], self.processes, process)
                start, stop = first * width, last * width
            elif once and process:
                stop = 0
            if stop > start:
                if found and found[-1][1] == offset + start:
                    found[-1] = found[-1][0], offset + stop
                else:
                    found.append((offset + start, offset + stop))
            offset += shape.numel()
        return found


def count(runs: Sequence[Run]) -> int:
    """Number of elements of runs."""
    return sum(stop - start for start, stop in runs)


def common(one: Sequence[Run], other: Sequence[Run]) -> list[Run]:
    """The runs of elements that are in both; each lies in a single run of either."""
    found: list[Run] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            found.append((start, stop))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _columns(within: Sequence[Run], runs: Sequence[Run]) -> list[slice]:
    """Where runs are among the elements of others, in which they lie."""
    found: list[slice] = []
    i = offset = 0
    for start, stop in runs:
        while within[i][1] <= start:
            offset += within[i][1] - within[i][0]
            i += 1
        at = offset + start - within[i][0]
        found.append(slice(at, at + stop - start))
    return found


def pick(part: Tensor, within: Sequence[Run], runs: Sequence[Run]) -> Tensor:
    """Some of a part's elements, ``(..., n)``.

    Args:
        part: The elements of ``within``, one after the other.
        within: The runs that the part has.
        runs: The runs to take, which lie in those.
    """
    parts = [part[..., columns] for columns in _columns(within, runs)]
    if not parts:
        return part[..., :0]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def place(part: Tensor, runs: Sequence[Run], into: Tensor, within: Sequence[Run]) -> None:
    """Put elements, ``(..., n)``, where they belong in a larger part; undoes :func:`pick`."""
    pieces = part.split([stop - start for start, stop in runs], -1)
    for columns, piece in zip(_columns(within, runs), pieces, strict=True):
        into[..., columns] = piece


def pack_parts(tensors: Sequence[Tensor], *, first: bool) -> list[Tensor]:
    """Copies of what this process sends of tensors, in one flat tensor for each dtype.

    A flat tensor is empty where this process sends none of that dtype.

    Args:
        tensors: The tensors, sharded or plain.
        first: Whether this is the first process, which sends plain ones.
    """
    here = [t if first or is_dtensor(t) else t.reshape(-1)[:0] for t in tensors]
    return pack_by_dtype([local(t) for t in here])


def taken(parts: Sequence[Tensor], theirs: Spread, mine: Sequence[Run]) -> Tensor:
    """The elements of some runs, from what each process of another team has sent.

    Args:
        parts: What each process has sent: plain tensors with the first.
        theirs: How the tensors are spread there.
        mine: The runs to take.

    Raises:
        ValueError: If a process has sent more or fewer elements than it has.
    """
    flat = parts[0].new_empty(count(mine))
    for process, part in enumerate(parts):
        runs = theirs.runs(process, once=True)
        if len(part) != count(runs):
            raise ValueError(
                f"process {process} has sent {len(part)} numbers, and has {count(runs)} by the "
                f"rows that fully_shard leaves it as one of {len(parts)}"
            )
        if runs == list(mine):
            return part
        both = common(runs, mine)
        place(pick(part, runs, both), both, flat, mine)
    return flat
