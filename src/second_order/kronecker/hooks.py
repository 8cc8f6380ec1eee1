"""Forward hooks that hold their watchers, and stay behind when the module is copied or scripted."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import nn

__all__ = ["WatcherHook", "hook_of", "put_back", "release", "take_off"]

SCRIPTED = (
    "torch.jit.script cannot compile the hooks by which an optimizer of second_order watches this "
    "model; script it inside `with optimizer.hooks_removed():`, or after optimizer.close()"
)


class Watcher(Protocol):
    """Somebody who is told of a module's calls."""

    @property
    def gone(self) -> bool:
        """Whether nobody is to be told any more."""


W = TypeVar("W", bound=Watcher)
H = TypeVar("H", bound="WatcherHook[Any]")


class WatcherHook(Generic[W]):
    """A hook on a module, which tells all that watch it; its copies, pickled ones too, are idle.

    Attributes:
        watchers: Who is told.
    """

    before: ClassVar[bool] = False
    """Whether the hook runs before the module's forward."""
    with_kwargs: ClassVar[bool] = False
    """Whether the hook is given keyword arguments."""

    def __init__(self) -> None:
        self.watchers: list[W] = []

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
        if self.before:
            module.register_forward_pre_hook(self, with_kwargs=self.with_kwargs)  # type: ignore[arg-type]
        else:
            module.register_forward_hook(self, with_kwargs=self.with_kwargs)  # type: ignore[arg-type]


def _hooks(module: nn.Module) -> Iterable[tuple[dict[int, Any], int, WatcherHook[Any]]]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in [*hooks.items()]:
            if isinstance(hook, WatcherHook):
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
            hook.watchers[:] = [watcher for watcher in hook.watchers if not watcher.gone]
            if not hook.watchers:
                _drop(module, hooks, key)


def take_off(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, WatcherHook[Any]]]:
    """Take the hooks off modules, whoever watches them; returns them for :func:`put_back`."""
    away = []
    for module in modules:
        for hooks, key, hook in _hooks(module):
            _drop(module, hooks, key)
            away.append((module, hook))
    return away


def put_back(away: Iterable[tuple[nn.Module, WatcherHook[Any]]]) -> None:
    """Put hooks back that were taken off, as far as anybody still watches."""
    for module, hook in away:
        watchers = [watcher for watcher in hook.watchers if not watcher.gone]
        if watchers:
            hook_of(module, type(hook))[0].watchers.extend(watchers)


def _drop(module: nn.Module, hooks: dict[int, Any], key: int) -> None:
    del hooks[key]
    module._forward_hooks_with_kwargs.pop(key, None)
