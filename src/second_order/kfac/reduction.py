"""What the losses of a step's passes are: told by an option, or seen.

Models of transformers are given ``num_items_in_batch`` by the Trainer, the number of targets in all
micro-batches of a step and on all processes, and divide the sum over a pass's targets by it. A hook
sees whether a model has been called with it; models whose forward takes no such keyword have none.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from second_order.kfac.options import AUTO, KFACOptions
from second_order.kronecker.factors import Reduction

__all__ = ["ItemsHook", "may_be_step_mean", "reduction_of", "watch_items"]

H = TypeVar("H", bound="ItemsHook")
KEYWORD = "num_items_in_batch"


class ItemsHook:
    """A hook before a model's forward; its copies, pickled ones too, serve nobody.

    Attributes:
        told: Whether a training pass has been given the number of its step's targets.
    """

    def __init__(self) -> None:
        self.told = False
        self._handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See a call."""
        if kwargs.get(KEYWORD) is not None and torch.is_grad_enabled():
            self.told = True

    def hang(self, model: nn.Module) -> None:
        """Hook a model."""
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def remove(self) -> None:
        """See no more calls."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @contextmanager
    def aside(self, model: nn.Module) -> Iterator[None]:
        """Be off the model meanwhile."""
        self.remove()
        try:
            yield
        finally:
            self.hang(model)

    def __deepcopy__(self: H, _: Any) -> H:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()


def watch_items(model: nn.Module, options: KFACOptions, owner: object) -> ItemsHook | None:
    """Hook a model, while its owner is there, if its calls can tell what its losses are.

    Returns:
        The hook; None where the options tell, or the forward takes no such keyword.
    """
    if options.loss_reduction != AUTO or options.accumulation_steps != AUTO:
        return None
    accepted = inspect.signature(model.forward).parameters.values()
    if not any(p.name == KEYWORD or p.kind == p.VAR_KEYWORD for p in accepted):
        return None
    hook = ItemsHook()
    hook.hang(model)
    weakref.finalize(owner, hook.remove).atexit = False
    return hook


def reduction_of(options: KFACOptions, items: ItemsHook | None) -> Reduction:
    """What the losses are whose gradients are captured."""
    if options.fisher == "sampled":
        return "sum"
    if options.loss_reduction != AUTO:
        return cast(Reduction, options.loss_reduction)
    return "step_mean" if items is not None and items.told else "mean"


def may_be_step_mean(options: KFACOptions, items: ItemsHook | None) -> bool:
    """Whether the losses of some passes can be divided by the terms of a whole step."""
    return options.loss_reduction == "step_mean" or items is not None
