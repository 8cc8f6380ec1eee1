"""Ranks with different jobs: who does what, and the mailbox that carries their messages."""

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
from hypothesis import given
from hypothesis import strategies as st
from ranks import replaced
from torch import Tensor

from second_order.distributed import mailbox
from second_order.distributed import world as worlds
from second_order.distributed.mailbox import PART_BYTES, Mailbox, Patience, open_store
from second_order.distributed.roles import assign_roles
from second_order.errors import SecondOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pool import World

PATIENCE = 20.0  # seconds; what is waited for comes in milliseconds
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


# Roles.


@given(st.integers(1, 40), st.integers(-1, 40))
def test_the_last_ranks_help_and_somebody_trains(world_size: int, helpers: int) -> None:
    """One process alone trains, whatever is asked for."""
    if helpers < 0 or helpers >= world_size > 1:
        with pytest.raises(
            ValueError, match=rf"^accelerators={helpers} .*use 0 to {world_size - 1}"
        ):
            assign_roles(world_size, helpers, "accelerator")
        return
    roles = assign_roles(world_size, helpers, "stats")
    assert roles == assign_roles(world_size, helpers, "stats"), "a pure function"
    assert [*roles.workers, *roles.helpers] == list(range(world_size))
    assert len(roles.helpers) == (helpers if world_size > 1 else 0)
    assert roles.of(0) == "worker", "rank 0 saves and prints"
    named = [roles.of(rank) for rank in range(world_size)]
    assert named == ["worker"] * len(roles.workers) + ["stats"] * len(roles.helpers)


def in_teams(rank: int, world_size: int) -> dict[int, tuple[int, int, float, bool]]:
    """Rank and size among one's own kind, the sum of global ranks there, and who hosts a store."""
    found = {}
    for helpers in range(world_size):
        world = worlds.World()
        roles = assign_roles(world_size, helpers, "accelerator")
        team = roles.team(world)
        value = torch.tensor([float(rank)])
        team.all_reduce([value]).wait()
        store, address = open_store(world, world_size - 1)
        assert address[0] == "127.0.0.1"
        assert len(set(world.all_gather_object(address))) == 1
        found[helpers] = (team.rank, team.size, float(value), store is not None)
        world.all_gather_object(None)
    return found


def test_teams_work_apart(world: World) -> None:
    results = world.run(in_teams, 3)
    for helpers in range(3):
        roles = assign_roles(3, helpers, "accelerator")
        for rank, result in enumerate(results):
            team = roles.helpers if rank in roles.helpers else roles.workers
            expected = (team.index(rank), len(team), float(sum(team)), rank == 2)
            assert result[helpers] == expected


def opened_badly(rank: int, world_size: int) -> tuple[str, Any]:
    """What all ranks raise where the host cannot open it; and the address, by machines."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("no port is free")

    world = worlds.World()
    with replaced(mailbox, {"TCPStore": fails}), pytest.raises(SecondOrderError) as caught:
        open_store(world, 1)
    names = replaced(mailbox.socket, {"gethostname": lambda: f"machine {rank}"})
    with names, replaced(mailbox, {"_own_address": lambda: "127.0.0.2"}):
        address = open_store(world, 1)[1]
    return str(caught.value), address[0]


def test_a_store_is_opened_where_all_can_reach_it_or_all_raise(world: World) -> None:
    for text, place in world.run(opened_badly, 2):
        assert text == "rank 1 cannot open a store for messages: OSError: no port is free"
        assert place == "127.0.0.2"


# The mailbox.


@pytest.fixture(autouse=True)
def no_thread_of_another_test() -> Iterator[None]:
    """A test that fails leaves none to those that count them."""
    yield
    mailbox._say_goodbyes()


class Pair:
    """Two mailboxes, and the store between them."""

    def __init__(self, timeout: float = PATIENCE) -> None:
        self.store, self.address = open_store(worlds.World.alone(), 0)
        self.a = Mailbox(self.address, "a", "b", timeout)
        self.b = Mailbox(self.address, "b", "a", timeout)

    def close(self) -> None:
        for one in self.a, self.b:
            one.close(PATIENCE)


@contextmanager
def pair(timeout: float = PATIENCE) -> Iterator[tuple[Mailbox, Mailbox]]:
    with closing(Pair(timeout)) as both:
        yield both.a, both.b
    assert no_thread_is_left()


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "second_order mailbox"]


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


def get(one: Mailbox, name: str) -> tuple[list[Tensor], dict[str, Any]]:
    one.expect(name)
    end = time.monotonic() + PATIENCE
    message = one.wait(name, lambda: time.monotonic() > end)
    assert message is not None, f"{name} has not come"
    return message


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_tensors_of_any_dtype_and_shape_arrive_as_they_were() -> None:
    shapes = [(), (0,), (3, 0, 2), (5,), (2, 3, 4)]
    sent = [
        (torch.randn(shape) * 50).to(torch.float64).to(dtype)
        for dtype, shape in itertools.product(DTYPES, shapes)
    ]
    sent += [torch.arange(12.0).view(3, 4).t(), torch.arange(9.0)[::2]]  # not contiguous
    sent += [torch.tensor([float("nan"), float("inf"), -0.0]).view(torch.int32)]
    note = {"finite": True, "products": 7, "losses": [0.1, None, float("inf")], "text": "û"}
    with pair() as (a, b):
        a.post("all", sent, **note)
        received, heard = get(b, "all")
        assert heard == note
        assert all(map(same, received, sent))
        assert len(received) == len(sent)
        b.post("nothing", [])
        assert get(a, "nothing") == ([], {})


class Slow:
    """A store that takes its time for each part, and knows what it has been told in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._store = native(*args, **kwargs)
        self.said: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, name: str, value: Any) -> None:
        if name.rpartition("/")[2].isdigit():
            time.sleep(0.05)
        self._store.set(name, value)
        self.said.append(name)


