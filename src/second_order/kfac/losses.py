"""What the losses of a step's passes are: told by an option, or seen.

Models of transformers are given ``num_items_in_batch`` by the Trainer, the number of targets in all
micro-batches of a step and on all processes, and divide the sum over a pass's targets by it. A hook
sees whether a model is called with the number; models that take no such keyword have none.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from second_order.kronecker.factors import Reduction
from second_order.optimizers.config import KFACOptions
from second_order.utils.checks import AUTO

__all__ = ["SAID", "ItemsHook", "reduction_of", "watch_items"]

KEYWORD = "num_items_in_batch"

SAID: dict[Reduction, str] = {
    "mean": (
        "this assumes that each loss was divided by their number. If the losses are added up "
        "without a division, set loss_reduction='pass_mean'. If each is divided by the terms of "
        "all passes, set 'step_mean'"
    ),
    "step_mean": (
        "the model was given num_items_in_batch, so this assumes that each loss was divided by it. "
        "If the model takes the mean over a pass all the same, set loss_reduction='pass_mean'"
    ),
}
"""What is said of the passes of a step."""


class ItemsHook:
    """A hook on a model; its copies, pickled ones too, serve nobody."""

    def __init__(self) -> None:
        self.told = False  # whether a training pass has been given its step's number of targets
        self._handle: RemovableHandle | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """See a call."""
        if kwargs.get(KEYWORD) is not None and torch.is_grad_enabled():
            self.told = True

    def hang(self, model: nn.Module) -> None:
        """Hook a model."""
        self._handle = model.register_forward_hook(self, with_kwargs=True)

    def remove(self) -> None:
        """See no more calls."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __deepcopy__(self, _: Any) -> ItemsHook:
        return ItemsHook()

    def __reduce__(self) -> Any:
        return ItemsHook, ()


def watch_items(model: nn.Module, options: KFACOptions, owner: object) -> ItemsHook | None:
    """Hook a model while its owner is there, if its calls can tell what its losses are."""
    if options.loss_reduction != AUTO:
        return None
    try:
        accepted = inspect.signature(model.forward).parameters.values()
    except ValueError:  # of TorchScript, which runs no hooks
        return None
    if not any(p.name == KEYWORD or p.kind == p.VAR_KEYWORD for p in accepted):
        return None
    hook = ItemsHook()
    hook.hang(model)
    weakref.finalize(owner, hook.remove).atexit = False
    return hook


def reduction_of(options: KFACOptions, items: ItemsHook | None) -> Reduction:
    """What the losses are whose gradients are captured."""
    if options.samples:
        return "sum"
    if options.loss_reduction == "pass_mean":
        return "mean"
    if options.loss_reduction != AUTO:
        return cast(Reduction, options.loss_reduction)
    return "step_mean" if items is not None and items.told else "mean"
