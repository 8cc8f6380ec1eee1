"""The layout of a checkpoint, and the checks before any of it is loaded.

    state[p]["base"]        the entries that the base stores for p, as it would alone
    state[p]["curvature"]   the entries of the curvature, and those of HEADER
    state[key]["base"]      what the base stores under a key other than a parameter
    param_groups            as torch's; "aux_base" says which base trains the group

Loading    ``read_checkpoint`` checks all entries, and separates the two parts.
Saving     If other ranks store a part of the state, ``consolidate()`` collects it, and
           ``add_collected`` adds it. ``check_is_complete`` warns or raises otherwise.

A state of the base alone also loads. Its entries are not divided into parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, optim

from second_order.checkpoint.caller import is_checkpointing
from second_order.checkpoint.saved import (
    BASE,
    CURVATURE,
    HEADER,
    SavedPart,
    check_base_part,
)
from second_order.distributed.fsdp import is_dtensor, local_tensor, shard_like
from second_order.errors import SecondOrderError
from second_order.optimizers.base_pair import AUX_BASE, base_of, own_entries
from second_order.training.context import Training, base_class_names
from second_order.training.curvature import Curvature
from second_order.training.groups import NAMES, group_params
from second_order.utils.checks import LAYER_OPTIONS, PEAK_LR, list_names

__all__ = [
    "VERSION",
    "Checkpoint",
    "add_checkpoint_entries",
    "add_collected",
    "check_is_complete",
    "check_is_state",
    "collects_in_state_dict",
    "export_base_state",
    "header",
    "read_checkpoint",
]

# Schedulers may round a learning rate to slightly below zero.
MIN_LEARNING_RATE = -1e-8

# Settings that only some versions of torch have.
VERSION_DEPENDENT_SETTINGS = {
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
    "decoupled_weight_decay",
}

VERSION = 1
NOTHING_LOADED = "Nothing has been loaded"


class Checkpoint(NamedTuple):
    """The content of a checkpoint, after all checks."""

    state_dict: dict[str, Any]  # for torch to load, with the parts of the base only
    curvature: dict[Tensor, SavedPart]
    steps: int
    absent: list[str]  # names of the parameters that train, and that it lacks


def header(steps: int, base: optim.Optimizer) -> dict[str, Any]:
    """Return the entries, saved with every parameter, that identify a checkpoint."""
    # The name of the base is a key, because torch.distributed.checkpoint flattens only
    # numbers and tensors.
    return {"steps": steps, "version": VERSION, "base_class": {type(base).__name__: 1}}


def read_checkpoint(
    state_dict: Mapping[str, Any],
    base: optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> Checkpoint:
    """Check and read a checkpoint of an optimizer, or of its base alone.

    Args:
        state_dict: The checkpoint.
        base: The base, or both bases.
        groups: The optimizer's groups.
        names: The names of the model's parameters, by id.

    Raises:
        ValueError: If an entry does not fit or is another base's. The error names it.
    """
    check_is_state(state_dict)
    saved_groups = state_dict["param_groups"]
    state = state_dict["state"]
    _check_groups(saved_groups, groups, base)

    # Separate the two parts of each parameter.
    base_state = _entries_without_parameter(state_dict)
    curvature: dict[Tensor, SavedPart] = {}
    absent: list[str] = []
    for i, (saved_group, group) in enumerate(zip(saved_groups, groups, strict=True)):
        group_base = base_of(base, group)
        for key, p in zip(saved_group["params"], group["params"], strict=True):
            name = names.get(id(p), f"number {key}")
            parts = _split_parts(state.get(key, {}))
            if CURVATURE in parts:
                part = SavedPart(key, CURVATURE, name, dict(parts[CURVATURE]))
                _check_base_class(part, group_base)
                curvature[p] = part
            if BASE in parts:
                entries = _shard_entries(parts[BASE], p)
                local_entries = {k: _local_entry(v, p) for k, v in entries.items()}
                part = SavedPart(key, BASE, name, local_entries)
                check_base_part(part, group_base, local_tensor(p))
                base_state[key] = {BASE: entries}
            if p.requires_grad and not parts.get(CURVATURE):
                absent.append(name)
        _check_settings(i, saved_group, group_base)

    # If the checkpoint has no options for layers, a group keeps its own.
    merged_groups = []
    for group, saved_group in zip(groups, saved_groups, strict=True):
        own_options = {
            key: group[key] for key in (*LAYER_OPTIONS, AUX_BASE) if key in group
        }
        merged_groups.append({**own_options, **saved_group})
    if not any(curvature.values()):  # the state of the base alone
        absent = []
    return Checkpoint(
        state_dict={**state_dict, "state": base_state, "param_groups": merged_groups},
        curvature=curvature,
        steps=_check_headers(curvature.values()),
        absent=absent,
    )


def _entries_without_parameter(
    state_dict: Mapping[str, Any],
) -> dict[Any, dict[str, Any]]:
    """Return what the base stores under keys other than parameters, as MADGRAD does."""
    members = _members(state_dict["param_groups"])
    entries = {}
    for key, value in state_dict["state"].items():
        parts = _split_parts(value)
        if key not in members and BASE in parts:
            entries[key] = {BASE: parts[BASE]}
    return entries


def _members(groups: Iterable[Mapping[str, Any]]) -> set[Any]:
    """Return the keys of the parameters in a checkpoint's groups."""
    return {key for group in groups for key in group.get("params", ())}


