"""Messages between ranks with different jobs, which nobody waits for and no death can block.

A collective needs all its ranks: one that is killed or stopped takes the others along. Messages to
and from helpers travel through a ``TCPStore`` that a helper hosts, on a thread of their own. If the
host dies, its store dies too; if either side is stopped, its heartbeats stop.

    <side>/<name>    a number, in place of the last one; "beat" and "closed" are among them
    <message>/<k>    part k of a message, which is tensors and a note of primitives
    <message>        the number of its parts, set last
"""

from __future__ import annotations

import atexit
import io
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from second_order.distributed.groups import explained
from second_order.distributed.world import World
from second_order.errors import SecondOrderError

__all__ = ["Address", "Mailbox", "Message", "Patience", "await_goodbyes", "connected", "open_store"]

Address: TypeAlias = tuple[str, int]
Message: TypeAlias = tuple[list[Tensor], dict[str, Any]]

POLL_SECONDS, IDLE_SECONDS = 0.002, 0.05  # between looks: while a call waits, otherwise
BEATS_A_TIMEOUT = 8
CLOSED = "closed"
GOODBYE_SECONDS = 5.0  # at most, until a goodbye is given up
PART_BYTES = 4 * 2**20  # of a message: heartbeats go between parts, and the store takes 8 MiB


def open_store(world: World, host: int) -> tuple[TCPStore | None, Address]:
    """Open a store on one rank; returns it (None on other ranks), and its address; a collective.

    The host has it as long as it keeps the object. It listens on loopback where all processes are
    on one machine.

    Raises:
        SecondOrderError: On every rank, if the host cannot open the store.
    """
    machines = world.all_gather_object(socket.gethostname())
    store, place, error = None, "127.0.0.1", ""
    if world.rank == host:
        try:
            if len(set(machines)) > 1:
                place = _own_address()
            family = socket.AF_INET6 if ":" in place else socket.AF_INET
            with socket.create_server((place, 0), family=family) as listener:
                port = listener.getsockname()[1]
                store = TCPStore(
                    place,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=os.dup(listener.fileno()),
                )
        except (OSError, RuntimeError) as caught:  # all hear of it next
            error = f"{type(caught).__name__}: {caught}"
    found = (place, 0 if store is None else store.port), error
    address, error = world.all_gather_object(found)[host]
    if error:
        raise SecondOrderError(f"rank {host} cannot open a store for messages: {error}")
    return store, address


def connected(world: World, mailboxes: Sequence[Callable[[], Mailbox]]) -> list[Mailbox]:
    """Make the mailboxes of this rank; a collective.

    Raises:
        SecondOrderError: On every rank, if one cannot reach a store.
    """
    made, error = list[Mailbox](), ""
    try:
        made.extend(make() for make in mailboxes)
    except (OSError, RuntimeError) as caught:  # all hear of it next
        error = f"rank {world.rank} cannot reach a store for messages: {caught}"
    errors = [each for each in world.all_gather_object(error) if each]
    if errors:
        for mailbox in made:
            mailbox.leave()
        raise SecondOrderError("; ".join(errors))
    return made


def _own_address() -> str:
    """This machine's address on the network that ``MASTER_ADDR`` is on."""
    name = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, place = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # which sends nothing
        own = str(probe.getsockname()[0])
    if own.startswith("127.") or own == "::1":
        raise OSError(
            f"{name!r} leads to loopback here, which other machines cannot reach; set MASTER_ADDR "
            f"to an address on the network of the process group"
        )
    return own


def await_goodbyes(store: TCPStore, names: Sequence[str], patience: float) -> None:
    """Wait until all mailboxes of these names have closed, or for ``patience`` seconds."""
    end = time.monotonic() + min(patience, GOODBYE_SECONDS)
    while not store.check([f"{name}/{CLOSED}" for name in names]) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)


