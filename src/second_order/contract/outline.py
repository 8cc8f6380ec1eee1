"""The outline of an optimizer that ranks compare before they exchange data in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.base_state import BASE
from second_order.contract.saved import unusual
from second_order.contract.training import Training
from second_order.distributed.agreement import Facts, require_same, word_of
from second_order.distributed.collectives import World
from second_order.sharded import is_dtensor

__all__ = ["Outline", "described", "outline_of_load"]

Groups: TypeAlias = Sequence[dict[str, Any]]
MEMBERS = ("params", "param_names")  # members are compared by their sizes


class Outline:
    """Compares an optimizer's groups, steps and loads between ranks by one word of 64 bits.

    Attributes:
        loaded: Facts, by name, of a checkpoint loaded since the ranks last compared, which must be
            the same on all of them; None without a load.
    """

    def __init__(self) -> None:
        self.loaded: Facts | None = None
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
            doing: The operation that this rank is about to do.
            steps: Number of steps that this rank has taken.
            groups: The parameter groups.
            facts: Gives further facts to compare, by name; not called on one process, so that
                options' callables are called no more often than they are used.
            name_of: The parameters' names by their ids; called only if there is a difference, or
                other groups are coming.
            coming: The groups that are to take the place of these; before any step they are
                compared by the names of their members, too.

        Raises:
            RankMismatchError: With the first fact that differs.
        """
        if world.size == 1:
            return
        others, called = facts(), []
        if coming is not None:
            groups, names = coming, name_of()
            called = [[names.get(id(p), "") for p in group["params"]] for group in groups]
        found = [x for group in groups for x in _outline(group)]
        if found != self._groups:  # differences are rare, but for the learning rate
            self._groups, self._word = found, word_of(found)
        loaded, read = self.loaded is not None, self.loaded or []
        ours = ("a checkpoint loaded since the last step", loaded), ("step", steps), *read

        def describe() -> Facts:
            return [*ours, *_named(groups, name_of()), *others]

        brief = [steps, loaded, read, self._word, *(value for _, value in others), called]
        require_same(world, doing, brief, describe)
        self.loaded = None


def described(training: Training) -> list[str]:
    """A model and its groups, in lines that ranks compare at construction."""
    named = dict(training.model.named_parameters())
    lines = [
        f"{name}: {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in named.items()
    ]
    lines += [f"{n}: {tuple(b.shape)} {b.dtype}" for n, b in training.model.named_buffers()]
    names = training.names()
    for i, group in enumerate(training.groups):
        entries = {
            k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"
        }
        members = [names.get(id(p), "(not in the model)") for p in group["params"]]
        called = f"{training.base_name} group {i}"
        lines += [f"{called}: {entries}", f"{called}: parameters {members}"]
    return [*lines, f"gradients averaged by the optimizer: {training.averages}"]


def outline_of_load(
    training: Training,
    state: Mapping[Tensor, Mapping[str, Any]],
    curvature: Mapping[Tensor, Mapping[str, Any]],
    told: Sequence[str],
) -> Facts:
    """Facts of a loaded checkpoint that must be equal on all ranks: numbers, and lengths.

    They differ if a rank has loaded another run's checkpoint of the same step.

    Args:
        training: The training that has loaded it; one process compares nothing.
        state: The parameters' state as it has been loaded, with the base's parts.
        curvature: The ``"curvature"`` parts that have been read.
        told: Names of the entries of these that every rank has.
    """
    if training.world.size == 1:
        return []
    names = dict(training.model.named_parameters())
    keys: list[tuple[str, list[str]]] = []
    values: list[Any] = []
    for name, p in names.items():
        base, ours = state.get(p, {}).get(BASE, {}), curvature.get(p, {})
        kept = [key for key in told if key in ours]
        keys.append((name, [*base, *kept]))
        values += [*base.values(), *(ours[key] for key in kept)]
    numbers = iter(_lengths(values))
    return [
        (f"{name} in the checkpoint loaded", [[key, next(numbers)] for key in found])
        for name, found in keys
    ]


def _lengths(values: Sequence[Any]) -> list[Any]:
    """Replace tensors by their Euclidean lengths, read from a device at once; keep numbers."""
    tensors = [v for v in values if isinstance(v, Tensor) and not unusual(v)]
    lengths = [
        torch.linalg.vector_norm(
            t.detach() if t.is_floating_point() or t.is_complex() else t.double(),
            dtype=torch.complex128 if t.is_complex() else torch.float64,
        )
        for t in tensors
    ]
    devices = {each.device for each in lengths}
    found: dict[int, float] = {}
    for device in devices:
        here = [(id(t), x) for t, x in zip(tensors, lengths, strict=True) if x.device == device]
        found.update(
            zip((i for i, _ in here), torch.stack([x for _, x in here]).tolist(), strict=True)
        )
    return [found[id(v)] if id(v) in found else _number(v) for v in values]


def _outline(group: dict[str, Any]) -> list[Any]:
    """The numbers among a group's entries, and each parameter's size, or −1 if it is frozen."""
    found: list[Any] = [_number(v) for k, v in group.items() if k not in MEMBERS]
    params = group["params"]
    found.append(len(params))
    found += [p.numel() if p.requires_grad else -1 for p in params]
    return found


def _number(value: Any) -> Any:
    if is_dtensor(value):  # its numbers are on several ranks
        return None
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
