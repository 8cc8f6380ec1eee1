"""Which part of the eigenvectors goes from which accelerator to which worker.

    worker j whole:    its vectors, accelerator a's rows     (r_j, n_a)
    worker j sharded:  all vectors, the rows that both have  (r, |n_a ∩ n_j|)

Accelerators that are whole have n/A rows each, sharded ones those that FSDP2 has left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from second_order.distributed.spread import Run, Spread, common, count, pick, place
from second_order.lanczos.vector_space import row_bounds

__all__ = ["PairRoutes"]


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
