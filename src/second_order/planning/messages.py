"""Messages as the collectives make them of tensors: buckets, owners, shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.shares import Segments, goes_by_shares, goes_by_sum, in_buckets
from second_order.distributed.world import BUCKET_BYTES
from second_order.planning.work import Among, Collective, Transfer

__all__ = ["Bucket", "Piece", "all_reduced", "buckets_of", "copied", "sum_of_parts", "summed"]

Piece: TypeAlias = tuple[torch.dtype, int, int | None]
"""A tensor's dtype and elements, and the rank that wants it summed or has it; None for all."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that travel together.

    Attributes:
        sizes: Elements by the rank that wants their sum, or has them.
        common: Elements whose sum all ranks want.
        itemsize: Bytes of an element.
        ranks: Number of ranks in the group.
    """

    sizes: Mapping[int, int]
    common: int
    itemsize: int
    ranks: int

    @cached_property
    def total(self) -> int:
        """Elements of the bucket."""
        return sum(self.sizes.values()) + self.common

    @cached_property
    def by_sum(self) -> bool:
        """Whether it goes by an all-reduce, to all ranks."""
        return goes_by_sum(self.ranks, self.total * self.itemsize)

    @cached_property
    def by_shares(self) -> bool:
        """Whether it goes by shares, in two messages; straight to each rank otherwise."""
        if self.by_sum:
            return False
        largest = max(self.sizes.values(), default=0) + self.common
        return goes_by_shares(self.ranks, largest * self.itemsize, self.total * self.itemsize)

    @cached_property
    def segments(self) -> Segments:
        """Where in the bucket each rank's part is."""
        return Segments.of_sizes(self.sizes, self.common, self.ranks)

    @cached_property
    def _mine(self) -> Tensor:
        """By rank, elements of its part."""
        found = torch.zeros(self.ranks, dtype=torch.int64)
        found[list(self.sizes)] = torch.tensor(list(self.sizes.values()), dtype=torch.int64)
        return found

    @cached_property
    def _shares(self) -> Tensor:
        """By rank, elements of its share: all, those of its own part, and those for all."""
        size, for_all = self.segments.shares.size, self.segments.for_all
        starts = (size * torch.arange(self.ranks)).clamp(max=self.total)
        stops = (starts + size).clamp(max=self.total)
        ends = self._mine.cumsum(0)  # of the parts, which lie in the order of ranks

        def inside(first: Tensor | int, last: Tensor | int) -> Tensor:
            return (stops.clamp(max=last) - starts.clamp(min=first)).clamp(min=0)

        return torch.stack([stops - starts, inside(ends - self._mine, ends), inside(*for_all)])

    def share(self, here: int) -> tuple[int, int, int]:
        """Elements of a rank's share: all, those of its own part, and those for all."""
        size, own, common = self._shares[:, here].tolist()
        return size, own, common

    @property
    def parts(self) -> Tensor:
        """By rank, the bytes that tell its messages from others': 5 x ranks.

        What it sends and receives is linear in them: its part, where parts go straight to their
        ranks; its part, its share, and what of that is in its part and for all, where not.
        """
        found = torch.zeros(5, self.ranks, dtype=torch.int64)
        if self.by_shares:
            found[1], found[2:] = self._mine, self._shares
        elif not self.by_sum:  # which all have alike
            found[0] = self._mine
        return found * self.itemsize


def buckets_of(pieces: Iterable[Piece], ranks: int) -> list[Bucket]:
    """Pieces in the buckets in which they travel, in the order of the first of each."""
    runs = in_buckets(pieces, lambda p: p[0], lambda p: p[0].itemsize * p[1], BUCKET_BYTES)
    return [_bucket(run, ranks) for run in runs]


def sum_of_parts(buckets: Sequence[Bucket]) -> Tensor:
    """The sum of the parts of some buckets, one at least."""
    return torch.stack([bucket.parts for bucket in buckets]).sum(0)


