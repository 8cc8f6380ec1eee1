"""DistKFAC's inverses: solved on threads beside training, put to use when all ranks have them.

submit    copies of a layer's factors and of what is added to them, handed to a thread
solve     the decompositions of the copies, by the thread
install   the results, on the device of the training, at the step at which all ranks agree

A layer is under way from the step that submits a snapshot of its factors until it is installed, and
is not submitted again before: at that step if it is due. One without an inverse is waited for.

Decompositions release the interpreter lock. A thread computes with one core, whatever torch is set
to for the others. Threads end with their pool or with the interpreter, after the work that they
have begun: Python may not cut off a thread in C++ code. A child of ``fork`` is refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, thread, wait
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.contract.training import PendingAverage
from second_order.errors import DecompositionError
from second_order.kfac.solve import (
    FactorCopies,
    Refreshed,
    Solve,
    Solved,
    Solves,
    Verdict,
)
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import Attempts, Problem
from second_order.optimizers.config import DistKFACOptions
from second_order.stages import stage

__all__ = ["SolvesOnThreads", "WorkerPool", "half_the_cores", "own_cores", "solve"]

T = TypeVar("T")
Decompose: TypeAlias = Callable[[Sequence[Problem]], Attempts]


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
        self._pid: int | None = None  # of the process whose threads these are

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a piece of work; RuntimeError after :meth:`close`, and in a child of ``fork``."""
        self.require_own_process()
        self._pid = os.getpid()
        return self._threads.submit(_unless_at_the_end, work)

    def require_own_process(self) -> None:
        """Raise RuntimeError in a child of ``fork``: threads and what they do are its parent's."""
        if self._pid not in (None, os.getpid()):
            raise RuntimeError(
                "this process was forked from one whose threads solve: they are not here; make the "
                "optimizer in the child, or start it by 'spawn'"
            )

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


def _tensors_of(problems: Mapping[str, Problem]) -> list[Tensor]:
    """Factors, and what is added to them where that is a tensor."""
    added = [each.added for each in problems.values() if each.added is not None]
    return [*(each.stored for each in problems.values()), *added]


def _by_letter(letters: Sequence[str], fetch: Callable[[], list[Tensor]]) -> dict[str, Tensor]:
    """The copies of factors that a thread received, by letter."""
    return dict(zip(letters, fetch(), strict=False))


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


