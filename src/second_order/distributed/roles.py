"""The roles of ranks, as a pure function of the world size and the options.

Workers train. Helpers compute curvature for the workers: "accelerator" ranks compute
eigenpairs for MRDHO2, and "stats" ranks compute statistics for DistKFAC. Helpers are
the last ranks, so that rank 0, which usually saves and prints, is a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from second_order.distributed.world import World, translate_backend_errors

__all__ = [
    "Role",
    "Roles",
    "assign_roles",
    "cycle_batches",
    "role_option",
    "sharding_error",
]

Role: TypeAlias = Literal["worker", "accelerator", "stats"]


@dataclass(frozen=True)
class Roles:
    """The ranks of each role."""

    workers: tuple[int, ...]  # rank 0 is the first
    helpers: tuple[int, ...]
    helper_role: Role

    @translate_backend_errors()
    def role_world(self, world: World, helper_timeout: float | None = None) -> World:
        """Return the world of the ranks with this rank's role.

        Collective over ``world``.

        Args:
            world: All ranks.
            helper_timeout: Timeout of collectives among helpers, in seconds. If the
                timeout of ``world`` is shorter, it applies instead. Workers always use
                the timeout of ``world``.
        """
        # Helpers have a timeout of their own, if it is shorter than the group's.
        ranks = self.workers
        timeout = None
        if world.rank in self.helpers:
            ranks = self.helpers
            if helper_timeout is not None and world.group is not None:
                timeout = timedelta(seconds=helper_timeout)
                if world.timeout is not None:
                    timeout = min(timeout, world.timeout)
        role_world = world.subgroup(ranks, needs_group=True, timeout=timeout)
        # The first call is a collective, so make the group now.
        role_world.control_world()
        return role_world


def assign_roles(
    world_size: int, helpers: int, helper_role: Role, under_ddp: bool = False
) -> Roles:
    """Assign the last ``helpers`` ranks to help, and the others to train.

    A single rank trains, whatever ``helpers`` is.

    Raises:
        ValueError: If no rank is left to train, or if DistributedDataParallel
            (``under_ddp``) would wait for the gradients of helpers.
    """
    option = f"{role_option(helper_role)}={helpers}"
    if helpers < 0 or (world_size > 1 and helpers >= world_size):
        raise ValueError(
            f"{option} with {world_size} processes leaves none to train; use 0 to {world_size - 1}"
        )
    count = helpers if world_size > 1 else 0
    if under_ddp and count:
        raise ValueError(
            f"{option} with a model in DistributedDataParallel, which would wait for the gradients "
            f"of ranks with the role {helper_role!r}, which have none; pass the model without "
            f"DistributedDataParallel and gradient_averaging=False to the optimizer, and then wrap "
            f"it with DistributedDataParallel(model, process_group=optimizer.worker_group)"
        )
    ranks = tuple(range(world_size))
    num_workers = world_size - count
    return Roles(ranks[:num_workers], ranks[num_workers:], helper_role)


def sharding_error(name: str, role: Role) -> str:
    """Return the error's message for a model that FSDP2 shards next to helpers."""
    return (
        f"{name}: fully_shard (FSDP2) has sharded the model, but helpers and their workers hold "
        f"whole models; use {role_option(role)}=0, or DistributedDataParallel(model, "
        f"process_group=optimizer.worker_group)"
    )


def role_option(role: Role) -> str:
    """Return the name of the option that sets the number of a role's helpers."""
    return "helper_ranks" if role == "accelerator" else "stats_workers"


def cycle_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches over and over.

    Unlike ``itertools.cycle``, restarts the iterable.

    Raises:
        ValueError: If the iterable yields no batch.
    """
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError(
                "batches is empty, or an iterator that has ended; give a loader"
            )
