"""What strangers, and messages that are not as they have to be, can do to helpers: nothing."""

from __future__ import annotations

import json
import multiprocessing.connection as mpc
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ranks import replaced
from test_roles import PATIENCE, Pair, eventually, get

from second_order.distributed import messages
from second_order.distributed import store as stores
from second_order.distributed.messages import (
    MalformedError,
    describe,
    read_heading,
    require_form,
)
from second_order.distributed.store import PART_BYTES, Address, Store, StoreClient, interface

QUICK = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
SECRET = b"the weights"


@pytest.fixture
def store() -> Store:
    return Store("127.0.0.1")


def address(store: Store, key: bytes | None = None) -> Address:
    return Address("127.0.0.1", store.port, store.key if key is None else key)


def works(store: Store, client: StoreClient, name: str) -> bool:
    """Whether a message passes."""
    client.add(name, SECRET)
    client.post(name, b"{}")
    found = client.heading(name) == (b"{}", 1) and client.part(name, 0) == SECRET
    client.drop(name)
    return found


def listening(port: int) -> set[str]:
    """The addresses at which this machine listens on a port, as Linux tells."""
    found = set()
    for table in "tcp", "tcp6":
        for line in Path(f"/proc/net/{table}").read_text("ascii").splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            host, _, number = place.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(host)
    return found


# Who connects.


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells who listens")
def test_a_store_listens_on_loopback_alone_and_not_once_all_are_there(store: Store) -> None:
    assert listening(store.port) == {"0100007F"}
    client = StoreClient(address(store), PATIENCE)
    store.seal()
    assert listening(store.port) == set()
    with pytest.raises(ConnectionRefusedError):
        StoreClient(address(store), PATIENCE)
    assert works(store, client, "after")
    assert store.refused == 0


def test_the_key_is_random_and_never_printed() -> None:
    keys = {Store("127.0.0.1").key for _ in range(3)}
    assert len(keys) == 3
    assert all(len(key) == 32 for key in keys)
    place = Address("127.0.0.1", 1, b"secret")
    assert "secret" not in f"{place} {place!r}"


STRANGER = """
import sys
from multiprocessing.connection import Client
port, said = int(sys.argv[1]), b""
for key in (None, b"", bytes(32), b"guessed"):
    try:
        with Client(("127.0.0.1", port), authkey=key) as line:
            for request in (b'["head", "m"]', b'["part", "m", 0]', b'["drop", "m"]') * 2:
                line.send_bytes(request)
                while line.poll(0.2):
                    said += line.recv_bytes(10**6)
    except Exception as error:
        said += repr(error).encode()
print(said)
"""


def test_a_process_without_the_key_reads_nothing_and_stops_nothing(store: Store) -> None:
    client = StoreClient(address(store), PATIENCE)
    client.add("m", SECRET)
    client.post("m", b"heading")
    run = [sys.executable, "-c", STRANGER, str(store.port)]
    said = subprocess.run(run, capture_output=True, check=True, timeout=60).stdout
    assert b"CHALLENGE" in said
    assert SECRET not in said
    assert b"heading" not in said
    assert client.heading("m") == (b"heading", 1)
    assert client.part("m", 0) == SECRET
    assert eventually(lambda: store.refused == 4)
    assert works(store, client, "after")


@QUICK
@given(garbage=st.binary(max_size=80), frames=st.booleans())
def test_garbage_gets_nobody_in(garbage: bytes, frames: bool) -> None:
    store = Store("127.0.0.1")
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        stranger.sendall(len(garbage).to_bytes(4, "big") + garbage if frames else garbage)
        with suppress(OSError):  # it has been hung up on
            stranger.shutdown(socket.SHUT_WR)
        assert eventually(lambda: store.refused == 1)
    assert works(store, StoreClient(address(store), PATIENCE), "after")


