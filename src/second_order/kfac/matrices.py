"""Statistics of matrices that no rule knows, from the mean gradients of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.kfac.clip import USUAL_BATCH
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.gradient import GradientBlock

__all__ = ["gradient_blocks", "gradient_statistics"]


def gradient_blocks(blocks: Iterable[KroneckerBlock]) -> list[GradientBlock]:
    """The blocks whose factors are made of gradients."""
    return [block for block in blocks if isinstance(block, GradientBlock)]


def gradient_statistics(
    training: Training,
    blocks: Iterable[KroneckerBlock],
    mine: Sequence[GradientBlock],
    *,
    counts_own: bool,
    mean_loss: bool,
) -> dict[KroneckerBlock, StatisticsSums]:
    """The sums of the blocks whose mean gradients are here; a collective if ``counts_own``.

    The number of examples of a step is that of the layer that sees most, on average; 64 where no
    layer counts any.

    Args:
        training: The training that the gradients are of.
        blocks: The blocks whose counts are those of the training's batches.
        mine: The blocks to take statistics of.
        counts_own: Whether a rank's layers count its own examples alone, not those of all ranks.
        mean_loss: Whether the loss is a mean over examples, not a sum.
    """
    size = training.world.size
    others = [b.factors for b in blocks if b.factors and not isinstance(b, GradientBlock)]
    counts = [factors.examples.to(training.device) for factors in others]
    examples = torch.stack(counts).max() if counts else torch.zeros((), device=training.device)
    examples = examples.to(torch.float32)
    if counts_own:
        training.world.all_reduce_max([examples]).wait()
    ranks = size if counts_own else 1
    examples = torch.where(examples > 0, examples, USUAL_BATCH / ranks)
    everywhere = examples * ranks
    # A sum over examples is divided by the processes where gradients are averaged over these.
    scale = everywhere if mean_loss else size**2 / everywhere
    found = {block: _sums(block, examples, scale) for block in mine}
    return {block: sums for block, sums in found.items() if sums is not None}


def _sums(block: GradientBlock, examples: Tensor, scale: Tensor) -> StatisticsSums | None:
    device = block.weight.device
    return block.sums(examples.to(device), scale.to(device))
