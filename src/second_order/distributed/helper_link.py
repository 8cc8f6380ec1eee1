"""Messages between workers and helpers that do not block, even if a rank crashes.

In a collective, a rank that crashes or hangs blocks all others. Messages to and from
helpers therefore go through ``TCPStore``s. Each helper hosts a store of its own, so
that a crash of one helper does not affect the others. Each end of a link has a thread
that sends and receives.

    worker 0  ->  every helper    snapshots of the model, and requests
    helper    ->  every worker    results

Messages from one rank to another arrive in the order in which they were sent. If a
helper crashes, its store fails. If either end hangs, its heartbeats stop.

The keys of a store:

    FROM>TO/k/i    part i of message k
    FROM>TO/k      the number of parts of message k, set after the parts
    FROM/beat      the heartbeat, a counter
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

POLL_SECONDS = 0.005  # between two polls, so that the training thread gets the GIL
BEATS_PER_TIMEOUT = 8
CLOSE_SECONDS = 5.0  # longest wait for the other end at a shutdown
PART_BYTES = 4 * 2**20  # a store accepts 8 MiB; heartbeats are sent between the parts


class Message(NamedTuple):
    """Tensors, and a note: a dictionary of numbers, strings, lists and dictionaries."""

    tensors: list[Tensor]
    note: dict[str, Any]


class WaitTimer:
    """A limit on a wait that does not count the time in which this process was stopped.

    The time between two checks counts for at most a quarter of the limit. So if all
    processes are stopped and continued together, none considers the others lost.
    """

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Restart the wait."""
        with self._lock:
            self._waited = 0.0
            self._checked_at = time.monotonic()

    def is_expired(self) -> bool:
        """Check the clock, and return whether the limit has passed."""
        with self._lock:
            now = time.monotonic()
            self._waited += min(now - self._checked_at, self._limit / 4)
            self._checked_at = now
            return self._waited > self._limit


