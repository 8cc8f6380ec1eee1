"""DistKFAC's inverses: computed on threads beside training, put to use when all ranks have them.

submit    copies of a layer's factors, and of what is added to them, are handed to a thread
          the thread decomposes the copies
collect   finished results are moved to the device of the training

A layer is under way from the step that submits a snapshot of its factors until it is installed, and
is not submitted again before: at that step if it is due. One without an inverse is waited for.

Decompositions release the interpreter lock. A thread computes with one core, whatever torch is set
to for the others. Threads end with their pool or with the interpreter, after the work that they
have begun: Python may not cut off a thread in C++ code.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, thread, wait
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.kfac.plan import Item
from second_order.kfac.solve import Collected, Job, Result, Solver
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.solvers import Attempts, Decomposition, Problem
from second_order.optimizers.config import DistKFACOptions, KFACOptions
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["ThreadedInverter", "WorkerPool", "half_the_cores", "own_cores"]

T = TypeVar("T")
Decompose: TypeAlias = Callable[[Sequence[Problem]], Attempts]
Parts: TypeAlias = dict[str, Decomposition]

_STARTING = threading.Lock()


def _take_one_core() -> None:
    """Give this thread one core, and new threads as many as before: torch has one setting."""
    with _STARTING:
        others = torch.get_num_threads()
        torch.set_num_threads(1)
        restorer = threading.Thread(target=torch.set_num_threads, args=(others,), daemon=True)
        with suppress(RuntimeError):  # there may be no more threads
            restorer.start()
            restorer.join()


class WorkerPool:
    """Threads, at most so many, that take up work in the order in which it comes."""

    def __init__(self, threads: int) -> None:
        name = "second_order inverses"
        self._threads = ThreadPoolExecutor(threads, name, initializer=_take_one_core)
        self._process = os.getpid()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a piece of work; RuntimeError after :meth:`close`, and in a forked child."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a forked process has no threads to compute inverses: make the optimizer in the "
                "process that trains"
            )
        return self._threads.submit(_unless_at_the_end, work)

    def close(self) -> None:
        """Drop the work that has not been begun, and end the threads after that which has."""
        self._threads.shutdown(cancel_futures=True)


def _unless_at_the_end(work: Callable[[], T]) -> T:
    if getattr(thread, "_shutdown", False):  # the interpreter ends: it would wait for all work
        raise CancelledError
    return work()


class Streams(NamedTuple):
    """CUDA streams beside the one that trains: copies wait neither for solves nor for others."""

    snapshots: torch.cuda.Stream  # copies to the CPU
    solves: torch.cuda.Stream
    returns: torch.cuda.Stream  # copies from the CPU


def take_snapshots(
    groups: Sequence[Sequence[Tensor]], device: torch.device, streams: Streams | None
) -> list[Callable[[], list[Tensor]]]:
    """Begin to copy tensors of one device, which may change as soon as this returns, to a device.

    Returns, for each group, a function for the thread that needs the copies: it waits for them.
    ``streams`` are for tensors on CUDA.
    """
    copies = [[torch.empty_like(t) for t in group] for group in groups]
    torch._foreach_copy_(list(chain(*copies)), list(chain(*groups)))
    return [_arriving(group, device, streams) for group in copies]


def _arriving(
    copies: list[Tensor], device: torch.device, streams: Streams | None
) -> Callable[[], list[Tensor]]:
    if streams is None:
        return lambda: [copy.to(device) for copy in copies]
    current = torch.cuda.current_stream(streams.snapshots.device)
    if device.type == "cpu":
        streams.snapshots.wait_stream(current)
        with torch.cuda.stream(streams.snapshots):
            arrived = []
            for copy in copies:
                copy.record_stream(streams.snapshots)
                pinned = torch.empty(copy.shape, dtype=copy.dtype, device="cpu", pin_memory=True)
                arrived.append(pinned.copy_(copy, non_blocking=True))
        event = streams.snapshots.record_event()
    else:
        for copy in copies:
            copy.record_stream(streams.solves)
        arrived, event = copies, current.record_event()

    def fetch() -> list[Tensor]:
        event.synchronize()
        return arrived

    return fetch


def retrieve(
    parts: Sequence[Tensor], device: torch.device, streams: Streams | None
) -> tuple[Tensor, ...]:
    """Move a thread's results to a device; on CUDA, by streams, without waiting for it.

    Results are in pinned memory if they are to be copied, else complete.
    """
    if streams is None:
        return tuple(part.to(device) for part in parts)
    current = torch.cuda.current_stream(streams.returns.device)
    with torch.cuda.stream(streams.returns):
        moved = [part.to(device, non_blocking=True) for part in parts]
    current.wait_stream(streams.returns)
    for part in moved:
        part.record_stream(current)
    return tuple(moved)


def own_cores() -> int:
    """This process's share of the cores."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return cores // max(int(local) if local.isdigit() else 1, 1)


