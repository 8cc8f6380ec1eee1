"""Checks that all ranks are about to issue the same collectives, by a 64-bit fingerprint per step.

Which collectives a step has follows from facts that every rank knows by itself: which layers train,
which intervals are due, how many steps were taken. Each step begins with an all-reduce of a
fingerprint of these facts over the control group. If fingerprints differ, the ranks exchange the
facts, and all raise the same error, which names what differs. Options, model and groups are
compared in this way at construction.

With the option ``debug``, the fingerprint of some steps includes checksums of the parameters. FSDP2
parameters are left out, because each rank has other rows, and so are buffers: a BatchNorm's running
averages are each rank's own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.fsdp import is_dtensor
from second_order.distributed.world import World
from second_order.errors import RankMismatchError, SecondOrderError
from second_order.training.context import Training
from second_order.training.curvature import Curvature
from second_order.training.groups import group_params
from second_order.utils.checks import check_debug

__all__ = ["Consistency", "checksum", "fingerprint", "first_difference", "require_same"]

Facts: TypeAlias = Sequence[tuple[str, Any]]

MEMBERS = ("params", "param_names")
TOLERANCE = 1e-6  # relative: a schedule's cosine may differ between machines by rounding
REMEDY = (
    "nothing has been changed by this step. Freeze, change groups, load the same checkpoint, close "
    "and set options at the same step on every rank; and let no rank change parameters or state by "
    "itself, or leave its gradients out of the average (gradient_averaging=)"
)
BLOCK = 2**18  # words per block of the checksum: two megabytes of multipliers
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # odd
WORDS = {1: torch.uint8, 2: torch.int16}  # by the size of an element in bytes; others int32


class Consistency:
    """Compares optimizers and steps between ranks, and parameters by the option ``debug``."""

    def __init__(self, debug: bool | int) -> None:
        self.every = check_debug(debug)  # steps between comparisons of parameters; 0 for none

    def check_built(self, training: Training, options: Sequence[str]) -> None:
        """Raise on every rank unless all have the same model, groups and options; a collective."""
        if training.world.size == 1:
            return
        facts = [
            *_model(training),
            ("base", training.base_name),
            *_settings(training.groups),
            *_members(training),
            ("gradients averaged by the optimizer", training.averages_gradients),
            *(line.partition(": ")[::2] for line in options),
            ("debug", f"every {self.every} steps"),
        ]
        require_same(
            training.world,
            f"make {training.name}",
            facts,
            lambda: facts,
            remedy="build the same model with the same options on every rank; if another module "
            "contains it on some ranks alone, pass model=",
        )
        training.world.equalize_group_counts()  # the user may have made groups of some ranks

    def check(
        self,
        training: Training,
        curvature: Curvature,
        doing: str,
        more: Facts = (),
        *,
        tensors: bool = False,
    ) -> None:
        """Raise RankMismatchError on every rank unless all are about to do the same; a collective.

        ``more`` are further facts that must be equal. Parameters are compared if ``debug`` is due,
        and ``tensors`` is given, as by a step.
        """
        if training.world.size == 1:
            return
        groups = training.groups
        sizes = [[p.numel() if p.requires_grad else -1 for p in g["params"]] for g in groups]
        first = [("step", training.steps), *_settings(groups)]
        last = [*curvature.fingerprint_values(), *more]
        if tensors and self.every and training.steps % self.every == 0:
            last += _checksums(training)
        require_same(
            training.world,
            doing,
            [*first, sizes, *last],
            lambda: [*first, *_members(training), *last],
        )


def require_same(
    world: World,
    doing: str,
    brief: Sequence[Any],
    describe: Callable[[], Facts],
    remedy: str = REMEDY,
) -> None:
    """Raise on every rank unless all are about to do the same; a collective of one small message.

    ``brief`` has all facts that must be equal, as primitives with distinct ``repr``. If the
    fingerprints differ, ``describe`` gives the facts by name. Differences by rounding are allowed.

    Raises:
        RankMismatchError: With the first fact that differs, or the facts known of a rank that has
            not come.
    """
    try:
        control = world.control_world()
        if control.all_equal(fingerprint((doing, *brief))):
            return
        everyone = control.all_gather_object([("about to", doing), *describe()])
    except SecondOrderError as error:  # after the group's timeout at the latest
        raise RankMismatchError(
            f"rank {world.rank} is about to {doing}, and not all of the {world.size} ranks are, if "
            f"none has failed; take as many steps on every rank, and call close() after the same "
            f"one: {error}"
        ) from error
    for rank, theirs in enumerate(everyone):
        difference = first_difference(everyone[0], theirs)
        if difference is not None:
            raise RankMismatchError(
                f"the ranks are out of sync: rank 0 has [{difference[0]}], rank {rank} has "
                f"[{difference[1]}]; {remedy}"
            )


def fingerprint(facts: Sequence[Any]) -> int:
    """Hash primitives to 64 bits, equal in every process (``hash`` of a string is not)."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def first_difference(a: Facts, b: Facts) -> tuple[str, str] | None:
    """The first fact that differs between two lists, as each has it."""
    for i in range(max(len(a), len(b))):
        here = f"{a[i][0]}: {a[i][1]}" if i < len(a) else "nothing more"
        there = f"{b[i][0]}: {b[i][1]}" if i < len(b) else "nothing more"
        both = i < min(len(a), len(b))
        if not (both and a[i][0] == b[i][0] and _equal(a[i][1], b[i][1])):
            return here, there
    return None


