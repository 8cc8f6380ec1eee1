"""Messages between workers and helpers that no rank waits for, and that no crash can block.

A collective needs all its ranks: if one crashes or hangs, so do the others. Messages to and from
helpers therefore travel through ``TCPStore``s. Each helper hosts one, so that no helper's crash
affects another helper. Each end has a thread that sends and receives.

    worker 0  ->  every helper    snapshots of the model, and requests
    helper    ->  every worker    results

Messages from one rank to another arrive in the order in which they were sent. If the host crashes,
its store is gone; if either end hangs, its heartbeats stop.

    FROM>TO/k/i    part i of message k, which has tensors and a note of primitives
    FROM>TO/k      the number of its parts, set last
    FROM/beat      a counter
    FROM/closed    set when a rank shuts down
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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from second_order.distributed.roles import Roles
from second_order.distributed.world import (
    World,
    count_elements,
    translate_backend_errors,
    unflatten_into,
)
from second_order.errors import SecondOrderError

__all__ = [
    "HelperLink",
    "Message",
    "WaitTimer",
    "close_links",
    "connect_helpers",
    "load_model",
    "pack_by_dtype",
]

T = TypeVar("T")
Address: TypeAlias = tuple[str, int]

POLL_SECONDS = 0.005  # between two looks: the thread that trains needs the interpreter
BEATS_PER_TIMEOUT = 8
CLOSE_SECONDS = 5.0  # at most, until a shutdown stops waiting for the other end
PART_BYTES = 4 * 2**20  # heartbeats go between the parts of a message; the store takes 8 MiB


class Message(NamedTuple):
    """Tensors and a note of primitives."""

    tensors: list[Tensor]
    note: dict[str, Any]


class WaitTimer:
    """Measures how long a process has waited, by its own looks at the clock.

    Time between two looks counts up to a quarter of the limit. If a process was stopped together
    with the others, that time does not count.
    """

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Start the wait again."""
        with self._lock:
            self._waited = 0.0
            self._looked = time.monotonic()

    def is_expired(self) -> bool:
        """Whether the limit has been passed, at this look."""
        with self._lock:
            now = time.monotonic()
            self._waited += min(now - self._looked, self._limit / 4)
            self._looked = now
            return self._waited > self._limit


