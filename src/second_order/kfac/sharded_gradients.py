"""Gradients of which each rank has some rows, as FSDP2 leaves them.

by bucket:  rows of the gradients of the bucket's layers -> the layers' workers     one all-to-all
            P = (A ⊗ G + γ)⁻¹ ∇, by each layer's worker
            rows of P -> the ranks they belong to, with each worker's part of the clip's sum
                                                                                    one all-to-all
then:       all clip their rows

A bucket has as many layers of each worker as fit into some megabytes of whole gradients: whole
gradients of more than one bucket are never on a rank at once, and a small model is one bucket.
Parameters that are whole on every rank go the same way; only their results travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from second_order.contract.averaging import Routed
from second_order.contract.training import Training
from second_order.distributed.collectives import BUCKET_BYTES
from second_order.distributed.rows import Rows, rows_of
from second_order.distributed.shares import in_buckets
from second_order.kfac.clip import Clip, kl_clip_coefficient
from second_order.kfac.exchange import Exchange
from second_order.kfac.plan import LayerPlan
from second_order.kronecker.block import KroneckerBlock
from second_order.sharded import local

__all__ = ["ShardedGradients"]


@dataclass(frozen=True)
class Piece:
    """A parameter of a layer, and where its rows are.

    Attributes:
        block: The layer.
        param: The parameter.
        rows: The rows, by rank.
    """

    block: KroneckerBlock
    param: Tensor
    rows: Rows


@dataclass(frozen=True)
class Bucket:
    """Layers whose gradients travel together.

    Attributes:
        dtype: The dtype in which they travel.
        pieces: By rank, the parameters of the layers that it preconditions.
    """

    dtype: torch.dtype
    pieces: Sequence[Sequence[Piece]]


class ShardedGradients:
    """Gradients that go to their layers' workers by rows, and come back preconditioned.

    Args:
        training: The training that the gradients are of.
        clip: The clip of the steps.
        batch_of_all: Whether the clip follows the batch of the layer that sees most among all
            layers; among those of each worker otherwise.

    Attributes:
        coefficient: ν of the last step, a scalar; None where nothing was clipped.
    """

    def __init__(self, training: Training, clip: Clip, *, batch_of_all: bool) -> None:
        self._training, self._clip, self._batch_of_all = training, clip, batch_of_all
        self.coefficient: Tensor | None = None
        self._key: Any = None
        self._buckets: list[Bucket] = []

    def route(
        self,
        layers: Mapping[KroneckerBlock, LayerPlan],
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> Routed:
        """None: gradients that FSDP2 has not averaged go to all ranks."""
        return None

    def follow_moved(self, layers: Mapping[KroneckerBlock, LayerPlan]) -> None:
        """Do nothing: a gradient's rows stay where they are."""

    def precondition(
        self,
        layers: Mapping[KroneckerBlock, LayerPlan],
        exchange: Exchange,
        dtype: torch.dtype,
    ) -> None:
        """Precondition the layers that are solved, each on its worker, and write ν P by rows.

        Args:
            layers: The plan of each layer, the first of whose workers preconditions it.
            exchange: The collectives between the ranks.
            dtype: The dtype of the inverses.
        """
        self.coefficient = None
        bound, changes = self._clip.bound(), []
        solved = [block for block in layers if block.solved]
        present = [block for block in solved if not block.without_gradient]
        for bucket in self._planned(layers, solved):
            with self._training.meter.stage("exchange"):
                whole = self._gathered(bucket)
            change = self._work(bucket, whole, present, dtype, clipped=bound is not None)
            with self._training.meter.stage("exchange"):
                changes += self._returned(bucket, whole, change)
        if bound is None or not changes:
            return
        with self._training.meter.stage("clip"):
            total = torch.stack([change.to(changes[0].dtype) for change in changes]).sum()
            self.coefficient = coefficient = kl_clip_coefficient(total, bound)
            for p in (p for block in solved for p in block.params):
                if p.grad is not None:
                    rows = local(p.grad)
                    rows.mul_(coefficient.to(rows.device, rows.dtype))

    # ------------------------------------------------------------------------------ the schedule

    def _planned(
        self, layers: Mapping[KroneckerBlock, LayerPlan], solved: Sequence[KroneckerBlock]
    ) -> list[Bucket]:
        """The buckets of the solved layers, the same on every rank; kept until layers change."""
        key = [(id(b), layers[b].workers[0], *map(id, b.params)) for b in solved]
        if key != self._key:
            self._key, self._buckets = key, self._made(layers, solved)
        return self._buckets

    def _made(
        self, layers: Mapping[KroneckerBlock, LayerPlan], solved: Sequence[KroneckerBlock]
    ) -> list[Bucket]:
        world = self._training.world
        buckets = []
        for dtype in dict.fromkeys(block.work_dtype for block in solved):
            alike = [block for block in solved if block.work_dtype == dtype]
            runs: list[list[list[Piece]]] = [[] for _ in range(world.size)]
            for run in in_buckets(
                alike,
                lambda block: layers[block].workers[0],
                lambda block: block.work_dtype.itemsize * sum(p.numel() for p in block.params),
                BUCKET_BYTES,
            ):
                pieces = [Piece(b, p, rows_of(p, world)) for b in run for p in b.params]
                runs[layers[run[0]].workers[0]].append(pieces)
            buckets += [
                Bucket(dtype, [run[i] if i < len(run) else [] for run in runs])
                for i in range(max(map(len, runs)))
            ]
        return buckets

    # ---------------------------------------------------------------------------------- exchange

    def _gathered(self, bucket: Bucket) -> dict[Tensor, Tensor]:
        """The whole gradients of this rank's layers in a bucket, from the ranks that have rows."""
        world = self._training.world
        here, device = world.rank, self._training.device
        sent = [
            [
                _flat(_gradient(piece.param), bucket.dtype)
                for piece in pieces
                if piece.rows.together(here, worker)
            ]
            for worker, pieces in enumerate(bucket.pieces)
        ]
        mine = bucket.pieces[here]
        sizes = [
            [piece.rows.size(rank) for piece in mine if piece.rows.together(rank, here)]
            for rank in range(world.size)
        ]
        received = world.swap(
            [_joined(part, bucket.dtype, device) for part in sent], map(sum, sizes)
        )
        parts = [iter(flat.split(each)) for flat, each in zip(received, sizes, strict=True)]
        return {
            piece.param: torch.cat([next(parts[rank]) for rank in piece.rows.replicas[here]]).view(
                piece.param.shape
            )
            for piece in mine
        }

    def _returned(
        self, bucket: Bucket, whole: Mapping[Tensor, Tensor], change: Tensor
    ) -> list[Tensor]:
        """Give every rank its rows of the results; returns all workers' parts of the clip's sum."""
        world = self._training.world
        here, device = world.rank, self._training.device
        sent = []
        for rank in range(world.size):
            parts = []
            for piece in bucket.pieces[here]:
                start, stop = piece.rows.bounds(rank)
                parts.append(whole[piece.param][start:stop].reshape(-1))
            sent.append(
                _joined([*parts, change.reshape(1).to(device, bucket.dtype)], bucket.dtype, device)
            )
        sizes = [[*(p.rows.size(here) for p in pieces), 1] for pieces in bucket.pieces]
        received = world.swap(sent, map(sum, sizes))
        changes = []
        for flat, each, pieces in zip(received, sizes, bucket.pieces, strict=True):
            *parts, theirs = flat.split(each)
            changes.append(theirs.view(()))
            for part, piece in zip(parts, pieces, strict=True):
                if piece.param.grad is not None:
                    rows = local(piece.param.grad)
                    rows.copy_(part.view(rows.shape))
        return changes

    # -------------------------------------------------------------------------------------- work

    def _work(
        self,
        bucket: Bucket,
        whole: Mapping[Tensor, Tensor],
        present: Sequence[KroneckerBlock],
        dtype: torch.dtype,
        *,
        clipped: bool,
    ) -> Tensor:
        """Precondition this rank's layers in place; returns their part of the clip's sum."""
        blocks = list(
            dict.fromkeys(piece.block for piece in bucket.pieces[self._training.world.rank])
        )
        results: dict[KroneckerBlock, Tensor] = {}
        gradients: dict[KroneckerBlock, Tensor] = {}
        for block in blocks:
            with block.lent(whole):
                gradient = block.gradient(block.work_dtype)
                if gradient is None or block.inverse is None:
                    continue
                result = block.precondition(gradient, dtype)
                gradients[block], results[block] = gradient, result
        change = torch.zeros((), dtype=bucket.dtype)
        if clipped:
            among = present if self._batch_of_all else ()
            change = self._clip.change(results, gradients, among)
        for block, result in results.items():
            with block.lent(whole):
                block.write_gradient(result, 1.0)
        return change


def _gradient(p: Tensor) -> Tensor:
    """This rank's rows of a gradient; zeros where there is none: others expect them."""
    return torch.zeros_like(local(p)) if p.grad is None else local(p.grad)


def _flat(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.detach().reshape(-1).to(dtype)


def _joined(parts: Iterable[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = list(parts)
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
