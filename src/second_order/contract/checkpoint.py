"""A checkpoint, read and checked as a whole before the first of it is taken over.

    state[p]["base"]        what the base keeps of p, as it would alone
    state[p]["curvature"]   what the wrapper keeps, "steps", and from version 1 on "version" and
                            "base_class"
    param_groups            as torch's; with two bases each says in "rest" which of them trains it

Version 0 has neither a version nor the base's name; it is read as version 1, and its base is told
by the groups' settings, as that of the state of a base alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, optim

from second_order.contract.saved import BASE, CURVATURE, SavedPart, check_base_part
from second_order.contract.training import NAMES, Curvature, Training, members_of
from second_order.contract.two_bases import REST, TwoBases, base_of, name_of
from second_order.errors import SecondOrderError
from second_order.options import LAYER_OPTIONS, PEAK_LR
from second_order.sharded import is_checkpointing, is_dtensor, like, local

__all__ = [
    "HEADER",
    "VERSION",
    "add_collected",
    "add_to_save",
    "check_is_state",
    "collects_by_itself",
    "export_base_state",
    "header",
    "read_checkpoint",
    "require_whole",
]

LEAST_RATE = -1e-8  # schedulers round learning rates to a little below zero
DECOUPLED = "decoupled_weight_decay"
SWITCHES = {"foreach", "fused", "capturable", "differentiable", "maximize", DECOUPLED}
"""Settings that versions of torch add and take away."""
TELLING = {"amsgrad", "momentum_decay"}
"""Settings that Adam and NAdam have, and RAdam and Adamax, which have all others, have not."""

VERSION = 1
"""Of the checkpoints that are written."""

HEADER = ("steps", "version", "base_class")
"""The entries of every ``"curvature"`` part."""


def header(steps: int, base: optim.Optimizer) -> dict[str, Any]:
    """The entries saved with every parameter that identify a checkpoint.

    The base's name is a key, since torch.distributed.checkpoint flattens numbers and tensors only.
    """
    return {"steps": steps, "version": VERSION, "base_class": {type(base).__name__: 1}}


def read_checkpoint(
    state_dict: Mapping[str, Any],
    base: optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> tuple[dict[str, Any], dict[Tensor, SavedPart], int, list[str]]:
    """Read a checkpoint of a wrapper, or of its base alone, for a base or two and its groups.

    Returns:
        What torch is to load, with the base's parts alone; the ``"curvature"`` parts, by parameter;
        the number of steps taken; and names of parameters that train, and that it lacks.

    Raises:
        ValueError: If an entry does not fit, or the state is another base's; named in the error.
    """
    check_is_state(state_dict)
    saved, state = state_dict["param_groups"], state_dict["state"]
    _check_groups(saved, groups, base)
    loaded: dict[Any, dict[str, Any]] = {}
    curvature: dict[Tensor, SavedPart] = {}
    named = any("base_class" in entry.get(CURVATURE, ()) for entry in state.values())
    absent = []
    for i, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        mine = base_of(base, ours)
        headers = [state.get(key, {}).get(CURVATURE, {}) for key in theirs["params"]]
        written_by = sorted({name for each in headers for name in each.get("base_class", ())})
        if written_by or not named:
            _check_settings(i, theirs, mine, " and ".join(written_by))
        for key, p in zip(theirs["params"], ours["params"], strict=True):
            name = names.get(id(p), f"number {key}")
            parts = _parts(state.get(key, {}))
            if BASE in parts:
                part = parts[BASE].items()
                loaded[key] = {
                    BASE: {k: like(p, v) if isinstance(v, Tensor) else v for k, v in part}
                }
                here = {
                    k: local(v) if is_dtensor(v) and v.shape == p.shape else v
                    for k, v in loaded[key][BASE].items()
                }
                check_base_part(SavedPart(key, BASE, name, here), mine, local(p))
            if CURVATURE in parts:
                curvature[p] = SavedPart(key, CURVATURE, name, dict(parts[CURVATURE]))
            if p.requires_grad and not parts.get(CURVATURE):
                absent.append(name)
    # What a group has for its layers stays if a checkpoint has nothing of it.
    own = [{k: group[k] for k in LAYER_OPTIONS if k in group} for group in groups]
    saved = [{**ours, **theirs} for ours, theirs in zip(own, saved, strict=True)]
    if isinstance(base, TwoBases):
        saved = [{**g, REST: ours[REST]} for g, ours in zip(saved, groups, strict=True)]
    steps = _check_headers(curvature.values())
    absent = absent if any(curvature.values()) else []
    return {**state_dict, "state": loaded, "param_groups": saved}, curvature, steps, absent


def check_is_state(value: Any) -> None:
    """Raise ValueError unless a value has the parts that every optimizer's state has."""
    parts = value if isinstance(value, Mapping) else {}
    state, groups = parts.get("state"), parts.get("param_groups")
    if (
        not isinstance(state, Mapping)
        or not isinstance(groups, (list, tuple))
        or not all(isinstance(each, Mapping) for each in (*state.values(), *groups))
    ):
        raise ValueError(
            "this is no state of an optimizer: it needs a dictionary of dictionaries as 'state', "
            "and a list of them as 'param_groups'; pass what optimizer.state_dict() has given, not "
            "flattened"
        )
    for key, entry in state.items():
        for part in entry.keys() & {BASE, CURVATURE}:
            if not isinstance(entry[part], Mapping):
                raise _wrong(f"state[{key!r}][{part!r}]", entry[part], "dictionary")
        written_by = entry.get(CURVATURE, {}).get("base_class", {})
        if not isinstance(written_by, Mapping):
            where = f"state[{key!r}][{CURVATURE!r}]['base_class']"
            raise _wrong(where, written_by, "dictionary of the base's name")
    for i, group in enumerate(groups):
        params = group.get("params", [])
        names = group.get(NAMES) or []
        if not _is_list_of(params, (int, str)):
            raise _wrong(f"param_groups[{i}]['params']", params, "list of numbers")
        if not _is_list_of(names, str):
            raise _wrong(f"param_groups[{i}][{NAMES!r}]", names, "list of names")


