"""The ranks of the tests: what they return, how they fail, and that they can be used afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
import torch.distributed as dist
from pool import PoolTimeoutError, WorkerDiedError, WorkerError, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Launcher, TorchRunner


@pytest.fixture(scope="module")
def mortals() -> Iterator[World]:
    """Ranks to be killed, with which goes what coverage has counted in them."""
    world = World()
    yield world
    world.close()


def summed_ranks(rank: int, world_size: int, scale: float = 1.0) -> float:
    value = torch.tensor(rank * scale, dtype=torch.float64)
    dist.all_reduce(value)
    return value.item()


def aliased(rank: int, world_size: int, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    tensor += rank
    return {"whole": tensor, "row": tensor[0]}


def fails_on(rank: int, world_size: int, failing: int) -> int:
    """The others are left in a collective."""
    if rank == failing:
        raise KeyError("no such layer")
    dist.barrier()
    return rank


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def raises_unpicklable(rank: int, world_size: int) -> NoReturn:
    raise UnpicklableError("a", "b")


def returns_unpicklable(rank: int, world_size: int) -> threading.Lock:
    return threading.Lock()


def hangs_on(rank: int, world_size: int, hanging: int) -> None:
    if rank == hanging:
        time.sleep(600)


def hang_after_failure(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("first")
    time.sleep(600)


def dies_on(rank: int, world_size: int, dying: int) -> None:
    if rank == dying:
        os._exit(3)
    dist.barrier()


def process_of(rank: int, world_size: int) -> int:
    return os.getpid()


def hash_of_a_name(rank: int, world_size: int) -> int:
    return hash("layer")


def is_counted(rank: int, world_size: int) -> bool:
    """By coverage."""
    module = sys.modules.get("coverage")
    return module is not None and module.Coverage.current() is not None


def leaves_a_mess(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 1)
    dist.destroy_process_group()


def state(rank: int, world_size: int) -> tuple[torch.Tensor, int, str]:
    return torch.rand(1), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def sends_a_lot_and_returns(rank: int, world_size: int) -> float:
    """Rank 0 is done long before the others have read what it sent."""
    big = torch.ones(1 << 20)
    if rank == 0:
        for other in range(1, world_size):
            dist.send(big, other)
    else:
        time.sleep(0.2)
        dist.recv(big, 0)
    return big.sum().item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives(world: World, world_size: int) -> None:
    expected = sum(range(world_size)) * 2.0
    assert world.run(summed_ranks, world_size, scale=2.0) == [expected] * world_size


def test_processes_persist(world: World) -> None:
    pids = world.run(process_of, 2)
    assert world.run(process_of, 3)[:2] == pids
    assert len({*pids, os.getpid()}) == 3


def test_sets_of_names_are_in_an_order_of_their_own_on_some_rank(world: World) -> None:
    """As under torchrun: what depends on the order must not pass."""
    assert len(set(world.run(hash_of_a_name, 2))) == 2


def test_coverage_counts_on_the_first_and_the_last_two_ranks_if_in_the_test(world: World) -> None:
    """And again on a rank that it has passed over."""
    here = is_counted(0, 1)
    for _ in range(2):
        assert world.run(is_counted, 2) == [here, here]
        assert world.run(is_counted, 4) == [here, False, here, here]


def test_tensors_travel_by_value_and_keep_their_aliases(world: World) -> None:
    tensor = torch.zeros(2, 3, dtype=torch.float64)
    results = world.run(aliased, 2, tensor)
    assert tensor.eq(0).all()
    for rank, result in enumerate(results):
        assert torch.equal(result["whole"], torch.full_like(tensor, rank))
        result["whole"][0, 0] = 7
        assert result["row"][0] == 7


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_names_its_rank_and_the_pool_goes_on(world: World, failing: int) -> None:
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


def test_expected_errors_are_returned(world: World) -> None:
    failed, peer = world.run(fails_on, 2, 0, expect_errors=True)
    assert isinstance(failed, KeyError)
    assert isinstance(peer, Exception)  # gloo's, as its peer is gone
    (unpicklable,) = world.run(raises_unpicklable, 1, expect_errors=True)
    assert isinstance(unpicklable, WorkerError)
    assert unpicklable.type_name == "UnpicklableError"
    assert unpicklable.original is None


def test_results_that_cannot_travel_are_errors(world: World) -> None:
    with pytest.raises(WorkerError, match="lock"):
        world.run(returns_unpicklable, 1)


def test_each_run_starts_clean(world: World) -> None:
    before = world.run(state, 2)
    world.run(leaves_a_mess, 2)
    assert before == world.run(state, 2)
    assert before[0] == before[1]
    assert before[0][0].dtype == torch.float32
    assert before[0][1:] == (1, "1")


def test_a_rank_that_is_done_does_not_cut_off_its_peers(world: World) -> None:
    for _ in range(3):
        assert world.run(sends_a_lot_and_returns, 3) == [float(1 << 20)] * 3


def test_world_size_is_bounded(world: World) -> None:
    with pytest.raises(ValueError, match="world_size=9"):
        world.run(process_of, 9)


def test_a_hang_is_killed_and_located(mortals: World) -> None:
    pids = mortals.run(process_of, 2)
    with pytest.raises(PoolTimeoutError, match=r"(?s)ranks \[1\] of 2 did not finish.*hangs_on"):
        mortals.run(hangs_on, 2, 1, timeout=0.5)
    assert not set(pids) & set(mortals.run(process_of, 2))


def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_ranks_end_when_whoever_waits_for_them_is_interrupted(mortals: World) -> None:
    """As by a test's time limit, which is a signal as well; the next test gets new ones."""
    pids = mortals.run(process_of, 2)
    before = signal.signal(signal.SIGUSR2, interrupted)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            mortals.run(hangs_on, 2, 1)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert not set(pids) & set(mortals.run(process_of, 2))


