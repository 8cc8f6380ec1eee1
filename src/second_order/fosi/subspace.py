"""The span of some eigenvectors V̂, and the Newton step in it (FOSI; DHO2, algorithm 3).

    c = V̂ᵀg,  mom <- β mom + gain · c,  step coefficients −α |û|⁻¹ mom

A basis keeps V̂ in one of two layouts, behind the same methods:

    row     V̂_p ∈ R^{n/P × r}: this process's rows. V̂ᵀx is summed over processes (r elements).
    column  V̂^{(p)} ∈ R^{n × r/P}: this process's vectors. V̂c is summed over processes (n elements).

V̂ is finite, because Lanczos refuses numbers that are not. If V̂ᵀg is not, on any process, the Newton
step is left out on all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.fosi.trust import MomentumRule, NewtonStep, TrustState, propose, settle
from second_order.lanczos.vector_space import row_bounds

__all__ = ["Basis", "Subspace", "newton_rates"]


@dataclass(frozen=True)
class Basis:
    """V̂, wherever its parts are.

    Attributes:
        vectors: The part of V̂ᵀ here, ``(vectors here, elements here)``.
        count: r, the number of all vectors.
        by_rows: Whether each process has some rows of all vectors; otherwise, all rows of some.
        world: The processes.
        group_spans: The slice of the elements here that each group of parameters has.
    """

    vectors: Tensor
    count: int
    by_rows: bool
    world: World
    group_spans: Sequence[slice]

    @property
    def mine(self) -> slice:
        """The slice of the r vectors whose coefficients are here."""
        if self.by_rows:
            return slice(0, self.count)
        return slice(*row_bounds(self.count, self.world.size)[self.world.rank :][:2])

    def coefficients(self, x: Tensor) -> Tensor:
        """V̂ᵀx of the vectors that are ``mine``, for this process's elements of x."""
        c = torch.mv(self.vectors, x)
        if self.by_rows and self.world.size > 1:
            self.world.all_reduce([c]).wait()
        return c

    def total(self, sums: Tensor) -> Tensor:
        """A sum over all vectors, from that over the vectors that are ``mine``; in place."""
        if not self.by_rows and self.world.size > 1:
            self.world.all_reduce([sums]).wait()
        return sums

    def add(self, x: Tensor, c: Sequence[Tensor]) -> Tensor:
        """Add V̂c to this process's elements of x, in place; one c for all groups, or for each."""
        spans = self.group_spans if len(c) > 1 else [slice(None)]
        if self.by_rows:
            for span, each in zip(spans, c, strict=True):
                x[span].addmv_(self.vectors[:, span].t(), each)
            return x
        change = torch.zeros_like(x)
        for span, each in zip(spans, c, strict=True):
            torch.mv(self.vectors[:, span].t(), each, out=change[span])
        if self.world.size > 1:
            self.world.all_reduce([change]).wait()
        return x.add_(change)

    def share_inside(self, c: Tensor, square: Tensor) -> Tensor:
        """The share of a vector in the span, ‖V̂ᵀx‖² / ‖x‖², on the device.

        From the coefficients that are here, and the squared norm of the elements that are. Every
        process has all coefficients if rows of V̂ are spread, and all elements otherwise.
        """
        sums = torch.stack([c.double().square().sum(), square])
        if self.world.size > 1:
            sums[0 if self.by_rows else 1] /= self.world.size
            self.world.all_reduce([sums]).wait()
        return sums[0] / sums[1].clamp(min=torch.finfo(sums.dtype).tiny)

    def rows_of_sum(self, rows: slice) -> Tensor:
        """The sum of all vectors, at the rows that this process has of a vector in Lanczos."""
        total = self.vectors.sum(0)
        if self.by_rows:
            return total
        self.world.all_reduce([total]).wait()
        return total[rows]


def whole_vectors(rows: Tensor, size: int, world: World) -> Tensor:
    """This process's whole vectors, from all processes' rows ``(r, rows)`` of all vectors.

    A process sends about n r (P − 1)/P² elements.
    """
    bounds = row_bounds(size, world.size)
    cuts = row_bounds(len(rows), world.size)
    mine = cuts[world.rank + 1] - cuts[world.rank]
    widths = [stop - start for start, stop in pairwise(bounds)]
    parts = rows.split([stop - start for start, stop in pairwise(cuts)])
    received = world.all_to_all([part.reshape(-1) for part in parts], [mine * n for n in widths])
    return torch.cat([part.view(mine, n) for part, n in zip(received, widths, strict=True)], 1)


