"""The rows of parameters, the same or others on each rank, as ``fully_shard`` lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from second_order.distributed.collectives import World
from second_order.sharded import chunks, is_dtensor, local

__all__ = ["Rows", "rows_of"]


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor, its parts along the first dimension, by rank.

    Attributes:
        bounds: By rank, the first row that it has, and the one after its last.
        replicas: By rank, ranks that together have every row once, in the order of rows; a rank is
            among its own.
        width: Number of elements of a row.
    """

    bounds: tuple[tuple[int, int], ...]
    replicas: tuple[tuple[int, ...], ...]
    width: int

    def size(self, rank: int) -> int:
        """Number of elements that a rank has."""
        start, stop = self.bounds[rank]
        return (stop - start) * self.width


def rows_of(tensor: Tensor, world: World) -> Rows:
    """The rows of a parameter that is whole on every rank, or that FSDP2 has sharded.

    Rows go to the ranks of a mesh as ``torch.chunk`` cuts them: ⌈n / ranks⌉ to each, the last ranks
    may have fewer or none. Other dimensions of the mesh have copies.

    Args:
        tensor: A tensor of at least one dimension; a DTensor with one ``Shard(0)``, otherwise
            ``Replicate``.
        world: The ranks, all of them in the DTensor's mesh.

    Raises:
        TypeError: If the DTensor has other rows than that on this rank.
    """
    total, width = tensor.shape[0], tensor.shape[1:].numel()
    if not is_dtensor(tensor):
        everything = tuple((0, total) for _ in range(world.size))
        return Rows(everything, tuple((rank,) for rank in range(world.size)), width)
    dtensor = cast(Any, tensor)
    (sharding,) = (i for i, place in enumerate(dtensor.placements) if place.is_shard())
    mesh = dtensor.device_mesh.mesh.movedim(sharding, -1)
    replicas = mesh.reshape(-1, mesh.shape[-1]).tolist()
    bounds, of = [(0, 0)] * world.size, [()] * world.size  # type: list[Any], list[Any]
    here = {rank: i for i, rank in enumerate(world.global_ranks)}
    for replica in replicas:
        ranks = tuple(here[rank] for rank in replica)
        for rank, part in zip(ranks, chunks(total, len(ranks)), strict=True):
            bounds[rank], of[rank] = part, ranks
    start, stop = bounds[world.rank]
    if local(tensor).shape[0] != stop - start:
        raise TypeError(
            f"a parameter of shape {tuple(tensor.shape)} has {local(tensor).shape[0]} rows on rank "
            f"{world.rank}, where torch.chunk would leave {stop - start}; shard it by fully_shard"
        )
    return Rows(tuple(bounds), tuple(of), width)
