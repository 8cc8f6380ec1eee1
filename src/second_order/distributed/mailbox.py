"""Messages between ranks with different jobs, which nobody waits for and no death can block.

A collective needs all its ranks: one that is killed or stopped takes the others along. Messages to
and from helpers travel through a :mod:`store <second_order.distributed.store>` that the first
helper hosts, on a thread of their own. If the helper dies, its store dies too, which that thread
notices.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from second_order.distributed.messages import (
    MalformedError,
    Message,
    as_refused,
    describe,
    parts_of,
    read_heading,
    tensor_of,
)
from second_order.distributed.store import Address, Store, StoreClient
from second_order.distributed.world import World
from second_order.farewell import Farewell
from second_order.stages import sent

__all__ = ["Mailbox", "Patience", "await_connections", "await_goodbyes"]

POLL_SECONDS, IDLE_SECONDS = 0.005, 0.05  # between looks: while a call waits, otherwise
HELD_SECONDS = 0.02  # for which the store may hold an answer back
BEATS_A_TIMEOUT = 8
CLOSED = "closed"
FAREWELL_SECONDS = 5.0  # without an answer of the store, until a goodbye is given up
LAST_WORDS_SECONDS = 15.0  # for which unsent messages may delay the interpreter's end
LAST_LOOK_SECONDS = 0.5  # at most, to fetch messages that a lost peer has left


def await_goodbyes(store: Store, names: Sequence[str], patience: float) -> None:
    """Close a store when all mailboxes have closed, or after ``patience`` seconds.

    Args:
        store: The store on this process.
        names: Names of the mailboxes.
        patience: Seconds to wait for the mailboxes' goodbyes.
    """
    end = time.monotonic() + patience
    while not store.said([f"{name}/{CLOSED}" for name in names]) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    store.close()


def await_connections(
    world: World, mailboxes: Sequence[Mailbox], stores: Sequence[Store | None]
) -> None:
    """Wait until every rank's mailboxes have reached their stores, or failed to; a collective.

    From then on the stores take no other connection.

    A connection that breaks is noticed at once; a store that is gone before the connection was made
    is looked for until the timeout.

    Args:
        world: The ranks, all that share a store among them.
        mailboxes: The mailboxes of this rank.
        stores: The stores that this rank hosts; None where another rank does.
    """
    for mailbox in mailboxes:
        mailbox.await_connection()
    world.all_gather_object(None)
    for store in stores:
        if store is not None:
            store.seal()
    world.all_gather_object(None)  # no rank goes on while a store still listens


class Patience:
    """Measures how long a process has waited, by its own looks at the clock.

    Time between two looks counts up to a quarter of the limit: a process that was stopped, and goes
    on together with the others, has not waited meanwhile.

    Args:
        seconds: The limit.
    """

    def __init__(self, seconds: float) -> None:
        self._limit, self._lock = seconds, threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Start the wait anew."""
        with self._lock:
            self._waited, self._looked = 0.0, time.monotonic()

    def ended(self) -> bool:
        """Whether the limit has been passed, at this look."""
        with self._lock:
            now = time.monotonic()
            self._waited += min(now - self._looked, self._limit / 4)
            self._looked = now
            return self._waited > self._limit


