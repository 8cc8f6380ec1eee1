"""Hooks on modules: what they tell whom, eagerly and inside graphs of ``torch.compile``.

A hook holds weak references only, and its copies are idle, so that a pickled or deep-copied model
takes no optimizer along. Hooks step aside while a model is exported, and inside a graph they become
a part of it (:mod:`second_order.kronecker.compiled`). A graph does not look for hooks that are new:
hooks stay on their modules while anybody watches the model, and what a graph depends on is who
watches, and whether it is wanted now. Drawn labels need a model that is not compiled: the hook
before the model's forward ends the graph, where they are due.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError
from second_order.kronecker.autograd import as_used, skip_code, transformed
from second_order.kronecker.compiled import Outlet, watched

__all__ = [
    "AttentionHook",
    "Gate",
    "LayerHook",
    "RootHook",
    "RootPreHook",
    "Watch",
    "WatchHook",
    "hook_of",
    "put_back",
    "release",
    "take_off",
]

SCRIPTED = (
    "torch.jit.script cannot compile the hooks by which an optimizer of second_order watches this "
    "model; script it inside `with optimizer.hooks_removed():`, or after optimizer.close()"
)
DRAWN = (
    "fisher='sampled' runs the model without torch.compile at steps with statistics, where its "
    "graph ends: leave fullgraph off, or use fisher='empirical'"
)
PART = (
    "fisher='sampled' runs the model without torch.compile at steps with statistics, and does not "
    "know of parts compiled by themselves, as by block.compile(), or called by themselves: compile "
    "the whole model that the optimizer was given, and call that, or use fisher='empirical'"
)
ATTENTION = (
    "the products of nn.MultiheadAttention cannot be watched in a graph: leave fullgraph off, or "
    "name the attention in skip_layers"
)


@dataclass
class Gate:
    """Whether calls are wanted now; a condition of every graph that has the hooks in it."""

    open: bool = True


class Watch:
    """A watcher's interest in a module, as the module's hooks and compiled graphs see it.

    Args:
        watcher: The :class:`~second_order.kronecker.capture.Capture` that is told, while it lives.
        module: The module.
        gate: Open while the watcher wants calls.
        drawn: Whether gradients are those of drawn labels, of which graphs know nothing.

    Attributes:
        outlet: Where compiled graphs deliver the module's pairs.
        gone: Whether the interest is over.
    """

    def __init__(self, watcher: Any, module: nn.Module, gate: Gate, drawn: bool) -> None:
        self._watcher, self._module = weakref.ref(watcher), weakref.ref(module)
        self.gate, self.drawn, self.gone = gate, drawn, False
        self.outlet = Outlet(partial(_receive, self._watcher, self._module))

    def watcher_of(self, module: nn.Module) -> Any:
        """The watcher, if it is there and means this module and not one that shares its hooks."""
        return self._watcher() if self._module() is module else None


def _receive(
    watcher: weakref.ref[Any], module: weakref.ref[nn.Module], x: Tensor, gradient: Tensor
) -> None:
    alive, layer = watcher(), module()
    if alive is not None and layer is not None:
        alive.receive(layer, x, gradient)


def _watchers(watches: Sequence[Watch], module: nn.Module) -> list[Any]:
    found = []  # by a loop: a generator would be a frame of its own, which a compiler refuses
    for watch in watches:
        if (watcher := watch.watcher_of(module)) is not None:
            found.append(watcher)  # noqa: PERF401
    return found


class WatchHook:
    """A hook on a module, which tells all that watch it; its copies, pickled ones too, are idle.

    Attributes:
        watches: Who is told, and when.
    """

    before: ClassVar[bool] = False
    """Whether the hook runs before the module's forward."""
    with_kwargs: ClassVar[bool] = False
    """Whether the hook is given keyword arguments."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []

    @property
    def __name__(self) -> str:
        """Not there: torch.jit.script asks for it first, and this is what it gets to say."""
        raise AttributeError(SCRIPTED)

    def __deepcopy__(self: H, memo: Any) -> H:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()

    def hang(self, module: nn.Module) -> None:
        """Hook a module."""
        hook = cast(Callable[..., Any], self)
        if self.before:
            module.register_forward_pre_hook(hook, with_kwargs=self.with_kwargs)
        else:
            module.register_forward_hook(hook, with_kwargs=self.with_kwargs)


H = TypeVar("H", bound=WatchHook)


class LayerHook(WatchHook):
    """The hook on a layer."""

    with_kwargs = True

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Tell of a call; inside a graph, return the output as a watched one."""
        if torch.compiler.is_exporting():
            return None
        # By keyword whatever its name is.
        x = args[0] if args else next((t for t in kwargs.values() if isinstance(t, Tensor)), None)
        if torch.compiler.is_dynamo_compiling():
            return _traced(self.watches, module, x, output)
        for watcher in _watchers(self.watches, module):
            watcher.observe(module, x, output)
        return None


