"""DistKFAC where stats workers are killed or stopped: the others go on, and all end by themselves.

What one sends that is not finite is among the tests of the pool's ranks.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import torch
from ranks import agreed

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Launcher
    from pool import Launch

TIMEOUT = 100.0  # seconds, of what takes a few
STEPS = 16

# Arguments: directory; helper_timeout; stats workers.
SCRIPT = """
    import sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from accelerated import noted
    from threaded import BATCHES, CASE, distkfac
    from ranks import go, shard
    from reference import cross_entropy
    from second_order.distributed.mailbox import Mailbox

    torch.set_num_threads(1)
    directory, patience, helpers = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    model = CASE.model()
    optimizer = distkfac(model, momentum=0.9, stats_workers=helpers, helper_timeout=patience)
    rank, workers = dist.get_rank(), dist.get_world_size() - helpers

    def held(name):
        print(f"holds at {name}", flush=True)
        while not (directory / name).exists():
            time.sleep(0.01)

    found, own = [], []
    with noted() as warned, optimizer:
        if optimizer.role == "stats":
            found = optimizer.serve(BATCHES, lambda batch: cross_entropy(model(batch[0]), batch[1]))
        else:
            Mailbox.wait = None  # nobody waits for stats workers
            for step in range(STEPS):
                if step == STEPS // 2:
                    held("middle")
                x, y = BATCHES[step % len(BATCHES)]
                found += go(model, optimizer, CASE, [shard((x, y), rank, workers)])
                own.append(optimizer._curvature.helpers.own_passes)
                time.sleep(0.02)
            while not own[-1]:
                found += go(model, optimizer, CASE, [shard((x, y), rank, workers)])
                own.append(optimizer._curvature.helpers.own_passes)
                time.sleep(0.02)
            before = [float(block.factors.weight) for block in optimizer._curvature.layers.blocks]
            found += go(model, optimizer, CASE, [shard((x, y), rank, workers)])
            after = [float(block.factors.weight) for block in optimizer._curvature.layers.blocks]
            assert all(a != b for a, b in zip(after, before)), "statistics of its own passes"
            assert set(optimizer.staleness) == {"0", "2", "4"}
    torch.save((found, warned, own), directory / f"{rank}.pt")
    print("the end", flush=True)
""".replace("STEPS", str(STEPS))


def start(launch: Launcher, nproc: int, directory: Path, patience: float, helpers: int) -> Launch:
    return launch(SCRIPT, nproc, directory, patience, helpers)


def test_stats_workers_killed_and_stopped(launch: Launcher, tmp_path: Path) -> None:
    """One after the other is given up; who was stopped returns from serve() when it is let go on.

    Slow: processes of their own.
    """
    run = start(launch, 4, tmp_path, 4.0, 2)
    for rank in range(2):
        run.wait_for("holds at middle", rank, TIMEOUT)
    run.kill(2)
    run.processes[3].send_signal(signal.SIGSTOP)
    try:
        (tmp_path / "middle").touch()
        for rank in range(2):
            run.wait_for("the end", rank, TIMEOUT)
            assert run.processes[rank].wait(TIMEOUT) == 0
        assert run.processes[3].poll() is None
    finally:
        run.processes[3].send_signal(signal.SIGCONT)
    assert run.wait(TIMEOUT) == [0, 0, -signal.SIGKILL, 0]
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert len(agreed([found for found, *_ in results])) > STEPS, "no step is lost"
    for _, warned, own in results:
        first, second = warned
        assert "stats worker 2 has left, died, or not been heard of: the others go on" in first
        assert "stats worker 3 has left, died, or not been heard of" in second
        assert "statistics are taken from the training passes again" in second
        assert own == results[0][2]
        assert (own[0], own[STEPS // 2 - 1], own[-1]) == (True, False, True)
    served, warned, *_ = torch.load(tmp_path / "3.pt")
    assert served > 0
    assert len(warned) <= 1


def test_a_worker_killed_lets_the_stats_worker_go(launch: Launcher, tmp_path: Path) -> None:
    """Slow: processes of their own."""
    run = start(launch, 2, tmp_path, 1.0, 1)
    run.wait_for("holds at middle", 0, TIMEOUT)
    run.kill(0)
    assert run.processes[1].wait(TIMEOUT) == 0
    _, (line,), *_ = torch.load(tmp_path / "1.pt")
    assert "the workers have not been heard of any more: serve() returns" in line
