"""The curvature of a trained model: a block for each layer, zero between the layers.

Vectors are dictionaries by parameter name, or lists like the optimizer's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from second_order.kronecker.layer_curvature import LayerCurvature

__all__ = ["KroneckerCurvature", "Vector"]

Vector: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor | None]
V = TypeVar("V", Mapping[str, Tensor], Sequence[Tensor | None])
Damping: TypeAlias = float | Mapping[str, float] | None


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

    # ------------------------------------------------------------------------- linear algebra

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

    # -------------------------------------------------------------------------------- vectors

    def _mapped(self, vector: V, f: Callable[[LayerCurvature, Tensor], Tensor]) -> V:
        given = self._named(vector)
        self._check(given)
        found: dict[str, Tensor] = {}
        for layer in self.values():
            if any(name in given for name in layer.shapes):
                found.update(layer.to_vector(f(layer, layer.to_matrix(given))))
        result: Vector = found if given is vector else [found.get(name) for name in self.names]
        return cast(V, result)

    def _named(self, vector: Vector) -> Mapping[str, Tensor]:
        """A vector by name: itself, if it is that."""
        if isinstance(vector, Mapping):
            return vector
        if len(vector) != len(self.names):
            raise ValueError(
                f"a list of {len(vector)} tensors is no vector of {len(self.names)} parameters; "
                f"give one for each of curvature.names, or a dictionary by name"
            )
        pairs = zip(self.names, vector, strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def _check(self, vector: Mapping[str, Tensor]) -> None:
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
