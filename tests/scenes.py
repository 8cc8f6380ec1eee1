"""Small scripts, each on a few processes, that end in many ways; and how long their ends take.

    python scenes.py

reads lines of scenes to be played side by side, ``[{"system": ..., "end": ..., ...}, ...]``, and
writes lines with what has come of the processes of each. They are forked from one that has imported
torch, and are from then on like any other interpreter: exceptions, signals and exit handlers do
what they do everywhere.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 4  # before the end
LIMIT = 55.0  # seconds, after which processes are killed
PATIENCE = 20.0  # of workers and helpers

EACH_STEP = {"factor_update_steps": 1, "inv_update_steps": 1}

# System, processes, options.
SYSTEMS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "KAISA": (KAISA, 2, {}),
    "DPKFAC": (DPKFAC, 2, {}),
    "DistKFAC": (DistKFAC, 2, {"inverse_threads": 2, **EACH_STEP}),
    "stats": (DistKFAC, 4, {"stats_workers": 2, "helper_timeout": PATIENCE}),
    "DHO2": (DHO2, 2, {"largest": 2, "warmup_steps": 1, "curvature_interval": 2}),
    "MRDHO2": (
        MRDHO2,
        4,
        {"accelerators": 2, "epoch_steps": 2, "largest": 2, "helper_timeout": PATIENCE},
    ),
}


class Scene:
    """One process of a scene."""

    def __init__(self, told: dict[str, Any], rank: int, size: int) -> None:
        self.told, self.rank, self.size = told, rank, size
        self.end = told["end"]
        System, _, options = SYSTEMS[told["system"]]
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer: Any = System(self.model, lr=0.1, **(options | told.get("options", {})))
        x, y = torch.randn(8, 6), torch.randint(3, (8,))
        self.batch = x, y

    def loss(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.batch).backward()
        closure = {"curvature_closure": lambda: self.loss(self.batch)}
        self.optimizer.step(**(closure if isinstance(self.optimizer, DHO2) else {}))

    def play(self) -> None:
        closes = self.end not in ("no close", "interrupt") or self.told.get("closes")
        with self.optimizer if closes else contextlib.nullcontext():
            if getattr(self.optimizer, "role", "worker") != "worker":
                self.help()
            else:
                self.work()
        say("ends")

    def help(self) -> None:
        if self.rank in self.told.get("stops", ()):
            self.optimizer.serve(self.stopping(), self.loss)
        else:
            self.optimizer.serve([self.batch], self.loss)

    def stopping(self) -> Iterator[Any]:
        """Batches; before one of them the process is stopped, as if from outside."""
        for _ in range(self.told["before"]):
            yield self.batch
        say("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            yield self.batch

    def work(self) -> None:
        for _ in range(STEPS):
            self.step()
            time.sleep(0.02)
        if self.told.get("stops"):
            while not self.arrived("stopped", len(self.told["stops"])):
                self.step()
                time.sleep(0.01)
        say("ready")
        if self.rank in self.told.get("raises", range(self.size)) and self.end == "raise":
            raise ValueError("in the middle")
        while self.end in ("raise", "interrupt"):
            self.step()
            time.sleep(0.01)

    def arrived(self, what: str, count: int) -> bool:
        """Whether all workers see it: one that went on alone would wait for the others."""
        files = [Path(self.told["directory"]) / str(r) for r in self.told["stops"]]
        seen = torch.tensor(float(sum(what in file.read_text() for file in files) == count))
        dist.all_reduce(seen, dist.ReduceOp.MIN, group=self.optimizer.worker_group)
        return bool(seen)


def say(what: str) -> None:
    os.write(1, f"{what} {time.monotonic()}\n".encode())


def play(told: dict[str, Any], rank: int, size: int) -> None:
    torch.set_num_threads(1)
    # What a shell starts in the background ignores Ctrl-C, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.TCPStore("127.0.0.1", told["port"], is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(told["directory"], store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    Scene(told, rank, size).play()


def marked(what: str, text: str) -> float | None:
    """When a process has said something."""
    times = [float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{what} ")]
    return times[0] if times else None


class Watched:
    """A scene from outside: what comes of its processes."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told, self._directory = told, Path(told["directory"])
        self._begun, self._interrupted = time.monotonic(), None
        self._left: dict[int, int] = {}
        self.results: list[dict[str, Any]] = [{} for _ in range(SYSTEMS[told["system"]][1])]

    def fork(self) -> int | None:
        """The rank, in a process of the scene."""
        for rank in range(len(self.results)):
            output = os.open(self._directory / str(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            pid = os.fork()
            if pid == 0:
                os.dup2(output, 1), os.dup2(output, 2)
                # A shell has jobs in the background ignore it, and so would whatever they start.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return rank
            os.close(output)
            self._left[rank] = pid
        return None

    def look(self) -> bool:
        """Whether all have ended that are to, or time is over; the others are killed then."""
        for rank, pid in list(self._left.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._note(rank, os.waitstatus_to_exitcode(status))
        if self._told["end"] == "interrupt" and self._interrupted is None and self._ready():
            time.sleep(0.1)
            self._interrupted = time.monotonic()
            for pid in self._left.values():
                os.kill(pid, signal.SIGINT)
        stopped = set(self._left) <= set(self._told.get("stops", []))
        if not stopped and time.monotonic() < self._begun + LIMIT:
            return False
        for rank, pid in list(self._left.items()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._note(rank, None)
        return True

    def _ready(self) -> bool:
        return all("ready" in self._said(rank) for rank in (0, 1))

    def _said(self, rank: int) -> str:
        return (self._directory / str(rank)).read_text()

    def _note(self, rank: int, status: int | None) -> None:
        del self._left[rank]
        text = self._said(rank)
        begun = self._interrupted or marked("ready", text)
        self.results[rank] = {
            "status": status,
            "ended": time.monotonic(),
            "said": text,
            "begun": begun,
        }


def main() -> None:
    gc.collect()
    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        scenes = []
        for told in json.loads(line):
            told["directory"] = tempfile.mkdtemp(dir=told["root"])
            scenes.append(Watched(told))
            rank = scenes[-1].fork()
            if rank is not None:
                play(told, rank, len(scenes[-1].results))
                return
        while not all([scene.look() for scene in scenes]):  # noqa: C419 - look at all
            time.sleep(0.01)
        sys.stdout.write(json.dumps([scene.results for scene in scenes]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