native = mailbox.TCPStore


def test_hearts_beat_while_a_large_message_is_on_its_way() -> None:
    opened, address = open_store(worlds.World.alone(), 0)
    silences = []
    with (
        replaced(mailbox, {"TCPStore": Slow, "PART_BYTES": 32}),
        closing(Mailbox(address, "a", "b", 1.0)) as a,
        closing(Mailbox(address, "b", "a", 1.0)) as b,
    ):
        b.expect("large")
        a.post("large", [torch.zeros(20)])
        while not b.holds("large"):
            silences.append(b._silence._waited)
            assert not b.lost, silences[-10:]
    assert opened is not None
    assert len(silences) > 0


def test_the_collector_may_say_goodbye_in_the_middle_of_a_wait() -> None:
    """On the mailbox's own thread, while it waits for something to do and holds a lock for it."""
    opened, address = open_store(worlds.World.alone(), 0)
    kept: list[Mailbox] = []
    said = threading.Event()

    def as_the_collector(frame: Any, event: str, what: Any) -> None:
        got = event == "c_call" and what.__name__ == "get"
        if got and isinstance(what.__self__, queue.SimpleQueue) and kept and not said.is_set():
            said.set()
            kept[0].leave()  # what the finalizer does

    threading.setprofile(as_the_collector)
    try:
        one = Mailbox(address, "a", "b", 5.0)
    finally:
        threading.setprofile(None)
    kept.append(one)
    assert said.wait(PATIENCE)
    one._thread.join(PATIENCE / 4)
    assert not one._thread.is_alive()
    assert opened is not None
    assert opened.check(["a/closed"])


def test_messages_can_be_expected_before_and_after_they_are_sent_and_in_any_order() -> None:
    with pair() as (a, b):
        b.expect("early/3")
        for k in range(20):
            a.post(f"early/{k}", [torch.tensor(k)])
        assert eventually(lambda: b.holds("early/3"))
        for k in [3, *reversed(range(3)), *range(4, 20)]:
            (tensor,), _ = get(b, f"early/{k}")
            assert tensor.item() == k
        assert b.arrived("early/3") is None, "a message is handed over once"
        assert not b.holds("early/3")
        assert b.arrived("never expected") is None


def test_numbers_replace_each_other() -> None:
    with pair() as (a, b):
        assert b.heard("steps") is None
        for k in range(100):
            a.tell("steps", k)
        assert eventually(lambda: b.heard("steps") == 99)
        assert a.heard("steps") is None, "what one has said oneself is not heard"


def test_goodbye_comes_after_all_that_has_been_posted() -> None:
    names = [f"message/{k}" for k in range(10)]
    with pair() as (a, b):
        for name in names:
            b.expect(name)
            a.post(name, [torch.zeros(1000)])
        a.post("last", [torch.zeros(1000)])
        a.close(0.0)
        assert eventually(lambda: b.closed_there)
        assert all(b.holds(name) for name in names)
        b.expect("last")  # which the thread has seen no reason to look for
        assert b.wait("last") is not None
        assert b.wait("what is not to come") is None
        assert not a.closed_there