class HelperLink:
    """This rank's end of the messages with one peer.

    A helper's peer is worker 0, and the helper may send to the other workers as well. The thread
    ends with :meth:`close`, with the ``owner``, with the interpreter, or with the store: then
    ``failure`` says why. The peer is lost after ``timeout`` seconds without its heartbeat.

    Raises:
        SecondOrderError: If there is no store at the address.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        peer: int,
        timeout: float,
        owner: object = None,
        store: TCPStore | None = None,
        workers: Sequence[int] = (),
    ) -> None:
        self.peer = peer
        self.failure = ""
        self.peer_closed = False  # whether the peer has shut down; all its messages have arrived
        self._rank = rank
        self._timeout = timeout
        self._hosted = store  # the host's store lives as long as this reference
        self._workers = workers
        with translate_backend_errors():
            limit = timedelta(seconds=max(timeout, 1.0))
            self._store = TCPStore(*address, wait_for_workers=False, timeout=limit)
        # No lock: leave() may be called by the garbage collector, in the middle of the thread.
        self._outgoing = queue.SimpleQueue[tuple[int, Message] | None]()  # None to shut down
        self._sent = Counter[int]()  # number of messages, by rank
        self._incoming = deque[Message]()
        self._fetched = 0
        self._arrival = threading.Event()
        self._beats = 0
        self._next_beat = 0.0
        self._peer_beat = ""
        self._silence = WaitTimer(timeout)
        self._thread = threading.Thread(target=self._run, name="second_order link", daemon=True)
        self._thread.start()
        _open.add(self)
        self._owner = (
            None if owner is None else weakref.ref(owner, lambda _: self.request_shutdown())
        )

    def send(self, tensors: Sequence[Tensor], to: int | None = None, **note: Any) -> None:
        """Send tensors, which must not change any more, and a note of primitives.

        Tensors on a CUDA device are copied to the host here. The receiver is the peer unless ``to``
        is given.
        """
        if self._thread.is_alive():
            copies = [tensor.detach().cpu() for tensor in tensors]
            self._outgoing.put((self.peer if to is None else to, Message(copies, note)))

    def receive(self) -> Message | None:
        """Take the peer's next message, or return None if it is not here yet."""
        return self._incoming.popleft() if self._incoming else None

    def wait(self, until: Callable[[], bool] = lambda: False) -> Message | None:
        """Wait for the peer's next message; None if it is lost or closed, or ``until`` is true."""
        while not self._incoming:
            if self.peer_closed or self.lost or until() or not self._thread.is_alive():
                break
            self._arrival.wait(POLL_SECONDS)
            self._arrival.clear()
        return self.receive()

    @property
    def lost(self) -> bool:
        """Whether the store has failed, or the peer's heartbeats have stopped."""
        return bool(self.failure) or self._silence.is_expired()

    @property
    def reason(self) -> str:
        """Why the store has failed, in parentheses, for messages."""
        return f" ({self.failure})" if self.failure else ""

    def request_shutdown(self) -> None:
        """Shut down without waiting; :meth:`close` is still to be called."""
        self._outgoing.put(None)

    def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Shut down once all messages have been sent, and end the thread.

        This waits for at most ``patience`` seconds, 5 at most. A thread that hangs in a connection
        is left. A host keeps its store until the workers have shut down: if it leaves before them,
        they still read what it sent. Messages that were not received are dropped.
        """
        end = time.monotonic() + min(max(patience, 0.0), CLOSE_SECONDS)
        self.request_shutdown()
        self._thread.join(max(end - time.monotonic(), 0.0))
        self._incoming.clear()
        if self._hosted is not None and not self.lost:
            names = [f"{worker}/closed" for worker in self._workers]
            while not self._hosted.check(names) and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
            self._hosted = None

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while self._send_all():
                self._beat()
                self._fetch_all()
            self._store.set(f"{self._rank}/closed", "1")
        except Exception as error:  # whatever it is, the other end cannot be reached any more
            self.failure = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        finally:
            while not self._outgoing.empty():
                self._outgoing.get()
            self._arrival.set()
            _open.discard(self)

    def _send_all(self) -> bool:
        """Send what is queued, after a pause if that is nothing; False once the end is reached."""
        with suppress(queue.Empty):
            item = self._outgoing.get(timeout=POLL_SECONDS)
            while item is not None:
                self._send(*item)
                item = self._outgoing.get_nowait()
            return False
        return True

    def _fetch_all(self) -> None:
        """Fetch what has arrived."""
        closed = self._store.check([f"{self.peer}/closed"])
        while self._store.check([f"{self.peer}>{self._rank}/{self._fetched}"]):
            self._incoming.append(self._fetch())
            self._arrival.set()
        self.peer_closed = closed  # last: by now, all messages before the shutdown are here

    def _send(self, to: int, message: Message) -> None:
        name = f"{self._rank}>{to}/{self._sent[to]}"
        self._sent[to] += 1
        file = io.BytesIO()
        # Clones, because a view would be saved with all of its storage.
        torch.save(([tensor.clone() for tensor in message.tensors], message.note), file)
        content = file.getbuffer()
        starts = range(0, len(content), PART_BYTES)
        for i, start in enumerate(starts):
            self._store.set(f"{name}/{i}", bytes(content[start : start + PART_BYTES]))  # type: ignore[arg-type]
            self._beat()
        self._store.set(name, str(len(starts)))  # last: a rank that sees it finds all parts

    def _fetch(self) -> Message:
        name = f"{self.peer}>{self._rank}/{self._fetched}"
        self._fetched += 1
        file = io.BytesIO()
        for i in range(int(self._store.get(name))):
            file.write(self._store.get(f"{name}/{i}"))
            self._store.delete_key(f"{name}/{i}")
            self._beat()
        self._store.delete_key(name)
        file.seek(0)
        return Message(*torch.load(file, weights_only=True))

    def _beat(self) -> None:
        """Send a heartbeat, and look for the peer's, if it is time to."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._beats += 1
        self._next_beat = now + self._timeout / BEATS_PER_TIMEOUT
        self._store.set(f"{self._rank}/beat", str(self._beats))
        if self._store.check([f"{self.peer}/beat"]):
            beat = self._store.get(f"{self.peer}/beat").decode()
            if beat != self._peer_beat:
                self._peer_beat = beat
                self._silence.begin()
        self._silence.is_expired()  # a look at the clock; there may be no other


