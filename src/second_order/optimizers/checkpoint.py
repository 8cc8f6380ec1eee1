"""The layout of a checkpoint, which is checked as a whole before any of it is loaded.

    state[p]["base"]        what the base stores of p, as it would alone
    state[p]["curvature"]   what the wrapper stores, with the entries of HEADER
    param_groups            as torch's; "aux_base" says which of two bases trains the group

A state of the base alone loads as well. Its entries are not divided into parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, optim

from second_order.checkpoint.caller import is_checkpointing
from second_order.checkpoint.saved import BASE, CURVATURE, HEADER, SavedPart, check_base_part
from second_order.distributed.fsdp import is_dtensor, local_tensor, shard_like
from second_order.errors import SecondOrderError
from second_order.optimizers.base_pair import AUX_BASE, base_of
from second_order.training.context import Training, base_class_names
from second_order.training.curvature import Curvature
from second_order.training.groups import NAMES, group_params
from second_order.utils.checks import LAYER_OPTIONS, PEAK_LR

__all__ = [
    "VERSION",
    "Checkpoint",
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
SWITCHES = {"foreach", "fused", "capturable", "differentiable", "maximize"}
"""Settings that versions of torch add and take away."""

VERSION = 1
NOTHING_LOADED = "Nothing has been loaded"


class Checkpoint(NamedTuple):
    """What a checkpoint holds, after all checks."""

    state_dict: dict[str, Any]  # for torch to load, with the base's parts only
    curvature: dict[Tensor, SavedPart]
    steps: int
    absent: list[str]  # names of parameters that train, and that it lacks


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
) -> Checkpoint:
    """Read a checkpoint of a wrapper, or of its base alone, for a base or two and its groups.

    Raises:
        ValueError: If an entry does not fit, or the state is another base's; named in the error.
    """
    check_is_state(state_dict)
    saved_groups = state_dict["param_groups"]
    state = state_dict["state"]
    _check_groups(saved_groups, groups, base)

    loaded: dict[Any, dict[str, Any]] = {}
    curvature: dict[Tensor, SavedPart] = {}
    absent: list[str] = []
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        own_base = base_of(base, group)
        for key, p in zip(saved["params"], group["params"], strict=True):
            name = names.get(id(p), f"number {key}")
            parts = _parts(state.get(key, {}))
            if CURVATURE in parts:
                part = SavedPart(key, CURVATURE, name, dict(parts[CURVATURE]))
                _check_base_class(part, own_base)
                curvature[p] = part
            if BASE in parts:
                loaded[key] = {BASE: _base_entries(parts[BASE], p)}
                here = {k: _local_like(v, p) for k, v in loaded[key][BASE].items()}
                check_base_part(SavedPart(key, BASE, name, here), own_base, local_tensor(p))
            if p.requires_grad and not parts.get(CURVATURE):
                absent.append(name)
        _check_settings(i, saved, own_base)

    # A group keeps its options for layers if the checkpoint has none.
    merged = []
    for group, saved in zip(groups, saved_groups, strict=True):
        own = {key: group[key] for key in (*LAYER_OPTIONS, AUX_BASE) if key in group}
        merged.append({**own, **saved})
    return Checkpoint(
        state_dict={**state_dict, "state": loaded, "param_groups": merged},
        curvature=curvature,
        steps=_check_headers(curvature.values()),
        absent=absent if any(curvature.values()) else [],
    )


def _base_entries(part: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """The base's entries for a parameter, cut to this process's rows if FSDP2 sharded it."""
    return {k: shard_like(p, v) if isinstance(v, Tensor) else v for k, v in part.items()}


def _local_like(value: Any, p: Tensor) -> Any:
    """The rows of an entry that are here, if it is a DTensor with the parameter's shape."""
    return local_tensor(value) if is_dtensor(value) and value.shape == p.shape else value


# ----------------------------------------------------------------------------------------- checks


def check_is_state(value: Any) -> None:
    """Raise ValueError unless a value has the parts that every optimizer's state has."""
    parts = value if isinstance(value, Mapping) else {}
    state = parts.get("state")
    groups = parts.get("param_groups")
    if (
        not isinstance(state, Mapping)
        or not isinstance(groups, (list, tuple))
        or not all(isinstance(each, Mapping) for each in (*state.values(), *groups))
    ):
        raise ValueError(
            "this is not the state of an optimizer: it needs a dictionary of dictionaries as "
            "'state', and a list of dictionaries as 'param_groups'; pass the unflattened result of "
            "optimizer.state_dict()"
        )


