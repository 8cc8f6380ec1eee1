"""The loss of a batch, differentiated so far that its curvature can be multiplied by a vector.

Hessian            H v = ∇(gᵀv), g = ∇L with its graph
Gauss-Newton       J'HJ v: c -> J'c is linear in c, so that its derivative along v is J v
                   (a backward through a backward); then H, the loss's with respect to the
                   outputs; then J' (Schraudolph, 2002)
empirical Fisher   the same with the examples' losses for outputs and 1/N for H:
                   J'J/N = (1/N) Σ gᵢgᵢᵀ

What cannot be differentiated twice is told, with the operation and the remedy.
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

__all__ = ["Graph", "Parts", "derivatives", "remedied"]

Parts: TypeAlias = Sequence[Tensor | None]
"""A part for each parameter; None for zeros."""


class Graph:
    """A batch's curvature at parameters: the gradient, or J'c, with its graph.

    Attributes:
        gradients: The first derivatives; None for a parameter that the loss does not depend on.

    Raises:
        CurvatureError: If the loss cannot be differentiated twice.
    """

    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None:
        self._params, self._roots, self._leaves = params, evaluation.roots, evaluation.leaves
        self._slopes: Parts = []
        if self._leaves:
            self._slopes = derivatives([evaluation.loss], self._leaves, twice=True)
        self._cotangents: list[Tensor] | None = None
        if self._roots:
            self._cotangents = [torch.zeros_like(z, requires_grad=True) for z in self._roots]
        roots = self._roots or [evaluation.loss]
        self.gradients = derivatives(roots, params, self._cotangents, twice=True)

    def product(self, directions: Sequence[Tensor], *, retain: bool) -> Parts:
        """Multiply by a vector, a part for each parameter; ``retain`` if another one follows."""
        if self._cotangents is None:  # a gradient without a graph is constant
            return _along(self.gradients, self._params, directions, retain=retain)
        found = _along(self.gradients, self._cotangents, directions, retain=True)
        pushed = _whole(found, self._roots)
        if self._leaves:  # times the curvature of the loss as a function of the outputs
            curved = _along(self._slopes, self._leaves, pushed, retain=True)
            pushed = _whole(curved, self._leaves)
        else:
            pushed = [u / len(u) for u in pushed]
        return _along(self._roots, self._params, pushed, retain=retain)


def _along(
    of: Parts, inputs: Sequence[Tensor], vectors: Sequence[Tensor], *, retain: bool
) -> Parts:
    """The derivatives of Σ ofᵢᵀvᵢ, with v constant, with respect to inputs."""
    curved = [(y, v) for y, v in zip(of, vectors, strict=True) if y is not None and y.requires_grad]
    if not curved:
        return [None] * len(inputs)
    outputs, along = zip(*curved, strict=True)
    with remedied():
        return torch.autograd.grad(outputs, inputs, along, retain_graph=retain, allow_unused=True)


def _whole(parts: Parts, like: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(parts, like, strict=True)
    return [torch.zeros_like(z) if part is None else part for part, z in pairs]


def derivatives(
    roots: Sequence[Tensor],
    params: Sequence[Tensor],
    along: Sequence[Tensor] | None = None,
    *,
    twice: bool,
) -> list[Tensor | None]:
    """Compute the derivatives of roots with respect to parameters; None for one not reached.

    ``along`` are cotangents of roots that are no scalars; ``twice`` gives a graph, to be
    differentiated again.

    Raises:
        CurvatureError: If they cannot be differentiated, or not again though they are to be.
    """
    custom = _custom_functions(roots)
    with remedied():
        found = torch.autograd.grad(roots, params, along, create_graph=twice, allow_unused=True)
    for function in custom if twice else ():  # where the loss is linear in it, torch gives zeros
        if function.__name__ == "CompiledFunction":
            raise CurvatureError(_COMPILED)
        if _ONCE in (getattr(f, "__code__", None) for f in (function.backward, function.vjp)):
            raise CurvatureError(
                f"the autograd.Function {function.__name__} cannot be differentiated twice: it is "
                f"marked with @once_differentiable; write its backward in differentiable "
                f"operations, {_DIFFERENCES}"
            )
    if any(g is None for g in found) and CheckpointFunction in custom:
        raise CurvatureError(_REENTRANT)
    return list(found)


_DIFFERENCES = 'or use hvp="differences", which the Hessian has'
_REENTRANT = (
    "reentrant checkpointing cannot be differentiated by torch.autograd.grad; use "
    "checkpoint(..., use_reentrant=False)"
)
_COMPILED = (
    "a torch.compile-d function cannot be differentiated twice; evaluate the module that is not "
    f"compiled in the curvature closure, {_DIFFERENCES}"
)
_TOLD = {  # what autograd says, and what is to be done
    "modified by an inplace operation": (
        "the loss was evaluated before the parameters were last changed; let the curvature "
        "closure evaluate it anew each time it is called"
    ),
    "a second time": (
        "the graph of the curvature closure's loss is already freed; let the closure evaluate the "
        "loss and return it, without calling backward()"
    ),
    "donated buffer": _COMPILED,
    "use_reentrant=true": _REENTRANT,
}


@contextmanager
def remedied() -> Iterator[None]:
    """Turn autograd's errors on second derivatives into CurvatureErrors with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = str(error)
        for said, remedy in _TOLD.items():
            if said in text.lower():
                raise CurvatureError(remedy) from error
        missing = re.search(r"derivative for '?([\w:.]+)'? is not implemented", text)
        if missing:
            raise CurvatureError(
                f"{missing[1]} has no derivative in torch, so that the loss cannot be "
                f"differentiated twice; replace the operation in the curvature closure, "
                f"{_DIFFERENCES}"
            ) from error
        raise CurvatureError(f"the loss could not be differentiated: {text}") from error


_ONCE = once_differentiable(lambda ctx: None).__code__


def _custom_functions(roots: Sequence[Tensor]) -> list[Any]:
    """The custom autograd functions in a graph."""
    found: list[Any] = []
    stack: list[Any] = [root.grad_fn for root in roots]
    seen = set(stack)
    while stack:
        node = stack.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None:
            found.append(function)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found
