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
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame

from second_order.kronecker.autograd import Passes

__all__ = [
    "DRAWING",
    "Outlet",
    "forget_all_graphs",
    "forget_graphs",
    "frames_compiled",
    "keep_saved_tensors",
    "let_saved_tensors_go",
    "numbered",
    "outlet_of",
    "watched",
]

NUMBER = re.compile(r"\d+")

_needed: dict[int, bool] = {}  # by who needs saved tensors, the setting that he has found
_numbers = itertools.count()
_outlets: weakref.WeakValueDictionary[int, Outlet] = weakref.WeakValueDictionary()


DRAWING = Passes()
"""The passes inside of graphs whose gradients are those of drawn labels, and no outlet's."""


def numbered(number: int) -> Tensor:
    """A scalar by which graphs know an object, and that asks for a gradient."""
    with torch.inference_mode(False):
        anchor = torch.tensor(float(number), dtype=torch.float64, device="cpu")
        return anchor.requires_grad_()


class Outlet:
    """Where graphs hand over the pairs of one layer, as long as anybody has it.

    Args:
        receive: Takes a pair, the layer's input and the gradient of its output, and the number of
            the draw where labels were drawn. No tensor may be kept or changed: a graph uses their
            memory again.

    Attributes:
        anchor: The scalar that graphs know the outlet by.
    """

    def __init__(self, receive: Callable[[Tensor, Tensor, int | None], None]) -> None:
        self.receive = receive
        number = next(_numbers)
        self.anchor = numbered(number)
        _outlets[number] = self


def outlet_of(anchor: Tensor) -> Outlet | None:
    """The outlet of an anchor, if anybody still has it."""
    return _outlets.get(int(anchor))


def _deliver(x: Tensor, d: Tensor, anchor: Tensor) -> Tensor:
    outlet = outlet_of(anchor)
    if outlet is not None:
        outlet.receive(x, d, None)
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
        if DRAWING.running:
            return None, d, None
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


def frames_compiled() -> int:
    """The number of frames compiled since graphs were last forgotten."""
    tracer = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if tracer is None else int(getattr(tracer, "FRAME_COUNTER", 1))


def forget_graphs(modules: Iterable[nn.Module]) -> None:
    """Let functions be compiled anew whose graphs may have modules in them with new hooks.

    Graphs do not look for hooks that are new. A graph knows the classes of its modules, by guards,
    and serves other modules of these classes.
    """
    tracer: Any = sys.modules.get("torch._dynamo.convert_frame")
    if tracer is None:
        return
    classes = {str(id(type(module))) for module in modules}
    with tracer.compile_lock:
        for code in filter(None, [known() for known in tracer.input_codes.seen]):
            graphs = eval_frame._debug_get_cache_entry_list(code)
            guards = (NUMBER.findall(str(graph.guard_manager)) for graph in graphs)
            if not all(classes.isdisjoint(numbers) for numbers in guards):
                cast(Any, eval_frame).reset_code(code)


def forget_all_graphs() -> None:
    """Let every compiled function be compiled anew."""
    if frames_compiled():
        torch.compiler.reset()


def keep_saved_tensors(owner: int) -> None:
    """Let the backward of graphs yet to be compiled leave what it has saved, as an eager one does.

    Else it may be run once only, and drawn labels need it before the user does.

    Args:
        owner: A number of who needs it, until :func:`let_saved_tensors_go`.
    """
    config: Any = sys.modules.get("torch._functorch.config")
    if hasattr(config, "donated_buffer"):
        _needed.setdefault(owner, config.donated_buffer)
        config.donated_buffer = False


def let_saved_tensors_go(owner: int) -> None:
    """Take a need back; the last one sets the compiler back to what it was before the first."""
    before = _needed.pop(owner, None)
    if before is None:
        return
    if _needed:  # who remains has found it as we had set it
        first = next(iter(_needed))
        _needed[first] = _needed[first] or before
    else:
        cast(Any, sys.modules["torch._functorch.config"]).donated_buffer = before