def _check_groups(
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    base: optim.Optimizer,
) -> None:
    """Raise ValueError unless groups have the same sizes, bases, options and order of names."""
    sizes = [len(group.get("params", ())) for group in saved_groups]
    own_sizes = [len(group["params"]) for group in groups]
    if sizes != own_sizes:
        raise ValueError(
            f"the checkpoint has {len(sizes)} parameter groups with {sizes} parameters, the "
            f"optimizer {len(own_sizes)} parameter groups with {own_sizes}, those of "
            f"{base_class_names(base)} apart; make the same groups before loading"
        )
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        place = f"the checkpoint's param_groups[{i}]"
        try:
            for option in LAYER_OPTIONS.keys() & saved.keys():
                LAYER_OPTIONS[option](f"{place}: {option}", saved[option])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}. {NOTHING_LOADED}") from error
        for key, default in ((AUX_BASE, False), ("precondition", True)):
            mark = saved.get(key)
            if mark is not None and mark != group.get(key, default):
                raise ValueError(
                    f"{place} has {key!r}: {mark}, and here it is {group.get(key, default)}; make "
                    f"the optimizer with the same aux_base and groups, or take one base's part "
                    f"by export_base_state(checkpoint, aux_base=...). {NOTHING_LOADED}"
                )
    called = [name for group in saved_groups for name in group.get(NAMES) or []]
    own_names = [name for group in groups for name in group.get(NAMES) or []]
    if called != own_names and sorted(called) == sorted(own_names):  # not renamed by a wrapper
        differing = (pair for pair in zip(called, own_names, strict=True) if pair[0] != pair[1])
        name, other = next(differing)
        raise ValueError(
            f"the checkpoint's param_groups have {name!r} in 'param_names' where the optimizer has "
            f"{other!r}: make the groups in the order that they were saved in, or put the "
            f"checkpoint into yours by register_load_state_dict_pre_hook; nothing has been loaded"
        )


def _check_settings(i: int, saved: Mapping[str, Any], base: optim.Optimizer) -> None:
    """Raise ValueError if group i lacks settings of the base, or its learning rate is invalid."""
    lacking = base.defaults.keys() - saved.keys() - SWITCHES
    if lacking:
        raise _of_another_base(f"an optimizer without {sorted(lacking)}", base)
    rate = saved.get("lr")
    if not isinstance(rate, (int, float, Tensor)) or not LEAST_RATE <= float(rate) < math.inf:
        raise ValueError(
            f"the checkpoint's param_groups[{i}]['lr'] is {rate!r}, and no finite number of at "
            f"least 0; nothing has been loaded"
        )


def _check_base_class(part: SavedPart, base: optim.Optimizer) -> None:
    """Raise ValueError if another base wrote a parameter's entries."""
    written_by = " and ".join(part.get("base_class", ()))
    if written_by not in ("", type(base).__name__):
        raise _of_another_base(written_by, base)


def _of_another_base(written_by: str, base: optim.Optimizer) -> ValueError:
    name = type(base).__name__
    return ValueError(
        f"the checkpoint was saved by {written_by}, and the base here is {name}: their states "
        f"mean different things; make the optimizer with the base that saved it, or start "
        f"{name} without it. {NOTHING_LOADED}"
    )


def _check_headers(parts: Iterable[SavedPart]) -> int:
    """Check the versions and the numbers of steps; returns the latter."""
    steps: int | None = None
    for part in filter(None, parts):
        part.require(HEADER)
        if part["version"] != VERSION:
            raise part.wrong(
                "version",
                f"is {part['version']}: another second_order wrote it than this one, which reads "
                f"version {VERSION}; update it",
            )
        own = part.whole("steps", 0)
        if steps not in (None, own):
            raise part.wrong("steps", f"is {own}, and {steps} for another parameter")
        steps = own
    return steps or 0


