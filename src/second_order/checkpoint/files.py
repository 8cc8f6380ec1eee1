"""Write checkpoints and safetensors files atomically: completely or not at all."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from second_order.errors import CheckpointError

__all__ = [
    "load_checkpoint",
    "load_tensors",
    "replacing",
    "save_checkpoint",
    "save_tensors",
]

PATH_ERRORS = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)

ZIP_START = b"PK\x03\x04"  # the first bytes of a file of torch.save


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file, and rename it to ``path`` when the block ends.

    If the block raises an exception, ``path`` does not change. A killed process can
    leave a hidden file ``.NAME.PROCESS.partial``.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def save_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a state to a file atomically.

        optimizer.consolidate(to=0)  # on every rank
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(state, path)

    Args:
        state: Tensors and primitives, in dictionaries, lists and tuples.
        path: The file. An existing file is replaced, unless an error is raised.

    Raises:
        TypeError: ``state`` has an object that :func:`load_checkpoint` cannot load.
    """
    with replacing(Path(path)) as file:
        torch.save(state, file.name)  # four times as fast as with the file object
        try:
            torch.load(file.name, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{path} was not written: the state has objects that are neither tensors nor "
                f"primitives; save their numbers instead: {error}"
            ) from error


def load_checkpoint(
    path: str | os.PathLike[str], map_location: torch.device | str = "cpu"
) -> Any:
    """Load a file that :func:`save_checkpoint` wrote, with ``weights_only=True``.

    Args:
        path: The file.
        map_location: The device of the tensors.

    Raises:
        CheckpointError: The file is truncated or cannot be read, ``torch.save`` did not
            write it, or it has other objects than tensors and primitives.
        OSError: The path is wrong: FileNotFoundError, IsADirectoryError,
            NotADirectoryError or PermissionError.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except PATH_ERRORS:
        raise
    except Exception as error:
        if _is_readable(path):
            raise  # the file is valid: the device is missing or has too little memory
        raise CheckpointError(f"{path} cannot be loaded: {_damage(path)}") from error


def _is_readable(path: str | os.PathLike[str]) -> bool:
    """Whether a file can be loaded on the CPU, without reading its tensors."""
    try:
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:
        return False
    return True


def _damage(path: str | os.PathLike[str]) -> str:
    """Describe why a file cannot be loaded, and the remedy.

    The messages of ``torch.load`` recommend ``weights_only=False``.
    """
    remedy = "load an older checkpoint, or copy this one again"
    with Path(path).open("rb") as file:
        start = file.read(len(ZIP_START))
    if not start:
        return f"it is empty; {remedy}"
    if start != ZIP_START:
        return f"it is damaged, or torch.save did not write it; {remedy}"
    if not zipfile.is_zipfile(path):
        return f"it is truncated, because the index at its end is missing; {remedy}"

    # The archive has its index: look for objects that are not safe to load.
    try:
        classes = get_unsafe_globals_in_checkpoint(path)
    except Exception:
        classes = []  # the list of its objects is damaged
    if classes:
        return (
            f"it has objects that are neither tensors nor primitives, of {', '.join(classes)}; "
            f"save their numbers instead, with save_checkpoint"
        )
    return f"it is damaged, or torch.save did not write it; {remedy}"


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file atomically. Its folder is created if necessary."""
    package = _safetensors()
    host_tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        storage = host.untyped_storage().data_ptr()
        if storage in storages:
            host = host.clone()  # the format does not support tensors that share memory
        storages.add(storage)
        host_tensors[name] = host
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        package.save_file(host_tensors, file.name)


def load_tensors(
    path: Path, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file by name, on a device or on the CPU.

    Raises:
        CheckpointError: The file is truncated or has another format.
        FileNotFoundError: The file does not exist.
    """
    package = _safetensors()
    try:
        tensors: dict[str, Tensor] = package.load_file(path, device="cpu")
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a safetensors file, or is truncated: {error}; write it again"
        ) from error
    return {name: tensor.to(device=device) for name, tensor in tensors.items()}


def _safetensors() -> Any:
    """Import ``safetensors.torch``, or raise ImportError with the remedy."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "safetensors files need the package safetensors: pip install safetensors"
        ) from error