class AttentionHook(WatchHook):
    """The hook on an ``nn.MultiheadAttention``, which calls none of its layers."""

    with_kwargs = True

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Tell of a call."""
        if torch.compiler.is_exporting():
            return
        if torch.compiler.is_dynamo_compiling():
            if _is_open(self.watches):
                _miss(self.watches, module)
            return
        for watcher in _watchers(self.watches, module):
            watcher.observe_attention(module, args, kwargs, output[0])


class RootPreHook(WatchHook):
    """The hook before the model's forward, for drawn labels."""

    before = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Tell of the beginning; a graph ends here, so that Python calls the model."""
        if torch.compiler.is_exporting():
            return
        if torch.compiler.is_dynamo_compiling():
            if _is_open(self.watches):
                _end_graph()
            return
        for watcher in _watchers(self.watches, module):
            watcher.enter_root(module)


class RootHook(WatchHook):
    """The hook on the model's output, for drawn labels."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Tell of the output."""
        if torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
            return
        for watcher in _watchers(self.watches, module):
            watcher.leave_root(module, output)


# Python runs them, as what they do to the compiler is to last beyond their calls.
for _function in (RootPreHook.__call__, RootHook.__call__, _watchers):
    skip_code(_function.__code__)


def _is_open(watches: Sequence[Watch]) -> bool:
    return torch.is_grad_enabled() and any(watch.gate.open for watch in watches)


def _traced(watches: Sequence[Watch], module: nn.Module, x: Any, output: Any) -> Any:
    """The output, watched inside a graph; a part of the graph, like every condition here."""
    for watch in watches:
        if watch.gate.open and _is_watchable(module, x, output):
            if watch.drawn:
                _refuse()
            output = watched(as_used(x).detach(), output, watch.outlet.anchor)
    return output


def _is_watchable(module: nn.Module, x: Any, output: Any) -> bool:
    """Whether a call can be one of a training pass."""
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


@partial(torch.compiler.disable, reason=ATTENTION)
def _miss(watches: Sequence[Watch], module: nn.Module) -> None:
    for watcher in _watchers(watches, module):
        watcher.miss_attention(module)


def _hooks(module: nn.Module) -> Iterable[tuple[dict[int, Any], int, WatchHook]]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in [*hooks.items()]:
            if isinstance(hook, WatchHook):
                yield hooks, key, hook


def hook_of(module: nn.Module, kind: type[H]) -> H:
    """A module's hook of a kind, which is hung on it if need be; a copy has brought its own."""
    found = next((hook for _, _, hook in _hooks(module) if type(hook) is kind), None)
    if found is not None:
        return found
    hook = kind()
    hook.hang(module)
    return hook


def release(modules: Iterable[nn.Module], *, keep: bool = False) -> None:
    """Forget watches that are gone, and take off hooks by which nobody watches, or keep them."""
    for module in modules:
        for hooks, key, hook in _hooks(module):
            hook.watches[:] = [watch for watch in hook.watches if not watch.gone]
            if not (hook.watches or keep):
                _drop(module, hooks, key)


def take_off(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, WatchHook]]:
    """Take the hooks off modules, whoever watches them; returns them for :func:`put_back`."""
    away = []
    for module in modules:
        for hooks, key, hook in _hooks(module):
            _drop(module, hooks, key)
            away.append((module, hook))
    return away


def put_back(away: Iterable[tuple[nn.Module, WatchHook]]) -> None:
    """Put hooks back that were taken off, but for those that nobody watches by any more."""
    for module, hook in away:
        watches = [watch for watch in hook.watches if not watch.gone]
        if watches or not hook.watches:
            hook_of(module, type(hook)).watches.extend(watches)


def _drop(module: nn.Module, hooks: dict[int, Any], key: int) -> None:
    del hooks[key]
    module._forward_hooks_with_kwargs.pop(key, None)
