"""The links between workers and helpers: what arrives, and what happens when an end is lost."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import replaced
from torch import Tensor

from second_order.distributed import helper_link
from second_order.distributed.helper_link import PART_BYTES, HelperLink, WaitTimer, connect_helpers
from second_order.distributed.roles import assign_roles
from second_order.distributed.world import World as Ranks
from second_order.errors import SecondOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pool import World

PATIENCE = 20.0  # seconds; what a test waits for comes in milliseconds
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(autouse=True)
def no_thread_of_another_test() -> Iterator[None]:
    """A test that fails leaves none to those that count them."""
    yield
    helper_link._close_all()


# Construction.


def linked(rank: int, world_size: int) -> tuple[list[int], float]:
    """The peers of a rank; worker r receives r from each helper, these the sum of the workers'."""
    roles = assign_roles(world_size, 2, "stats")
    links = connect_helpers(Ranks(), roles, PATIENCE)
    total = 0.0
    if rank in roles.helpers:
        (link,) = links
        for worker in roles.workers:
            link.send([torch.tensor(float(worker))], worker)
        message = link.wait()
        assert message is not None
        total = float(message.tensors[0])
    for link in links if rank in roles.workers else ():
        if rank == 0:
            link.send([torch.tensor(100.0)])
        message = link.wait()
        assert message is not None
        total += float(message.tensors[0])
    peers = [link.peer for link in links]
    for link in links:
        link.request_shutdown()
    for link in links:
        link.close(PATIENCE)
    return peers, total


def test_workers_have_a_link_to_each_helper(world: World) -> None:
    expected = [([2, 3], 0.0), ([2, 3], 2.0), ([0], 100.0), ([0], 100.0)]
    assert world.run(linked, 4) == expected


def connected_badly(rank: int, world_size: int) -> tuple[str, str]:
    """What all ranks raise if a helper cannot open its store, and if a worker cannot reach it."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("no port is free")

    roles = assign_roles(world_size, 1, "stats")
    texts = []
    with (
        replaced(helper_link, {"_open_store": fails}),
        pytest.raises(SecondOrderError) as caught,
    ):
        connect_helpers(Ranks(), roles, PATIENCE)
    texts.append(str(caught.value))
    changes = {"HelperLink": fails} if rank == 0 else {}
    with replaced(helper_link, changes), pytest.raises(SecondOrderError) as caught:
        connect_helpers(Ranks(), roles, PATIENCE)
    return texts[0], str(caught.value)


def test_all_ranks_raise_if_one_has_no_store(world: World) -> None:
    for opening, reaching in world.run(connected_badly, 2):
        assert opening == "rank 1 cannot open a store for messages: OSError: no port is free"
        assert reaching == "rank 0 cannot reach a store for messages: no port is free"


def places(rank: int, world_size: int) -> list[str]:
    """The addresses that stores are opened at, on one machine and on several."""
    roles = assign_roles(world_size, 1, "stats")
    opened = []
    native = helper_link._open_store

    def noted(place: str) -> Any:
        opened.append(place)
        return native(place)

    names = replaced(helper_link.socket, {"gethostname": lambda: f"machine {rank}"})
    with replaced(helper_link, {"_open_store": noted, "_own_address": lambda: "127.0.0.2"}):
        connect_helpers(Ranks(), roles, PATIENCE)[0].close(PATIENCE)
        with names:
            connect_helpers(Ranks(), roles, PATIENCE)[0].close(PATIENCE)
    return opened


def test_a_store_listens_on_loopback_unless_machines_differ(world: World) -> None:
    assert world.run(places, 2) == [[], ["127.0.0.1", "127.0.0.2"]]


# Messages.


class Pair:
    """A worker's end, a helper's, and the store between them."""

    def __init__(self, timeout: float = PATIENCE) -> None:
        self.store: Any = helper_link._open_store("127.0.0.1")
        address = "127.0.0.1", self.store.port
        self.worker = HelperLink(address, 0, 1, timeout)
        self.helper = HelperLink(address, 1, 0, timeout)

    def close(self) -> None:
        for one in self.worker, self.helper:
            one.close(PATIENCE)


@contextmanager
def pair(timeout: float = PATIENCE) -> Iterator[tuple[HelperLink, HelperLink]]:
    with closing(Pair(timeout)) as both:
        yield both.worker, both.helper
    assert no_thread_is_left()


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "second_order link"]


def no_thread_is_left() -> bool:
    return eventually(lambda: not threads())


def eventually(condition: Callable[[], Any]) -> bool:
    """Whether it comes true; no test waits for what is not to come."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def get(one: HelperLink) -> tuple[list[Tensor], dict[str, Any]]:
    end = time.monotonic() + PATIENCE
    message = one.wait(lambda: time.monotonic() > end)
    assert message is not None, "nothing has come"
    return message


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_tensors_of_any_dtype_and_shape_arrive_unchanged() -> None:
    shapes = [(), (0,), (3, 0, 2), (5,), (2, 3, 4)]
    sent = [
        (torch.randn(shape) * 50).to(torch.float64).to(dtype)
        for dtype, shape in itertools.product(DTYPES, shapes)
    ]
    sent += [torch.arange(12.0).view(3, 4).t(), torch.arange(9.0)[::2]]  # not contiguous
    sent += [torch.tensor([float("nan"), float("inf"), -0.0]).view(torch.int32)]
    note = {"finite": True, "products": 7, "losses": [0.1, None, float("inf")], "text": "û"}
    with pair() as (a, b):
        a.send(sent, **note)
        received, noted = get(b)
        assert noted == note
        assert all(map(same, received, sent))
        assert len(received) == len(sent)
        b.send([])
        assert get(a) == ([], {})


