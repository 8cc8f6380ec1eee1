"""Hooks on modules: what they tell whom, eagerly and inside graphs of ``torch.compile``.

A hook holds weak references only, and its copies are idle, so that a pickled or deep-copied model
takes no optimizer along. Hooks step aside while a model is exported, and a compiler traces them
with their modules. A graph does not look for hooks that are new: hooks stay on their modules while
anybody watches the model, and what a graph depends on is who watches, and whether it is wanted now.

No hook can be hung on a tensor inside a graph; there the layer's output goes through an operator
that gives it on as it is, and whose derivative hands the pair over:

    forward     output = second_order::watch(x, output, anchor)
    backward    gradient of anchor = second_order::deliver(x, d, anchor), which is 0

``watch`` is made of operators that compilers know, and costs no copy; ``deliver`` is opaque to them
and runs Python. The anchor is a scalar with two tasks. Its value is the number of a watch: as an
input of the graph, so that blocks of one kind share a graph. And it asks for a gradient: as a
result of the backward graph that keeps the call, which would be dropped as dead code otherwise.

For drawn labels, where they are due, the hook before the model's forward ends the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError
from second_order.kronecker.autograd import as_used, is_attention, skip_code, transformed
from second_order.kronecker.experts import is_experts, is_router

__all__ = ["LayerHook", "RootHook", "RootPreHook", "Watch", "hook_of", "is_hidden", "release"]

SCRIPTED = (
    "torch.jit.script cannot compile the hooks by which an optimizer of second_order watches this "
    "model; script it inside `with optimizer.hooks_removed():`, or after optimizer.close()"
)
DRAWN = (
    "a fisher that samples labels runs the model without torch.compile at steps with statistics, "
    "where its graph ends: leave fullgraph off, or use fisher='empirical'"
)
PART = (
    "a fisher that samples labels runs the model without torch.compile at steps with statistics, "
    "and does not know of parts compiled by themselves, as by block.compile(), or called by "
    "themselves: compile the whole model that the optimizer was given, and call that, or use "
    "fisher='empirical'"
)
_numbers = itertools.count()
_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()


class Gate:
    """Whether calls are wanted now; a condition of every graph that has the hooks in it."""

    open = True

    def set(self, is_open: bool) -> None:
        """Open or close it for the passes to come."""
        self.open = is_open


class Watch:
    """A capture's interest in a module, as the module's hooks and compiled graphs see it."""

    def __init__(self, capture: Any, module: nn.Module, gate: Gate, drawn: bool) -> None:
        self.capture, self.module = weakref.ref(capture), weakref.ref(module)
        self.gate = gate
        self.drawn = drawn  # gradients are those of drawn labels, of which graphs know nothing
        number = next(_numbers)  # that graphs know the watch by
        with torch.inference_mode(False):
            anchor = torch.tensor(float(number), dtype=torch.float64, device="cpu")
            self.anchor = anchor.requires_grad_()
        _watches[number] = self


class WatchHook:
    """A hook on a module, which tells all that watch it; its copies, pickled ones too, are idle."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []

    @property
    def __name__(self) -> str:
        """Not there: torch.jit.script asks for it first, and this is what it gets to say."""
        raise AttributeError(SCRIPTED)

    def __reduce__(self) -> Any:
        return type(self), ()

    def captures(self) -> list[Any]:
        """The captures that are told."""
        return [found for watch in self.watches if (found := watch.capture()) is not None]


class LayerHook(WatchHook):
    """The hook on a layer, or on an ``nn.MultiheadAttention``, which calls none of its layers."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Tell of a call; inside a graph, return the output as a watched one."""
        if is_exporting():
            return None
        if torch.compiler.is_dynamo_compiling():
            if not is_hidden(module):
                return _traced(self.watches, module, input_in(args, kwargs), output)
            if "forward" in vars(module):  # else its products cannot be seen
                _outside(self, module, args, kwargs, output)
            return None
        for capture in self.captures():
            capture.observe(module, args, kwargs, output)
        return None


