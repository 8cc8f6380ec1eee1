"""Check that all ranks will issue the same collectives, by a fingerprint per step.

Facts that every rank knows decide which collectives a step issues: which layers train,
which intervals are due, how many steps were taken.

    step            every rank hashes these facts; the ranks all-reduce the fingerprints
    difference      the ranks gather the facts, and all raise an error with those that
                    differ
    construction    the same for the options, the model and the groups

With the option ``debug``, the fingerprint of some steps includes checksums of the
parameters. FSDP2 parameters are left out, because each rank stores other rows. Buffers
are left out as well, because each rank has its own running averages of BatchNorm.
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
from second_order.utils.checks import check_debug, python_number

__all__ = [
    "Consistency",
    "checksum",
    "fingerprint",
    "first_difference",
    "require_same",
    "to_primitive",
]

Facts: TypeAlias = Sequence[tuple[str, Any]]

# Relative: the cosine of a schedule may differ by rounding between machines.
TOLERANCE = 1e-6

# Words per block of the checksum. The multipliers of a block take two megabytes.
BLOCK_SIZE = 2**18
BLOCK_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # odd: 2⁶⁴ divided by the golden ratio
WORD_DTYPES = {1: torch.uint8, 2: torch.int16}  # by bytes per element; others int32

REMEDY = (
    "nothing has been changed by this step. Freeze, change groups, load the same checkpoint, close "
    "and set options at the same step on every rank; and let no rank change parameters or state by "
    "itself, or leave its gradients out of the average (gradient_averaging=)"
)


class Consistency:
    """Compares optimizers and steps between ranks.

    Args:
        debug: The option of the same name: True, False, or steps between two
            comparisons of the parameters.
    """

    def __init__(self, debug: bool | int) -> None:
        self.steps_between_checksums = check_debug(debug)  # 0 for none

    def check_construction(self, training: Training, options: Sequence[str]) -> None:
        """Raise on every rank unless all have the same model, groups and options.

        Collective.

        Args:
            training: The model, the groups and the ranks.
            options: Further options, one "name: value" per line.
        """
        if training.world.size == 1:
            return
        facts: list[tuple[str, Any]] = [
            *_model_facts(training),
            ("base", training.base_name),
            *_group_settings(training.groups),
            *_group_members(training),
            ("gradients averaged by the optimizer", training.averages_gradients),
        ]
        for line in options:
            name, _, value = line.partition(": ")
            facts.append((name, value))
        facts.append(("debug", f"every {self.steps_between_checksums} steps"))
        require_same(
            training.world,
            f"make {training.name}",
            facts,
            lambda: facts,
            remedy="build the same model with the same options on every rank; if only some ranks "
            "have a module that contains it, pass model=",
        )
        # The user may have made groups on some ranks only.
        training.world.equalize_group_counts()

    def check(
        self,
        training: Training,
        curvature: Curvature,
        action: str,
        facts: Facts = (),
        *,
        with_params: bool = False,
    ) -> None:
        """Raise RankMismatchError on every rank unless all are about to do the same.

        Collective.

        Args:
            training: The groups, the step and the ranks.
            curvature: Adds the facts that decide which collectives the step issues.
            action: What this rank is about to do, for the message.
            facts: Further names and values that must be equal.
            with_params: Whether to compare the parameters if ``debug`` is due.
        """
        if training.world.size == 1:
            return
        groups = training.groups
        settings = [("step", training.steps), *_group_settings(groups)]
        # The sizes show which parameters train.
        sizes = [
            [p.numel() if p.requires_grad else -1 for p in g["params"]] for g in groups
        ]
        others = [*curvature.fingerprint_values(), *facts]
        every = self.steps_between_checksums
        if with_params and every and training.steps % every == 0:
            others += _checksums(training)
        require_same(
            training.world,
            action,
            [*settings, sizes, *others],
            lambda: [*settings, *_group_members(training), *others],
        )


def require_same(
    world: World,
    action: str,
    values: Sequence[Any],
    describe: Callable[[], Facts],
    remedy: str = REMEDY,
) -> None:
    """Raise on every rank unless all are about to do the same.

    Collective, one small message.

    Args:
        world: The ranks.
        action: What this rank is about to do, for the message.
        values: What must be equal, as primitives with distinct ``repr``.
        describe: Returns the same facts with names. It is called if the fingerprints
            differ. Floating-point numbers may then differ by rounding.
        remedy: End of the error message.

    Raises:
        RankMismatchError: With the first fact that differs. If a rank did not take
            part, with what this rank is about to do.
    """
    # Compare the fingerprints, and gather the facts if they differ.
    try:
        control = world.control_world()
        if control.all_equal(fingerprint((action, *values))):
            return
        facts_by_rank = control.all_gather_object([("about to", action), *describe()])
    except SecondOrderError as error:  # at the latest after the timeout of the group
        raise RankMismatchError(
            f"rank {world.rank} is about to {action}, and not all of the {world.size} ranks are, "
            f"if none has failed; take as many steps on every rank, and call close() after the "
            f"same one: {error}"
        ) from error

    # Raise an error with the first difference, if it exceeds rounding.
    for rank, facts in enumerate(facts_by_rank):
        difference = first_difference(facts_by_rank[0], facts)
        if difference is not None:
            first_fact, fact = difference
            raise RankMismatchError(
                f"the ranks are out of sync: rank 0 has [{first_fact}], rank {rank} has [{fact}]; "
                f"{remedy}"
            )


def fingerprint(facts: Sequence[Any]) -> int:
    """Hash primitives to 64 bits. Unlike ``hash``, it is equal in every process."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def first_difference(a: Facts, b: Facts) -> tuple[str, str] | None:
    """Return the first fact that differs, as each list has it; None if none does."""
    for (name, value), (other_name, other_value) in zip(a, b, strict=False):
        if name != other_name or not _is_close(value, other_value):
            return f"{name}: {value}", f"{other_name}: {other_value}"
    missing = "nothing more"
    if len(a) > len(b):
        name, value = a[len(b)]
        return f"{name}: {value}", missing
    if len(b) > len(a):
        name, value = b[len(a)]
        return missing, f"{name}: {value}"
    return None


