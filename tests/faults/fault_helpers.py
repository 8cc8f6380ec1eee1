"""The faults of helpers (accelerators, stats workers), and strangers who find their stores."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from fault_kinds import fault, helped
from fault_scenes import Injected, Run, killed, stopped

__all__: list[str] = []

# ----------------------------------------------------------------------------------- helpers

HELPERS = "helpers"


def helper(run: Run, act: Callable[[], Any], count: int = 1) -> None:
    """Something that the helper does in its loss, the `count`-th time."""
    if run.helps:
        run.on("helper_loss", act, count)


@fault(
    "is killed", HELPERS, suits=helped, moments=("whole",), expect="told", signals=(signal.SIGKILL,)
)
def _(run: Run) -> None:
    helper(run, lambda: killed(run))


@fault(
    "is killed before it serves",
    HELPERS,
    suits=helped,
    moments=("whole",),
    expect="told",
    signals=(signal.SIGKILL,),
)
def _(run: Run) -> None:
    if run.helps:
        run.on("serving", lambda: killed(run))


@fault("is stopped for good", HELPERS, suits=helped, moments=("whole",))
def _(run: Run) -> None:
    helper(run, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@fault("is stopped for a second", HELPERS, suits=helped, moments=("whole",))
def _(run: Run) -> None:
    helper(run, lambda: stopped(run, 1.0))


@fault("hangs", HELPERS, suits=helped, moments=("whole",))
def _(run: Run) -> None:
    helper(run, lambda: time.sleep(4.0))


@fault("raises", HELPERS, suits=helped, moments=("whole",), expect="told")
def _(run: Run) -> None:
    def leave() -> None:
        raise Injected("the data are gone")

    helper(run, leave)


@fault(
    "leaves by sys.exit()",
    HELPERS,
    suits=helped,
    moments=("whole",),
    expect="told",
    errors=("SystemExit",),
)
def _(run: Run) -> None:
    helper(run, lambda: sys.exit(3))


@fault("has no batches", HELPERS, suits=helped, moments=("whole",), expect="told")
def _(run: Run) -> None:
    if run.helps:
        run.batches = []


@fault(
    "never serves",
    HELPERS,
    suits=helped,
    moments=("whole",),
    expect="any",
    errors=("SystemExit",),
)
def _(run: Run) -> None:
    if run.helps:
        run.on("made", lambda: sys.exit(0))


@fault("has a loss that is NaN", HELPERS, suits=helped, moments=("whole",), expect="told")
def _(run: Run) -> None:
    usual = run.helper_loss
    if run.helps:
        run.helper_loss = lambda batch: usual(batch) * float("nan")  # type: ignore[method-assign]


# --------------------------------------------------------------------------------- strangers

STRANGERS = "strangers"


def listening() -> list[int]:
    """The ports at which this process listens."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - some go meanwhile
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table in "tcp", "tcp6":
        with open(f"/proc/self/net/{table}") as file:  # noqa: PTH123
            lines = file.read().splitlines()[1:]
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def visited(run: Run, visit: Callable[[int], None]) -> None:
    """A stranger visits the helper's ports while it serves, and those of workers between steps."""

    def look() -> None:
        for port in listening():  # gloo's are among them, which answer nobody
            if os.fork() == 0:
                signal.alarm(4)
                try:
                    visit(port)
                finally:
                    os._exit(0)

    if run.helps:
        run.on("serving", look)


@fault("send 64 KiB of noise", STRANGERS, suits=helped, moments=("whole",))
def _(run: Run) -> None:
    def visit(port: int) -> None:
        noise = random.Random(0).randbytes(1 << 16)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), 2.0) as line:
                line.settimeout(0.5)
                with contextlib.suppress(OSError):
                    line.sendall(noise)
                    line.recv(100)

    visited(run, visit)


@fault("connect, and say nothing", STRANGERS, suits=helped, moments=("whole",))
def _(run: Run) -> None:
    def visit(port: int) -> None:
        lines = [socket.create_connection(("127.0.0.1", port), 2.0) for _ in range(30)]
        time.sleep(1.5)
        for line in lines:
            line.close()

    visited(run, visit)
