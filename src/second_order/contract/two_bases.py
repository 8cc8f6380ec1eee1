"""Two first-order optimizers that step as one: one for hidden weights, one for the rest.

Both work on the very groups and state of the whole: a group's mark tells which of the two trains
it, and each sees its own groups and their state alone. So schedulers and checkpoints see one
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.base_step import unhooked_step
from second_order.contract.groups import NAMES
from second_order.contract.hidden import REST

__all__ = [
    "Kinds",
    "TwoBases",
    "base_of",
    "kinds_of",
    "name_of",
    "switch_of",
]

Kinds: TypeAlias = tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...]
"""The classes of a base, or of two, each with its defaults."""


class TwoBases(torch.optim.Optimizer):
    """An optimizer made of two, each of which steps its own groups.

    Its ``defaults`` are the settings that both have, with the first one's values: a scheduler that
    cycles momentum finds it there if it can cycle that of both.

    Args:
        groups: Parameter groups with marks; at least one parameter in all.
        base: Class of the optimizer for the groups whose mark is False.
        base_keywords: Arguments of ``base``.
        rest: Class of the optimizer for the other groups.
        rest_keywords: Arguments of ``rest``.

    Attributes:
        parts: The two optimizers.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        base: type[torch.optim.Optimizer],
        base_keywords: Mapping[str, Any],
        rest: type[torch.optim.Optimizer],
        rest_keywords: Mapping[str, Any],
    ) -> None:
        named = [_unzipped(group) for group in groups]
        parts: list[torch.optim.Optimizer] = []
        filled: dict[int, dict[str, Any]] = {}
        for mark, kind, keywords in ((False, base, base_keywords), (True, rest, rest_keywords)):
            mine = [i for i, group in enumerate(named) if group[REST] is mark]
            # A base may not know of names, and takes no empty list of groups.
            plain = [{k: v for k, v in named[i].items() if k != NAMES} for i in mine]
            part = kind(plain or [{"params": []}], **keywords)
            filled.update(zip(mine, part.param_groups, strict=False))
            parts.append(part)
        self.parts = (parts[0], parts[1])
        whole = [{**filled[i], **_names_in(group)} for i, group in enumerate(named)]
        super().__init__(whole, _common(*self.parts))
        for part in self.parts:
            self.state.update(part.state)

    def step(self, closure: Any = None) -> Any:
        """Let both step, each on its own groups; the closure is not called."""
        for part in self.following():
            if part.param_groups:
                unhooked_step(part)

    def of(self, group: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The optimizer that trains a group."""
        return self.parts[bool(group[REST])]

    def following(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Both optimizers, with their groups as they are now, and the state of these."""
        for mark, part in enumerate(self.parts):
            part.param_groups = [g for g in self.param_groups if g[REST] is bool(mark)]
            params = {p for group in part.param_groups for p in group["params"]}
            part.state = _PartOfState(self.state, params)  # type: ignore[assignment]
        return self.parts

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for part in self.following():
            if len(part.state):
                own = {"state": part.state, "param_groups": part.param_groups}
                part.__setstate__(own)


class _PartOfState(MutableMapping[Tensor, Any]):
    """The state of some parameters, as one of the two optimizers sees it."""

    def __init__(self, state: MutableMapping[Tensor, Any], params: set[Tensor]) -> None:
        self._whole, self._params = state, params

    def __getitem__(self, p: Tensor) -> Any:
        return self._whole[p]

    def __setitem__(self, p: Tensor, value: Any) -> None:
        self._whole[p] = value

    def __delitem__(self, p: Tensor) -> None:
        del self._whole[p]

    def __iter__(self) -> Iterator[Tensor]:
        return (p for p in self._whole if p in self._params)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, p: object) -> bool:
        return p in self._params and p in self._whole


def name_of(base: torch.optim.Optimizer) -> str:
    """The name of a base, or of two, in messages."""
    return " and ".join(kind.__name__ for kind, _ in kinds_of(base))


def base_of(base: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The base that trains a group: one of two, or the only one."""
    return base.of(group) if isinstance(base, TwoBases) else base


def switch_of(
    base: torch.optim.Optimizer, method: str, owner: str, state: MutableMapping[Tensor, Any]
) -> Callable[[], None]:
    """A base's method, or those of two bases, as one function.

    Args:
        base: The base, one or two.
        method: "train" or "eval".
        owner: Name of the optimizer that has the base, for messages.
        state: The optimizer's state. Entries that the method makes and leaves empty are taken out:
            state that is empty counts as none.

    Raises:
        AttributeError: If no base has such a method.
    """
    parts = base.following() if isinstance(base, TwoBases) else (base,)
    methods = [found for part in parts if callable(found := getattr(part, method, None))]
    if not methods:
        raise AttributeError(
            f"{owner} has no {method}(): its base, {name_of(base)}, has none; only schedule-free "
            f"bases have"
        )

    def switch() -> None:
        for each in methods:
            each()
        for p in [p for p, parts in state.items() if not any(parts.values())]:
            del state[p]

    return switch


def kinds_of(base: torch.optim.Optimizer) -> Kinds:
    """Class and defaults of each base."""
    parts = base.parts if isinstance(base, TwoBases) else (base,)
    return tuple((type(part), part.defaults) for part in parts)


def _common(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: v for k, v in first.defaults.items() if k in second.defaults}


def _unzipped(group: dict[str, Any]) -> dict[str, Any]:
    """Take names and tensors of a group apart, if its parameters are pairs of them."""
    params = group["params"]
    if not params or not all(isinstance(p, tuple) for p in params):
        return group
    return {**group, "params": [p for _, p in params], NAMES: [name for name, _ in params]}


def _names_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return {NAMES: group[NAMES]} if NAMES in group else {}
