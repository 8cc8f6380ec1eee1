"""Work on threads of its own while training goes on: decompositions release the interpreter lock.

A thread computes with one core, whatever torch is set to for the others. Threads are started by the
first piece of work, and end with the pool or the interpreter, after the work that they have begun:
Python may not cut off a thread in C++ code. A child of ``fork`` has none of them, and is refused.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = ["Streams", "Ticket", "WorkerPool", "retrieve", "take_snapshot"]

T = TypeVar("T")


class Ticket(Generic[T]):
    """A piece of work that a pool does."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._finished = threading.Event()

    @classmethod
    def failed(cls, error: BaseException) -> Ticket[T]:
        """Make a ticket that is done, with an error."""
        ticket: Ticket[T] = cls(lambda: None)  # type: ignore[arg-type, return-value]
        ticket.drop(error)
        return ticket

    @property
    def done(self) -> bool:
        """Whether the work has ended, with a result or an error."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Wait until the work is done."""
        self._finished.wait()

    @property
    def error(self) -> BaseException | None:
        """The error that the work has raised, be it SystemExit, or None; waits for the work."""
        self.wait()
        return self._error

    def result(self) -> T:
        """The value that the work has returned, or its error raised; waits for the work."""
        error = self.error
        if error is not None:
            raise error
        return self._result  # type: ignore[return-value]

    def drop(self, error: BaseException) -> None:
        """Tell whoever waits for the work that it will not be done."""
        self._work, self._error = None, error
        self._finished.set()

    def run(self) -> None:
        """Do the work, and keep its result or its error."""
        assert self._work is not None
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._work = None
        self._finished.set()


Tickets: TypeAlias = "queue.SimpleQueue[Ticket[object] | None]"


class WorkerPool:
    """Threads, so many of them, that take up work in the order in which it comes."""

    def __init__(self, threads: int) -> None:
        self._size, self._closed, self._pid = threads, False, os.getpid()
        self._tickets: Tickets = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """Queue a piece of work, and return its ticket.

        Raises:
            RuntimeError: After :meth:`close`, or if no thread can be started.
        """
        if self._closed:
            raise RuntimeError("the pool of threads is closed")
        self.require_own_process()
        ticket = Ticket(work)
        if not self._threads:
            # Threads know the queue, not the pool, so that the pool can go.
            arguments = self._tickets, torch.get_num_threads()
            for i in range(self._size):
                name = f"second_order inverses {i}"
                thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
                _running[thread] = self._tickets
            weakref.finalize(self, _dismiss, self._tickets).atexit = False
        self._tickets.put(ticket)  # type: ignore[arg-type]
        return ticket

    def require_own_process(self) -> None:
        """Raise RuntimeError in a child of ``fork``: threads and what they do are its parent's."""
        if self._threads and self._pid != os.getpid():
            raise RuntimeError(
                "this process was forked from one whose threads solve: they are not here; make the "
                "optimizer in the child, or start it by 'spawn'"
            )
        self._pid = os.getpid()

    def close(self) -> None:
        """Drop the work that has not been begun, and end the threads after that which has."""
        self._closed = True
        if self._pid == os.getpid():
            _dismiss(self._tickets)
            for thread in self._threads:
                thread.join()


def _work(tickets: Tickets, others: int) -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()
    # torch's setting is this thread's and the default of new threads: a new thread restores it.
    restorer = threading.Thread(target=torch.set_num_threads, args=(others,), daemon=True)
    with suppress(RuntimeError):  # there may be no more threads
        restorer.start()
        restorer.join()
    while (ticket := tickets.get()) is not None:
        ticket.run()
        del ticket  # with the tensors that its work holds
    tickets.put(None)  # for the next thread


_running: weakref.WeakKeyDictionary[threading.Thread, Tickets] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    left = list(_running.items())
    for _, tickets in left:
        _dismiss(tickets)
    for thread, _ in left:
        thread.join()


def _dismiss(tickets: Tickets) -> None:
    """Let threads end after their present pieces of work."""
    with suppress(queue.Empty):
        while True:
            dropped = tickets.get_nowait()
            if dropped is not None:
                dropped.drop(RuntimeError("the pool of threads is closed"))
    tickets.put(None)


@dataclass(frozen=True)
class Streams:
    """CUDA streams for copies and solves beside the stream that trains.

    Attributes:
        snapshots: Stream of copies to the CPU.
        solves: Stream of decompositions, where the device does them.
        returns: Stream of copies from the CPU, which are not to wait for the others.
    """

    snapshots: torch.cuda.Stream
    solves: torch.cuda.Stream
    returns: torch.cuda.Stream


def take_snapshot(
    tensors: Sequence[Tensor], device: torch.device, streams: Streams | None
) -> Callable[[], list[Tensor]]:
    """Begin to copy tensors of one device as they are now, to a device.

    They may change as soon as this returns. ``streams`` are for tensors on CUDA.

    Returns:
        A function for the thread that needs the copies: it waits for them, and returns them.
    """
    copies = [t.clone() for t in tensors]
    if streams is None:
        return lambda: copies
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
        return tuple(parts)
    current = torch.cuda.current_stream(streams.returns.device)
    with torch.cuda.stream(streams.returns):
        moved = [part.to(device, non_blocking=True) for part in parts]
    current.wait_stream(streams.returns)
    for part in moved:
        part.record_stream(current)
    return tuple(moved)
