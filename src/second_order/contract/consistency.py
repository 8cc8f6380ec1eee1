"""What ranks compare: all that decides what a step sends, in one fingerprint at every step.

Which collectives a step has follows from facts that every rank has by itself: the layers that
train, the intervals that are due, how many steps it has taken. So each step begins with a
fingerprint of 64 bits that stands for all of it, in a group where nothing else is said; ranks whose
fingerprints differ tell each other everything, and raise.

With the option ``debug``, every so many steps, that fingerprint is also of the tensors that are to
be the same on all ranks, bit for bit, and the error names the first that is not:

    parameters                        those of the model and of the groups
    the base's state                  unless each rank has a part of it
    what the curvature keeps alike    factors, and inverses, where every rank has them

What FSDP2 has sharded is left out, and buffers: the running averages of a BatchNorm are each rank's
own.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.training import Curvature, Training, members_of, settings_of
from second_order.distributed.world import World
from second_order.errors import RankMismatchError, SecondOrderError
from second_order.options import check_debug
from second_order.sharded import is_dtensor

__all__ = ["Consistency", "checksum", "fingerprint", "first_difference", "require_same"]

Facts: TypeAlias = Sequence[tuple[str, Any]]

MEMBERS = ("params", "param_names")  # members are compared by their sizes
SAME = 1e-6  # relative tolerance: each rank computes a schedule's cosine by itself
REMEDY = (
    "nothing has been changed by this step. Freeze, change groups, load the same checkpoint, close "
    "and set options at the same step on every rank; and let no rank change parameters or state by "
    "itself, or leave its gradients out of the average (gradient_averaging=)"
)
BLOCK = 2**18  # words that are multiplied at once: two megabytes of numbers
BETWEEN_BLOCKS = 0x9E3779B97F4A7C15 - 2**64  # odd
WORDS = {1: torch.uint8, 2: torch.int16}  # by the size of an element in bytes; others int32


class Consistency:
    """Compares optimizers, groups and steps between ranks, by the option ``debug``."""

    def __init__(self, debug: bool | int) -> None:
        self.every = check_debug(debug)  # steps between comparisons of tensors; 0 for none
        self.loaded = False  # a checkpoint has been loaded since the last comparison
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
            remedy="build the same model with the same options on every rank; if another module "
            "contains it on some ranks alone, pass model=",
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


def require_same(
    world: World,
    doing: str,
    brief: Sequence[Any],
    describe: Callable[[], Facts],
    remedy: str = REMEDY,
) -> None:
    """Raise on every rank unless all are about to do the same; a collective of one small message.

    ``brief`` has all facts that must be equal, as primitives with distinct ``repr``; ``describe``
    gives them by name, in the order in which differences are told, if fingerprints differ. Numbers
    that differ by rounding alone are equal.

    Raises:
        RankMismatchError: With the first fact that differs, as most ranks have it and as another,
            or the facts known of a rank that has not come.
    """
    try:
        aside = world.aside()
        if aside.same(fingerprint((doing, *brief))):
            return
        everyone = aside.all_gather_object([("about to", doing), *describe()])
    except SecondOrderError as error:  # after the group's timeout at the latest
        raise RankMismatchError(
            f"rank {world.rank} is about to {doing}, and not all of the {world.size} ranks are, if "
            f"none has failed; take as many steps on every rank, and call close() after the same "
            f"one: {error}"
        ) from error
    told = [repr(facts) for facts in everyone]
    usual = told.index(Counter(told).most_common(1)[0][0])
    for rank, theirs in enumerate(everyone):
        found = first_difference(everyone[usual], theirs)
        if found is not None:
            raise RankMismatchError(
                f"the ranks have parted: rank {usual} has [{found[0]}], rank {rank} has "
                f"[{found[1]}]; {remedy}"
            )


def fingerprint(facts: Sequence[Any]) -> int:
    """Hash primitives into 64 bits, alike in every process (``hash`` of a text is not)."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def first_difference(a: Facts, b: Facts) -> tuple[str, str] | None:
    """The first fact of two lists that is not the same in both, as each has it."""
    for i in range(max(len(a), len(b))):
        if i >= min(len(a), len(b)) or a[i][0] != b[i][0] or not _same(a[i][1], b[i][1]):
            one, other = (f"{x[i][0]}: {x[i][1]}" if i < len(x) else "nothing more" for x in (a, b))
            return one, other
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=SAME) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(type(a) is type(b) and a == b)


def checksum(tensor: Tensor) -> int:
    """A checksum of 64 bits of a tensor's bits; waits for the device.

    Bits are words wᵢ of 32, 16 or 8 bits, the sum is Σ aᵢ wᵢ modulo 2⁶⁴ with odd random numbers aᵢ,
    the same on all ranks (multiply-shift hashing, Dietzfelbinger et al. 1997): one changed word
    always changes it, and any other change does but for one case in 2³².
    """
    flat = tensor.detach().reshape(-1).contiguous()
    words = flat.view(WORDS.get(flat.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in words.split(BLOCK):
        total = total * BETWEEN_BLOCKS + (_multipliers(words.device)[: block.numel()] * block).sum()
    return int(total)


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=generator, device="cpu")
    return (drawn | 1).to(device)
