"""Which elements of flat tensors each process of a team has, as another team computes it.

FSDP2 leaves process i of P rows ⌈n/P⌉ i to ⌈n/P⌉ (i + 1) of a tensor; a plain one is whole on each.
Workers and accelerators may be sharded or not, each kind over its own processes:

    c   what worker j has                              ->  accelerator a, for what it has
    V̂   worker j whole:    its vectors, a's rows       ->  (r_j, n_a)
        worker j sharded:  all vectors, the rows that
                           both of them have           ->  (r, |n_a ∩ n_j|)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.lanczos.vector_space import row_bounds
from second_order.sharded import chunk, is_dtensor

__all__ = ["PairRoutes", "Run", "Spread", "common", "count", "pick", "place"]

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


@dataclass(frozen=True)
class PairRoutes:
    """Which part of the eigenvectors each accelerator sends to each worker.

    Attributes:
        shapes: Shapes of the parameters that train.
        pairs: Number r of eigenvectors.
        workers: Number of workers.
        accelerators: Number of accelerators.
        to_shards: Whether the workers' parameters are sharded.
        from_shards: Whether the accelerators' are.
    """

    shapes: Sequence[torch.Size]
    pairs: int
    workers: int
    accelerators: int
    to_shards: bool
    from_shards: bool

    def part(self, vectors: Tensor, accelerator: int, worker: int) -> Tensor:
        """What goes to a worker of an accelerator's rows of V̂ᵀ, ``(r, rows)``."""
        if self.to_shards:
            mine = self._rows(accelerator)
            return pick(vectors, mine, common(mine, self._wanted(worker)))
        return vectors[self._cuts[worker] : self._cuts[worker + 1]]

    def shape(self, accelerator: int, worker: int) -> tuple[int, int]:
        """The shape of what an accelerator sends to a worker."""
        rows = self._rows(accelerator)
        if self.to_shards:
            return self.pairs, count(common(rows, self._wanted(worker)))
        return self._cuts[worker + 1] - self._cuts[worker], count(rows)

    def joined(self, parts: Sequence[Tensor], worker: int) -> Tensor:
        """A worker's part of V̂ᵀ from all accelerators' parts of it.

        Its vectors, whole, or its rows of all vectors.
        """
        if len(parts) == 1:  # an only accelerator has all rows
            return parts[0]
        wanted = self._wanted(worker)
        into = parts[0].new_empty((len(parts[0]), count(wanted)))
        for accelerator, part in enumerate(parts):
            place(part, common(self._rows(accelerator), wanted), into, wanted)
        return into

    def _rows(self, accelerator: int) -> list[Run]:
        if self.from_shards:
            return self._spread(self.accelerators).runs(accelerator)
        bounds = self._bounds
        return [(bounds[accelerator], bounds[accelerator + 1])]

    def _wanted(self, worker: int) -> list[Run]:
        if self.to_shards:
            return self._spread(self.workers).runs(worker)
        return [(0, self._size)]

    def _spread(self, processes: int) -> Spread:
        return Spread(self.shapes, [True] * len(self.shapes), processes)

    @cached_property
    def _size(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    @cached_property
    def _bounds(self) -> list[int]:
        return row_bounds(self._size, self.accelerators)

    @cached_property
    def _cuts(self) -> list[int]:
        return row_bounds(self.pairs, self.workers)
