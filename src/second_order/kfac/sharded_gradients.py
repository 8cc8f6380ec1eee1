"""Precondition gradients that FSDP2 shards by rows.

Each layer has one gradient worker, the only rank with its inverse.

    for each bucket of layers
        send the rows of the gradients to the layers' workers            one all-to-all
        P = (A ⊗ G + γ)⁻¹ ∇ on each layer's worker
        send the rows of P to the ranks that store these rows            one all-to-all
    scale all rows by the KL clip ν, which needs a sum over the workers  one all-reduce

A bucket has as many layers of each worker as fit into BUCKET_BYTES of whole gradients.
A rank never stores whole gradients of more than one bucket, and a small model is one
bucket. A parameter that is not sharded is treated in the same way, but only its results
are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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


class LayerParam(NamedTuple):
    """A parameter of a layer, and the rows of it that each rank stores."""

    block: KroneckerBlock
    param: Tensor
    layout: ShardLayout


class Bucket(NamedTuple):
    """Parameters whose gradients are sent together, by the rank of their worker."""

    dtype: torch.dtype
    params: list[list[LayerParam]]


def precondition_rows(
    buckets: Sequence[Bucket],
    step: StepPlan,
    training: Training,
    clip: Clip | None,
    dtype: torch.dtype,
    previous: Mapping[KroneckerBlock, Inverse],
) -> PreconditionResult:
    """Precondition the layers that have an inverse, and write the rows of ν P.

    Collective.

    Args:
        buckets: All layers, as :func:`make_buckets` returns them.
        step: The layers of this rank.
        training: The training run.
        clip: The KL clip, or None.
        dtype: Dtype of the inverses.
        previous: Previous inverses of refreshed layers, to compute the drift.

    Returns:
        ν, and the cosines between P by the previous and by the new inverse.
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
        local_blocks = {param.block for param in bucket.params[world.rank]}
        preconditioned = precondition_batches(
            step.batches, dtype, whole.get, local_blocks
        )
        cosines |= compare_inverses(preconditioned, previous, dtype)
        if clip is not None:
            changes.append(clip.change(preconditioned))
        write_gradients(preconditioned, None, whole.get)
        with stage("precondition_exchange"):
            results |= _return(bucket, world, whole, training.device)

    # Clip by the change of all layers, and write this rank's rows.
    clip_factor: Tensor | None = None
    if clip is not None:
        total = torch.stack([change.to(changes[0].dtype) for change in changes]).sum()
        clip_factor = clip.compute_factor(total, world)
    if clip_factor is not None:
        scale_tensors(results.values(), clip_factor)
    for p, rows in results.items():
        if p.grad is not None:
            local_tensor(p.grad).copy_(rows.view(local_tensor(p.grad).shape))
    return PreconditionResult(clip_factor, cosines)


def make_buckets(step: StepPlan, world: World) -> list[Bucket]:
    """Assign all layers to buckets. Every rank returns the same buckets."""
    # Split the layers of each worker into runs that fit into a bucket.
    runs = split_into_buckets(
        step.layers,
        kind=lambda block: (block.work_dtype, step.layers[block].workers[0]),
        nbytes=lambda block: (
            block.work_dtype.itemsize * sum(p.numel() for p in block.params)
        ),
        max_bytes=BUCKET_BYTES,
    )
    # The first bucket of a dtype has the first run of every worker, and so on.
    buckets: dict[tuple[torch.dtype, int], Bucket] = {}
    filled: Counter[tuple[torch.dtype, int]] = Counter()
    for run in runs:
        dtype = run[0].work_dtype
        worker = step.layers[run[0]].workers[0]
        key = (dtype, filled[dtype, worker])
        filled[dtype, worker] += 1
        bucket = buckets.setdefault(key, Bucket(dtype, [[] for _ in range(world.size)]))
        for block in run:
            for p in block.params:
                layer_param = LayerParam(block, p, shard_layout(p, world))
                bucket.params[worker].append(layer_param)
    return list(buckets.values())


def _gather(bucket: Bucket, world: World, device: torch.device) -> dict[Tensor, Tensor]:
    """Return the whole gradients of this rank's layers in a bucket. Collective."""
    rank = world.rank
    sent: list[Tensor] = []
    for worker, params in enumerate(bucket.params):
        parts = [torch.empty(0, dtype=bucket.dtype, device=device)]
        for _, p, layout in params:
            if layout.in_same_replica(rank, worker):
                if p.grad is None:  # the worker expects rows all the same
                    gradient = torch.zeros_like(local_tensor(p))
                else:
                    gradient = local_tensor(p.grad)
                parts.append(gradient.detach().reshape(-1).to(bucket.dtype))
        sent.append(torch.cat(parts))

    # Each rank of the replica has sent its rows of every parameter, in one order.
    own_params = bucket.params[rank]
    layouts = [param.layout for param in own_params]
    sizes: list[list[int]] = []
    for source in range(world.size):
        in_replica = [x for x in layouts if x.in_same_replica(source, rank)]
        sizes.append([layout.size(source) for layout in in_replica])
    received = world.all_to_all(sent, [sum(row_sizes) for row_sizes in sizes])
    rows_from: list[Iterator[Tensor]] = []
    for flat, row_sizes in zip(received, sizes, strict=True):
        rows_from.append(iter(flat.split(row_sizes)))
    whole: dict[Tensor, Tensor] = {}
    for _, p, layout in own_params:
        flat = torch.cat([next(rows_from[source]) for source in layout.replicas[rank]])
        whole[p] = flat.view(p.shape)
    return whole


def _return(
    bucket: Bucket, world: World, whole: Mapping[Tensor, Tensor], device: torch.device
) -> dict[Tensor, Tensor]:
    """Return this rank's rows of P for the solved layers of a bucket, flat.

    Collective.
    """
    # Send each rank the rows that it stores.
    sent: list[Tensor] = []
    for rank in range(world.size):
        parts = [torch.empty(0, dtype=bucket.dtype, device=device)]
        for _, p, layout in bucket.params[world.rank]:
            start, stop = layout.bounds(rank)
            parts.append(whole[p][start:stop].reshape(-1))
        sent.append(torch.cat(parts))

    # Receive this rank's rows of the parameters of every worker.
    sizes = [
        [param.layout.size(world.rank) for param in params] for params in bucket.params
    ]
    received = world.all_to_all(sent, [sum(row_sizes) for row_sizes in sizes])
    results: dict[Tensor, Tensor] = {}
    for flat, row_sizes, params in zip(received, sizes, bucket.params, strict=True):
        for rows, param in zip(flat.split(row_sizes), params, strict=True):
            if param.block.solved:
                results[param.param] = rows
    return results
