"""Ranks compare the facts on which their collectives depend, before they enter any.

Which collectives a step has follows from facts that every rank has by itself: the layers that
train, the intervals that are due, how many steps it has taken. A rank with other facts would
meet the others' messages with some of another size, or none. So each begins with a word of 64 bits
that stands for all of it, in a group where nothing else is said; ranks whose words differ tell each
other everything, and raise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from second_order.distributed.collectives import World
from second_order.errors import RankMismatchError, SecondOrderError

__all__ = ["Facts", "mean_over", "require_equal", "require_same"]

Facts: TypeAlias = Sequence[tuple[str, Any]]

SAME = 1e-6  # relative tolerance: each rank computes a schedule's cosine by itself


def require_equal(world: World, description: Sequence[str], what: str) -> None:
    """Raise on every rank if the ranks' descriptions differ, naming the first difference.

    Args:
        world: The ranks.
        description: Lines that are to be equal on all ranks.
        what: What they describe, for the error.

    Raises:
        RankMismatchError: With the first line that differs, and the ranks it differs on.
    """
    words = world.all_gather_object(_digest(description))
    other = next((rank for rank, word in enumerate(words) if word != words[0]), None)
    if other is None:
        return
    # Two ranks tell: the lines of thousands would fill the memory of each.
    everyone = world.all_gather_object(list(description) if world.rank in (0, other) else None)
    first, theirs = everyone[0], everyone[other]
    pairs = zip(first, theirs, strict=False)
    lines = next(((a, b) for a, b in pairs if a != b), None)
    if lines is None:
        shorter = min(len(first), len(theirs))
        lines = (
            first[shorter] if len(first) > shorter else "nothing more",
            theirs[shorter] if len(theirs) > shorter else "nothing more",
        )
    raise RankMismatchError(
        f"the ranks built different {what}: rank 0 has [{lines[0]}], rank {other} has "
        f"[{lines[1]}]; build the same model with the same options on every rank"
    )


def _digest(lines: Sequence[str]) -> str:
    return hashlib.blake2b(repr(list(lines)).encode(), digest_size=16).hexdigest()


def require_same(
    world: World, doing: str, brief: Sequence[Any], describe: Callable[[], Facts]
) -> None:
    """Raise on every rank unless all are about to do the same; a collective of one small message.

    Args:
        world: The ranks.
        doing: The operation that this rank is about to do.
        brief: All facts that must be equal on all ranks, as primitives with distinct ``repr``.
        describe: Gives the facts by name, in the order in which differences are told; called only
            if words differ. Numbers that differ by rounding alone are equal.

    Raises:
        RankMismatchError: With the first fact that differs and the ranks it differs on, or the
            facts known of a rank that has not come.
    """
    if world.size == 1:
        return
    aside = world.aside()
    try:
        if aside.same([word_of((doing, *brief))]):
            return
        everyone = aside.all_gather_object([("about to", doing), *describe()])
    except SecondOrderError as error:  # after the group's timeout at the latest
        raise RankMismatchError(
            f"rank {world.rank} is about to {doing}, and not all of the {world.size} ranks are, if "
            f"none has failed; take as many steps on every rank, and call close() after the same "
            f"one: {error}"
        ) from error
    for rank, theirs in enumerate(everyone):
        found = first_difference(everyone[0], theirs)
        if found is not None:
            first, other = found
            raise RankMismatchError(
                f"the ranks have parted: rank 0 has [{first}], rank {rank} has [{other}]; freeze, "
                f"change groups, load the same checkpoint, close and set options at the same step "
                f"on every rank"
            )


def word_of(facts: Sequence[Any]) -> int:
    """Hash primitives into 64 bits, alike in every process (``hash`` of a text is not)."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def first_difference(a: Facts, b: Facts) -> tuple[str, str] | None:
    """The first fact of two lists that is not the same in both, as each has it."""
    for (name, mine), (theirs_name, theirs) in zip(a, b, strict=False):
        if name != theirs_name or not _same(mine, theirs):
            return f"{name}: {mine}", f"{theirs_name}: {theirs}"
    if len(a) == len(b):
        return None
    one, other = (x[min(len(a), len(b)) :] for x in (a, b))
    return _first(one), _first(other)


def _first(facts: Facts) -> str:
    return f"{facts[0][0]}: {facts[0][1]}" if facts else "nothing more"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=SAME) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(type(a) is type(b) and a == b)


def mean_over(world: World, numbers: Sequence[float]) -> list[float]:
    """The mean of each number over the ranks, equal on all of them; a collective.

    Args:
        world: The ranks.
        numbers: As many on every rank: what each has measured by its own clock, perhaps.
    """
    total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    world.on_cpu().all_reduce([total]).wait()
    means: list[float] = (total / world.size).tolist()
    return means
