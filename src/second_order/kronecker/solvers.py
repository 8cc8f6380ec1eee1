"""Damped inverses of Kronecker factors: from eigendecompositions, or from Cholesky inverses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.decompositions import (
    Decomposition,
    Problem,
    cholesky_inverse,
    decompose_batched,
    eigh,
)
from second_order.kronecker.triangles import (
    pack_upper_triangular,
    packed_length,
    packed_times,
    times_packed,
)

__all__ = [
    "SOLVERS",
    "Damping",
    "EigenInverse",
    "EigenSolver",
    "FactoredInverse",
    "Inverse",
    "InverseSolver",
    "Solver",
    "SolverName",
    "factored_damping",
]

# Smaller inverses stay whole: unpacking them at every step takes longer than multiplying does.
TRIANGULAR_FROM = 1024

SolverName: TypeAlias = Literal["eigen", "inverse"]
Damping: TypeAlias = float | Tensor


class Inverse(Protocol):
    """A damped inverse of one layer's curvature block, ready to be applied."""

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply to a gradient of shape ``(groups, out, in)``."""

    @property
    def nbytes(self) -> int:
        """Bytes this inverse holds."""


@dataclass(frozen=True)
class EigenInverse:
    """P = Q_G ((Q_Gᵀ ∇ Q_A) / (v_G v_Aᵀ + γ)) Q_Aᵀ (Pauloski et al. 2022, eq. 13-15).

    Equal to the dense solve with A ⊗ G + γ I.

    Attributes:
        q_a: Eigenvectors of A, ``(groups, in, in)``, one a column; None if A is diagonal.
        q_g: Eigenvectors of G, ``(groups, out, out)``.
        scale: 1 / (v_G v_Aᵀ + γ), ``(groups, out, in)``.
    """

    q_a: Tensor | None
    q_g: Tensor
    scale: Tensor

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply to a gradient of shape ``(groups, out, in)``."""
        rotated = self.q_g.mT @ gradient
        if self.q_a is None:
            return self.q_g @ rotated.mul_(self.scale)
        return self.q_g @ (rotated @ self.q_a).mul_(self.scale) @ self.q_a.mT

    @property
    def nbytes(self) -> int:
        """Bytes this inverse holds."""
        vectors = 0 if self.q_a is None else self.q_a.nbytes
        return vectors + self.q_g.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class FactoredInverse:
    """P = (G + √γ/π I)⁻¹ ∇ (A + π √γ I)⁻¹ (Martens & Grosse 2015, section 6.3).

    Attributes:
        a_inverse: ``(groups, in, in)``; as triangles ``(groups, in (in + 1) / 2)``; or
            ``(groups, in)`` if A is diagonal.
        g_inverse: ``(groups, out, out)`` or triangles.
    """

    a_inverse: Tensor
    g_inverse: Tensor

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply to a gradient of shape ``(groups, out, in)``."""
        if self.g_inverse.dim() == 2:
            half = packed_times(self.g_inverse, gradient)
        else:
            half = self.g_inverse @ gradient
        if self.a_inverse.shape[-1] == half.shape[-1] and self.a_inverse.dim() == 2:
            return half.mul_(self.a_inverse.unsqueeze(-2))
        if self.a_inverse.dim() == 2:
            return times_packed(half, self.a_inverse)
        return half @ self.a_inverse

    @property
    def nbytes(self) -> int:
        """Bytes this inverse holds."""
        return self.a_inverse.nbytes + self.g_inverse.nbytes


def factored_damping(*means: Tensor, damping: Damping) -> tuple[Tensor, ...]:
    """Split γ over N Kronecker factors: factor i gets πᵢ γ^(1/N).

    With nᵢ = tr Fᵢ / dim Fᵢ, πᵢ = nᵢ / (Π n)^(1/N). These πᵢ, whose product is 1, minimise the
    bound on the error that the cross terms make (Ba et al. 2017, section 4.1). Two factors have
    π √γ and √γ / π, π² = (tr A / dim A) / (tr G / dim G) (Martens & Grosse 2015, section 6.3). A
    zero trace gives πᵢ = 1.

    Args:
        *means: nᵢ of each factor, ``(groups,)``.
        damping: γ, a number or a scalar.

    Returns:
        What is added to the diagonal of each factor, of shape ``(groups,)``.
    """
    stacked = torch.stack(means)
    usable = (stacked > 0).all(0)
    logarithms = torch.where(usable, stacked, 1.0).log()  # of a product that may overflow
    pi = (logarithms - logarithms.mean(0)).exp()
    return tuple((pi * damping ** (1 / len(means))).unbind())


def _owned(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, without the rest of the batch or message that it is a view of."""
    part = part.to(dtype).contiguous()
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part


