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
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.kfac.solve import Job, Result
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.solvers import Decomposition, Problem, Solver
from second_order.optimizers.config import DistKFACOptions, KFACOptions
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["ThreadedInverter", "WorkerPool"]

T = TypeVar("T")
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


@dataclass(frozen=True)
class Streams:
    """CUDA streams next to the one that trains."""

    copies: torch.cuda.Stream  # to the CPU
    solves: torch.cuda.Stream


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
    to_cpu = device.type == "cpu"
    stream = streams.copies if to_cpu else streams.solves
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    arrived: list[Tensor] = []
    with torch.cuda.stream(stream):
        for copy in copies:
            copy.record_stream(stream)
            if to_cpu:
                pinned = torch.empty_like(copy, device="cpu", pin_memory=True)
                arrived.append(pinned.copy_(copy, non_blocking=True))
            else:
                arrived.append(copy)
    event = stream.record_event()

    def fetch() -> list[Tensor]:
        event.synchronize()
        return arrived

    return fetch


def retrieve(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Move a thread's results to a device without waiting for it.

    Results are in pinned memory if they are to be copied, otherwise complete.
    """
    moved = tuple(part.to(device, non_blocking=True) for part in parts)
    if device.type == "cuda":
        for part in moved:  # the memory may be that of another stream
            part.record_stream(torch.cuda.current_stream(device))
    return moved


def half_the_cores() -> int:
    """Number of threads that leave half of this process's share of the cores to others; 1 to 4."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cores // ranks // 2, 1), 4)


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
        self._solver = solver
        self._dtype = options.inv_dtype
        self.pool = WorkerPool(own.inverse_threads or half_the_cores())
        self.clear()

    @cached_property
    def _streams(self) -> Streams | None:
        """The CUDA streams that copy and solve beside training; None without CUDA."""
        device = self._training.device
        if device.type != "cuda":
            return None
        return Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))

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
            pairs = [(each.stored, each.added) for each in job.problems.values()]
            tensors.append([tensor for pair in pairs for tensor in pair if tensor is not None])
        snapshots = take_snapshots(tensors, device, self._streams)
        for job, fetch in zip(jobs, snapshots, strict=True):
            problems = dict(job.problems)
            if self._on_cuda:  # where float32 products obey a setting of the whole process
                problems = {k: replace(each, dtype=torch.float64) for k, each in problems.items()}
            work = partial(
                decompose_snapshot, fetch, problems, self._solver, self._dtype, self._streams
            )
            self._tickets[job.block] = self.pool.submit(work)

    def collect(self, waits: Callable[[KroneckerBlock], bool]) -> list[Result]:
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
            if error is not None:
                results.append(Result(block, {}, f"{type(error).__name__}: {error}"))
                continue
            parts: Parts = {}
            for letter, found in ticket.result().items():
                parts[letter] = retrieve(found, self._training.device)
            results.append(Result(block, parts))
        return results

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
    solver: Solver,
    dtype: torch.dtype,
    streams: Streams | None,
) -> Parts:
    """Decompose a layer's factors from a snapshot; runs on a thread."""
    tensors = iter(fetch())
    copies: list[Problem] = []
    for problem in problems.values():
        stored = next(tensors)
        added = None if problem.added is None else next(tensors)
        copies.append(replace(problem, stored=stored, added=added))
    on_cuda = copies[0].stored.device.type == "cuda"
    stream = streams.solves if streams is not None and on_cuda else None
    beside = nullcontext() if stream is None else torch.cuda.stream(stream)
    with torch.no_grad(), beside:
        found = solver.decompose(copies, dtype).finish()
    parts = {letter: each for letter, each in zip(problems, found, strict=True) if each}
    if stream is not None:
        stream.synchronize()
    elif streams is not None:  # pinned, to be fetched without waiting
        parts = {k: tuple(part.pin_memory() for part in each) for k, each in parts.items()}
    return parts