def test_goodbye_is_the_last_thing_that_is_said() -> None:
    """Whoever hears it looks for no other message."""
    opened, address = open_store(worlds.World.alone(), 0)
    with replaced(mailbox, {"TCPStore": Slow}):
        one: Any = Mailbox(address, "a", "b", PATIENCE)
    for k in range(4):
        one.post(f"message/{k}", [torch.zeros(1)])
    one.tell("steps", 3)
    one.close(PATIENCE)
    assert opened is not None
    said = one._store.said
    assert sum(name.startswith("message/") for name in said) == 4 * 2
    assert said[-1] == f"a/{mailbox.CLOSED}"
    assert "a/steps" in said


def test_a_store_that_dies_is_noticed_and_nothing_raises() -> None:
    """And there is a text that tells of it."""
    both = Pair()
    a, b = both.a, both.b
    a.post("first", [torch.ones(2)])
    get(b, "first")
    assert not a.lost
    assert not b.lost
    both.store = None
    for one in a, b:
        one.expect("second")
        assert one.wait("second") is None
        assert one.lost
        assert "Error: " in one.failure
        one.post("in vain", [torch.ones(2)])
        assert one._outgoing.empty(), "nobody would take it away"
        one.tell("steps", 1)
        one.close(PATIENCE)
    assert no_thread_is_left()


def test_a_peer_without_a_heartbeat_is_lost() -> None:
    store, address = open_store(worlds.World.alone(), 0)
    alone = Mailbox(address, "a", "nobody", 0.3)
    assert store is not None
    assert eventually(lambda: alone.lost)
    alone.expect("what is not to come")
    assert alone.wait("what is not to come") is None
    assert not alone.closed_there
    alone.close(PATIENCE)
    assert no_thread_is_left()


class Clock:
    """The clock, when all processes have been stopped for a while."""

    sleep, stopped = staticmethod(time.sleep), 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.stopped


def test_a_stop_of_all_processes_is_no_silence() -> None:
    clock, timeout = Clock(), 2.0
    with replaced(mailbox, {"time": clock}), pair(timeout) as (a, b):
        patience = Patience(timeout)
        for one in a, b:
            assert eventually(lambda one=one: one._heard_beat > 0)
        clock.stopped += 100 * timeout
        assert not a.lost
        assert not b.lost
        assert not patience.ended()
        b.post("after", [torch.ones(1)])
        get(a, "after")
        for _ in range(4):
            clock.stopped += timeout
            ended = patience.ended()
        assert ended


def test_an_address_where_nobody_listens() -> None:
    with pytest.raises(SecondOrderError, match="does not hear from the others"):
        Mailbox(("127.0.0.1", 1), "a", "b", 0.1)
    assert no_thread_is_left()


class Owner:
    """An object that can go."""


def test_a_mailbox_whose_owner_is_gone_says_goodbye_and_ends_its_thread() -> None:
    store, address = open_store(worlds.World.alone(), 0)
    owner = Owner()
    a = Mailbox(address, "a", "b", PATIENCE, owner)
    b = Mailbox(address, "b", "a", PATIENCE)
    b.expect("last")
    a.post("last", [torch.ones(1)])
    del a, owner
    gc.collect()
    assert eventually(lambda: b.closed_there)
    get(b, "last")
    assert eventually(lambda: len(threads()) == 1)
    b.close(PATIENCE)
    assert no_thread_is_left()
    assert store is not None


def test_what_has_been_fetched_or_forgotten_is_not_kept() -> None:
    both = Pair()
    with closing(both):
        assert both.store is not None
        for k in range(10):
            both.a.post(f"message/{k}", [torch.ones(PART_BYTES // 4 + 1), torch.ones(2)[:1]])
            found, _ = get(both.b, f"message/{k}")
            assert [len(tensor) for tensor in found] == [PART_BYTES // 4 + 1, 1], "whole"
        assert not any(both.store.check([f"message/{k}"]) for k in range(10))
        assert not any(both.store.check([f"message/{k}/0"]) for k in range(10))
        both.b.expect("early")
        both.a.post("early", [torch.ones(2)])
        assert eventually(lambda: both.b.holds("early"))
        both.b.expect("early")
        both.b.forget("early")
        assert not both.b._received
        assert not both.b._expected
        both.a.post("declined", [torch.ones(2)])
        both.b.expect("declined")
        both.b.forget("declined", coming=True)
        assert eventually(lambda: not both.b._expected)
        assert not both.b.holds("declined")


def test_a_model_in_ddp_would_wait_for_the_helpers() -> None:
    with pytest.raises(ValueError, match=r"process_group=optimizer\.worker_group"):
        assign_roles(3, 1, "accelerator", under_ddp=True)
    assert assign_roles(3, 0, "accelerator", under_ddp=True).workers == (0, 1, 2)
    assert assign_roles(1, 1, "accelerator", under_ddp=True).helpers == ()
