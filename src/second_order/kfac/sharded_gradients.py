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

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from second_order.distributed.buckets import in_buckets
from second_order.distributed.fsdp import ShardLayout, layout_of, local
from second_order.distributed.world import BUCKET_BYTES, World
from second_order.kfac.plan import StepPlan
from second_order.kfac.precondition import (
    Clip,
    Preconditioning,
    compare,
    precondition,
    scale,
    write,
)
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.solvers import Inverse
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["buckets_of", "precondition_rows"]


class Piece(NamedTuple):
    """A parameter of a layer, and its rows by rank."""

    block: KroneckerBlock
    param: Tensor
    rows: ShardLayout


class Bucket(NamedTuple):
    """Layers whose gradients travel together: by rank, the parameters that it preconditions."""

    dtype: torch.dtype
    pieces: Sequence[Sequence[Piece]]


def precondition_rows(
    buckets: Sequence[Bucket],
    step: StepPlan,
    training: Training,
    clip: Clip,
    dtype: torch.dtype,
    previous: Mapping[KroneckerBlock, Tensor | Inverse],
) -> Preconditioning:
    """Precondition the layers that are solved, each on its worker, and write ν P by rows.

    ``previous`` has the last inverses of layers that have been refreshed.
    """
    world, bound = training.world, clip.bound()
    solved = [block for block in step.layers if block.solved]
    parts: list[Tensor] = []
    changes: dict[KroneckerBlock, Tensor] = {}
    for bucket in buckets:
        with stage("precondition_exchange"):
            whole = _gathered(bucket, world, training.device)
        here = {piece.block for piece in bucket.pieces[world.rank]}
        found = precondition(step.banks, dtype, whole.get, here)
        if previous:
            changes |= compare(found, previous, dtype)
        change = torch.zeros((), dtype=bucket.dtype, device=training.device)
        if bound is not None:
            change.copy_(clip.change(found))
        write(found, None, whole.get)
        with stage("precondition_exchange"):
            parts += _returned(bucket, world, whole, change)
    if bound is None or not parts:
        return Preconditioning(None, changes)
    total = torch.stack([part.to(parts[0].dtype) for part in parts]).sum()
    coefficient = clip.coefficient(total, bound)
    if coefficient is not None:
        params = [p for block in solved for p in block.params]
        scale([local(p.grad) for p in params if p.grad is not None], coefficient)
    return Preconditioning(coefficient, changes)


def buckets_of(step: StepPlan, world: World) -> list[Bucket]:
    """The buckets of the solved layers, the same on every rank."""
    buckets = []
    solved = [block for block in step.layers if block.solved]
    for dtype in dict.fromkeys(block.work_dtype for block in solved):
        runs: list[list[list[Piece]]] = [[] for _ in range(world.size)]
        for run in in_buckets(
            [block for block in solved if block.work_dtype == dtype],
            lambda block: step.layers[block].workers[0],
            lambda block: block.work_dtype.itemsize * sum(p.numel() for p in block.params),
            BUCKET_BYTES,
        ):
            pieces = [Piece(b, p, layout_of(p, world)) for b in run for p in b.params]
            runs[step.layers[run[0]].workers[0]].append(pieces)
        buckets += [
            Bucket(dtype, [run[i] if i < len(run) else [] for run in runs])
            for i in range(max(map(len, runs)))
        ]
    return buckets


def _gathered(bucket: Bucket, world: World, device: torch.device) -> dict[Tensor, Tensor]:
    """The whole gradients of this rank's layers in a bucket, from the ranks that have rows."""
    here, sent = world.rank, []
    for worker, pieces in enumerate(bucket.pieces):
        parts = [torch.empty(0, dtype=bucket.dtype, device=device)]
        for _, p, rows in pieces:
            if rows.together(here, worker):  # zeros where there is none: others expect them
                gradient = torch.zeros_like(local(p)) if p.grad is None else local(p.grad)
                parts.append(gradient.detach().reshape(-1).to(bucket.dtype))
        sent.append(torch.cat(parts))
    mine = bucket.pieces[here]
    sizes = [
        [piece.rows.size(rank) for piece in mine if piece.rows.together(rank, here)]
        for rank in range(world.size)
    ]
    received = world.swap(sent, map(sum, sizes))
    arrived = [iter(flat.split(each)) for flat, each in zip(received, sizes, strict=True)]
    whole = {}
    for piece in mine:
        flat = torch.cat([next(arrived[rank]) for rank in piece.rows.replicas[here]])
        whole[piece.param] = flat.view(piece.param.shape)
    return whole


def _returned(
    bucket: Bucket, world: World, whole: Mapping[Tensor, Tensor], change: Tensor
) -> list[Tensor]:
    """Give every rank its rows of the results; returns all workers' parts of the clip's sum."""
    here, sent = world.rank, []
    for rank in range(world.size):
        bounds = ((piece.param, piece.rows.bounds(rank)) for piece in bucket.pieces[here])
        parts = [whole[p][start:stop].reshape(-1) for p, (start, stop) in bounds]
        sent.append(torch.cat([*parts, change.reshape(1)]))
    sizes = [[*(p.rows.size(here) for p in pieces), 1] for pieces in bucket.pieces]
    changes = []
    received = world.swap(sent, map(sum, sizes))
    for flat, each, pieces in zip(received, sizes, bucket.pieces, strict=True):
        *parts, theirs = flat.split(each)
        changes.append(theirs.view(()))
        for part, piece in zip(parts, pieces, strict=True):
            if piece.param.grad is not None:
                rows = local(piece.param.grad)
                rows.copy_(part.view(rows.shape))
    return changes
