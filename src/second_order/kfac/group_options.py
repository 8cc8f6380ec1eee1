"""Options that a parameter group sets for its own layers.

    groups = [{"params": body, "damping": 0.3}, {"params": head, "precondition": False}]

damping        replaces the optimizer's number in the γ of the group's layers
factor_decay   replaces the optimizer's number in the updates of the layers' running averages
precondition   False: the base optimizer alone trains the group

The first two are read from ``param_groups`` when they are used. So checkpoints contain them, ranks
compare them at each step, and a new damping acts at the next refresh, a new decay at the next
update. ``precondition`` is read when layers are found: at construction, and when a group is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.kronecker.block import KroneckerBlock
from second_order.utils.checks import LAYER_OPTIONS

__all__ = ["check_layers", "describe_group_options", "excluded_params", "values_by_layer"]

Groups = Sequence[Mapping[str, Any]]


def values_by_layer(
    groups: Groups, blocks: Iterable[KroneckerBlock], option: str
) -> dict[KroneckerBlock, float]:
    """The number that each layer's group sets for an option; layers without one are left out."""
    numbers: dict[int, float] = {}
    for i, group in enumerate(groups):
        if option in group:
            number: Any = group[option]
            LAYER_OPTIONS[option](f"{option!r} of parameter group {i}: {option}", number)
            numbers |= dict.fromkeys(map(id, group["params"]), number)
    if not numbers:
        return {}
    return {block: numbers[id(block.weight)] for block in blocks if id(block.weight) in numbers}


def excluded_params(groups: Groups) -> set[int]:
    """The ids of the parameters that only the base optimizer trains."""
    excluded = [group["params"] for group in groups if group.get("precondition") is False]
    return {id(p) for params in excluded for p in params}


def check_layers(groups: Groups, params: Mapping[KroneckerBlock, Iterable[Tensor]]) -> None:
    """Raise ValueError if the ``params`` of a layer have different values of an option."""
    if not any(option in group for group in groups for option in LAYER_OPTIONS):
        return
    settings: dict[int, dict[str, Any]] = {}
    for group in groups:
        options = {option: group.get(option) for option in LAYER_OPTIONS}
        options["precondition"] = group.get("precondition", True)
        settings |= dict.fromkeys(map(id, group["params"]), options)
    for block, members in params.items():
        known = [settings[id(p)] for p in members if id(p) in settings]
        for option in LAYER_OPTIONS:
            values = [each[option] for each in known]
            # A module with precondition=False for all of its parameters has no block.
            divided = option == "precondition" and False in values
            if divided or any(value != values[0] for value in values):
                raise ValueError(
                    f"layer {block.name!r} has its weight and its bias in parameter groups with "
                    f"different {option!r}: a layer has one curvature, so give its groups the same"
                )


def describe_group_options(groups: Groups) -> str:
    """The options of all groups as the summary shows them; "" if there are none."""
    found = []
    for i, group in enumerate(groups):
        own = [f"{option} {group[option]}" for option in LAYER_OPTIONS if option in group]
        if own:
            found.append(f"group {i}: {', '.join(own)}")
    return "; ".join(found)
