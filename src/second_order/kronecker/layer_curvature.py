"""The curvature F of one layer, as a Kronecker product of its factors.

    F = A ⊗ G,   or A ⊗ L ⊗ G,   or one such block for each group of a convolution
    A = Q_A diag(a) Q_Aᵀ,   G = Q_G diag(g) Q_Gᵀ
    f(F) V = Q_G [ f(g aᵀ) ∘ (Q_Gᵀ V Q_A) ] Q_Aᵀ

V is a vector of the layer's parameters, written as a matrix of shape
``(groups, out, in)``. A bias is its last column. Several vectors have the shape
``(..., groups, out, in)``. If there are corrected eigenvalues Λ (EK-FAC, George et al.
2018), they replace the products g aᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from second_order.errors import DecompositionError
from second_order.kronecker.block import split_by_parameter, to_matrices
from second_order.kronecker.layers import FactorShape, Layout, matrix_layout
from second_order.kronecker.solvers import (
    Problem,
    attempt_all,
    diagonal,
    eigh,
    ieee_matmul,
)
from second_order.kronecker.storage import unpack_upper_triangular

__all__ = ["Eigen", "FactorEigen", "LayerCurvature", "read_eigen"]


class FactorEigen(NamedTuple):
    """The eigendecomposition of a factor.

    Attributes:
        values: Eigenvalues ``(groups, n)``.
        vectors: Eigenvectors ``(groups, n, n)``, in columns; None for a diagonal.
    """

    values: Tensor
    vectors: Tensor | None


Eigen: TypeAlias = Mapping[str, FactorEigen]
"""The eigendecompositions of a layer's factors, by factor name."""

# Names of tensors in files.
CORRECTED = "corrected"
VALUES_SUFFIX = "_eigenvalues"
VECTORS_SUFFIX = "_eigenvectors"


