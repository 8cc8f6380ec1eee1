"""A store of messages, kept by one process for the clients that know its key.

client                                the process that keeps the store
connects, and both prove the key  ->  a thread for each client, which answers it
[verb, ...], and perhaps bytes    ->  [answer], and perhaps bytes

It listens on loopback if all processes are on one machine, and only until all have connected.
Connections, the proof (an HMAC of the other side's random challenge) and frames with bounded
lengths are :mod:`multiprocessing.connection`'s. Nothing is ever unpickled: a frame is JSON of a
form that is checked, or raw bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, TypeAlias

from second_order.distributed.world import World
from second_order.errors import SecondOrderError

__all__ = ["PART_BYTES", "Address", "Store", "StoreClient", "open_store"]

PART_BYTES = 4 * 2**20  # at most, of a message's part: heartbeats go between parts
REQUEST_BYTES = 2**20  # at most, of a request; names are short
HEADING_BYTES = 64 * 2**20  # at most, of a heading, which has a few bytes for each tensor
LOOK_SECONDS = 1.0  # for which an answer may be held back, at most
KEY_BYTES = 32
HANDSHAKE_SECONDS = 5.0  # for which a stranger's whole handshake may last
STRANGERS = 64  # connections that have not proved the key, at most; more are closed at once
ACCEPT_SECONDS = 0.1  # between looks at whether to stop listening
RETRY_SECONDS = 0.05
Answer: TypeAlias = tuple[Any, bytes | None]  # an answer of primitives, and its bytes
BOOT_ID, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Address:
    """The address of a store, and its key.

    Attributes:
        host: A numeric address.
        port: TCP port.
        key: Random bytes; not printed.
    """

    host: str
    port: int
    key: bytes = field(repr=False)


def open_store(world: World, host: int) -> tuple[Store | None, Address]:
    """Open a store on one rank; returns it (None on other ranks), and its address.

    A collective over ``world``, by which the key travels.

    Args:
        world: The processes.
        host: The rank that hosts the store, for as long as it keeps the object returned.

    Raises:
        SecondOrderError: On every rank, if the host cannot open the store.
    """
    machines = world.all_gather_object(_machine())
    store: Store | None = None
    error, name = "", "127.0.0.1"
    if world.rank == host:
        try:
            if len(set(machines)) > 1:
                name = interface(machines[host][0])
            store = Store(name)
        except Exception as caught:  # the address is exchanged next
            error = f"{type(caught).__name__}: {caught}"
    mine = (name, 0, b"") if store is None else (name, store.port, store.key)
    place, error = world.all_gather_object((mine, error))[host]
    if error:
        raise SecondOrderError(f"rank {host} cannot open a store at {place[0]!r}: {error}")
    return store, Address(*place)


def _machine() -> tuple[str, str, str]:
    """An identity of this machine: names may repeat, and containers count as machines."""
    try:
        kernel, network = BOOT_ID.read_text("ascii"), str(NETWORK.readlink())
    except OSError:  # not on Linux
        kernel = network = ""
    return socket.gethostname(), kernel, network


def interface(name: str) -> str:
    """This machine's address on the network of the process group, by the rules that gloo has.

    The address is that of interface ``GLOO_SOCKET_IFNAME``, or of the host's name. Where that is
    loopback, the address that the route to ``MASTER_ADDR`` starts from.

    Args:
        name: Name of this host.

    Raises:
        OSError: If no such address is found.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if chosen:
        return _address_of_interface(chosen)
    with contextlib.suppress(OSError):
        for *_, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            if not _is_loopback(str(place[0])):
                return str(place[0])
    master = os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError):
        for family, *_, place in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)  # which sends nothing
                here = str(probe.getsockname()[0])
            if master and not _is_loopback(here):
                return here
    raise OSError(
        f"the host name {name!r} leads to no address but loopback, which other machines cannot "
        f"reach; set GLOO_SOCKET_IFNAME to the interface of the process group"
    )