def _is_close(a: Any, b: Any) -> bool:
    """Whether primitives are equal, floating-point numbers up to rounding."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, int | float) and isinstance(b, int | float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=TOLERANCE)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        if len(a) != len(b):
            return False
        return all(_is_close(x, y) for x, y in zip(a, b, strict=True))
    return bool(type(a) is type(b) and a == b)


# -------------------------------------------------------------------------------- facts


def _model_facts(training: Training) -> Iterator[tuple[str, str]]:
    """Yield shapes and dtypes of the model's parameters and buffers, by name."""
    for name, p in training.model.named_parameters():
        yield name, f"{tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
    for name, buffer in training.model.named_buffers():
        yield name, f"{tuple(buffer.shape)} {buffer.dtype}"


def _group_settings(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return the settings of the groups, by name."""
    facts = []
    for i, group in enumerate(groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                facts.append((f"group {i}, {key}", to_primitive(value)))
    return facts


def _group_members(training: Training) -> Iterator[tuple[str, Any]]:
    """Yield the shapes of the parameters in the groups, by name."""
    names = training.param_names()
    for i, group in enumerate(training.groups):
        for j, p in enumerate(group["params"]):
            status = "trains" if p.requires_grad else "frozen"
            name = names.get(id(p), f"parameter {j}")
            yield f"group {i}, {name}", f"{list(p.shape)}, {status}"


def to_primitive(value: Any) -> Any:
    """Return a setting as primitives.

    Tensors on a device are not read, and become None.
    """
    value = python_number(value)
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Tensor):
        is_local = value.device.type == "cpu" and not is_dtensor(value)
        if value.numel() == 1 and is_local:
            return value.item()
        return None
    if isinstance(value, tuple | list):
        return [to_primitive(element) for element in value]
    return None


def _checksums(training: Training) -> Iterator[tuple[str, str]]:
    """Yield checksums of the parameters that are not sharded, by name."""
    names = training.param_names()
    params = [*group_params(training.groups), *training.model.parameters()]
    for p in dict.fromkeys(params):  # each once
        if not is_dtensor(p):
            name = names.get(id(p), "(not in the model)")
            value = f"{checksum(p):x} of {tuple(p.shape)} {p.dtype}"
            yield f"parameter {name!r}", value


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bits. Synchronizes with the device.

    The bits are words wᵢ of 32, 16 or 8 bits. The checksum is Σ aᵢ wᵢ modulo 2⁶⁴ with
    odd numbers aᵢ, so a change of one word always changes it.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    words = flat.view(WORD_DTYPES.get(flat.element_size(), torch.int32))
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(
        -(2**63), 2**63 - 1, (BLOCK_SIZE,), generator=generator, device="cpu"
    )
    multipliers = (numbers | 1).to(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in words.split(BLOCK_SIZE):
        total = total * BLOCK_MULTIPLIER + (multipliers[: len(block)] * block).sum()
    return int(total)
