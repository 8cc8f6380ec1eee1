"""The span of the eigenvectors V̂, and the Newton step in it (FOSI; DHO2, algorithm 3).

    c = V̂ᵀg,  mom <- β mom + gain · c,  step coefficients −α |û|⁻¹ mom

A :class:`Basis` stores V̂ in one of two layouts, behind the same methods:

    row     V̂_p ∈ R^{n/P × r}: this process's rows. V̂ᵀx is summed over processes (r elements).
    column  V̂^{(p)} ∈ R^{n × r/P}: this process's vectors. V̂c is summed over processes (n elements).

V̂ is finite, because a refresh rejects non-finite eigenvectors. If V̂ᵀg is not finite on some
process, no process takes a Newton step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.fosi.trust import (
    MomentumRule,
    NewtonStep,
    TrustState,
    bound_step,
    propose_step,
)
from second_order.lanczos.vector_space import row_bounds, row_counts

__all__ = ["Basis", "Subspace", "exchange_rows_for_vectors", "inverse_magnitudes"]


@dataclass(frozen=True)
class Basis:
    """The eigenvectors V̂, distributed over the processes.

    Attributes:
        vectors: This process's part of V̂ᵀ, ``(local vectors, local elements)``.
        count: r, the number of vectors on all processes.
        by_rows: Whether a process stores some rows of all vectors. False: all rows of some vectors.
        world: The processes.
        group_spans: The slice of the local elements that belongs to each parameter group.
    """

    vectors: Tensor
    count: int
    by_rows: bool
    world: World
    group_spans: Sequence[slice]

    @property
    def local_slice(self) -> slice:
        """The slice of the r vectors whose coefficients this process has."""
        if self.by_rows:
            return slice(0, self.count)
        bounds = row_bounds(self.count, self.world.size)
        return slice(bounds[self.world.rank], bounds[self.world.rank + 1])

    def coefficients(self, x: Tensor) -> Tensor:
        """Return V̂ᵀx for the vectors in ``local_slice``, from the local elements of x."""
        c = torch.mv(self.vectors, x)
        if self.by_rows and self.world.size > 1:
            self.world.all_reduce([c]).wait()
        return c

    def sum_over_vectors(self, sums: Tensor) -> Tensor:
        """Complete sums over the vectors in ``local_slice`` to sums over all, in place."""
        if not self.by_rows and self.world.size > 1:
            self.world.all_reduce([sums]).wait()
        return sums

    def add_combination(self, x: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """Add V̂c to the local elements of x, in place, and return x.

        ``coefficients`` has one c for all parameter groups, or one for each.
        """
        spans = self.group_spans if len(coefficients) > 1 else [slice(None)]
        if self.by_rows:
            for span, c in zip(spans, coefficients, strict=True):
                x[span].addmv_(self.vectors[:, span].t(), c)
            return x

        change = torch.zeros_like(x)
        for span, c in zip(spans, coefficients, strict=True):
            torch.mv(self.vectors[:, span].t(), c, out=change[span])
        if self.world.size > 1:
            self.world.all_reduce([change]).wait()
        return x.add_(change)

    def fraction_inside(self, c: Tensor, squared_norm: Tensor) -> Tensor:
        """Return ‖V̂ᵀx‖² / ‖x‖², the fraction of a vector that lies in the span, on the device.

        Args:
            c: V̂ᵀx for the vectors in ``local_slice``.
            squared_norm: The squared norm of the local elements of x.
        """
        sums = torch.stack([c.double().square().sum(), squared_norm])
        if self.world.size > 1:
            # Every process has all coefficients (by rows) or all elements of x, so one of the two
            # sums is complete before the all-reduce.
            complete = 0 if self.by_rows else 1
            sums[complete] /= self.world.size
            self.world.all_reduce([sums]).wait()
        return sums[0] / sums[1].clamp(min=torch.finfo(sums.dtype).tiny)

    def sum_of_vectors(self, rows: slice) -> Tensor:
        """Return the sum of all vectors, at the rows that this process has in Lanczos."""
        total = self.vectors.sum(0)
        if self.by_rows:
            return total
        self.world.all_reduce([total]).wait()
        return total[rows]


def exchange_rows_for_vectors(rows: Tensor, size: int, world: World) -> Tensor:
    """Exchange this process's rows of all r vectors for all n rows of its own vectors.

    A process sends about n r (P − 1)/P² elements.

    Args:
        rows: ``(r, rows of this process)``.
        size: n, the number of rows of all processes.
        world: The processes.

    Returns:
        ``(vectors of this process, n)``.
    """
    num_rows = row_counts(size, world.size)
    num_vectors = row_counts(len(rows), world.size)
    num_local = num_vectors[world.rank]

    messages = [part.reshape(-1) for part in rows.split(num_vectors)]
    received = world.all_to_all(messages, [num_local * count for count in num_rows])
    blocks = []
    for block, count in zip(received, num_rows, strict=True):
        blocks.append(block.view(num_local, count))
    return torch.cat(blocks, 1)


def inverse_magnitudes(values: Tensor, floor: float) -> Tensor:
    """Return ``1 / max(|û|, floor · max|û|)``, ``(r,)``.

    The floor bounds Newton steps along eigenvectors whose eigenvalue is near 0.
    """
    magnitudes = values.abs()
    largest = magnitudes.new_zeros(())
    if len(magnitudes):
        largest = magnitudes.max()
    inverses = 1.0 / torch.maximum(magnitudes, floor * largest)
    return torch.where(torch.isfinite(inverses), inverses, 0.0)


@dataclass
class Subspace:
    """The eigenpairs of the last refresh, and the momentum of the gradient in their span.

    The momentum of g₁ is a vector in R^n that outlasts refreshes. It is V̂ m + ``outside_decay`` ·
    ``outside_momentum``, where m is the momentum of :attr:`newton`, and the second part comes from
    earlier subspaces and is orthogonal to V̂.
    """

    basis: Basis  # V̂
    values: Tensor  # (r,) û, the largest first; float64 on the CPU
    residuals: Tensor  # (r,) of the eigenpairs; float64 on the CPU
    num_largest: int  # k, how many of the eigenvalues are the largest ones
    inverse_eigenvalues: Tensor  # |û|⁻¹ of the vectors in ``basis.local_slice``
    base_scale: float  # s, the factor on the base's step outside of the span
    newton: NewtonStep = field(init=False)  # the last Newton step
    outside_momentum: Tensor = field(init=False)  # at the local elements
    outside_decay: float = 1.0  # the product of β over the steps since the last refresh

    def __post_init__(self) -> None:
        zeros = torch.zeros_like(self.inverse_eigenvalues)
        trust = TrustState().to_tensor(zeros)
        self.newton = NewtonStep(
            step=zeros, gradient_change=zeros, momentum=zeros, full_step=zeros, trust=trust
        )
        self.outside_momentum = zeros.new_zeros(self.basis.vectors.shape[1])

    def split_gradient(
        self, gradient: Tensor, rule: MomentumRule, alpha: float | Tensor, *, bounded: bool
    ) -> Tensor:
        """Subtract g₁ = V̂V̂ᵀg from the gradient, in place, and make the Newton step from g₁.

        Args:
            gradient: The local elements of the mean gradient.
            rule: The rule of the momentum.
            alpha: The largest |α| of the groups.
            bounded: Whether the trust region bounds the step.

        Returns:
            V̂ᵀg for the vectors in ``basis.local_slice``.
        """
        on_cpu = self.inverse_eigenvalues.device.type == "cpu"
        if not on_cpu and not isinstance(alpha, Tensor):
            # torch.compile specializes on a Python number, and would compile again for each.
            alpha = self.inverse_eigenvalues.new_full((), alpha)

        # Make the Newton step.
        c = self.basis.coefficients(gradient)
        proposal = propose_step(c, self.newton, self.inverse_eigenvalues, rule)
        products = self.basis.sum_over_vectors(proposal.products)
        limit = rule.stability_limit if bounded else math.inf
        self.newton, last_is_rejected = bound_step(products, proposal, self.newton, alpha, limit)
        self.outside_decay *= rule.decay

        # Leave g₂ to the base. A gradient at the end of a rejected step is of no use.
        self.basis.add_combination(gradient, [self.newton.gradient_change])
        if last_is_rejected is not False:
            mask = torch.as_tensor(last_is_rejected, device=gradient.device)
            gradient.masked_fill_(mask, 0.0)
        return c

    def correct_step(
        self, params: Tensor, params_before: Tensor, alphas: Sequence[float | Tensor]
    ) -> None:
        """Replace w + d₂, the parameters after the base's step, by w + d₁ + s (d₂ − V̂V̂ᵀd₂).

        Args:
            params: The local elements of w + d₂. Changed in place.
            params_before: The local elements of w. Overwritten.
            alphas: α of each parameter group.
        """
        base_step = torch.sub(params, params_before, out=params_before)

        # One element that is not finite makes all coefficients so, and would reach all parameters.
        c = self.basis.coefficients(base_step)
        c = torch.nan_to_num(c, nan=0.0, posinf=0.0, neginf=0.0)
        if self.base_scale != 1.0:
            params.add_(base_step, alpha=self.base_scale - 1.0)
        steps = [-alpha * self.newton.step - self.base_scale * c for alpha in alphas]
        self.basis.add_combination(params, steps)

    def momentum_vector(self) -> Tensor:
        """Return the momentum in R^n, at the local elements."""
        outside = self.outside_momentum * self.outside_decay
        return self.basis.add_combination(outside, [self.newton.momentum])

    def inherit(self, momentum: Tensor | None, trust: Tensor) -> None:
        """Continue with the momentum in R^n and the trust state of the last subspace.

        The momentum is split into its part in the new span and the rest. None: no momentum.
        """
        self.newton = self.newton._replace(trust=trust)
        if momentum is not None:
            inside = self.basis.coefficients(momentum)
            self.newton = self.newton._replace(momentum=inside)
            self.outside_momentum = self.basis.add_combination(momentum, [-inside])

    def load(
        self,
        *,
        momentum: Tensor,
        full_step: Tensor,
        trust: Tensor,
        outside_momentum: Tensor,
        outside_decay: float,
    ) -> None:
        """Load the last step of a checkpoint. Momentum and step are ``(r,)``, of all vectors."""
        like = self.inverse_eigenvalues
        local = self.basis.local_slice
        self.newton = self.newton._replace(
            momentum=momentum[local].to(like),
            full_step=full_step[local].to(like),
            trust=trust.to(like),
        )
        self.outside_momentum = outside_momentum.to(like)
        self.outside_decay = outside_decay
