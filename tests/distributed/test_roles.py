"""Ranks with different jobs: who does what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from second_order.distributed import world as worlds
from second_order.distributed.roles import assign_roles

if TYPE_CHECKING:
    from pool import World


@given(st.integers(1, 40), st.integers(-1, 40))
@example(1, 3)
def test_the_last_ranks_are_helpers_and_at_least_one_trains(world_size: int, helpers: int) -> None:
    """A single process trains, whatever the number of helpers."""
    if helpers < 0 or helpers >= world_size > 1:
        with pytest.raises(
            ValueError, match=rf"^helper_ranks={helpers} .*use 0 to {world_size - 1}"
        ):
            assign_roles(world_size, helpers, "accelerator")
        return
    roles = assign_roles(world_size, helpers, "stats")
    assert roles == assign_roles(world_size, helpers, "stats"), "a pure function"
    assert [*roles.workers, *roles.helpers] == list(range(world_size))
    assert len(roles.helpers) == (helpers if world_size > 1 else 0)
    assert roles.workers[0] == 0, "rank 0 saves and prints"


def in_teams(rank: int, world_size: int) -> dict[int, tuple[int, int, float]]:
    """Rank and size among one's own kind, and the sum of global ranks there."""
    found = {}
    for helpers in range(world_size):
        world = worlds.World()
        roles = assign_roles(world_size, helpers, "accelerator")
        team = roles.role_world(world)
        value = torch.tensor([float(rank)])
        team.all_reduce([value]).wait()
        found[helpers] = (team.rank, team.size, float(value))
    return found


def test_helpers_and_workers_use_separate_groups(world: World) -> None:
    results = world.run(in_teams, 3)
    for helpers in range(3):
        roles = assign_roles(3, helpers, "accelerator")
        for rank, result in enumerate(results):
            team = roles.helpers if rank in roles.helpers else roles.workers
            expected = (team.index(rank), len(team), float(sum(team)))
            assert result[helpers] == expected


def test_ddp_over_all_ranks_raises() -> None:
    with pytest.raises(ValueError, match=r"process_group=optimizer\.worker_group"):
        assign_roles(3, 1, "accelerator", under_ddp=True)
    assert assign_roles(3, 0, "accelerator", under_ddp=True).workers == (0, 1, 2)
    assert assign_roles(1, 1, "accelerator", under_ddp=True).helpers == ()