class RootPreHook(WatchHook):
    """The hook before the model's forward, for drawn labels."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Tell of the beginning; a graph ends here, so that Python calls the model."""
        if is_exporting():
            return
        if torch.compiler.is_dynamo_compiling():
            if torch.is_grad_enabled() and any(watch.gate.open for watch in self.watches):
                _end_graph()
            return
        for capture in self.captures():
            capture.enter_root(module)


class RootHook(WatchHook):
    """The hook on the model's output, for drawn labels."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Tell of the output."""
        if is_exporting() or torch.compiler.is_dynamo_compiling():
            return
        for capture in self.captures():
            capture.leave_root(module, output)


# Python runs them, as what they do to the compiler is to last beyond their calls.
for _function in (RootPreHook.__call__, RootHook.__call__, WatchHook.captures):
    skip_code(_function.__code__)


def is_exporting() -> bool:
    """Whether torch.export is at work. Before torch 2.13 its own function says so in compilers."""
    return torch.compiler._is_exporting_flag


def is_hidden(module: nn.Module) -> bool:
    """Whether a module's products cannot be seen by its output within a graph."""
    return is_attention(module) or is_experts(module) or is_router(module)


def input_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A layer's input among the arguments of its call, by keyword whatever its name is."""
    return args[0] if args else next((t for t in kwargs.values() if isinstance(t, Tensor)), None)


# By itself: where `_refuse` breaks the graph, it runs as it is, and the caller does not.
def _traced(watches: Sequence[Watch], module: nn.Module, x: Any, output: Any) -> Any:
    """The output, watched inside a graph; a part of the graph, like every condition here."""
    for watch in watches:
        if watch.gate.open and _is_watchable(module, x, output):
            if watch.drawn:
                _refuse()
            output = torch.ops.second_order.watch(as_used(x).detach(), output, watch.anchor)
    return output


@partial(torch.compiler.disable, reason="the attention's forward is kept out of the graph")
def _outside(hook: LayerHook, *call: Any) -> None:
    """Tell of a call outside of the graph, where a disabled forward has been, too."""
    hook(*call)


def _is_watchable(module: nn.Module, x: Any, output: Any) -> bool:
    return (
        torch.is_grad_enabled()
        and isinstance(x, Tensor)
        and isinstance(output, Tensor)
        and output.requires_grad
        and any(p is not None and p.requires_grad for p in module._parameters.values())
        and not transformed()
    )


@partial(torch.compiler.disable, reason=DRAWN)
def _end_graph() -> None:
    pass


@partial(torch.compiler.disable, reason=PART)
def _refuse() -> None:
    raise SecondOrderError(PART)


# ------------------------------------------------------------------------- operators inside graphs


def _deliver(x: Tensor, d: Tensor, anchor: Tensor) -> Tensor:
    watch = _watches.get(int(anchor))
    if watch is not None:
        capture, module = watch.capture(), watch.module()
        if capture is not None and module is not None:
            capture.receive(module, x, d)
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


# ------------------------------------------------------------------------------ hooks come and go


def _hooks(module: nn.Module) -> Iterable[tuple[dict[int, Any], int, WatchHook]]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in [*hooks.items()]:
            if isinstance(hook, WatchHook):
                yield hooks, key, hook


def hook_of(module: nn.Module, kind: type[WatchHook]) -> WatchHook:
    """A module's hook of a kind, which is hung on it if need be; a copy has brought its own."""
    found = next((hook for _, _, hook in _hooks(module) if type(hook) is kind), None)
    if found is not None:
        return found
    hook = kind()
    called: Any = hook
    if kind is RootPreHook:
        module.register_forward_pre_hook(called)
    else:
        module.register_forward_hook(called, with_kwargs=kind is LayerHook)
    return hook


def release(modules: Iterable[nn.Module], capture: Any = None, *, keep: bool = False) -> None:
    """Forget the watches of a capture, and of those that are gone; remove unused hooks, or not."""
    for module in modules:
        for hooks, key, hook in _hooks(module):
            hook.watches[:] = [w for w in hook.watches if w.capture() not in (None, capture)]
            if not (hook.watches or keep):
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
