"""Hooks on modules: what they tell whom, eagerly and inside graphs of ``torch.compile``.

A hook holds weak references only, and its copies are idle, so that a pickled or deep-copied model
takes no optimizer along. Hooks step aside while a model is exported, and inside a graph they become
a part of it (:mod:`second_order.kronecker.compiled`), those on the model itself too if it has
them (:mod:`second_order.kronecker.drawn`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code

from second_order.kronecker.autograd import as_used
from second_order.kronecker.compiled import Outlet, watched
from second_order.kronecker.drawn import Draws, begins, ends, is_inside, through

__all__ = [
    "AttentionHook",
    "Gate",
    "LayerHook",
    "RootHook",
    "RootPreHook",
    "Watch",
    "WatchHook",
    "Watcher",
    "hook_of",
    "put_back",
    "release",
    "take_off",
]

SCRIPTED = (
    "torch.jit.script cannot compile the hooks by which an optimizer of second_order watches this "
    "model; script it inside `with optimizer.hooks_removed():`, or after optimizer.close()"
)


class Watcher(Protocol):
    """Who is told of modules' calls."""

    def observe(self, module: nn.Module, x: Any, output: Any) -> None:
        """See a call of a layer."""

    def observe_attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """See a call of an ``nn.MultiheadAttention``."""

    def miss_attention(self, module: nn.Module) -> None:
        """Note a call of an attention inside a graph, where nobody sees its products."""

    def receive(self, module: nn.Module, x: Tensor, gradient: Tensor, drawn: int | None) -> None:
        """Take a layer's input and the gradient of its output, from a graph's backward.

        Of drawn labels if that has the number of the draw.
        """

    def enter_root(self, module: nn.Module) -> None:
        """See the beginning of the model's forward."""

    def leave_root(self, module: nn.Module, output: Any) -> None:
        """See the model's output."""


@dataclass
class Gate:
    """Whether calls are wanted now; a condition of every graph that has the hooks in it."""

    open: bool = True


class Watch:
    """A watcher's interest in a module, as the module's hooks and compiled graphs see it.

    Args:
        watcher: Who is told, as long as it is there.
        module: The module.
        gate: Open while the watcher wants calls.
        draws: What draws labels, if gradients are those of drawn labels.

    Attributes:
        outlet: Where compiled graphs deliver the module's pairs.
        gone: Whether the interest is over.
    """

    def __init__(
        self, watcher: Watcher, module: nn.Module, gate: Gate, draws: Draws | None
    ) -> None:
        self._watcher, self._module = weakref.ref(watcher), weakref.ref(module)
        self.gate, self.draws, self.gone = gate, draws, False
        self.outlet = Outlet(partial(_receive, self._watcher, self._module))

    def watcher_of(self, module: nn.Module) -> Watcher | None:
        """The watcher, if it is there and means this module and not one that shares its hooks."""
        return self._watcher() if self._module() is module else None


def _receive(
    watcher: weakref.ref[Watcher],
    module: weakref.ref[nn.Module],
    x: Tensor,
    gradient: Tensor,
    drawn: int | None,
) -> None:
    alive, layer = watcher(), module()
    if alive is not None and layer is not None:
        alive.receive(layer, x, gradient, drawn)


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
        for watch in tuple(self.watches):
            watcher = watch.watcher_of(module)
            if watcher is not None:
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
            if torch.is_grad_enabled() and any(watch.gate.open for watch in self.watches):
                _miss(self.watches, module)
            return
        for watch in tuple(self.watches):
            watcher = watch.watcher_of(module)
            if watcher is not None:
                watcher.observe_attention(module, args, kwargs, output[0])


class RootPreHook(WatchHook):
    """The hook before the model's forward, for drawn labels."""

    before = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Tell of the beginning; a graph notes that it has it."""
        if torch.compiler.is_exporting():
            return
        if torch.compiler.is_dynamo_compiling():
            _begin_traced(self.watches, module)
        else:
            _enter(self.watches, module)


class RootHook(WatchHook):
    """The hook on the model's output, for drawn labels."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Tell of the output; inside a graph, return it as a watched one."""
        if not torch.compiler.is_exporting():
            if torch.compiler.is_dynamo_compiling():
                return _end_traced(self.watches, module, output)
            _leave(self.watches, module, output)
        return None


# Where the model's own hooks are not a part of its graph they are no graphs either.
for _kind in (RootPreHook, RootHook):
    skip_code(_kind.__call__.__code__)