def test_a_proof_that_is_played_back_is_none(store: Store) -> None:
    """Between a client and its store, a stranger who listens; challenges differ."""
    with closing(socket.create_server(("127.0.0.1", 0))) as between:
        heard: list[bytes] = []

        def tap() -> None:
            here, _ = between.accept()
            there = socket.create_connection(("127.0.0.1", store.port))
            for _ in range(40):
                for one, other in (there, here), (here, there):
                    one.settimeout(0.01)
                    try:
                        data = one.recv(10**4)
                    except TimeoutError:
                        continue
                    except OSError:
                        return
                    other.sendall(data)
                    if one is here:
                        heard.append(data)

        thread = stores._thread(tap)
        client = StoreClient(Address("127.0.0.1", between.getsockname()[1], store.key), PATIENCE)
        thread.join()
        del client
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        stranger.sendall(b"".join(heard))
        assert eventually(lambda: store.refused == 1)


def test_a_client_tells_nothing_to_a_store_that_does_not_know_the_key() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as impostor:

        def pretend() -> None:
            peer, _ = impostor.accept()
            with mpc.Connection(peer.detach()) as line:
                line.send_bytes(b"#CHALLENGE#" + bytes(20))
                line.recv_bytes(256)
                line.send_bytes(b"#WELCOME#")
                heard.append(line.recv_bytes(256))
                line.send_bytes(b"the wrong answer")

        heard: list[bytes] = []
        thread = stores._thread(pretend)
        with pytest.raises(mpc.AuthenticationError):
            StoreClient(Address("127.0.0.1", impostor.getsockname()[1], bytes(32)), PATIENCE)
        thread.join()
    assert heard[0].startswith(b"#CHALLENGE#")


def test_silent_strangers_hold_nobody_up_for_longer_than_a_handshake() -> None:
    with replaced(stores, {"STRANGERS": 2, "HANDSHAKE_SECONDS": 0.3}):
        store = Store("127.0.0.1")
        silent = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(5)]
        client = StoreClient(address(store), PATIENCE)
    assert works(store, client, "after")
    store.seal()
    assert eventually(lambda: store.refused >= 5)
    for each in silent:
        each.close()


def test_strangers_who_drip_bytes_hold_nobody_up_either() -> None:
    """A handshake has to be over in time, however it is going."""
    over = threading.Event()

    def drip(peer: socket.socket) -> None:
        with suppress(OSError):
            peer.sendall((256).to_bytes(4, "big"))
            while not over.wait(0.05):
                peer.sendall(b"x")

    with replaced(stores, {"STRANGERS": 2, "HANDSHAKE_SECONDS": 0.4}):
        store = Store("127.0.0.1")
        dripping = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(2)]
        threads = [stores._thread(drip, peer) for peer in dripping]
        assert eventually(lambda: len(store._state.strangers) == 2)
        begun = time.monotonic()
        client = StoreClient(address(store), PATIENCE)
        assert time.monotonic() - begun < 10.0  # 250 bytes would take longer
        assert eventually(lambda: store.refused >= 2)
        assert works(store, client, "after")
        assert not store._state.strangers
    over.set()
    for thread in threads:
        thread.join()
    for peer in dripping:
        peer.close()


@pytest.mark.parametrize("what", ["_connection", "_thread"])
def test_a_place_is_free_again_where_a_connection_cannot_be_opened(what: str) -> None:
    """There may be no more files, or threads; then there are."""
    work, left = getattr(stores, what), [0, 1, 2]

    def failing(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and left:
            left.pop()
            raise OSError("too many open files") if what == "_connection" else RuntimeError("no")
        return work(*arguments)

    with replaced(stores, {"STRANGERS": 1, what: failing}):
        store = Store("127.0.0.1")
        client = StoreClient(address(store), PATIENCE)
    assert left == []
    assert store.refused >= 3
    assert works(store, client, "after")
    assert not store._state.strangers


def test_a_stranger_who_dawdles_is_sent_away_when_all_are_there(store: Store) -> None:
    silent = socket.create_connection(("127.0.0.1", store.port))
    silent.settimeout(PATIENCE)
    assert silent.recv(1), "the challenge"
    begun = time.monotonic()
    store.seal()
    while silent.recv(100):
        pass
    assert time.monotonic() - begun < stores.HANDSHAKE_SECONDS
    silent.close()


def test_several_machines_meet_on_the_groups_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "GLOO_SOCKET_IFNAME", "MASTER_ADDR":
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match=r"'localhost' leads to no address but loopback.*set GLOO_SO"):
        interface("localhost")
    places = {"here": "192.0.2.7", "there": "192.0.2.1", "half": "127.0.1.1"}

    def look_up(name: str, port: Any, **_: Any) -> list[Any]:
        return [(socket.AF_INET, 1, 6, "", (places[name], port or 0))]

    monkeypatch.setattr(stores.socket, "getaddrinfo", look_up)
    assert interface("here") == "192.0.2.7"
    monkeypatch.setenv("MASTER_ADDR", "half")
    with pytest.raises(OSError, match="loopback"):
        interface("half")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the address")
