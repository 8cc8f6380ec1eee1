"""The curvature of a trained model: a block for each layer, zero between the layers.

    F = A ⊗ G,   or A ⊗ L ⊗ G,   or a block for each group of a convolution
    A = Q_A diag(a) Q_Aᵀ,  G = Q_G diag(g) Q_Gᵀ   =>   f(F) V = Q_G [ f(g aᵀ) ∘ (Q_Gᵀ V Q_A) ] Q_Aᵀ

V is a vector of a layer's parameters as a matrix (groups, out, in), in which a bias is the last
column. Vectors of a model are dictionaries by parameter name, or lists like the optimizer's
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.bank import as_matrices, of_parameters
from second_order.kronecker.decompositions import diagonal
from second_order.kronecker.layers import (
    FactorShape,
    Layout,
    layout_of,
)

__all__ = ["KroneckerCurvature", "LayerCurvature", "Vector"]

Vector: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor | None]
V = TypeVar("V", Mapping[str, Tensor], Sequence[Tensor | None])
Damping: TypeAlias = float | Mapping[str, float] | None


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
            values, vectors = (factor, None) if factor.dim() == 2 else torch.linalg.eigh(factor)
            found[letter] = values.clamp_min(0), vectors
        return found

    @cached_property
    def values(self) -> Tensor:
        """The eigenvalues of F, ``(groups, out, in)``."""
        a, g = self.eigen["A"][0], self.eigen["G"][0]
        if "L" in self.eigen:
            a = (a.unsqueeze(-1) * self.eigen["L"][0].unsqueeze(-2)).flatten(-2)
        return g.unsqueeze(-1) * a.unsqueeze(-2)

    def to_matrix(self, vector: Mapping[str, Tensor]) -> Tensor:
        """A vector as a matrix ``(groups, out, in)``; parameters that it lacks are zeros."""
        like = self.factors["G"]
        parts = [
            vector[name].to(like) if name in vector else torch.zeros(size).to(like)
            for name, size in self.shapes.items()
        ]
        return as_matrices(parts, self._layout)

    def to_vector(self, matrix: Tensor) -> dict[str, Tensor]:
        """A matrix ``(groups, out, in)`` as a vector by the parameters' names."""
        parts = zip(self.shapes.items(), of_parameters(matrix, self._layout), strict=True)
        copy = partial(torch.clone, memory_format=torch.contiguous_format)
        return {name: copy(part.reshape(size)) for (name, size), part in parts}

    @property
    def _layout(self) -> Layout:
        return layout_of(self.shape, map(math.prod, self.shapes.values()))

    def apply(self, matrix: Tensor) -> Tensor:
        """F V for ``(groups, out, in)``."""
        return _product(matrix, self.factors)

    def function(self, matrix: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """f(F) V for ``(groups, out, in)``, f of the eigenvalues, element by element."""
        vectors = {k: q for k, (_, q) in self.eigen.items() if q is not None}
        rotated = _product(matrix, {k: q.mT for k, q in vectors.items()})
        return _product(rotated * f(self.values), vectors)

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
        vectors = {k: q for k, (_, q) in self.eigen.items() if q is not None}
        return _product(normal * (like + damping).rsqrt(), vectors)

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


def _product(matrix: Tensor, by: Mapping[str, Tensor]) -> Tensor:
    """G V Aᵀ, or G V (A ⊗ L)ᵀ, for ``(groups, out, in)``; one that is missing counts as 1."""
    a, g, locations = by.get("A"), by.get("G"), by.get("L")
    if a is not None and locations is not None:
        maps = matrix.reshape(-1, a.shape[-1], locations.shape[-1])
        matrix = (a[0] @ maps @ locations[0].mT).view(matrix.shape)
    elif a is not None:
        matrix = matrix @ a.mT if a.dim() == 3 else matrix * a.unsqueeze(-2)
    return matrix if g is None else g @ matrix


class KroneckerCurvature(Mapping[str, LayerCurvature]):
    """F, the Fisher information of a model by layers, as the training has averaged it.

    F is the *mean* over examples of g gᵀ, g the gradient of one example's loss (of a term of the
    mean, so of a token or a row where the loss is a mean over those): for a data set of N examples,
    N F is the Fisher information of all of them. With ``fisher="empirical"`` the labels are the
    data's, with ``"sampled"`` the model's own, and F is then the Gauss-Newton matrix of the usual
    losses. Weights move while averages are taken: an F of the last weights needs some more steps
    with lr=0, or a short memory.

    A layer is found by its name, ``curvature["0"]``; the factors are copies, in float64 unless
    another dtype was asked for.

    Args:
        layers: The layers' curvature, by name.
        names: Names of the optimizer's parameters, in their order.
        uncovered: Why a parameter has no curvature here, by its name.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerCurvature],
        names: Sequence[str],
        uncovered: Mapping[str, str],
    ) -> None:
        self._layers, self.names = dict(layers), list(names)
        self.uncovered = dict(uncovered)
        self._sizes = {n: size for each in layers.values() for n, size in each.shapes.items()}

    def __getitem__(self, name: str) -> LayerCurvature:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        said = f", {len(self.uncovered)} without" if self.uncovered else ""
        count = sum(map(math.prod, self._sizes.values()))
        return f"KroneckerCurvature({len(self)} layers, {count:,} parameters{said})"

    def apply(self, vector: V) -> V:
        """F v, as a dictionary or a list, whichever v is.

        Args:
            vector: By parameter name; names that are left out count as zero, and the result has all
                parameters of the layers that are named. Or a list with an entry for each of
                :attr:`names`, None for those without curvature.

        Raises:
            ValueError: For a parameter without curvature, or another shape than the parameter's.
        """
        return self._mapped(vector, lambda layer, matrix: layer.apply(matrix))

    def solve(self, vector: V, damping: Damping = None) -> V:
        """(F + γ)⁻¹ v.

        Args:
            vector: As for :meth:`apply`.
            damping: γ > 0, a number, or one for each layer by name; None for the training's own.

        Raises:
            ValueError: As for :meth:`apply`, and for a γ that is not positive or not known.
        """
        gamma = self._dampings(damping)
        return self._mapped(vector, lambda layer, matrix: layer.solve(matrix, gamma[layer.name]))

    def sample(
        self, damping: Damping = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """A sample of N(0, (F + γ)⁻¹), by parameter name.

        For Laplace's approximation with N examples and a prior precision δ, the covariance is
        (N F + δ)⁻¹: use ``damping=δ / N``, and divide the sample by √N.

        Args:
            damping: γ, as for :meth:`solve`.
            generator: Where random numbers come from; on the factors' device.
        """
        gamma, found = self._dampings(damping), {}
        for name, layer in self.items():
            found.update(layer.to_vector(layer.sample(gamma[name], generator)))
        return found

    def trace(self) -> float:
        """Tr F."""
        return sum(layer.trace() for layer in self.values())

    def logdet(self, damping: Damping = None) -> float:
        """Log det (F + γ), γ as for :meth:`solve`."""
        gamma = self._dampings(damping)
        return sum(layer.logdet(gamma[name]) for name, layer in self.items())

    def _mapped(self, vector: V, f: Callable[[LayerCurvature, Tensor], Tensor]) -> V:
        named = self._named(vector)
        found: dict[str, Tensor] = {}
        for layer in self.values():
            if any(name in named for name in layer.shapes):
                found.update(layer.to_vector(f(layer, layer.to_matrix(named))))
        result: Vector = found if named is vector else [found.get(name) for name in self.names]
        return cast(V, result)

    def _named(self, vector: Vector) -> Mapping[str, Tensor]:
        """A vector by name, of parameters that have curvature."""
        if not isinstance(vector, Mapping):
            if len(vector) != len(self.names):
                raise ValueError(
                    f"a list of {len(vector)} tensors is no vector of {len(self.names)} "
                    f"parameters; give one for each of curvature.names, or a dictionary by name"
                )
            pairs = zip(self.names, vector, strict=True)
            vector = {name: tensor for name, tensor in pairs if tensor is not None}
        for name, tensor in vector.items():
            size = self._sizes.get(name)
            if size is None:
                why = self.uncovered.get(name, "it is no parameter of the optimizer")
                raise ValueError(
                    f"{name!r} has no curvature: {why}; leave it out of the vector, or give None "
                    f"in its place in a list"
                )
            if tensor.shape != size:
                raise ValueError(
                    f"the vector has shape {tuple(tensor.shape)} for {name!r}, a parameter of "
                    f"shape {tuple(size)}"
                )
        return vector

    def _dampings(self, damping: Damping) -> dict[str, float]:
        """γ of each layer."""
        found: dict[str, float] = {}
        for name, layer in self.items():
            gamma = damping.get(name) if isinstance(damping, Mapping) else damping
            gamma = layer.damping if gamma is None else gamma
            if gamma is None:
                raise ValueError(
                    f"the damping of layer {name!r} is not known, as no inverse has been solved "
                    f"yet; give damping="
                )
            if not 0 < gamma < math.inf:
                raise ValueError(f"damping={gamma} of layer {name!r} must be positive and finite")
            found[name] = float(gamma)
        return found