class SolvesOnThreads(Solves):
    """The inverses of a training's layers, solved on the threads of a pool."""

    solves_at_once = False

    def __init__(self, *arguments: Any, own: DistKFACOptions) -> None:
        super().__init__(*arguments)
        self._own, self.pool = own, WorkerPool(own.inverse_threads or half_the_cores())
        if own.inverse_device == "cuda" and self.training.device.type != "cuda":
            raise ValueError(
                f"inverse_device='cuda', but the parameters are on {self.training.device}; move "
                f"the model there first, or use inverse_device='cpu'"
            )
        if own.staleness != 0:
            self.agreeing = "wait"

    @property
    def heads(self) -> int:  # type: ignore[override]
        """γ, and the scale, if there are others to tell: their factors have moved on."""
        scaled = self.options.preconditioner_scale == "gradient"
        return 0 if self.training.world.size == 1 else 1 + scaled

    @cached_property
    def _streams(self) -> Streams | None:
        """The CUDA streams that copy and solve beside training; None without CUDA."""
        device = self.training.device
        cuda = device.type == "cuda"
        return Streams(*(torch.cuda.Stream(device) for _ in range(3))) if cuda else None

    def post(self, copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Send copies of tensors from the CPU; copies on CUDA by a thread that waits for them."""
        streams = self._streams
        if streams is None:
            send(copies)
            return
        (fetch,) = take_snapshots([copies], torch.device("cpu"), streams)
        self.pool.submit(lambda: send(fetch()))

    def run(
        self, due: Sequence[KroneckerBlock], pending: PendingAverage, news: Sequence[float]
    ) -> Refreshed:
        """Submit what is due, install what has come, and submit what is due of that again."""
        before = list(self.under_way)
        with stage("solve"):
            self.submit([block for block in due if block not in self.under_way])
        if due:
            self.layers.tell_of_sums()
        agreed: list[KroneckerBlock] = []
        # Exactly so many steps later: before, there is nothing to agree on.
        if news or not self._own.deterministic or any(map(self._waits, self.under_way)):
            news, agreed = self.agree(pending, news)
        if due:
            self.wanted = set()
            came = {b for b in before if b not in self.under_way and b.solved}
            with stage("solve"):
                self.submit([block for block in due if block in came])
        return news, agreed

    def solve(self, ready: Sequence[KroneckerBlock]) -> None:
        """Hand snapshots of this rank's factors to threads, the largest first: ending together."""
        if not ready:
            return
        options, streams = self.options, self._streams
        decompose = partial(self.solver.decompose, dtype=options.inv_dtype)
        on_cuda = self._own.inverse_device == "cuda"
        device = self.training.device if on_cuda else torch.device("cpu")
        every: list[dict[str, Problem]] = []
        ready = sorted(ready, key=self.step.costs.__getitem__, reverse=True)
        for block in ready:
            place = block.weight.device if on_cuda else device
            problems = {k: self.problem(block, k, place) for k in block.shape.letters}
            if on_cuda:  # where float32 products obey a setting of the whole process
                problems = {k: replace(each, dtype=torch.float64) for k, each in problems.items()}
            every.append(problems)
        fetches = take_snapshots([*map(_tensors_of, every)], device, streams)
        for block, problems, fetch in zip(ready, every, fetches, strict=True):
            self.under_way[block].copies = partial(_by_letter, list(problems), fetch)
            self.under_way[block].ticket = self.pool.submit(
                partial(solve, fetch, problems, decompose, streams)
            )

    def finish(self) -> None:
        """Wait for this rank's running solves; they are installed when they are due."""
        wait([solve.ticket for solve in self.under_way.values() if solve.ticket is not None])

    def keep_snapshots(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Keep the factors that running solves started from; the running averages will change.

        They go into checkpoints, which any rank can write.
        """
        for block in blocks:
            solve, factors = self.under_way.get(block), block.factors
            if solve is None or solve.snapshot is not None or factors is None:
                continue
            stored: dict[str, Tensor | None] = {}
            if solve.copies is None:
                stored = {k: None if t is None else t.clone() for k, t in factors.stored.items()}
            solve.snapshot = FactorCopies(stored, factors.means.clone())

    def _waits(self, block: KroneckerBlock) -> bool:
        """Whether a layer under way must be installed at this step; the same on every rank."""
        if not block.solved:
            return True
        age, most = self.training.steps - self.under_way[block].step, self._own.staleness
        late = self.drift is not None and age >= self.drift.interval(block) - 1
        return late or (most is not None and age >= most)

    def verdict(self, block: KroneckerBlock, solve: Solve) -> Verdict:
        """This rank's verdict on a layer that is under way."""
        self.pool.require_own_process()
        ticket, waits = solve.ticket, self._waits(block)
        if block.state.unverified or (ticket is None and waits):
            return super().verdict(block, solve)
        if ticket is None:
            return solve.verdict
        if waits:
            with stage("wait"):
                wait([ticket])
        elif self._own.deterministic or not ticket.done():
            return Verdict.OPEN
        # Also SystemExit and the like: they would end this process, or a step of it, alone.
        if ticket.exception() is not None:
            return Verdict.RAISED
        return Verdict.SOUND if len(ticket.result()) == len(block.shape.letters) else Verdict.FAILED

    def install(self, verdicts: Mapping[KroneckerBlock, Verdict]) -> None:
        """Put solved layers to use; DecompositionError on every rank, for an error on a thread."""
        raised = [block for block, verdict in verdicts.items() if verdict is Verdict.RAISED]
        if raised:
            tickets = [self.under_way[block].ticket for block in raised]
            errors = [t.exception() for t in tickets if t is not None and t.done()]
            error = next(filter(None, errors), None)
            self.under_way.clear()  # other layers', too: one error is raised once
            where = "a thread of another process" if error is None else "a thread"
            said = "" if error is None else f": {type(error).__name__}: {error}"
            names = ", ".join(repr(block.name) for block in raised)
            raise DecompositionError(f"{where} that solves for {names} has raised{said}") from error
        device, streams = self.training.device, self._streams
        for block, verdict in verdicts.items():
            solve, ticket = self.under_way[block], self.under_way[block].ticket
            if ticket is not None and verdict is Verdict.SOUND:
                found = ticket.result().items()
                solve.solved = {k: retrieve(parts, device, streams) for k, parts in found}
                solve.ticket = None
        super().install(verdicts)

    def close(self) -> None:
        """End the threads, and forget all layers."""
        self.pool.close()
        super().close()


def solve(
    fetch: Callable[[], list[Tensor]],
    problems: Mapping[str, Problem],
    decompose: Decompose,
    streams: Streams | None,
) -> Solved:
    """Decompose a layer's factors from a snapshot; runs on a thread."""
    snapshot = fetch()
    added = iter(snapshot[len(problems) :])
    built = [
        replace(
            problem,
            device=stored.device,
            stored=stored,
            added=None if problem.added is None else next(added),
        )
        for stored, problem in zip(snapshot, problems.values(), strict=False)
    ]
    with torch.no_grad():
        if streams is None:
            found = decompose(built).finish()
        elif built[0].device.type == "cpu":  # pinned, to be fetched without waiting
            found = [p and tuple(t.pin_memory() for t in p) for p in decompose(built).finish()]
        else:
            with torch.cuda.stream(streams.solves):
                found = decompose(built).finish()
            streams.solves.record_event().synchronize()
    return {letter: parts for letter, parts in zip(problems, found, strict=True) if parts}
