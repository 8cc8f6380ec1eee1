"""Messages between ranks with different jobs, which nobody waits for and no death can block.

A collective needs all its ranks: one that is killed or stopped takes the others along. Messages to
and from helpers travel through a TCP store that the first helper hosts, on a thread of their own.
If the helper dies, its store dies with it, and what notices is that thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from second_order.distributed.collectives import World

__all__ = ["Courier", "Message", "await_goodbyes", "open_store"]

Message: TypeAlias = tuple[list[Tensor], dict[str, Any]]

PART_BYTES = 4 * 2**20  # of a message: the store refuses values of more than 8 MiB
POLL_SECONDS, IDLE_SECONDS = 0.005, 0.05  # between looks, while somebody waits and otherwise
BEATS_A_TIMEOUT = 8
CLOSED = "closed"


def open_store(world: World, host: int, timeout: float) -> tuple[TCPStore | None, tuple[str, int]]:
    """A store that one rank hosts: it, on its host, and its address, on every rank.

    A collective over ``world``.

    Args:
        world: The processes.
        host: The rank that hosts it, for as long as it keeps what is returned.
        timeout: Seconds after which a call to the store gives up.
    """
    names = world.everybody(socket.gethostname())
    here = len(set(names)) == 1
    store: TCPStore | None = None
    if world.rank == host:
        store = TCPStore(
            "127.0.0.1" if here else names[host],
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    port = world.everybody(0 if store is None else store.port)[host]
    return store, ("127.0.0.1" if here else names[host], port)


def await_goodbyes(store: TCPStore, names: Sequence[str], patience: float) -> None:
    """Keep a store until all of the couriers have closed, or for as long as one has patience.

    Args:
        store: Here.
        names: What the couriers are called.
        patience: In seconds.
    """
    end = time.monotonic() + patience
    while not store.check([f"{name}/{CLOSED}" for name in names]) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)


class Courier:
    """Sends and receives lists of tensors on a thread of its own.

    Names of messages are used once. The thread ends with :meth:`close`, with the object, or with
    the store, which is then :attr:`lost`.

    Args:
        address: Of the store.
        me: What this side is called, in heartbeats.
        peer: Whose heartbeats to listen for.
        timeout: Seconds without a heartbeat after which the peer is lost.
    """

    def __init__(self, address: tuple[str, int], me: str, peer: str, timeout: float) -> None:
        self._shared = _Shared(me, peer, timeout)
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_run, args=(address, self._shared), name="second_order courier", daemon=True
        )
        self._thread.start()
        self._farewell = weakref.finalize(self, _say_goodbye, self._shared, self._thread, 1.0)

    def post(self, name: str, tensors: Sequence[Tensor], **note: Any) -> None:
        """Send tensors, which must not change any more, and a note of primitives.

        Tensors on a CUDA device are copied to the host here.
        """
        self._shared.outgoing.put((name, [t.detach().cpu().contiguous() for t in tensors], note))
        self._shared.wake.set()

    def tell(self, name: str, value: int) -> None:
        """Say a number that replaces the one said before; delivered when there is time."""
        self._shared.said[name] = value

    def heard(self, name: str) -> int | None:
        """The number that the peer has said last; None until one has been listened to and heard."""
        self._shared.listening.add(name)
        return self._shared.numbers.get(name)

    def expect(self, name: str) -> None:
        """Fetch a message as soon as it is there."""
        with self._shared.lock:
            self._shared.expected.add(name)

    def forget(self, name: str) -> None:
        """Fetch a message no more, and drop it if it is there."""
        with self._shared.lock:
            self._shared.expected.discard(name)
            self._shared.received.pop(name, None)

    def arrived(self, name: str) -> Message | None:
        """A message that has been expected, and its note; None if it is not there yet."""
        with self._shared.lock:
            return self._shared.received.pop(name, None)

    def holds(self, name: str) -> bool:
        """Whether a message that has been expected is there."""
        with self._shared.lock:
            return name in self._shared.received

    def wait(self, name: str, until: Callable[[], bool] = lambda: False) -> Message | None:
        """Wait for an expected message; None if the peer is lost or ``until`` says so."""
        self._shared.hurry(True)
        try:
            while True:
                message = self.arrived(name)
                if message is not None:
                    return message
                if until() or self.lost or self.closed_there:
                    return self.arrived(name)
                self._shared.news.wait(POLL_SECONDS)
                self._shared.news.clear()
        finally:
            self._shared.hurry(False)

    @property
    def lost(self) -> bool:
        """Whether the store has failed, or the peer's heart has stopped."""
        return self._shared.broken or self._shared.silent() > self._shared.timeout

    @property
    def closed_there(self) -> bool:
        """Whether the peer has said goodbye."""
        return self._shared.numbers.get(CLOSED) is not None

    def close(self, patience: float) -> None:
        """Say goodbye, and end the thread; what has been posted goes first.

        Args:
            patience: Seconds to wait for that; a thread that hangs in a dead connection is left.
        """
        if self._pid != os.getpid():  # in a child of fork there is no such thread
            return
        self._farewell.detach()
        _say_goodbye(self._shared, self._thread, patience)


