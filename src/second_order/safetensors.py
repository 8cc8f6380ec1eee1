"""The safetensors format, of torch alone.

    8 bytes        N, little-endian
    N bytes        JSON, padded with spaces: {name: {"dtype", "shape", "data_offsets"}}, and
                   {"__metadata__": {text: text}}
    the rest       the tensors' elements, without gaps, little-endian; offsets begin here

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from second_order.errors import CheckpointError
from second_order.files import replacing

__all__ = ["load_tensors", "save_tensors"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA, LONGEST_HEADER = "__metadata__", 100_000_000


def save_tensors(
    tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file that is there as a whole or not at all.

    Raises:
        ValueError: For a tensor of a dtype that the format has not, or of a name of its own.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or name == METADATA:
            raise ValueError(
                f"{path} has not been written: the format has no {name!r} of {tensor.dtype}; it "
                f"has {', '.join(str(d).removeprefix('torch.') for d in NAMES)}"
            )
    # Elements of more bytes come first, so that each tensor begins at a multiple of its own.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    with replacing(Path(path)) as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for name in order:
            here = tensors[name].detach().cpu().contiguous().resolve_conj().resolve_neg()
            if here.numel():
                elements = ctypes.c_char * (here.numel() * here.itemsize)
                file.write(elements.from_address(here.data_ptr()))


def load_tensors(
    path: str | Path, device: torch.device | str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata.

    Args:
        path: The file.
        device: Device of the tensors. None: the CPU, and a tensor's elements are read from the file
            when they are used, which is not to be cut short meanwhile; what is written into such a
            tensor does not reach the file.

    Raises:
        CheckpointError: If the file is cut short or spoilt, or of another format; with its name.
        FileNotFoundError: If there is no such file.
    """
    path = Path(path)
    size = path.stat().st_size
    try:
        header, start = _header(path, size)
        metadata = header.pop(METADATA, {})
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise ValueError("its metadata are not texts")
        spans = {name: _span(name, entry) for name, entry in header.items()}
        _check_spans([span for _, _, span in spans.values()], size - start)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or cut short or spoilt: {error}; write it anew"
        ) from error
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    found = {}
    for name, (dtype, shape, (first, last)) in spans.items():
        data = whole[start + first : start + last]
        aligned = (start + first) % dtype.itemsize == 0
        tensor = (data if aligned else data.clone()).view(dtype).view(shape)
        found[name] = tensor if device is None else tensor.to(device, copy=True)
    return found, dict(metadata)


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{size} bytes do not hold a header of {length}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    return header, 8 + length


def _span(name: str, entry: Mapping[str, Any]) -> tuple[torch.dtype, list[int], tuple[int, int]]:
    """Dtype, shape, and first and last offset of a tensor."""
    dtype, shape, (first, last) = DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise ValueError(f"{name!r} has the unknown dtype {entry['dtype']!r}")
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError(f"{name!r} has the shape {shape} at {first} to {last}")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} of shape {shape} has {last - first} bytes")
    return dtype, shape, (first, last)


def _check_spans(spans: list[tuple[int, int]], size: int) -> None:
    """Raise ValueError unless the spans fill the data without gaps."""
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ValueError(f"a tensor begins at {first}, and {end} bytes come before")
        end = last
    if end != size:
        raise ValueError(f"it has {size} bytes of tensors, and is to have {end}")
