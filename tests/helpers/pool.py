"""Processes for tests: a pool of gloo ranks as old as the session, and ranks that can be killed.

`World.run` is for what a group of ranks computes: importing torch is paid twice for all ranks, each
run gets a fresh default process group. `Launch` is for what happens when a rank dies: every rank is
a process of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.process import BaseProcess

MAX_WORLD_SIZE = 8
START_TIMEOUT = 120.0
# `import second_order` alone imports no torch, and a first step would import torch._dynamo.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "second_order",
    "pytest",
    "hypothesis",
]
# How long the other ranks may take to notice that one has failed, before they are killed.
FAILURE_GRACE = 10.0

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | (
    {"GLOO_SOCKET_IFNAME": _LOOPBACK} if _LOOPBACK else {}
)


class WorkerError(Exception):
    """A rank failed.

    Attributes:
        rank: the rank that failed first, by the clock.
        type_name: the name of the class of the exception raised there.
        original: that exception (also the `__cause__`), None when it does not survive pickling.
        remote_traceback: the traceback of the rank, as text.
    """

    def __init__(
        self, rank: int, type_name: str, text: str, remote: str, original: BaseException | None
    ) -> None:
        super().__init__(f"rank {rank} raised {type_name}: {text}\n\n{remote}")
        self.rank = rank
        self.type_name = type_name
        self.original = original
        self.remote_traceback = remote


class PoolTimeoutError(Exception):
    """Ranks did not finish in time; the pool was killed and starts afresh for the next run."""


class WorkerDiedError(Exception):
    """A rank's process ended in the middle of a run; the pool starts afresh for the next run."""


@dataclass(frozen=True)
class _Task:
    path: list[str]  # sys.path, for the test modules
    job: bytes
    run: int
    rank: int
    world_size: int
    port: int
    timeout: float
    counted: bool  # by coverage, as the test is: it slows all code down by a half


@dataclass(frozen=True)
class _Failure:
    rank: int
    when: float
    type_name: str
    text: str
    remote: str
    pickled: bytes | None

    def original(self) -> BaseException | None:
        return None if self.pickled is None else pickle.loads(self.pickled)

    def error(self) -> WorkerError:
        return WorkerError(self.rank, self.type_name, self.text, self.remote, self.original())


# The first byte of a rank's reply to a job.
_RESULT = b"R"
_FAILURE = b"F"


def _dumps(value: Any) -> bytes:
    """Pickle, tensors by value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


# In the worker.


def _failure(rank: int, error: BaseException) -> _Failure:
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some exceptions can be written and not read
    except Exception:
        pickled = None
    text = "".join(traceback.format_exception(error))
    return _Failure(rank, time.monotonic(), type(error).__name__, str(error), text, pickled)


def _reset_process() -> None:
    """What a test may have left behind, and the same seed on every rank."""
    gc.collect()
    gc.freeze()  # modules, mostly: looking at them again would take most of a short run
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # imports 800 modules
    torch.default_generator.manual_seed(0)
    random.seed(0)


def _destroy_process_group() -> None:
    """All groups; their last references go in a thread, as gloo sleeps 10 ms for each peer."""
    if dist.is_initialized():
        last = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        threading.Thread(target=last.clear, name="destroys a process group").start()


@functools.cache
def _client(port: int) -> dist.TCPStore:
    """One connection a worker: a new one for each run stalls for seconds now and then."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _coverage() -> Any:
    """What counts the lines that run in this process, or None."""
    module = sys.modules.get("coverage")
    return None if module is None else module.Coverage.current()


def _run_job(task: _Task) -> bytes:
    """The reply; the process group is still up unless the job failed."""
    _reset_process()
    sys.path[:] = task.path
    try:
        store = _client(task.port)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"run{task.run}", store),
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout),
        )
        function, args, kwargs = _loads(task.job)
        return _RESULT + _dumps(function(task.rank, task.world_size, *args, **kwargs))
    except BaseException as error:
        failure = _failure(task.rank, error)
        traceback.clear_frames(error.__traceback__)
        with contextlib.suppress(Exception):
            _destroy_process_group()  # wakes the peers that wait for this rank
        return _FAILURE + _dumps(failure)


