"""What ranks compare: all that decides what a step sends, in one fingerprint at every step.

With the option ``debug``, every so many steps, that fingerprint is also of the tensors that are to
be the same on all ranks, bit for bit, and the error names the first that is not:

    parameters                        those of the model and of the groups
    the base's state                  unless each rank has a part of it
    what the curvature keeps alike    factors, and inverses, where every rank has them

Of parameters that FSDP2 has sharded, ranks that have the same rows compare these. Buffers are left
out: the running averages of a BatchNorm are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from second_order.contract.base_state import BASE
from second_order.contract.curvature import Curvature
from second_order.contract.groups import members_of
from second_order.contract.training import Training
from second_order.distributed.agreement import (
    REMEDY,
    Facts,
    checksum,
    fingerprint,
    require_same,
)
from second_order.distributed.shard_layout import layout_of
from second_order.errors import RankMismatchError
from second_order.options import check_debug
from second_order.sharded import is_dtensor, local

__all__ = ["Consistency"]

MEMBERS = ("params", "param_names")  # members are compared by their sizes


class Consistency:
    """Compares optimizers, groups, steps and loads between ranks.

    Args:
        debug: The option: True, False, or a number of steps.

    Attributes:
        every: Number of steps between comparisons of tensors; 0 for none.
    """

    def __init__(self, debug: bool | int) -> None:
        self.every = check_debug(debug)
        self._loaded: Facts | None = None
        self._outline: list[Any] = []
        self._word = 0

    def check_built(self, training: Training, options: Sequence[str]) -> None:
        """Raise on every rank unless all have the same model, groups and options; a collective."""
        world = training.world
        if world.size == 1:
            return
        world.level()
        lines = [*_described(training), *options, f"debug: every {self.every} steps"]
        require_same(
            world,
            f"make {training.name}",
            lines,
            lambda: [line.partition(": ")[::2] for line in lines],
            remedy="build the same model with the same options on every rank",
        )

    def check(
        self,
        training: Training,
        curvature: Curvature,
        doing: str,
        coming: Sequence[dict[str, Any]] | None = None,
        *,
        tensors: bool = False,
    ) -> None:
        """Raise on every rank unless all are about to do the same; a collective.

        Args:
            training: The training.
            curvature: The curvature, which has facts of its own.
            doing: The operation that this rank is about to do.
            coming: The groups that are to take the place of those that there are; they are compared
                by the names of their members, too.
            tensors: Whether to compare tensors, if that is due.

        Raises:
            RankMismatchError: With the first fact or tensor that differs.
        """
        world, step = training.world, training.steps
        if world.size == 1:
            return
        groups = training.groups if coming is None else coming
        loaded = ("a checkpoint loaded since the last step", self._loaded is not None)
        first, others = [loaded, ("step", step), *(self._loaded or ())], curvature.facts()
        due = tensors and self.every and step % self.every == 0
        whole, shards = _tensors(training, curvature) if due else ([], [])
        others = [*others, *whole]
        outline = _outline(groups)
        if outline != self._outline:  # differences are rare, but for the learning rate
            self._outline, self._word = outline, fingerprint(outline)
        called = [] if coming is None else _named(outline, groups, training.names())
        require_same(
            world,
            doing,
            [*first, self._word, *others, called],
            lambda: [*first, *_named(outline, groups, training.names()), *others],
        )
        if shards:
            _compare_shards(world.aside().all_gather_object(shards))
        self._loaded = None

    def loaded(
        self,
        training: Training,
        state: Mapping[Tensor, Mapping[str, Any]],
        curvature: Mapping[Tensor, Mapping[str, Any]],
        told: Sequence[str],
    ) -> None:
        """Have the ranks compare, at the next step, what they have loaded: numbers, and lengths.

        They differ if a rank has loaded another run's checkpoint of the same step.

        Args:
            training: The training that has loaded it; one process compares nothing.
            state: The parameters' state as it has been loaded, with the base's parts.
            curvature: The ``"curvature"`` parts that have been read.
            told: Names of the entries of these that every rank has.
        """
        self._loaded = found = []
        for name, p in training.model.named_parameters() if training.world.size > 1 else ():
            part = dict(state.get(p, {}).get(BASE, {}))
            part |= {key: curvature[p][key] for key in told if key in curvature.get(p, ())}
            found.append((f"{name} in the checkpoint loaded", _plain(part, _length)))


def _described(training: Training) -> list[str]:
    """A model and its groups, in lines."""
    model, names = training.model, training.names()
    lines = [
        f"{name}: {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    lines += [f"{name}: {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    for i, group in enumerate(training.groups):
        entries = {
            k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"
        }
        members = [names.get(id(p), "(not in the model)") for p in group["params"]]
        called = f"{training.base_name} group {i}"
        lines += [f"{called}: {entries}", f"{called}: parameters {members}"]
    return [*lines, f"gradients averaged by the optimizer: {training.averages}"]


def _outline(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, Any, Any]]:
    """Entries by group and name, and each parameter's size by its place, -1 if it is frozen."""
    found: list[tuple[int, Any, Any]] = []
    for i, group in enumerate(groups):
        found += [(i, k, _plain(v, _scalar)) for k, v in group.items() if k not in MEMBERS]
        members = enumerate(group["params"])
        found += [(i, j, p.numel() if p.requires_grad else -1) for j, p in members]
    return found