class Solver(Protocol):
    """How factors become something that preconditions."""

    def dampings(self, means: Tensor, damping: Damping) -> tuple[Tensor | None, Tensor | None]:
        """What goes on the diagonals of A and of G before they are decomposed.

        Args:
            means: Mean eigenvalues of A and of G, ``(2, groups)``.
            damping: γ.

        Returns:
            Each ``(groups,)``, or None for nothing.
        """

    def decompose(
        self, problems: Sequence[Problem], dtype: torch.dtype, triangular: bool
    ) -> list[Decomposition | None]:
        """Decompose factors; None for those that cannot be.

        Args:
            problems: The damped factors.
            dtype: Decompositions are kept and sent in it.
            triangular: Large symmetric ones are kept and sent as triangles.
        """

    def kept_shapes(
        self, groups: int, dim: int, is_diagonal: bool, triangular: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts that :meth:`decompose` gives for a factor."""

    def combine(self, a: Decomposition, g: Decomposition, damping: Damping) -> Inverse:
        """The layer's inverse from the decompositions of its two factors."""


class EigenSolver:
    """Eigendecomposition of the factors; damping enters when the two meet."""

    def dampings(self, means: Tensor, damping: Damping) -> tuple[Tensor | None, Tensor | None]:
        """Nothing yet."""
        return None, None

    def decompose(
        self, problems: Sequence[Problem], dtype: torch.dtype, triangular: bool
    ) -> list[Decomposition | None]:
        """``(eigenvectors, eigenvalues)`` each, or ``(eigenvalues,)`` of a diagonal factor."""

        def keep(parts: Decomposition) -> Decomposition:
            return tuple(_owned(part, dtype) for part in parts)

        return decompose_batched(problems, eigh, lambda entries: (entries.clamp_min(0),), keep)

    def kept_shapes(
        self, groups: int, dim: int, is_diagonal: bool, triangular: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Eigenvectors and eigenvalues."""
        return ((groups, dim),) if is_diagonal else ((groups, dim, dim), (groups, dim))

    def combine(self, a: Decomposition, g: Decomposition, damping: Damping) -> EigenInverse:
        """Form 1 / (v_G v_Aᵀ + γ) once, for all steps until the next refresh."""
        q_a, v_a = (None, a[0]) if len(a) == 1 else a
        q_g, v_g = g
        curvature = (v_g.unsqueeze(-1) * v_a.unsqueeze(-2)).add_(damping)
        # Without damping the gradient has no part where the curvature is 0: the pseudo-inverse.
        scale = curvature.reciprocal_().nan_to_num_(nan=torch.nan, posinf=0.0)
        owned = None if q_a is None else _owned(q_a, q_a.dtype)
        return EigenInverse(owned, _owned(q_g, q_g.dtype), scale)


class InverseSolver:
    """Cholesky inverses of the two damped factors."""

    def dampings(self, means: Tensor, damping: Damping) -> tuple[Tensor | None, Tensor | None]:
        """π √γ and √γ/π."""
        on_a, on_g = factored_damping(*means.unbind(), damping=damping)
        return on_a, on_g

    def decompose(
        self, problems: Sequence[Problem], dtype: torch.dtype, triangular: bool
    ) -> list[Decomposition | None]:
        """``(inverse,)`` each."""

        def keep(parts: Decomposition) -> Decomposition:
            (inverse,) = parts
            packed = triangular and inverse.dim() == 3 and inverse.shape[-1] >= TRIANGULAR_FROM
            return (_owned(pack_upper_triangular(inverse) if packed else inverse, dtype),)

        return decompose_batched(
            problems, cholesky_inverse, lambda entries: (entries.reciprocal(),), keep
        )

    def kept_shapes(
        self, groups: int, dim: int, is_diagonal: bool, triangular: bool
    ) -> tuple[tuple[int, ...], ...]:
        """The inverse."""
        if is_diagonal:
            return ((groups, dim),)
        if triangular and dim >= TRIANGULAR_FROM:
            return ((groups, packed_length(dim)),)
        return ((groups, dim, dim),)

    def combine(self, a: Decomposition, g: Decomposition, damping: Damping) -> FactoredInverse:
        """Nothing is left to do."""
        return FactoredInverse(_owned(a[0], a[0].dtype), _owned(g[0], g[0].dtype))


SOLVERS: dict[str, Solver] = {"eigen": EigenSolver(), "inverse": InverseSolver()}
