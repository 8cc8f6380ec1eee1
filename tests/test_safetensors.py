"""The safetensors format: files that the package of that name reads and writes, and bad ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from second_order import CheckpointError
from second_order.safetensors import DTYPES, load_tensors, save_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

theirs = pytest.importorskip("safetensors.torch")

sizes = st.lists(st.integers(0, 5), max_size=3)
contents = st.dictionaries(
    st.text(max_size=8), st.tuples(st.sampled_from(sorted(DTYPES)), sizes, st.integers(0, 9))
)


def made(dtype: str, size: list[int], seed: int) -> Tensor:
    """Any bits, but booleans of one; sometimes transposed."""
    generator = torch.Generator().manual_seed(seed)
    item = DTYPES[dtype].itemsize
    bits = torch.randint(2 if dtype == "BOOL" else 256, (*size, item), generator=generator)
    whole = bits.to(torch.uint8).contiguous().view(DTYPES[dtype]).view(size)
    return whole.mT if seed % 2 and len(size) > 1 else whole


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit, as NaN is not equal to itself."""
    return found.keys() == expected.keys() and all(
        (t.dtype, t.shape) == (expected[k].dtype, expected[k].shape)
        and bytes_of(t) == bytes_of(expected[k])
        for k, t in found.items()
    )


def bytes_of(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@given(contents, st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
def test_both_packages_read_what_both_write(
    tmp_path_factory: Any, content: dict[str, Any], metadata: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("files") / "it.safetensors"
    tensors = {name: made(*each) for name, each in content.items()}
    save_tensors(tensors, path, metadata)
    assert same(theirs.load_file(path), tensors)
    found, said = load_tensors(path)
    assert same(found, tensors)
    assert said == metadata
    theirs.save_file({k: t.contiguous() for k, t in tensors.items()}, path, metadata or None)
    assert same(load_tensors(path)[0], tensors)


def test_what_is_written_into_a_loaded_tensor_is_in_no_file(tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    save_tensors({"x": torch.ones(3)}, path)
    for device in (None, "cpu"):
        load_tensors(path, device)[0]["x"].zero_()
    assert load_tensors(path)[0]["x"].tolist() == [1.0, 1.0, 1.0]
    copied = load_tensors(path, "cpu")[0]["x"]
    save_tensors({"x": torch.zeros(3)}, path)
    assert copied.tolist() == [1.0, 1.0, 1.0]


def written(path: Path, header: Any, data: bytes) -> Path:
    said = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(said).to_bytes(8, "little") + said + data)
    return path


def test_a_tensor_may_begin_anywhere(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [1, 5]},
    }
    data = b"\x07" + bytes(torch.tensor([2.5]).view(torch.uint8).tolist())
    found, _ = load_tensors(written(tmp_path / "it", header, data))
    assert (found["a"].tolist(), found["b"].item()) == ([7], 2.5)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (entry(), b"1234", "it has 4 bytes of tensors, and is to have 8"),
        (entry(), b"123456789", "it has 9 bytes of tensors"),
        (entry("F3"), b"12345678", "unknown dtype 'F3'"),
        (entry(shape=[3]), b"12345678", r"'x' of shape \[3\] has 8 bytes"),
        (entry(shape=[-2]), b"12345678", r"'x' has the shape \[-2\]"),
        (entry(shape=[2.0]), b"12345678", r"'x' has the shape \[2.0\]"),
        (entry(offsets=(1, 9)), b"123456789", "a tensor begins at 1, and 0 bytes come before"),
        ({**entry(), "y": entry()["x"]}, b"12345678", "begins at 0, and 8 bytes come before"),
        ({"x": {"dtype": "F32", "shape": [2]}}, b"12345678", "data_offsets"),
        ({**entry(), "__metadata__": {"a": 1}}, b"12345678", "metadata are not texts"),
        ([1], b"", "its header is no table"),
        (b"{", b"", "cut short or spoilt"),
        (b"\xff\xfe", b"", "cut short or spoilt"),
    ],
)
def test_bad_files_are_refused_by_name(
    tmp_path: Path, header: Any, data: bytes, message: str
) -> None:
    path = written(tmp_path / "bad", header, data)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_tensors(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\x10" + b"\0" * 7 + b"{}"])
def test_a_header_that_is_longer_than_its_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="do not hold a header"):
        load_tensors(path)


def test_what_the_format_has_not_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_text("before")
    with pytest.raises(ValueError, match=r"no 'x' of torch.complex128; it has bool, uint8"):
        save_tensors({"x": torch.ones(1, dtype=torch.complex128)}, path)
    with pytest.raises(ValueError, match="no '__metadata__'"):
        save_tensors({"__metadata__": torch.ones(1)}, path)
    assert path.read_text() == "before"
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "none")
