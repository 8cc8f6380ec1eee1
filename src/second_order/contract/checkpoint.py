"""A checkpoint, read and checked as a whole before the first of it is taken over.

    state[p]["base"]        what the base keeps of p, as it would alone
    state[p]["curvature"]   what the wrapper keeps, "steps", and from version 1 on "version" and
                            "base_class"
    param_groups            as torch's; with two bases each says in "rest" which of them trains it

Version 0 has neither a version nor the base's name; it is read as version 1, and its base is told
by the groups' settings. The state of a base alone has no version.

What other processes keep is collected before it is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.base_checks import (
    check_base_part,
    check_base_settings,
    check_settings,
    check_written_by,
)
from second_order.contract.base_state import BASE, CURVATURE
from second_order.contract.curvature import Curvature
from second_order.contract.groups import NAMES, members_of
from second_order.contract.partition import REST
from second_order.contract.saved import SavedPart, is_whole, kind_of
from second_order.contract.training import Training
from second_order.contract.two_bases import TwoBases, base_of, name_of
from second_order.distributed.checkpointing import is_checkpointing, is_sharded_checkpoint
from second_order.errors import SecondOrderError
from second_order.options import PEAK_LR
from second_order.sharded import is_dtensor, like, local

__all__ = [
    "ELSEWHERE",
    "HEADER",
    "VERSION",
    "Checkpoint",
    "Collected",
    "check_is_state",
    "export_base_state",
    "header",
    "read_checkpoint",
]

Parts: TypeAlias = Mapping[Tensor, Mapping[str, Mapping[str, Any]]]

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
    """The entries saved with every parameter that identify a checkpoint.

    The base's name is a key, since torch.distributed.checkpoint flattens numbers and tensors only.
    """
    return {"steps": steps, "version": VERSION, "base_class": {type(base).__name__: 1}}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it has been read and checked.

    Attributes:
        base: The base's parts, by the parameters' keys, as they are to be loaded.
        groups: The parameter groups, as they are to be loaded.
        curvature: The ``"curvature"`` parts, by parameter.
        steps: Number of steps taken.
        absent: Names of parameters that train, and that the checkpoint has no entry for.
    """

    base: dict[Any, dict[str, Any]]
    groups: list[Mapping[str, Any]]
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
        state_dict: The checkpoint, as ``state_dict()`` gives it.
        base: The base that is to load it, one or two.
        groups: Parameter groups of the optimizer that is to load it.
        names: Names of parameters, by id.

    Raises:
        ValueError: If an entry does not fit, or the state is another base's; named in the error.
    """
    check_is_state(state_dict)
    _check_marks(state_dict["param_groups"], base, groups)
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
                tensors = {k: v for k, v in saved.items() if isinstance(v, Tensor)}
                saved.update({k: like(p, v) for k, v in tensors.items()})
                base_parts[key] = saved
            else:
                curvature[p] = saved
    steps = _check_headers(curvature)
    pairs_of_groups = list(zip(state_dict["param_groups"], groups, strict=True))
    _check_bases(base, pairs_of_groups, base_parts, curvature)
    for i, (theirs, ours) in enumerate(pairs_of_groups):
        mine = base_of(base, ours)
        check_settings(f"param_groups[{i}]", theirs, {**mine.defaults, PEAK_LR: 0.0, **ours})
        kept = [set(base_parts[key]) for key in theirs["params"] if base_parts.get(key)]
        common = set.intersection(*kept) if kept else set()
        for key, p in zip(theirs["params"], ours["params"], strict=True):
            if key in base_parts:
                here = base_parts[key].here(p)
                check_base_part(here, mine, local(p), theirs, common)
    absent = []
    if any(curvature.values()):
        pairs = zip(keys, params, strict=True)
        absent = [
            names.get(id(p), str(k)) for k, p in pairs if p.requires_grad and not curvature.get(p)
        ]
    loaded = {k: {BASE: dict(v)} for k, v in base_parts.items()}
    two = isinstance(base, TwoBases)
    marked = [{**theirs, REST: ours[REST]} if two else theirs for theirs, ours in pairs_of_groups]
    return Checkpoint(loaded, marked, curvature, steps, absent)


def _check_bases(
    base: torch.optim.Optimizer,
    groups: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    parts: Mapping[Any, SavedPart],
    curvature: Mapping[Tensor, SavedPart],
) -> None:
    """Raise ValueError if a saved group is of another base than its counterpart here."""
    told = any("base_class" in part for part in curvature.values())
    for theirs, ours in groups:
        mine = base_of(base, ours)
        written_by: str | None = None
        for part in (curvature[p] for p in ours["params"] if "base_class" in curvature.get(p, ())):
            name = _class_name(part)
            if written_by not in (None, name):
                raise part.wrong("base_class", f"is {name}, and {written_by} elsewhere")
            written_by = name
        if written_by is not None:
            check_written_by(mine, written_by)
        elif not told:
            kept = [set(parts[key]) for key in theirs["params"] if parts.get(key)]
            check_base_settings(mine, theirs, ours, kept)


def _check_marks(
    saved: Sequence[Mapping[str, Any]],
    base: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ValueError if groups are saved of two bases and there is one, or marks differ.

    Groups without marks may be those of two plain optimizers, put together.
    """
    marks = [group.get(REST) for group in saved]
    if not isinstance(base, TwoBases):
        if {True, False} & {m for m in marks if isinstance(m, bool)} and not any(
            REST in group for group in groups
        ):
            raise ValueError(
                f"the checkpoint is of an optimizer with two bases, and here is {name_of(base)} "
                f"alone: make it with rest=, or take one base's part by "
                f"export_base_state(checkpoint, rest=False). Nothing has been loaded"
            )
        return
    if len(saved) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}, those "
            f"of {name_of(base)} apart; make the same groups, for the same bases, before loading"
        )
    for i, (mark, ours) in enumerate(zip(marks, groups, strict=True)):
        if mark is not None and mark != ours[REST]:
            raise ValueError(
                f"the checkpoint's param_groups[{i}][{REST!r}] is {kind_of(mark)}, and here it is "
                f"{ours[REST]}: other weights went to each base; make the optimizer with the same "
                f"rest_layers and groups. Nothing has been loaded"
            )


