"""The ranks of the tests: what they return, how they fail, and that they can be used afterwards."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from pool import PoolTimeoutError, WorkerDiedError, WorkerError, World

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def mortals() -> Iterator[World]:
    """Ranks to be killed, with which goes what coverage has counted in them."""
    world = World(has_other_seed=False)  # starts sooner
    yield world
    world.close()


def summed_ranks(rank: int, world_size: int, scale: float = 1.0) -> float:
    value = torch.tensor(rank * scale, dtype=torch.float64)
    dist.all_reduce(value)
    return value.item()


def fails_on(rank: int, world_size: int, failing: int) -> int:
    """The others are left in a collective."""
    if rank == failing:
        raise KeyError("no such layer")
    dist.barrier()
    return rank


def hangs_on(rank: int, world_size: int, hanging: int) -> None:
    if rank == hanging:
        time.sleep(600)


def dies_on(rank: int, world_size: int, dying: int) -> None:
    if rank == dying:
        os._exit(3)
    dist.barrier()


def process_of(rank: int, world_size: int) -> int:
    return os.getpid()


def leaves_a_mess(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 1)
    dist.destroy_process_group()


def state(rank: int, world_size: int) -> tuple[torch.Tensor, int, str]:
    return torch.rand(1), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_names_its_rank_and_the_pool_still_works(world: World, failing: int) -> None:
    pids = world.run(process_of, 2)
    with pytest.raises(WorkerError, match="no such layer") as caught:
        world.run(fails_on, 2, failing)
    error = caught.value
    assert (error.rank, error.type_name) == (failing, "KeyError")
    assert isinstance(error.original, KeyError)
    assert error.__cause__ is error.original
    assert "in fails_on" in error.remote_traceback
    assert world.run(process_of, 2) == pids
    assert world.run(summed_ranks, 2) == [1.0, 1.0]


def test_each_run_starts_clean(world: World) -> None:
    before = world.run(state, 2)
    world.run(leaves_a_mess, 2)
    assert before == world.run(state, 2)
    assert before[0] == before[1]
    assert before[0][0].dtype == torch.float32
    assert before[0][1:] == (1, "1")


def test_a_hanging_rank_is_killed_and_its_stack_is_reported(mortals: World) -> None:
    pids = mortals.run(process_of, 2)
    with pytest.raises(PoolTimeoutError, match=r"(?s)ranks \[1\] of 2 did not finish.*hangs_on"):
        mortals.run(hangs_on, 2, 1, timeout=0.5)
    assert not set(pids) & set(mortals.run(process_of, 2))


def test_the_exit_of_a_rank_is_reported(mortals: World) -> None:
    with pytest.raises(WorkerDiedError, match="rank 1 died with exit code 3"):
        mortals.run(dies_on, 2, 1)
    assert mortals.run(summed_ranks, 2) == [1.0, 1.0]