def _traced(watches: Sequence[Watch], module: nn.Module, x: Any, output: Any) -> Any:
    """The output, watched inside a graph; a part of the graph, like every condition here."""
    for watch in watches:
        if not watch.gate.open or not _is_watchable(module, x, output):
            continue
        x, anchor = as_used(x).detach(), watch.outlet.anchor
        if watch.draws is not None and is_inside(watch.draws.name):
            watch.draws.waiting.append((x, output, anchor))
            output = output.clone()  # what waits is changed by nobody
        else:
            output = watched(x, output, anchor)
    return output


def _begin_traced(watches: Sequence[Watch], module: nn.Module) -> None:
    """Note the model's beginning in the graph that is traced, or between graphs."""
    for watch in watches:
        if watch.gate.open and watch.draws is not None:
            if begins(watch.draws.name):
                watch.draws.waiting.clear()
            else:
                _enter((watch,), module)


def _end_traced(watches: Sequence[Watch], module: nn.Module, output: Any) -> Any:
    """The model's output, of which labels are drawn inside the graph, or between graphs."""
    for watch in watches:
        draws = watch.draws
        if not watch.gate.open or draws is None:
            continue
        if not ends(draws.name):
            _leave((watch,), module, output)
        elif draws.waiting:
            read = draws.reads(output)
            if read is None:
                _leave_by_a_callable((watch,), module, output)
            elif read.requires_grad:
                output = through(draws, read, output)
    return output


def _is_watchable(module: nn.Module, x: Any, output: Any) -> bool:
    """Whether a call can be one of a training pass."""
    return (
        torch.is_grad_enabled()
        and isinstance(x, Tensor)
        and isinstance(output, Tensor)
        and output.requires_grad
        and any(p is not None and p.requires_grad for p in module._parameters.values())
        and not torch._C._are_functorch_transforms_active()
    )


_F = TypeVar("_F", bound=Callable[..., None])


def _breaks(reason: str) -> Callable[[_F], _F]:
    """Decorate what only Python can do: the graph ends there, and fullgraph gives the reason."""
    return cast(Callable[[_F], _F], partial(torch.compiler.disable, reason=reason))


DIVIDED = (
    "fisher='sampled' draws labels inside of this graph, which has the model's output, and "
    "DistributedDataParallel would divide it: compile the DistributedDataParallel module instead "
    "of the one inside, or set torch._dynamo.config.optimize_ddp = False, or leave fullgraph off"
)
CALLABLE = (
    "fisher='sampled' draws labels inside of this graph, which has the model's output, and finds "
    "no one tensor to draw them from: a callable likelihood= needs Python where that is more than "
    "a tensor; return the logits alone, or leave fullgraph off"
)


@_breaks(DIVIDED)
def _enter(watches: Sequence[Watch], module: nn.Module) -> None:
    for watch in tuple(watches):
        watcher = watch.watcher_of(module)
        if watcher is not None:
            watcher.enter_root(module)


@_breaks(DIVIDED)
def _leave(watches: Sequence[Watch], module: nn.Module, output: Any) -> None:
    for watch in tuple(watches):
        watcher = watch.watcher_of(module)
        if watcher is not None:
            watcher.leave_root(module, output)


@_breaks(CALLABLE)
def _leave_by_a_callable(watches: Sequence[Watch], module: nn.Module, output: Any) -> None:
    _leave(watches, module, output)


@_breaks(
    "the products of nn.MultiheadAttention cannot be watched in a graph: leave fullgraph "
    "off, or name the attention in skip_layers"
)
def _miss(watches: Sequence[Watch], module: nn.Module) -> None:
    for watch in tuple(watches):
        watcher = watch.watcher_of(module)
        if watcher is not None:
            watcher.miss_attention(module)


def _hooks(module: nn.Module) -> Iterable[tuple[dict[int, Any], int, WatchHook]]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in [*hooks.items()]:
            if isinstance(hook, WatchHook):
                yield hooks, key, hook


def hook_of(module: nn.Module, kind: type[H]) -> tuple[H, bool]:
    """A module's hook of a kind, and whether it is new; a copy of a module has brought its own."""
    found = next((hook for _, _, hook in _hooks(module) if type(hook) is kind), None)
    if found is not None:
        return found, False
    hook = kind()
    hook.hang(module)
    return hook, True


def release(modules: weakref.WeakSet[nn.Module]) -> None:
    """Take the hooks off modules that nobody watches any more."""
    for module in modules:
        for hooks, key, hook in _hooks(module):
            hook.watches[:] = [watch for watch in hook.watches if not watch.gone]
            if not hook.watches:
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
    """Put hooks back that were taken off, as far as anybody still watches."""
    for module, hook in away:
        watches = [watch for watch in hook.watches if not watch.gone]
        if watches:
            hook_of(module, type(hook))[0].watches.extend(watches)


def _drop(module: nn.Module, hooks: dict[int, Any], key: int) -> None:
    del hooks[key]
    module._forward_hooks_with_kwargs.pop(key, None)
