"""Sums of statistics over the ranks, sent while the backward pass still runs (Shi et al. 2021).

in the passes   a layer whose statistics are complete joins its bucket; a bucket whose layers all
                are sets out, after those before it
at the step     the other buckets set out; ranks agree on layers whose statistics have changed since
                they were sent; these are sent again

Between two steps every rank sends every bucket once, in one order, whatever its passes do: a layer
that no pass has reached goes as zeros. So it does not matter which rank sends a bucket in a pass
and which at the step, nor that an exception ends a pass. All of it has a process group of its own,
where no other collective can come between.

Nobody can know that statistics are complete while passes go on. They count as complete once a layer
has as many pairs as in the steps before, over all uses and micro-batches. Where that was wrong, the
layer is sent again: the sums are those of an exchange at the step, at twice the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from second_order.distributed.buckets import in_buckets
from second_order.distributed.world import PendingReduction, World
from second_order.kfac.layers import Layers
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StagedStatistics, StatisticsSums, sums_of
from second_order.kronecker.layers import FactorShape
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["FUSED_BYTES", "Pipeline", "Sums"]

FUSED_BYTES = 2**20
"""Bytes of a bucket, unless one layer alone has more."""

Sums = dict[KroneckerBlock, StatisticsSums]


class Slot(NamedTuple):
    """What a layer sends: fixed while a plan lasts, whatever becomes of the layer meanwhile."""

    block: KroneckerBlock
    shape: FactorShape
    device: torch.device


class SentState(NamedTuple):
    """The state of a layer's statistics when they were sent, for so many micro-batches."""

    staged: StagedStatistics
    revision: tuple[int, int]
    passes: tuple[int, ...]  # those whose terms had been counted
    micro_batches: int


