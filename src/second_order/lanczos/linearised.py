"""The loss of one batch, differentiated so far that curvature can be multiplied by a vector.

Hessian            H v = ∇(gᵀv), g = ∇L with its graph
Gauss-Newton       J'HJ v: c -> J'c is linear in c, so that its derivative along v is J v
                   (a backward through a backward); then H, the loss's with respect to the
                   outputs; then J' (Schraudolph, 2002)
empirical Fisher   the same with the examples' losses for outputs and 1/N for H:
                   J'J/N = (1/N) Σ gᵢgᵢᵀ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from second_order.lanczos.closure import Evaluation
from second_order.lanczos.differentiable import derivatives, explained

__all__ = ["Graph", "Parts", "linearised", "outputs_curvature"]

Parts: TypeAlias = Sequence[Tensor | None]
"""A part for each parameter; None for zeros."""
Bend: TypeAlias = Callable[[Parts], list[Tensor]]


class Graph(Protocol):
    """A batch's curvature at parameters."""

    @property
    def gradients(self) -> Parts:
        """The first derivatives; None for a parameter that the loss does not depend on."""

    def product(self, directions: Sequence[Tensor], *, retain: bool) -> Parts:
        """Multiply by a vector.

        Args:
            directions: The vector, a part for each parameter.
            retain: Whether another product follows.
        """


def linearised(evaluation: Evaluation, params: Sequence[Tensor]) -> Graph:
    """Differentiate a batch's loss, for products with its curvature matrix.

    Args:
        evaluation: The loss, with what it is cut at.
        params: The parameters.

    Raises:
        CurvatureError: If it cannot be differentiated twice.
    """
    if evaluation.roots:
        return _OutputGraph(evaluation, params)
    return _GradientGraph(derivatives([evaluation.loss], params, twice=True), params)


class _GradientGraph:
    """The gradient with its graph; a gradient without one counts as constant."""

    def __init__(self, gradients: Parts, params: Sequence[Tensor]) -> None:
        self.gradients, self._params = gradients, params

    def product(self, directions: Sequence[Tensor], *, retain: bool) -> Parts:
        """Compute ∇(gᵀv)."""
        return _along(self.gradients, self._params, directions, retain=retain)


class _OutputGraph:
    """The outputs with their graph, and J'c with the graph from c to it."""

    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None:
        self._roots, self._params = evaluation.roots, params
        self._bend = outputs_curvature(evaluation)
        self._cotangents = [torch.zeros_like(z, requires_grad=True) for z in self._roots]
        self.gradients = derivatives(self._roots, params, self._cotangents, twice=True)

    def product(self, directions: Sequence[Tensor], *, retain: bool) -> Parts:
        """Compute J'HJ v."""
        pushed = _along(self.gradients, self._cotangents, directions, retain=True)
        return _along(self._roots, self._params, self._bend(pushed), retain=retain)


def outputs_curvature(evaluation: Evaluation) -> Bend:
    """The product with the curvature of the loss as a function of the roots, u -> H u.

    Raises:
        CurvatureError: If the loss cannot be differentiated twice with respect to the outputs.
    """
    roots, leaves = evaluation.roots, evaluation.leaves
    if not leaves:
        return lambda pushed: [u / len(u) for u in _whole(pushed, roots)]
    slopes = derivatives([evaluation.loss], leaves, twice=True)

    def bend(pushed: Parts) -> list[Tensor]:
        return _whole(_along(slopes, leaves, _whole(pushed, leaves), retain=True), leaves)

    return bend


def _along(
    of: Parts, inputs: Sequence[Tensor], vectors: Sequence[Tensor], *, retain: bool
) -> Parts:
    """The derivatives of Σ ofᵢᵀvᵢ, with v constant, with respect to inputs."""
    curved = [(y, v) for y, v in zip(of, vectors, strict=True) if y is not None and y.requires_grad]
    if not curved:
        return [None] * len(inputs)
    with explained():
        return torch.autograd.grad(
            [y for y, _ in curved],
            inputs,
            [v for _, v in curved],
            retain_graph=retain,
            allow_unused=True,
        )


def _whole(parts: Parts, like: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(parts, like, strict=True)
    return [torch.zeros_like(z) if part is None else part for part, z in pairs]
