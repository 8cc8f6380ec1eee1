"""Checkpoints' files: there as a whole or not at all, and refused by name where they are spoilt."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from contract import make
from hypothesis import given
from hypothesis import strategies as st
from states import MLP, alike, train

from second_order import KAISA, CheckpointError, load_checkpoint, save_checkpoint
from second_order.files import replacing

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = torch.arange(1.0, 60.0, dtype=torch.float64)
STATE = {"step": 3, "w": NUMBERS, "groups": [{"lr": 0.1, "b": torch.ones(2, 3)}], "empty": None}


def saved() -> bytes:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    return buffer.getvalue()


SAVED = saved()
HEADER_BYTES = 46
"""Bytes of an entry's header in the directory, before its name."""

WHERE = SAVED.index(NUMBERS.numpy().tobytes())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "step 20.pt"


def test_a_training_goes_through_a_file(tmp_path: Path) -> None:
    model = MLP.model()
    optimizer = make(KAISA, model)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": (1, "a")}
    save_checkpoint(state, tmp_path / "a.pt")
    assert alike(load_checkpoint(str(tmp_path / "a.pt")), state)
    assert alike(torch.load(tmp_path / "a.pt"), state), "it is a file of torch.save"
    save_checkpoint({"step": 2}, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt") == {"step": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


@given(st.integers(0, len(SAVED) - 1))
def test_a_file_that_is_cut_short_is_refused_wherever_it_is_cut(path: Path, length: int) -> None:
    path.write_bytes(SAVED[:length])
    with pytest.raises(CheckpointError, match=r"step 20\.pt is no file of torch.save, or cut"):
        load_checkpoint(path)


@given(st.integers(WHERE, WHERE + NUMBERS.nbytes - 1), st.integers(0, 7))
def test_a_flipped_bit_of_a_number_is_refused(path: Path, at: int, bit: int) -> None:
    """`torch.load` takes it without a word."""
    path.write_bytes(with_flipped_bit(at, bit))
    assert not alike(torch.load(path), STATE)
    with pytest.raises(CheckpointError, match=r"step 20\.pt is no .*the entry '.*/data/0'"):
        load_checkpoint(path)


def with_flipped_bit(at: int, bit: int) -> bytes:
    data = bytearray(SAVED)
    data[at] ^= 1 << bit
    return bytes(data)


def test_a_flipped_bit_in_the_directory_never_gives_other_numbers(path: Path) -> None:
    """Each bit of the header of the numbers' entry, and of the end records."""
    with zipfile.ZipFile(io.BytesIO(SAVED)) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data/0")).encode()
        start = SAVED.index(name, archive.start_dir) - HEADER_BYTES
    end = SAVED.index(b"PK\x06\x06")
    attribute = start + 38
    path.write_bytes(with_flipped_bit(attribute, 4))
    assert not alike(torch.load(path), STATE), "torch.load leaves memory as it is"
    refused = 0
    for at in (*range(start, start + HEADER_BYTES), *range(end, len(SAVED))):
        for bit in range(8):
            path.write_bytes(with_flipped_bit(at, bit))
            try:
                assert alike(load_checkpoint(path), STATE)
            except CheckpointError:
                refused += 1
    assert refused > 600


def foreign() -> dict[str, tuple[bytes, str]]:
    archive, old, classes = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a/b.txt", "text")
    torch.save(STATE, old, _use_new_zipfile_serialization=False)
    torch.save({"a": pickle.PicklingError("not a number")}, classes)
    return {
        "nothing": (b"", "is no file of torch.save"),
        "text": (b"epoch,loss\n1,0.5\n", "is no file of torch.save"),
        "another archive": (archive.getvalue(), "is no file of torch.save"),
        "a file of old": (old.getvalue(), "is no file of torch.save"),
        "classes": (classes.getvalue(), "cannot be loaded: Weights only"),
    }


@pytest.mark.parametrize("kind", foreign())
def test_what_is_no_checkpoint_is_refused_by_name(path: Path, kind: str) -> None:
    content, what = foreign()[kind]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"step 20\.pt {what}"):
        load_checkpoint(path)


def test_a_file_can_be_checked_where_torch_saves_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(STATE, tmp_path / "step.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(load_checkpoint(tmp_path / "step.pt")["w"], NUMBERS)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    save_checkpoint(STATE, tmp_path / "a.pt")
    with pytest.raises(TypeError, match=r"a\.pt has not been written: .*neither tensors nor"):
        save_checkpoint({"rng": torch.Generator}, tmp_path / "a.pt")
    assert alike(load_checkpoint(tmp_path / "a.pt"), STATE)
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


def test_a_file_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the new one is on the disk the old one is there, whatever happens meanwhile."""
    path, order = tmp_path / "a.pt", []
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
