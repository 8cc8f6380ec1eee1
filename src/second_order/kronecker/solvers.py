"""Damped inverses of Kronecker factors: from eigendecompositions, or from Cholesky inverses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.decompositions import (
    Attempts,
    Decomposition,
    Problem,
    cholesky_inverse,
    eigh,
)
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.triangles import (
    pack_upper_triangular,
    packed_length,
    times_packed,
    unpack_upper_triangular,
)

__all__ = [
    "INVERSE_ENTRIES",
    "SOLVERS",
    "Damping",
    "EigenInverse",
    "EigenSolver",
    "FactoredInverse",
    "Inverse",
    "InverseSolver",
    "SolverName",
    "condition_estimate",
    "fitting_entry",
    "round_definite",
    "round_to",
]

# Smaller inverses stay whole: unpacking them at every step takes longer than multiplying does.
TRIANGULAR_FROM = 1024

POWER_ITERATIONS = 12  # within some per cent where the spectrum decays

EIGEN_SCALE = "eigen_scale"
INVERSE_ENTRIES = (
    *(f"eigenvectors_{letter}" for letter in "AGL"),
    EIGEN_SCALE,
    *(f"inverse_{letter}" for letter in "AGL"),
)
"""The names of an inverse's tensors in a checkpoint, of either solver."""

# Largest deviation of a saved inverse from symmetry, or of a saved eigenvector's length from 1,
# relative to the largest entry. Rounding to bfloat16 stays within 1e-2.
SAVED_TOLERANCE = 5e-2

SolverName: TypeAlias = Literal["eigen", "inverse"]
Damping: TypeAlias = float | Tensor


@dataclass(frozen=True)
class EigenInverse:
    """P = Q_G ((Q_Gᵀ ∇ Q) ∘ 1 / (v_G vᵀ + γ)) Qᵀ (Pauloski et al. 2022, eq. 13-15).

    Q and v are those of A, or of A ⊗ L where an input is channels by locations. Equal to the dense
    solve with A ⊗ G + γ I, or A ⊗ L ⊗ G + γ I.
    """

    vectors: dict[str, Tensor]  # by letter, (groups, n, n), as columns; none for a diagonal A
    scale: Tensor  # 1 / (v_G vᵀ + γ), (groups, out, in) or (1, out, channels, locations)

    def precondition(self, gradient: Tensor) -> Tensor:
        """The inverse applied to a gradient of shape ``(groups, out, in)``."""
        q_a, q_g, q_l = self.vectors.get("A"), self.vectors["G"], self.vectors.get("L")
        rotated = torch.bmm(q_g.mT, gradient)  # matmul takes some 2 µs more, to find out as much
        if q_l is not None:
            assert q_a is not None
            rotated = q_a[0].mT @ rotated.view(self.scale.shape) @ q_l[0]
            rotated = q_a[0] @ rotated.mul_(self.scale) @ q_l[0].mT
            return q_g @ rotated.view_as(gradient)
        if q_a is None:
            return torch.bmm(q_g, rotated.mul_(self.scale))
        other = torch.bmm(rotated, q_a).mul_(self.scale)  # two places do for four products
        return torch.bmm(torch.bmm(q_g, other, out=rotated), q_a.mT, out=other)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that this inverse holds."""
        return [*self.vectors.values(), self.scale]

    def of(self, tensors: Sequence[Tensor]) -> EigenInverse:
        """An inverse of other tensors, in the order of :attr:`tensors`."""
        return EigenInverse(dict(zip(self.vectors, tensors, strict=False)), tensors[-1])

    @property
    def entries(self) -> dict[str, Tensor]:
        """The tensors by their names in a checkpoint."""
        named = {f"eigenvectors_{letter}": vectors for letter, vectors in self.vectors.items()}
        return {**named, EIGEN_SCALE: self.scale}


@dataclass(frozen=True)
class FactoredInverse:
    """P = (G + √γ/π I)⁻¹ ∇ (A + π √γ I)⁻¹ (Martens & Grosse 2015, section 6.3).

    With L, the inverse on the inputs is that of A ⊗ L, each damped apart (Ba et al. 2017, eq. 9).
    """

    # By letter, (groups, n, n); triangles (groups, n (n + 1) / 2), but not beside an L; or
    # (groups, in) if A is diagonal.
    inverses: dict[str, Tensor]

    def precondition(self, gradient: Tensor) -> Tensor:
        """The inverse applied to a gradient of shape ``(groups, out, in)``."""
        a, g, locations = self.inverses["A"], self.inverses["G"], self.inverses.get("L")
        half = times_packed(gradient.mT, g).mT if g.dim() == 2 else torch.bmm(g, gradient)
        if locations is not None:
            maps = half.reshape(-1, a.shape[-1], locations.shape[-1])
            return (a[0] @ maps @ locations[0]).view_as(gradient)
        if a.dim() == 3:
            return torch.bmm(half, a)
        if a.shape[-1] == half.shape[-1]:
            return half.mul_(a.unsqueeze(-2))
        return times_packed(half, a)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that this inverse holds."""
        return list(self.inverses.values())

    def of(self, tensors: Sequence[Tensor]) -> FactoredInverse:
        """An inverse of other tensors, in the order of :attr:`tensors`."""
        return FactoredInverse(dict(zip(self.inverses, tensors, strict=True)))

    @property
    def entries(self) -> dict[str, Tensor]:
        """The tensors by their names in a checkpoint."""
        return {f"inverse_{letter}": inverse for letter, inverse in self.inverses.items()}


