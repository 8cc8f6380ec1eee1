"""Files that exist as a whole or not at all: checkpoints, and tensors in the safetensors format."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from second_order.errors import CheckpointError

__all__ = ["load_checkpoint", "load_tensors", "replacing", "save_checkpoint", "save_tensors"]


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that is renamed to ``path`` once everything is on the disk.

    If the block raises, nothing has changed. A process that is killed may leave a hidden file
    ``.NAME.PROCESS.partial``.
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
    """Write a state to a file that exists as a whole or not at all.

        optimizer.consolidate(to=0)  # every process
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(state, path)

    Args:
        state: Tensors and primitives, in dictionaries, lists and tuples.
        path: The file. An existing one is replaced, unless an error is raised.

    Raises:
        TypeError: If ``state`` contains something that :func:`load_checkpoint` would not read.
    """
    with replacing(Path(path)) as file:
        torch.save(state, file.name)  # by name it takes a quarter of the time
        try:
            torch.load(file.name, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{path} has not been written: the state has objects that are neither tensors nor "
                f"primitives; save their numbers instead: {error}"
            ) from error


def load_checkpoint(path: str | os.PathLike[str], map_location: torch.device | str = "cpu") -> Any:
    """Read tensors and primitives (``weights_only``) that :func:`save_checkpoint` has written.

    Args:
        path: The file.
        map_location: The device of the tensors.

    Raises:
        CheckpointError: If the file is cut short, or not one of ``torch.save``; with its name.
        FileNotFoundError: If the file does not exist.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}; use an older one") from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that exists as a whole or not at all; makes its folder."""
    package = _safetensors()
    whole: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        storage = host.untyped_storage().data_ptr()
        # The format refuses tensors that share memory.
        whole[name] = host.clone() if storage in storages else host
        storages.add(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        package.save_file(whole, file.name)


def load_tensors(path: Path, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, on a device, or on the CPU.

    Raises:
        CheckpointError: If the file is cut short or has another format; with its name.
        FileNotFoundError: If the file does not exist.
    """
    package = _safetensors()
    try:
        tensors: dict[str, Tensor] = package.load_file(path, device=str(device or "cpu"))
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a safetensors file, or cut short: {error}; write it again"
        ) from error
    return tensors


def _safetensors() -> Any:
    """The package ``safetensors.torch``; raises ImportError with the remedy."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "safetensors files need the package safetensors: pip install safetensors"
        ) from error
