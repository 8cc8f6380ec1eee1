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

import torch
from torch import Tensor, nn

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.layers import FactorShape, as_matrices

__all__ = ["GradientBlock", "folded"]


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

    def sums(self, examples: Tensor, scale: Tensor) -> StatisticsSums | None:
        """The statistics of the gradient that is here, for so many examples; None without one.

        A gradient that is zero, or so small that its squares lose their digits, counts no example,
        nor does one that is not finite, which is counted as dropped. The scale brings M Mᵀ to an
        example's: N where the loss is a mean.
        """
        if self.owned.grad is None:
            return None
        found = as_matrices([self.owned.grad], self.layout).to(self.staged.dtype)
        size = found.square().sum()
        finite = torch.isfinite(size * scale)
        self.staged.dropped += ~finite
        number = torch.finfo(size.dtype)
        live = finite & (size > number.tiny / number.eps)
        found = torch.where(live, found, 0.0)
        size, examples = torch.where(live, size, 0.0), examples * live.to(size.dtype)
        shape, factors = self.shape, {}
        for letter in shape.letters:
            if not self.held[letter == "G"]:  # of others only the trace is known
                factors[letter] = found.new_empty(0, dtype=self.factor_dtype)
                continue
            half = found if letter == "A" else found.mT
            whole = half.square().sum(-2) if letter in shape.diagonals else half.mT @ half
            whole = whole if letter == "A" else whole * (scale * examples)
            factors[letter] = self.ensure_factors().store(whole)
        traces = [size / shape.in_dim, size * scale * examples / shape.out_dim]
        self.state.heard = True
        return StatisticsSums(factors, torch.stack([examples, *traces]).to(self.staged.dtype))
