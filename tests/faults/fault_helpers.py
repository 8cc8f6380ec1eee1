"""The faults of helpers (accelerators, stats workers), and strangers who find their stores."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fault_kinds import fault, helped
from fault_scenes import Injected, Run, killed, stopped
from second_order.distributed.mailbox import Mailbox

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


ANSWERS: dict[str, Callable[[list[Tensor], dict[str, Any]], tuple[list[Tensor], dict[str, Any]]]]
ANSWERS = {
    "NaN": lambda ts, note: ([t * float("nan") for t in ts], note),
    "tensors that are too short": lambda ts, note: ([t.reshape(-1)[:-1] for t in ts], note),
    "tensors that are too long": lambda ts, note: (
        [torch.cat([t.reshape(-1), t.new_ones(7)]) for t in ts],
        note,
    ),
    "integers": lambda ts, note: ([t.long() for t in ts], note),
    "no tensors": lambda ts, note: ([], note),
    "one tensor too many": lambda ts, note: ([*ts, torch.ones(3)], note),
    "an empty note": lambda ts, note: (ts, {}),
    "another note": lambda ts, note: (ts, dict.fromkeys(note, "?")),
    "a note of numbers": lambda ts, note: (ts, dict.fromkeys(note, -1)),
}
for _name, _change in ANSWERS.items():

    def _answer(run: Run, change: Any = _change) -> None:
        native = Mailbox.post

        def post(self: Any, name: str, tensors: Sequence[Tensor], **note: Any) -> None:
            ts, other = change(list(tensors), note)
            native(self, name, ts, **other)

        if run.helps:
            run.on("serving", lambda: setattr(Mailbox, "post", post))

    fault(f"answers {_name}", HELPERS, suits=helped, moments=("whole",), expect="any")(_answer)


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


NAMES = (
    "point/0",
    "point/1",
    "point/2",
    "pairs/0/0/0",
    "pairs/1/0/0",
    "verdict/0/0",
    "try/0",
    "order/0/1",
    "stats/0/0",
    "stats/1/0",
    "stats/2/1",
    "worker 0/want",
    "worker 0/steps",
    "worker 0/closed",
    "worker 0/beat",
    "worker 1/closed",
    "accelerator 1/closed",
    "accelerator 1/beat",
    "accelerator 2/closed",
    "accelerator 2/beat",
    "accelerator 1/steps",
    "stats worker 2/closed",
    "stats worker 2/beat",
    "stats worker 2/want",
    "point/0/0/0",
    "pairs/0/0/0/0/0",
    "stats/0/0/0/0",
)
HEADING = '{"tensors": [["float32", [4]]], "note": {}}'
VALUES: dict[str, bytes] = {
    "text that is no number": b"noise",
    "a heading of nothing": b"{}",
    "a heading of tensors that are not there": HEADING.encode(),
    "a heading of a huge tensor": HEADING.replace("[4]", "[1000000000000]").encode(),
    "a heading of a negative size": HEADING.replace("[4]", "[-4]").encode(),
    "a heading of no dtype": HEADING.replace("float32", "load").encode(),
    "many bytes": b"9" * 5000,
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtins\x94.",
}
for _name, _value in VALUES.items():

    def _visit(run: Run, value: bytes = _value) -> None:
        def visit(port: int) -> None:
            store = TCPStore(
                "127.0.0.1",
                port,
                is_master=False,
                wait_for_workers=False,
            )
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                for name in NAMES:
                    store.set(name, value)  # type: ignore[arg-type]

        visited(run, visit)

    fault(f"set what they can guess to {_name}", STRANGERS, suits=helped, moments=("whole",))(
        _visit
    )


@fault("say goodbye for everybody", STRANGERS, suits=helped, moments=("whole",))
def _(run: Run) -> None:
    def visit(port: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        for name in NAMES:
            if name.endswith("closed"):
                store.set(name, "1")

    visited(run, visit)