Inverse: TypeAlias = EigenInverse | FactoredInverse


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round each number to one that a narrower dtype has; the result has the dtype of ``x``."""
    return x.to(dtype).to(x.dtype)


def round_definite(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Round symmetric matrices ``(groups, n, n)`` to ones that are at least as large, M̂ ⪰ M.

    Numbers off the diagonal are rounded to the nearest, which changes M by E. The diagonal grows by
    Σ_j |E_ij|, and is rounded up: M̂ - M is then diagonally dominant, and so without negative
    eigenvalues (Golub & Van Loan 2013, section 4.1.1).
    """
    rounded = round_to(matrix, dtype)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    error = (rounded - matrix).abs_()
    error.diagonal(dim1=-2, dim2=-1).zero_()
    raised = diagonal + error.sum(-1)
    narrow = raised.to(dtype)
    infinity = torch.full_like(narrow, torch.inf)
    above = torch.where(narrow.to(raised.dtype) < raised, narrow.nextafter(infinity), narrow)
    rounded.diagonal(dim1=-2, dim2=-1).copy_(above)
    return rounded


class EigenSolver:
    """Eigendecomposition of the factors; damping enters when the two meet.

    dampings      what each factor's diagonal gets before it is decomposed, ``(..., groups)`` or
                  None, of the mean eigenvalues of A, G, and L if there is one, ``(2 or 3, ...,
                  groups)``; ``exact`` if G is the whole curvature
    decompose     attempts at the parts of each damped factor, in the dtype in which they are kept
                  and sent; large symmetric ones may go as triangles
    kept_shapes   the shapes of these parts
    rounded       the parts with numbers that a narrower dtype has, of which ``combine`` still makes
                  a positive definite inverse
    combine       the inverse of a layer, or of a stack of equal ones; γ, and what the inverse is
                  multiplied by, are scalars or ``(layers x groups,)``; parts' memory is shared
    saved_shapes  the shapes of an inverse's tensors, by their names in a checkpoint
    from_saved    the inverse of a checkpoint's tensors
    flaw          why a tensor of a checkpoint is no part of an inverse; "" if it can be one
    """

    def dampings(
        self, means: Tensor, damping: Damping, exact: bool = False
    ) -> Sequence[Tensor | None]:
        """None for each factor: γ is added to the products of eigenvalues, in :meth:`combine`."""
        return (None,) * len(means)

    def decompose(
        self, problems: Sequence[Problem], dtype: torch.dtype, triangular: bool
    ) -> Attempts:
        """Decompose into ``(eigenvectors, eigenvalues)``, a diagonal into ``(eigenvalues,)``."""

        def attempt(matrix: Tensor) -> tuple[Decomposition, Tensor]:
            parts, errors = eigh(matrix)
            return tuple(part.to(dtype).contiguous() for part in parts), errors

        return Attempts(problems, attempt)

    def kept_shapes(
        self, groups: int, dim: int, is_diagonal: bool, triangular: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Shapes of the eigenvectors, if any, and of the eigenvalues."""
        return ((groups, dim),) if is_diagonal else ((groups, dim, dim), (groups, dim))

    def rounded(self, parts: Decomposition, is_diagonal: bool, dtype: torch.dtype) -> Decomposition:
        """Round eigenvectors and eigenvalues to the nearest: Q Λ Qᵀ has no sign to lose."""
        return tuple(round_to(part, dtype) for part in parts)

    def combine(
        self, parts: Mapping[str, Decomposition], damping: Damping, times: Tensor | None = None
    ) -> Inverse:
        """Form 1 / (v_G vᵀ + γ) once, for all steps until the next refresh."""
        curvature = parts["A"][-1].unsqueeze(-2)
        if "L" in parts:
            curvature = curvature.unsqueeze(-1) * parts["L"][-1].unsqueeze(-2).unsqueeze(-2)
        g = parts["G"][-1]
        ones = [1] * (curvature.dim() - 2)
        added = damping.view(-1, 1, *ones) if isinstance(damping, Tensor) else damping
        # Without damping the gradient has no part where the curvature is 0: the pseudo-inverse.
        scale = (g.view(*g.shape, *ones) * curvature).add_(added).reciprocal_()
        scale.nan_to_num_(nan=torch.nan, posinf=0.0)
        if times is not None:
            scale.mul_(times.view(-1, 1, *ones))
        return EigenInverse({k: v[0] for k, v in parts.items() if len(v) == 2}, scale)

    def saved_shapes(self, shape: FactorShape, triangular: bool) -> dict[str, tuple[int, ...]]:
        """The shapes of the eigenvectors, and of 1 / (v_G vᵀ + γ)."""
        found: dict[str, tuple[int, ...]] = {}
        for letter in shape.letters:
            if letter not in shape.diagonals:
                dim = shape.dims[letter]
                found[f"eigenvectors_{letter}"] = shape.groups, dim, dim
        columns = (shape.dims["A"], shape.locations) if shape.locations else (shape.dims["A"],)
        found[EIGEN_SCALE] = shape.groups, shape.dims["G"], *columns
        return found

    def from_saved(self, entries: Mapping[str, Tensor], shape: FactorShape) -> Inverse:
        """The inverse whose ``entries`` these are."""
        vectors: dict[str, Tensor] = {}
        for letter in shape.letters:
            if letter not in shape.diagonals:
                vectors[letter] = entries[f"eigenvectors_{letter}"]
        return EigenInverse(vectors, entries[EIGEN_SCALE])

    def flaw(self, name: str, saved: Tensor, shape: FactorShape) -> str:
        """The reason why these cannot be unit eigenvectors and positive scales; "" if they can."""
        if name == EIGEN_SCALE:
            return "has negative numbers" if bool((saved < 0).any()) else ""
        lengths = torch.linalg.vector_norm(saved.float(), dim=-2)
        far = (lengths - 1.0).abs().amax() > SAVED_TOLERANCE
        return "has columns that are not of length 1" if bool(far) else ""


class InverseSolver:
    """Cholesky inverses of the damped factors; its methods are those of :class:`EigenSolver`."""

    def dampings(
        self, means: Tensor, damping: Damping, exact: bool = False
    ) -> Sequence[Tensor | None]:
        """Split γ over N factors: factor i gets πᵢ γ^(1/N); γ itself for an exact block.

        With nᵢ = tr Fᵢ / dim Fᵢ, the ``means``, πᵢ = nᵢ / (Π n)^(1/N); a zero trace gives πᵢ = 1.
        These πᵢ, whose product is 1, minimise the bound on the error that the cross terms make (Ba
        et al. 2017, section 4.1). Two factors have π √γ and √γ / π, π² = (tr A / dim A) / (tr G /
        dim G) (Martens & Grosse 2015, section 6.3).
        """
        if exact:
            return None, torch.zeros_like(means[1]) + damping
        usable = (means > 0).all(0)
        logarithms = torch.where(usable, means, 1.0).log()  # logarithms: the product may overflow
        pi = (logarithms - logarithms.mean(0)).exp()
        return (pi * damping ** (1 / len(means))).unbind()

    def decompose(
        self, problems: Sequence[Problem], dtype: torch.dtype, triangular: bool
    ) -> Attempts:
        """Decompose each factor into ``(inverse,)``."""

        def attempt(matrix: Tensor) -> tuple[Decomposition, Tensor]:
            (inverse,), errors = cholesky_inverse(matrix)
            packed = triangular and inverse.dim() == 3 and inverse.shape[-1] >= TRIANGULAR_FROM
            inverse = pack_upper_triangular(inverse) if packed else inverse
            return (inverse.to(dtype).contiguous(),), errors

        return Attempts(problems, attempt)

    def kept_shapes(
        self, groups: int, dim: int, is_diagonal: bool, triangular: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Shape of the inverse, alone in a tuple."""
        if is_diagonal:
            return ((groups, dim),)
        if triangular and dim >= TRIANGULAR_FROM:
            return ((groups, packed_length(dim)),)
        return ((groups, dim, dim),)

    def rounded(self, parts: Decomposition, is_diagonal: bool, dtype: torch.dtype) -> Decomposition:
        """Round an inverse to the nearest, and its diagonal so far up that it stays definite."""
        (inverse,) = parts
        if is_diagonal:
            return (round_to(inverse, dtype),)
        rounded = round_definite(_whole(inverse), dtype)
        return (rounded if inverse.dim() == 3 else pack_upper_triangular(rounded),)

    def combine(
        self, parts: Mapping[str, Decomposition], damping: Damping, times: Tensor | None = None
    ) -> Inverse:
        """Collect the factors' inverses; beside an L, triangles are unpacked."""
        inverses = {letter: part for letter, (part,) in parts.items()}
        if times is not None:
            g = inverses["G"]
            inverses["G"] = (g * times.view(-1, *[1] * (g.dim() - 1))).to(g.dtype)
        if "L" in parts:
            inverses |= {letter: _whole(inverses[letter]) for letter in "AL"}
        return FactoredInverse(inverses)

    def saved_shapes(self, shape: FactorShape, triangular: bool) -> dict[str, tuple[int, ...]]:
        """The shapes of the factors' inverses."""
        found: dict[str, tuple[int, ...]] = {}
        for letter in shape.letters:
            packed = triangular and not (shape.locations and letter in "AL")
            (found[f"inverse_{letter}"],) = self.kept_shapes(
                shape.groups, shape.dims[letter], letter in shape.diagonals, packed
            )
        return found

    def from_saved(self, entries: Mapping[str, Tensor], shape: FactorShape) -> Inverse:
        """The inverse whose ``entries`` these are."""
        return FactoredInverse({letter: entries[f"inverse_{letter}"] for letter in shape.letters})

    def flaw(self, name: str, saved: Tensor, shape: FactorShape) -> str:
        """The reason why this cannot be a positive definite inverse; "" if it can be one."""
        letter = name[-1]
        if letter in shape.diagonals:
            return "" if bool((saved > 0).all()) else "has numbers that are not positive"
        whole = saved if saved.dim() == 3 else unpack_upper_triangular(saved, shape.dims[letter])
        if not bool((whole.diagonal(dim1=-2, dim2=-1) > 0).all()):
            return "has numbers on the diagonal that are not positive"
        if bool((whole - whole.mT).abs().amax() > SAVED_TOLERANCE * whole.abs().amax()):
            return "is not symmetric"
        return ""


def _whole(inverse: Tensor) -> Tensor:
    """An inverse as whole matrices, unpacked if it is stored as triangles."""
    if inverse.dim() == 3:
        return inverse
    dim = (math.isqrt(8 * inverse.shape[-1] + 1) - 1) // 2
    return unpack_upper_triangular(inverse, dim)


def fitting_entry(saved: Tensor, wanted: tuple[int, ...], dim: int) -> Tensor | None:
    """A saved tensor in a wanted shape, packed or unpacked if it is symmetric; None if it cannot.

    ``dim`` is the size of the matrix, or 0 for a tensor that is kept in one form only.
    """
    if tuple(saved.shape) == wanted:
        return saved
    triangle = wanted[0], packed_length(dim)
    square = wanted[0], dim, dim
    if dim and tuple(saved.shape) == triangle and wanted == square:
        return unpack_upper_triangular(saved, dim)
    if dim and tuple(saved.shape) == square and wanted == triangle:
        return pack_upper_triangular(saved)
    return None


def condition_estimate(
    inverse: Inverse, factors: KroneckerFactors, times: Tensor | None = None
) -> Tensor:
    """The condition number of the damped block whose inverse, times a scalar, is given; a scalar.

    Of eigenvalues it is exact. Of inverses it is the product over factors of the largest
    eigenvalues of the factor and of its inverse; of a factor kept elsewhere its trace.
    """
    if isinstance(inverse, EigenInverse):
        scale = inverse.scale.flatten(1)
        least = torch.where(scale > 0, scale, math.inf).amin(1)  # 0: without curvature or damping
        return (scale.amax(1) / least).max()
    shape, conditions = factors.shape, []
    for letter, stored in inverse.inverses.items():
        kept = stored if letter != "G" or times is None else stored / times
        if letter in shape.diagonals:
            conditions.append(kept.amax(1) / kept.amin(1))
            continue
        whole = _whole(kept)
        if factors.stored[letter] is None:
            largest = factors.means[shape.letters.index(letter)] * shape.dims[letter]
        else:
            largest = _largest_eigenvalue(factors.matrix(letter, whole.dtype))
        conditions.append((largest * _largest_eigenvalue(whole)).clamp_min(1.0))
    return torch.stack(conditions).prod(0).max()


def _largest_eigenvalue(matrices: Tensor) -> Tensor:
    """Rayleigh quotients of semi-definite ``(groups, n, n)``, from below, by the power method."""
    x = matrices.diagonal(dim1=-2, dim2=-1).abs().unsqueeze(-1) + 1e-6  # large where they are
    for _ in range(POWER_ITERATIONS):
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        y = matrices @ x
        quotients: Tensor = (x.mT @ y).flatten()
        x = y
    return quotients


SOLVERS: dict[str, EigenSolver | InverseSolver] = {
    "eigen": EigenSolver(),
    "inverse": InverseSolver(),
}
