"""Sums of statistics over the ranks, sent while the backward pass still runs (Shi et al. 2021).

in the passes   a bucket is sent once the statistics of all its layers are complete, and the buckets
                before it have been sent
at the step     the other buckets are sent; ranks agree on layers whose statistics have changed
                since they were sent; these are sent again

Between two steps every rank sends every bucket once, in one order, whatever its passes do: a layer
that no pass has reached is sent as zeros. So it does not matter which rank sends a bucket in a pass
and which at the step, nor that an exception ends a pass. The messages have a process group of their
own, where no other collective can come between.

While passes continue, no rank can know that statistics are complete. They count as complete once a
layer has as many pairs as in the last step, over all uses and micro-batches. If that was wrong, the
layer is sent again: the sums are those of an exchange at the step, at twice the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from second_order.distributed.world import PendingReduction, World, split_into_buckets
from second_order.kfac.layers import Layers
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StagedStatistics, StatisticsSums, collect_sums
from second_order.kronecker.layers import FactorShape
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["FUSED_BYTES", "Pipeline", "Sums"]

FUSED_BYTES = 2**20
"""Bytes of a bucket, unless one layer alone has more."""

Sums = dict[KroneckerBlock, StatisticsSums]


@dataclass(frozen=True)
class Slot:
    """What a layer sends: fixed while a plan lasts, whatever becomes of the layer meanwhile."""

    block: KroneckerBlock
    shape: FactorShape
    device: torch.device
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        shapes = [self.shape.stored_shape(letter) for letter in self.shape.factor_names]
        return self.dtype.itemsize * sum(map(math.prod, shapes))


@dataclass(frozen=True)
class SentBucket:
    """Copies of a bucket's statistics, which become sums over the ranks."""

    sums: Sums
    messages: Sequence[PendingReduction]
    states: Sequence[Any]  # of the statistics that were copied, layer by layer

    def wait(self) -> Sums:
        """Wait for the sums."""
        for message in self.messages:
            message.wait()
        return self.sums


class Pipeline:
    """The exchange of a training's statistics, begun in its passes."""

    def __init__(self, training: Training, layers: Layers, dtype: torch.dtype) -> None:
        self._training = training
        self._layers = layers
        self._dtype = dtype
        self._world: World | None = None
        self._wire: torch.dtype | None = None
        self._start([])

    def _start(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Start with the layers of a plan, without knowledge of their pairs."""
        slots = [Slot(b, b.staged.shape, b.staged.device, self._dtype) for b in reversed(blocks)]
        self._buckets = split_into_buckets(
            slots, lambda _: None, lambda slot: slot.nbytes, FUSED_BYTES
        )
        self._pairs: dict[KroneckerBlock, int] | None = None  # of each layer in the last step
        self._micro_batches = 1  # in the last step
        self._sent: list[SentBucket] = []  # since the last step
        self._expected = False  # whether the coming step takes statistics

    def follow(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Continue with other layers, in the order of the model; a collective."""
        if self._world is None:
            self._world = self._training.world.with_new_group()
        self.drain()
        self._start(blocks)

    def expect(self, wire: torch.dtype | None) -> None:
        """Send what the coming passes bring, because the coming step takes statistics."""
        if not self._sent:
            self._wire = wire
        self._expected = True

    def send_complete(self) -> None:
        """Send complete buckets; called in a backward pass when layers' statistics have grown."""
        pairs = self._pairs
        if not self._expected or pairs is None:
            return
        while len(self._sent) < len(self._buckets):
            bucket = self._buckets[len(self._sent)]
            if any(slot.block.staged.pairs < pairs[slot.block] for slot in bucket):
                return
            with stage("statistics_exchange"):
                self._send(bucket, self._micro_batches)

    def _send_rest(self, micro_batches: int) -> None:
        """Send the buckets that the passes have not sent."""
        for bucket in self._buckets[len(self._sent) :]:
            self._send(bucket, micro_batches)

    def _send(self, bucket: Sequence[Slot], micro_batches: int) -> None:
        """Start to sum copies of a bucket's statistics, which may change meanwhile."""
        assert self._world is not None
        sums: Sums = {}
        states: list[Any] = []
        for slot in bucket:
            staged = slot.block.staged
            if (staged.shape, staged.device) != (slot.shape, slot.device):  # send zeros
                staged = StagedStatistics(slot.shape, slot.device, slot.dtype)
            states.append(self._state(staged, micro_batches))
            terms = self._layers.count_terms(staged).number
            (each,) = collect_sums([staged], micro_batches, [terms])
            copies = {letter: factor.clone() for letter, factor in each.factors.items()}
            sums[slot.block] = StatisticsSums(copies, each.head.clone())
        # Numbers of examples are not rounded.
        heads = [each.head for each in sums.values()]
        factors = [factor for each in sums.values() for factor in each.factors.values()]
        messages = [self._world.all_reduce(heads)]
        messages.append(self._world.all_reduce(factors, dtype=self._wire))
        self._sent.append(SentBucket(sums, messages, states))

    def _state(self, staged: StagedStatistics, micro_batches: int) -> tuple[Any, ...]:
        """A value that changes when a layer's statistics do."""
        passes = self._layers.count_terms(staged).passes
        return staged, staged.revision, passes, 1 if staged.empty else micro_batches

    def drain(self) -> None:
        """Send what the other ranks expect in this step, and drop it all; a collective."""
        if self._expected:
            self._send_rest(self._micro_batches)
            for bucket in self._sent:
                bucket.wait()
        self._sent = []
        self._expected = False

    def sums(self, layers: Layers, exchange: Callable[[Sums, torch.dtype | None], None]) -> Sums:
        """Send what is left, and wait for the sums of all ranks; a collective.

        The layers' statistics are cleared.
        """
        blocks = [slot.block for bucket in self._buckets for slot in bucket]
        if not blocks:
            return layers.pop_sums([])
        micro_batches = layers.count_micro_batches(blocks)
        with stage("statistics_exchange"):
            self._send_rest(micro_batches)
            states = [state for bucket in self._sent for state in bucket.states]
            now = [self._state(block.staged, micro_batches) for block in blocks]
            changed = [float(a != b) for a, b in zip(states, now, strict=True)]
            flags = torch.tensor(changed, dtype=torch.float32, device="cpu")
            agreed = self._training.world.on_cpu().all_reduce_max([flags])
            self._pairs = {block: block.staged.pairs for block in blocks}
            self._micro_batches = micro_batches
            agreed.wait()

            again = [b for b, flag in zip(blocks, flags.tolist(), strict=True) if flag]
            local = layers.pop_sums(again, micro_batches)
            found: Sums = {}
            for bucket in self._sent:
                found |= bucket.wait()
            self._sent = []
            self._expected = False
            if local:
                exchange(local, self._wire)
        return {**found, **local}

    def close(self) -> None:
        """Send nothing more. Ranks that have sent a step's first buckets send the others too."""
        if self._sent:
            self._send_rest(self._micro_batches)
        self._start([])
