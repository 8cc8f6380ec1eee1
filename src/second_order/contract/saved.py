"""Entries of a checkpoint, checked before anything is loaded; an error names the entry."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SavedPart", "unusual"]


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
        self._name, self._where = name, f"state[{key!r}][{part!r}]"

    def wrong(self, key: str, what: str) -> ValueError:
        """The error for an entry, with what is wrong."""
        return ValueError(
            f"the checkpoint's {self._where}[{key!r}], of parameter {self._name!r}, {what}; "
            f"nothing has been loaded"
        )

    def check_known(self, known: Iterable[str]) -> None:
        """Raise ValueError if an entry has none of the known names."""
        for key in self.keys() - set(known):
            raise self.wrong(
                key,
                "is not known here: it is of another optimizer's checkpoint, perhaps; "
                "export_base_state(checkpoint) gives the base's part of any",
            )

    def require(self, keys: Iterable[str]) -> None:
        """Raise ValueError if one of these entries is missing."""
        for key in keys:
            if key not in self:
                raise self.wrong(key, "is missing")

    def whole(self, key: str, low: int, high: int = 2**53) -> int:
        """The whole number of an entry, checked to lie between bounds."""
        value = self[key]
        if not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"is {value!r}, and no whole number in [{low}, {high}]")
        return value

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """The number of an entry, or in its tensor, checked to be finite and between bounds."""
        value = self[key]
        if isinstance(value, Tensor):
            value = self.tensor(key, ()).item()
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, f"is {value!r}, and no finite number")
        if not low <= value <= high:
            raise self.wrong(key, f"is {value:g}, outside [{low:g}, {high:g}]")
        return float(value)

    def tensor(self, key: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor of an entry, checked to be finite, and of a shape."""
        value = self[key]
        if not isinstance(value, Tensor):
            raise self.wrong(key, f"is of type {type(value).__name__}, not a tensor")
        if problem := unusual(value):
            raise self.wrong(key, problem)
        if shape is not None and tuple(value.shape) != shape:
            raise self.wrong(key, f"has the shape {tuple(value.shape)}, where {shape} is needed")
        if not bool(torch.isfinite(value).all()):
            raise self.wrong(key, "is not finite")
        return value


def unusual(value: Tensor) -> str:
    """Why the numbers of a tensor cannot be read; "" if they can."""
    if value.is_nested or value.layout != torch.strided:
        return "is a sparse or nested tensor, not a dense one"
    if type(value).__name__ == "DTensor":
        return "is a DTensor; collect it by full_tensor()"
    return "is on the meta device, and has no numbers" if value.is_meta else ""