def _shard_entries(part: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """Return the base's entries of a parameter.

    If FSDP2 sharded it, tensors become shards.
    """
    entries = {}
    for key, value in part.items():
        entries[key] = shard_like(p, value) if isinstance(value, Tensor) else value
    return entries


def _local_entry(value: Any, p: Tensor) -> Any:
    """Return the local rows of an entry that is a DTensor of the parameter's shape."""
    if is_dtensor(value) and value.shape == p.shape:
        return local_tensor(value)
    return value


# ------------------------------------------------------------------------------- checks


def check_is_state(value: Any) -> None:
    """Raise ValueError unless a value has the structure of an optimizer's state."""
    parts = value if isinstance(value, Mapping) else {}
    state: Any = parts.get("state")
    groups: Any = parts.get("param_groups")
    is_state = (
        isinstance(state, Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) for group in groups)
    )
    if is_state:
        # Under other keys than parameters, a base may store values of any kind.
        entries = [state.get(key, {}) for key in _members(groups)]
        is_state = all(isinstance(entry, Mapping) for entry in entries)
    if not is_state:
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
    """Raise ValueError unless sizes, bases, options and order of names are equal."""
    # Sizes and options.
    saved_sizes = [len(group.get("params", ())) for group in saved_groups]
    sizes = [len(group["params"]) for group in groups]
    saved_names = [name for group in saved_groups for name in group.get(NAMES) or []]
    names = [name for group in groups for name in group.get(NAMES) or []]
    if saved_sizes != sizes:
        raise ValueError(
            f"the checkpoint has {len(saved_sizes)} parameter groups with {saved_sizes} "
            f"parameters, but the optimizer over {base_class_names(base)} has {len(sizes)} with "
            f"{sizes}; {_describe_extra_names(saved_names, names)}make the same groups before "
            f"loading. {NOTHING_LOADED}"
        )
    for i, (saved_group, group) in enumerate(zip(saved_groups, groups, strict=True)):
        _check_group_options(i, saved_group, group)

    # Entirely different names are accepted, because a wrapper may rename everything.
    if saved_names == names or sorted(saved_names) != sorted(names):
        return
    for saved_name, name in zip(saved_names, names, strict=True):
        if saved_name != name:
            raise ValueError(
                f"the checkpoint's param_groups have {saved_name!r} in 'param_names' where the "
                f"optimizer has {name!r}: make the groups in the order in which they were saved, "
                f"or reorder the checkpoint with register_load_state_dict_pre_hook; nothing has "
                f"been loaded"
            )


def _describe_extra_names(saved_names: Sequence[str], names: Sequence[str]) -> str:
    """Return a part of an error that names the parameters that only one side has.

    An optimizer leaves out parameters that are frozen when you pass it a model. Returns
    "" if no name differs, or if the two sides have no name in common.
    """
    if not set(saved_names) & set(names):
        return ""
    description = ""
    only_saved = [repr(name) for name in saved_names if name not in names]
    if only_saved:
        description += (
            f"only the checkpoint has {list_names(only_saved)}: if they are frozen now, freeze "
            f"them after you have made the optimizer; "
        )
    only_here = [repr(name) for name in names if name not in saved_names]
    if only_here:
        description += (
            f"only the optimizer has {list_names(only_here)}: if they were frozen when the saved "
            f"run made its optimizer, freeze them before you make this one; "
        )
    return description


