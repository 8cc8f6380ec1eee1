"""What travels together: buckets of tensors, and messages cut into equal shares, one for each rank.

By shares no rank handles more than the whole message.

A rank that sends one tensor to each of P ranks hands over P copies of it, and one that adds up a
tensor of P ranks receives P addends. Where ranks have about equally much, that is the whole message
on each. Where a few ranks have most of it, as with more ranks than layers, such a rank would need P
times its part. By shares it does not (Thakur, Rabenseifner and Gropp 2005, sections 4.2 and 4.5):

sum    rank r adds up share r of everything, and sends the pieces on to their owners
copy   rank r gets share r of everything, and all ranks gather the shares

That takes two messages in the place of one, which are up to 1/(P - 1) longer together. Addends are
added in the same order, so that sums are the same bit for bit.

Either way a rank has a message for each of the others. Among many ranks these take longer than
their bytes do, and an all-reduce is faster, which sends everything twice, in 2 log P messages: of
what is summed, or of what is copied, to which the others add nothing.

NCCL's all-reduce is such a tree; gloo's is a ring, where each of 2 (P - 1) messages waits for the
one before. In its place small messages go in rounds, in each of which a rank sends everything to
one other: log P of them, and two more where P is no power of two (recursive doubling, section 4.5).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Segments",
    "Shares",
    "goes_by_shares",
    "goes_by_sum",
    "goes_in_rounds",
    "in_buckets",
    "rounds_among",
    "sizes_of",
]

T = TypeVar("T")

SMALL_BYTES = 8 * 2**20
"""What a rank may hold in any case: a second message would cost more than it saves."""

MESSAGE_BYTES = 10**5
"""What a link carries in the time that a message takes besides its bytes: 100 µs at 1 GB/s, and no
more than links between devices do."""

RING_RANKS = 8
"""Number of ranks up to which gloo's own all-reduce serves."""


def in_buckets(
    items: Iterable[T], kind: Callable[[T], Hashable], nbytes: Callable[[T], int], most: int
) -> list[list[T]]:
    """Split items into runs of one kind, of up to ``most`` bytes or one item each.

    Args:
        items: What travels, in one order on every rank.
        kind: What items have in common that may travel together.
        nbytes: The bytes of an item.
        most: The bytes of a run.

    Returns:
        The runs, in the order of the first item of each.
    """
    found: list[list[T]] = []
    last: dict[Hashable, list[T]] = {}  # by kind, the run that is still open
    filled: dict[Hashable, int] = {}
    for item in items:
        key, size = kind(item), nbytes(item)
        if key not in last or filled[key] + size > most:
            last[key], filled[key] = [], 0
            found.append(last[key])
        last[key].append(item)
        filled[key] += size
    return found


def goes_by_shares(ranks: int, largest: int, whole: int) -> bool:
    """Whether a message is to go by shares; alike on every rank.

    Args:
        ranks: Number of ranks.
        largest: Bytes of the largest part that one rank has to send to all, or to add up.
        whole: Bytes of all parts.
    """
    return ranks * largest > max(2 * whole, SMALL_BYTES)


def goes_by_sum(ranks: int, whole: int, gloo: bool = False) -> bool:
    """Whether a message is to go by an all-reduce, to all ranks; alike on every rank.

    Args:
        ranks: Number of ranks.
        whole: Bytes of all parts.
        gloo: Whether gloo takes it, by which it goes in rounds or not at all.
    """
    if gloo and ranks <= RING_RANKS:
        return False
    rounds = rounds_among(ranks) if gloo else 2 * (ranks - 1).bit_length()
    more = rounds - 1 if gloo else 1  # times the bytes
    return whole > 0 and more * whole < (ranks - 1 - rounds) * MESSAGE_BYTES


def goes_in_rounds(ranks: int, nbytes: int) -> bool:
    """Whether an all-reduce by gloo is to go in rounds; alike on every rank.

    Args:
        ranks: Number of ranks.
        nbytes: Bytes of the message; a ring sends twice as many.
    """
    rounds = rounds_among(ranks)
    fewer = 2 * (ranks - 1) - rounds
    return ranks > RING_RANKS and (rounds - 2) * nbytes < fewer * MESSAGE_BYTES


def rounds_among(ranks: int) -> int:
    """Number of rounds in which numbers of all ranks add up on each of them."""
    whole = ranks.bit_length() - 1
    return whole if ranks == 2**whole else whole + 2


@dataclass(frozen=True)
class Shares:
    """A flat message cut into equal shares, the last of which may be shorter or empty.

    Attributes:
        total: Number of elements of the message.
        ranks: Number of ranks, each of which has a share.
    """

    total: int
    ranks: int

    @property
    def size(self) -> int:
        """Number of elements of a full share."""
        return -(-self.total // self.ranks)

    def bounds(self, rank: int) -> tuple[int, int]:
        """The first element of a rank's share, and the one after its last."""
        return min(rank * self.size, self.total), min((rank + 1) * self.size, self.total)

    def overlaps(self, start: int, stop: int) -> list[int]:
        """By rank, the number of elements of its share that are among ``start`` to ``stop``."""
        sizes, size = [0] * self.ranks, self.size
        if start < stop:
            for rank in range(start // size, (stop - 1) // size + 1):
                sizes[rank] = min(stop, (rank + 1) * size) - max(start, rank * size)
        return sizes


@dataclass(frozen=True)
class Segments:
    """The runs of a message: one for each of some ranks, in their order, and a last one for all.

    Attributes:
        of: By rank, the first element of its run and the one after the last.
        for_all: The run that all ranks want.
        shares: The shares of the message.
    """

    of: Mapping[int, tuple[int, int]]
    for_all: tuple[int, int]
    shares: Shares

    @classmethod
    def of_sizes(cls, sizes: Mapping[int, int], for_all: int, ranks: int) -> Segments:
        """Lay out runs of these sizes by rank, and one of ``for_all`` elements."""
        of, start = {}, 0
        for rank in sorted(sizes):
            of[rank] = start, start + sizes[rank]
            start += sizes[rank]
        return cls(of, (start, start + for_all), Shares(start + for_all, ranks))

    def leaving(self, here: int) -> list[list[slice]]:
        """By rank, the parts of the share of ``here`` that the rank wants, as slices of it."""
        start, stop = self.shares.bounds(here)

        def inside(run: tuple[int, int]) -> list[slice]:
            first, last = max(run[0], start), min(run[1], stop)
            return [slice(first - start, last - start)] if first < last else []

        common = inside(self.for_all)
        parts = [common] * self.shares.ranks
        for rank, run in self.of.items():
            parts[rank] = [*inside(run), *common]
        return parts

    def wanted(self, here: int) -> list[slice]:
        """What a rank wants of the message: its own run, and that for all."""
        return [slice(*run) for run in (self.of.get(here, (0, 0)), self.for_all)]

    def arriving(self, here: int) -> tuple[list[int], list[int]]:
        """By rank, the elements that come from there: of one's own run, and of that for all."""
        return self.shares.overlaps(*self.of.get(here, (0, 0))), self.shares.overlaps(*self.for_all)


def sizes_of(parts: Sequence[Sequence[slice]]) -> list[int]:
    """Number of elements of each list of slices."""
    return [sum(part.stop - part.start for part in each) for each in parts]
