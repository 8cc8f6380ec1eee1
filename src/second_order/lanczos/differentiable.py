"""Derivatives that can be differentiated again, and errors that say why some cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction

from second_order.errors import CurvatureError

__all__ = ["derivatives", "explained"]


def derivatives(
    roots: Sequence[Tensor],
    params: Sequence[Tensor],
    along: Sequence[Tensor] | None = None,
    *,
    twice: bool,
) -> list[Tensor | None]:
    """Compute the derivatives of roots with respect to parameters; None for one not reached.

    Args:
        roots: What to differentiate.
        params: With respect to what.
        along: A cotangent of each root; None for scalar roots.
        twice: Whether they get a graph, to be differentiated again.

    Raises:
        CurvatureError: If they cannot be differentiated, or not again though they are to be.
    """
    custom = _custom_functions(roots)
    used: list[Any] = []
    hooks = [node.register_prehook(partial(_note, used, f)) for node, f in custom]
    try:
        with explained():
            found = torch.autograd.grad(roots, params, along, create_graph=twice, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    if twice:
        _require_second_derivatives(used)
    if any(g is None for g in found) and any(f is CheckpointFunction for _, f in custom):
        raise CurvatureError(_REENTRANT)
    return list(found)


_DIFFERENCES = 'or use hvp="differences"'
_REENTRANT = (
    "reentrant checkpointing cannot be differentiated by torch.autograd.grad; use "
    "checkpoint(..., use_reentrant=False)"
)
_COMPILED = (
    "a torch.compile-d function cannot be differentiated twice; evaluate the module that is not "
    f"compiled in the curvature closure, {_DIFFERENCES}"
)


@contextmanager
def explained() -> Iterator[None]:
    """Turn autograd's errors on second derivatives into CurvatureErrors with a remedy."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if "modified by an inplace operation" in text:
            raise CurvatureError(
                "the loss was evaluated before the parameters were last changed; let the curvature "
                "closure evaluate it anew each time it is called"
            ) from error
        if "a second time" in text:
            raise CurvatureError(
                "the graph of the curvature closure's loss is already freed; let the closure "
                "evaluate the loss and return it, without calling backward()"
            ) from error
        if "rnn" in text.lower() and "cudnn" in text.lower():
            raise CurvatureError(
                "cuDNN's recurrent layers cannot be differentiated twice; set "
                f"torch.backends.cudnn.enabled = False in the curvature closure, {_DIFFERENCES}"
            ) from error
        if "donated buffer" in text:
            raise CurvatureError(_COMPILED) from error
        if "use_reentrant=True" in text:
            raise CurvatureError(_REENTRANT) from error
        missing = re.search(r"derivative for '?([\w:.]+)'? is not implemented", text)
        if missing:
            raise CurvatureError(
                f"{missing[1]} has no derivative in torch, so that the loss cannot be "
                f"differentiated twice; replace the operation in the curvature closure, "
                f"{_DIFFERENCES}"
            ) from error
        raise CurvatureError(f"the loss could not be differentiated: {text}") from error


_ONCE = once_differentiable(lambda ctx: None).__code__


def _custom_functions(roots: Sequence[Tensor]) -> list[tuple[Any, Any]]:
    """The nodes of a graph that are custom autograd functions, each with its function."""
    found = []
    stack: list[Any] = [root.grad_fn for root in roots]
    seen = set(stack)
    while stack:
        node = stack.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None:
            found.append((node, function))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def _note(used: list[Any], function: Any, _: Any) -> None:
    used.append(function)


def _require_second_derivatives(functions: Sequence[Any]) -> None:
    """Raise if a function has none: torch takes it for constant if the loss is linear in it."""
    for function in functions:
        if function.__name__ == "CompiledFunction":
            raise CurvatureError(_COMPILED)
        if _ONCE in (getattr(f, "__code__", None) for f in (function.backward, function.vjp)):
            raise CurvatureError(
                f"the autograd.Function {function.__name__} cannot be differentiated twice: it is "
                f"marked with @once_differentiable; write its backward in differentiable "
                f"operations, {_DIFFERENCES}"
            )
