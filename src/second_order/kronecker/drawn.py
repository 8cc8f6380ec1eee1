"""Pairs of drawn labels from inside the graphs of ``torch.compile``.

The sampled Fisher takes its gradients before the user's backward, as soon as the model's output is
there. Where the graph has the whole model, from its beginning to its output, it has that pass, too:

    forward     d output = second_order::draw(output, ..., anchor), of labels drawn in Python
                d of each layer = the derivative of its way to the output, applied to d output
    backward    gradient of a layer's anchor = second_order::hand_over(x, d, ..., anchor), 0

All of it is ``second_order::drawn``, made of operators that compilers know; ``draw`` and
``hand_over`` are opaque to them and run Python. Pairs are handed over once the user's backward
reaches the model's output, as without a compiler (:mod:`second_order.kronecker.capture`).

This is for graphs that have the hooks of the model itself, as those of a compiled function that
calls the model. Other graphs, as those of ``torch.compile(model)`` for most classes of models, end
before the model's output is seen, and Python draws between them and the user's backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import TracingContext

from second_order.kronecker.autograd import differentiable_tensors
from second_order.kronecker.compiled import DRAWING, numbered, outlet_of
from second_order.sharded import ddp_under_way

__all__ = ["NOTHING_DRAWN", "Draws", "begins", "ends", "is_inside", "through"]

NOTHING_DRAWN = -1
"""The number of a draw that gave no gradient."""

_names = itertools.count()
_known: weakref.WeakValueDictionary[int, Draws] = weakref.WeakValueDictionary()
_inside: weakref.WeakKeyDictionary[TracingContext, set[str]] = weakref.WeakKeyDictionary()


class Draws:
    """What draws labels from a model's output, as graphs know it.

    Args:
        draw: Gives the gradient of the loss on drawn labels with respect to an output, and the
            number of the draw, :data:`NOTHING_DRAWN` if the loss has no gradient.
        reads: Gives the tensor in the model's output that labels are drawn from, None if that is
            not one tensor.

    Attributes:
        anchor: The scalar that graphs know the object by.
        name: The name that traces know it by.
        waiting: While a graph is traced, the input, the output and the anchor of each layer called.
    """

    def __init__(
        self,
        draw: Callable[[Tensor], tuple[Tensor, int]],
        reads: Callable[[Any], Tensor | None],
    ) -> None:
        self.draw, self.reads = draw, reads
        number = next(_names)
        self.name, self.anchor = f"draws {number}", numbered(number)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        _known[number] = self


# --------------------------------------------------------------- which part of the model is traced


def _when_traced(function: Callable[[str], bool]) -> Callable[[str], bool]:
    """Decorate a question whose answer is a constant of the graph that is being traced."""
    return cast(Callable[[str], bool], torch.compiler.assume_constant_result(function))


@_when_traced
def begins(name: str) -> bool:
    """Note that the graph now traced has the model's beginning; returns whether it may have all.

    Not where DistributedDataParallel splits the graph, or graphs break inside of calls.
    """
    graph = TracingContext.try_get()
    config = torch._dynamo.config
    split = ddp_under_way() is not None and config.optimize_ddp is not False
    if graph is None or split or getattr(config, "nested_graph_breaks", False):
        return False
    _inside.setdefault(graph, set()).add(name)
    return True


@_when_traced
def is_inside(name: str) -> bool:
    """Whether the graph now traced has the model from its beginning to here."""
    graph = TracingContext.try_get()
    return graph is not None and name in _inside.get(graph, ())


@_when_traced
def ends(name: str) -> bool:
    """Note that the model's output is reached; returns whether its beginning is in this graph."""
    graph = TracingContext.try_get()
    names = set() if graph is None else _inside.get(graph, set())
    found = name in names
    names.discard(name)
    return found


# --------------------------------------------------------------------------------- the operators


