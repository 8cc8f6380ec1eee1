"""Two first-order optimizers that step as one: one for hidden weights, one for the rest.

Both work on the very groups and state of the whole: a group's mark tells which of the two trains
it, and each sees its own groups and their state alone. So schedulers and checkpoints see one
optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from second_order.contract.base_step import unhooked_step
from second_order.contract.groups import NAMES, members_of
from second_order.contract.partition import REST

__all__ = [
    "TwoBases",
    "base_of",
    "name_of",
    "parts_of",
    "switch_of",
]


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
        parts: list[torch.optim.Optimizer] = []
        whole = [dict(group) for group in groups]
        for mark, kind, keywords in ((False, base, base_keywords), (True, rest, rest_keywords)):
            mine = [group for group in whole if group[REST] is mark]
            plain = [{**group, "params": members_of([group])} for group in mine]
            for group in plain:
                group.pop(NAMES, None)  # a base may not know of names
            parts.append(kind(plain or [{"params": []}], **keywords))  # none takes an empty list
            for group, filled in zip(mine, parts[-1].param_groups, strict=False):
                group.update({k: v for k, v in filled.items() if k != "params"})
        self.parts = (parts[0], parts[1])
        super().__init__(whole, _common(*self.parts))
        for part in self.parts:
            self.state.update(part.state)

    def step(self, closure: Any = None) -> Any:
        """Let both step, each on its own groups; the closure is not called."""
        for part in self.following():
            if part.param_groups:
                unhooked_step(part)
                self.state.update(part.state)

    def of(self, group: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The optimizer that trains a group."""
        return self.parts[bool(group[REST])]

    def following(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Both optimizers, with their groups as they are now, and the state of these."""
        for mark, part in enumerate(self.parts):
            part.param_groups = [g for g in self.param_groups if g[REST] is bool(mark)]
            mine = [p for group in part.param_groups for p in group["params"] if p in self.state]
            part.state = defaultdict(dict, {p: self.state[p] for p in mine})
        return self.parts

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for part in self.following():
            if len(part.state):
                own = {"state": part.state, "param_groups": part.param_groups}
                part.__setstate__(own)
                self.state.update(part.state)


def parts_of(base: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The two optimizers that a base is made of, or the one that it is."""
    return base.parts if isinstance(base, TwoBases) else (base,)


def name_of(base: torch.optim.Optimizer) -> str:
    """The name of a base, or of two, in messages."""
    return " and ".join(type(part).__name__ for part in parts_of(base))


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


def _common(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: v for k, v in first.defaults.items() if k in second.defaults}
