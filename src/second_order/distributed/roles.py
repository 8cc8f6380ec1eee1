"""Ranks with different jobs: which ranks do what, as a pure function of world size and options.

Workers train. Helpers (accelerators, statistics workers) compute curvature for them meanwhile; they
are the last ranks, so that rank 0, which saves and prints, is a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from second_order.distributed.world import World, translate_backend_errors

__all__ = ["Role", "Roles", "assign_roles", "cycle_batches", "role_option", "sharding_error"]

Role: TypeAlias = Literal["worker", "accelerator", "stats"]


@dataclass(frozen=True)
class Roles:
    """The ranks of each role."""

    workers: tuple[int, ...]  # who train; rank 0 is the first
    helpers: tuple[int, ...]  # who compute curvature for them
    helper_role: Role

    @translate_backend_errors()
    def role_world(self, world: World, helper_timeout: float | None = None) -> World:
        """The world of this process's own kind, of the world of all; every process calls it.

        Helpers wait for each other for ``helper_timeout`` seconds at most.
        """
        helps = world.rank in self.helpers
        limit = None
        if helps and helper_timeout is not None and world.group is not None:
            limit = timedelta(seconds=helper_timeout)
            limit = min(limit, world.timeout or limit)
        team = world.subgroup(self.helpers if helps else self.workers, grouped=True, timeout=limit)
        team.control_world()  # made now, while every rank calls
        return team


def assign_roles(
    world_size: int, helpers: int, helper_role: Role, under_ddp: bool = False
) -> Roles:
    """Assign roles: the last ``helpers`` ranks help, the others train; one process alone trains.

    Raises:
        ValueError: If no process would be left to train, or DistributedDataParallel would wait for
            the gradients of helpers.
    """
    if helpers < 0 or (world_size > 1 and helpers >= world_size):
        raise ValueError(
            f"{role_option(helper_role)}={helpers} with {world_size} processes leaves none to "
            f"train; use 0 to {world_size - 1}"
        )
    count = helpers if world_size > 1 else 0
    if under_ddp and count:
        raise ValueError(
            f"{role_option(helper_role)}={helpers} with a model in DistributedDataParallel, which "
            f"waits for gradients of the ranks of role {helper_role!r}, and they have none; give "
            f"the optimizer the plain model and gradient_averaging=False, and wrap it afterwards "
            f"with DistributedDataParallel(model, process_group=optimizer.worker_group)"
        )
    ranks = tuple(range(world_size))
    return Roles(ranks[: world_size - count], ranks[world_size - count :], helper_role)


def sharding_error(name: str, role: Role) -> str:
    """Why a model that FSDP2 has sharded is refused where there are helpers, and what to do."""
    option = role_option(role)
    return (
        f"{name}: fully_shard (FSDP2) has sharded the model, and helpers and their workers hold "
        f"whole models; use {option}=0, or DistributedDataParallel(model, "
        f"process_group=optimizer.worker_group)"
    )


def role_option(role: Role) -> str:
    """The option that says how many ranks have a helper's role."""
    return "helper_ranks" if role == "accelerator" else "stats_workers"


def cycle_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches that a helper serves with, over and over.

    Raises:
        ValueError: If there is no batch.
    """
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError("batches is empty, or an iterator that has ended; give a loader")
