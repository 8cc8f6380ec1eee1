"""DistKFAC's inverses: computed on threads beside training, put to use when all ranks have them.

submit    copies of a layer's factors are handed to a thread, which decomposes them
collect   finished results are taken from the threads

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
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from second_order.kfac.inverter import Job, Result, describe_error
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.solvers import Decomposition, Problem, Solver
from second_order.kronecker.storage import DeviceRead
from second_order.optimizers.config import DistKFACOptions, KFACOptions
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["ThreadedInverter", "WorkerPool"]

T = TypeVar("T")

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


def half_the_cores() -> int:
    """Number of threads that leave half of this process's share of the cores to others; 1 to 4."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks_here = max(int(ranks), 1) if ranks.isdigit() else 1
    return min(max(cores // ranks_here // 2, 1), 4)


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
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inverse_device = device if own.inverse_device == "cuda" else torch.device("cpu")
        self._solver = solver
        self._dtype = options.inv_dtype
        self.pool = WorkerPool(own.inverse_threads or half_the_cores())
        self.clear()

    def clear(self) -> None:
        """Forget what has been submitted."""
        self._tickets: dict[KroneckerBlock, Future[Result]] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand snapshots of factors to threads, the largest first, so that they end together."""
        jobs = sorted(jobs, key=lambda job: job.cost, reverse=True)
        factors = [each.stored for job in jobs for each in job.problems.values()]
        copies = [torch.empty_like(factor) for factor in factors]
        if copies:
            torch._foreach_copy_(copies, factors)
        remaining = iter(copies)
        for job in jobs:
            problems: dict[str, Problem] = {}
            for letter, each in job.problems.items():
                problems[letter] = replace(each, stored=next(remaining))
            weight = None if job.weight is None else job.weight.clone()
            snapshot = replace(job, problems=problems, weight=weight)
            work = partial(
                decompose_snapshot, snapshot, self._solver, self._dtype, self._inverse_device
            )
            self._tickets[job.block] = self._on_thread(work)

    def attempts(self) -> Mapping[KroneckerBlock, Mapping[str, Decomposition]]:
        """Return nothing: threads check what they have decomposed."""
        return {}

    def forget(self, block: KroneckerBlock) -> None:
        """Drop the result of a layer, which may not be finished."""
        self._tickets.pop(block, None)

    def _on_thread(self, work: Callable[[], T]) -> Future[T]:
        """Start work on a thread, once the device has computed what it works on.

        On CUDA the work has a stream of its own, and its results are complete.
        """
        stream = self._stream
        if stream is None:
            return self.pool.submit(work)
        event = torch.cuda.current_stream(stream.device).record_event()

        def in_stream() -> T:
            event.synchronize()
            with torch.cuda.stream(stream):
                result = work()
            stream.synchronize()
            return result

        return self.pool.submit(in_stream)

    def collect(
        self, must_wait: Callable[[KroneckerBlock], bool], read: DeviceRead
    ) -> list[Result]:
        """Return finished layers, and those that are waited for; nothing is read."""
        results: list[Result] = []
        for block, ticket in list(self._tickets.items()):
            if must_wait(block):
                with stage("wait"):
                    wait([ticket])
            elif self.deterministic or not ticket.done():
                continue
            del self._tickets[block]
            # Also SystemExit and the like: they would end this process, or a step of it, alone.
            error = ticket.exception()
            if error is not None:
                results.append(Result(block, error=describe_error(error)))
                continue
            result = ticket.result()
            if self._stream is not None:
                for part in chain(*result.parts.values()):  # it is memory of that stream
                    part.record_stream(torch.cuda.current_stream(part.device))
            results.append(result)
        return results

    def finish(self) -> None:
        """Wait for all that has been submitted."""
        wait(self._tickets.values())

    def close(self) -> None:
        """End the threads."""
        self.pool.close()

    def post(self, copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Send tensors from the CPU; a thread waits for those on CUDA."""
        if self._stream is None:
            send(copies)
        else:
            self._on_thread(lambda: send([copy.cpu() for copy in copies]))


def decompose_snapshot(
    job: Job, solver: Solver, dtype: torch.dtype, device: torch.device
) -> Result:
    """Decompose copies of a layer's factors on a device; runs on a thread."""
    if job.weight is not None and not job.weight.item() > 0:
        return Result(job.block, has_statistics=False)
    moved: list[Problem] = []
    for each in job.problems.values():
        added = None if each.added is None else each.added.to(device)
        here = replace(each, stored=each.stored.to(device), added=added)
        if device.type == "cuda":  # where float32 products obey a setting of the whole process
            here = replace(here, dtype=torch.float64)
        moved.append(here)
    with torch.no_grad():
        found = solver.decompose(moved, dtype)
    parts: dict[str, Decomposition] = {}
    for (letter, each), decomposition in zip(job.problems.items(), found, strict=True):
        if decomposition is not None:
            parts[letter] = tuple(part.to(each.stored.device) for part in decomposition)
    return Result(job.block, parts)