def half_the_cores() -> int:
    """Number of threads that leave half of this process's share of the cores to others; 1 to 4."""
    return min(max(own_cores() // 2, 1), 4)


class ThreadedInverter:
    """Decomposes snapshots of factors on the threads of a pool."""

    def __init__(
        self, training: Training, options: KFACOptions, solver: Solver, own: DistKFACOptions
    ) -> None:
        device = training.device
        if own.inverse_device == "cuda" and device.type != "cuda":
            raise ValueError(
                f"inverse_device='cuda', but the parameters are on {device}; move "
                f"the model there first, or use inverse_device='cpu'"
            )
        self.staleness = own.staleness
        self.deterministic = own.deterministic
        self._training = training
        self._on_cuda = own.inverse_device == "cuda"
        self._decompose: Decompose = partial(solver.decompose, dtype=options.inv_dtype)
        self.pool = WorkerPool(own.inverse_threads or half_the_cores())
        self.clear()

    @cached_property
    def _streams(self) -> Streams | None:
        """The CUDA streams that copy and solve beside training; None without CUDA."""
        device = self._training.device
        if device.type != "cuda":
            return None
        return Streams(*(torch.cuda.Stream(device) for _ in range(3)))

    @property
    def attempted(self) -> Mapping[Item, Decomposition]:
        """Nothing: attempts are on threads."""
        return {}

    def clear(self) -> None:
        """Forget what has been submitted."""
        self._tickets: dict[KroneckerBlock, Future[Parts]] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand snapshots of factors to threads, the largest first, so that they end together."""
        if not jobs:
            return
        jobs = sorted(jobs, key=lambda job: job.cost, reverse=True)
        device = self._training.device if self._on_cuda else torch.device("cpu")
        tensors: list[list[Tensor]] = []
        for job in jobs:
            stored = [each.stored for each in job.problems.values()]
            added = [each.added for each in job.problems.values() if each.added is not None]
            tensors.append([*stored, *added])
        snapshots = take_snapshots(tensors, device, self._streams)
        for job, fetch in zip(jobs, snapshots, strict=True):
            problems = dict(job.problems)
            if self._on_cuda:  # where float32 products obey a setting of the whole process
                problems = {k: replace(each, dtype=torch.float64) for k, each in problems.items()}
            work = partial(decompose_snapshot, fetch, problems, self._decompose, self._streams)
            self._tickets[job.block] = self.pool.submit(work)

    def collect(
        self, waits: Callable[[KroneckerBlock], bool], reads: Sequence[Sequence[Tensor]]
    ) -> Collected:
        """Return finished layers, and those that are waited for; nothing is read."""
        results: list[Result] = []
        for block, ticket in list(self._tickets.items()):
            if waits(block):
                with stage("wait"):
                    wait([ticket])
            elif self.deterministic or not ticket.done():
                continue
            del self._tickets[block]
            # Also SystemExit and the like: they would end this process, or a step of it, alone.
            error = ticket.exception()
            parts: Parts = {}
            if error is None:
                for letter, found in ticket.result().items():
                    parts[letter] = retrieve(found, self._training.device, self._streams)
            results.append(Result(block, parts, error))
        return Collected(results)

    def finish(self) -> None:
        """Wait for all that has been submitted."""
        wait(self._tickets.values())

    def close(self) -> None:
        """End the threads."""
        self.pool.close()

    def post(self, copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Send copies of tensors from the CPU; copies on CUDA by a thread that waits for them."""
        if self._streams is None:
            send(copies)
            return
        (fetch,) = take_snapshots([copies], torch.device("cpu"), self._streams)
        self.pool.submit(lambda: send(fetch()))


def decompose_snapshot(
    fetch: Callable[[], list[Tensor]],
    problems: Mapping[str, Problem],
    decompose: Decompose,
    streams: Streams | None,
) -> Parts:
    """Decompose a layer's factors from a snapshot; runs on a thread."""
    snapshot = fetch()
    added = iter(snapshot[len(problems) :])
    copies: list[Problem] = []
    for stored, problem in zip(snapshot, problems.values(), strict=False):
        own = None if problem.added is None else next(added)
        copies.append(replace(problem, device=stored.device, stored=stored, added=own))
    with torch.no_grad():
        if streams is None:
            found = decompose(copies).finish()
        elif copies[0].device.type == "cpu":  # pinned, to be fetched without waiting
            found = [p and tuple(t.pin_memory() for t in p) for p in decompose(copies).finish()]
        else:
            with torch.cuda.stream(streams.solves):
                found = decompose(copies).finish()
            streams.solves.record_event().synchronize()
    return {letter: parts for letter, parts in zip(problems, found, strict=True) if parts}