class Patience:
    """Measures how long a process has waited, by its own looks at the clock.

    Time between two looks counts up to a quarter of the limit: a process that was stopped, and goes
    on together with the others, has not waited meanwhile.
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
    """Sends and receives lists of tensors on a thread of its own; names are used once.

    The thread ends with :meth:`close`, with the ``owner``, with the interpreter, or with the store:
    then ``failure`` says why. The peer is lost after ``timeout`` seconds without its heartbeat.

    Raises:
        SecondOrderError: If there is no store.
    """

    def __init__(
        self, address: Address, me: str, peer: str, timeout: float, owner: object = None
    ) -> None:
        self._me, self._peer, self._timeout = me, peer, timeout
        with explained():
            limit = timedelta(seconds=max(timeout, 1.0))
            self._store = TCPStore(*address, wait_for_workers=False, timeout=limit)
        self.failure = ""
        self._outgoing = queue.SimpleQueue[tuple[str, list[Tensor], dict[str, Any]]]()
        self._said = dict[str, int]()  # what the store does not know yet
        self._numbers: dict[str, int | None] = {CLOSED: None}  # to listen for, and as last heard
        self._expected = dict[str, bool]()  # False: to be dropped when it comes
        self._received = dict[str, Message]()
        self._lock, self._news = threading.Lock(), threading.Event()
        # No lock: goodbye may be said by the collector, in the middle of the thread's own wait.
        self._wake = queue.SimpleQueue[None]()
        self._hurried, self._left = False, 0.0  # when goodbye was said
        self._passes, self._pause = 0, POLL_SECONDS
        self._beats, self._next_beat, self._heard_beat = 0, 0.0, 0
        self._silence = Patience(timeout)
        self._thread = threading.Thread(target=self._run, name="second_order mailbox", daemon=True)
        self._thread.start()
        _open.add(self)
        if owner is not None:
            weakref.finalize(owner, self.leave).atexit = False

    def post(self, name: str, tensors: Sequence[Tensor], **note: Any) -> None:
        """Send tensors, which must not change any more, and a note of primitives.

        Tensors on a CUDA device are copied to the host here.
        """
        if self._thread.is_alive():
            copies = [t.detach().cpu() for t in tensors]
            self._outgoing.put((name, copies, note))
            self._wake.put(None)

    def tell(self, name: str, number: int) -> None:
        """Publish a number under a name, in place of the last one; sent by the thread."""
        self._said[name] = number

    def heard(self, name: str) -> int | None:
        """The peer's last number of this name; None until it has been listened for and heard."""
        return self._numbers.setdefault(name, None)

    def expect(self, name: str) -> None:
        """Let the thread fetch a message as soon as it is there."""
        with self._lock:
            if name not in self._received:
                self._expected[name] = True

    def forget(self, name: str, *, coming: bool = False) -> None:
        """Expect a message no more; drop it if it is there, or, if that is sure, when it comes."""
        with self._lock:
            self._expected.pop(name, None)
            if self._received.pop(name, None) is None and coming:
                self._expected[name] = False

    def arrived(self, name: str) -> Message | None:
        """Take an expected message with its note; None if it is not there yet."""
        with self._lock:
            return self._received.pop(name, None)

    def holds(self, name: str) -> bool:
        """Whether an expected message is there."""
        return name in self._received

    def wait(self, name: str, until: Callable[[], bool] = lambda: False) -> Message | None:
        """Wait for an expected message; None if the peer is lost or ``until`` says so."""
        self._hurried = True
        self._wake.put(None)
        try:
            last = 0  # the pass after which nothing comes any more: one from beginning to end
            while not (self.holds(name) or until() or self.lost):
                last = last or (self.closed_there and self._passes + 2)
                if not self._thread.is_alive() or (last and self._passes >= last):
                    break
                self._news.wait(POLL_SECONDS)
                self._news.clear()
            return self.arrived(name)
        finally:
            self._hurried = False

    @property
    def lost(self) -> bool:
        """Whether the store has failed, or the peer's heart has stopped."""
        return bool(self.failure) or self._silence.ended()

    @property
    def closed_there(self) -> bool:
        """Whether the peer has said goodbye."""
        return self._numbers[CLOSED] is not None

    def leave(self) -> None:
        """Say goodbye without waiting; :meth:`close` is still to be called."""
        self._left = self._left or time.monotonic()
        self._wake.put(None)

    def close(self, patience: float = GOODBYE_SECONDS) -> None:
        """Say goodbye, and end the thread, once all posted messages have been sent.

        That is waited for ``patience`` seconds, 5 at most, since :meth:`leave` if it has been
        called; a thread that hangs in a connection is left. What has not been taken is dropped.
        """
        self.leave()
        end = self._left + min(patience, GOODBYE_SECONDS)
        self._thread.join(max(end - time.monotonic(), 0.0))
        with self._lock:
            self._expected.clear()
            self._received.clear()

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while self._pass():
                with suppress(queue.Empty):
                    self._wake.get(timeout=self._pause)
                while not self._wake.empty():  # only this thread takes from it
                    self._wake.get()
        except Exception as error:  # whatever it is, the other side cannot be reached any more
            self.failure = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        finally:
            while not self._outgoing.empty():
                self._outgoing.get()
            self._news.set()
            _open.discard(self)

    def _pass(self) -> bool:
        """Send and fetch all messages there are; False once goodbye has been said."""
        leaving, busy = self._left, False  # read first: what is posted before it is still sent
        while not self._outgoing.empty():
            self._send(*self._outgoing.get())
            busy = True
        while self._said:
            name, number = self._said.popitem()
            self._store.set(f"{self._me}/{name}", str(number))
        if leaving:
            self._store.set(f"{self._me}/{CLOSED}", "1")
            return False
        self._beat()
        numbers = {name: self._number(name) for name in list(self._numbers)}
        with self._lock:
            expected = list(self._expected)
        for name in expected:
            if not self._store.check([name]):
                continue
            message = self._fetch(name)
            with self._lock:
                if self._expected.pop(name, False):  # not forgotten meanwhile
                    self._received[name] = message
            self._news.set()
            busy = True
        # Last: who hears goodbye has got what came before it.
        self._numbers.update(numbers)
        self._passes += 1
        # The thread that trains has better things to do than to yield to this one.
        short = busy or self._hurried
        self._pause = POLL_SECONDS if short else min(2 * self._pause, IDLE_SECONDS)
        return True

    def _number(self, name: str) -> int | None:
        key = f"{self._peer}/{name}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def _send(self, name: str, tensors: Sequence[Tensor], note: dict[str, Any]) -> None:
        file = io.BytesIO()
        torch.save(([t.clone() for t in tensors], note), file)  # without what they are views of
        content = file.getbuffer()
        starts = range(0, len(content), PART_BYTES)
        for k, start in enumerate(starts):
            self._store.set(f"{name}/{k}", bytes(content[start : start + PART_BYTES]))  # type: ignore[arg-type]
            self._beat()
        self._store.set(name, str(len(starts)))  # last: who sees it finds the rest

    def _fetch(self, name: str) -> Message:
        file = io.BytesIO()
        for k in range(int(self._store.get(name))):
            file.write(self._store.get(f"{name}/{k}"))
            self._store.delete_key(f"{name}/{k}")
            self._beat()
        self._store.delete_key(name)
        file.seek(0)
        message: Message = torch.load(file, weights_only=True)
        return message

    def _beat(self) -> None:
        """Send a heartbeat, and look for the peer's, if it is time to."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._beats, self._next_beat = self._beats + 1, now + self._timeout / BEATS_A_TIMEOUT
        self._store.set(f"{self._me}/beat", str(self._beats))
        beat = self._number("beat")
        if beat is not None and beat != self._heard_beat:
            self._heard_beat = beat
            self._silence.begin()
        self._silence.ended()  # a look, of which there may be no others


_open: set[Mailbox] = set()


@atexit.register
def _say_goodbyes() -> None:
    """Let no thread be cut off in the middle of a message; all are told before any is awaited."""
    boxes = list(_open)
    for box in boxes:
        box.leave()
    for box in boxes:
        box.close()
