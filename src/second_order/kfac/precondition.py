"""Preconditioned gradients: P by each layer's gradient workers, sent to all, clipped, in p.grad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.world import World, deliver_parts
from second_order.kfac.clip import Clip, kl_clip_coefficient
from second_order.kfac.plan import LayerPlan, gradient_owners
from second_order.kfac.step_plan import StepPlan
from second_order.kronecker.block import KroneckerBlock

__all__ = ["owners_of", "precondition_by_owners", "precondition_by_workers", "share"]


def precondition_by_workers(
    step: StepPlan, training: Training, clip: Clip, dtype: torch.dtype
) -> Tensor | None:
    """Precondition by gradient workers, which send P to the other ranks; write ν P.

    Every rank has the mean gradients, gets all results, and clips by itself.

    Args:
        step: What this rank does.
        training: The training that the gradients are of.
        clip: The clip of the steps.
        dtype: The dtype of the inverses.

    Returns:
        ν, a scalar; None where nothing is clipped.
    """
    found = {block: block.gradient(block.work_dtype) for block in step.layers if block.solved}
    mine = {  # without a gradient, too: others expect a message
        block: block.precondition(gradient, dtype)
        for block, gradient in found.items()
        if block.inverse is not None
    }
    with training.meter.stage("exchange"):
        if step.column.size > 1:
            mine = _given_to_all(step, mine, training.device)
    gradients = {block: gradient for block, gradient in found.items() if gradient is not None}
    if not gradients:
        return None
    coefficient = None
    with training.meter.stage("clip"):
        chosen = {block: mine[block] for block in gradients}
        if (bound := clip.bound()) is not None:
            coefficient = kl_clip_coefficient(clip.change(chosen, gradients), bound)
        for block, result in chosen.items():
            scale = 1.0 if coefficient is None else coefficient.to(result.device, result.dtype)
            block.write_gradient(result, scale)
    return coefficient


def _given_to_all(
    step: StepPlan, mine: Mapping[KroneckerBlock, Tensor], device: torch.device
) -> dict[KroneckerBlock, Tensor]:
    """P of all solved layers, from the rank of the column that has it."""
    results: dict[KroneckerBlock, Tensor] = {}
    everybody = range(step.column.size)
    for dtype, rows in step.results.items():
        routes = {block: (row, everybody) for block, row in rows.items() if block.solved}
        if routes:
            shapes = {block: (block.shape.gradient_size,) for block in routes}
            ours = {block: (mine[block],) for block in routes if block in mine}
            received = deliver_parts(step.column, shapes, routes, ours, dtype, device)
            results.update({block: parts[0] for block, parts in received.items()})
    return results


def owners_of(
    layers: Mapping[KroneckerBlock, LayerPlan], params: Sequence[Tensor], ranks: int
) -> list[int]:
    """The owner of each parameter's gradient, in a layer or not."""
    owner_of = {id(p): layer.workers[0] for b, layer in layers.items() for p in b.params}
    owners = [owner_of.get(id(p)) for p in params]
    return gradient_owners([p.numel() for p in params], owners, ranks)


def precondition_by_owners(
    step: StepPlan,
    training: Training,
    clip: Clip,
    dtype: torch.dtype,
    owners: Mapping[Tensor, int] | None,
) -> Tensor | None:
    """Precondition by owners, which send P to all with their part of the clip's sum; write ν P.

    Args:
        step: What this rank does.
        training: The training that the gradients are of.
        clip: The clip of the steps.
        dtype: The dtype of the inverses.
        owners: The owner of each gradient, where those that nobody preconditions are at their
            owners alone, too; None where they are everywhere.

    Returns:
        ν, a scalar; None where nothing is clipped.
    """
    world, meter, bound = training.world, training.meter, clip.bound()
    solved = [block for block in step.layers if block.solved]
    mine: dict[KroneckerBlock, Tensor] = {}
    gradients: dict[KroneckerBlock, Tensor] = {}
    for block in solved:
        gradient = None if block.inverse is None else block.gradient(block.work_dtype)
        if gradient is not None:
            gradients[block], mine[block] = gradient, block.precondition(gradient, dtype)
    changes: list[Tensor] = []
    with meter.stage("clip"):
        if bound is not None:
            changes = clip.parts(world.size, training.device)
            changes[world.rank].copy_(clip.change(mine, gradients))
        for block, result in mine.items():  # not yet clipped: the whole sum comes with it
            block.write_gradient(result, 1.0)
    with meter.stage("exchange"):
        if world.size > 1:
            if owners is None:  # means already, wherever nobody has preconditioned them
                ranks = {p: step.layers[block].workers[0] for block in solved for p in block.params}
                sent = [
                    (torch.zeros_like(p) if p.grad is None else p.grad, ranks[p]) for p in ranks
                ]
            else:
                sent = [(p.grad, rank) for p, rank in owners.items() if p.grad is not None]
            share(world, [*sent, *zip(changes, range(world.size), strict=False)])
    if bound is None:
        return None
    with meter.stage("clip"):
        coefficient = kl_clip_coefficient(torch.stack(changes).sum(), bound)
        for p in (p for block in solved for p in block.params):
            if p.grad is not None:
                p.grad.mul_(coefficient.to(p.grad.device, p.grad.dtype))
    return coefficient


def share(world: World, owned: Sequence[tuple[Tensor, int]]) -> None:
    """Give all ranks tensors that one has."""
    if owned and world.size > 1:
        tensors, owners = zip(*owned, strict=True)
        world.broadcast(tensors, owners)