class HelperLink:
    """This rank's end of a link with one peer.

    A helper's peer is worker 0, but the helper may send to all workers. The link's
    thread ends at :meth:`close`, when ``owner`` is collected, when the interpreter
    exits, or when the store fails.

    Args:
        address: Host and port of the store.
        rank: This rank.
        peer: The rank that this end receives from.
        timeout: Seconds without a heartbeat after which the peer counts as lost.
        owner: Object that uses the link; the link shuts down when it is collected.
        store: The store, on the helper that hosts it.
        workers: The worker ranks, on a helper.

    Attributes:
        failure: Why the store has failed, or "".
        peer_closed: Whether the peer has shut down. All its messages have arrived then.

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
        self.peer_closed = False
        self._rank = rank
        self._timeout = timeout
        self._hosted = store  # the store lives as long as this reference
        self._workers = workers
        with translate_backend_errors():
            limit = timedelta(seconds=max(timeout, 1.0))
            self._store = TCPStore(*address, wait_for_workers=False, timeout=limit)
        # A queue without a lock, because the garbage collector may call
        # request_shutdown() in the middle of the thread. None: shut down.
        self._outgoing = queue.SimpleQueue[tuple[int, Message] | None]()
        self._num_sent = Counter[int]()  # by receiving rank

        # The thread fetches messages, and wakes a caller that waits for one.
        self._incoming = deque[Message]()
        self._num_fetched = 0
        self._arrival = threading.Event()

        # The heartbeats of both ends.
        self._num_beats = 0
        self._next_beat = 0.0
        self._peer_beat = ""
        self._peer_timer = WaitTimer(timeout)  # since the peer's last heartbeat
        self._thread = threading.Thread(
            target=self._run, name="second_order link", daemon=True
        )
        self._thread.start()

        # The interpreter's exit and the owner's end shut the link down.
        _open.add(self)
        self._owner: weakref.ref[Any] | None = None
        if owner is not None:
            self._owner = weakref.ref(owner, lambda _: self.request_shutdown())

    def send(
        self, tensors: Sequence[Tensor], to: int | None = None, **note: Any
    ) -> None:
        """Queue a message; the link's thread sends it.

        Args:
            tensors: The tensors. CUDA tensors are copied to the host now. CPU tensors
                must not change until they have been sent.
            to: The receiving rank, if it is not the peer.
            note: The message's note.
        """
        if self._thread.is_alive():
            copies = [tensor.detach().cpu() for tensor in tensors]
            if to is None:
                to = self.peer
            self._outgoing.put((to, Message(copies, note)))

    def receive(self) -> Message | None:
        """Return the peer's next message, or None if none has arrived."""
        if not self._incoming:
            return None
        return self._incoming.popleft()

    def wait(self, until: Callable[[], bool] = lambda: False) -> Message | None:
        """Wait for the peer's next message.

        Returns None if the peer is lost or has shut down, or once ``until()`` is true.
        """
        while not self._incoming:
            if self.peer_closed or self.lost or until() or not self._thread.is_alive():
                break
            self._arrival.wait(POLL_SECONDS)
            self._arrival.clear()
        return self.receive()

    @property
    def lost(self) -> bool:
        """Whether the store has failed, or the peer's heartbeats have stopped."""
        return bool(self.failure) or self._peer_timer.is_expired()

    @property
    def reason(self) -> str:
        """Why the store has failed, in parentheses; "" if it has not."""
        if not self.failure:
            return ""
        return f" ({self.failure})"

    def request_shutdown(self) -> None:
        """Shut down after the queued messages, without waiting.

        Call :meth:`close` as well.
        """
        self._outgoing.put(None)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Shut down after the queued messages, and end the thread.

        Waits for at most ``timeout`` seconds, and never longer than CLOSE_SECONDS. A
        thread that hangs in a connection is left running. A helper keeps its store
        until the workers have shut down, so that they can still read what it sent.
        Messages that were not received are discarded.
        """
        end = time.monotonic() + min(max(timeout, 0.0), CLOSE_SECONDS)
        self.request_shutdown()
        self._thread.join(max(end - time.monotonic(), 0.0))
        self._incoming.clear()
        if self._hosted is not None and not self.lost:
            closed_keys = [f"{worker}/closed" for worker in self._workers]
            while not self._hosted.check(closed_keys) and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
            self._hosted = None

    # ----------------------------------------------------------------------- the thread

    def _run(self) -> None:
        """Send and receive until the shutdown, or until the store fails."""
        try:
            while self._send_all():
                self._beat()
                self._fetch_all()
            self._store.set(f"{self._rank}/closed", "1")
        except Exception as error:  # after any error, the other end cannot be reached
            self.failure = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        finally:
            while not self._outgoing.empty():
                self._outgoing.get()
            self._arrival.set()
            _open.discard(self)

    def _send_all(self) -> bool:
        """Send the queued messages; wait for POLL_SECONDS if there are none.

        Returns False after the last message before a shutdown.
        """
        with suppress(queue.Empty):
            item = self._outgoing.get(timeout=POLL_SECONDS)
            while item is not None:
                self._send(*item)
                item = self._outgoing.get_nowait()
            return False
        return True

    def _fetch_all(self) -> None:
        """Fetch the messages that have arrived, and whether the peer has shut down."""
        peer_closed = self._store.check([f"{self.peer}/closed"])
        while self._store.check([f"{self.peer}>{self._rank}/{self._num_fetched}"]):
            self._incoming.append(self._fetch())
            self._arrival.set()
        # Set it last, because the peer sent all of these messages before.
        self.peer_closed = peer_closed

    def _send(self, to: int, message: Message) -> None:
        """Write a message into the store, in parts."""
        name = f"{self._rank}>{to}/{self._num_sent[to]}"
        self._num_sent[to] += 1
        file = io.BytesIO()
        # torch.save would save the whole storage of a view, so clone the tensors.
        torch.save(([tensor.clone() for tensor in message.tensors], message.note), file)
        content = file.getbuffer()
        starts = range(0, len(content), PART_BYTES)
        for i, start in enumerate(starts):
            self._store.set(f"{name}/{i}", bytes(content[start : start + PART_BYTES]))  # type: ignore[arg-type]
            self._beat()
        # Last, so that its reader finds all parts.
        self._store.set(name, str(len(starts)))

    def _fetch(self) -> Message:
        """Read the next message from the store, and delete it there."""
        name = f"{self.peer}>{self._rank}/{self._num_fetched}"
        self._num_fetched += 1
        file = io.BytesIO()
        for i in range(int(self._store.get(name))):
            file.write(self._store.get(f"{name}/{i}"))
            self._store.delete_key(f"{name}/{i}")
            self._beat()
        self._store.delete_key(name)
        file.seek(0)
        return Message(*torch.load(file, weights_only=True))

    def _beat(self) -> None:
        """Send a heartbeat and check the peer's, if the last was long enough ago."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._num_beats += 1
        self._next_beat = now + self._timeout / BEATS_PER_TIMEOUT
        self._store.set(f"{self._rank}/beat", str(self._num_beats))
        if self._store.check([f"{self.peer}/beat"]):
            beat = self._store.get(f"{self.peer}/beat").decode()
            # A new heartbeat shows that the peer is alive.
            if beat != self._peer_beat:
                self._peer_beat = beat
                self._peer_timer.begin()
        # Counts the time until now, which no other call may do.
        self._peer_timer.is_expired()