class Mailbox:
    """Sends and receives lists of tensors on a thread of its own.

    Names of messages are used once. The thread ends with :meth:`close`, with the object, or with
    the store, which is then :attr:`lost`.

    Args:
        address: The store's address.
        me: Name of this side, in heartbeats.
        peer: Name of the side whose heartbeats to listen for.
        timeout: Seconds without a heartbeat after which the peer is lost; see :class:`Patience`.

    Attributes:
        refused: Number of messages that have been refused.
        complaint: The first refused message's name, and why it was refused; or "".
    """

    def __init__(self, address: Address, me: str, peer: str, timeout: float) -> None:
        self.refused, self.complaint = 0, ""
        self._shared = _Shared(me, peer, timeout)
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_run, args=(address, self._shared), name="second_order mailbox", daemon=True
        )
        self._thread.start()
        self._farewell = Farewell(
            partial(_say_goodbye, self._shared),
            [self._thread],
            FAREWELL_SECONDS,
            sign=partial(getattr, self._shared, "moved"),
            most=min(timeout, LAST_WORDS_SECONDS),
        )
        weakref.finalize(self, self._farewell.begin).atexit = False

    def await_connection(self) -> None:
        """Wait until the store has been reached, or could not be within the timeout."""
        self._shared.connected.wait()

    def post(self, name: str, tensors: Sequence[Tensor], **note: Any) -> None:
        """Send tensors, which must not change any more, and a note of primitives.

        Tensors on a CUDA device are copied to the host here.
        """
        if self._thread.is_alive():
            copies = [t.detach().cpu().contiguous() for t in tensors]
            sent(sum(copy.nbytes for copy in copies))
            self._shared.outgoing.put((name, copies, note))
            self._shared.wake.put(None)

    def tell(self, name: str, value: int) -> None:
        """Publish a number under a name, in place of the last one; sent by the thread."""
        self._shared.said[name] = value

    def heard(self, name: str) -> int | None:
        """The peer's last number of this name; None until it has been listened for and heard."""
        self._shared.listening.add(name)
        return self._shared.numbers.get(name)

    def expect(self, name: str) -> None:
        """Let the thread fetch a message as soon as it is there."""
        with self._shared.lock:
            if name not in self._shared.received:
                self._shared.expected.add(name)

    def forget(self, name: str) -> None:
        """Expect a message no more, and drop it if it is there."""
        with self._shared.lock:
            self._shared.expected.discard(name)
            self._shared.received.pop(name, None)

    def refuse(self, name: str, why: MalformedError) -> None:
        """Count a malformed message, of which nothing has been used."""
        with self._shared.lock:
            self.refused += 1
            self.complaint = self.complaint or f"{name} of {self._shared.peer}: {why}"

    def decline(self, name: str) -> None:
        """Drop an expected message that is sure to come, so that it is not left in the store."""
        with self._shared.lock:
            self._shared.expected.discard(name)
            if self._shared.received.pop(name, None) is None:
                self._shared.declined.add(name)

    def arrived(self, name: str) -> Message | None:
        """An expected message with its note; None if it is not there yet.

        What it says has to be checked, with :func:`~second_order.distributed.messages.require_form`
        first: there it shows if the message could not be read.
        """
        with self._shared.lock:
            return self._shared.received.pop(name, None)

    def holds(self, name: str) -> bool:
        """Whether an expected message is there."""
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
                if until():
                    return self.arrived(name)
                if self._ended():
                    self._look_again()
                    if self._ended():  # not if it has been heard of after all
                        return self.arrived(name)
                self._shared.news.wait(POLL_SECONDS)
                self._shared.news.clear()
        finally:
            self._shared.hurry(False)

    def wait_all(self, names: Sequence[str]) -> list[Message] | None:
        """Wait for messages, not expected before; None if the peer is lost before all are there."""
        for name in names:
            self.expect(name)
        found = []
        for name in names:
            message = self.wait(name)
            if message is None:
                return None
            found.append(message)
        return found

    def _ended(self) -> bool:
        return self.lost or self.closed_there or not self._thread.is_alive()

    def _look_again(self) -> None:
        """Wait until the thread has looked at the store once more, from beginning to end.

        The thread may know of a goodbye, and not have looked for a newly expected message.
        """
        shared, begun = self._shared, self._shared.begun
        end = time.monotonic() + LAST_LOOK_SECONDS
        while shared.ended <= begun and self._thread.is_alive():
            if self.lost and time.monotonic() > end:
                return
            shared.news.wait(POLL_SECONDS)
            shared.news.clear()

    @property
    def failure(self) -> str:
        """The error that ended the thread, in words, or ""."""
        return self._shared.failure

    @property
    def lost(self) -> bool:
        """Whether the store has failed, or the peer's heart has stopped."""
        shared = self._shared
        dead = not self._thread.is_alive() and not shared.stopping
        return dead or bool(shared.failure) or shared.silence.ended()

    @property
    def closed_there(self) -> bool:
        """Whether the peer has said goodbye."""
        return self._shared.numbers.get(CLOSED) is not None

    def leave(self) -> None:
        """Say goodbye without waiting; :meth:`close` is still to be called."""
        if self._pid == os.getpid():  # in a child of fork there is no such thread
            self._farewell.begin()

    def close(self, patience: float) -> None:
        """Say goodbye, and end the thread, once all posted messages have been sent.

        Fetched messages that have not been taken are dropped.

        Args:
            patience: Seconds to wait for that, since :meth:`leave` if it has been called. A thread
                that hangs in a dead connection, or for 5 s in one that does not answer, is left.
        """
        if self._pid != os.getpid():  # in a child of fork there is no such thread
            return
        self._farewell.finish(patience)
        with self._shared.lock:
            self._shared.expected.clear()
            self._shared.received.clear()