def _parts(entry: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The two parts of a parameter's entry; a base's own state has one."""
    return entry if not entry or entry.keys() & {BASE, CURVATURE} else {BASE: entry}


# ----------------------------------------------------------------------------------------- saving


def export_base_state(state_dict: Mapping[str, Any], aux_base: bool = False) -> dict[str, Any]:
    """The state that the base alone would have saved, to continue with plain ``torch.optim``.

        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain.load_state_dict(export_base_state(optimizer.state_dict()))

    Args:
        state_dict: The ``state_dict()`` of an optimizer of this package, saved and loaded or not.
            If processes keep parts of the state, call ``consolidate()`` first.
        aux_base: Whether to return the state of ``aux_base`` instead of ``base``.

    Returns:
        A state for the base's class, with the momentum and the hyperparameters. Its tensors are
        those of ``state_dict``, not copies.

    Raises:
        ValueError: If ``state_dict`` is not such a state, or if it lacks the part of ``aux_base``.
    """
    check_is_state(state_dict)
    groups = state_dict["param_groups"]
    two_bases = all(isinstance(group.get(AUX_BASE), bool) for group in groups)
    if aux_base and not two_bases:
        raise ValueError("this is the state of an optimizer with one base; leave aux_base=True out")
    exported = []
    state: dict[Any, Any] = {}
    for group in groups:
        if two_bases and group[AUX_BASE] is not aux_base:
            continue
        dropped = (PEAK_LR, AUX_BASE, *LAYER_OPTIONS)
        exported.append({key: value for key, value in group.items() if key not in dropped})
        for key in group["params"]:
            part = _parts(state_dict["state"].get(key, {})).get(BASE)
            if part:
                state[key] = part
    return {"state": state, "param_groups": exported}


@dataclass(frozen=True)
class Collected:
    """State that other processes keep, after it was collected here.

    Attributes:
        parts: By parameter, the entries of its parts.
        to: The rank that is going to save; None if all ranks have the state.
    """

    parts: Mapping[Tensor, Mapping[str, Mapping[str, Any]]]
    to: int | None


def collects_by_itself(
    training: Training, curvature: Curvature, collected: Collected | None
) -> bool:
    """Whether ``state_dict`` is a collective already, and collects what other processes keep.

    ``torch.distributed.checkpoint`` gathers a sharded model's full state from every rank.
    """
    full = is_checkpointing() and not is_checkpointing(part=True)
    rows = any(map(is_dtensor, group_params(training.groups)))
    lacking = collected is None and bool(curvature.remote_state)
    return full and rows and lacking and curvature.resumes_without_remote_state


def require_whole(training: Training, curvature: Curvature, collected: Collected | None) -> None:
    """Warn, or raise SecondOrderError, if a ``state_dict`` of this process would lack entries.

    A part is all that ``torch.distributed.checkpoint`` needs.
    """
    lacking = curvature.remote_state
    rank = training.world.rank
    in_parts = is_checkpointing(part=True)
    if not lacking:
        return
    if collected is not None:
        to = collected.to
        if to not in (None, rank) and training.is_first_warning("partial"):
            training.warn(
                f"state_dict() on rank {rank} lacks some of the state: consolidate(to={to}) "
                f"collected it elsewhere; save it there, or use to=None"
            )
    elif curvature.resumes_without_remote_state:
        if not in_parts and training.is_first_warning("inverses elsewhere"):
            training.warn(
                f"state_dict() on rank {rank} lacks {lacking}: they are refreshed at the first "
                f"step after loading; for a run that resumes exactly, first call "
                f"optimizer.consolidate(to=0) on every process"
            )
    elif not (curvature.saves_by_rank and in_parts):
        sharded = "consolidate(to=None) for torch.distributed.checkpoint"
        if curvature.saves_by_rank:
            sharded = "save with torch.distributed.checkpoint"
        raise SecondOrderError(
            f"{training.name}.state_dict() would lack {lacking}; call "
            f"optimizer.consolidate(to=0) on every process first, or {sharded}"
        )


def add_to_save(training: Training, curvature: Curvature, state: dict[Any, dict[str, Any]]) -> None:
    """Add entries that only checkpoints have to a state, by parameter number."""
    if state:
        more = {p: {CURVATURE: part} for p, part in curvature.state_to_save().items()}
        _add_parts(training, state, more)


def add_collected(
    training: Training, collected: Collected, state: dict[Any, dict[str, Any]]
) -> None:
    """Add what has been collected of other processes to a state by the parameters' numbers."""
    _add_parts(training, state, collected.parts)


def _add_parts(
    training: Training,
    state: dict[Any, dict[str, Any]],
    more: Mapping[Tensor, Mapping[str, Mapping[str, Any]]],
) -> None:
    """Replace the base's part of parameters, and add entries to the curvature's."""
    for index, p in enumerate(group_params(training.groups)):
        if p in more and index in state:
            entry = state[index]
            state[index] = {
                BASE: more[p].get(BASE, entry.get(BASE, {})),
                CURVATURE: {**entry.get(CURVATURE, {}), **more[p].get(CURVATURE, {})},
            }
