"""DistKFAC's inverter: threads decompose factors while training continues.

submit    copies the factors of a layer, and queues them for a thread
collect   returns the results that are finished, and waits for those that are too old

A layer is pending from the step that submits its factors until its inverse is
installed. Until then it is not submitted again. If it is due at that very step, it is
submitted again. A refresh waits for a layer that has no inverse yet.

Decompositions release the interpreter lock. Each thread computes with one core,
whatever ``torch.set_num_threads`` is for the other threads. Threads end with their pool
or with the interpreter, and first finish the work that they have begun, because Python
must not stop a thread in C++ code.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, thread, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

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

MAX_THREADS = 4  # by default

T = TypeVar("T")

_STARTING = threading.Lock()


def _use_one_core() -> None:
    """Let this thread compute with one core.

    ``torch.set_num_threads`` also sets the number of cores for threads that start
    later. Another thread therefore restores it.
    """
    with _STARTING:
        num_cores = torch.get_num_threads()
        torch.set_num_threads(1)
        restorer = threading.Thread(
            target=torch.set_num_threads, args=(num_cores,), daemon=True
        )
        with suppress(RuntimeError):  # the system may refuse more threads
            restorer.start()
            restorer.join()


class WorkerPool:
    """A fixed number of threads that work in the order of submission."""

    def __init__(self, threads: int) -> None:
        name = "second_order inverses"
        self._threads = ThreadPoolExecutor(threads, name, initializer=_use_one_core)
        self._process_id = os.getpid()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work for a thread.

        Raises:
            RuntimeError: After :meth:`close`, and in a forked child process.
        """
        self._require_threads()
        return self._threads.submit(_run_unless_exiting, work)

    def wait_for(self, futures: Iterable[Future[Any]]) -> None:
        """Wait for submitted work.

        Raises:
            RuntimeError: In a forked child process, if some work is not finished.
        """
        unfinished = [future for future in futures if not future.done()]
        if unfinished:
            self._require_threads()
            wait(unfinished)

    def _require_threads(self) -> None:
        """Raise RuntimeError in a forked child process, which has no threads."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "a forked process has no threads to compute inverses: train, and call "
                "state_dict(), in the process that made the optimizer"
            )

    def close(self) -> None:
        """Drop queued work, wait for work that has begun, and end the threads."""
        self._threads.shutdown(cancel_futures=True)


def _run_unless_exiting(work: Callable[[], T]) -> T:
    """Run work, unless the interpreter exits, which would wait for all queued work."""
    if getattr(thread, "_shutdown", False):
        raise CancelledError
    return work()


def default_num_threads() -> int:
    """Return half of this process's share of the cores, from 1 to MAX_THREADS.

    The processes that ``torchrun`` starts on a host share its cores equally. Training
    uses the other half of this process's share.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    local_ranks = 1
    variable = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if variable.isdigit():
        local_ranks = max(int(variable), 1)
    return min(max(cores // local_ranks // 2, 1), MAX_THREADS)


class ThreadedInverter:
    """Decomposes copies of factors on the threads of a pool.

    ``staleness`` and ``deterministic`` are those of
    :class:`second_order.kfac.inverter.Inverter`.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        solver: Solver,
        own: DistKFACOptions,
    ) -> None:
        device = training.device
        if own.inverse_device == "cuda" and device.type != "cuda":
            raise ValueError(
                f"inverse_device='cuda', but the parameters are on {device}; move "
                f"the model there first, or use inverse_device='cpu'"
            )
        self.staleness = own.staleness
        self.deterministic = own.deterministic
        self.pool = WorkerPool(own.inverse_threads or default_num_threads())
        self._solver = solver
        self._dtype = options.inv_dtype
        self._inverse_device = torch.device("cpu")
        if own.inverse_device == "cuda":
            self._inverse_device = device
        self._stream: torch.cuda.Stream | None = None  # of the threads
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self.clear()

    def clear(self) -> None:
        """Drop all jobs."""
        self._futures: dict[KroneckerBlock, Future[Result]] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Copy the factors of some layers, and queue them for the threads."""
        # Start with the largest layers, so that all threads finish at a similar time.
        jobs = sorted(jobs, key=lambda job: job.cost, reverse=True)

        # Copy all factors with one kernel.
        factors = [problem.stored for job in jobs for problem in job.problems.values()]
        copies = [torch.empty_like(factor) for factor in factors]
        if copies:
            torch._foreach_copy_(copies, factors)
        remaining = iter(copies)

        for job in jobs:
            problems: dict[str, Problem] = {}
            for factor_name, problem in job.problems.items():
                problems[factor_name] = problem._replace(stored=next(remaining))
            weight = None if job.weight is None else job.weight.clone()
            work = partial(
                decompose_snapshot,
                job._replace(problems=problems, weight=weight),
                self._solver,
                self._dtype,
                self._inverse_device,
            )
            self._futures[job.block] = self._submit_work(work)

    def _submit_work(self, work: Callable[[], T]) -> Future[T]:
        """Queue work, which a thread starts when the device has computed its inputs.

        On CUDA, work has its own stream. Its results are complete when it returns.
        """
        stream = self._stream
        if stream is None:
            return self.pool.submit(work)
        event = torch.cuda.current_stream(stream.device).record_event()

        def run_in_stream() -> T:
            event.synchronize()
            with torch.cuda.stream(stream):
                result = work()
            stream.synchronize()
            return result

        return self.pool.submit(run_in_stream)

    def unchecked_decompositions(
        self,
    ) -> Mapping[KroneckerBlock, Mapping[str, Decomposition]]:
        """Return nothing, because threads check what they have decomposed."""
        return {}

    def collect(
        self, must_wait: Callable[[KroneckerBlock], bool], read: DeviceRead
    ) -> list[Result]:
        """Return the layers that are finished.

        Args:
            must_wait: Whether to wait for a layer.
            read: Not used, because threads read the device.
        """
        results: list[Result] = []
        for block, future in list(self._futures.items()):
            if must_wait(block):
                with stage("wait"):
                    self.pool.wait_for([future])
            elif self.deterministic or not future.done():
                continue
            del self._futures[block]
            results.append(self._result_of(block, future))
        return results

    def _result_of(self, block: KroneckerBlock, future: Future[Result]) -> Result:
        """The result of a finished layer. An error on the thread becomes part of it."""
        # `exception` also returns SystemExit and KeyboardInterrupt, which would
        # otherwise end the step of this rank alone.
        error = future.exception()
        if error is not None:
            return Result(block, error=describe_error(error))
        result = future.result()
        if self._stream is not None:
            # The memory belongs to the threads' stream, and another stream uses it.
            for decomposition in result.decompositions.values():
                for part in decomposition:
                    part.record_stream(torch.cuda.current_stream(part.device))
        return result

    def forget(self, block: KroneckerBlock) -> None:
        """Drop the job of a layer, whether or not it is finished."""
        self._futures.pop(block, None)

    def finish(self) -> None:
        """Wait until all jobs are finished."""
        self.pool.wait_for(self._futures.values())

    def close(self) -> None:
        """End the threads."""
        self.pool.close()

    def post(self, tensors: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Copy tensors to the CPU, and send them.

        On CUDA, a thread waits for them and sends them.
        """
        if self._stream is None:
            send(tensors)
        else:
            self._submit_work(lambda: send([tensor.cpu() for tensor in tensors]))


def decompose_snapshot(
    job: Job, solver: Solver, dtype: torch.dtype, device: torch.device
) -> Result:
    """Decompose copies of a layer's factors. Runs on a thread.

    Args:
        job: The copies.
        solver: The solver.
        dtype: The dtype of the result.
        device: The device that computes. The result is on the device of the factors.
    """
    if job.weight is not None and not job.weight.item() > 0:
        return Result(job.block, has_statistics=False)

    problems: list[Problem] = []
    for problem in job.problems.values():
        added = None if problem.added is None else problem.added.to(device)
        moved = problem._replace(stored=problem.stored.to(device), added=added)
        if device.type == "cuda":
            # On CUDA, the precision of float32 products is a process-wide setting.
            moved = moved._replace(dtype=torch.float64)
        problems.append(moved)

    # Decompose, and move the results to the device of the factors.
    with torch.no_grad():
        decompositions = solver.decompose(problems, dtype)

    by_name: dict[str, Decomposition] = {}
    for factor_name, decomposition in zip(job.problems, decompositions, strict=True):
        if decomposition is not None:
            factor_device = job.problems[factor_name].stored.device
            by_name[factor_name] = tuple(
                part.to(factor_device) for part in decomposition
            )
    return Result(job.block, by_name)