def _check_group_options(
    i: int, saved: Mapping[str, Any], group: Mapping[str, Any]
) -> None:
    """Raise ValueError if options of group i are invalid, or change its kind."""
    # Are the options valid?
    place = f"the checkpoint's param_groups[{i}]"
    try:
        for option in LAYER_OPTIONS.keys() & saved.keys():
            LAYER_OPTIONS[option](f"{place}: {option}", saved[option])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}. {NOTHING_LOADED}") from error

    # Does the same base train the group, and is it preconditioned as before?
    for key, default in ((AUX_BASE, False), ("precondition", True)):
        saved_value = saved.get(key)
        value = group.get(key, default)
        if saved_value is not None and saved_value != value:
            raise ValueError(
                f"{place} has {key!r}: {saved_value}, and here it is {value}; make the optimizer "
                f"with the same aux_base and groups, or load one base's part of the checkpoint: "
                f"export_base_state(checkpoint, aux_base=...). {NOTHING_LOADED}"
            )


def _check_settings(i: int, saved: Mapping[str, Any], base: optim.Optimizer) -> None:
    """Raise ValueError if group i lacks settings, or its learning rate is invalid."""
    missing = base.defaults.keys() - saved.keys() - VERSION_DEPENDENT_SETTINGS
    if missing:
        raise _wrong_base_error(f"an optimizer without {sorted(missing)}", base)
    lr = saved.get("lr")
    if (
        not isinstance(lr, (int, float, Tensor))
        or not MIN_LEARNING_RATE <= float(lr) < math.inf
    ):
        raise ValueError(
            f"the checkpoint's param_groups[{i}]['lr'] is {lr!r}, not a finite number of at least "
            f"0; nothing has been loaded"
        )


def _check_base_class(part: SavedPart, base: optim.Optimizer) -> None:
    """Raise ValueError if another base saved a parameter's entries."""
    saved_by = " and ".join(part.get("base_class", ()))
    if saved_by not in ("", type(base).__name__):
        raise _wrong_base_error(saved_by, base)


def _wrong_base_error(saved_by: str, base: optim.Optimizer) -> ValueError:
    name = type(base).__name__
    return ValueError(
        f"the checkpoint was saved by {saved_by}, and the base here is {name}: their states "
        f"mean different things; make the optimizer with the base that saved it, or start "
        f"{name} without it. {NOTHING_LOADED}"
    )


def _check_headers(parts: Iterable[SavedPart]) -> int:
    """Check the versions, and return the number of steps, equal for all parameters."""
    steps: int | None = None
    for part in parts:
        if not part:
            continue
        part.require(HEADER)
        if part["version"] != VERSION:
            raise part.wrong(
                "version",
                f"is {part['version']}, and this version of second_order reads {VERSION}; install "
                f"the version that wrote the checkpoint, or a newer one",
            )

        part_steps = part.whole("steps", 0)
        if steps not in (None, part_steps):
            raise part.wrong(
                "steps", f"is {part_steps}, and {steps} for another parameter"
            )
        steps = part_steps
    return steps or 0


def _split_parts(entry: Any) -> Mapping[str, Any]:
    """Return an entry of a state by parts. The base's own state is one part."""
    if isinstance(entry, Mapping) and (not entry or entry.keys() & {BASE, CURVATURE}):
        return entry
    return {BASE: entry}


# ------------------------------------------------------------------------------- saving


def export_base_state(
    state_dict: Mapping[str, Any], aux_base: bool = False
) -> dict[str, Any]:
    """Return the state that the base alone would have saved, for ``torch.optim``.

        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain.load_state_dict(export_base_state(optimizer.state_dict()))

    Args:
        state_dict: The ``state_dict()`` of an optimizer of this package, saved and
            loaded or not. If ranks store only parts of the state, call
            ``consolidate()`` first.
        aux_base: True for the state of ``aux_base`` instead of ``base``.

    Returns:
        A state for the base's class, with its momentum and hyperparameters. Tensors are
        shared with ``state_dict``, not copied.

    Raises:
        ValueError: If ``state_dict`` is not such a state, or has no ``aux_base``.
    """
    check_is_state(state_dict)
    groups = state_dict["param_groups"]
    has_two_bases = all(isinstance(group.get(AUX_BASE), bool) for group in groups)
    if aux_base and not has_two_bases:
        raise ValueError(
            "this is the state of an optimizer with one base; leave aux_base=True out"
        )

    # Copy the base's groups without our own settings, and the base's state.
    own_settings = (PEAK_LR, AUX_BASE, *LAYER_OPTIONS)
    base_groups = []
    shared = _entries_without_parameter(state_dict)
    if has_two_bases:
        shared = own_entries(shared, aux_base)
    base_state: dict[Any, Any] = {key: parts[BASE] for key, parts in shared.items()}
    for group in groups:
        if has_two_bases and group[AUX_BASE] is not aux_base:
            continue
        base_group = {k: value for k, value in group.items() if k not in own_settings}
        base_groups.append(base_group)
        for key in group["params"]:
            part = _split_parts(state_dict["state"].get(key, {})).get(BASE)
            if part:
                base_state[key] = part
    return {"state": base_state, "param_groups": base_groups}