def test_messages_arrive_in_order_and_once() -> None:
    with pair() as (a, b):
        for k in range(20):
            a.send([torch.tensor(k)], number=k)
        for k in range(20):
            (tensor,), note = get(b)
            assert (tensor.item(), note["number"]) == (k, k)
        assert b.receive() is None


class Slow:
    """A slow store that records its keys in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._store = native(*args, **kwargs)
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, name: str, value: Any) -> None:
        if name.count("/") == 2:
            time.sleep(0.05)
        self._store.set(name, value)
        self.keys.append(name)


native = helper_link.TCPStore


def test_heartbeats_continue_during_a_large_message() -> None:
    opened = helper_link._open_store("127.0.0.1")
    address = "127.0.0.1", opened.port
    looks = 0
    with (
        replaced(helper_link, {"TCPStore": Slow, "PART_BYTES": 32}),
        closing(HelperLink(address, 0, 1, 1.0)) as a,
        closing(HelperLink(address, 1, 0, 1.0)) as b,
    ):
        a.send([torch.zeros(20)])
        while b.receive() is None:
            looks += 1
            assert not b.lost
    assert looks > 0


def test_received_messages_are_removed_from_the_store() -> None:
    both = Pair()
    with closing(both):
        for k in range(3):
            both.worker.send([torch.ones(PART_BYTES // 4 + 1), torch.ones(2)[:1]])
            found, _ = get(both.helper)
            assert [len(tensor) for tensor in found] == [PART_BYTES // 4 + 1, 1], "whole"
            assert not both.store.check([f"0>1/{k}"])
            assert not both.store.check([f"0>1/{k}/0"])


# Ends.


def test_a_shutdown_arrives_after_all_messages() -> None:
    with pair() as (a, b):
        for k in range(10):
            a.send([torch.zeros(1000)], number=k)
        a.close(0.0)
        assert eventually(lambda: b.peer_closed)
        assert [get(b)[1]["number"] for _ in range(10)] == list(range(10))
        assert b.wait() is None
        assert not a.peer_closed


def test_no_message_follows_a_shutdown() -> None:
    opened = helper_link._open_store("127.0.0.1")
    with replaced(helper_link, {"TCPStore": Slow}):
        one: Any = HelperLink(("127.0.0.1", opened.port), 0, 1, PATIENCE)
    for _ in range(4):
        one.send([torch.zeros(1)])
    one.close(PATIENCE)
    was_set = one._store.keys
    assert sum(name.startswith("0>1/") for name in was_set) == 4 * 2
    assert was_set[-1] == "0/closed"


def test_the_garbage_collector_can_shut_down_a_waiting_link() -> None:
    """On the link's own thread, while it waits for something to do and holds a lock for it."""
    opened = helper_link._open_store("127.0.0.1")
    made_links: list[HelperLink] = []
    was_set = threading.Event()

    def as_the_collector(frame: Any, event: str, what: Any) -> None:
        got = event == "c_call" and what.__name__ == "get"
        if (
            got
            and isinstance(what.__self__, queue.SimpleQueue)
            and made_links
            and not was_set.is_set()
        ):
            was_set.set()
            made_links[0].request_shutdown()  # what the finalizer does

    threading.setprofile(as_the_collector)
    try:
        one = HelperLink(("127.0.0.1", opened.port), 0, 1, 5.0)
    finally:
        threading.setprofile(None)
    made_links.append(one)
    assert was_set.wait(PATIENCE)
    one._thread.join(PATIENCE / 4)
    assert not one._thread.is_alive()
    assert opened.check(["0/closed"])


