"""Files that are there as a whole or not at all, and checkpoints that are told from spoilt ones.

A checkpoint's file is what ``torch.save`` writes, a zip archive with a CRC-32 of each entry.
``torch.load`` compares none of them: numbers of which a bit has flipped are loaded as they are.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from second_order.errors import CheckpointError

__all__ = ["load_checkpoint", "replacing", "save_checkpoint"]

# Bit 3: sizes also follow the data. Bit 11: the name is in UTF-8.
PLAIN_FLAGS = 1 << 3 | 1 << 11


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing, beside ``path``, that is renamed to it once all is on the disk.

    Where the block raises, nothing has changed. A process that is killed may leave a hidden file
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
    """Write a state to a file that is there as a whole or not at all.

        optimizer.consolidate(to=0)  # every process
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(state, path)

    Args:
        state: Tensors and primitives, in dictionaries, lists and tuples.
        path: The file; one that is there is replaced, unless an error is raised.

    Raises:
        TypeError: If ``state`` has something that :func:`load_checkpoint` would not read.
    """
    with replacing(Path(path)) as file:
        crc = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(True)  # load_checkpoint compares them
        try:
            torch.save(state, file.name)  # by name it takes a quarter of the time
        finally:
            torch.serialization.set_crc32_options(crc)
        try:
            torch.load(file.name, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{path} has not been written: the state has objects that are neither tensors nor "
                f"primitives; save their numbers instead: {error}"
            ) from error


def _check_directory(archive: zipfile.ZipFile) -> None:
    """Raise BadZipFile unless every entry is a plain file, as ``torch.save`` writes them.

    ``torch.load`` leaves a tensor's memory as it is if the entry claims to be a folder.
    """
    for entry in archive.infolist():
        claims = {
            "attributes": entry.external_attr | entry.internal_attr,
            "compression": entry.compress_type,
            "disk": entry.volume,
            "flags": entry.flag_bits & ~PLAIN_FLAGS,
            "a size of its compressed data": entry.compress_size - entry.file_size,
        }
        for claim, value in claims.items():
            if value:
                raise zipfile.BadZipFile(
                    f"the entry {entry.filename!r} claims to have {claim} ({value}), which "
                    f"torch.save does not write"
                )


def load_checkpoint(path: str | os.PathLike[str], map_location: torch.device | str = "cpu") -> Any:
    """Read what :func:`save_checkpoint`, or ``torch.save``, has written, and check all of it.

    Only tensors and primitives are read (``weights_only``).

    Args:
        path: The file.
        map_location: Device that tensors are put on.

    Raises:
        CheckpointError: If the file is cut short, spoilt, or none of ``torch.save``; with its name.
        FileNotFoundError: If there is no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_directory(archive)
            spoilt = archive.testzip()
        if spoilt is not None:
            raise zipfile.BadZipFile(f"the entry {spoilt!r} has another CRC-32")
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # a spoilt directory makes it raise many kinds
        raise CheckpointError(
            f"{path} is no file of torch.save, or cut short or spoilt ({error}); take an older one"
        ) from error
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