class _Shared:
    """What the thread and its owner both see."""

    def __init__(self, me: str, peer: str, timeout: float) -> None:
        self.me, self.peer, self.timeout = me, peer, timeout
        self.outgoing: queue.SimpleQueue[tuple[str, list[Tensor], dict[str, Any]]] = (
            queue.SimpleQueue()
        )
        self.said: dict[str, int] = {}
        self.listening: set[str] = {CLOSED}
        self.numbers: dict[str, int] = {}
        self.expected: set[str] = set()
        self.received: dict[str, Message] = {}
        self.lock = threading.Lock()
        self.news, self.stop, self.wake = threading.Event(), threading.Event(), threading.Event()
        self.hurried = False  # somebody waits
        self.broken = False
        self._beat, self._heard_at = -1, time.monotonic()

    def hurry(self, hurried: bool) -> None:
        self.hurried = hurried
        if hurried:
            self.wake.set()

    def heard_beat(self, beat: int) -> None:
        if beat != self._beat:
            self._beat, self._heard_at = beat, time.monotonic()

    def silent(self) -> float:
        """Seconds since the peer's last heartbeat."""
        return time.monotonic() - self._heard_at


def _say_goodbye(shared: _Shared, thread: threading.Thread, patience: float) -> None:
    shared.said[CLOSED] = 1
    shared.stop.set()
    shared.wake.set()
    thread.join(patience)


def _run(address: tuple[str, int], shared: _Shared) -> None:
    try:
        store = TCPStore(
            *address,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(shared.timeout, 1.0)),
        )
        _serve(store, shared)
    except Exception:  # whatever it is, the other side cannot be reached any more
        shared.broken = True
    finally:
        shared.news.set()


def _serve(store: TCPStore, shared: _Shared) -> None:
    beat, next_beat, said, pause = 0, 0.0, dict[str, int](), POLL_SECONDS
    while True:
        stopping = shared.stop.is_set()  # read first: what is posted before it is still sent
        busy = _send(store, shared)
        for name, value in list(shared.said.items()):
            last = name == CLOSED and (busy or not stopping)  # goodbye comes after what was posted
            if said.get(name) != value and not last:
                store.set(f"{shared.me}/{name}", str(value))
                said[name] = value
        if stopping and not busy:
            return
        now = time.monotonic()
        if now >= next_beat:
            store.set(f"{shared.me}/beat", str(beat))
            beat, next_beat = beat + 1, now + shared.timeout / BEATS_A_TIMEOUT
            if store.check([f"{shared.peer}/beat"]):
                shared.heard_beat(int(store.get(f"{shared.peer}/beat")))
        numbers = {
            name: int(store.get(f"{shared.peer}/{name}"))
            for name in list(shared.listening)
            if store.check([f"{shared.peer}/{name}"])
        }
        with shared.lock:
            expected = list(shared.expected)
        for name in expected:
            if store.check([name]):
                message = _fetch(store, name)
                with shared.lock:
                    if name in shared.expected:  # not forgotten meanwhile
                        shared.expected.discard(name)
                        shared.received[name] = message
                shared.news.set()
                busy = True
        shared.numbers.update(numbers)  # last: who hears goodbye has got what came before it
        # The thread that trains has better things to do than to yield to this one.
        pause = POLL_SECONDS if busy or shared.hurried else min(2 * pause, IDLE_SECONDS)
        if not busy:
            shared.wake.wait(pause)
            shared.wake.clear()


def _send(store: TCPStore, shared: _Shared) -> bool:
    try:
        name, tensors, note = shared.outgoing.get_nowait()
    except queue.Empty:
        return False
    described = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
    for i, tensor in enumerate(tensors):
        for k, start in enumerate(range(0, tensor.nbytes, PART_BYTES)):
            size = min(PART_BYTES, tensor.nbytes - start)
            part = ctypes.string_at(tensor.data_ptr() + start, size)
            store.set(f"{name}/{i}/{k}", part)  # type: ignore[arg-type]
    # The heading goes last: who sees it finds the rest.
    store.set(name, json.dumps({"tensors": described, "note": note}))
    return True


def _fetch(store: TCPStore, name: str) -> Message:
    heading = json.loads(store.get(name))
    tensors = []
    for i, (dtype, shape) in enumerate(heading["tensors"]):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        for k, start in enumerate(range(0, tensor.nbytes, PART_BYTES)):
            part = store.get(f"{name}/{i}/{k}")
            ctypes.memmove(tensor.data_ptr() + start, part, len(part))
            store.delete_key(f"{name}/{i}/{k}")
        tensors.append(tensor)
    store.delete_key(name)
    return tensors, heading["note"]
