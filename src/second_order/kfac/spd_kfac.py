"""Sum statistics over the ranks during the backward pass (SPD-KFAC, Shi et al. 2021).

    during backward    all-reduce a bucket as soon as the statistics of all its layers
                       are complete and the previous buckets have been sent
    at the step        all-reduce the remaining buckets; agree on the layers whose
                       statistics have changed since; all-reduce these again

Between two steps every rank sends every bucket once, in the same order, whatever its
passes do. A layer that no pass has reached is sent as zeros. So one rank may send a
bucket in a pass while another sends it at the step, and an exception may end a pass.
The messages have their own process group, so that no other collective comes between
them.

During a pass, no rank can know whether more statistics follow. They count as complete
once the layer has as many pairs as in the last step, over all its calls and
micro-batches. If that turns out to be wrong, the layer is sent again: the sums are
correct, at twice the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from second_order.distributed.world import PendingReduction, World, split_into_buckets
from second_order.kfac.layers import Layers
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import (
    StagedStatistics,
    StatisticsSums,
    collect_sums,
)
from second_order.kronecker.layers import FactorShape
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["FUSED_BYTES", "Pipeline", "Sums"]

FUSED_BYTES = 2**20
"""Largest size of a bucket of several layers, in bytes."""

Sums = dict[KroneckerBlock, StatisticsSums]


@dataclass(frozen=True)
class Slot:
    """What a layer sends. It is fixed while a plan lasts, even if the layer changes."""

    block: KroneckerBlock
    shape: FactorShape
    device: torch.device
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the factors in bytes."""
        shapes = [self.shape.stored_shape(name) for name in self.shape.factor_names]
        return self.dtype.itemsize * sum(map(math.prod, shapes))


class StatisticsVersion(NamedTuple):
    """A value that changes with a layer's statistics or their weight in the sum."""

    staged: StagedStatistics
    revision: tuple[int, int]
    passes: tuple[int, ...]
    micro_batches: int


@dataclass(frozen=True)
class SentBucket:
    """A bucket whose all-reduces are in progress.

    Attributes:
        sums: Copies of the statistics, which the all-reduces replace by their sums.
        reductions: The all-reduces.
        versions: The version of each layer's statistics that was copied.
    """

    sums: Sums
    reductions: Sequence[PendingReduction]
    versions: Sequence[StatisticsVersion]

    def wait(self) -> Sums:
        """Wait for the all-reduces, and return the sums."""
        for reduction in self.reductions:
            reduction.wait()
        return self.sums


