"""Pairs from inside the graphs of ``torch.compile``.

A compiler traces a module's hooks with the module. No hook can be hung on a tensor inside a graph;
there the layer's output goes through an operator that gives it on as it is, and whose derivative
hands the pair over:

    forward     output = second_order::watch(x, output, anchor)
    backward    gradient of anchor = second_order::deliver(x, d, anchor), which is 0

``watch`` is made of operators that compilers know, and costs no copy; ``deliver`` is opaque to them
and runs Python. The anchor is a scalar with two tasks. Its value is the number of an outlet: as an
input of the graph, so that blocks of one kind share a graph. And it asks for a gradient: as a
result of the backward graph that keeps the call, which would be dropped as dead code otherwise.

A graph that watches nothing has neither operator: whether to watch is a condition of the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["Outlet", "watched"]

_numbers = itertools.count()
_outlets: weakref.WeakValueDictionary[int, Outlet] = weakref.WeakValueDictionary()


class Outlet:
    """Where graphs hand over the pairs of one layer, as long as anybody has it.

    Args:
        receive: Takes a pair, the layer's input and the gradient of its output. Neither may be kept
            or changed: a graph uses their memory again.

    Attributes:
        anchor: The scalar that graphs know the outlet by.
    """

    def __init__(self, receive: Callable[[Tensor, Tensor], None]) -> None:
        self.receive = receive
        number = next(_numbers)
        with torch.inference_mode(False):
            anchor = torch.tensor(float(number), dtype=torch.float64, device="cpu")
            self.anchor = anchor.requires_grad_()
        _outlets[number] = self


def _deliver(x: Tensor, d: Tensor, anchor: Tensor) -> Tensor:
    outlet = _outlets.get(int(anchor))
    if outlet is not None:
        outlet.receive(x, d)
    return torch.zeros_like(anchor)


def _delivered(x: Tensor, d: Tensor, anchor: Tensor) -> Tensor:
    """The result of :func:`_deliver` in kind, for compilers."""
    return torch.empty_like(anchor)


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
torch.library.register_fake("second_order::deliver", _delivered, lib=_library)
# Decomposed by compilers, where autograd.Function by itself would be a graph of its own within the
# graph, which DistributedDataParallel's splitting of graphs refuses.
_library.define("watch(Tensor x, Tensor output, Tensor anchor) -> Tensor")
_library.impl("watch", _watch, "CompositeImplicitAutograd")


def watched(x: Tensor, output: Tensor, anchor: Tensor) -> Tensor:
    """A layer's output, whose gradient will go to an outlet; for use inside a graph.

    Args:
        x: The layer's input.
        output: The layer's output.
        anchor: The outlet's.
    """
    return cast(Tensor, torch.ops.second_order.watch(x, output, anchor))