def _equal(a: Any, b: Any) -> bool:
    """Whether primitives are equal up to rounding."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=TOLERANCE) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(type(a) is type(b) and a == b)


# ------------------------------------------------------------------------------------------ facts


def _model(training: Training) -> Iterator[tuple[str, str]]:
    """The model's parameters and buffers, by name."""
    for name, p in training.model.named_parameters():
        yield name, f"{tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
    for name, b in training.model.named_buffers():
        yield name, f"{tuple(b.shape)} {b.dtype}"


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """The settings of the groups, by name."""
    return [
        (f"group {i}, {key}", _plain(value))
        for i, group in enumerate(groups)
        for key, value in group.items()
        if key not in MEMBERS
    ]


def _members(training: Training) -> Iterator[tuple[str, Any]]:
    """The parameters of the groups, by name."""
    names = training.param_names()
    for i, group in enumerate(training.groups):
        for j, p in enumerate(group["params"]):
            trains = "trains" if p.requires_grad else "frozen"
            name = names.get(id(p), f"parameter {j}")
            yield f"group {i}, {name}", f"{list(p.shape)}, {trains}"


def _plain(value: Any) -> Any:
    """A setting as primitives. Tensors on a device are not read."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Tensor):
        plain = value.numel() == 1 and value.device.type == "cpu" and not is_dtensor(value)
        return value.item() if plain else None
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else None


def _checksums(training: Training) -> Iterator[tuple[str, str]]:
    """Checksums of the parameters that every rank has as a whole, by name."""
    names = training.param_names()
    for p in dict.fromkeys([*group_params(training.groups), *training.model.parameters()]):
        if not is_dtensor(p):
            name = names.get(id(p), "(not in the model)")
            yield f"parameter {name!r}", f"{checksum(p):x} of {tuple(p.shape)} {p.dtype}"


def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of a tensor's bits. Synchronizes with the device.

    Bits are words wᵢ of 32, 16 or 8 bits. The sum is Σ aᵢ wᵢ modulo 2⁶⁴ with odd numbers aᵢ, so one
    changed word always changes it.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    words = flat.view(WORDS.get(flat.element_size(), torch.int32))
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=generator, device="cpu")
    multipliers = (numbers | 1).to(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in words.split(BLOCK):
        total = total * MULTIPLIER + (multipliers[: len(block)] * block).sum()
    return int(total)