def test_the_interface_that_gloo_is_told_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert interface("whatever") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(OSError, match="GLOO_SOCKET_IFNAME='nowhere0' has no IPv4 address"):
        interface("whatever")


# What clients say.

PRIMITIVES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
VERBS = st.sampled_from([*stores.VERBS, "pickle", ""])


@QUICK
@given(requests=st.lists(st.tuples(VERBS, st.lists(PRIMITIVES, max_size=3)), max_size=4))
def test_requests_that_make_no_sense_are_counted_and_change_nothing(requests: Any) -> None:
    store = Store("127.0.0.1")
    mad, sane = (StoreClient(address(store), PATIENCE) for _ in range(2))
    sane.say("number", 3)
    for verb, arguments in requests:
        with suppress(EOFError, OSError):  # hung up on, for good
            mad._ask([verb, *arguments], b"x" if verb in ("add", "post") else None)
    assert sane.look({"number": None}, ()) in (({"number": 3}, []), ({"number": 4}, []))
    assert works(store, sane, "after")


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x80\x04.", b"{}", b"[]", b"7", b'["jump", 1]', b'[["look"], 1]', b"[" * 10**5],
)
def test_a_client_that_speaks_another_language_is_hung_up_on(store: Store, frame: bytes) -> None:
    client, other = (StoreClient(address(store), PATIENCE) for _ in range(2))
    client._connection.send_bytes(frame)
    with pytest.raises((EOFError, ConnectionError)):
        client.look({}, ())
    assert store.refused == 1
    assert works(store, other, "after")


def test_a_frame_longer_than_any_is_not_even_read(store: Store) -> None:
    other = StoreClient(address(store), PATIENCE)
    for k, size in enumerate([(2**31 - 1).to_bytes(4, "big"), b"\xff" * 12, b"\x80" + bytes(3)]):
        client = StoreClient(address(store), PATIENCE)
        with socket.socket(fileno=os.dup(client._connection.fileno())) as raw:
            raw.sendall(size + b"x")
        assert eventually(lambda k=k: store.refused == k + 1)
    assert works(store, other, "after")
    with pytest.raises((EOFError, ConnectionError)):
        other._ask(["add", "m"], bytes(PART_BYTES + 1))


# What messages say.


@given(PRIMITIVES | st.fixed_dictionaries({"tensors": PRIMITIVES, "note": PRIMITIVES}))
def test_a_heading_is_read_or_refused(said: Any) -> None:
    with suppress(MalformedError):
        heading = read_heading(json.dumps(said).encode(), 0)
        assert isinstance(heading.note, dict)
        assert heading.parts == 0


@given(st.binary(max_size=60))
def test_a_heading_of_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedError):
        read_heading(raw, 0)


@example(True, int)
@given(value=PRIMITIVES, form=st.sampled_from([int, bool, [str], [bool], {str: str}, float | None]))
def test_a_note_is_of_its_form_or_refused(value: Any, form: Any) -> None:
    with pytest.raises(MalformedError, match="lacks 'x'"):
        require_form({}, x=form)
    with suppress(MalformedError):
        require_form({"x": value}, x=form)
        assert form is not int or not isinstance(value, bool)
        text = str(form)
        assert isinstance(value, list) == ("[" in text)
        assert isinstance(value, dict) == ("{" in text)


TENSOR = torch.arange(6.0)
SOUND = describe([TENSOR], {})


def said(**changes: Any) -> bytes:
    return json.dumps({"tensors": [["float32", [6]]], "note": {}} | changes).encode()


