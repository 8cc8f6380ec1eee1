"""Pairs from inside graphs of ``torch.compile``.

Hooks step aside while a model is exported, and a compiler traces them with their modules. A graph
does not look for hooks that are new: hooks stay on their modules while the capture lives, and the
graph depends on the capture's gate.

No hook can be hung on a tensor inside a graph; there the layer's output goes through an operator
that gives it on as it is, and whose derivative hands the pair over:

    forward     output = second_order::watch(x, output, anchor)
    backward    gradient of anchor = second_order::deliver(x, d, anchor), which is 0

``watch`` is made of operators that compilers know, and costs no copy; ``deliver`` is opaque to them
and runs Python. The anchor is a scalar with two tasks. Its value is the number of a hook: as an
input of the graph, so that blocks of one kind share a graph. And it asks for a gradient: as a
result of the backward graph that keeps the call, which would be dropped as dead code otherwise.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.autograd import inside_functorch, is_attention, to_compute_dtype
from second_order.kronecker.experts import is_experts, is_router

__all__ = ["anchor_of", "capture_output", "has_pair", "hides_products", "is_exporting"]

_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def anchor_of(hook: Any) -> Tensor:
    """A new anchor, for the pairs that ``hook.receive(x, d)`` takes."""
    number = next(_numbers)
    _hooks[number] = hook
    with torch.inference_mode(False):
        anchor = torch.tensor(float(number), dtype=torch.float64, device="cpu")
        return anchor.requires_grad_()


def is_exporting() -> bool:
    """Whether torch.export is at work. Before torch 2.13 its own function says so in compilers."""
    return torch.compiler._is_exporting_flag


def hides_products(module: nn.Module) -> bool:
    """Whether a module's products cannot be seen by its output within a graph."""
    return is_attention(module) or is_experts(module) or is_router(module)


def has_pair(module: nn.Module, x: Any, output: Any) -> bool:
    """Whether a call inside a graph will have a pair."""
    return (
        torch.is_grad_enabled()
        and isinstance(x, Tensor)
        and isinstance(output, Tensor)
        and output.requires_grad
        and any(p is not None and p.requires_grad for p in module._parameters.values())
        and not inside_functorch()
    )


def capture_output(x: Tensor, output: Tensor, anchor: Tensor) -> Tensor:
    """The output, whose gradient will be delivered with x; a part of the graph."""
    return cast(Tensor, torch.ops.second_order.watch(to_compute_dtype(x).detach(), output, anchor))


# ------------------------------------------------------------------------- operators inside graphs


def _deliver(x: Tensor, d: Tensor, anchor: Tensor) -> Tensor:
    hook = _hooks.get(int(anchor))
    if hook is not None:
        hook.receive(x, d)
    return torch.zeros_like(anchor)


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x, anchor)
        return output.clone()  # a view could not be changed in place; compilers spare the copy

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, anchor = ctx.saved_tensors
        return None, d, torch.ops.second_order.deliver(x, d, anchor)


def _watch(x: Tensor, output: Tensor, anchor: Tensor) -> Tensor:
    return cast(Tensor, _Watch.apply(x, output, anchor))  # type: ignore[no-untyped-call]


# Inductor keeps compiled graphs on disk by the operators' names: a change of what `deliver`
# returns, in number, shape or dtype, needs another name.
_library = torch.library.Library("second_order", "FRAGMENT")
_library.define(
    "deliver(Tensor x, Tensor d, Tensor anchor) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,)
)
# Not by torch.library.custom_op, below whose kernels there is no autograd to ask about its graph.
# What takes a pair in is not compiled, where the function around `backward` is.
_library.impl("deliver", torch.compiler.disable(_deliver), "CompositeExplicitAutograd")
torch.library.register_fake(
    "second_order::deliver", lambda x, d, anchor: torch.empty_like(anchor), lib=_library
)
# Decomposed by compilers, where autograd.Function by itself would be a graph of its own within the
# graph, which DistributedDataParallel's splitting of graphs refuses.
_library.define("watch(Tensor x, Tensor output, Tensor anchor) -> Tensor")
_library.impl("watch", _watch, "CompositeImplicitAutograd")
