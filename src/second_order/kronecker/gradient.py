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

from second_order.kronecker.bank import as_matrices
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.stacks import in_groups, most_elements, own_stack
from second_order.kronecker.triangles import pack_upper_triangular

__all__ = ["GradientBlock", "folded", "gradient_sums"]


def folded(shape: Sequence[int]) -> tuple[int, int]:
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
        triangular: bool,
    ) -> None:
        self.owned, self.most = parameter, most
        super().__init__([name], [module], None, factor_dtype, triangular)
        self.watched = []  # no pass of a module is looked at

    def _key_parameter(self) -> nn.Parameter:
        return self.owned

    def _current_shape(self) -> FactorShape:
        rows, columns = folded(self.owned.shape)
        wide = self.most is not None and max(rows, columns) > self.most
        if wide:  # the longer side is the columns', whose factor can be a diagonal
            rows, columns = sorted((rows, columns))
        flipped = folded(self.owned.shape) != (rows, columns)
        return FactorShape(1, columns, rows, wide, transposed=flipped, marginal=True)


def gradient_sums(
    blocks: Sequence[GradientBlock], examples: Tensor, scale: Tensor
) -> dict[KroneckerBlock, StatisticsSums]:
    """The statistics of the gradients that are here, for so many examples, of blocks that have one.

    A gradient that is zero, or so small that its squares lose their digits, counts no example,
    nor does one that is not finite, which is counted as dropped. The scale brings M Mᵀ to an
    example's: N where the loss is a mean.
    """
    here = [block for block in blocks if block.owned.grad is not None]
    keys = [(b.weight.device, b.layout, b.shape, b.held, b.weight.dtype) for b in here]
    sizes = [block.size for block in here]
    sums: dict[KroneckerBlock, StatisticsSums] = {}
    most = most_elements(keys[0][0]) if keys else 0
    for group in in_groups(keys, sizes, most):
        device = keys[group[0]][0]
        sums |= _sums_of_alike([here[i] for i in group], examples.to(device), scale.to(device))
    return sums


def _sums_of_alike(
    blocks: Sequence[GradientBlock], examples: Tensor, scale: Tensor
) -> dict[KroneckerBlock, StatisticsSums]:
    """The statistics of blocks whose gradients lie alike in ``(n, out, in)``."""
    first, shape = blocks[0], blocks[0].shape
    dtype, triangular = first.staged.dtype, first.staged.triangular
    gradients = [cast(Tensor, block.owned.grad) for block in blocks]
    found = as_matrices(gradients, first.layout).to(dtype)
    size = found.square().sum((1, 2))
    finite, number = size * scale * 0.0 == 0.0, torch.finfo(dtype)
    own_stack([vars(block.staged) for block in blocks], "dropped").add_(~finite)
    dead = ~(finite & (size > number.tiny / number.eps))
    found = found.masked_fill(dead.view(-1, 1, 1), 0.0)
    size, examples = size.masked_fill(dead, 0.0), examples * ~dead
    factors: dict[str, Sequence[Tensor]] = {}
    for letter in shape.letters:
        if not first.held[letter == "G"]:  # of others only the trace is known
            factors[letter] = [found.new_empty(0, dtype=first.factor_dtype)] * len(blocks)
            continue
        half = found if letter == "A" else found.mT
        diagonal = letter in shape.diagonals
        whole = half.square().sum(-2) if diagonal else half.mT @ half
        if letter == "G":
            whole = whole * (scale * examples).view(-1, 1, 1)
        whole = pack_upper_triangular(whole) if triangular and not diagonal else whole
        factors[letter] = whole.to(first.factor_dtype).unsqueeze(1).unbind()
    traces = [size / shape.in_dim, size * scale * examples / shape.out_dim]
    heads = torch.stack([examples, examples, *traces], 1).to(dtype).unbind()
    sums: dict[KroneckerBlock, StatisticsSums] = {}
    for block, head, *parts in zip(blocks, heads, *factors.values(), strict=True):
        block.state.heard = True
        sums[block] = StatisticsSums(dict(zip(factors, parts, strict=True)), head)
    return sums