def _is_loopback(place: str) -> bool:
    return place.startswith("127.") or place == "::1"


def _address_of_interface(name: str) -> str:
    fcntl = importlib.import_module("fcntl")  # not on Windows
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as caught:
            raise OSError(f"GLOO_SOCKET_IFNAME={name!r} has no IPv4 address: {caught}") from caught
    return socket.inet_ntoa(answer[20:24])


class _State:
    """The contents of a store, which its threads share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.said: dict[str, int] = {}
        self.parts: dict[str, list[bytes]] = {}
        self.headings: dict[str, bytes] = {}
        self.refused = 0
        self.sealed = threading.Event()
        self.strangers: dict[socket.socket, float] = {}  # and until when each may be one
        self.clients: set[socket.socket] = set()

    def refuse(self) -> None:
        with self.changed:
            self.refused += 1

    def welcome(self, peer: socket.socket) -> bool:
        """Take a place for a connection that has not proved the key; False if there is none."""
        with self.changed:
            if self.sealed.is_set() or len(self.strangers) >= STRANGERS:
                return False
            self.strangers[peer] = time.monotonic() + HANDSHAKE_SECONDS
            return True

    def leave(self, peer: socket.socket) -> None:
        """Give back the place of a connection that had not proved the key."""
        with self.changed:
            self.strangers.pop(peer, None)

    def hurry(self) -> None:
        """Hang up on connections that have not proved the key in time, even if they still send."""
        with self.changed:
            now = time.monotonic()
            for peer in [peer for peer, end in self.strangers.items() if end < now]:
                _hang_up(peer)


class Store:
    """Keeps messages and numbers for its clients; it ends with the object.

    Args:
        host: A numeric address of this machine, to listen at; not anywhere else.

    Attributes:
        key: Random bytes that clients must prove to know.
        port: TCP port that the store listens on.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = listener.getsockname()[1]
        self.key, self._state = secrets.token_bytes(KEY_BYTES), _State()
        listener.settimeout(ACCEPT_SECONDS)
        self._listener = listener
        self._thread = _thread(_listen, listener, self._state, self.key)
        self._finalizer = weakref.finalize(self, _end, listener, self._state, os.getpid())
        self._finalizer.atexit = False  # goodbyes are still to come then

    @property
    def refused(self) -> int:
        """Number of connections without the key, and of malformed requests."""
        return self._state.refused

    def said(self, names: Sequence[str]) -> bool:
        """Whether clients have published all numbers of these names."""
        with self._state.changed:
            return all(name in self._state.said for name in names)

    def seal(self) -> None:
        """Stop listening: all clients have connected. Others that have not proved the key go."""
        _seal(self._listener, self._state)
        self._thread.join()

    def close(self) -> None:
        """Hang up on all clients; the end of the object does the same."""
        self._finalizer()


def _seal(listener: socket.socket, state: _State) -> None:
    with state.changed:
        state.sealed.set()
        for peer in (listener, *state.strangers):
            _hang_up(peer)


def _end(listener: socket.socket, state: _State, pid: int) -> None:
    if pid != os.getpid():  # a child of fork, in which this is garbage: others use it still
        return
    _seal(listener, state)
    with state.changed:
        for peer in state.clients:
            _hang_up(peer)


