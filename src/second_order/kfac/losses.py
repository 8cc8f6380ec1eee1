"""What the losses of a step's passes are: told by an option, or seen.

Models of transformers are given ``num_items_in_batch`` by the Trainer, the number of targets in all
micro-batches of a step and on all processes. Most divide the sum over a pass's targets by it; some
take the mean over the pass all the same. A hook sees whether a model is called with the number, and
whether autograd's record of its loss divides by it. Models that take no such keyword have no hook.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from second_order.kfac.options import AUTO, KFACOptions
from second_order.kronecker.factors import Reduction

__all__ = [
    "IGNORED",
    "SAID",
    "ItemsHook",
    "reduction_of",
    "watch_items",
]

KEYWORD = "num_items_in_batch"
NEAR = 100  # nodes of a loss's record, the last ones, among which a division by the number is

SAID: dict[Reduction, str] = {
    "mean": (
        "each loss is taken to have been divided by their number; write accumulation_steps=1 where "
        "losses are added up as they are, loss_reduction='step_mean' where each is divided by the "
        "terms of all passes"
    ),
    "step_mean": (
        "the model was given num_items_in_batch, and each loss is taken to have been divided by "
        "it; otherwise write loss_reduction='mean'"
    ),
}
IGNORED = (
    "the model was given num_items_in_batch and does not seem to divide by it: write "
    "accumulation_steps=1 if losses are added up as they are, as by transformers' Trainer, or "
    "loss_reduction='step_mean'; until then each is taken to have been divided by their number"
)
"""What is said of the passes of a step."""


class ItemsHook:
    """A hook on a model; its copies, pickled ones too, serve nobody.

    Attributes:
        told: Whether a training pass has been given the number of its step's targets.
        ignored: Whether the model's loss is not divided by it, as far as can be seen.
    """

    def __init__(self) -> None:
        self.told = self.ignored = False
        self._handle: RemovableHandle | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """See a call."""
        number = kwargs.get(KEYWORD)
        if self.told or number is None or not torch.is_grad_enabled():
            return
        self.told = True
        if isinstance(output, Mapping):
            output = output.get("loss")
        elif isinstance(output, tuple) and output:
            output = output[0]
        record = getattr(output, "grad_fn", None)
        if record is None or output.numel() != 1 or torch.compiler.is_compiling():
            return
        if "Compiled" not in record.name():  # whose loss has no record of its own
            self.ignored = not _divides(record, number)

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


def _divides(record: Any, number: Tensor | float) -> bool:
    """Whether one of the last operations of a loss is a division by a number."""
    nodes = [record]
    for node in nodes:  # which grows meanwhile, by those further from the loss
        divisor = getattr(node, "_saved_other", None) if "Div" in node.name() else None
        if divisor is not None and divisor.numel() == 1 and float(divisor) == float(number):
            return True
        if len(nodes) < NEAR:
            nodes += [following for following, _ in node.next_functions if following is not None]
    return False


def watch_items(model: nn.Module, options: KFACOptions, owner: object) -> ItemsHook | None:
    """Hook a model while its owner is there, if its calls can tell what its losses are."""
    if options.loss_reduction != AUTO or options.accumulation_steps != AUTO:
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
    if options.fisher == "sampled":
        return "sum"
    if options.loss_reduction != AUTO:
        return cast(Reduction, options.loss_reduction)
    return "step_mean" if items is not None and items.told and not items.ignored else "mean"