def _wrong(where: str, value: Any, what: str) -> ValueError:
    """The error for a value of a state that is not what every optimizer has there."""
    return ValueError(
        f"the checkpoint's {where} is {value!r}, and no {what}; pass what optimizer.state_dict() "
        f"has given, or take an older checkpoint. Nothing has been loaded"
    )


def _is_list_of(values: Any, kind: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(each, kind) for each in values)


def _is_like(value: Any, default: Any) -> bool:
    """Whether a setting of a group is of the kind that the base's default for it is."""
    number = (int, float, Tensor)
    if isinstance(default, bool):
        return value is None or isinstance(value, (bool, int))
    if isinstance(default, number):
        return isinstance(value, number)
    if isinstance(default, tuple):
        alike = isinstance(value, (list, tuple)) and len(value) == len(default)
        return alike and all(map(_is_like, value, default))
    return True


def _check_groups(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], base: optim.Optimizer
) -> None:
    """Raise ValueError unless groups have the same sizes, bases and order of names."""
    marks, ours = ([group.get(REST) for group in each] for each in (saved, groups))
    if True in marks and not isinstance(base, TwoBases):
        raise ValueError(
            f"the checkpoint is of an optimizer with two bases, and here is {name_of(base)} alone: "
            f"make it with rest=, or take one base's part by export_base_state(checkpoint, "
            f"rest=False). Nothing has been loaded"
        )
    sizes, wanted = ([len(g.get("params", ())) for g in each] for each in (saved, groups))
    if sizes != wanted:
        raise ValueError(
            f"the checkpoint has {len(sizes)} parameter groups with {sizes} parameters, the "
            f"optimizer {len(wanted)} parameter groups with {wanted}, those of {name_of(base)} "
            f"apart; make the same groups before loading"
        )
    if any(mark not in (None, mine) for mark, mine in zip(marks, ours, strict=True)):
        raise ValueError(
            f"the checkpoint's groups have {REST!r}: {marks}, and here it is {ours}: other weights "
            f"went to each base; make the optimizer with the same rest_layers and groups. Nothing "
            f"has been loaded"
        )
    for i, (theirs, here) in enumerate(zip(saved, groups, strict=True)):
        _check_layer_options(i, theirs, here)
    called, mine = ([n for g in each for n in g.get(NAMES) or []] for each in (saved, groups))
    if called != mine and sorted(called) == sorted(mine):  # a wrapper may have renamed them
        name, other = next(pair for pair in zip(called, mine, strict=True) if pair[0] != pair[1])
        raise ValueError(
            f"the checkpoint's param_groups have {name!r} in 'param_names' where the optimizer has "
            f"{other!r}: make the groups in the order that they were saved in, or put the "
            f"checkpoint into yours by register_load_state_dict_pre_hook; nothing has been loaded"
        )