def _named(
    outline: Sequence[tuple[int, Any, Any]],
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> list[tuple[str, Any]]:
    found = []
    for i, key, value in outline:
        if isinstance(key, int):
            p, trains = groups[i]["params"][key], "frozen" if value < 0 else "trains"
            name = names.get(id(p), f"parameter {key}")
            found.append((f"group {i}, {name}", f"{list(p.shape)}, {trains}"))
        else:
            found.append((f"group {i}, {key}", value))
    return found


def _tensors(training: Training, curvature: Curvature) -> tuple[Facts, Facts]:
    """Checksums by name: of what every rank has, and of shards, by their first rows."""
    names, members, world = training.names(), members_of(training.groups), training.world
    state = {} if curvature.base_in_parts else training.base.state
    values: list[tuple[str, Any]] = []
    for p in dict.fromkeys([*members, *training.model.parameters()]):
        called = f"parameter {names.get(id(p), '(not in the model)')!r}"
        values.append((called, p))
        entries = state[p].items() if p in state else ()
        values += [(f"the base's {key!r} of {called}", value) for key, value in entries]
    whole = [(name, _plain(value, _bits)) for name, value in values if not is_dtensor(value)]
    return [*whole, *((name, _bits(value)) for name, value in curvature.kept_by_all())], [
        (f"{name}, from row {layout_of(value, world).bounds(world.rank)[0]}", _bits(value))
        for name, value in values
        if is_dtensor(value)
    ]


def _compare_shards(everyone: Sequence[Facts]) -> None:
    """Raise RankMismatchError if ranks that have the same rows have others in them."""
    first: dict[str, tuple[int, Any]] = {}
    for rank, facts in enumerate(everyone):
        for name, bits in facts:
            other, theirs = first.setdefault(name, (rank, bits))
            if theirs != bits:
                raise RankMismatchError(
                    f"the ranks have parted: rank {other} has [{name}: {theirs}], rank {rank} has "
                    f"[{name}: {bits}]; {REMEDY}"
                )


def _plain(value: Any, read: Callable[[Tensor], Any]) -> Any:
    """A value as primitives, with what ``read`` gives for each tensor."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Tensor):
        return read(value)
    if isinstance(value, Mapping):
        return [[str(key), _plain(v, read)] for key, v in value.items()]
    return [_plain(v, read) for v in value] if isinstance(value, tuple | list) else None


def _scalar(tensor: Tensor) -> Any:
    """The number in a tensor of one; None on a device, which is not waited for."""
    plain = tensor.numel() == 1 and tensor.device.type == "cpu" and not is_dtensor(tensor)
    return tensor.item() if plain else None


def _length(tensor: Tensor) -> Any:
    """The Euclidean length; None of a sharded tensor, whose numbers are on several ranks."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return None if is_dtensor(tensor) else float(tensor.detach().to(wide).norm().real)


def _bits(tensor: Tensor) -> str:
    return f"{checksum(local(tensor)):x} of {tuple(tensor.shape)} {tensor.dtype}"
