"""The curvature of one trained layer as a matrix that can be applied, inverted and sampled from.

    F = A ⊗ G,   or A ⊗ L ⊗ G,   or a block for each group of a convolution
    A = Q_A diag(a) Q_Aᵀ,  G = Q_G diag(g) Q_Gᵀ   =>   f(F) V = Q_G [ f(g aᵀ) ∘ (Q_Gᵀ V Q_A) ] Q_Aᵀ

V is a vector of the layer's parameters as a matrix (groups, out, in), in which a bias is the last
column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from second_order.kronecker.decompositions import diagonal
from second_order.kronecker.layers import (
    FactorShape,
    gradient_from_matrix,
    gradient_to_matrix,
)

__all__ = ["LayerCurvature"]


@dataclass(frozen=True, eq=False)
class LayerCurvature:
    """A layer's factors, and what they are a curvature of.

    Attributes:
        name: The layer's name, as in ``summary()``.
        modules: Names of the modules that share the weight, one for most layers.
        kind: The class of the first of them.
        shapes: Shapes of the layer's parameters, by name; the weight first.
        shape: Sizes of the factors.
        factors: By letter, "A" of inputs ``(groups, in, in)``, or ``(groups, in)`` if it is
            diagonal, and "G" of the outputs' gradients ``(groups, out, out)``; "L" of locations
            for a doubly factored layer. The layer of a bias or of a normalisation has A = 1 and is
            all in G.
        examples: Mean number of examples in an update of the running averages.
        updates: Number of updates that the averages are of, as far as they remember: W, the sum of
            the weights of all updates, the last one's being 1.
        damping: γ of the training for these factors; None if it is not known.
    """

    name: str
    modules: tuple[str, ...]
    kind: type[nn.Module]
    shapes: Mapping[str, torch.Size]
    shape: FactorShape
    factors: Mapping[str, Tensor]
    examples: float
    updates: float
    damping: float | None = None

    @property
    def A(self) -> Tensor:  # noqa: N802
        """E[a aᵀ] of the layer's inputs, a 1 for the bias appended."""
        return self.factors["A"]

    @property
    def G(self) -> Tensor:  # noqa: N802
        """E[d dᵀ] of the gradients of the layer's outputs."""
        return self.factors["G"]

    @cached_property
    def eigen(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """By letter, eigenvalues ``(groups, n)`` and eigenvectors; None where it is diagonal."""
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for letter, factor in self.factors.items():
            if factor.dim() == 2:
                found[letter] = factor.clamp_min(0), None
            else:
                values, vectors = torch.linalg.eigh(factor)
                found[letter] = values.clamp_min(0), vectors
        return found

    @cached_property
    def values(self) -> Tensor:
        """The eigenvalues of F, ``(groups, out, in)``."""
        a, g = self.eigen["A"][0], self.eigen["G"][0]
        if "L" in self.eigen:
            a = (a.unsqueeze(-1) * self.eigen["L"][0].unsqueeze(-2)).flatten(-2)
        return g.unsqueeze(-1) * a.unsqueeze(-2)

    # ------------------------------------------------------------------- vectors and matrices

    def to_matrix(self, vector: Mapping[str, Tensor]) -> Tensor:
        """A vector as a matrix ``(groups, out, in)``; parameters that it lacks are zeros."""
        like = self.factors["G"]
        parts = [
            vector[name].to(like) if name in vector else torch.zeros(size).to(like)
            for name, size in self.shapes.items()
        ]
        if self.shape.exact:
            return torch.cat([part.reshape(-1) for part in parts]).view(self.shape.gradient_size)
        bias = parts[1] if len(parts) > 1 else None
        return gradient_to_matrix(parts[0], bias, self.shape, like.dtype)

    def to_vector(self, matrix: Tensor) -> dict[str, Tensor]:
        """A matrix ``(groups, out, in)`` as a vector by the parameters' names."""
        found = {name: matrix.new_empty(size) for name, size in self.shapes.items()}
        parts = list(found.values())
        if self.shape.exact:
            pieces = matrix.reshape(-1).split([part.numel() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece.view_as(part))
        else:
            bias = parts[1] if len(parts) > 1 else None
            gradient_from_matrix(matrix, 1.0, parts[0], bias, self.shape)
        return found

    # ------------------------------------------------------------------------- linear algebra

    def apply(self, matrix: Tensor) -> Tensor:
        """F V for ``(groups, out, in)``."""
        a, g = self.factors["A"], self.factors["G"]
        if "L" in self.factors:
            maps = matrix.view(-1, a.shape[-1], self.factors["L"].shape[-1])
            matrix = (a[0] @ maps @ self.factors["L"][0]).view_as(matrix)
            return g @ matrix
        return g @ (matrix @ a if a.dim() == 3 else matrix * a.unsqueeze(-2))

    def function(self, matrix: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """f(F) V for ``(groups, out, in)``, f of the eigenvalues, element by element."""
        return self._rotated(self._rotated(matrix, back=False) * f(self.values), back=True)

    def _rotated(self, matrix: Tensor, *, back: bool) -> Tensor:
        """Qᵀ V into the eigenvectors' coordinates, or Q V back from them."""

        def turned(letter: str) -> Tensor | None:
            q = self.eigen[letter][1]
            return q if q is None or back else q.mT

        q_a, q_g = turned("A"), turned("G")
        if "L" in self.eigen:
            q_l = turned("L")
            assert q_a is not None
            assert q_l is not None
            maps = matrix.view(-1, q_a.shape[-1], q_l.shape[-1])
            matrix = (q_a[0] @ maps @ q_l[0].mT).view_as(matrix)
        elif q_a is not None:
            matrix = matrix @ q_a.mT
        return matrix if q_g is None else q_g @ matrix

    def solve(self, matrix: Tensor, damping: float) -> Tensor:
        """(F + γ)⁻¹ V for ``(groups, out, in)``."""
        return self.function(matrix, lambda values: 1.0 / (values + damping))

    def trace(self) -> float:
        """Tr F, of the factors' traces."""
        diagonals = [diagonal(factor).sum(-1) for factor in self.factors.values()]
        return float(torch.stack(diagonals).prod(0).sum())

    def logdet(self, damping: float) -> float:
        """Log det (F + γ)."""
        return float((self.values + damping).log().sum())

    def sample(self, damping: float, generator: torch.Generator | None = None) -> Tensor:
        """A sample of N(0, (F + γ)⁻¹) as a matrix ``(groups, out, in)``."""
        like = self.values
        normal = torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
        return self._rotated(normal * (like + damping).rsqrt(), back=True)

    def to_dense(self) -> Tensor:
        """F ``(n, n)`` of the parameters flattened one after the other; for small layers."""
        counts = [math.prod(size) for size in self.shapes.values()]
        like, columns = self.factors["G"], []
        for unit in torch.eye(sum(counts), dtype=like.dtype, device=like.device):
            sizes = zip(self.shapes.items(), unit.split(counts), strict=True)
            vector = {name: piece.view(size) for (name, size), piece in sizes}
            product = self.to_vector(self.apply(self.to_matrix(vector)))
            columns.append(torch.cat([part.reshape(-1) for part in product.values()]))
        return torch.stack(columns, 1)
