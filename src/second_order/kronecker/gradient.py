"""Blocks of matrices that no rule knows, from their gradients alone.

Of the mean gradient M of a step, ``(out, in)``, the factors are M Mᵀ and Mᵀ M, as in Shampoo (Gupta
et al. 2018) and SOAP (Vyas et al. 2024). The block is their product over the trace of one,

    F ≈ N E[M Mᵀ] ⊗ E[Mᵀ M / tr Mᵀ M],

N the number of examples in a step: exact where F is a Kronecker product, and near the best one in
the Frobenius norm otherwise (Morwani et al. 2024). It is inverted as K-FAC's blocks are, each
factor with the exponent -1. The gradients of N examples have a mean whose second moment is F / N,
so that N brings it to the scale of an example's, which is that of K-FAC's A ⊗ G: damping and clip
mean the same. Where the mean gradient is not small beside its noise, F is taken for larger than it
is, up to N times, and the step is the shorter.

A side longer than the largest factor allowed has its diagonal alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from second_order.kronecker.block import KroneckerBlock, to_matrices
from second_order.kronecker.factors import StatisticsSums, count_dropped
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.storage import pack_upper_triangular

__all__ = ["GradientBlock", "gradient_sums", "matrix_shape"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor folded into a matrix, cut where the factors are the smallest.

    A convolution's ``(out, in, *kernel)`` is cut behind its first dimension as a rule, a stack of
    matrices ``(experts, in, out)`` before its last one.
    """
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(cuts, key=lambda cut: cut[0] ** 3 + cut[1] ** 3)


class GradientBlock(KroneckerBlock):
    """A matrix, of two dimensions or more, whose factors are made of its gradient, without hooks.

    ``most`` is the largest size of a factor that is no diagonal; None for no bound.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameter: nn.Parameter,
        most: int | None,
        factor_dtype: torch.dtype,
    ) -> None:
        self.most = most
        super().__init__([name], [module], None, factor_dtype, owned=[parameter])
        self.hooked_modules = []  # no pass of a module is looked at

    def _current_shape(self) -> FactorShape:
        rows, columns = matrix_shape(self.weight.shape)
        wide = self.most is not None and max(rows, columns) > self.most
        if wide:  # the longer side is the columns', whose factor can be a diagonal
            rows, columns = sorted((rows, columns))
        flipped = matrix_shape(self.weight.shape) != (rows, columns)
        return FactorShape(1, columns, rows, wide, transposed=flipped, gradient_factored=True)


def gradient_sums(
    blocks: Sequence[GradientBlock], examples: Tensor, scale: Tensor
) -> dict[KroneckerBlock, StatisticsSums]:
    """The statistics of the gradients that are here, for so many examples, of blocks that have one.

    A gradient that is zero, or so small that its squares lose their digits, counts no example,
    nor does one that is not finite, which is counted as dropped. The scale brings M Mᵀ to an
    example's: N where the loss is a mean.
    """
    sums: dict[KroneckerBlock, StatisticsSums] = {}
    for block in blocks:
        if block.has_gradient:
            device = block.weight.device
            sums[block] = _sums_of(block, examples.to(device), scale.to(device))
            block.record_capture(work=0)
    return sums


def _sums_of(block: GradientBlock, examples: Tensor, scale: Tensor) -> StatisticsSums:
    """The statistics of a block's gradient."""
    shape = block.shape
    dtype = block.staged.dtype
    matrix = to_matrices([cast(Tensor, block.weight.grad)], block.layout).to(dtype)
    size = matrix.square().sum()

    # A gradient without digits counts no example.
    number = torch.finfo(dtype)
    finite = size * scale * 0.0 == 0.0
    count_dropped([block.staged], ~finite.view(1))
    valid = finite & (size > number.tiny / number.eps)
    matrix = matrix.masked_fill(~valid, 0.0)
    size = size.masked_fill(~valid, 0.0)
    examples = examples * valid

    # Mᵀ M and N M Mᵀ, of which a rank that does not keep a factor has the trace alone.
    factors: dict[str, Tensor] = {}
    for letter, half in (("A", matrix), ("G", matrix.mT)):
        if not block.held[letter == "G"]:
            factors[letter] = matrix.new_empty(0, dtype=block.factor_dtype)
            continue
        diagonal = letter in shape.diagonals
        whole = half.square().sum(-2) if diagonal else half.mT @ half
        if letter == "G":
            whole = whole * (scale * examples)
        if not diagonal:
            whole = pack_upper_triangular(whole)
        factors[letter] = whole.to(block.factor_dtype)
    traces = size / shape.in_dim, size * scale * examples / shape.out_dim
    return StatisticsSums(factors, torch.stack([examples, examples, *traces]).to(dtype))
