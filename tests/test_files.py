"""Files exist as a whole or not at all, and those that cannot be read are named."""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_cases import make, take
from ranks import shard
from saved_states import BATCHES, MLP, are_equal, flat, train

from second_order import (
    KAISA,
    CheckpointError,
    RankMismatchError,
    load_checkpoint,
    save_checkpoint,
)
from second_order.checkpoint.files import load_tensors, replacing, save_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

NUMBERS = torch.arange(1.0, 60.0, dtype=torch.float64)
STATE = {"step": 3, "w": NUMBERS, "groups": [{"lr": 0.1, "b": torch.ones(2, 3)}], "empty": None}


def saved() -> bytes:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    return buffer.getvalue()


SAVED = saved()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "step 20.pt"


def test_a_saved_state_is_loaded_unchanged(tmp_path: Path) -> None:
    model = MLP.model()
    optimizer = make(KAISA, model)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": (1, "a")}
    save_checkpoint(state, tmp_path / "a.pt")
    assert are_equal(load_checkpoint(str(tmp_path / "a.pt")), state)
    assert are_equal(torch.load(tmp_path / "a.pt"), state), "it is a file of torch.save"
    save_checkpoint({"step": 2}, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt") == {"step": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


# The reader of torch searches the end of a file in blocks of 64 KiB, and fails differently in each.
BLOCK = 2**16


def large() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(3.0 * BLOCK), "lists": [torch.ones(3)] * 50}, buffer)
    return buffer.getvalue()


LARGE = large()
CUTS = [0, 1, 3, 4, 5, 1000, *range(BLOCK - 30, BLOCK + 5000, 97), len(LARGE) // 2, len(LARGE) - 1]


@given(st.integers(0, len(SAVED) - 1))
def test_a_file_that_is_cut_short_is_refused_wherever_it_is_cut(path: Path, length: int) -> None:
    path.write_bytes(SAVED[:length])
    with pytest.raises(CheckpointError, match=r"step 20\.pt cannot be loaded: it is .*; load an"):
        load_checkpoint(path)


def test_a_large_file_that_is_cut_short_is_refused_wherever_it_is_cut(path: Path) -> None:
    for length in CUTS:
        path.write_bytes(LARGE[:length])
        with pytest.raises(
            CheckpointError, match=r"step 20\.pt cannot be loaded: it is "
        ) as caught:
            load_checkpoint(path)
        if length >= 4:  # the bytes that begin every archive
            assert "it is truncated" in str(caught.value), length


@given(st.binary(max_size=200))
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_random_bytes_are_refused(path: Path, content: bytes) -> None:
    for start in (b"", b"PK\x03\x04", b"\x80\x02"):  # nothing, an archive, a pickle
        path.write_bytes(start + content)
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


@given(st.integers(0, len(SAVED) - 1), st.integers(0, 7))
def test_a_changed_bit_raises_no_other_error(path: Path, place: int, bit: int) -> None:
    """A bit of a number changes the number, which no checksum of the file detects."""
    changed = bytearray(SAVED)
    changed[place] ^= 1 << bit
    path.write_bytes(bytes(changed))
    message = ""
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        message = str(error)
    assert not message or "step 20.pt cannot be loaded: it " in message
    assert "weights_only" not in message


def foreign() -> dict[str, tuple[bytes, str]]:
    archive = io.BytesIO()
    classes = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a/b.txt", "text")
    torch.save({"a": pickle.PicklingError("not a number")}, classes)
    return {
        "nothing": (b"", "it is empty; load an older"),
        "text": (b"epoch,loss\n1,0.5\n", "it is damaged, or torch.save did not write it; load an"),
        "another archive": (archive.getvalue(), "it is damaged, or torch.save did not write it"),
        "classes": (classes.getvalue(), "it has objects .* of pickle.PicklingError; save their"),
    }


@pytest.mark.parametrize("kind", foreign())
def test_files_of_other_kinds_are_refused_with_a_reason(path: Path, kind: str) -> None:
    content, what = foreign()[kind]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"step 20\.pt cannot be loaded: {what}"):
        load_checkpoint(path)


def test_a_wrong_path_raises_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(STATE, path)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "b.pt")
    with pytest.raises(IsADirectoryError):
        load_checkpoint(tmp_path)
    with pytest.raises(NotADirectoryError):
        load_checkpoint(path / "b.pt")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Root may read any file.
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(PermissionError):
        load_checkpoint(path)


def test_a_missing_device_raises_its_own_error(tmp_path: Path) -> None:
    save_checkpoint(STATE, tmp_path / "a.pt")
    with pytest.raises(RuntimeError, match="nowhere") as caught:
        load_checkpoint(tmp_path / "a.pt", map_location="nowhere")
    assert not isinstance(caught.value, CheckpointError)


def errors_after_one_damaged_file(rank: int, world_size: int, folder: Path) -> list[str]:
    """The errors of a rank, if all load their own files, and the last rank's is truncated."""
    model = MLP.model()
    optimizer = make(KAISA, model)
    take(model, optimizer, shard(BATCHES[0], rank, world_size))
    path = folder / f"{rank}.pt"
    save_checkpoint(optimizer.state_dict(), path)
    if rank == world_size - 1:
        path.write_bytes(path.read_bytes()[:-1])
    errors = []
    try:
        optimizer.load_state_dict(load_checkpoint(path))
    except CheckpointError as error:
        errors.append(str(error))
    before = flat(model.parameters())
    try:
        take(model, optimizer, shard(BATCHES[1], rank, world_size))
    except RankMismatchError as error:
        errors.append(str(error))
    assert torch.equal(flat(model.parameters()), before)
    return errors


def test_after_one_ranks_damaged_file_all_ranks_raise(world: World, tmp_path: Path) -> None:
    first, last = world.run(errors_after_one_damaged_file, 2, tmp_path, timeout=60)
    assert "1.pt cannot be loaded: it is truncated" in last.pop(0)
    assert first == last
    assert "a checkpoint loaded since the last step" in first[0]


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    save_checkpoint(STATE, tmp_path / "a.pt")
    with pytest.raises(TypeError, match=r"a\.pt was not written: .*neither tensors nor"):
        save_checkpoint({"rng": torch.Generator}, tmp_path / "a.pt")
    assert are_equal(load_checkpoint(tmp_path / "a.pt"), STATE)
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


def test_a_file_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the new file is on the disk, the old one stays, whatever happens."""
    path = tmp_path / "a.pt"
    order = []
    path.write_bytes(b"old")

    def written() -> None:
        with replacing(path) as file:
            file.write(b"new")
            assert path.read_bytes() == b"old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written()
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.pt", b"old")]
    fsync = os.fsync

    def synced(handle: int) -> None:
        order.append(path.read_bytes())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    with replacing(path) as file:
        file.write(b"new")
    assert order == [b"old"]
    (tmp_path / "usual").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_tensors_that_share_memory_are_written_in_the_safetensors_format(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    matrix = torch.arange(6.0).view(2, 3)
    tensors = {
        "a": matrix,
        "same": matrix,
        "turned": matrix.mT,
        "row": matrix[1],
        "half": NUMBERS.half(),
    }
    path = tmp_path / "folder" / "a.safetensors"
    save_tensors(tensors, path)
    for found in (load_tensors(path), safetensors_torch.load_file(path)):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors is not a safetensors file, or is truncated"
    ):
        load_tensors(path)
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "none")


def test_without_the_package_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install safetensors"):
        save_tensors({"a": NUMBERS}, tmp_path / "a.safetensors")