def _bucket(pieces: Sequence[Piece], ranks: int) -> Bucket:
    sizes: dict[int, int] = {}
    common = 0
    for _, elements, owner in pieces:
        if owner is None:
            common += elements
        else:
            sizes[owner] = sizes.get(owner, 0) + elements
    return Bucket(sizes, common, pieces[0][0].itemsize, ranks)


def all_reduced(
    stage: str, among: Among, nbytes: int, messages: int, *, host: bool = False
) -> Transfer:
    """A sum that all ranks get, by a ring."""
    moved = 2 * (among.size - 1) / among.size * nbytes
    return Transfer(stage, "all_reduce", among, nbytes, moved, moved, nbytes, messages, host)


def summed(stage: str, among: Among, here: int, buckets: Iterable[Bucket]) -> list[Transfer]:
    """Sums of which each rank gets its own part, and that for all.

    Args:
        stage: The account.
        among: The ranks.
        here: The rank's index among them.
        buckets: What is summed.
    """
    found = _Sent()
    for bucket in buckets:
        mine = bucket.sizes.get(here, 0) + bucket.common
        if bucket.by_sum:  # at least as wide as sums are added
            found.add_sum(bucket.total * max(bucket.itemsize, torch.float32.itemsize), among.size)
            continue
        if not bucket.by_shares:
            handed = bucket.total + (among.size - 1) * bucket.common
            found.add("all_to_all", bucket, handed, among.size * mine, mine)
            continue
        size, own, common = bucket.share(here)
        found.add("all_to_all", bucket, bucket.total, among.size * size, size)
        onward = size + (among.size - 1) * common
        found.add("all_to_all", bucket, onward, mine, own + common)
    return found.transfers(stage, among)


def copied(stage: str, among: Among, here: int, buckets: Iterable[Bucket]) -> list[Transfer]:
    """Parts that each rank sends to all.

    Args:
        stage: The account.
        among: The ranks.
        here: The rank's index among them.
        buckets: What is sent.
    """
    found = _Sent()
    for bucket in buckets:
        mine = bucket.sizes.get(here, 0)
        if bucket.by_sum:
            found.add_sum(bucket.total * bucket.itemsize, among.size)
            continue
        if not bucket.by_shares:
            if bucket.total:
                found.add("all_to_all", bucket, (among.size - 1) * mine, bucket.total - mine, 0)
            continue
        size, own, _ = bucket.share(here)
        found.add("all_to_all", bucket, mine, size, own)
        full = bucket.segments.shares.size  # the last shares are filled up
        found.add("all_gather", bucket, full, among.size * full, full)
    return found.transfers(stage, among)


class _Sent:
    """A rank's messages by collective."""

    def __init__(self) -> None:
        self._found: dict[Collective, list[Any]] = {}

    def add(
        self, collective: Collective, bucket: Bucket, handed: int, arrives: int, stays: int
    ) -> None:
        """Add a message: elements handed over and received, and those that are both."""
        among = bucket.ranks
        moved = (among - 1) * handed if collective == "all_gather" else handed - stays
        entry = self._found.setdefault(collective, [0, 0, 0, 0, 0])
        elements = handed, moved, arrives - stays, handed + arrives
        for i, n in enumerate(elements):
            entry[i] += n * bucket.itemsize
        entry[4] += 1

    def add_sum(self, nbytes: int, ranks: int) -> None:
        """Add a message that all ranks get by an all-reduce."""
        entry = self._found.setdefault("all_reduce", [0, 0.0, 0.0, 0, 0])
        moved = 2 * (ranks - 1) / ranks * nbytes
        for i, n in enumerate((nbytes, moved, moved, nbytes, 1)):
            entry[i] += n

    def transfers(self, stage: str, among: Among) -> list[Transfer]:
        """The messages, a line for each collective."""
        return [
            Transfer(stage, collective, among, handed, moved, received, buffers, messages)
            for collective, (handed, moved, received, buffers, messages) in self._found.items()
        ]
