"""Ranks compare what is to be the same on all of them, before they exchange data.

Which collectives a step has follows from facts that every rank has by itself: the layers that
train, the intervals that are due, how many steps it has taken. So each step begins with a
fingerprint of 64 bits that stands for all of it, in a group where nothing else is said; ranks whose
fingerprints differ tell each other everything, and raise.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.errors import RankMismatchError, SecondOrderError

__all__ = [
    "REMEDY",
    "Facts",
    "checksum",
    "fingerprint",
    "first_difference",
    "mean_over",
    "require_same",
]

Facts: TypeAlias = Sequence[tuple[str, Any]]

SAME = 1e-6  # relative tolerance: each rank computes a schedule's cosine by itself
REMEDY = (
    "nothing has been changed by this step. Freeze, change groups, load the same checkpoint, close "
    "and set options at the same step on every rank; and let no rank change parameters or state by "
    "itself, or leave its gradients out of the average (gradient_averaging=)"
)
BLOCK = 2**18  # words that are multiplied at once: two megabytes of numbers
BETWEEN_BLOCKS = 0x9E3779B97F4A7C15 - 2**64  # odd
WORDS = {1: torch.uint8, 2: torch.int16}  # by the size of an element in bytes; others int32


def require_same(
    world: World,
    doing: str,
    brief: Sequence[Any],
    describe: Callable[[], Facts],
    remedy: str = REMEDY,
) -> None:
    """Raise on every rank unless all are about to do the same; a collective of one small message.

    Args:
        world: The ranks.
        doing: What this rank is about to do.
        brief: All facts that must be equal on all ranks, as primitives with distinct ``repr``.
        describe: Gives the facts by name, in the order in which differences are told; called only
            if fingerprints differ. Numbers that differ by rounding alone are equal.
        remedy: What to do about a difference.

    Raises:
        RankMismatchError: With the first fact that differs, as most ranks have it and as another,
            or the facts known of a rank that has not come.
    """
    try:
        aside = world.aside()
        if aside.same([fingerprint((doing, *brief))]):
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


def mean_over(world: World, numbers: Sequence[float]) -> list[float]:
    """The mean of each number over the ranks, equal on all of them; a collective."""
    total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    world.on_cpu().all_reduce([total]).wait()
    means: list[float] = (total / world.size).tolist()
    return means