def _check_frame(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The keys of the parameters, in order; ValueError unless the structure is sound."""
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
    """Raise ValueError if names are in another order: parameters would get others' state."""
    theirs, ours = ([n for g in each for n in g.get(NAMES) or []] for each in (saved, groups))
    if theirs == ours or sorted(theirs) != sorted(ours):  # a wrapper may have renamed them
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
    """Split a parameter's entry in its two parts; a base's own state has one."""
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


def _check_headers(curvature: Mapping[Tensor, SavedPart]) -> int:
    """Check the header's entries; returns the number of steps."""
    steps: int | None = None
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
            _class_name(part)
    return steps or 0


def _class_name(part: SavedPart) -> str:
    value = part["base_class"]
    if isinstance(value, dict) and len(value) == 1:
        ((name, mark),) = value.items()
        if isinstance(name, str) and is_whole(mark) and mark == 1:
            return name
    raise part.wrong("base_class", f"is {kind_of(value)}, not the name of one class")


def export_base_state(state_dict: Mapping[str, Any], rest: bool = False) -> dict[str, Any]:
    """The state that the base alone would have saved, to go on with plain ``torch.optim``.

        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain.load_state_dict(export_base_state(optimizer.state_dict()))

    Args:
        state_dict: The ``state_dict()`` of an optimizer of this package, saved and loaded or not.
            Where processes keep parts of the state, collect them by ``consolidate()`` before.
        rest: Whether to give the part of ``rest`` and not of ``base``, if there are two bases.

    Returns:
        A state for the base's class, with the momentum and the hyperparameters. Its tensors are
        those of ``state_dict``, not copies.

    Raises:
        ValueError: If ``state_dict`` is no such state, or has no part of ``rest``.
    """
    check_is_state(state_dict)
    state = {key: _parts(key, entry).get(BASE) for key, entry in state_dict["state"].items()}
    groups = state_dict["param_groups"]
    if all(isinstance(group.get(REST), bool) for group in groups):
        groups = [group for group in groups if group[REST] is rest]
        members = {key for group in groups for key in group["params"]}
        state = {key: part for key, part in state.items() if key in members}
    elif rest:
        raise ValueError("this is the state of an optimizer with one base; leave rest=True out")
    groups = [{k: v for k, v in g.items() if k not in (PEAK_LR, REST)} for g in groups]
    return {"state": {key: part for key, part in state.items() if part}, "param_groups": groups}


class Collected:
    """Parts of the state that other processes keep, once they have been collected here."""

    def __init__(self) -> None:
        self._parts: Parts | None = None
        self._to: int | None = None

    def take(self, parts: Parts, to: int | None) -> None:
        """Keep parts for the next ``state_dict``; ``to``: the rank that has all; None: each."""
        self._parts, self._to = parts, to

    def drop(self) -> bool:
        """Drop the collected parts; returns whether there were any."""
        parts, self._parts = self._parts, None
        return bool(parts)

    def require(self, training: Training, curvature: Curvature) -> None:
        """Warn, or raise, where a ``state_dict`` of this process would lack entries.

        Raises:
            SecondOrderError: If nothing has been collected, and it is not
                ``torch.distributed.checkpoint`` that asks for this process's part.
        """
        lacking, rank = curvature.kept_elsewhere, training.world.rank
        rows = any(map(is_dtensor, members_of(training.groups))) and not is_checkpointing()
        if rows and training.world.size > 1 and training.first_time("rows of a state"):
            training.warn(
                "state_dict() of a sharded model has this process's rows of the base's state; save "
                "what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives"
            )
        if not lacking:
            return
        if self._parts is None and not (curvature.parts_suffice and is_sharded_checkpoint()):
            sharded = (
                "save with torch.distributed.checkpoint"
                if curvature.parts_suffice
                else "consolidate(to=None) for torch.distributed.checkpoint"
            )
            raise SecondOrderError(
                f"{training.name}.state_dict() would lack {lacking}; call "
                f"optimizer.consolidate(to=0) on every process first, or {sharded}"
            )
        elsewhere = self._parts is not None and self._to not in (None, rank)
        if elsewhere and training.first_time("partial"):
            training.warn(
                f"state_dict() on rank {rank} lacks some of the state: "
                f"consolidate(to={self._to}) collected it elsewhere; save it there, or use to=None"
            )

    def add_to(self, state: dict[Any, dict[str, Any]], params: Sequence[Tensor]) -> None:
        """Add the collected parts to a state whose keys are the parameters' numbers."""
        for index, p in enumerate(params):
            if self._parts and p in self._parts and index in state:
                parts, entry = self._parts[p], state[index]
                state[index] = {
                    BASE: parts.get(BASE, entry.get(BASE, {})),
                    CURVATURE: {**entry.get(CURVATURE, {}), **parts.get(CURVATURE, {})},
                }
