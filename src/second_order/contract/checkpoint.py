"""A checkpoint, read and checked as a whole before the first of it is taken over.

    state[p]["base"]        what the base keeps of p, as it would alone
    state[p]["curvature"]   what the wrapper keeps, "steps", and from version 1 on "version" and
                            "base_class"
    param_groups            as torch's

Version 0 has neither a version nor the base's name; it is read as version 1, and whose base's part
it is, is told by its settings. The state of a base alone is of no version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from second_order.contract.base_checks import (
    check_base_part,
    check_base_settings,
    check_settings,
)
from second_order.contract.base_state import BASE, CURVATURE
from second_order.contract.groups import NAMES
from second_order.contract.saved import SavedPart, is_whole, kind_of
from second_order.options import PEAK_LR

__all__ = [
    "ELSEWHERE",
    "HEADER",
    "VERSION",
    "Checkpoint",
    "check_is_state",
    "export_base_state",
    "header",
    "read_checkpoint",
]

VERSION = 1
"""Of the checkpoints that are written."""

ELSEWHERE = (
    "it is of another optimizer's checkpoint, perhaps; export_base_state(checkpoint) gives the "
    "base's part of any"
)
"""What is said of an entry that is not known."""

HEADER = ("steps", "version", "base_class")
"""The entries of every ``"curvature"`` part."""


def header(steps: int, base: torch.optim.Optimizer) -> dict[str, Any]:
    """What says which checkpoint this is, for every parameter.

    The name is a key, since torch.distributed.checkpoint flattens numbers and tensors only.
    """
    return {"steps": steps, "version": VERSION, "base_class": {type(base).__name__: 1}}


@dataclass(frozen=True)
class Checkpoint:
    """What has been read.

    Attributes:
        base: The base's parts, by the parameters' keys, as they are to be loaded.
        curvature: The other parts.
        steps: How many have been taken.
        absent: Names of parameters that train, and of which there is nothing.
    """

    base: dict[Any, dict[str, Any]]
    curvature: dict[Tensor, SavedPart]
    steps: int
    absent: list[str]


def read_checkpoint(
    state_dict: Mapping[str, Any],
    base: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> Checkpoint:
    """Read a checkpoint of a wrapper, or of its base alone.

    Args:
        state_dict: As ``state_dict()`` gives it.
        base: What is to go on with it.
        groups: Of the optimizer that is to.
        names: Of parameters, by id.

    Raises:
        ValueError: Naming what is wrong, or the base that it was saved by.
    """
    keys = _check_frame(state_dict, groups)
    state = state_dict["state"]
    params = [p for group in groups for p in group["params"]]
    base_parts: dict[Any, SavedPart] = {}
    curvature: dict[Tensor, SavedPart] = {}
    for key, p in zip(keys, params, strict=True):
        if key not in state:
            continue
        name = names.get(id(p), f"number {key}")
        for part, entries in _parts(key, state[key]).items():
            saved = SavedPart(key, part, name, entries)
            if part == BASE:
                base_parts[key] = saved
            else:
                curvature[p] = saved
    steps, written_by = _check_headers(curvature)
    saved_groups = state_dict["param_groups"]
    kept = [
        (set(base_parts[key]), group)
        for group in saved_groups
        for key in group["params"]
        if base_parts.get(key)
    ]
    check_base_settings(base, saved_groups, groups, kept, written_by)
    common = set.intersection(*(names for names, _ in kept)) if kept else set()
    for i, (theirs, ours) in enumerate(zip(saved_groups, groups, strict=True)):
        check_settings(f"param_groups[{i}]", theirs, {**base.defaults, PEAK_LR: 0.0, **ours})
        for key, p in zip(theirs["params"], ours["params"], strict=True):
            if key in base_parts:
                check_base_part(base_parts[key], base, p, theirs, common)
    absent = []
    if any(curvature.values()):
        pairs = zip(keys, params, strict=True)
        absent = [
            names.get(id(p), str(k)) for k, p in pairs if p.requires_grad and not curvature.get(p)
        ]
    return Checkpoint({k: {BASE: dict(v)} for k, v in base_parts.items()}, curvature, steps, absent)


def _check_frame(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The keys of the parameters, in order; ValueError unless all is where it belongs."""
    check_is_state(state_dict)
    saved, state = state_dict["param_groups"], state_dict["state"]
    if len(saved) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}; make "
            f"the same groups before loading"
        )
    keys: list[Any] = []
    for i, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        members = theirs.get("params")
        where = f"the checkpoint's param_groups[{i}]"
        if not isinstance(members, (list, tuple)):
            raise ValueError(f"{where}['params'] is {kind_of(members)}, not a list")
        if len(members) != len(ours["params"]):
            raise ValueError(
                f"{where} has {len(members)} parameters, the optimizer's group "
                f"{len(ours['params'])}; make the same groups before loading"
            )
        if not all(is_whole(key) or isinstance(key, str) for key in members):
            raise ValueError(f"{where}['params'] is not a list of numbers")
        called = theirs.get(NAMES)
        if called is not None and (
            not isinstance(called, (list, tuple))
            or len(called) != len(members)
            or not all(isinstance(name, str) for name in called)
        ):
            raise ValueError(f"{where}['param_names'] does not name its {len(members)} parameters")
        keys += members
    _check_order(saved, groups)
    if len(set(keys)) < len(keys):
        raise ValueError("the checkpoint's param_groups have a parameter twice")
    known = set(keys)
    for key in state:
        if key not in known:
            raise ValueError(f"the checkpoint's state[{key!r}] is of no parameter in its groups")
    return keys