class Pipeline:
    """The exchange of a training's statistics, begun in its passes."""

    def __init__(self, training: Training, layers: Layers, dtype: torch.dtype) -> None:
        self._training, self._layers, self._dtype = training, layers, dtype
        self._begin()

    def _begin(self) -> None:
        self._world: World | None = None
        self._wire: torch.dtype | None = None
        self._start([])

    def _start(self, slots: Sequence[Slot]) -> None:
        """Start with the layers of a plan, without knowledge of their pairs."""
        self._slots = slots
        self._wanted: dict[KroneckerBlock, int] = {}  # pairs that make a layer complete
        self._before: dict[KroneckerBlock, int] = {}  # pairs in the last step
        self._micro_batches = 1
        self._buckets = in_buckets(slots[::-1], lambda _: None, self._nbytes, FUSED_BYTES)
        self._rest()

    def _nbytes(self, slot: Slot) -> int:
        shapes = (slot.shape.stored_shape(k) for k in slot.shape.letters)
        return self._dtype.itemsize * sum(map(math.prod, shapes))

    def _rest(self) -> None:
        """Be done with the buckets of a step."""
        self._sent: list[list[tuple[PendingReduction, list[Tensor]]]] = []
        self._marks: dict[KroneckerBlock, SentState] = {}
        self._expected = self._begun = False

    def follow(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Go on with other layers, in the order of the model; a collective."""
        if self._world is None:
            self._world = self._training.world.separate()
        self.drain()
        self._start([Slot(b, b.staged.shape, b.staged.device) for b in blocks])

    def expect(self, wire: torch.dtype | None) -> None:
        """Send what the coming passes bring, as the coming step wants statistics."""
        if not self._begun:
            self._wire = wire
        self._expected = True

    def heard(self, block: KroneckerBlock) -> None:
        """Hear in a backward pass that a layer's statistics have grown: send what is complete."""
        if not self._expected or self._world is None:
            return
        self._begun = True
        if not self._wanted:  # no step has shown how many pairs there are
            return
        while len(self._sent) < len(self._buckets):
            bucket = self._buckets[len(self._sent)]
            if not all(s.block.staged.pairs >= self._wanted.get(s.block, 1) for s in bucket):
                return
            with stage("statistics_exchange"):
                self._send(bucket, self._micro_batches)

    def _send(self, bucket: Sequence[Slot], micro_batches: int) -> None:
        """Start to sum copies of a bucket's statistics, which may change meanwhile."""
        assert self._world is not None
        world = self._world
        found = []
        self._begun = True
        for slot in bucket:
            staged = slot.block.staged
            if (staged.shape, staged.device) != slot[1:]:  # of another size by now: none
                staged = StagedStatistics(slot.shape, slot.device, staged.factor_dtype)
            terms = self._layers.terms_so_far(staged)
            passes = terms.passes
            self._marks[slot.block] = SentState(staged, staged.revision, passes, micro_batches)
            found += sums_of([staged], micro_batches, [terms.number])
        heads = [each.head.clone() for each in found]
        factors = [factor.clone() for each in found for factor in each.factors.values()]
        if self._wire is None:
            self._sent.append([(world.all_reduce([*heads, *factors]), [*heads, *factors])])
        else:  # numbers of examples are not rounded
            wide = world.all_reduce(heads)
            narrow = world.all_reduce(factors, dtype=self._wire)
            self._sent.append([(wide, heads), (narrow, factors)])

    def drain(self) -> None:
        """Let the other ranks have what they expect in this step, and drop it all; a collective."""
        if not self._expected or self._world is None:
            return
        for bucket in self._buckets[len(self._sent) :]:
            self._send(bucket, self._micro_batches)
        for parts in self._sent:
            for pending, _ in parts:
                pending.wait()
        self._rest()

    def sums(self, layers: Layers, exchange: Callable[[Sums, torch.dtype | None], None]) -> Sums:
        """Send what is left, and wait for the sums of all ranks; a collective.

        The layers' statistics are cleared.
        """
        world = self._training.world
        blocks = [slot.block for slot in self._slots]
        if not blocks:
            return layers.sums([])
        micro_batches = layers.micro_batches(blocks)
        with stage("statistics_exchange"):
            for bucket in self._buckets[len(self._sent) :]:
                self._send(bucket, micro_batches)
            changed = torch.tensor(
                [float(self._has_changed(b, micro_batches)) for b in blocks],
                dtype=torch.float32,
                device="cpu",
            )
            agreed = world.on_cpu().all_reduce_max([changed])
            pairs, sent = {block: block.staged.pairs for block in blocks}, self._sent
            if any(pairs.values()):  # a rank without a batch learns nothing
                # The larger number of two steps: to send late costs less than to send twice.
                before = self._before or pairs
                self._wanted = {b: max(n, before.get(b, 0)) for b, n in pairs.items()}
                self._before, self._micro_batches = pairs, micro_batches
            self._rest()
            agreed.wait()
            again = [b for b, flag in zip(blocks, changed.tolist(), strict=True) if flag]
            local, found = layers.sums(again, micro_batches), {}
            for bucket, parts in zip(self._buckets, sent, strict=True):
                for pending, _ in parts:
                    pending.wait()
                sums = iter([each for _, copies in parts for each in copies])
                heads = [next(sums) for _ in bucket]
                for slot, head in zip(bucket, heads, strict=True):
                    factors = {k: next(sums).to(self._dtype) for k in slot.shape.letters}
                    found[slot.block] = StatisticsSums(factors, head)
            if local:
                exchange(local, self._wire)
        return {**found, **local}

    def _has_changed(self, block: KroneckerBlock, micro_batches: int) -> bool:
        """Whether a layer has other statistics than were sent, now that the number is known."""
        staged, revision, passes, guessed = self._marks[block]
        if staged is not block.staged or revision != staged.revision:
            return True
        if passes != self._layers.terms_so_far(staged).passes:
            return True
        return not (staged.empty or guessed == micro_batches)

    def close(self) -> None:
        """Send nothing more. Ranks that have begun a step's buckets let the others have theirs."""
        if self._sent:
            for bucket in self._buckets[len(self._sent) :]:
                self._send(bucket, self._micro_batches)
        self._begin()
