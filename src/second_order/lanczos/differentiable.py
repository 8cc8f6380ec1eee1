"""A batch's loss, differentiated once, so that its curvature can be multiplied by vectors.

    Hessian            H v = ∇(gᵀv), where g = ∇L has a graph
    Gauss-Newton       J'HJ v. c -> J'c is linear in c, and its derivative in direction v is J v (a
                       backward through a backward). Then multiply by H, the Hessian of the loss
                       with respect to the outputs, and by J' (Schraudolph, 2002)
    empirical Fisher   the same with the examples' losses as outputs and 1/N as H:
                       J'J/N = (1/N) Σ gᵢgᵢᵀ

If a loss cannot be differentiated twice, the error names the operation and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction

from second_order.errors import CurvatureError
from second_order.lanczos.closure import Evaluation

__all__ = ["Derivatives", "DifferentiableLoss", "derivatives", "explain_errors"]

Derivatives: TypeAlias = Sequence[Tensor | None]
"""One derivative per parameter. None: the parameter is not in the graph."""


class DifferentiableLoss:
    """The loss of a batch, with a graph of its first derivatives.

    Attributes:
        examples: The number of examples.
        gradients: g, or J'c for "gauss-newton" and "empirical-fisher", with a graph.

    Raises:
        CurvatureError: If the loss cannot be differentiated twice.
    """

    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None:
        self.examples = evaluation.examples
        self._params = params
        self._roots = evaluation.roots
        self._leaves = evaluation.leaves

        # Gauss-Newton: the derivatives of the loss with respect to the outputs.
        self._output_gradients: Derivatives = []
        if self._leaves:
            self._output_gradients = derivatives([evaluation.loss], self._leaves, twice=True)

        self._cotangents: list[Tensor] | None = None  # c; its values do not matter
        roots = [evaluation.loss]
        if self._roots:
            roots = self._roots
            self._cotangents = [torch.zeros_like(z, requires_grad=True) for z in self._roots]
        self.gradients = derivatives(roots, params, self._cotangents, twice=True)

    def product(self, directions: Sequence[Tensor], *, retain: bool) -> Derivatives:
        """Multiply the curvature by a vector.

        Args:
            directions: The vector's part for each parameter, in the parameter's shape.
            retain: Whether to retain the graph for another product.
        """
        if self._cotangents is None:
            return _vector_products(self.gradients, self._params, directions, retain=retain)

        # J v
        products = _vector_products(self.gradients, self._cotangents, directions, retain=True)
        pushed = _fill_zeros(products, self._roots)

        # H J v
        if self._leaves:
            products = _vector_products(self._output_gradients, self._leaves, pushed, retain=True)
            pushed = _fill_zeros(products, self._leaves)
        else:
            pushed = [u / len(u) for u in pushed]

        # J' H J v
        return _vector_products(self._roots, self._params, pushed, retain=retain)


def _vector_products(
    functions: Derivatives, inputs: Sequence[Tensor], vectors: Sequence[Tensor], *, retain: bool
) -> Derivatives:
    """Return the derivatives of Σ fᵢᵀvᵢ with respect to the inputs, where v is constant.

    Functions that are None or without a graph are constant as well, and are left out.
    """
    outputs = []
    grad_outputs = []
    for function, vector in zip(functions, vectors, strict=True):
        if function is not None and function.requires_grad:
            outputs.append(function)
            grad_outputs.append(vector)
    if not outputs:
        return [None] * len(inputs)
    with explain_errors():
        return torch.autograd.grad(
            outputs, inputs, grad_outputs, retain_graph=retain, allow_unused=True
        )


def _fill_zeros(parts: Derivatives, like: Sequence[Tensor]) -> list[Tensor]:
    """Replace None by zeros."""
    pairs = zip(parts, like, strict=True)
    return [torch.zeros_like(z) if part is None else part for part, z in pairs]


def derivatives(
    roots: Sequence[Tensor],
    params: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    *,
    twice: bool,
) -> list[Tensor | None]:
    """Compute the derivatives of roots with respect to parameters.

    Args:
        roots: The tensors to differentiate.
        params: The parameters.
        cotangents: The factors of the roots' elements, if the roots are not scalars.
        twice: Whether the result gets a graph, to be differentiated again.

    Raises:
        CurvatureError: If the roots cannot be differentiated, or not as often as needed.
    """
    functions = _custom_functions(roots)
    with explain_errors():
        gradients = torch.autograd.grad(
            roots, params, cotangents, create_graph=twice, allow_unused=True
        )
    if twice:
        # torch would silently return zeros for the second derivatives.
        for function in functions:
            _check_twice_differentiable(function)
    if any(g is None for g in gradients) and CheckpointFunction in functions:
        raise CurvatureError(_REENTRANT)
    return list(gradients)


_USE_DIFFERENCES = 'or use hvp="differences", which supports the Hessian'
_REENTRANT = (
    "torch.autograd.grad cannot differentiate a reentrant checkpoint; use "
    "checkpoint(..., use_reentrant=False)"
)
_COMPILED = (
    "a function compiled by torch.compile cannot be differentiated twice; evaluate the uncompiled "
    f"module in the curvature closure, {_USE_DIFFERENCES}"
)
_REMEDIES = {  # by a part of autograd's message
    "modified by an inplace operation": (
        "the loss was evaluated before the parameters were last changed; evaluate it in every "
        "call of the curvature closure"
    ),
    "a second time": (
        "the graph of the curvature closure's loss has already been freed; evaluate the loss in "
        "the closure and return it, without calling backward()"
    ),
    "donated buffer": _COMPILED,
    "use_reentrant=true": _REENTRANT,
}


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn autograd's errors on second derivatives into CurvatureErrors with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        message = str(error)
        for part, remedy in _REMEDIES.items():
            if part in message.lower():
                raise CurvatureError(remedy) from error
        missing = re.search(r"derivative for '?([\w:.]+)'? is not implemented", message)
        if missing:
            raise CurvatureError(
                f"torch has no derivative of {missing[1]}, so the loss cannot be differentiated "
                f"twice; replace the operation in the curvature closure, {_USE_DIFFERENCES}"
            ) from error
        raise CurvatureError(f"the loss could not be differentiated: {message}") from error


# The code that @once_differentiable wraps around a backward.
_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__


def _check_twice_differentiable(function: Any) -> None:
    """Raise CurvatureError if an autograd function has no second derivative."""
    if function.__name__ == "CompiledFunction":
        raise CurvatureError(_COMPILED)
    for method in (function.backward, function.vjp):
        if getattr(method, "__code__", None) == _ONCE_DIFFERENTIABLE:
            raise CurvatureError(
                f"the autograd.Function {function.__name__} cannot be differentiated twice, "
                f"because it is marked with @once_differentiable; write its backward in "
                f"differentiable operations, {_USE_DIFFERENCES}"
            )


def _custom_functions(roots: Sequence[Tensor]) -> list[Any]:
    """Return the custom autograd functions in a graph."""
    functions: list[Any] = []
    stack: list[Any] = [root.grad_fn for root in roots]
    seen = set(stack)
    while stack:
        node = stack.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None:
            functions.append(function)
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                stack.append(next_node)
    return functions