def _check_layer_options(i: int, theirs: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ValueError if what group i of a checkpoint has for its layers is no such option."""
    place = f"the checkpoint's param_groups[{i}]"
    try:
        for option in LAYER_OPTIONS:
            if option in theirs:
                LAYER_OPTIONS[option](f"{place}: {option}", theirs[option])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}. Nothing has been loaded") from error
    leaves, wanted = theirs.get("precondition"), here.get("precondition", True)
    if leaves not in (None, wanted):
        raise ValueError(
            f"{place} has 'precondition': {leaves}, and here it is {wanted}; make the optimizer "
            f"with the groups that were saved. Nothing has been loaded"
        )


def _check_settings(
    i: int, theirs: Mapping[str, Any], base: optim.Optimizer, written_by: str
) -> None:
    """Raise ValueError if group i is of another base, or its learning rate no number."""
    mine, lacking = type(base).__name__, base.defaults.keys() - theirs.keys() - SWITCHES
    if theirs.get(DECOUPLED, False) != base.defaults.get(DECOUPLED, False):  # Adam and AdamW
        lacking = {DECOUPLED} if DECOUPLED in theirs else lacking
    if not lacking and getattr(optim, mine, None) is type(base):
        lacking = TELLING & (theirs.keys() - base.defaults.keys())
    if not written_by and lacking:
        written_by = f"an optimizer with other {sorted(lacking)}"
    if written_by not in ("", mine):
        raise ValueError(
            f"the checkpoint was saved by {written_by}, and the base here is {mine}: their states "
            f"mean different things; make the optimizer with the base that saved it, or start "
            f"{mine} without it. Nothing has been loaded"
        )
    if getattr(optim, mine, None) is type(base):
        for name, default in {**base.defaults, PEAK_LR: 0.0, "lr": None}.items():
            value = theirs.get(name, default)
            if not _is_like(value, default):
                kind = type(default).__name__
                raise _wrong(f"param_groups[{i}][{name!r}]", value, f"{kind} as {default!r}")
    rate = theirs.get("lr")
    if not isinstance(rate, (int, float, Tensor)) or not LEAST_RATE <= float(rate) < math.inf:
        raise ValueError(
            f"the checkpoint's param_groups[{i}]['lr'] is {rate!r}, and no finite number of at "
            f"least 0; nothing has been loaded"
        )


def _parts(entry: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The two parts of a parameter's entry; a base's own state has one."""
    return entry if not entry or entry.keys() & {BASE, CURVATURE} else {BASE: entry}


def _check_headers(parts: Iterable[SavedPart]) -> int:
    """Check the versions and the numbers of steps; returns the latter."""
    steps: int | None = None
    for part in filter(None, parts):
        part.require(["steps"])
        if part.get("version", VERSION) not in range(1, VERSION + 1):
            raise part.wrong(
                "version",
                f"is {part['version']}: another second_order wrote it than this one, which reads "
                f"versions up to {VERSION}; update it",
            )
        mine = part.whole("steps", 0)
        if steps not in (None, mine):
            raise part.wrong("steps", f"is {mine}, and {steps} for another parameter")
        steps = mine
    return steps or 0


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
    state = {key: _parts(entry).get(BASE) for key, entry in state_dict["state"].items()}
    groups = state_dict["param_groups"]
    if all(isinstance(group.get(REST), bool) for group in groups):
        groups = [group for group in groups if group[REST] is rest]
        members = {key for group in groups for key in group["params"]}
        state = {key: part for key, part in state.items() if key in members}
    elif rest:
        raise ValueError("this is the state of an optimizer with one base; leave rest=True out")
    groups = [
        {k: v for k, v in g.items() if k not in (PEAK_LR, REST, *LAYER_OPTIONS)} for g in groups
    ]
    return {"state": {key: part for key, part in state.items() if part}, "param_groups": groups}


def collects_by_itself(training: Training, curvature: Curvature) -> bool:
    """Whether ``state_dict`` is a collective already, and collects what other processes keep.

    ``torch.distributed.checkpoint`` gathers a sharded model's full state from every rank.
    """
    full = is_checkpointing() and not is_checkpointing(part=True)
    rows = any(map(is_dtensor, members_of(training.groups)))
    lacking = training.collected is None and bool(curvature.kept_elsewhere)
    return full and rows and lacking and curvature.dispensable


def require_whole(training: Training, curvature: Curvature) -> None:
    """Warn, or raise SecondOrderError, where a ``state_dict`` of this process would lack entries.

    A part is all that ``torch.distributed.checkpoint`` asks for.
    """
    lacking, rank, collected = curvature.kept_elsewhere, training.world.rank, training.collected
    rows = any(map(is_dtensor, members_of(training.groups))) and not is_checkpointing()
    if rows and training.world.size > 1 and training.first_time("rows of a state"):
        training.warn(
            "state_dict() of a sharded model has this process's rows of the base's state; save "
            "what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives"
        )
    if not lacking:
        return
    if collected is None and curvature.dispensable:
        if not is_checkpointing(part=True) and training.first_time("inverses elsewhere"):
            training.warn(
                f"state_dict() on rank {rank} lacks {lacking}: they are refreshed at the first "
                f"step after loading; for a run that resumes exactly, first call "
                f"optimizer.consolidate(to=0) on every process"
            )
        return
    if collected is None and not (curvature.parts_suffice and is_checkpointing(part=True)):
        sharded = (
            "save with torch.distributed.checkpoint"
            if curvature.parts_suffice
            else "consolidate(to=None) for torch.distributed.checkpoint"
        )
        raise SecondOrderError(
            f"{training.name}.state_dict() would lack {lacking}; call "
            f"optimizer.consolidate(to=0) on every process first, or {sharded}"
        )
    to = None if collected is None else collected[1]
    if to not in (None, rank) and training.first_time("partial"):
        training.warn(
            f"state_dict() on rank {rank} lacks some of the state: consolidate(to={to}) collected "
            f"it elsewhere; save it there, or use to=None"
        )


def add_to_save(training: Training, curvature: Curvature, state: dict[Any, dict[str, Any]]) -> None:
    """Add entries that only checkpoints have to a state, by parameter number."""
    more = curvature.state_to_save() if state else {}
    for index, p in enumerate(members_of(training.groups)):
        if p in more and index in state:
            entry = state[index]
            state[index] = {**entry, CURVATURE: {**entry.get(CURVATURE, {}), **more[p]}}


def add_collected(training: Training, state: dict[Any, dict[str, Any]]) -> None:
    """Add what has been collected of other processes to a state by the parameters' numbers."""
    collected = {} if training.collected is None else training.collected[0]
    for index, p in enumerate(members_of(training.groups)):
        if p in collected and index in state:
            parts, entry = collected[p], state[index]
            state[index] = {
                BASE: parts.get(BASE, entry.get(BASE, {})),
                CURVATURE: {**entry.get(CURVATURE, {}), **parts.get(CURVATURE, {})},
            }
