"""Ranks with different jobs: which ranks do what, as a pure function of world size and options.

Workers train. Helpers (accelerators, statistics workers) compute curvature for them meanwhile; they
are the last ranks, so that rank 0, which saves and prints, is a worker.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

import torch.distributed as dist

from second_order.distributed.groups import group_like, timeout_of
from second_order.distributed.lost import explained
from second_order.distributed.world import World

__all__ = ["Role", "Roles", "assign_roles", "option_of", "ranks_alike"]

Role: TypeAlias = Literal["worker", "accelerator", "stats"]


@dataclass(frozen=True)
class Roles:
    """The ranks of each role.

    Attributes:
        workers: Ranks that train; rank 0 is the first of them.
        helpers: Ranks that compute curvature for them.
        helper_role: Role of the helpers: "accelerator" or "stats".
    """

    workers: tuple[int, ...]
    helpers: tuple[int, ...]
    helper_role: Role

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.workers) + len(self.helpers)

    def of(self, rank: int) -> Role:
        """The role of a rank."""
        return self.helper_role if rank in self.helpers else "worker"

    @explained()
    def team(self, world: World, helper_timeout: float | None = None) -> World:
        """The world of this process's own kind. Every process calls it, the first time.

        Args:
            world: The world of all processes.
            helper_timeout: Seconds after which a helper that waits for others of its kind in a
                collective raises, if that is sooner than in ``world``; None for as in ``world``.
        """
        if world.group is not None:
            mine = self.helpers if world.rank in self.helpers else self.workers
            made = _teams.get(world.group, {}).get((mine, helper_timeout))
            if made is not None:
                return made
        world.level()
        team = self._team(world, helper_timeout)
        team.whole = world.rank, world.size
        team.aside()  # made now, while every rank calls
        return team

    def _team(self, world: World, helper_timeout: float | None) -> World:
        helps = world.rank in self.helpers
        mine = self.helpers if helps else self.workers
        if helper_timeout is None or world.group is None:
            return world.subgroup(mine, grouped=True)
        made, key = _teams.setdefault(world.group, {}), (mine, helper_timeout)
        if key not in made:
            limits = [timeout_of(world.group), timedelta(seconds=helper_timeout) if helps else None]
            members = [dist.get_global_rank(world.group, r) for r in mine]
            least = min((limit for limit in limits if limit is not None), default=None)
            made[key] = World(group_like(world.group, members, timeout=least))
        return made[key]


_Key: TypeAlias = tuple[tuple[int, ...], float | None]
_teams: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, World]] = (
    weakref.WeakKeyDictionary()
)


def assign_roles(
    world_size: int, helpers: int, helper_role: Role, under_ddp: bool = False
) -> Roles:
    """Assign roles: the last ``helpers`` ranks help, the others train.

    Args:
        world_size: Number P of ranks.
        helpers: Number of ranks that help; none does where there is one process.
        helper_role: "accelerator" or "stats".
        under_ddp: Whether the model is in DistributedDataParallel already.

    Raises:
        ValueError: If no process would be left to train, or DistributedDataParallel would wait for
            the gradients of helpers.
    """
    if helpers < 0 or (world_size > 1 and helpers >= world_size):
        raise ValueError(
            f"{option_of(helper_role)}={helpers} with {world_size} processes leaves none to "
            f"train; use 0 to {world_size - 1}"
        )
    count = helpers if world_size > 1 else 0
    if under_ddp and count:
        raise ValueError(
            f"{option_of(helper_role)}={helpers} with a model in DistributedDataParallel, which "
            f"waits for gradients of the ranks of role {helper_role!r}, and they have none; give "
            f"the optimizer the plain model and "
            f"gradient_averaging=False, and wrap it afterwards with "
            f"DistributedDataParallel(model, process_group=optimizer.worker_group)"
        )
    ranks = tuple(range(world_size))
    return Roles(ranks[: world_size - count], ranks[world_size - count :], helper_role)


def ranks_alike(world: World, helpers: int) -> list[int]:
    """The ranks, as torch numbers them, that do what this one does.

    Args:
        world: The world of all ranks.
        helpers: Number of ranks that help; where they would be all, :func:`assign_roles` says so.
    """
    everybody, workers = world.global_ranks, world.size - helpers
    if world.size == 1 or workers < 1:
        return everybody
    return everybody[workers:] if world.rank >= workers else everybody[:workers]


def option_of(role: Role) -> str:
    """The option that says how many ranks have a helper's role."""
    return "accelerators" if role == "accelerator" else "stats_workers"
