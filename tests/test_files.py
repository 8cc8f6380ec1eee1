"""Files exist as a whole or not at all, and those that cannot be read are named."""

from __future__ import annotations

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
from optimizer_cases import make
from saved_states import MLP, are_equal, train

from second_order import KAISA, CheckpointError, load_checkpoint, save_checkpoint
from second_order.checkpoint.files import load_tensors, replacing, save_tensors

if TYPE_CHECKING:
    from pathlib import Path

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


def test_a_training_goes_through_a_file(tmp_path: Path) -> None:
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


@given(st.integers(0, len(SAVED) - 1))
def test_a_file_that_is_cut_short_is_refused_wherever_it_is_cut(path: Path, length: int) -> None:
    path.write_bytes(SAVED[:length])
    with pytest.raises(CheckpointError, match=r"step 20\.pt cannot be loaded"):
        load_checkpoint(path)


def foreign() -> dict[str, tuple[bytes, str]]:
    archive = io.BytesIO()
    classes = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a/b.txt", "text")
    torch.save({"a": pickle.PicklingError("not a number")}, classes)
    return {
        "nothing": (b"", "cannot be loaded"),
        "text": (b"epoch,loss\n1,0.5\n", "cannot be loaded"),
        "another archive": (archive.getvalue(), "cannot be loaded"),
        "classes": (classes.getvalue(), "cannot be loaded: Weights only"),
    }


@pytest.mark.parametrize("kind", foreign())
def test_what_is_no_checkpoint_is_refused_by_name(path: Path, kind: str) -> None:
    content, what = foreign()[kind]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"step 20\.pt {what}"):
        load_checkpoint(path)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
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
