"""MRDHO2 with killed or stopped processes: the others continue, and all of them end."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import torch
from mrdho2_training import STEPS, base_alone, reference
from ranks import agreed, assert_same_trajectory

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Launcher
    from pool import Launch

MOMENTUM = {"momentum": 0.9, "lr": 0.05}
TIMEOUT = 60.0  # seconds, of what takes a few

# Arguments: directory; epoch in which the accelerators stall; helper_timeout; helper_ranks.
SCRIPT = """
    import sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from mrdho2_training import CASE, CURVED, EPOCH, loss_of, mrdho2, noted, worker

    from second_order.distributed import helper_link

    helper_link.CLOSE_SECONDS = 1.0  # how long a process waits at its end for a stopped one
    torch.set_num_threads(1)
    directory, stalls, patience = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    helper_ranks = int(sys.argv[4])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = CASE.model()
    optimizer = mrdho2(
        model, momentum=0.9, lr=0.05, helper_timeout=patience, helper_ranks=helper_ranks
    )

    def held(name):
        print(f"holds at {name}", flush=True)
        while not (directory / name).exists():
            time.sleep(0.01)

    def before(step):
        if step == stalls * EPOCH + 2:
            held("middle")

    def loss_fn(batch):
        if batch is CURVED[stalls]:
            held("loss")
        return loss_of(model, batch)

    with noted() as warned, optimizer:
        if optimizer.role == "accelerator":
            found = optimizer.serve(CURVED, loss_fn)
        else:
            found = worker(model, optimizer, rank, world_size - helper_ranks, before=before)
    reports = [(report.applied, report.reason) for report in optimizer.epochs]
    torch.save((found, warned, reports), directory / f"{rank}.pt")
    print("the end", flush=True)
"""
LOST_CONTACT = "lost contact with the accelerators"


def start(
    launch: Launcher, nproc: int, directory: Path, stalls: int, patience: float, helpers: int = 1
) -> Launch:
    return launch(SCRIPT, nproc, directory, stalls, patience, helpers)


def result(directory: Path, rank: int) -> tuple[object, list[str], list[tuple[bool, str]]]:
    found: tuple[object, list[str], list[tuple[bool, str]]] = torch.load(directory / f"{rank}.pt")
    return found


def trajectory(directory: Path, epochs: int, workers: int = 2) -> list[torch.Tensor]:
    """The result of workers that agree, and have continued without a break after some epochs."""
    results = [result(directory, rank) for rank in range(workers)]
    for _, warned, reports in results:
        (line,) = warned
        assert "SGD steps alone from now on" in line
        assert reports == [(True, "")] * epochs + [(False, LOST_CONTACT)]
    found = agreed([each for each, _, _ in results])
    assert len(found) == STEPS, "no step is lost"
    return list(found)


def expected(epochs: int) -> list[torch.Tensor]:
    return reference("paper", with_update=lambda epoch: epoch < epochs, **MOMENTUM)[0]


def test_workers_survive_the_crash_of_the_accelerator_with_the_store(
    launch: Launcher, tmp_path: Path
) -> None:
    """Slow: processes of their own."""
    run = start(launch, 2, tmp_path, 0, 5.0)
    run.wait_for("holds at middle", 0, TIMEOUT)
    run.wait_for("holds at loss", 1, TIMEOUT)
    run.kill(1)
    (tmp_path / "middle").touch()
    assert run.wait(TIMEOUT) == [0, -signal.SIGKILL]
    found = trajectory(tmp_path, 0, workers=1)
    assert all(map(torch.equal, found, base_alone(**MOMENTUM))), "before any pairs"
    assert "Error: " in result(tmp_path, 0)[1][0], "what the link has met with"


def test_workers_continue_without_an_accelerator_past_the_timeout(
    launch: Launcher, tmp_path: Path
) -> None:
    """After an epoch that went well; it returns from serve() when it is let go on.

    Slow: processes of their own.
    """
    run = start(launch, 3, tmp_path, 1, 1.5)
    for rank in range(2):
        run.wait_for("holds at middle", rank, TIMEOUT)
    run.wait_for("holds at loss", 2, TIMEOUT)
    run.processes[2].send_signal(signal.SIGSTOP)
    try:
        (tmp_path / "middle").touch()
        for rank in range(2):
            run.wait_for("the end", rank, TIMEOUT)
            assert run.processes[rank].wait(TIMEOUT) == 0
        assert run.processes[2].poll() is None
        assert_same_trajectory(trajectory(tmp_path, 1), expected(1), rtol=1e-7)
    finally:
        run.processes[2].send_signal(signal.SIGCONT)
    (tmp_path / "loss").touch()
    assert run.wait(TIMEOUT) == [0, 0, 0]
    served, warned, _ = result(tmp_path, 2)
    assert served == 2
    assert len(warned) <= 1
