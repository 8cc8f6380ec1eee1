"""The form of messages, and checks of a whole message before any of it is used.

A message is a list of tensors and a note of primitives. It travels as a heading in JSON, which says
of what dtypes and shapes the tensors are, and their bytes in parts.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.store import PART_BYTES

__all__ = [
    "Heading",
    "MalformedError",
    "Message",
    "as_refused",
    "describe",
    "parts_of",
    "read_heading",
    "refused_line",
    "require_form",
    "tensor_of",
]

Message: TypeAlias = tuple[list[Tensor], dict[str, Any]]

REFUSED = "refused"
MOST_DIMENSIONS = 64  # torch's own bound
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "torch.q" not in str(dtype)
}


class MalformedError(Exception):
    """Raised for a message of the wrong form; the text says what is wrong."""


@dataclass(frozen=True)
class Heading:
    """The heading of a message, which lists its contents.

    Attributes:
        forms: Dtype and shape of each tensor.
        note: The message's note, of primitives.
    """

    forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]
    note: dict[str, Any]

    @property
    def sizes(self) -> list[list[int]]:
        """Number of bytes of each part of each tensor."""
        totals = [math.prod(shape) * dtype.itemsize for dtype, shape in self.forms]
        return [
            [min(PART_BYTES, total - start) for start in range(0, total, PART_BYTES)]
            for total in totals
        ]

    @property
    def parts(self) -> int:
        """Number of parts, computed without a list of them: they may be absurdly many."""
        totals = [math.prod(shape) * dtype.itemsize for dtype, shape in self.forms]
        return sum(-(-total // PART_BYTES) for total in totals)


def describe(tensors: Sequence[Tensor], note: Mapping[str, Any]) -> bytes:
    """The heading of a message, as bytes of JSON."""
    forms = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
    return json.dumps({"tensors": forms, "note": note}).encode()


def parts_of(tensor: Tensor) -> Iterator[bytes]:
    """Yield the bytes of a contiguous tensor on the CPU, in parts."""
    for start in range(0, tensor.nbytes, PART_BYTES):
        size = min(PART_BYTES, tensor.nbytes - start)
        yield ctypes.string_at(tensor.data_ptr() + start, size)


def read_heading(raw: bytes, parts: int) -> Heading:
    """Read a heading, and check it.

    Args:
        raw: The heading's bytes.
        parts: Number of parts that have come with the heading.

    Raises:
        MalformedError: If ``raw`` is no heading, or lists another number of parts.
    """
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"its heading cannot be read: {error}") from None
    if not isinstance(said, dict) or set(said) != {"tensors", "note"}:
        raise MalformedError("its heading does not have 'tensors' and 'note'")
    if not isinstance(said["tensors"], list) or not isinstance(said["note"], dict):
        raise MalformedError("its heading's 'tensors' is no list, or its 'note' no dictionary")
    heading = Heading([_form(each) for each in said["tensors"]], said["note"])
    if heading.parts != parts:
        raise MalformedError(f"its heading tells of {heading.parts} parts, and {parts} have come")
    return heading


def _form(said: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if not isinstance(said, list) or len(said) != 2:
        raise MalformedError("its heading does not give a dtype and a shape for each tensor")
    name, shape = said
    if not isinstance(name, str) or name not in DTYPES:
        raise MalformedError(f"its heading has an unknown dtype, {str(name)[:40]!r}")
    whole = is_of(shape, [int]) and len(shape) <= MOST_DIMENSIONS
    if not whole or any(not 0 <= size < 2**62 for size in shape):
        raise MalformedError(f"its heading has a shape that is none, {str(shape)[:40]}")
    return DTYPES[name], tuple(shape)


def tensor_of(content: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Make a tensor on the memory of some bytes.

    Raises:
        MalformedError: If there are more or fewer bytes than the shape takes.
    """
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise MalformedError(f"a tensor of {dtype} of shape {list(shape)} has {len(content)} bytes")
    try:
        if not content:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(tuple(shape))
    except (RuntimeError, ValueError, TypeError) as error:
        raise MalformedError(
            f"there is no tensor of {dtype} of shape {list(shape)}: {error}"
        ) from None


def as_refused(reason: str) -> Message:
    """The message that is delivered in place of one that could not be read."""
    return [], {REFUSED: reason}


def refused_line(complaint: str) -> str:
    """The warning that a message or a connection has been refused.

    Args:
        complaint: The first refused message, and why; "" if it was a connection.
    """
    what = complaint or "a connection that did not know the key, or spoke another language"
    return f"refused: {what}; training goes on, and refused_messages counts what else is refused"


def require_form(note: Mapping[str, Any], **forms: Any) -> None:
    """Check the entries of a note.

    Args:
        note: The note of a message.
        **forms: Form of each entry: a type, or ``[form]`` for a list of it, or ``{str: form}``.

    Raises:
        MalformedError: If an entry is missing or of another type, or the message unreadable.
    """
    if REFUSED in note:
        raise MalformedError(str(note[REFUSED]))
    for name, form in forms.items():
        if name not in note:
            raise MalformedError(f"its note lacks {name!r}")
        if not is_of(note[name], form):
            raise MalformedError(f"its note's {name!r} is {str(note[name])[:40]!r}")


def is_of(value: Any, form: Any) -> bool:
    """Whether a value is of a form; see :func:`require_form`."""
    if isinstance(form, list):
        return isinstance(value, list) and all(is_of(each, form[0]) for each in value)
    if isinstance(form, dict):
        (inner,) = form.values()
        return isinstance(value, dict) and all(is_of(each, inner) for each in value.values())
    if form is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, form)
