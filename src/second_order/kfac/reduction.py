"""What the losses of a step's passes are: told by an option, or seen.

Models of transformers are given ``num_items_in_batch`` by the Trainer, the number of targets in all
micro-batches of a step and on all processes. Most divide the sum over a pass's targets by it; some
take the mean over the pass all the same. A hook sees whether a model is called with the number, and
whether autograd's record of its loss divides by it. Models that take no such keyword have no hook.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from second_order.kfac.options import AUTO, KFACOptions
from second_order.kronecker.factors import Reduction

__all__ = [
    "IGNORED",
    "SAID",
    "SAME_FOR_ALL",
    "ItemsHook",
    "Shrinkage",
    "may_be_step_mean",
    "reduction_of",
    "watch_items",
]

LEAST_SPREAD = 16.0  # Σ (log n - its mean)² over passes, before a slope is believed in
H = TypeVar("H", bound="ItemsHook")
KEYWORD = "num_items_in_batch"
NEAR = 100  # nodes of a loss's record, the last ones, among which a division by the number is

SAID: dict[Reduction, str] = {
    "mean": (
        "the loss of each is taken to have been divided by their number, as Lightning and "
        "Accelerate do; where losses are added up as they are, write accumulation_steps=1; where "
        "each is divided by the terms of all passes, loss_reduction='step_mean'"
    ),
    "step_mean": (
        "the model was given num_items_in_batch, and the loss of each is taken to have been "
        "divided by it; where that is not so, write loss_reduction='mean', and "
        "accumulation_steps=1 if losses are added up as they are"
    ),
}
IGNORED = (
    "the model was given num_items_in_batch and does not divide by it, as far as can be seen: "
    "transformers' Trainer then adds up the losses as they are; write accumulation_steps=1 for "
    "that, or loss_reduction='step_mean' if each is divided by the terms of all passes; until then "
    "each is taken to have been divided by the number of passes"
)
SAME_FOR_ALL = (
    "the gradients of a step's passes do not shrink with the number of their terms, as those of "
    "means do: all losses seem to be divided by the same number. If that is the number of terms in "
    "all passes, write loss_reduction='step_mean', as curvature is too large otherwise; if losses "
    "are added up as they are, such as those of several tasks, accumulation_steps=1; if each is a "
    "mean over its pass, loss_reduction='mean' ends this warning"
)
"""What is said of the passes of a step, and of losses that are not what they are taken to be."""


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
        """See a call. In a graph of torch.compile the loss has no record of its own."""
        number = kwargs.get(KEYWORD)
        if self.told or number is None or not torch.is_grad_enabled():
            return
        self.told = True
        if not torch.compiler.is_compiling():
            loss = _loss_in(output)
            self.ignored = loss is not None and not _divides(loss, number)

    def hang(self, model: nn.Module) -> None:
        """Hook a model."""
        self._handle = model.register_forward_hook(self, with_kwargs=True)

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


def _loss_in(output: Any) -> Tensor | None:
    """The loss in a model's output; None if none is there that is a record of its own making."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple) and output:
        found = output[0]
    is_loss = isinstance(found, Tensor) and found.numel() == 1 and found.grad_fn is not None
    if not is_loss or "Compiled" in found.grad_fn.name():
        return None
    return cast(Tensor, found)


def _divides(loss: Tensor, number: Tensor | float) -> bool:
    """Whether one of the last operations of a loss is a division by a number."""
    nodes, seen = deque([loss.grad_fn]), 0
    while nodes and seen < NEAR:
        node = nodes.popleft()
        seen += 1
        if node is None:
            continue
        divisor = getattr(node, "_saved_other", None) if "Div" in node.name() else None
        if divisor is not None and divisor.numel() == 1 and float(divisor) == float(number):
            return True
        nodes.extend(following for following, _ in node.next_functions)
    return False


class Shrinkage:
    """How gradients shrink with the terms of their passes, fitted over the passes of all steps.

    A term's gradient in a mean over n terms is 1 / n of its own, and its square goes as 1 / n²;
    where all are divided by the same number it does not depend on n. The slope of log squares over
    log n tells the two apart: -2 or 0, with the noise of what differs from pass to pass.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, passes: Tensor) -> None:
        """Take in the passes of a step, by numbers of terms and sums of squares, ``(passes, 2)``.

        No device is waited for.
        """
        n, squares = passes.unbind(1)
        live = (n > 0) & (squares > 0)
        logs = torch.stack([n, squares / n]).where(live, 1.0).log()
        means = logs.sum(1, keepdim=True) / live.sum().clamp_min(1)
        apart = (logs - means).where(live, 0.0)
        found = apart @ apart[0]
        self._sums = found if self._sums is None else self._sums.to(found.device) + found

    @property
    def slope(self) -> float:
        """The slope, NaN where n has differed too little; waits for the device."""
        spread, along = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        return along / spread if spread >= LEAST_SPREAD else math.nan


def watch_items(model: nn.Module, options: KFACOptions, owner: object) -> ItemsHook | None:
    """Hook a model, while its owner is there, if its calls can tell what its losses are.

    Returns:
        The hook; None where the options tell, or the forward takes no such keyword.
    """
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


def may_be_step_mean(options: KFACOptions, items: ItemsHook | None) -> bool:
    """Whether the losses of some passes can be divided by the terms of a whole step."""
    return options.loss_reduction == "step_mean" or items is not None