_open: set[HelperLink] = set()


def close_links(links: Iterable[HelperLink], timeout: float = CLOSE_SECONDS) -> None:
    """Shut down links. Requests all shutdowns before it waits for the first one."""
    links = list(links)
    end = time.monotonic() + timeout
    for link in links:
        link.request_shutdown()
    for link in links:
        link.close(end - time.monotonic())


@atexit.register
def _close_all() -> None:
    """Let the threads finish their messages before the interpreter exits."""
    close_links(_open)


# ------------------------------------------------------------------------- construction


def connect_helpers(
    world: World, roles: Roles, timeout: float, owner: object = None
) -> list[HelperLink]:
    """Link every worker with every helper. Collective.

    Args:
        world: All ranks.
        roles: Their roles.
        timeout: Seconds without a heartbeat after which a peer counts as lost.
        owner: Object that uses the links; they shut down when it is collected.

    Returns:
        On a worker a link to each helper, on a helper one link to worker 0.

    Raises:
        SecondOrderError: On every rank, if a rank cannot open or reach a store.
    """
    rank = world.rank
    machines = world.all_gather_object(socket.gethostname())

    # Each helper opens a store, on loopback if all ranks are on one machine.
    store: TCPStore | None = None
    address: Address = ("", 0)
    error = ""
    if rank in roles.helpers:
        try:
            place = "127.0.0.1"
            if len(set(machines)) > 1:
                place = _own_address()
            store = _open_store(place)
            address = place, store.port
        except (OSError, RuntimeError) as caught:  # raised on all ranks next
            error = f"rank {rank} cannot open a store for messages: {type(caught).__name__}: "
            error += str(caught)
    addresses = _gather_or_raise(world, address, error)

    # A helper connects to its own store, and a worker to the stores of all helpers.
    links: list[HelperLink] = []
    try:
        if rank in roles.helpers:
            link = HelperLink(address, rank, 0, timeout, owner, store, roles.workers)
            links.append(link)
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
    """Gather a value from every rank, or raise all ranks' errors on every rank."""
    gathered = world.all_gather_object((value, error))
    errors = [message for _, message in gathered if message]
    if errors:
        raise SecondOrderError("; ".join(errors))
    return [gathered_value for gathered_value, _ in gathered]


def _open_store(place: str) -> TCPStore:
    """Open a store on any free port. It listens at one address of this machine only."""
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
    """Return this machine's address on the network of ``MASTER_ADDR``."""
    name = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, place = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]

    # The system chooses the address from which it would reach this place.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # for a datagram socket, this sends nothing
        own = str(probe.getsockname()[0])
    if own.startswith("127.") or own == "::1":
        raise OSError(
            f"{name!r} leads to loopback here, which other machines cannot reach; set MASTER_ADDR "
            f"to an address on the network of the process group"
        )
    return own


# ---------------------------------------------------------------------------- snapshots


def pack_by_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors into one flat tensor per dtype, on the first tensor's device."""
    flats = []
    for same_dtype in _by_dtype(tensors):
        device = tensors[0].device
        parts = [tensor.detach().reshape(-1).to(device) for tensor in same_dtype]
        flats.append(torch.cat(parts))
    return flats


@torch.no_grad()
def load_model(
    flats: Sequence[Tensor], train: Sequence[bool], into: Sequence[Tensor]
) -> None:
    """Load the workers' parameters and buffers into a helper's model.

    Args:
        flats: The workers' tensors, packed by :func:`pack_by_dtype`.
        train: Which of the tensors require gradients on the workers.
        into: The helper's tensors, in the same order. ``requires_grad`` becomes that
            of the workers.

    Raises:
        SecondOrderError: If the workers' model has other tensors.
    """
    sent = count_elements(flats)
    own = count_elements(into)
    if (len(train), sent) != (len(into), own):
        raise SecondOrderError(
            f"the workers' model has {len(train)} parameters and buffers of {sent} elements, but "
            f"this helper's has {len(into)} of {own}: build and change the same model on every rank"
        )
    for flat, same_dtype in zip(flats, _by_dtype(into), strict=True):
        unflatten_into(flat, same_dtype)
    for tensor, trains in zip(into, train, strict=True):
        if tensor.requires_grad != trains:
            tensor.requires_grad_(trains)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype, in the order of the first tensor of each."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in dtypes]
