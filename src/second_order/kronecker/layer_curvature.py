"""The curvature of one layer, of Kronecker factors.

    F = A ⊗ G,   or A ⊗ L ⊗ G,   or a block for each group of a convolution
    A = Q_A diag(a) Q_Aᵀ,  G = Q_G diag(g) Q_Gᵀ   =>   f(F) V = Q_G [ f(g aᵀ) ∘ (Q_Gᵀ V Q_A) ] Q_Aᵀ

V is a vector of the layer's parameters as a matrix (groups, out, in), in which a bias is the last
column; many vectors at once are (..., groups, out, in). With corrected eigenvalues Λ (George et al.
2018, EK-FAC) Λ takes the place of g aᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from second_order.errors import DecompositionError
from second_order.kronecker.block import split_by_parameter, to_matrices
from second_order.kronecker.layers import FactorShape, Layout, layout_of
from second_order.kronecker.solvers import Problem, attempt_all, diagonal, eigh, ieee_matmul
from second_order.kronecker.storage import unpack_upper_triangular

__all__ = ["Eigen", "LayerCurvature", "read_eigen"]

Eigen: TypeAlias = Mapping[str, tuple[Tensor, Tensor | None]]
"""By letter, eigenvalues ``(groups, n)`` and eigenvectors ``(groups, n, n)``; None if diagonal."""

CORRECTED, VALUES, VECTORS = "corrected", "_eigenvalues", "_eigenvectors"

INPUTS_ALONE = (
    'layer {name!r} has A of its inputs alone, and no F: measure it with factors="kfac" or '
    '"ekfac". A itself is curvature[{name!r}].A'
)


@dataclass(frozen=True, eq=False)
class LayerCurvature:
    """A layer's factors, and what they are a curvature of.

    Attributes:
        name: The layer's name, as in ``summary()``.
        modules: Names of the modules that share the weight, one for most layers.
        kind: The class of the first of them.
        shapes: Shapes of the layer's parameters, by name; the weight first.
        shape: Sizes of the factors.
        stored: The factors as they are kept, by letter: symmetric matrices ``(groups, n, n)``,
            their packed triangles ``(groups, n (n + 1) / 2)``, or the diagonal ``(groups, n)`` of a
            diagonal A. Empty if another process keeps them. "A" is of inputs, "G" of the outputs'
            gradients, "L" of a doubly factored layer's locations. The layer of a bias or of a
            normalisation has A = 1 and is all in G. Without "G" they are of inputs alone, and there
            is no F.
        examples: Number of examples that the factors are the mean of; of running averages, the mean
            number in an update.
        updates: Number of updates that running averages are of, as far as they remember: W, the sum
            of the weights of all updates, the last one's being 1. Of a mean over a data set 1.
        damping: γ of the training for these factors, without its floor; None if it is not known.
        corrected: Eigenvalues of F in the eigenbasis of its factors, ``(groups, out, in)``; None
            for the products of the factors' own.
        rows: Number of rows of inputs that A is the mean of; None if it is not known.
        basis: The eigenvalues and eigenvectors of the factors, where they are known, as
            :attr:`eigen`; None to find them when they are needed. Belongs with ``corrected``, as
            another computer finds other vectors of eigenvalues that are close to each other.
    """

    name: str
    modules: tuple[str, ...]
    kind: type[nn.Module]
    shapes: Mapping[str, torch.Size]
    shape: FactorShape
    stored: Mapping[str, Tensor]
    examples: float
    updates: float
    damping: float | None = None
    corrected: Tensor | None = None
    rows: float | None = None
    basis: Eigen | None = None

    # ------------------------------------------------------------------------------------- factors

    @property
    def factors(self) -> dict[str, Tensor]:
        """By letter, whole matrices ``(groups, n, n)``, or ``(groups, n)`` of a diagonal A."""
        return {letter: self.factor(letter) for letter in self.stored}

    def factor(self, letter: str) -> Tensor:
        """A factor by its letter; a new tensor if it is kept as a triangle.

        Raises:
            ValueError: If the layer has none of that letter here.
        """
        if letter not in self.stored:
            here = f"it has {' and '.join(self.stored)}" if self.stored else "it is kept elsewhere"
            raise ValueError(f"layer {self.name!r} has no factor {letter} here: {here}")
        kept = self.stored[letter]
        if kept.dim() == 3 or letter in self.shape.diagonals:
            return kept
        return unpack_upper_triangular(kept, self.shape.dims[letter])

    @property
    def A(self) -> Tensor:  # noqa: N802
        """E[a aᵀ] of the layer's inputs, a 1 for the bias appended."""
        return self.factor("A")

    @property
    def G(self) -> Tensor:  # noqa: N802
        """E[d dᵀ] of the gradients of the layer's outputs."""
        return self.factor("G")

    @cached_property
    def eigen(self) -> Eigen:
        """By letter, eigenvalues ``(groups, n)`` and eigenvectors; None where it is diagonal.

        Found once and kept.

        Raises:
            DecompositionError: For a factor that is not finite, or that no routine decomposes.
        """
        if self.basis is not None:
            return self.basis
        problems = [
            Problem(
                kept,
                self.shape.dims[letter],
                torch.promote_types(kept.dtype, torch.float32),
                is_diagonal=letter in self.shape.diagonals,
            )
            for letter, kept in self.stored.items()
        ]
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for letter, parts in zip(self.stored, attempt_all(problems, eigh).result(), strict=True):
            if parts is None:
                raise DecompositionError(
                    f"factor {letter} of layer {self.name!r} cannot be decomposed: "
                    f"{int((~self.stored[letter].isfinite()).sum())} of its entries are not finite"
                )
            found[letter] = (parts[-1], parts[0] if len(parts) > 1 else None)
        return found

    def _check_is_whole(self) -> None:
        """Raise ValueError if there is no G."""
        if self.stored and "G" not in self.stored:
            raise ValueError(INPUTS_ALONE.format(name=self.name))

    @property
    def values(self) -> Tensor:
        """The eigenvalues of F, ``(groups, out, in)``, at their places in the eigenbasis.

        Raises:
            ValueError: If the layer has A alone; so do all functions of F.
        """
        self._check_is_whole()
        if self.corrected is not None:
            return self.corrected
        return self._outer({letter: values for letter, (values, _) in self.eigen.items()})

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of F, the largest first."""
        return self.values.flatten().sort(descending=True).values

    # ------------------------------------------------------------------------------------- vectors

    def to_matrix(self, vector: Mapping[str, Tensor]) -> Tensor:
        """A vector as a matrix ``(groups, out, in)``; parameters that it lacks are zeros.

        In the dtype of the factors, float32 at least, as all that is computed with them.
        """
        like = _wide(next(iter(self.stored.values()))[:0])
        parts = [
            vector[name].to(like) if name in vector else like.new_zeros(size)
            for name, size in self.shapes.items()
        ]
        return to_matrices(parts, self._layout)

    def to_vector(self, matrix: Tensor) -> dict[str, Tensor]:
        """A matrix ``(groups, out, in)`` as a vector by the parameters' names."""
        parts = zip(self.shapes.items(), split_by_parameter(matrix, self._layout), strict=True)
        copy = partial(torch.clone, memory_format=torch.contiguous_format)
        return {name: copy(part.reshape(size)) for (name, size), part in parts}

    @property
    def _layout(self) -> Layout:
        return layout_of(self.shape, map(math.prod, self.shapes.values()))

    # ----------------------------------------------------------------------------------- functions

    def apply(self, matrix: Tensor) -> Tensor:
        """F V for ``(..., groups, out, in)``."""
        self._check_is_whole()
        if self.corrected is not None:
            return self.function(matrix, lambda values: values)
        return _product(matrix, self.factors)

    def function(self, matrix: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """f(F) V for ``(..., groups, out, in)``, f of the eigenvalues, element by element."""
        self._check_is_whole()
        rotated = _product(matrix, {letter: q.mT for letter, q in self._vectors.items()})
        return _product(rotated * f(self.values), self._vectors)

    def solve(
        self, matrix: Tensor, damping: float | None = None, *, relative: bool = False
    ) -> Tensor:
        """(F + γ)⁻¹ V for ``(..., groups, out, in)``, γ as :meth:`gamma` finds it."""
        gamma = self.gamma(damping, relative)
        return self.function(matrix, lambda values: 1.0 / (values + gamma))

    def sqrt(self, matrix: Tensor) -> Tensor:
        """F^(1/2) V for ``(..., groups, out, in)``."""
        return self.function(matrix, torch.sqrt)

    def trace(self) -> float:
        """Tr F, of the factors' traces."""
        self._check_is_whole()
        if self.corrected is not None:
            return float(self.corrected.sum())
        traces = {letter: each.sum(-1, keepdim=True) for letter, each in self._diagonals.items()}
        return float(self._outer(traces).sum())

    def logdet(self, damping: float | None = None, *, relative: bool = False) -> float:
        """Log det (F + γ), γ as :meth:`gamma` finds it."""
        return float((self.values + self.gamma(damping, relative)).log().sum())

    def diagonal(self) -> Tensor:
        """The diagonal of F as a matrix ``(groups, out, in)``."""
        self._check_is_whole()
        if self.corrected is None:
            return self._outer(self._diagonals)
        return _product(self.corrected, {k: q.square() for k, q in self._vectors.items()})

    def sample(
        self,
        damping: float | None = None,
        generator: torch.Generator | None = None,
        *,
        relative: bool = False,
    ) -> Tensor:
        """A sample of N(0, (F + γ)⁻¹) as a matrix ``(groups, out, in)``."""
        like = self.values
        gamma = self.gamma(damping, relative)
        normal = torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
        return _product(normal * (like + gamma).rsqrt(), self._vectors)

    def to_dense(self) -> Tensor:
        """F ``(n, n)`` of the parameters flattened one after the other; for small layers."""
        counts = [math.prod(size) for size in self.shapes.values()]
        units = torch.eye(sum(counts), device=next(iter(self.stored.values())).device)

        def column(unit: Tensor) -> Tensor:
            parts = unit.split(counts)
            pairs = zip(self.shapes.items(), parts, strict=True)
            vector = {name: part.view(size) for (name, size), part in pairs}
            product = self.to_vector(self.apply(self.to_matrix(vector)))
            return torch.cat([part.flatten() for part in product.values()])

        return torch.vmap(column, out_dims=1)(units)

    # ------------------------------------------------------------------------------------- damping

    def gamma(self, damping: float | None = None, relative: bool = False) -> float:
        """γ: ``damping``, or the training's own; or, if ``relative``, that many mean eigenvalues.

        Where F is zero, the mean eigenvalue counts as 1.

        Raises:
            ValueError: Unless the damping is positive, finite and known; a relative one has to be
                given.
        """
        if damping is None and relative:
            raise ValueError(
                f"relative=True needs damping=, in mean eigenvalues of layer {self.name!r}; the "
                f"training's own is absolute"
            )
        damping = self.damping if damping is None else damping
        if damping is None:
            raise ValueError(
                f"the damping of layer {self.name!r} is not known, as no optimizer has solved an "
                f"inverse for it; write damping=0.1, relative=True for a tenth of the layer's mean "
                f"eigenvalue, or damping=1e-3 for an absolute one"
            )
        if not 0 < damping < math.inf:
            raise ValueError(
                f"damping={damping} of layer {self.name!r} must be positive and finite"
            )
        if not relative:
            return float(damping)
        mean = self.trace() / math.prod(self.shape.gradient_size)
        return damping * (mean if mean > 0 else 1.0)

    # ------------------------------------------------------------------------------------- tensors

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the layer keeps, by name: :meth:`with_tensors` reads it.

        The factors by their letters, as they are stored; with "corrected" the basis that it is in,
        ``"A_eigenvalues"`` and ``"A_eigenvectors"``.
        """
        found = dict(self.stored)
        if self.corrected is not None:
            found |= {CORRECTED: self.corrected, **self.eigen_tensors()}
        return found

    def eigen_tensors(self) -> dict[str, Tensor]:
        """:attr:`eigen` by name, ``"A_eigenvalues"`` and so on: :func:`read_eigen` reads it."""
        found: dict[str, Tensor] = {}
        for letter, (values, vectors) in self.eigen.items():
            found[letter + VALUES] = values
            if vectors is not None:
                found[letter + VECTORS] = vectors
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> LayerCurvature:
        """The layer with what :meth:`tensors` gave."""
        return replace(
            self,
            stored={
                letter: tensors[letter] for letter in self.shape.factor_names if letter in tensors
            },
            corrected=tensors.get(CORRECTED),
            basis=read_eigen(tensors) or None,
        )

    @property
    def _vectors(self) -> dict[str, Tensor]:
        """Eigenvectors by letter, of the factors that are not diagonal."""
        return {letter: q for letter, (_, q) in self.eigen.items() if q is not None}

    @property
    def _diagonals(self) -> dict[str, Tensor]:
        return {letter: _wide(diagonal(factor)) for letter, factor in self.factors.items()}

    def _outer(self, of: Mapping[str, Tensor]) -> Tensor:
        """Products ``(groups, out, in)`` of one number each of A, L and G, ``(groups, n)``."""
        a = of["A"]
        if "L" in of:
            a = (a.unsqueeze(-1) * of["L"].unsqueeze(-2)).flatten(-2)
        return of["G"].unsqueeze(-1) * a.unsqueeze(-2)


def read_eigen(tensors: Mapping[str, Tensor]) -> Eigen:
    """The eigenvalues and eigenvectors that :meth:`LayerCurvature.eigen_tensors` gave."""
    return {
        letter: (tensors[letter + VALUES], tensors.get(letter + VECTORS))
        for letter in "ALG"
        if letter + VALUES in tensors
    }


def _product(matrix: Tensor, by: Mapping[str, Tensor]) -> Tensor:
    """G V Aᵀ, or G V (A ⊗ L)ᵀ, for ``(..., groups, out, in)``; one that is missing counts as 1."""
    a, g, locations = (by[k].to(matrix.dtype) if k in by else None for k in "AGL")
    with ieee_matmul(matrix.device, matrix.dtype):
        if a is not None and locations is not None:
            maps = matrix.reshape(-1, a.shape[-1], locations.shape[-1])
            matrix = (a[0] @ maps @ locations[0].mT).view(matrix.shape)
        elif a is not None:
            matrix = matrix @ a.mT if a.dim() == 3 else matrix * a.unsqueeze(-2)
        return matrix if g is None else g @ matrix


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