class Owner:
    """An object that can go."""


def test_an_unreferenced_link_shuts_down_and_ends_its_thread() -> None:
    opened = helper_link._open_store("127.0.0.1")
    address = "127.0.0.1", opened.port
    owner = Owner()
    a = HelperLink(address, 0, 1, PATIENCE, owner)
    b = HelperLink(address, 1, 0, PATIENCE)
    a.send([torch.ones(1)])
    del a, owner
    gc.collect()
    assert eventually(lambda: b.peer_closed)
    get(b)
    assert eventually(lambda: len(threads()) == 1)
    b.close(PATIENCE)
    assert no_thread_is_left()


def test_a_crashed_store_is_detected_without_an_exception() -> None:
    both = Pair()
    both.worker.send([torch.ones(2)])
    get(both.helper)
    assert not both.worker.lost
    assert not both.helper.lost
    both.store = None
    for one in both.worker, both.helper:
        assert one.wait() is None
        assert one.lost
        assert "Error: " in one.reason
        one.send([torch.ones(2)])
        assert one._outgoing.empty(), "no thread would take it"
        one.close(PATIENCE)
    assert no_thread_is_left()


def test_a_peer_without_a_heartbeat_is_lost() -> None:
    opened = helper_link._open_store("127.0.0.1")
    alone = HelperLink(("127.0.0.1", opened.port), 0, 1, 0.3)
    assert eventually(lambda: alone.lost)
    assert alone.wait() is None
    assert not alone.peer_closed
    alone.close(PATIENCE)
    assert no_thread_is_left()


class Clock:
    """The clock, when all processes have been stopped for a while."""

    sleep = staticmethod(time.sleep)
    stopped = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.stopped


def test_suspending_all_processes_loses_no_peer() -> None:
    clock = Clock()
    timeout = 2.0
    with replaced(helper_link, {"time": clock}), pair(timeout) as (a, b):
        patience = WaitTimer(timeout)
        for one in a, b:
            assert eventually(lambda one=one: one._peer_beat)
        clock.stopped += 100 * timeout
        assert not a.lost
        assert not b.lost
        assert not patience.is_expired()
        b.send([torch.ones(1)])
        get(a)
        for _ in range(4):
            clock.stopped += timeout
            ended = patience.is_expired()
        assert ended


def test_an_address_without_a_store_raises() -> None:
    with pytest.raises(SecondOrderError, match="Lost contact with the other ranks"):
        HelperLink(("127.0.0.1", 1), 0, 1, 0.1)
    assert no_thread_is_left()