def newton_rates(values: Tensor, floor: float) -> Tensor:
    """``1 / max(|û|, floor · max|û|)``, ``(r,)``: eigenvalues near 0 would give endless steps."""
    sizes = values.abs()
    largest = sizes.max() if len(sizes) else sizes.new_zeros(())
    rates = 1.0 / torch.maximum(sizes, floor * largest)
    return torch.where(torch.isfinite(rates), rates, 0.0)


@dataclass
class Subspace:
    """The eigenpairs of the last refresh, and the momentum of the gradient in their span.

    The momentum of g₁ lives in R^n and outlasts refreshes: it is V̂ ``momentum`` + ``decayed`` ·
    ``carried``, the second part, of earlier subspaces, being orthogonal to V̂.
    """

    basis: Basis  # V̂, in one of the two layouts
    values: Tensor  # (r,) û, the largest first; float64 on the CPU
    residuals: Tensor  # (r,), alike
    num_largest: int  # k, number of the largest eigenpairs
    rates: Tensor  # (r_p,) Newton's steps in the vectors that are ``basis.mine``
    rest_scale: float  # s, by which the base's step is stretched
    newton: NewtonStep = field(init=False)  # the last Newton step
    carried: Tensor = field(init=False)  # at the elements here
    decayed: float = 1.0  # the factor of ``carried`` that is left

    def __post_init__(self) -> None:
        zeros = torch.zeros_like(self.rates)
        trust = TrustState().packed(self.rates)
        self.newton = NewtonStep(zeros, zeros, momentum=zeros, last=zeros, trust=trust)
        self.carried = self.rates.new_zeros(self.basis.vectors.shape[1])

    def split(
        self, gradient: Tensor, rule: MomentumRule, alpha: float | Tensor, *, bounded: bool
    ) -> Tensor:
        """Take g₁ = V̂V̂ᵀg out of the gradient, in place, and make the Newton step of it.

        Args:
            gradient: This process's elements of the mean gradient.
            rule: How the momentum takes in V̂ᵀg.
            alpha: The largest |α| of the groups.
            bounded: Whether the trust region bounds the step.

        Returns:
            V̂ᵀg.
        """
        if self.rates.device.type != "cpu" and not isinstance(alpha, Tensor):
            alpha = self.rates.new_full((), alpha)  # every other number would compile again
        c = self.basis.coefficients(gradient)
        proposal = propose(c, self.newton, self.rates, rule)
        terms = self.basis.total(proposal.terms)
        limit = rule.stability_limit if bounded else math.inf
        self.newton, undo = settle(terms, proposal, self.newton, alpha, limit)
        self.basis.add(gradient, [self.newton.taken_out])
        if undo is not False:  # the gradient is that of where the last step has led to
            gradient.masked_fill_(torch.as_tensor(undo, device=gradient.device), 0.0)
        self.decayed *= rule.decay
        return c

    def correct(self, values: Tensor, before: Tensor, scales: Sequence[float | Tensor]) -> None:
        """Set the parameters after the base's step d₂ to w + d₁ + s (d₂ − V̂V̂ᵀd₂), in place.

        α of each group is in ``scales``. ``before`` has the parameters w before the base's step,
        and is overwritten.
        """
        moved = torch.sub(values, before, out=before)
        c = self.basis.coefficients(moved)
        if self.rest_scale != 1.0:
            values.add_(moved, alpha=self.rest_scale - 1.0)
        steps = [-scale * self.newton.step - self.rest_scale * c for scale in scales]
        self.basis.add(values, steps)

    def momentum_vector(self) -> Tensor:
        """The momentum in R^n, at this process's elements."""
        return self.basis.add(self.carried * self.decayed, [self.newton.momentum])

    def carry(self, vector: Tensor | None, trust: Tensor) -> None:
        """Take over a trust region, and a momentum in R^n: its part in V̂, and the rest."""
        self.newton = self.newton._replace(trust=trust)
        if vector is not None:
            momentum = self.basis.coefficients(vector)
            self.newton = self.newton._replace(momentum=momentum)
            self.carried = self.basis.add(vector, [-momentum])

    def resume(
        self, momentum: Tensor, last: Tensor, trust: Tensor, carried: Tensor, decayed: float
    ) -> None:
        """Take over a checkpoint's last step; momentum and step are ``(r,)``, of all vectors."""
        mine = self.basis.mine
        self.newton = self.newton._replace(
            momentum=momentum[mine].to(self.rates),
            last=last[mine].to(self.rates),
            trust=trust.to(self.rates),
        )
        self.carried = carried.to(self.rates)
        self.decayed = decayed