class Pipeline:
    """The exchange of statistics, which starts during the backward passes.

    Args:
        training: The training run.
        layers: The layers.
        dtype: Dtype of the factors.
    """

    def __init__(self, training: Training, layers: Layers, dtype: torch.dtype) -> None:
        self._training = training
        self._layers = layers
        self._dtype = dtype
        self._world: World | None = None
        self._communication_dtype: torch.dtype | None = None
        self._start([])

    def _start(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Make buckets for the layers of a plan, without known numbers of pairs."""
        slots = [
            Slot(b, b.staged.shape, b.staged.device, self._dtype)
            for b in reversed(blocks)
        ]
        self._buckets = split_into_buckets(
            slots,
            kind=lambda _: None,
            nbytes=lambda slot: slot.nbytes,
            max_bytes=FUSED_BYTES,
        )
        # Numbers of the last step, by which passes know that statistics are complete.
        self._last_pairs: dict[KroneckerBlock, int] | None = None
        self._last_micro_batches = 1
        self._sent: list[SentBucket] = []  # since the last step
        self._expected = False  # whether statistics are due at the next step

    def follow(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Use the layers of a new plan, in the order of the model. Collective."""
        if self._world is None:
            self._world = self._training.world.with_new_group()
        self.drain()
        self._start(blocks)

    def expect(self, communication_dtype: torch.dtype | None) -> None:
        """Send the statistics of the next passes, which are due at the next step."""
        if not self._sent:
            self._communication_dtype = communication_dtype
        self._expected = True

    def send_complete(self) -> None:
        """Send complete buckets.

        Backward passes call this when a layer has new statistics.
        """
        pairs = self._last_pairs
        if not self._expected or pairs is None:
            return
        while len(self._sent) < len(self._buckets):
            bucket = self._buckets[len(self._sent)]
            if any(slot.block.staged.pairs < pairs[slot.block] for slot in bucket):
                return
            with stage("statistics_exchange"):
                self._send(bucket, self._last_micro_batches)

    def _send_rest(self, micro_batches: int) -> None:
        """Send the buckets that the passes have not sent."""
        for bucket in self._buckets[len(self._sent) :]:
            self._send(bucket, micro_batches)

    def _send(self, bucket: Sequence[Slot], micro_batches: int) -> None:
        """Start to all-reduce copies of a bucket, whose statistics may still change."""
        assert self._world is not None

        # Copy the statistics.
        sums: Sums = {}
        versions: list[StatisticsVersion] = []
        for slot in bucket:
            staged = slot.block.staged
            if (staged.shape, staged.device) != (slot.shape, slot.device):  # send zeros
                staged = StagedStatistics(slot.shape, slot.device, slot.dtype)
            versions.append(self._version(staged, micro_batches))
            num_terms = self._layers.count_terms(staged).number
            (layer_sums,) = collect_sums([staged], micro_batches, [num_terms])
            factors = {
                name: factor.clone() for name, factor in layer_sums.factors.items()
            }
            sums[slot.block] = StatisticsSums(factors, layer_sums.head.clone())

        # Send heads in their own dtype, so that numbers of examples are not rounded.
        heads = [layer_sums.head for layer_sums in sums.values()]
        all_factors: list[Tensor] = []
        for layer_sums in sums.values():
            all_factors += layer_sums.factors.values()
        reductions = [
            self._world.all_reduce(heads),
            self._world.all_reduce(all_factors, dtype=self._communication_dtype),
        ]
        self._sent.append(SentBucket(sums, reductions, versions))

    def _version(
        self, staged: StagedStatistics, micro_batches: int
    ) -> StatisticsVersion:
        """Return the version of a layer's statistics."""
        return StatisticsVersion(
            staged=staged,
            revision=staged.revision,
            passes=self._layers.count_terms(staged).passes,
            micro_batches=1 if staged.empty else micro_batches,
        )

    def drain(self) -> None:
        """Complete the exchange that the other ranks expect, and discard the sums.

        Collective.
        """
        if self._expected:
            self._send_rest(self._last_micro_batches)
            for bucket in self._sent:
                bucket.wait()
        self._sent = []
        self._expected = False

    def pop_sums(self, exchange: Callable[[Sums, torch.dtype | None], None]) -> Sums:
        """Return the statistics of this step's passes, summed over the ranks.

        Collective. Clears the layers' statistics.

        Args:
            exchange: Sums statistics over the ranks in place, in a communication dtype.
        """
        blocks = [slot.block for bucket in self._buckets for slot in bucket]
        if not blocks:
            return self._layers.pop_sums([])
        micro_batches = self._layers.count_micro_batches(blocks)
        with stage("statistics_exchange"):
            self._send_rest(micro_batches)

            # Which layers' statistics have changed on any rank since they were sent?
            sent = [version for bucket in self._sent for version in bucket.versions]
            now = [self._version(block.staged, micro_batches) for block in blocks]
            changed = [float(a != b) for a, b in zip(sent, now, strict=True)]
            flags = torch.tensor(changed, dtype=torch.float32, device="cpu")
            agreement = self._training.world.on_cpu().all_reduce_max([flags])
            self._last_pairs = {block: block.staged.pairs for block in blocks}
            self._last_micro_batches = micro_batches
            agreement.wait()
            outdated = [
                b for b, flag in zip(blocks, flags.tolist(), strict=True) if flag
            ]
            resent = self._layers.pop_sums(outdated, micro_batches)

            # Wait for the buckets, and send the changed layers again.
            sums: Sums = {}
            for bucket in self._sent:
                sums |= bucket.wait()
            self._sent = []
            self._expected = False
            if resent:
                exchange(resent, self._communication_dtype)
        return {**sums, **resent}

    def close(self) -> None:
        """Stop.

        If this rank has sent a bucket, send the others, because all ranks send all.
        """
        if self._sent:
            self._send_rest(self._last_micro_batches)
        self._start([])