class _Shared:
    """The data that the thread and its mailbox share."""

    def __init__(self, me: str, peer: str, timeout: float) -> None:
        self.me, self.peer, self.timeout = me, peer, timeout
        self.outgoing: queue.SimpleQueue[tuple[str, list[Tensor], dict[str, Any]]] = (
            queue.SimpleQueue()
        )
        self.said: dict[str, int] = {}
        self.listening: set[str] = {CLOSED}
        self.numbers: dict[str, int] = {}
        self.expected: set[str] = set()
        self.declined: set[str] = set()
        self.received: dict[str, Message] = {}
        self.lock = threading.Lock()
        self.news = threading.Event()
        self.connected = threading.Event()  # or cannot be connected
        # No locks: goodbye may be said by the collector, in the middle of the thread's own wait.
        self.stopping, self.wake = False, queue.SimpleQueue[None]()
        self.hurried = False  # a call waits
        self.failure = ""
        self.begun = self.ended = 0  # number of passes of the thread
        self.moved = 0.0  # time of the store's last answer
        self._beat, self.silence = -1, Patience(timeout)  # since the peer's last heartbeat

    def hurry(self, hurried: bool) -> None:
        self.hurried = hurried
        if hurried:
            self.wake.put(None)

    def heard_beat(self, beat: int) -> None:
        if beat != self._beat:
            self._beat = beat
            self.silence.begin()


def _say_goodbye(shared: _Shared) -> None:
    shared.said[CLOSED] = 1
    shared.stopping = True
    shared.wake.put(None)


def _run(address: Address, shared: _Shared) -> None:
    try:
        line = _Line(address, shared)
        shared.connected.set()
        while _pass(line, shared):
            pass
    except Exception as error:  # whatever it is, the other side cannot be reached any more
        shared.failure = f"{type(error).__name__}: {error}"
    finally:
        while not shared.outgoing.empty():
            shared.outgoing.get()
        shared.connected.set()
        shared.news.set()