@dataclass(frozen=True)
class Collected:
    """State of other ranks, after it was collected on this rank.

    Attributes:
        parts: The entries to add to each part, by parameter.
        to: The rank that saves the checkpoint. None: every rank has the state.
    """

    parts: Mapping[Tensor, Mapping[str, Mapping[str, Any]]]
    to: int | None


def collects_in_state_dict(
    training: Training, curvature: Curvature, collected: Collected | None
) -> bool:
    """Whether ``state_dict`` is collective and collects the state of other ranks.

    ``torch.distributed.checkpoint`` calls it on every rank if it gathers the full state
    of a sharded model.
    """
    wants_full_state = is_checkpointing() and not is_checkpointing(part=True)
    is_sharded = any(is_dtensor(p) for p in group_params(training.groups))
    is_incomplete = collected is None and bool(curvature.remote_state)
    return (
        wants_full_state
        and is_sharded
        and is_incomplete
        and curvature.resumes_without_remote_state
    )


def check_is_complete(
    training: Training, curvature: Curvature, collected: Collected | None
) -> None:
    """Warn or raise SecondOrderError if this rank's ``state_dict`` lacks entries.

    ``torch.distributed.checkpoint`` only needs this rank's part of the state.
    """
    # Nothing is missing if this rank has all of the state.
    missing = curvature.remote_state
    if not missing:
        return
    rank = training.world.rank
    wants_part = is_checkpointing(part=True)

    # The state was collected, possibly on another rank.
    if collected is not None:
        to = collected.to
        if to not in (None, rank) and training.is_first_warning("partial"):
            training.warn(
                f"state_dict() on rank {rank} lacks some of the state: consolidate(to={to}) "
                f"collected it on rank {to}; save it there, or use to=None"
            )
    # The missing part can be computed again, but the run is then not exactly the same.
    elif curvature.resumes_without_remote_state:
        if not wants_part and training.is_first_warning("inverses elsewhere"):
            training.warn(
                f"state_dict() on rank {rank} lacks {missing}: they are refreshed at the first "
                f"step after loading; for a run that resumes exactly, first call "
                f"optimizer.consolidate(to=0) on every process"
            )
    # Otherwise only a checkpoint of which each rank writes its part is complete.
    elif not (curvature.saves_by_rank and wants_part):
        alternative = "consolidate(to=None) for torch.distributed.checkpoint"
        if curvature.saves_by_rank:
            alternative = "save with torch.distributed.checkpoint"
        raise SecondOrderError(
            f"{training.name}.state_dict() would lack {missing}; call "
            f"optimizer.consolidate(to=0) on every process first, or {alternative}"
        )


def add_checkpoint_entries(
    training: Training, curvature: Curvature, state: dict[Any, dict[str, Any]]
) -> None:
    """Add the entries that only checkpoints have to a state, by parameter number."""
    if not state:
        return
    to_save = curvature.state_to_save()
    parts = {p: {CURVATURE: entries} for p, entries in to_save.items()}
    _add_parts(training, state, parts)


def add_collected(
    training: Training, collected: Collected, state: dict[Any, dict[str, Any]]
) -> None:
    """Add the collected entries of other ranks to a state, by parameter number."""
    _add_parts(training, state, collected.parts)


def _add_parts(
    training: Training,
    state: dict[Any, dict[str, Any]],
    added: Mapping[Tensor, Mapping[str, Mapping[str, Any]]],
) -> None:
    """Replace parts of the base, and add entries to parts of the curvature."""
    for index, p in enumerate(group_params(training.groups)):
        if p not in added or index not in state:
            continue
        entry = state[index]
        state[index] = {
            BASE: added[p].get(BASE, entry.get(BASE, {})),
            CURVATURE: {**entry.get(CURVATURE, {}), **added[p].get(CURVATURE, {})},
        }
