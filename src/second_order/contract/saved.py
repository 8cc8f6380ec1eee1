"""Entries of a checkpoint, checked before anything is loaded; an error names the entry."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from second_order.sharded import is_dtensor, local

__all__ = ["COUNTABLE", "SavedPart", "is_real", "is_whole", "kind_of", "out_of_bounds", "unusual"]


LARGEST = 2**63 - 1
"""That a tensor can hold."""

COUNTABLE = 2.0**53
"""To which a float64 can count."""

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHOWN = 60  # most characters of a text that an error shows


class SavedPart(dict[str, Any]):
    """A checkpoint's entries for a parameter, in one of its two parts.

    Args:
        key: The parameter's key in the checkpoint.
        part: "base" or "curvature".
        name: The parameter's name, for errors.
        entries: The saved entries, by name.
    """

    def __init__(self, key: Any, part: str, name: str, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._key, self._part, self._name = key, part, name
        self._where = f"state[{key!r}][{part!r}]"

    def here(self, p: Tensor) -> SavedPart:
        """The entries with the rows that are here, of those that are sharded as a parameter is."""
        if not is_dtensor(p):
            return self
        found = {
            key: local(value) if is_dtensor(value) and value.shape == p.shape else value
            for key, value in self.items()
        }
        return SavedPart(self._key, self._part, self._name, found)

    def wrong(self, key: str, what: str) -> ValueError:
        """The error for an entry, with what is wrong."""
        return ValueError(
            f"the checkpoint's {self._where}[{key!r}], of parameter {self._name!r}, {what}; "
            f"nothing has been loaded"
        )

    def check_known(self, known: Iterable[str], remedy: str) -> None:
        """Raise ValueError if an entry has none of the known names."""
        for key in self:
            if key not in known:
                raise self.wrong(key, f"is not known here: {remedy}")

    def require(self, keys: Iterable[str]) -> None:
        """Raise ValueError if one of these entries is missing."""
        for key in keys:
            if key not in self:
                raise self.wrong(key, "is missing")

    def whole(self, key: str, low: int, high: int = LARGEST) -> int:
        """The whole number of an entry, checked to lie between bounds."""
        value = self[key]
        if not is_whole(value):
            raise self.wrong(key, f"is {kind_of(value)}, not a whole number")
        if not low <= value <= high:
            raise self.wrong(key, f"is {kind_of(value)}, outside [{low}, {high}]")
        return int(value)

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """The number of an entry, or in its tensor, checked to lie between bounds.

        Args:
            key: Name of the entry.
            low: Lower bound.
            high: Upper bound; ``math.inf`` allows any finite number.
        """
        value = self[key]
        if isinstance(value, Tensor):
            self._check_usual(key, value)
            if value.dim() == 0:
                value = value.item()
        if not is_real(value):
            raise self.wrong(key, f"is {kind_of(value)}, not a number")
        problem = out_of_bounds(value, low, high)
        if problem:
            raise self.wrong(key, problem)
        return float(value)

    def tensor(
        self, key: str, shape: tuple[int, ...] | None = None, complex_too: bool = False
    ) -> Tensor:
        """The tensor of an entry, checked to be finite, and real or complex, and of a shape."""
        value = self[key]
        if not isinstance(value, Tensor):
            raise self.wrong(key, f"is {kind_of(value)}, not a tensor")
        self._check_usual(key, value)
        if shape is not None and tuple(value.shape) != shape:
            raise self.wrong(key, f"has the shape {tuple(value.shape)}, where {shape} is needed")
        if not (value.is_floating_point() or (complex_too and value.is_complex())):
            raise self.wrong(key, f"is of {value.dtype}, and not of a floating type")
        if not bool(torch.isfinite(value).all()):
            raise self.wrong(key, "is not finite")
        return value

    def _check_usual(self, key: str, value: Tensor) -> None:
        problem = unusual(value)
        if problem:
            raise self.wrong(key, problem)

    def not_below(self, key: str, low: float, values: Tensor) -> None:
        """Raise ValueError if any of the values of an entry is below a bound."""
        if not values.is_complex() and bool((values < low).any()):
            raise self.wrong(key, f"has {float(values.min()):g}, which is below {low:g}")


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether a value is a number, be it infinite."""
    return is_whole(value) or isinstance(value, float)


def out_of_bounds(value: float, low: float, high: float) -> str:
    """The fault of a number that is to be finite and between bounds; "" if it has none."""
    if is_whole(value) and abs(value) > LARGEST:  # ints may exceed float, and text
        return f"is {kind_of(value)}"
    if not math.isfinite(value):
        return f"is {value}, which is not finite"
    return "" if low <= value <= high else f"is {value:g}, outside [{low:g}, {high:g}]"


def unusual(value: Tensor) -> str:
    """Why the numbers of a tensor cannot be read or written one by one; "" if they can."""
    if value.is_nested or value.layout != torch.strided:
        return "is a sparse or nested tensor, not a dense one"
    if type(value).__name__ == "DTensor":
        return "is a DTensor; collect it by full_tensor()"
    if value.is_floating_point() and value.dtype not in FLOATING:
        return f"is of {value.dtype}, in which nothing can be added"
    if value.is_meta:
        return "is on the meta device, and has no numbers"
    if value.is_inference():
        return "cannot be written to: load the file outside of torch.inference_mode()"
    if any(step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True)):
        return "is expanded, with one number in several places; save a clone() of it"
    return ""


def kind_of(value: Any) -> str:
    """The kind of a value in words, for errors."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    if is_whole(value) and abs(value) > LARGEST:
        return "a whole number of more than 64 bits"
    if isinstance(value, str) and len(value) > SHOWN:
        return f"{value[:SHOWN]!r}..."
    return (
        repr(value) if isinstance(value, (int, float, str)) else f"of type {type(value).__name__}"
    )
