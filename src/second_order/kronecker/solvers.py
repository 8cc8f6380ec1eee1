"""Damped inverses of Kronecker factors: from eigendecompositions, or from Cholesky inverses."""

from __future__ import annotations

import math
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
    unpack_upper_triangular,
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
    "ThreeWayEigenInverse",
    "ThreeWayInverse",
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
class ThreeWayEigenInverse:
    """The eigen solve with A ⊗ L ⊗ G + γ I, where an input is channels by locations.

    Attributes:
        q_a: Eigenvectors of A, ``(channels, channels)``.
        q_l: Eigenvectors of L, ``(locations, locations)``.
        q_g: Eigenvectors of G, ``(out, out)``.
        scale: 1 / (v_G v_A v_L + γ), ``(out, channels, locations)``.
    """

    q_a: Tensor
    q_l: Tensor
    q_g: Tensor
    scale: Tensor

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply to a gradient of shape ``(1, out, channels · locations)``."""
        rotated = (self.q_g.mT @ gradient[0]).view(self.scale.shape)
        rotated = (self.q_a.mT @ rotated @ self.q_l).mul_(self.scale)
        return (self.q_g @ (self.q_a @ rotated @ self.q_l.mT).flatten(1)).view_as(gradient)

    @property
    def nbytes(self) -> int:
        """Bytes this inverse holds."""
        return self.q_a.nbytes + self.q_l.nbytes + self.q_g.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class ThreeWayInverse:
    """The three damped inverses on the three axes of the gradient (Ba et al. 2017, eq. 9).

    Attributes:
        a_inverse: ``(channels, channels)``.
        l_inverse: ``(locations, locations)``.
        g_inverse: ``(1, out, out)``, or triangles.
    """

    a_inverse: Tensor
    l_inverse: Tensor
    g_inverse: Tensor

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply to a gradient of shape ``(1, out, channels · locations)``."""
        if self.g_inverse.dim() == 2:
            half = packed_times(self.g_inverse, gradient)
        else:
            half = self.g_inverse @ gradient
        half = half.view(-1, len(self.a_inverse), len(self.l_inverse))
        return (self.a_inverse @ half @ self.l_inverse).view_as(gradient)

    @property
    def nbytes(self) -> int:
        """Bytes this inverse holds."""
        return self.a_inverse.nbytes + self.l_inverse.nbytes + self.g_inverse.nbytes


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

    def dampings(
        self, means: Tensor, damping: Damping, exact: bool = False
    ) -> tuple[Tensor | None, ...]:
        """What goes on the diagonals of the factors before they are decomposed.

        Args:
            means: Mean eigenvalues of A and of G, ``(2, groups)``, or of A, G and L.
            damping: γ.
            exact: Whether G is the whole curvature.

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

    def combine(
        self,
        a: Decomposition,
        g: Decomposition,
        damping: Damping,
        locations: Decomposition | None = None,
    ) -> Inverse:
        """The layer's inverse from the decompositions of its two factors, or three."""


class EigenSolver:
    """Eigendecomposition of the factors; damping enters when the two meet."""

    def dampings(
        self, means: Tensor, damping: Damping, exact: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Nothing yet."""
        return (None,) * len(means)

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

    def combine(
        self,
        a: Decomposition,
        g: Decomposition,
        damping: Damping,
        locations: Decomposition | None = None,
    ) -> Inverse:
        """Form 1 / (v_G v_Aᵀ + γ) once, for all steps until the next refresh."""
        q_a, v_a = (None, a[0]) if len(a) == 1 else a
        q_g, v_g = g
        if locations is not None and q_a is not None:
            q_l, v_l = locations
            channels = v_a[0].unsqueeze(-1) * v_l[0]
            scale = _reciprocal(v_g[0, :, None, None] * channels, damping)
            q_a, q_l, q_g = (_owned(q[0], q.dtype) for q in (q_a, q_l, q_g))
            return ThreeWayEigenInverse(q_a, q_l, q_g, scale)
        curvature = v_g.unsqueeze(-1) * v_a.unsqueeze(-2)
        scale = _reciprocal(curvature, damping)
        owned = None if q_a is None else _owned(q_a, q_a.dtype)
        return EigenInverse(owned, _owned(q_g, q_g.dtype), scale)


def _reciprocal(curvature: Tensor, damping: Damping) -> Tensor:
    """1 / (curvature + γ), in place."""
    # Without damping the gradient has no part where the curvature is 0: the pseudo-inverse.
    return curvature.add_(damping).reciprocal_().nan_to_num_(nan=torch.nan, posinf=0.0)


class InverseSolver:
    """Cholesky inverses of the damped factors."""

    def dampings(
        self, means: Tensor, damping: Damping, exact: bool = False
    ) -> tuple[Tensor | None, ...]:
        """π √γ and √γ/π, or πᵢ γ^(1/3); on an exact block γ itself."""
        if exact:
            return None, torch.zeros_like(means[1]) + damping
        return factored_damping(*means.unbind(), damping=damping)

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

    def combine(
        self,
        a: Decomposition,
        g: Decomposition,
        damping: Damping,
        locations: Decomposition | None = None,
    ) -> Inverse:
        """Nothing is left to do."""
        if locations is not None:
            a_inverse, l_inverse = self._whole(a[0]), self._whole(locations[0])
            return ThreeWayInverse(a_inverse, l_inverse, _owned(g[0], g[0].dtype))
        return FactoredInverse(_owned(a[0], a[0].dtype), _owned(g[0], g[0].dtype))

    @staticmethod
    def _whole(inverse: Tensor) -> Tensor:
        """The matrix of an inverse of one group, be it a triangle or not."""
        if inverse.dim() == 3:
            return _owned(inverse[0], inverse.dtype)
        dim = (math.isqrt(8 * inverse.shape[-1] + 1) - 1) // 2
        return unpack_upper_triangular(inverse, dim)[0]


SOLVERS: dict[str, Solver] = {"eigen": EigenSolver(), "inverse": InverseSolver()}
