"""Overflow in sums of statistics: each is finite, but not their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.layers import FactorShape

__all__ = ["drop_overflow"]


def drop_overflow(sums: StatisticsSums, shape: FactorShape) -> Tensor:
    """Zero sums whose entries may not fit their dtype; returns whether, a scalar tensor.

    No entry of a positive semi-definite matrix exceeds its trace, which the head knows: on all
    ranks, whoever keeps the factors, so that all come to the same verdict.

    Args:
        sums: A layer's sums over all ranks; changed in place.
        shape: Sizes of the layer's factors.
    """
    widest = max(shape.dim(letter) for letter in shape.letters)
    bound = torch.finfo(sums.factors["A"].dtype).max / widest
    over = ~(sums.head[1:].amax() <= bound)  # NaN is no sound sum either
    # On the CPU nobody waits for an answer.
    if over.device.type != "cpu" or bool(over):
        for each in (sums.head, *sums.factors.values()):
            each.masked_fill_(over, 0.0)
    return over
