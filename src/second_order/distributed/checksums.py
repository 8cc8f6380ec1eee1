"""Tensors that are to be the same on several ranks are compared bit for bit, by checksums.

A tensor's bits are words wᵢ of 32, 16 or 8 bits. Its checksum is Σ aᵢ wᵢ modulo 2⁶⁴ with odd random
numbers aᵢ, the same on all ranks (multiply-shift hashing, Dietzfelbinger et al. 1997): one changed
word always changes it, and any other change does but for one case in 2³². Nothing here knows what
the bits mean: a NaN is equal to the same NaN, and 0.0 is not -0.0.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.distributed.agreement import word_of
from second_order.distributed.collectives import World
from second_order.errors import RankMismatchError

__all__ = ["Shared", "checksums", "require_same_bits"]

BLOCK = 2**18
"""Words that are multiplied at once: two megabytes of numbers, whatever the tensor's size."""

BETWEEN_BLOCKS = 0x9E3779B97F4A7C15 - 2**64  # odd
NAMED = 5
"""How many tensors a message names besides the first."""

WORDS = {1: torch.uint8, 2: torch.int16}
"""The dtypes of words, by the size of an element in bytes; int32 for all others."""


@dataclass(frozen=True)
class Shared:
    """A value that is to be the same on several ranks.

    Attributes:
        name: The name, for messages.
        value: This rank's tensor, or number.
        in_rows: Whether each rank has rows of it, and those of the same rows have the same.
    """

    name: str
    value: Tensor | float
    in_rows: bool = False


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """The checksum of each tensor's bits, 64 bits each; waits for each device once."""
    found = [_checksum(tensor.detach()) for tensor in tensors]
    on = {device: [f for f in found if f.device == device] for device in {f.device for f in found}}
    read = {device: iter(torch.stack(those).tolist()) for device, those in on.items()}
    return [next(read[each.device]) for each in found]


def _checksum(tensor: Tensor) -> Tensor:
    """The checksum as a scalar on the tensor's device."""
    words = tensor.reshape(-1).contiguous().view(WORDS.get(tensor.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), BLOCK):
        block = words[start : start + BLOCK]
        total = total * BETWEEN_BLOCKS + (_multipliers(words.device)[: block.numel()] * block).sum()
    return total


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=generator, device="cpu")
    return (drawn | 1).to(device)


def require_same_bits(
    world: World, when: str, values: Sequence[Shared], rows: Sequence[Hashable] | None, remedy: str
) -> None:
    """Raise on every rank unless shared values are equal, bit for bit; a small collective.

    A word of 64 bits is compared for all values that are whole, and one for those in each set of
    rows; checksums are exchanged only if words differ.

    Args:
        world: The ranks.
        when: The moment, for the message.
        values: The values, in the order in which differences are told.
        rows: By rank, something that is equal on ranks with the same rows; None if all values are
            whole. The same on every rank.
        remedy: What to do about a difference.

    Raises:
        RankMismatchError: With the first value that differs, and the ranks that it differs on.
    """
    if world.size == 1:
        return
    aside, known = world.aside(), _known(values)
    places = dict.fromkeys(rows or ())
    words: list[int | None] = [word_of(_of(known, False))]
    if rows is not None:
        ours = word_of(_of(known, True))
        words += [ours if place == rows[world.rank] else None for place in places]
    if not aside.same(words):
        everyone = list(range(aside.size))
        alike = [[r for r in everyone if rows[r] == place] for place in places] if rows else []
        found = aside.all_gather_object(known)
        names = dict.fromkeys(name for theirs in found for name in theirs)
        told = [
            f"{name} is not the same on {_ranks(others)} as on {_ranks(most)}"
            for name, in_rows in names
            for others, most in _parted(found, (name, in_rows), alike if in_rows else [everyone])
        ]
        first, *rest = told
        more = f"; {'; '.join(rest[:NAMED])}" if rest else ""
        more += f"; and {len(rest) - NAMED} more" if len(rest) > NAMED else ""
        raise RankMismatchError(f"the ranks have parted {when}: {first}{more}. {remedy}")


Known: TypeAlias = Mapping[tuple[str, bool], str]
"""Checksums, shapes and dtypes in words, by name and whether ranks have rows of it."""


def _known(values: Sequence[Shared]) -> Known:
    tensors = [v.value for v in values if isinstance(v.value, Tensor)]
    sums = iter(checksums(tensors))
    return {
        (v.name, v.in_rows): f"{next(sums):x} {tuple(v.value.shape)} {v.value.dtype}"
        if isinstance(v.value, Tensor)
        else repr(v.value)
        for v in values
    }


def _of(known: Known, in_rows: bool) -> list[tuple[str, str]]:
    return [(name, text) for (name, rows), text in known.items() if rows is in_rows]


def _parted(
    found: Sequence[Known], key: tuple[str, bool], alike: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], list[int]]]:
    """The ranks that have another value than most of those that are to have the same, and these."""
    for ranks in alike:
        texts = {rank: found[rank].get(key) for rank in ranks}
        usual = Counter(texts.values()).most_common(1)[0][0]  # of equally many, the first rank's
        others = [rank for rank in ranks if texts[rank] != usual]
        if others:
            yield others, [rank for rank in ranks if texts[rank] == usual]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