@dataclass(frozen=True, eq=False)
class LayerCurvature:
    """The factors of a layer, and what you can compute with F.

        layer = curvature["model.layers.0.mlp.down_proj"]
        layer.A  # (1, in, in)
        gradient = layer.to_matrix({"model.layers.0.mlp.down_proj.weight": weight.grad})
        layer.solve(gradient, damping=0.1, relative=True)  # (F + γ)⁻¹ g, (1, out, in)

    Attributes:
        name: The name of the layer, as in ``summary()``.
        modules: Names of the modules that share the weight. Most layers have one.
        kind: The class of the first of these modules. If it is not one of ``torch.nn``,
            a loaded curvature has ``nn.Module``.
        shapes: Shapes of the layer's parameters, by name; the weight first.
        shape: Sizes of the factors.
        stored: The factors in their stored form, by factor name: symmetric matrices
            ``(groups, n, n)``, packed upper triangles ``(groups, n (n + 1) / 2)``, or
            the diagonal ``(groups, n)`` of a diagonal A. "A" is the factor of the
            inputs, "G" that of the output gradients, "L" that of the locations of a
            doubly factored layer. A norm layer, or a bias without a weight, has A = 1,
            so that G is F. Empty if another rank stores the layer. Without "G", only
            inputs were measured, and there is no F.
        examples: Number of examples that the factors are the mean of; for running
            averages, the mean number per update.
        updates: Effective number of updates in running averages, which is the sum of
            their weights with the latest weighted by 1. It is 1 for a mean over a data
            set.
        damping: The damping γ that training used with these factors, without its
            floor; None if unknown.
        corrected: Corrected eigenvalues Λ of F in the eigenbasis of the factors,
            ``(groups, out, in)``; None to use the products of the factors' eigenvalues.
        rows: Number of rows of inputs that A is the mean of; None if unknown.
        basis: The eigendecompositions of the factors, if known; None to compute them
            when needed. It is stored with ``corrected``, because eigenvectors of close
            eigenvalues differ from one machine to another.
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

    # -------------------------------------------------------------------------- factors

    @property
    def factors(self) -> dict[str, Tensor]:
        """The factors, by name: ``(groups, n, n)``, or ``(groups, n)`` if diagonal."""
        return {name: self.factor(name) for name in self.stored}

    def factor(self, name: str) -> Tensor:
        """Return the factor "A", "G" or "L". If stored as a triangle, it is copied.

        Raises:
            ValueError: If the layer does not have this factor on this rank.
        """
        if name not in self.stored:
            reason = "another rank stores it"
            if self.stored:
                reason = f"it has {' and '.join(self.stored)}"
            raise ValueError(f"layer {self.name!r} has no factor {name} here: {reason}")
        stored = self.stored[name]
        if stored.dim() == 3 or name in self.shape.diagonals:
            return stored
        return unpack_upper_triangular(stored, self.shape.dims[name])

    @property
    def A(self) -> Tensor:  # noqa: N802
        """E[x xᵀ] of the inputs x, with a 1 for the bias: ``(groups, in, in)``."""
        return self.factor("A")

    @property
    def G(self) -> Tensor:  # noqa: N802
        """E[d dᵀ] of the gradients d of the layer's outputs: ``(groups, out, out)``."""
        return self.factor("G")

    @cached_property
    def eigen(self) -> Eigen:
        """The eigendecompositions of the factors, by factor name, computed once.

        Raises:
            DecompositionError: If a factor is not finite, or cannot be decomposed.
        """
        if self.basis is not None:
            return self.basis
        problems = []
        for name, stored in self.stored.items():
            problem = Problem(
                stored,
                dim=self.shape.dims[name],
                dtype=torch.promote_types(stored.dtype, torch.float32),
                is_diagonal=name in self.shape.diagonals,
            )
            problems.append(problem)

        eigen: dict[str, FactorEigen] = {}
        decompositions = attempt_all(problems, eigh).finish()
        for name, decomposition in zip(self.stored, decompositions, strict=True):
            if decomposition is None:
                num_invalid = int((~self.stored[name].isfinite()).sum())
                raise DecompositionError(
                    f"factor {name} of layer {self.name!r} cannot be decomposed: {num_invalid} of "
                    f"its entries are not finite"
                )
            # A diagonal has eigenvalues only.
            vectors = decomposition[0] if len(decomposition) > 1 else None
            eigen[name] = FactorEigen(decomposition[-1], vectors)
        return eigen

    @property
    def values(self) -> Tensor:
        """The eigenvalues of F, ``(groups, out, in)``, in the order of the eigenbasis.

        Raises:
            ValueError: If the layer has only A. All functions of F raise it.
        """
        self._check_has_f()
        if self.corrected is not None:
            return self.corrected
        return self._outer({name: factor.values for name, factor in self.eigen.items()})

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of F in descending order."""
        return self.values.flatten().sort(descending=True).values

    def _check_has_f(self) -> None:
        if self.stored and "G" not in self.stored:
            raise ValueError(
                f"layer {self.name!r} has only A, so there is no F; measure it with "
                f'factors="kfac" or "ekfac". A itself is curvature[{self.name!r}].A'
            )

    # -------------------------------------------------------------------------- vectors

    def to_matrix(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Return a vector by parameter name as a matrix ``(groups, out, in)``.

        Missing parameters count as zeros. The matrix has the dtype of the factors, at
        least float32, as have all results that are computed with the factors.
        """
        # An empty slice has a factor's device and dtype, and its conversion is free.
        like = _to_float32(next(iter(self.stored.values()))[:0])
        parts = []
        for name, size in self.shapes.items():
            part = vector[name].to(like) if name in vector else like.new_zeros(size)
            parts.append(part)
        return to_matrices(parts, self._layout)

    def to_vector(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return a matrix ``(groups, out, in)`` as new tensors by parameter name."""
        vector = {}
        parts = split_by_parameter(matrix, self._layout)
        for (name, size), part in zip(self.shapes.items(), parts, strict=True):
            vector[name] = part.reshape(size).clone(
                memory_format=torch.contiguous_format
            )
        return vector

    @property
    def _layout(self) -> Layout:
        numels = [math.prod(size) for size in self.shapes.values()]
        return matrix_layout(self.shape, numels)

    # ------------------------------------------------------------------------ functions

    def apply(self, matrix: Tensor) -> Tensor:
        """Return F V for V of shape ``(..., groups, out, in)``."""
        self._check_has_f()
        if self.corrected is not None:
            return self.function(matrix, lambda values: values)
        return _multiply(matrix, self.factors)

    def function(self, matrix: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Return f(F) V for V of shape ``(..., groups, out, in)``.

        ``f`` maps the eigenvalues of F, ``(groups, out, in)``, elementwise.
        """
        self._check_has_f()
        transposed = {name: vectors.mT for name, vectors in self._vectors.items()}
        rotated = _multiply(matrix, transposed)
        return _multiply(rotated * f(self.values), self._vectors)

    def solve(
        self, matrix: Tensor, damping: float | None = None, *, relative: bool = False
    ) -> Tensor:
        """Return (F + γ)⁻¹ V for V of shape ``(..., groups, out, in)``.

        See :meth:`gamma` for γ.
        """
        gamma = self.gamma(damping, relative)
        return self.function(matrix, lambda values: 1.0 / (values + gamma))

    def sqrt(self, matrix: Tensor) -> Tensor:
        """Return F^(1/2) V for V of shape ``(..., groups, out, in)``."""
        return self.function(matrix, torch.sqrt)

    def trace(self) -> float:
        """Return Tr F, which needs no eigendecomposition."""
        self._check_has_f()
        if self.corrected is not None:
            return float(self.corrected.sum())
        traces = {name: d.sum(-1, keepdim=True) for name, d in self._diagonals.items()}
        return float(self._outer(traces).sum())

    def logdet(self, damping: float | None = None, *, relative: bool = False) -> float:
        """Return log det (F + γ); see :meth:`gamma` for γ."""
        return float((self.values + self.gamma(damping, relative)).log().sum())

    def diagonal(self) -> Tensor:
        """Return the diagonal of F as a matrix ``(groups, out, in)``."""
        self._check_has_f()
        if self.corrected is None:
            return self._outer(self._diagonals)
        # diag(Q diag(Λ) Qᵀ) = Q² Λ, with Q = Q_A ⊗ Q_G and Q² elementwise.
        squared = {name: vectors.square() for name, vectors in self._vectors.items()}
        return _multiply(self.corrected, squared)

    def sample(
        self,
        damping: float | None = None,
        generator: torch.Generator | None = None,
        *,
        relative: bool = False,
    ) -> Tensor:
        """Return a sample of N(0, (F + γ)⁻¹) as a matrix ``(groups, out, in)``.

        The ``generator`` must be on the device of the factors.
        """
        values = self.values
        gamma = self.gamma(damping, relative)
        normal = torch.randn(
            values.shape, dtype=values.dtype, device=values.device, generator=generator
        )
        return _multiply(normal * (values + gamma).rsqrt(), self._vectors)

    def to_dense(self) -> Tensor:
        """Return F as a dense matrix ``(n, n)``, for small layers.

        Rows and columns are the parameters' entries, flattened, in the order of
        ``shapes``.
        """
        numels = [math.prod(size) for size in self.shapes.values()]
        device = next(iter(self.stored.values())).device
        identity = torch.eye(sum(numels), device=device)

        def column(unit: Tensor) -> Tensor:
            vector = {}
            parts = unit.split(numels)
            for (name, size), part in zip(self.shapes.items(), parts, strict=True):
                vector[name] = part.view(size)
            product = self.to_vector(self.apply(self.to_matrix(vector)))
            return torch.cat([part.flatten() for part in product.values()])

        return torch.vmap(column, out_dims=1)(identity)

    # -------------------------------------------------------------------------- damping

    def gamma(self, damping: float | None = None, relative: bool = False) -> float:
        """Return the damping γ of the layer.

        Args:
            damping: A positive number; None for the damping that training used.
            relative: Whether ``damping`` is in units of the mean eigenvalue of F. If F
                is zero, the mean eigenvalue counts as 1.

        Raises:
            TypeError: If the damping is not a number.
            ValueError: If the damping is not positive and finite, or if it is None and
                either unknown or ``relative``.
        """
        if damping is None and relative:
            raise ValueError(
                f"relative=True needs damping= in units of the mean eigenvalue of layer "
                f"{self.name!r}, because the damping of training is absolute; write damping=0.1"
            )
        damping = self.damping if damping is None else damping
        if damping is None:
            raise ValueError(
                f"the damping of layer {self.name!r} is not known, because no optimizer has "
                f"computed an inverse for it; write damping=0.1, relative=True for a tenth of the "
                f"layer's mean eigenvalue, or damping=1e-3 for an absolute one"
            )
        if not isinstance(damping, (Real, Tensor)):
            raise TypeError(
                f"damping={damping!r} of layer {self.name!r} is not a number; write damping=0.1"
            )
        if not 0 < damping < math.inf:
            raise ValueError(
                f"damping={damping} of layer {self.name!r} must be positive and finite"
            )

        # Relative damping is a multiple of the mean eigenvalue of A ⊗ G.
        if not relative:
            return float(damping)
        mean_eigenvalue = self.trace() / math.prod(self.shape.gradient_shape)
        if mean_eigenvalue <= 0:
            mean_eigenvalue = 1.0
        return damping * mean_eigenvalue

    # -------------------------------------------------------------------------- tensors

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the layer by name, which :meth:`with_tensors` reads.

        They are the factors in their stored form, under their names. If there are
        corrected eigenvalues, they are "corrected", and the tensors of
        :meth:`eigen_tensors` are included.
        """
        tensors = dict(self.stored)
        if self.corrected is not None:
            tensors[CORRECTED] = self.corrected
            tensors |= self.eigen_tensors()
        return tensors

    def eigen_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of :attr:`eigen` by name, which :func:`read_eigen` reads.

        Names are "A_eigenvalues", "A_eigenvectors" and so on.
        """
        tensors: dict[str, Tensor] = {}
        for name, (values, vectors) in self.eigen.items():
            tensors[name + VALUES_SUFFIX] = values
            if vectors is not None:
                tensors[name + VECTORS_SUFFIX] = vectors
        return tensors

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> LayerCurvature:
        """Return the layer with the tensors that :meth:`tensors` returned."""
        names = [name for name in self.shape.factor_names if name in tensors]
        return replace(
            self,
            stored={name: tensors[name] for name in names},
            corrected=tensors.get(CORRECTED),
            basis=read_eigen(tensors) or None,
        )

    # -------------------------------------------------------------------------- details

    @property
    def _vectors(self) -> dict[str, Tensor]:
        """Eigenvectors of the factors that are not diagonal, by factor name."""
        vectors = {}
        for name, factor in self.eigen.items():
            if factor.vectors is not None:
                vectors[name] = factor.vectors
        return vectors

    @property
    def _diagonals(self) -> dict[str, Tensor]:
        """Diagonals ``(groups, n)`` of the factors, by factor name."""
        diagonals = {name: diagonal(factor) for name, factor in self.factors.items()}
        return {name: _to_float32(entries) for name, entries in diagonals.items()}

    def _outer(self, entries: Mapping[str, Tensor]) -> Tensor:
        """Return the products of one entry of each factor, ``(groups, out, in)``.

        ``entries`` has shape ``(groups, n)`` for each factor.
        """
        a = entries["A"]
        if "L" in entries:
            a = (a.unsqueeze(-1) * entries["L"].unsqueeze(-2)).flatten(-2)
        return entries["G"].unsqueeze(-1) * a.unsqueeze(-2)


def read_eigen(tensors: Mapping[str, Tensor]) -> Eigen:
    """Return the decompositions in tensors of :meth:`LayerCurvature.eigen_tensors`."""
    eigen = {}
    for name in "ALG":
        values = tensors.get(name + VALUES_SUFFIX)
        if values is not None:
            eigen[name] = FactorEigen(values, tensors.get(name + VECTORS_SUFFIX))
    return eigen


def _multiply(matrix: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
    """Return G V Aᵀ, or G V (A ⊗ L)ᵀ, for V of shape ``(..., groups, out, in)``.

    A missing factor is the identity. A diagonal A has shape ``(groups, n)``. Autocast
    does not change the dtype.
    """
    factors = {name: factor.to(matrix.dtype) for name, factor in factors.items()}
    a = factors.get("A")
    locations = factors.get("L")
    g = factors.get("G")
    device = matrix.device
    autocast_off = torch.autocast(device.type, enabled=False)
    with autocast_off, ieee_matmul(device, matrix.dtype):
        if a is not None and locations is not None:
            maps = matrix.reshape(-1, a.shape[-1], locations.shape[-1])
            matrix = (a[0] @ maps @ locations[0].mT).view(matrix.shape)
        elif a is not None and a.dim() == 2:
            matrix = matrix * a.unsqueeze(-2)
        elif a is not None:
            matrix = matrix @ a.mT
        if g is not None:
            matrix = g @ matrix
    return matrix


def _to_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it has this dtype."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
