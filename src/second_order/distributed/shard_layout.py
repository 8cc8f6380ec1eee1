"""The rows of parameters, the same or others on each rank, as ``fully_shard`` lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.sharded import chunk, is_dtensor, local, shard_replicas

__all__ = ["ShardLayout", "layout_of"]

Replica: TypeAlias = tuple[int, ...]
"""Ranks that together have every row once, in the order of rows."""


@dataclass(frozen=True)
class ShardLayout:
    """The rows of a tensor, its parts along the first dimension, by rank.

    A rank is among its own replica, and no rank in two. Replicas and positions are shared by all
    tensors that lie alike: there may be thousands of both.
    """

    total: int  # number of rows
    width: int  # number of elements of a row
    replicas: tuple[Replica, ...]  # by rank
    positions: tuple[int, ...]  # by rank, which of its replica it is

    def bounds(self, rank: int) -> tuple[int, int]:
        """The first row that a rank has, and the one after its last."""
        parts = len(self.replicas[rank])
        return chunk(self.total, parts, self.positions[rank]) if parts else (0, 0)

    def size(self, rank: int) -> int:
        """Number of elements that a rank has."""
        start, stop = self.bounds(rank)
        return (stop - start) * self.width

    def together(self, rank: int, other: int) -> bool:
        """Whether two ranks are in one replica."""
        return self.replicas[rank][:1] == self.replicas[other][:1]


def layout_of(tensor: Tensor, world: World) -> ShardLayout:
    """The rows of a parameter that is whole on every rank, or that FSDP2 has sharded.

    All ranks of the world are in the DTensor's mesh.

    Raises:
        TypeError: If the DTensor has other rows than that on this rank.
    """
    shape = tensor.shape or torch.Size([1])
    total, width = shape[0], shape[1:].numel()
    if not is_dtensor(tensor):
        alone = tuple((rank,) for rank in range(world.size))
        return ShardLayout(total, width, *_by_rank(alone, world.size))
    here = {rank: i for i, rank in enumerate(world.global_ranks)}
    replicas = shard_replicas(tensor)
    within = tuple(tuple(here[rank] for rank in replica) for replica in replicas)
    layout = ShardLayout(total, width, *_by_rank(within, world.size))
    start, stop = layout.bounds(world.rank)
    if local(tensor).shape[0] != stop - start:
        raise TypeError(
            f"a parameter of shape {tuple(tensor.shape)} has {local(tensor).shape[0]} rows on rank "
            f"{world.rank}, where torch.chunk would leave {stop - start}; shard it by fully_shard"
        )
    return layout


@lru_cache(maxsize=8)
def _by_rank(
    replicas: tuple[Replica, ...], size: int
) -> tuple[tuple[Replica, ...], tuple[int, ...]]:
    """Each rank's replica, and its position there."""
    of, positions = [()] * size, [0] * size  # type: list[Replica], list[int]
    for ranks in replicas:
        for i, rank in enumerate(ranks):
            of[rank], positions[rank] = ranks, i
    return tuple(of), tuple(positions)
