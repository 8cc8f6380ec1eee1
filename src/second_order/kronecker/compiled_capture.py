"""Capture pairs inside the graphs of ``torch.compile``.

Dynamo traces the forward hooks together with their modules. A compiled graph does not
look for new hooks, so the hooks stay on their modules while the capture lives, and the
graph guards on the capture's gate. While a model is exported, the hooks do nothing.

A graph cannot register a hook on a tensor. Instead, the layer's output goes through an
operator that returns it unchanged and whose derivative delivers the pair:

    forward     output = second_order::capture(x, output, anchor)
    backward    gradient of anchor = second_order::deliver(x, d, anchor), which is 0

``capture`` is composed of operators that Inductor knows, so that it costs no copy.
``deliver`` is opaque to Inductor, and runs Python. The anchor is a scalar with two
purposes. Its value is the number of a hook; because it is an input of the graph, blocks
of one kind share a graph. And it requires a gradient, which makes the call of
``deliver`` an output of the backward graph. Otherwise the call would be removed as dead
code.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.autograd import (
    inside_functorch,
    is_attention,
    to_compute_dtype,
)
from second_order.kronecker.experts import is_experts, is_router

__all__ = ["anchor_of", "capture_output", "has_pair", "hides_products", "is_exporting"]


class Receiver(Protocol):
    """A hook that receives the pairs of its anchor."""

    def receive(self, x: Tensor, gradient: Tensor) -> None:
        """Receive a pair. The memory of the tensors belongs to the graph."""


_hook_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()


def anchor_of(hook: Receiver) -> Tensor:
    """Return a new anchor, whose pairs go to a hook as long as the hook exists."""
    number = next(_hook_numbers)
    _hooks[number] = hook
    with torch.inference_mode(False):
        anchor = torch.tensor(float(number), dtype=torch.float64, device="cpu")
        return anchor.requires_grad_()


def is_exporting() -> bool:
    """Whether torch.export is running.

    Before torch 2.13, ``torch.compiler.is_exporting()`` is also true inside
    ``torch.compile``.
    """
    return torch.compiler._is_exporting_flag


def hides_products(module: nn.Module) -> bool:
    """Whether a graph hides a module's matrix products from a hook on its output."""
    return is_attention(module) or is_experts(module) or is_router(module)


def has_pair(module: nn.Module, x: Any, output: Any) -> bool:
    """Whether a call inside a graph will have a pair."""
    if not torch.is_grad_enabled() or inside_functorch():
        return False
    if not isinstance(x, Tensor) or not isinstance(output, Tensor):
        return False
    if not output.requires_grad:
        return False
    return any(p is not None and p.requires_grad for p in module._parameters.values())


def capture_output(x: Tensor, output: Tensor, anchor: Tensor) -> Tensor:
    """Return the output, with a derivative that delivers its gradient and x."""
    x = to_compute_dtype(x).detach()
    return cast(Tensor, torch.ops.second_order.capture(x, output, anchor))


# -------------------------------------------------------------- operators inside graphs


def _deliver(x: Tensor, d: Tensor, anchor: Tensor) -> Tensor:
    hook = _hooks.get(int(anchor))
    if hook is not None:
        hook.receive(x, d)
    return torch.zeros_like(anchor)


class _Capture(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x, anchor)
        # A view could not be changed in place. Inductor removes the copy.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, anchor = ctx.saved_tensors
        return None, d, torch.ops.second_order.deliver(x, d, anchor)


def _capture(x: Tensor, output: Tensor, anchor: Tensor) -> Tensor:
    return cast(Tensor, _Capture.apply(x, output, anchor))  # type: ignore[no-untyped-call]


# Inductor caches compiled graphs on disk by the names of their operators. If the
# number, shape or dtype of what `deliver` returns changes, rename it.
_library = torch.library.Library("second_order", "FRAGMENT")
_library.define(
    "deliver(Tensor x, Tensor d, Tensor anchor) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
# `deliver` reads the running pass from autograd, which the kernels of
# torch.library.custom_op cannot. It is disabled for the compiler, because AOTAutograd
# compiles the code that calls `backward`.
_library.impl("deliver", torch.compiler.disable(_deliver), "CompositeExplicitAutograd")
torch.library.register_fake(
    "second_order::deliver", lambda x, d, anchor: torch.empty_like(anchor), lib=_library
)
# `capture` is a composite operator, which compilers decompose. An autograd.Function
# alone becomes a subgraph, which DistributedDataParallel's graph splitting refuses.
_library.define("capture(Tensor x, Tensor output, Tensor anchor) -> Tensor")
_library.impl("capture", _capture, "CompositeImplicitAutograd")
