"""Gradient-factored blocks of matrices without a layer kind: factors from gradients.

Let M, ``(out, in)``, be the mean gradient of a step. The factors are M Mᵀ and Mᵀ M, as
in Shampoo (Gupta et al. 2018) and SOAP (Vyas et al. 2024). The block is their product
over the trace of one:

    F ≈ N E[M Mᵀ] ⊗ E[Mᵀ M / tr Mᵀ M]

This is exact if F is a Kronecker product, and close to the best Kronecker product in
the Frobenius norm otherwise (Morwani et al. 2024). Each factor is inverted with the
exponent -1, as in K-FAC.

N is the number of examples in a step. The mean gradient of N examples has the second
moment F / N, so the factor N restores the scale of K-FAC's A ⊗ G, and damping and KL
clip mean the same. If the mean gradient is not small compared with its noise, this
overestimates F by up to N times, which shortens the step.

If a side of the matrix is longer than the largest factor allowed, only the diagonal of
its factor is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from second_order.kronecker.block import KroneckerBlock, to_matrices
from second_order.kronecker.factors import (
    StatisticsSums,
    count_dropped,
    is_far_from_overflow,
)
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.storage import pack_upper_triangular

__all__ = ["GradientBlock", "gradient_sums", "matrix_shape"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Fold a tensor's shape into the rows and columns that are cheapest to invert.

    A convolution's ``(out, in, *kernel)`` usually becomes ``(out, in x kernel)``, and a
    stack of matrices ``(experts, in, out)`` becomes ``(experts x in, out)``.
    """
    folds = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(folds, key=lambda fold: fold[0] ** 3 + fold[1] ** 3)


class GradientBlock(KroneckerBlock):
    """A parameter of two or more dimensions, with factors from its gradient, not hooks.

    Args:
        name: Name of the parameter.
        module: The module that has the parameter.
        parameter: The parameter.
        max_dim: The largest size of a factor that is not a diagonal. None: no limit.
        factor_dtype: Dtype of the factors.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameter: nn.Parameter,
        max_dim: int | None,
        factor_dtype: torch.dtype,
    ) -> None:
        self.max_dim = max_dim
        super().__init__([name], [module], None, factor_dtype, params=[parameter])
        self.hooked_modules = []

    def _shape_if(self, training: Sequence[bool]) -> FactorShape:
        rows, columns = matrix_shape(self.weight.shape)
        is_transposed = False
        is_diagonal = self.max_dim is not None and max(rows, columns) > self.max_dim
        # Only A, the factor of the columns, can be a diagonal.
        if is_diagonal and rows > columns:
            rows, columns = columns, rows
            is_transposed = True
        return FactorShape(
            groups=1,
            in_dim=columns,
            out_dim=rows,
            diagonal_a=is_diagonal,
            transposed=is_transposed,
            gradient_factored=True,
        )


def gradient_sums(
    blocks: Sequence[GradientBlock], examples: Tensor, scale: Tensor
) -> dict[KroneckerBlock, StatisticsSums]:
    """Compute the statistics of all blocks that have a gradient.

    A gradient counts as no example if it is zero, or so small that its squares lose
    precision. A gradient whose products could overflow counts as no example either, and
    as dropped statistics.

    Args:
        blocks: The blocks.
        examples: Number of examples in the step.
        scale: The factor that brings M Mᵀ to the scale of an example: N if the loss is
            a mean.
    """
    sums: dict[KroneckerBlock, StatisticsSums] = {}
    for block in blocks:
        if block.has_gradient:
            device = block.weight.device
            sums[block] = _block_sums(block, examples.to(device), scale.to(device))
            block.record_capture(work=0)
    return sums


def _block_sums(
    block: GradientBlock, examples: Tensor, scale: Tensor
) -> StatisticsSums:
    """Compute the statistics of one block's gradient."""
    shape = block.shape
    dtype = block.staged.dtype
    matrix = to_matrices([cast(Tensor, block.weight.grad)], block.layout).to(dtype)
    square_norm = matrix.square().sum()

    # Zero the gradient if its products could overflow or lose precision, without a
    # device read.
    limits = torch.finfo(dtype)
    is_finite = is_far_from_overflow(square_norm * scale)
    count_dropped([block.staged], ~is_finite.view(1))
    is_valid = is_finite & (square_norm > limits.tiny / limits.eps)
    matrix = matrix.masked_fill(~is_valid, 0.0)
    square_norm = square_norm.masked_fill(~is_valid, 0.0)
    examples = examples * is_valid

    # Mᵀ M and N M Mᵀ. The latter is a mean, and statistics are divided by the number of
    # examples later, so it is multiplied by this number. A rank that does not own a
    # factor only needs its trace.
    factors: dict[str, Tensor] = {}
    for name, rows in (("A", matrix), ("G", matrix.mT)):
        if name not in block.owned_factors:
            factors[name] = matrix.new_empty(0, dtype=block.factor_dtype)
            continue
        is_diagonal = name in shape.diagonals
        factor = rows.square().sum(-2) if is_diagonal else rows.mT @ rows
        if name == "G":
            factor = factor * (scale * examples)
        if not is_diagonal:
            factor = pack_upper_triangular(factor)
        factors[name] = factor.to(block.factor_dtype)

    # N, the number of rows of A, and the mean eigenvalues of A and G.
    a_mean = square_norm / shape.in_dim
    g_mean = square_norm * scale * examples / shape.out_dim
    head = torch.stack([examples, examples, a_mean, g_mean]).to(dtype)
    return StatisticsSums(factors, head)
