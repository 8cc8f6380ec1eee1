"""MRDHO2 where messages are malformed, and strangers knock: training goes on, and ranks agree."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from accelerated import CASE, CURVED, loss_of, mrdho2, noted, reference, worker
from ranks import agreed, assert_same_trajectory, replaced

from second_order.distributed import mailbox, messages
from second_order.distributed.mailbox import Mailbox
from second_order.distributed.store import open_store
from second_order.fosi import divided as module

if TYPE_CHECKING:
    from pool import World

MOMENTUM = {"momentum": 0.9, "lr": 0.05}

# By name: which message; what becomes of it. Epoch 1 has no final update then.
SPOILT: dict[str, tuple[str, str, Any]] = {
    "fewer vectors": ("paper", "pairs/1/0/0", lambda t, n: ([*t[:2], t[2][1:]], n)),
    "shorter vectors": ("paper", "pairs/1/1/0", lambda t, n: ([*t[:2], t[2][:, 1:]], n)),
    "fewer values": ("paper", "pairs/1/1/0", lambda t, n: ([t[0][1:], *t[1:]], n)),
    "more tensors": ("paper", "pairs/1/0/0", lambda t, n: ([*t, t[0]], n)),
    "whole numbers": ("paper", "pairs/1/0/0", lambda t, n: ([t[0].long(), *t[1:]], n)),
    "no tensors": ("paper", "pairs/1/1/0", lambda t, n: ([], n)),
    "another note": ("paper", "pairs/1/0/0", lambda t, n: (t, {"finite": "yes"})),
    "half a product": ("additive", "pairs/1/0/0", lambda t, n: (t, n | {"products": 0.5})),
    "point without numbers": ("paper", "point/1", lambda t, n: ([], n)),
    "point of a matrix": ("paper", "point/1", lambda t, n: ([t[0][None]], n)),
    "point without an epoch": ("paper", "point/1", lambda t, n: (t, {"train": n["train"]})),
    "point of no epoch": ("paper", "point/1", lambda t, n: (t, n | {"epoch": [1]})),
    "half a question": ("guarded", "try/1", lambda t, n: (t[:1], n)),
    "a question of two lengths": ("guarded", "try/1", lambda t, n: ([t[0], t[1][1:]], n)),
    "half a verdict": ("guarded", "verdict/1/1", lambda t, n: (t, {"losses": n["losses"][:1]})),
    "no verdict": ("guarded", "verdict/1/0", lambda t, n: (t, {})),
    "a verdict in text": ("guarded", "verdict/1/0", lambda t, n: (t, {"losses": ["0", "0"]})),
}
# What the other worker gets then: it would make the update alone.
LIKED: dict[str, Any] = {
    case: {f"verdict/1/{other}": lambda t, n: (t, {"losses": [1.0, 0.1]})}
    for case, other in (("half a verdict", 0), ("no verdict", 1))
}


def spoiled(spoils: dict[str, Any]) -> Any:
    """A mailbox's way to post, which spoils some messages."""
    post = Mailbox.post

    def other(me: Mailbox, called: str, tensors: Any, **note: Any) -> None:
        if called in spoils:
            tensors, note = spoils[called](list(tensors), note)
        post(me, called, tensors, **note)

    return other


def trained(rank: int, world_size: int, options: dict[str, Any], **details: Any) -> dict[str, Any]:
    """One rank of a run, and what it has refused."""
    model, accelerators = CASE.model(), options.get("accelerators", 1)
    with noted() as warned:
        optimizer = mrdho2(model, **MOMENTUM, **options)
        with optimizer:
            if optimizer.role == "accelerator":
                found: Any = optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
            else:
                found = worker(model, optimizer, rank, world_size - accelerators, **details)
    return {
        "found": found,
        "warned": warned,
        "refused": optimizer.refused_messages,
        "told": f"messages refused: {optimizer.refused_messages}" in str(optimizer.summary()),
        "reports": [(report.applied, report.reason) for report in optimizer.epochs],
    }