def _draw(output: Tensor, given: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    draws = _known.get(int(anchor))
    gradient, call = torch.zeros_like(output), NOTHING_DRAWN
    if draws is not None:
        # A compiler may be looking on from below autograd, which then is switched off.
        autograd = torch._C.DispatchKey.AutogradFunctionality
        with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
            gradient, call = draws.draw(output.detach())
    return gradient, torch.full_like(anchor, call), given.clone()


def _drawn_in_kind(output: Tensor, given: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(output), torch.empty_like(anchor), torch.empty_like(given)


def _hand_over(x: Tensor, d: Tensor, call: Tensor, arrived: Tensor, anchor: Tensor) -> Tensor:
    outlet, number = outlet_of(anchor), int(call)
    if outlet is not None and number != NOTHING_DRAWN:
        outlet.receive(x, d, number)
    return torch.zeros_like(anchor)


def _handed_over_in_kind(
    x: Tensor, d: Tensor, call: Tensor, arrived: Tensor, anchor: Tensor
) -> Tensor:
    return torch.empty_like(anchor)


class _HandOver(torch.autograd.Function):
    """Gives tensors on, and hands pairs over once a gradient reaches any of them."""

    @staticmethod
    def forward(
        ctx: Any, call: Tensor, first: Tensor, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, ctx.pairs = tensors[:count], (len(tensors) - count) // 3
        ctx.save_for_backward(call, *tensors[count:])
        return tuple(output.clone() for output in (first, *outputs[1:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call, *kept = ctx.saved_tensors
        xs, ds, anchors = (kept[i * ctx.pairs : (i + 1) * ctx.pairs] for i in range(3))
        nothing = [None] * ctx.pairs
        if DRAWING.running:
            return (None, None, None, *gradients, *nothing, *nothing, *nothing)
        # Of what has arrived nothing is used; but without it a compiler would not wait for it.
        zeros = [
            torch.ops.second_order.hand_over(x, d, call, gradients[0], anchor)
            for x, d, anchor in zip(xs, ds, anchors, strict=True)
        ]
        return (None, None, None, *gradients, *nothing, *nothing, *zeros)


def _drawn(
    read: Tensor,
    outputs: list[Tensor],
    xs: list[Tensor],
    layers: list[Tensor],
    anchors: list[Tensor],
    anchor: Tensor,
) -> list[Tensor]:
    # One output comes from there: a compiler leaves to the backward what the forward does not need,
    # and passes would be counted in another order.
    gradient, call, first = torch.ops.second_order.draw(
        read.detach(), outputs[0].detach(), anchor.detach()
    )
    with DRAWING.beginning_at(read):
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            read, layers, gradient, retain_graph=True, allow_unused=True
        )
    reached = [
        (x, d.detach(), own)
        for x, d, own in zip(xs, gradients, anchors, strict=True)
        if d is not None
    ]
    if not reached:
        return [output.clone() for output in outputs]
    pairs = [part for parts in zip(*reached, strict=True) for part in parts]
    given = _HandOver.apply(call, first, len(outputs), *outputs, *pairs)  # type: ignore[no-untyped-call]
    return list(given)


_library = torch.library.Library("second_order", "FRAGMENT")
_opaque = (torch.Tag.cudagraph_unsafe,)
_library.define(
    "draw(Tensor output, Tensor given, Tensor anchor) -> (Tensor, Tensor, Tensor)", tags=_opaque
)
_library.impl("draw", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("second_order::draw", _drawn_in_kind, lib=_library)
_library.define(
    "hand_over(Tensor x, Tensor d, Tensor call, Tensor arrived, Tensor anchor) -> Tensor",
    tags=_opaque,
)
_library.impl("hand_over", _hand_over, "CompositeExplicitAutograd")
torch.library.register_fake("second_order::hand_over", _handed_over_in_kind, lib=_library)
_library.define(
    "drawn(Tensor read, Tensor[] outputs, Tensor[] xs, Tensor[] layers, Tensor[] anchors, "
    "Tensor anchor) -> Tensor[]"
)
_library.impl("drawn", _drawn, "CompositeImplicitAutograd")


# ----------------------------------------------------------------------- for use inside of a graph


def through(draws: Draws, read: Tensor, output: Any) -> Any:
    """A model's output, from which labels are drawn for the layers that wait.

    Args:
        draws: What draws; no layer waits afterwards.
        read: The tensor in the output that labels are drawn from.
        output: The output, of any form that :func:`differentiable_tensors` looks into.

    Returns:
        The output, whose tensors hand the pairs over in the backward; objects that are not tensors,
        lists, tuples or plain dictionaries are changed in place.
    """
    xs, layers, anchors = ([each[i] for each in draws.waiting] for i in range(3))
    draws.waiting.clear()
    given = torch.ops.second_order.drawn(
        read, differentiable_tensors(output), xs, layers, anchors, draws.anchor
    )
    return _with_tensors(output, iter(given))


def _with_tensors(output: Any, given: Iterator[Tensor]) -> Any:
    """An output with other differentiable tensors, in their order."""
    if isinstance(output, Tensor):
        return next(given) if output.requires_grad else output
    if type(output) is dict:
        return {key: _with_tensors(part, given) for key, part in output.items()}
    if isinstance(output, Mapping):
        for key in list(output):
            cast(Any, output)[key] = _with_tensors(output[key], given)
        return output
    if isinstance(output, (list, tuple)):
        return _sequence(output, [_with_tensors(part, given) for part in output])
    for name, part in list(getattr(output, "__dict__", {}).items()):
        setattr(output, name, _with_tensors(part, given))
    return output


def _sequence(like: Sequence[Any], parts: list[Any]) -> Any:
    kind: Any = type(like)
    return kind(*parts) if hasattr(like, "_fields") else kind(parts)
