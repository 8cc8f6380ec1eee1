"""Gradients of which each rank has some rows, as FSDP2 leaves them.

by bucket:  rows of the gradients of the bucket's layers -> the layers' workers     one all-to-all
            P = (A ⊗ G + γ)⁻¹ ∇, by each layer's worker
            rows of P -> the ranks they belong to                                   one all-to-all
then:       all clip their rows, by the sum over the workers                        one all-reduce

A bucket has as many layers of each worker as fit into some megabytes of whole gradients: whole
gradients of more than one bucket are never on a rank at once, and a small model is one bucket.
Parameters that are whole on every rank go the same way; only their results travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from second_order.distributed.fsdp import ShardLayout, local_tensor, shard_layout
from second_order.distributed.world import BUCKET_BYTES, World, split_into_buckets
from second_order.kfac.plan import StepPlan
from second_order.kfac.precondition import (
    Clip,
    PreconditionResult,
    compare_inverses,
    precondition_batches,
    scale_tensors,
    write_gradients,
)
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.solvers import Inverse
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["make_buckets", "precondition_rows"]


class Piece(NamedTuple):
    """A parameter of a layer, and its rows by rank."""

    block: KroneckerBlock
    param: Tensor
    rows: ShardLayout


class Bucket(NamedTuple):
    """Layers whose gradients travel together: by rank, the parameters that it preconditions."""

    dtype: torch.dtype
    pieces: list[list[Piece]]


def precondition_rows(
    buckets: Sequence[Bucket],
    step: StepPlan,
    training: Training,
    clip: Clip | None,
    dtype: torch.dtype,
    previous: Mapping[KroneckerBlock, Inverse],
) -> PreconditionResult:
    """Precondition the layers that are solved, each on its worker, and write ν P by rows.

    ``previous`` has the last inverses of layers that have been refreshed.
    """
    if not any(block.solved for block in step.layers):
        return PreconditionResult(None, {})
    world = training.world
    cosines: dict[KroneckerBlock, Tensor] = {}
    changes: list[Tensor] = []
    results: dict[Tensor, Tensor] = {}
    for bucket in buckets:
        with stage("precondition_exchange"):
            whole = _gather(bucket, world, training.device)
        here = {piece.block for piece in bucket.pieces[world.rank]}
        found = precondition_batches(step.batches, dtype, whole.get, here)
        cosines |= compare_inverses(found, previous, dtype)
        if clip is not None:
            changes.append(clip.change(found))
        write_gradients(found, None, whole.get)
        with stage("precondition_exchange"):
            results |= _return(bucket, world, whole, training.device)

    # Clip by the change of all layers, and write this rank's rows.
    coefficient = None
    if clip is not None:
        total = torch.stack([change.to(changes[0].dtype) for change in changes]).sum()
        coefficient = clip.coefficient(total, world)
    if coefficient is not None:
        scale_tensors(results.values(), coefficient)
    for p, rows in results.items():
        if p.grad is not None:
            local_tensor(p.grad).copy_(rows.view(local_tensor(p.grad).shape))
    return PreconditionResult(coefficient, cosines)


def make_buckets(step: StepPlan, world: World) -> list[Bucket]:
    """The buckets of all layers, the same on every rank."""
    runs = split_into_buckets(
        step.layers,
        kind=lambda block: (block.work_dtype, step.layers[block].workers[0]),
        nbytes=lambda block: block.work_dtype.itemsize * sum(p.numel() for p in block.params),
        max_bytes=BUCKET_BYTES,
    )
    # The first run of each worker is in the first bucket of its dtype, and so on.
    buckets: dict[tuple[torch.dtype, int], Bucket] = {}
    filled: Counter[tuple[torch.dtype, int]] = Counter()
    for run in runs:
        dtype = run[0].work_dtype
        worker = step.layers[run[0]].workers[0]
        key = (dtype, filled[dtype, worker])
        filled[dtype, worker] += 1
        bucket = buckets.setdefault(key, Bucket(dtype, [[] for _ in range(world.size)]))
        pieces = [Piece(b, p, shard_layout(p, world)) for b in run for p in b.params]
        bucket.pieces[worker].extend(pieces)
    return list(buckets.values())


def _gather(bucket: Bucket, world: World, device: torch.device) -> dict[Tensor, Tensor]:
    """The whole gradients of this rank's layers in a bucket, from the ranks that have rows."""
    here = world.rank
    sent: list[Tensor] = []
    for worker, pieces in enumerate(bucket.pieces):
        parts = [torch.empty(0, dtype=bucket.dtype, device=device)]
        for _, p, rows in pieces:
            if rows.in_same_replica(here, worker):  # zeros where there is none: others expect them
                gradient = (
                    torch.zeros_like(local_tensor(p)) if p.grad is None else local_tensor(p.grad)
                )
                parts.append(gradient.detach().reshape(-1).to(bucket.dtype))
        sent.append(torch.cat(parts))

    # Each rank of this one's replica has sent its rows of every parameter.
    own = bucket.pieces[here]
    sizes = [
        [each.rows.size(rank) for each in own if each.rows.in_same_replica(rank, here)]
        for rank in range(world.size)
    ]
    received = world.all_to_all(sent, [sum(each) for each in sizes])
    arrived = [iter(flat.split(each)) for flat, each in zip(received, sizes, strict=True)]
    whole: dict[Tensor, Tensor] = {}
    for piece in own:
        flat = torch.cat([next(arrived[rank]) for rank in piece.rows.replicas[here]])
        whole[piece.param] = flat.view(piece.param.shape)
    return whole


def _return(
    bucket: Bucket, world: World, whole: Mapping[Tensor, Tensor], device: torch.device
) -> dict[Tensor, Tensor]:
    """This rank's rows of the results for the solved layers of a bucket, flat, by parameter."""
    here = world.rank
    sent: list[Tensor] = []
    for rank in range(world.size):
        parts = [torch.empty(0, dtype=bucket.dtype, device=device)]
        for _, p, rows in bucket.pieces[here]:
            start, stop = rows.bounds(rank)
            parts.append(whole[p][start:stop].reshape(-1))
        sent.append(torch.cat(parts))
    sizes = [[each.rows.size(here) for each in pieces] for pieces in bucket.pieces]
    received = world.all_to_all(sent, [sum(each) for each in sizes])
    results: dict[Tensor, Tensor] = {}
    for flat, each, pieces in zip(received, sizes, bucket.pieces, strict=True):
        for part, piece in zip(flat.split(each), pieces, strict=True):
            if piece.block.solved:
                results[piece.param] = part
    return results