def _hang_up(peer: socket.socket) -> None:
    """Shut a socket down, which wakes the threads that use it; closing it would not."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(
        target=work, args=arguments, name="store of second_order", daemon=True
    )
    thread.start()
    return thread


def _listen(listener: socket.socket, state: _State, key: bytes) -> None:
    with listener:
        while not state.sealed.is_set():
            state.hurry()
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # of this connection, which was given up meanwhile; or it is the end
                time.sleep(0.0 if state.sealed.is_set() else ACCEPT_SECONDS)
                continue
            if state.welcome(peer):
                try:
                    _thread(_attend, peer, state, key)
                    continue
                except RuntimeError:  # there can be no more threads
                    state.leave(peer)
            state.refuse()
            peer.close()


def _attend(peer: socket.socket, state: _State, key: bytes) -> None:
    """Serve one connection, from the proof of the key until either side hangs up."""
    with peer, contextlib.ExitStack() as opened:
        try:
            connection = opened.enter_context(_connection(peer, HANDSHAKE_SECONDS))
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        except Exception:  # whatever a stranger says, or there are no more files
            state.refuse()
            return
        finally:
            state.leave(peer)
        with state.changed:
            if state.sealed.is_set():  # meanwhile: it has been hung up, or is to be
                return
            state.clients.add(peer)
        _limit(peer, 0.0)  # a client may be stopped, and go on
        try:
            while True:
                _answer(connection, state)
        except (EOFError, ConnectionError):
            pass
        except Exception:  # it does not speak as we do
            state.refuse()
        finally:
            with state.changed:
                state.clients.discard(peer)


def _connection(peer: socket.socket, seconds: float) -> Connection:
    """A connection that sends frames over a socket, which stays open after it."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit(peer, seconds)
    return Connection(os.dup(peer.fileno()))


def _limit(peer: socket.socket, seconds: float) -> None:
    """Let the kernel end a read or a write that takes longer; 0 for never."""
    if os.name == "posix":
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class _NonsenseError(Exception):
    """Raised for a request of the wrong form."""


def _answer(connection: Connection, state: _State) -> None:
    """Read one request, and answer it.

    Raises:
        Exception: If it is not known where the next request begins.
    """
    verb, *arguments = json.loads(connection.recv_bytes(REQUEST_BYTES))
    if verb not in VERBS:
        raise _NonsenseError(f"no such verb: {verb!r}")
    content = None
    if verb in ("add", "post"):
        content = connection.recv_bytes(PART_BYTES if verb == "add" else HEADING_BYTES)
    try:
        with state.changed:
            found, content = VERBS[verb](state, content, *arguments)
    except (_NonsenseError, TypeError):  # the latter, for other arguments; nothing has been changed
        state.refuse()
        found = content = None
    connection.send_bytes(json.dumps([found, content is not None]).encode())
    if content is not None:
        connection.send_bytes(content)


def _add(state: _State, content: bytes, name: Any) -> Answer:
    if _text(name) in state.headings:
        raise _NonsenseError(f"{name!r} is complete")
    state.parts.setdefault(name, []).append(content)
    return None, None


def _post(state: _State, content: bytes, name: Any) -> Answer:
    if _text(name) in state.headings:
        raise _NonsenseError(f"{name!r} is complete")
    state.headings[name] = content
    state.changed.notify_all()
    return None, None


def _say(state: _State, _: None, name: Any, number: Any) -> Answer:
    state.said[_text(name)] = _whole(number)
    state.changed.notify_all()
    return None, None


def _head(state: _State, _: None, name: Any) -> Answer:
    return len(state.parts.get(_text(name), [])), state.headings.get(name)


def _part(state: _State, _: None, name: Any, k: Any) -> Answer:
    kept = state.parts.get(_text(name), [])
    if not 0 <= _whole(k) < len(kept):
        return None, None
    part, kept[k] = kept[k], b""  # once: it may be large
    return None, part


def _drop(state: _State, _: None, name: Any) -> Answer:
    state.headings.pop(_text(name), None)
    state.parts.pop(name, None)
    return None, None


def _look(state: _State, _: None, numbers: Any, messages: Any, seconds: Any) -> Answer:
    """The values of some numbers, and which of some messages are there.

    Waits for a message, or a number other than the client knows, for ``seconds`` at most.
    """
    if not isinstance(numbers, dict) or not isinstance(messages, list):
        raise _NonsenseError("a look is for numbers that are known and a list of messages")
    if not isinstance(seconds, int | float):
        raise _NonsenseError("seconds are a number")
    end = time.monotonic() + min(max(seconds, 0.0), LOOK_SECONDS)
    while True:
        said = {name: state.said[name] for name in numbers if name in state.said}
        there = [name for name in messages if _text(name) in state.headings]
        news = there or any(numbers[name] != number for name, number in said.items())
        left = end - time.monotonic()
        if news or not left > 0:
            return [said, there], None
        state.changed.wait(left)


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise _NonsenseError(f"{name!r} is no name")
    return name


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise _NonsenseError(f"{number!r} is no whole number")
    return number


