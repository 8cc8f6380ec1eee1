"""The base's state, in ``state[p]["base"]``, beside the wrapper's own entries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["BASE", "CURVATURE", "BaseState"]

State: TypeAlias = defaultdict[Tensor, dict[str, Any]]

BASE, CURVATURE = "base", "curvature"


class BaseState(MutableMapping[Tensor, dict[str, Any]]):
    """A view of ``state[p]["base"]`` by parameter: the state that the base optimizer sees."""

    def __init__(self, state: State) -> None:
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
