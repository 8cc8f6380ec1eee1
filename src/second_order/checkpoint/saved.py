"""The two parts of ``state[p]``; their entries in a checkpoint, checked before they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from second_order.distributed.fsdp import local_tensor
from second_order.errors import CheckpointError

__all__ = ["BASE", "CURVATURE", "HEADER", "BaseState", "SavedPart", "check_base_part"]

BASE = "base"
CURVATURE = "curvature"

HEADER = ("steps", "version", "base_class")
"""The entries of every ``"curvature"`` part."""


class BaseState(MutableMapping[Tensor, dict[str, Any]]):
    """A view of ``state[p]["base"]`` by parameter: the state that the base optimizer sees."""

    def __init__(self, state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        self._state = state

    def __getitem__(self, p: Tensor) -> dict[str, Any]:
        part: dict[str, Any] = self._state[p].setdefault(BASE, {})
        return part

    def __setitem__(self, p: Tensor, value: dict[str, Any]) -> None:
        self._state[p][BASE] = value

    def __delitem__(self, p: Tensor) -> None:
        del self._state[p][BASE]

    def __iter__(self) -> Iterator[Tensor]:
        return (p for p, parts in self._state.items() if BASE in parts)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, p: object) -> bool:
        return p in self._state and BASE in self._state[p]  # type: ignore[index]


class SavedPart(dict[str, Any]):
    """A checkpoint's entries for a parameter, by name, in its part "base" or "curvature"."""

    def __init__(self, key: Any, part: str, name: str, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._key = key
        self._part = part
        self._name = name

    def with_entries(self, entries: dict[str, Any]) -> SavedPart:
        """The part of the same parameter with other entries."""
        return SavedPart(self._key, self._part, self._name, entries)

    def with_entry(self, key: str, value: Any) -> SavedPart:
        """A copy with another value of an entry."""
        return self.with_entries({**self, key: value})

    def wrong(self, key: str, what: str) -> CheckpointError:
        """The error for an entry, with what is wrong."""
        return CheckpointError(
            f"the checkpoint's state[{self._key!r}][{self._part!r}][{key!r}], of parameter "
            f"{self._name!r}, {what}; nothing has been loaded"
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
        """The tensor of an entry, or its rows here, checked to be finite, and of a shape."""
        value = self[key]
        if not isinstance(value, Tensor):
            raise self.wrong(key, f"is of type {type(value).__name__}, not a tensor")
        if shape is not None and tuple(value.shape) != shape:
            raise self.wrong(key, f"has the shape {tuple(value.shape)}, where {shape} is needed")
        if not bool(torch.isfinite(local_tensor(value)).all()):
            raise self.wrong(key, "is not finite")
        return value


def check_base_part(part: SavedPart, base: torch.optim.Optimizer, p: Tensor) -> None:
    """Raise ValueError unless the base's tensors for a parameter are finite, and of its shape.

    The tensors of torch's optimizers have the parameter's shape, or 1 instead of some dimensions,
    as Adafactor's factors, or are one number. Other bases store what they like.
    """
    of_torch = getattr(torch.optim, type(base).__name__, None) is type(base)
    for key, value in part.items() if of_torch else ():
        if not isinstance(value, Tensor):
            continue
        fits = len(value.shape) == len(p.shape) and all(
            n in (1, m) for n, m in zip(value.shape, p.shape, strict=True)
        )
        if value.dim() and not fits:
            raise part.wrong(
                key, f"has the shape {tuple(value.shape)}, where {tuple(p.shape)} is needed"
            )
        part.tensor(key)
