"""What ranks compare before they exchange data in a step.

The outline of the optimizer, at every step: what each is about to do, in one word. And with the
option ``debug``, every so many steps, what is to be the same on all of them:

    parameters                        those of the model and of the groups
    the base's state                  unless each rank has a part of it
    what the curvature keeps alike    factors, and inverses, where every rank has them

Of parameters that FSDP2 has sharded, ranks that have the same rows compare these. Buffers are left
out: the running averages of a BatchNorm are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.base_state import BASE
from second_order.contract.curvature import Curvature
from second_order.contract.groups import members_of
from second_order.contract.saved import unusual
from second_order.contract.training import Training
from second_order.distributed.agreement import Facts, require_same, word_of
from second_order.distributed.checksums import Shared, require_same_bits
from second_order.distributed.collectives import World
from second_order.distributed.rows import rows_of
from second_order.options import check_debug
from second_order.sharded import is_dtensor, local

__all__ = ["Comparison", "Outline", "described", "outline_of_load"]

Groups: TypeAlias = Sequence[dict[str, Any]]
MEMBERS = ("params", "param_names")  # members are compared by their sizes


REMEDY = (
    "Nothing has been changed by this step. Load the last checkpoint of before; and look for what "
    "one rank does by itself: it changes parameters or the base's state, its gradients are not "
    "averaged (gradient_averaging=), or its memory or a kernel fails"
)


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


class Comparison:
    """Compares the ranks' parameters and states, at the steps that the option asks for.

    Args:
        debug: The option: True, False, or a number of steps.

    Attributes:
        every: Number of steps between comparisons; 0 for none.
    """

    def __init__(self, debug: bool | int) -> None:
        self.every = check_debug(debug)
        self._same_at: int | None = None

    def compare(self, training: Training, curvature: Curvature) -> None:
        """Raise on every rank unless all have the same, if it is time; a collective then.

        Raises:
            RankMismatchError: With the first tensor that differs, and the ranks.
        """
        step = training.steps
        if not self.every or step % self.every or training.world.size == 1:
            return
        same_at, self._same_at = self._same_at, None
        ever = same_at is not None and same_at < step
        since = f" (at step {same_at} all was the same)" if ever else ""
        values = list(_shared(training, curvature))
        when = f"before step {step}{since}"
        require_same_bits(training.world, when, values, _rows(training), REMEDY)
        self._same_at = step


def _shared(training: Training, curvature: Curvature) -> Iterator[Shared]:
    names, members = training.names(), members_of(training.groups)
    called = {p: names.get(id(p), f"number {i} of the groups") for i, p in enumerate(members)}
    called |= {p: names[id(p)] for p in training.model.parameters() if id(p) in names}
    for p, name in called.items():
        yield Shared(f"parameter {name!r}", local(p), is_dtensor(p))
    state = {} if curvature.base_in_parts else dict(training.base.state)
    for p in members:
        for key, value in _leaves(state.get(p, {})):
            name = f"the base's {key!r} of parameter {called[p]!r}"
            in_rows = isinstance(value, Tensor) and is_dtensor(value)
            yield Shared(name, local(value) if isinstance(value, Tensor) else value, in_rows)
    for name, tensor in curvature.kept_by_all():
        yield Shared(name, tensor)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Tensor | float]]:
    """Tensors and numbers in nested containers, by where they are."""
    if isinstance(value, Tensor | int | float):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{i}")


def _rows(training: Training) -> list[Any] | None:
    """By rank, the rows that it has of sharded parameters; None if none is sharded."""
    world = training.world
    sharded = [p for p in training.model.parameters() if is_dtensor(p)]
    bounds = [rows_of(p, world).bounds for p in sharded]
    return [tuple(of(rank) for of in bounds) for rank in range(world.size)] if sharded else None
