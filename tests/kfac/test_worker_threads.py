"""Threads that solve during training: results, errors, cores, forks, and how they end."""

from __future__ import annotations

import ast
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from second_order import DistKFAC
from second_order.kfac.async_inversion import WorkerPool
from second_order.kronecker.storage import DeviceRead

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from conftest import Launcher

SOON = 20.0  # seconds in which a loaded machine gets round to anything


def own_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("second_order inverses")]


def blocked(pool: WorkerPool) -> tuple[threading.Event, Future[str]]:
    """A piece of work that is under way until the event is set."""
    started = threading.Event()
    go = threading.Event()

    def work() -> str:
        started.set()
        go.wait(SOON)
        return "went"

    ticket = pool.submit(work)
    assert started.wait(SOON)
    return go, ticket


def test_threads_use_one_core_and_leave_the_main_thread_its_cores() -> None:
    """In the caller, and in threads that are made before and after."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = WorkerPool(2)
        meeting = threading.Barrier(2)

        def work() -> int:
            meeting.wait(SOON)  # on both threads
            return torch.get_num_threads()

        found = [pool.submit(work) for _ in range(2)]
        assert [t.result() for t in found] == [1, 1]
        assert torch.get_num_threads() == 3
        seen: list[int] = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == [3]
        torch.set_num_threads(2)  # later calls of the caller do not affect them
        assert [pool.submit(torch.get_num_threads).result() for _ in range(2)] == [1, 1]
        pool.close()
    finally:
        torch.set_num_threads(before)


def test_close_waits_for_running_work_and_drops_queued_work() -> None:
    pool = WorkerPool(1)
    go, first = blocked(pool)
    rest = [pool.submit(lambda: None) for _ in range(5)]
    threading.Timer(0.05, go.set).start()
    pool.close()
    assert first.result() == "went"
    assert not own_threads()
    assert all(ticket.cancelled() for ticket in rest)
    pool.close()  # again: nothing
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(lambda: None)


ENDS = """
import gc, os, sys, threading, time, torch
torch.set_num_threads(1)
from second_order.kfac.async_inversion import WorkerPool
gc.freeze()  # an interpreter ends sooner

def end(how):
    pool = WorkerPool(1)
    x = torch.randn(100, 100)
    x = x @ x.T
    begun, pid = threading.Event(), os.getpid()
    def solve():
        begun.set()
        torch.linalg.eigh(x)
        time.sleep(0.3)
        if os.getpid() == pid:
            os.write(1, b"solved\\n")
    tickets = [pool.submit(solve) for _ in range(1000)]
    begun.wait()
    if how == "without the pool":
        pool = None
    elif os.fork() == 0:
        sys.exit(0)
    else:
        sys.exit(10 + os.wait()[1])

for how in ("without the pool", "after a child"):
    out, into = os.pipe()
    pid = os.fork()  # in place of an interpreter that has to import torch
    if pid == 0:
        os.dup2(into, 1), os.dup2(into, 2), os.close(into), os.close(out)
        end(how)
        sys.exit(0)
    os.close(into)
    with open(out) as file:
        said = file.read()
    print((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said), flush=True)
"""


def test_the_interpreter_exits_while_work_is_running(launch: Launcher) -> None:
    """It waits for that, and for nothing that was not begun: C++ must not outlive it.

    Whether or not the pool still exists. A child that is forked then ends immediately.
    """
    run = launch(ENDS, 1)
    assert run.wait() == [0], run.output(0)
    without, (status, message) = map(ast.literal_eval, run.output(0).splitlines())
    assert without == (0, "solved\n")
    assert status == 10
    assert 1 <= message.count("solved\n") < 200
    assert not message.replace("solved\n", "")


def in_child(check: Callable[[], bool]) -> bool:
    """Whether a condition holds in a forked child, which ends immediately."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 2)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_does_not_inherit_worker_threads() -> None:
    """Its work would never be done."""
    pool = WorkerPool(1)
    pool.submit(lambda: 1).result()

    def child() -> bool:
        with pytest.raises(RuntimeError, match="forked"):
            pool.submit(lambda: 2)
        return True

    assert in_child(child)
    assert pool.submit(lambda: 4).result() == 4
    pool.close()


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent() -> None:
    """An error instead, unless all work was finished before."""
    optimizer = DistKFAC(nn.Linear(2, 2), lr=0.1)
    inverter = optimizer._curvature.inverses.inverter
    (block,) = optimizer._curvature.layers.blocks
    go, ticket = blocked(inverter.pool)
    inverter._futures[block] = ticket

    def child() -> bool:
        signal.alarm(int(SOON))  # ends a child that waits
        with pytest.raises(RuntimeError, match="forked process has no threads"):
            inverter.finish()
        with pytest.raises(RuntimeError, match="forked process has no threads"):
            inverter.collect(lambda _: True, DeviceRead())
        return True

    def finished_child() -> bool:
        signal.alarm(int(SOON))
        inverter.finish()
        return True

    assert in_child(child)
    go.set()
    inverter.finish()
    assert in_child(finished_child)
    inverter.clear()
    optimizer.close()
