"""The two parts of ``state[p]``, and checks of their entries before they are loaded.

``state[p]["base"]`` is the state of the base optimizer, and ``state[p]["curvature"]``
that of the factors and inverses.
"""

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
"""The entries that every ``"curvature"`` part has."""


class BaseState(MutableMapping[Tensor, dict[str, Any]]):
    """A view of ``state[p]["base"]`` by parameter, which the base uses as its state.

    A base may also use keys other than parameters, with values of any kind.
    """

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

    # As in the defaultdict of torch, only ``state[p]`` creates an empty entry.

    def get(self, p: Tensor, default: Any = None) -> Any:
        """Return an entry, or the default if there is none."""
        if p not in self:
            return default
        return self[p]

    def setdefault(self, p: Tensor, default: Any = None) -> Any:
        """Return an entry, after setting it to the default if there is none."""
        if p not in self:
            self[p] = default
        return self[p]

    def pop(self, p: Tensor, *default: Any) -> Any:
        """Remove and return an entry, or return the default if there is none."""
        if p in self:
            return self._state[p].pop(BASE)
        if not default:
            raise KeyError(p)
        return default[0]


class SavedPart(dict[str, Any]):
    """One part, "base" or "curvature", of a parameter's state in a checkpoint."""

    def __init__(self, key: Any, part: str, name: str, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._key = key
        self._part = part
        self._name = name

    def wrong(self, key: str, what: str) -> CheckpointError:
        """Return the error for an entry.

        ``what`` completes the sentence that names it.
        """
        return CheckpointError(
            f"the checkpoint's state[{self._key!r}][{self._part!r}][{key!r}], of parameter "
            f"{self._name!r}, {what}; nothing was loaded"
        )

    def check_known(self, known: Iterable[str]) -> None:
        """Raise CheckpointError if an entry has an unknown name."""
        for key in self.keys() - set(known):
            raise self.wrong(
                key,
                "is unknown: the checkpoint may be that of another optimizer; "
                "export_base_state(checkpoint) returns the base optimizer's part of any checkpoint",
            )

    def require(self, keys: Iterable[str]) -> None:
        """Raise CheckpointError if one of these entries is missing."""
        for key in keys:
            if key not in self:
                raise self.wrong(key, "is missing")

    def whole(self, key: str, low: int, high: int = 2**53) -> int:
        """Return the integer of an entry, after checking that it is within bounds."""
        value = self[key]
        if not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(
                key, f"is {value!r}, which is not an integer in [{low}, {high}]"
            )
        return value

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Return the number of an entry, after a check that it is finite and in bounds.

        The entry can also be a tensor with one element.
        """
        value = self[key]
        if isinstance(value, Tensor):
            value = self.tensor(key, ()).item()
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, f"is {value!r}, which is not a finite number")
        if not low <= value <= high:
            raise self.wrong(key, f"is {value:g}, outside [{low:g}, {high:g}]")
        return float(value)

    def tensor(self, key: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the tensor of an entry, after a check that it is finite and fits.

        If the tensor is sharded, only the local rows are checked.
        """
        value = self[key]
        if not isinstance(value, Tensor):
            raise self.wrong(key, f"is of type {type(value).__name__}, not a tensor")
        if shape is not None and tuple(value.shape) != shape:
            raise self.wrong(
                key, f"has the shape {tuple(value.shape)}, where {shape} is needed"
            )
        if not bool(torch.isfinite(local_tensor(value)).all()):
            raise self.wrong(key, "is not finite")
        return value


def check_base_part(part: SavedPart, base: torch.optim.Optimizer, p: Tensor) -> None:
    """Raise CheckpointError if the base optimizer's state for a parameter is wrong.

    In the state of torch's optimizers, a tensor is finite, and it is a scalar or has
    the parameter's shape, with 1 in place of some dimensions in Adafactor's factors.
    Other bases are not checked.
    """
    is_from_torch = getattr(torch.optim, type(base).__name__, None) is type(base)
    if not is_from_torch:
        return
    for key, value in part.items():
        if not isinstance(value, Tensor):
            continue
        # A dimension of 1 is one that Adafactor has averaged over.
        same_dim = value.dim() == p.dim()
        fits = same_dim and all(
            n in (1, m) for n, m in zip(value.shape, p.shape, strict=True)
        )
        if value.dim() > 0 and not fits:
            raise part.wrong(
                key,
                f"has the shape {tuple(value.shape)}, where {tuple(p.shape)} is needed",
            )
        part.tensor(key)