_open: set[HelperLink] = set()


def close_links(links: Iterable[HelperLink], patience: float = CLOSE_SECONDS) -> None:
    """Shut down links. All leave before this waits for any."""
    links = list(links)
    end = time.monotonic() + patience
    for link in links:
        link.request_shutdown()
    for link in links:
        link.close(end - time.monotonic())


@atexit.register
def _close_all() -> None:
    """Cut off no thread in the middle of a message."""
    close_links(_open)


# ----------------------------------------------------------------------------------- construction


def connect_helpers(
    world: World, roles: Roles, timeout: float, owner: object = None
) -> list[HelperLink]:
    """Link every worker with every helper; a collective of all ranks.

    Returns:
        On a worker a link to each helper, on a helper one link to worker 0.

    Raises:
        SecondOrderError: On every rank, if a store cannot be opened or reached.
    """
    rank = world.rank
    machines = world.all_gather_object(socket.gethostname())

    # Each helper opens a store, on loopback if all ranks are on one machine.
    store: TCPStore | None = None
    address: Address = ("", 0)
    error = ""
    if rank in roles.helpers:
        try:
            place = "127.0.0.1" if len(set(machines)) == 1 else _own_address()
            store = _open_store(place)
            address = place, store.port
        except (OSError, RuntimeError) as caught:  # raised on all ranks next
            error = f"rank {rank} cannot open a store for messages: {type(caught).__name__}: "
            error += str(caught)
    addresses = _gather_or_raise(world, address, error)

    # Every rank connects to the stores that it uses.
    links: list[HelperLink] = []
    try:
        if rank in roles.helpers:
            links.append(HelperLink(address, rank, 0, timeout, owner, store, roles.workers))
        else:
            for helper in roles.helpers:
                link = HelperLink(addresses[helper], rank, helper, timeout, owner)
                links.append(link)
    except (OSError, RuntimeError) as caught:
        error = f"rank {rank} cannot reach a store for messages: {caught}"
    try:
        _gather_or_raise(world, None, error)
    except SecondOrderError:
        close_links(links, 0.0)
        raise
    return links


def _gather_or_raise(world: World, value: T, error: str) -> list[T]:
    """Every rank's value, or the same SecondOrderError on every rank if one has an error."""
    found = world.all_gather_object((value, error))
    errors = [message for _, message in found if message]
    if errors:
        raise SecondOrderError("; ".join(errors))
    return [each for each, _ in found]


def _open_store(place: str) -> TCPStore:
    """Open a store that listens at an address of this machine only, on any free port."""
    family = socket.AF_INET6 if ":" in place else socket.AF_INET
    with socket.create_server((place, 0), family=family) as listener:
        return TCPStore(
            place,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )


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


# -------------------------------------------------------------------------------------- snapshots


def pack_by_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors in one flat tensor for each dtype, on the device of the first."""
    return [
        torch.cat([t.detach().reshape(-1).to(tensors[0].device) for t in same_dtype])
        for same_dtype in _by_dtype(tensors)
    ]


@torch.no_grad()
def load_model(flats: Sequence[Tensor], train: Sequence[bool], into: Sequence[Tensor]) -> None:
    """Set a helper's parameters and buffers to the workers', and freeze those frozen there.

    ``flats`` are made by :func:`pack_by_dtype`, and ``train`` says which tensors train.

    Raises:
        SecondOrderError: If the workers' model is another one.
    """
    sent = count_elements(flats)
    own = count_elements(into)
    if (len(train), sent) != (len(into), own):
        raise SecondOrderError(
            f"the workers' model has {len(train)} parameters and buffers of {sent} numbers, this "
            f"helper's {len(into)} of {own}: build and change the same model on every rank"
        )
    for flat, same_dtype in zip(flats, _by_dtype(into), strict=True):
        unflatten_into(flat, same_dtype)
    for tensor, trains in zip(into, train, strict=True):
        if tensor.requires_grad != trains:
            tensor.requires_grad_(trains)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in dtypes]
