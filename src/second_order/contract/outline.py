"""What the ranks compare of an optimizer before they exchange anything in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.profiler import record_function

from second_order.distributed.agreement import Facts, require_same, word_of
from second_order.distributed.collectives import World

__all__ = ["Outline"]

Groups: TypeAlias = Sequence[dict[str, Any]]
MEMBERS = ("params", "param_names")  # compared by their sizes


class Outline:
    """An optimizer's groups, steps and loads, in a word.

    Attributes:
        loaded: Whether a checkpoint has been loaded since the ranks last compared.
        compared: False where it need not be: on a helper, which does as it is told.
    """

    def __init__(self) -> None:
        self.loaded, self.compared = False, True
        self._groups: list[Any] = []
        self._word = 0

    def compare(
        self,
        world: World,
        doing: str,
        steps: int,
        groups: Groups,
        facts: Callable[[], Facts],
        name_of: Callable[[], dict[int, str]],
        coming: Groups | None = None,
    ) -> None:
        """Raise on every rank unless all are about to do the same; a collective.

        Args:
            world: The ranks.
            doing: What this one is about to do.
            steps: How many it has taken.
            groups: The parameter groups.
            facts: Gives what else is to be equal, by name; not asked on one process, so that
                options' callables are called no more often than they are used.
            name_of: The parameters' names by their ids; asked for only if there is a difference, or
                other groups are coming.
            coming: The groups that are to take the place of these; before any step they are
                compared by the names of their members, too.

        Raises:
            RankMismatchError: With the first fact that differs.
        """
        if world.size == 1 or not self.compared:
            return
        others, called = facts(), []
        if coming is not None:
            groups, names = coming, name_of()
            called = [[names.get(id(p), "") for p in group["params"]] for group in groups]
        found = [x for group in groups for x in _outline(group)]
        if found != self._groups:  # rarely, but for the learning rate
            self._groups, self._word = found, word_of(found)
        ours = ("a checkpoint loaded since the last step", self.loaded), ("step", steps)

        def describe() -> Facts:
            return [*ours, *_named(groups, name_of()), *others]

        brief = [steps, self.loaded, self._word, *(value for _, value in others), called]
        with record_function("second_order.compare"):
            require_same(world, doing, brief, describe)
        self.loaded = False


def _outline(group: dict[str, Any]) -> list[Any]:
    """Whatever of a group is a number or a few, and of each parameter its size if it trains."""
    found: list[Any] = [_number(v) for k, v in group.items() if k not in MEMBERS]
    params = group["params"]
    found.append(len(params))
    found += [p.numel() if p.requires_grad else -1 for p in params]
    return found


def _number(value: Any) -> Any:
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_number(v) for v in value]
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()  # a device is not waited for
    return None


def _named(groups: Groups, names: dict[int, str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [("parameter groups", len(groups))]
    for i, group in enumerate(groups):
        found += [
            (
                f"group {i}, {names.get(id(p), f'parameter {j}')}",
                f"{list(p.shape)}, {'trains' if p.requires_grad else 'frozen'}",
            )
            for j, p in enumerate(group["params"])
        ]
        found += [
            (f"group {i}, {key}", number)
            for key, value in group.items()
            if key not in MEMBERS and (number := _number(value)) is not None
        ]
    return found