def test_a_hang_after_a_failure_names_the_failure(
    mortals: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.FAILURE_GRACE", 0.2)
    with pytest.raises(PoolTimeoutError, match="after rank 0 failed") as caught:
        mortals.run(hang_after_failure, 2)
    assert isinstance(caught.value.__cause__, WorkerError)


def test_a_death_is_reported(mortals: World) -> None:
    with pytest.raises(WorkerDiedError, match="rank 1 died with exit code 3"):
        mortals.run(dies_on, 2, 1)
    assert mortals.run(summed_ranks, 2) == [1.0, 1.0]


SCRIPT = """
    import sys, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    print("sum", value.item(), *sys.argv[1:])
    if "wait" in sys.argv:
        time.sleep(600)
    dist.destroy_process_group()
"""


def test_launched_ranks_end(launch: Launcher) -> None:
    run = launch(SCRIPT, 2, "argument")
    assert run.wait() == [0, 0]
    assert all("sum 1.0 argument" in run.output(rank) for rank in range(2))


@pytest.mark.parametrize("killed", [0, 1])
def test_launched_ranks_can_be_killed(launch: Launcher, killed: int) -> None:
    run = launch(SCRIPT, 2, "wait")
    for rank in range(2):
        run.wait_for("sum 1.0", rank)
    run.kill(killed)
    assert run.processes[killed].returncode == -9
    with pytest.raises(PoolTimeoutError, match=rf"ranks \[{1 - killed}\] did not end"):
        run.wait(timeout=0.2)


def test_launched_ranks_that_fail_say_why(launch: Launcher) -> None:
    run = launch("raise SystemExit('this is why')", 1)
    assert run.wait() == [1]
    with pytest.raises(PoolTimeoutError, match=r"ended without 'never'(?s:.*)this is why"):
        run.wait_for("never", 0)


def test_torchrun_restarts(torchrun: TorchRunner) -> None:
    """Slow (an agent and two generations of ranks): the one test of the real launcher."""
    script = """
        import os
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()
        print("passed", dist.get_rank())
        dist.destroy_process_group()
    """
    run = torchrun(script, 2, max_restarts=1)
    assert run.wait() == 0, run.output
    assert "passed 0" in run.output
    assert "passed 1" in run.output