def spoilt_runs(rank: int, world_size: int, cases: list[str]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        kind, name, spoil = SPOILT[case]
        with replaced(Mailbox, {"post": spoiled({name: spoil, **LIKED.get(case, {})})}):
            results.append(trained(rank, world_size, {"final_update": kind}))
    return results


@pytest.mark.parametrize("kind", ["paper", "guarded"])
def test_a_malformed_message_costs_one_final_update(world: World, kind: str) -> None:
    """On all workers alike, whoever has got it; its receiver counts it, and says so once."""
    cases = [
        case for case, (which, *_) in SPOILT.items() if (which == "guarded") == (kind == "guarded")
    ]
    results = world.run(spoilt_runs, 3, cases, timeout=180)
    for k, case in enumerate(cases):
        ranks = [result[k] for result in results]
        expected, _ = reference(SPOILT[case][0], with_update=lambda epoch: epoch != 1, **MOMENTUM)
        found = agreed([each["found"] for each in ranks[:2]])
        assert_same_trajectory(found, expected, rtol=1e-7)
        assert sorted(each["refused"] for each in ranks) == [0, 0, 1], case
        for each in ranks[:2]:
            assert not each["reports"][1][0], case
            assert each["reports"][1][1], case
        for each in ranks:
            lines = [line for line in each["warned"] if line.startswith("refused: ")]
            assert len(lines) == each["refused"], case
            assert all(SPOILT[case][1] in line for line in lines), lines
            assert each["told"] == bool(each["refused"])


def spoilt_order(rank: int, world_size: int, what: str) -> str | dict[str, Any]:
    def spoil(tensors: Any, note: Any) -> Any:
        return ([], note) if what == "numbers" else (tensors, note | {"do": "dance"})

    options = {"final_update": "paper", "accelerators": 2}
    with replaced(Mailbox, {"post": spoiled({"order/1/1": spoil})}):
        try:
            return trained(rank, world_size, options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("what", ["numbers", "do"])
def test_an_order_that_is_refused_ends_the_accelerators_and_not_the_worker(
    world: World, what: str
) -> None:
    trainer, first, second = world.run(spoilt_order, 3, what, timeout=120)
    assert [applied for applied, _ in trainer["reports"]] == [True, False]
    assert first == "SecondOrderError: another accelerator has failed; its own error tells why"
    assert second.startswith("SecondOrderError: the first accelerator's order/1/1 was refused")
    expected, _ = reference("paper", with_update=lambda epoch: epoch == 0, **MOMENTUM)
    assert_same_trajectory(trainer["found"], expected, rtol=1e-7)


def wordy(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """A run whose workers say more than they are asked for, by names that orders have, too."""

    def describe(tensors: Any, note: Any) -> bytes:
        if "train" in note and "do" not in note:
            note = {**note, "name": "order/0/1", "tensors": [], "self": 0, "do": "leave"}
        return messages.describe(tensors, note)

    with replaced(mailbox, {"describe": describe}):
        return trained(rank, world_size, {"final_update": kind, "accelerators": 2})


@pytest.mark.parametrize("kind", ["paper", "guarded"])
def test_what_a_message_says_beside_is_not_passed_on(world: World, kind: str) -> None:
    trainer, *accelerators = world.run(wordy, 3, kind, timeout=120)
    expected, _ = reference(kind, **MOMENTUM)
    assert_same_trajectory(trainer["found"], expected, rtol=1e-7)
    assert trainer["reports"]
    assert [each["refused"] for each in (trainer, *accelerators)] == [0, 0, 0]


def besieged(rank: int, world_size: int) -> tuple[dict[str, Any], bool]:
    """A run that strangers knock at: while it is made, and while it trains."""
    ports: list[int] = []
    with ExitStack() as stack:

        def knocked_at(*args: Any) -> Any:
            store, address = open_store(*args)
            ports.append(address.port)
            assert address.host == "127.0.0.1"
            if store is not None:
                for said in b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 30:
                    peer = socket.create_connection((address.host, address.port))
                    stack.enter_context(peer).sendall(said)
                end = time.monotonic() + 30.0
                while store.refused < 3 and time.monotonic() < end:
                    time.sleep(0.01)
            return store, address

        def knock(step: int) -> None:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", ports[0]))

        with replaced(module, {"open_store": knocked_at}):
            return trained(rank, world_size, {"final_update": "paper"}, before=knock)


def test_strangers_are_refused_and_change_nothing(world: World) -> None:
    """Once all ranks have met, nobody listens any more."""
    *workers, host = world.run(besieged, 3, timeout=120)
    expected, _ = reference("paper", **MOMENTUM)
    assert_same_trajectory(agreed([each["found"] for each in workers]), expected, rtol=1e-7)
    assert [each["warned"] for each in workers] == [[], []]
    (line,) = host["warned"]
    assert line.startswith("refused: a connection that did not know the key")
    assert host["refused"] == 4