def _worker(connection: Connection, stacks: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    coverage = _coverage()
    with stacks.open("w") as stack_file, contextlib.suppress(EOFError, BrokenPipeError):
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        connection.send_bytes(b"ready")
        while True:
            task = connection.recv()
            if task is None:
                break
            if coverage is not None and task.counted != (_coverage() is not None):
                (coverage.start if task.counted else coverage.stop)()
            connection.send_bytes(_run_job(task))
            # A rank that is done keeps its sockets open until all are: the others may be reading.
            connection.recv()
            with contextlib.suppress(Exception):
                _destroy_process_group()
            connection.send_bytes(b"done")
    connection.close()


# In the parent.


@dataclass
class _Rank:
    process: BaseProcess
    connection: Connection
    stacks: Path


class World:
    """Up to `MAX_WORLD_SIZE` persistent worker processes, started when first needed.

    Args:
        has_other_seed: rank 1 has a hash seed of its own, so that the order of a set of names
            differs. It takes longer to start.
    """

    def __init__(self, has_other_seed: bool = True) -> None:
        self._spawned: set[int] = {1} if has_other_seed else set()
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._runs = 0
        self._directory = tempfile.TemporaryDirectory(prefix="ranks")

    @property
    def pids(self) -> list[int]:
        """Of the workers that are up, by rank."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        expect_errors: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """`function(rank, world_size, *args, **kwargs)` on each rank, under a gloo process group.

        Args:
            function: a module-level function; arguments and results travel by value.
            world_size: 1 to `MAX_WORLD_SIZE`.
            timeout: seconds for the whole run, once the workers are up.
            expect_errors: return a rank's exception as its result instead of raising it; a
                `WorkerError` if it does not survive pickling.

        Returns:
            The results, by rank.

        Raises:
            WorkerError: a rank raised. The rank that raised first is the one reported.
            PoolTimeoutError: a rank did not finish, which the message says, with the stacks.
            WorkerDiedError: a rank's process ended.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={world_size} is not within 1 to {MAX_WORLD_SIZE}")
        job = _dumps((function, args, kwargs))
        try:
            self._start(world_size)
            values = [_loads(reply[1:]) for reply in self._run(job, world_size, timeout)]
        except BaseException:
            self.kill()
            raise
        failures = [value for value in values if isinstance(value, _Failure)]
        if failures and not expect_errors:
            first = min(failures, key=lambda failure: failure.when).error()
            raise first from first.original
        return [
            value.original() or value.error() if isinstance(value, _Failure) else value
            for value in values
        ]

    def close(self) -> None:
        """End the workers as processes end, so that what they hooked to their exit runs."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        for rank in self._ranks:
            rank.process.join(10)
        self.kill()
        self._store = None
        self._directory.cleanup()

    def kill(self) -> None:
        """Kill the workers; the next run starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []

    def _start(self, world_size: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new = range(len(self._ranks), world_size)
        for rank in new:
            # A fork of a process that has imported torch has the hash seed of that process.
            method = "spawn" if rank in self._spawned else "forkserver"
            context = multiprocessing.get_context(method)
            context.set_forkserver_preload(PRELOADED)
            parent_end, child_end = context.Pipe()
            stacks = Path(self._directory.name) / f"stacks{rank}"
            process = context.Process(
                target=_worker, args=(child_end, stacks), name=f"rank{rank}", daemon=True
            )
            with patch.dict(os.environ, RANK_ENVIRONMENT):
                process.start()
            child_end.close()
            self._ranks.append(_Rank(process, parent_end, stacks))
        if new:
            self._replies(new, time.monotonic() + START_TIMEOUT, "start")

    def _run(self, job: bytes, world_size: int, timeout: float) -> list[bytes]:
        assert self._store is not None
        deadline = time.monotonic() + timeout
        ranks = range(world_size)
        for rank in ranks:
            # The last two may be helpers; what ranks in between do, the first does.
            task = _Task(
                path=sys.path,
                job=job,
                run=self._runs,
                rank=rank,
                world_size=world_size,
                port=self._store.port,
                timeout=timeout,
                counted=_coverage() is not None and rank in (0, world_size - 2, world_size - 1),
            )
            self._ranks[rank].connection.send(task)
        self._runs += 1
        replies = self._replies(ranks, deadline, f"finish within {timeout:g} s")
        for rank in ranks:
            self._ranks[rank].connection.send("release")
        self._replies(ranks, time.monotonic() + FAILURE_GRACE, "leave the process group")
        return replies

    def _replies(self, ranks: Sequence[int], deadline: float, what: str) -> list[bytes]:
        """One message from each of `ranks`."""
        replies: dict[int, bytes] = {}
        failure: _Failure | None = None  # the first to be reported
        while len(replies) < len(ranks):
            missing = [rank for rank in ranks if rank not in replies]
            remaining = max(0.0, deadline - time.monotonic())
            ready = wait([self._ranks[rank].connection for rank in missing], remaining)
            if not ready:
                message = f"ranks {missing} of {len(ranks)} did not {what}"
                if failure is not None:
                    message += f" after rank {failure.rank} failed"
                cause = None if failure is None else failure.error()
                raise PoolTimeoutError(message + self._stacks(missing)) from cause
            for rank in missing:
                connection = self._ranks[rank].connection
                if connection in ready:
                    try:
                        replies[rank] = connection.recv_bytes()
                    except (EOFError, OSError):
                        raise self._death(rank) from None
                    if failure is None and replies[rank].startswith(_FAILURE):
                        failure = _loads(replies[rank][1:])
                        deadline = min(deadline, time.monotonic() + FAILURE_GRACE)
        return [replies[rank] for rank in ranks]

    def _death(self, rank: int) -> WorkerDiedError:
        process = self._ranks[rank].process
        process.join(5)
        return WorkerDiedError(f"rank {rank} died with exit code {process.exitcode}")

    def _stacks(self, ranks: Sequence[int]) -> str:
        """Where `ranks` are, innermost call first."""
        if not hasattr(faulthandler, "register"):
            return ""
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self._ranks[rank].process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        texts = [(rank, self._ranks[rank].stacks) for rank in ranks]
        return "".join(
            f"\n\nrank {rank}:\n{path.read_text()}" for rank, path in texts if path.exists()
        )


# Processes of their own.


class Fork:
    """A process of `Forks` that runs a script, with the methods of `subprocess.Popen`.

    Args:
        forks: the server.
        script: the script.
        arguments: those of the script.
        environment: the variables that it has beside those of this process.
        output: the file of what it prints.
        errors: the file of its errors; None: `output`.
        folder: the folder in which it runs; None: that of this process.
        path: where it finds modules; None: where this process does.
    """

    def __init__(
        self,
        forks: Forks,
        script: Path,
        arguments: Sequence[object],
        *,
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        folder: Path | None = None,
        path: Sequence[str] | None = None,
    ) -> None:
        report = {
            "script": str(script),
            "arguments": [str(argument) for argument in arguments],
            "environment": {**os.environ, **RANK_ENVIRONMENT, **environment},
            "output": str(output),
            "errors": str(errors or output),
            "folder": str(folder or Path.cwd()),
            "path": sys.path if path is None else path,
        }
        self._forks = forks
        self.pid: int = forks.ask(report)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, which: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """A process that has imported torch, for all processes of `Launch`; see `fork_server.py`."""

    def __init__(self) -> None:
        path = os.pathsep.join(sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": path},
        )

    def ask(self, what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Launch:
    """`nproc` separate Python processes running one script, each killable.

    Each has torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so that
    `init_process_group("gloo")` finds the others. The store is held by the test's process: it
    outlives every rank, rank 0 included. `options` are those of each `Fork`.
    """

    def __init__(
        self,
        forks: Forks,
        script: Path,
        nproc: int,
        *args: object,
        directory: Path,
        **options: Any,
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank starts a server at that port
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
        }
        self._outputs = [directory / f"{script.stem}.{rank}.out" for rank in range(nproc)]
        self.processes = []
        for rank, output in enumerate(self._outputs):
            output.touch()
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            rank_process = Fork(
                forks, script, args, environment=environment, output=output, **options
            )
            self.processes.append(rank_process)

    def output(self, rank: int) -> str:
        """What `rank` printed so far, errors included."""
        return self._outputs[rank].read_text()

    def wait_for(self, text: str, rank: int, timeout: float = 60.0) -> None:
        """Until `rank` has printed `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            ended = self.processes[rank].poll() is not None
            if (ended and text not in self.output(rank)) or time.monotonic() > deadline:
                what = f"{'ended' if ended else f'ran for {timeout:g} s'} without {text!r}"
                raise PoolTimeoutError(f"rank {rank} {what}:\n{self.output(rank)}")
            time.sleep(0.02)

    def kill(self, rank: int) -> None:
        """SIGKILL to `rank`, which cannot clean up."""
        self.processes[rank].kill()
        self.processes[rank].wait()

    def wait(self, timeout: float = 60.0) -> list[int]:
        """The exit codes, by rank (-9 for a killed one). All are killed at the timeout."""
        deadline = time.monotonic() + timeout
        try:
            return [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self.processes]
        except subprocess.TimeoutExpired:
            running = [i for i, rank in enumerate(self.processes) if rank.poll() is None]
            self.close()
            outputs = "".join(f"\n\nrank {rank}:\n{self.output(rank)}" for rank in running)
            message = f"ranks {running} did not end within {timeout:g} s{outputs}"
            raise PoolTimeoutError(message) from None

    def close(self) -> None:
        for rank in range(len(self.processes)):
            self.kill(rank)