class _Line:
    """The connection to the store, with heartbeats between the parts of a large message."""

    def __init__(self, address: Address, shared: _Shared) -> None:
        self._shared = shared
        self._store = StoreClient(address, max(shared.timeout, 1.0))
        self.said: dict[str, int] = {}
        self.pause, self.idle = POLL_SECONDS, True  # how long, and whether the last pass was idle
        self._beat, self._next = 0, 0.0
        self.beat()

    def say(self, name: str, value: int) -> None:
        self._store.say(f"{self._shared.me}/{name}", value)
        self.said[name] = value

    def send(self, name: str, tensors: Sequence[Tensor], note: dict[str, Any]) -> None:
        heading = describe(tensors, note)
        for tensor in tensors:
            for part in parts_of(tensor):
                self._store.add(name, part)
                self.beat()
        self._store.post(name, heading)  # last: who sees it finds the rest

    def look(
        self, numbers: Sequence[str], messages: Sequence[str], seconds: float
    ) -> tuple[dict[str, int], list[str]]:
        """The peer's numbers, and the names of the messages that are there; waits for news."""
        full = {f"{self._shared.peer}/{name}": name for name in numbers}
        known = {name: self._shared.numbers.get(number) for name, number in full.items()}
        said, there = self._store.look(known, messages, seconds)
        return {full[name]: value for name, value in said.items()}, there

    def fetch(self, name: str) -> Message:
        """Fetch a message that is there, and check it before any of it is used."""
        raw, parts = self._store.heading(name)
        tensors = []
        try:
            heading = read_heading(raw, parts)
            which = 0
            for (dtype, shape), sizes in zip(heading.forms, heading.sizes, strict=True):
                content = bytearray()  # as much as comes, whatever the heading says
                for size in sizes:
                    part = self._store.part(name, which)
                    if len(part) != size:
                        raise MalformedError(
                            f"part {which} of {parts} has {len(part)} bytes, not {size}"
                        )
                    content += part
                    which += 1
                    self.beat()
                tensors.append(tensor_of(content, dtype, shape))
            return tensors, heading.note
        except MalformedError as why:
            return as_refused(str(why))
        finally:
            self._store.drop(name)

    def drop(self, name: str) -> None:
        self._store.drop(name)

    def beat(self) -> None:
        """Send a heartbeat, and look for the peer's, if it is time to."""
        now, shared = time.monotonic(), self._shared
        shared.moved = now
        if now < self._next:
            return
        self._beat, self._next = self._beat + 1, now + shared.timeout / BEATS_A_TIMEOUT
        self._store.say(f"{shared.me}/beat", self._beat)
        theirs = f"{shared.peer}/beat"
        said, _ = self._store.look({theirs: None}, ())
        if theirs in said:
            shared.heard_beat(said[theirs])
        shared.silence.ended()  # a look, of which there may be no others


def _pass(line: _Line, shared: _Shared) -> bool:
    """Send and fetch all messages there are; False once goodbye has been said."""
    shared.begun += 1
    stopping = shared.stopping  # read first: what is posted before it is still sent
    busy = _send(line, shared)
    for name, value in list(shared.said.items()):
        early = name == CLOSED and (busy or not stopping)  # goodbye comes after what was posted
        if line.said.get(name) != value and not early:
            line.say(name, value)
    if stopping and not busy:
        return False
    line.beat()
    with shared.lock:
        expected, declined = list(shared.expected), list(shared.declined)
    # While somebody waits, the store answers when there is news; not just after there was some, as
    # who has waited for it is about to post; and the heart has to go on beating.
    held = shared.hurried and line.idle and not busy
    most = min(HELD_SECONDS, shared.timeout / BEATS_A_TIMEOUT) if held else 0.0
    numbers, there = line.look(list(shared.listening), [*expected, *declined], most)
    for name in there:
        message = line.fetch(name) if name in expected else None
        if message is None:
            line.drop(name)
        with shared.lock:
            shared.declined.discard(name)
            if message is not None and name in shared.expected:  # not forgotten meanwhile
                shared.expected.discard(name)
                shared.received[name] = message
        shared.news.set()
        busy = True
    shared.numbers.update(numbers)  # last: who hears goodbye has got what came before it
    shared.ended = shared.begun
    # The thread that trains has better things to do than to yield to this one.
    line.pause = POLL_SECONDS if busy or shared.hurried else min(2 * line.pause, IDLE_SECONDS)
    line.idle = not busy
    if not busy and not held:
        with suppress(queue.Empty):
            shared.wake.get(timeout=line.pause)
    while not shared.wake.empty():  # only this thread takes from it
        shared.wake.get()
    return True


def _send(line: _Line, shared: _Shared) -> bool:
    try:
        name, tensors, note = shared.outgoing.get_nowait()
    except queue.Empty:
        return False
    line.send(name, tensors, note)
    return True