def _check_order(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the same names are in another order: one's state would be another's."""
    theirs, ours = ([n for g in each for n in g.get(NAMES) or []] for each in (saved, groups))
    if theirs == ours or sorted(theirs) != sorted(ours):  # other names may be of a wrapper
        return
    name, mine = next(pair for pair in zip(theirs, ours, strict=True) if pair[0] != pair[1])
    raise ValueError(
        f"the checkpoint's param_groups have {name!r} in 'param_names' where the optimizer has "
        f"{mine!r}: make the groups in the order that they were saved in, or put the checkpoint "
        f"into yours by register_load_state_dict_pre_hook; nothing has been loaded"
    )


def check_is_state(value: Any) -> None:
    """Raise ValueError unless a value has the parts that every optimizer's state has."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= set(value):
        raise ValueError(
            "this is no state of an optimizer: 'state' and 'param_groups' are missing; pass what "
            "optimizer.state_dict() has given, not flattened"
        )
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, Mapping):
        raise ValueError(f"the checkpoint's 'state' is {kind_of(state)}, not a dictionary")
    for key, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"the checkpoint's state[{key!r}] is {kind_of(entry)}, not a dictionary"
            )
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        raise ValueError("the checkpoint's 'param_groups' is not a list of dictionaries")


def _parts(key: Any, entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A parameter's entry in its two parts; that of the base alone is one."""
    if not set(entry) & {BASE, CURVATURE}:
        return {BASE: dict(entry)} if entry else {}
    for part, entries in entry.items():
        if part not in (BASE, CURVATURE):
            raise ValueError(
                f"the checkpoint's state[{key!r}][{part!r}] is not known here: beside 'base' and "
                f"'curvature' there is nothing"
            )
        if not isinstance(entries, Mapping):
            raise ValueError(
                f"the checkpoint's state[{key!r}][{part!r}] is {kind_of(entries)}, not a dictionary"
            )
        for name in entries:
            if not isinstance(name, str):
                raise ValueError(f"the checkpoint's state[{key!r}][{part!r}] has the key {name!r}")
    return {part: dict(entries) for part, entries in entry.items()}


def _check_headers(curvature: Mapping[Tensor, SavedPart]) -> tuple[int, str | None]:
    """The number of steps, and the base's name where it is told."""
    steps: int | None = None
    written_by: str | None = None
    for part in curvature.values():
        if not part:
            continue
        part.require(["steps"])
        mine = part.whole("steps", 0)
        if steps is not None and mine != steps:
            raise part.wrong("steps", f"is {mine}, and {steps} for another parameter")
        steps = mine
        if "version" in part:
            version = part["version"]
            if is_whole(version) and version > VERSION:
                raise part.wrong(
                    "version",
                    f"is {version}: a newer second_order wrote it than this one, which reads "
                    f"versions up to {VERSION}; update it",
                )
            part.whole("version", 1, VERSION)
            part.require(["base_class"])
        if "base_class" in part:
            part.require(["version"])
            mine_by = _class_name(part)
            if written_by not in (None, mine_by):
                raise part.wrong("base_class", f"is {mine_by}, and {written_by} elsewhere")
            written_by = mine_by
    return steps or 0, written_by


def _class_name(part: SavedPart) -> str:
    value = part["base_class"]
    if isinstance(value, dict) and len(value) == 1:
        ((name, mark),) = value.items()
        if isinstance(name, str) and is_whole(mark) and mark == 1:
            return name
    raise part.wrong("base_class", f"is {kind_of(value)}, not the name of one class")


def export_base_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What the base alone would have saved: for going on with a plain ``torch.optim`` optimizer.

        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain.load_state_dict(export_base_state(optimizer.state_dict()))

    Args:
        state_dict: What ``state_dict()`` of an optimizer of this package gave, saved and loaded or
            not. Where processes keep parts of the state, collect them by ``consolidate()`` before.

    Returns:
        A state for the base's class, with the momentum and the hyperparameters. Its tensors are
        those of ``state_dict``, not copies.

    Raises:
        ValueError: If it is no such state.
    """
    check_is_state(state_dict)
    state = {key: _parts(key, entry).get(BASE) for key, entry in state_dict["state"].items()}
    groups = [{k: v for k, v in g.items() if k != PEAK_LR} for g in state_dict["param_groups"]]
    return {"state": {key: part for key, part in state.items() if part}, "param_groups": groups}
