"""What ranks compare: all that decides what a step sends, in one fingerprint at every step.

With the option ``debug``, every so many steps, that fingerprint is also of the tensors that are to
be the same on all ranks, bit for bit, and the error names the first that is not:

    parameters                        those of the model and of the groups
    the base's state                  unless each rank has a part of it
    what the curvature keeps alike    factors, and inverses, where every rank has them

What FSDP2 has sharded is left out, and buffers: the running averages of a BatchNorm are each rank's
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.contract.training import Curvature, Training, members_of, settings_of
from second_order.distributed.agreement import checksum, fingerprint, require_same
from second_order.options import check_debug
from second_order.sharded import is_dtensor

__all__ = ["Consistency"]

MEMBERS = ("params", "param_names")  # members are compared by their sizes


class Consistency:
    """Compares optimizers, groups and steps between ranks, by the option ``debug``.

    Attributes:
        every: Number of steps between comparisons of tensors; 0 for none.
        loaded: Whether a checkpoint has been loaded since the last comparison.
    """

    def __init__(self, debug: bool | int) -> None:
        self.every, self.loaded = check_debug(debug), False
        self._outline: list[Any] = []
        self._fingerprint = 0

    def check_built(self, training: Training, options: Sequence[str]) -> None:
        """Raise on every rank unless all have the same model, groups and options; a collective."""
        if training.world.size == 1:
            return
        training.world.level()
        lines = [*_described(training), *options, f"debug: every {self.every} steps"]
        require_same(
            training.world,
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
        *,
        named: bool = False,
        tensors: bool = False,
    ) -> None:
        """Raise RankMismatchError on every rank unless all are about to do the same; a collective.

        Groups are compared by their members' names too if ``named``, and tensors if that is due.
        """
        step, groups = training.steps, training.groups
        if training.world.size == 1:
            return
        first = [("a checkpoint loaded since the last step", self.loaded), ("step", step)]
        due = tensors and self.every and step % self.every == 0
        others = [*curvature.facts(), *(_checksums(training, curvature) if due else ())]
        outline = _outline(groups)
        if outline != self._outline:  # differences are rare, but for the learning rate
            self._outline, self._fingerprint = outline, fingerprint(outline)
        members = _named(outline, groups, training.names()) if named else []
        require_same(
            training.world,
            doing,
            [*first, self._fingerprint, *others, members],
            lambda: [*first, *_named(outline, groups, training.names()), *others],
        )
        self.loaded = False


def _described(training: Training) -> list[str]:
    """A model and its groups, in lines."""
    model, names = training.model, training.names()
    lines = [
        f"{name}: {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    lines += [f"{name}: {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    for i, group in enumerate(training.groups):
        members = [names.get(id(p), "(not in the model)") for p in group["params"]]
        called = f"{training.base_name} group {i}"
        lines += [f"{called}: {settings_of(group)}", f"{called}: parameters {members}"]
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


def _checksums(training: Training, curvature: Curvature) -> Iterator[tuple[str, Any]]:
    """Checksums of what every rank has, by name."""
    names, members = training.names(), members_of(training.groups)
    state = {} if curvature.base_in_parts else training.base.state
    for p in dict.fromkeys([*members, *training.model.parameters()]):
        called = f"parameter {names.get(id(p), '(not in the model)')!r}"
        if not is_dtensor(p):
            yield called, _bits(p)
            for key, value in state[p].items() if p in state else ():
                yield f"the base's {key!r} of {called}", _plain(value, _bits)
    for name, value in curvature.kept_by_all():
        yield name, _bits(value)


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


def _bits(tensor: Tensor) -> str:
    return f"{checksum(tensor):x} of {tuple(tensor.shape)} {tensor.dtype}"