MALFORMED: dict[str, tuple[list[bytes], bytes, str]] = {  # parts, heading, complaint
    "no parts": ([], SOUND, "tells of 1 parts, and 0 have come"),
    "one part more": ([bytes(24)] * 2, SOUND, "tells of 1 parts, and 2 have come"),
    "too short": ([bytes(23)], SOUND, "part 0 of 1 has 23 bytes, not 24"),
    "empty": ([b""], SOUND, "part 0 of 1 has 0 bytes, not 24"),
    "too long": ([bytes(25)], SOUND, "part 0 of 1 has 25 bytes, not 24"),
    "much too long": ([bytes(PART_BYTES)], SOUND, f"has {PART_BYTES} bytes, not 24"),
    "more than there is": (
        [bytes(24)],
        said(tensors=[["float32", [2**40]]]),
        "tells of 1048576 parts",
    ),
    "overflow": ([], said(tensors=[["int8", [2**61, 2**61, 2**61, 0, 2**61]]]), "no tensor of"),
    "negative": ([], said(tensors=[["float32", [-6]]]), "a shape that is none"),
    "negative twice": ([bytes(24)], said(tensors=[["float32", [-3, -2]]]), "a shape that is none"),
    "shape of text": ([], said(tensors=[["float32", "6"]]), "a shape that is none"),
    "shape of halves": ([], said(tensors=[["float32", [1.5]]]), "a shape that is none"),
    "huge dimensions": ([], said(tensors=[["float32", [1] * 65]]), "a shape that is none"),
    "not a dtype": ([], said(tensors=[["nn", [6]]]), "an unknown dtype, 'nn'"),
    "quantized": ([], said(tensors=[["qint8", [6]]]), "an unknown dtype, 'qint8'"),
    "dtype of a list": ([], said(tensors=[[["float32"], [6]]]), "an unknown dtype"),
    "three of a tensor": ([], said(tensors=[["float32", [6], 1]]), "a dtype and a shape for each"),
    "tensors in text": ([], said(tensors="float32"), "'tensors' is no list"),
    "note in a list": ([], said(note=[]), "or its 'note' no dictionary"),
    "something more": ([], said(more=1), "'tensors' and 'note'"),
    "no json": ([], b"\x80\x04\x95", "its heading cannot be read"),
    "empty heading": ([], b"", "its heading cannot be read"),
    "deep": ([], b"[" * 10**5, "its heading cannot be read"),
    "a number": ([], b"7", "'tensors' and 'note'"),
}


def test_malformed_messages_are_refused_and_sound_ones_go_on() -> None:
    """Of every kind, one after the other, to one mailbox, by who knows the key."""
    with closing(Pair()) as both:
        client = StoreClient(both.address, PATIENCE)
        for name, (parts, heading, complaint) in MALFORMED.items():
            for part in parts:
                client.add(name, part)
            client.post(name, heading)
            tensors, note = get(both.b, name)
            assert tensors == []
            with pytest.raises(MalformedError) as caught:
                require_form(note)
            assert complaint in str(caught.value), name
            both.b.refuse(name, caught.value)
        both.a.post("sound", [TENSOR])
        (tensor,), _ = get(both.b, "sound")
        assert torch.equal(tensor, TENSOR)
        assert both.b.refused == len(MALFORMED)
        assert both.b.complaint.startswith("no parts of a: its heading tells of 1 parts")
        assert not both.b.lost
        assert not both.store._state.headings
        assert not both.store._state.parts, "what is refused is not kept"


def test_a_message_that_was_taken_is_not_taken_again() -> None:
    """Nor is anything added to one that is complete."""
    with closing(Pair()) as both:
        client = StoreClient(both.address, PATIENCE)
        client.add("m", bytes(24))
        client.post("m", SOUND)
        client.add("m", bytes(24))
        client.post("m", said(tensors=[]))
        assert both.store.refused == 2
        (tensor,), _ = get(both.b, "m")
        assert torch.equal(tensor, torch.zeros(6))
        client.add("m", bytes(24))
        client.post("m", SOUND)
        both.a.post("after", [])
        get(both.b, "after")
        assert both.b.arrived("m") is None, "nobody expects it any more"


def test_nothing_is_unpickled() -> None:
    """In what a message passes through."""
    for module in stores, messages:
        text = Path(module.__file__).read_text("utf-8")
        assert "import pickle" not in text
        assert "recv()" not in text
        assert "torch.load" not in text