VERBS: dict[str, Callable[..., Answer]] = {
    "add": _add,
    "post": _post,
    "say": _say,
    "look": _look,
    "head": _head,
    "part": _part,
    "drop": _drop,
}


class StoreClient:
    """A connection to a store; for one thread.

    Args:
        address: Address of the store.
        timeout: Seconds without an answer after which a call raises.

    Raises:
        OSError: If no store is there, or it does not prove the key, or answer in time.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._timeout, self._key = timeout, address.key
        end = time.monotonic() + timeout
        while not self._connect(address, time.monotonic() > end):
            time.sleep(RETRY_SECONDS)

    def _connect(self, address: Address, last: bool) -> bool:
        """Try to connect; returns whether it worked, as strangers may keep the store busy."""
        try:
            self._open(address)
        except (EOFError, ConnectionError) as error:
            if last or isinstance(error, ConnectionRefusedError):
                raise
            return False
        return True

    def _open(self, address: Address) -> None:
        with socket.create_connection((address.host, address.port), self._timeout) as peer:
            peer.settimeout(None)
            self._connection = _connection(peer, self._timeout)
        answer_challenge(self._connection, self._key)
        deliver_challenge(self._connection, self._key)
        self.look({}, ())  # it is answered once the store counts this among its clients

    def add(self, name: str, part: bytes) -> None:
        """Add a part, of at most ``PART_BYTES``, to a message that no client sees yet."""
        self._ask(["add", name], part)

    def post(self, name: str, heading: bytes) -> None:
        """Complete a message by its heading, so that clients see it."""
        self._ask(["post", name], heading)

    def say(self, name: str, number: int) -> None:
        """Set the number of a name, in place of the one before."""
        self._ask(["say", name, number])

    def look(
        self, numbers: Mapping[str, int | None], messages: Sequence[str], seconds: float = 0.0
    ) -> tuple[dict[str, int], list[str]]:
        """The values of some numbers, and which of some messages are there.

        Args:
            numbers: By name, the last value that the client knows, or None.
            messages: Names of the messages to look for.
            seconds: Time to wait for a message or a new number, one second at most.
        """
        found, _ = self._ask(["look", dict(numbers), list(messages), seconds])
        if not isinstance(found, list) or len(found) != 2:
            raise ConnectionError("the store's answer makes no sense")
        said, there = found
        here = {name: _whole(said[name]) for name in numbers if name in said}
        return here, [name for name in messages if name in there]

    def heading(self, name: str) -> tuple[bytes, int]:
        """The heading of a message, and its number of parts."""
        parts, heading = self._ask(["head", name])
        return heading or b"", _whole(parts)

    def part(self, name: str, k: int) -> bytes:
        """A part of a message, which the store then forgets; empty if there is none."""
        _, part = self._ask(["part", name, k])
        return part or b""

    def drop(self, name: str) -> None:
        """Forget a message."""
        self._ask(["drop", name])

    def _ask(self, request: list[Any], content: bytes | None = None) -> tuple[Any, bytes | None]:
        connection = self._connection
        try:
            connection.send_bytes(json.dumps(request).encode())
            if content is not None:
                connection.send_bytes(content)
            found, more = json.loads(connection.recv_bytes(REQUEST_BYTES))
            return found, connection.recv_bytes(HEADING_BYTES) if more else None
        except BlockingIOError:
            raise TimeoutError(f"the store has not answered for {self._timeout:g} s") from None
