"""How the losses of a step's passes are reduced: by an option, or as observed.

The Trainer of transformers passes ``num_items_in_batch`` to models that accept it: the
number of targets in all micro-batches of a step, on all processes. Such a model divides
the sum over a pass's targets by that number. A forward hook observes whether the model
is called with it.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from second_order.distributed.world import World
from second_order.errors import RankMismatchError
from second_order.kronecker.factors import Reduction
from second_order.optimizers.config import KFACOptions
from second_order.utils.checks import AUTO

__all__ = ["ASSUMPTIONS", "LossReduction"]

KEYWORD = "num_items_in_batch"

ASSUMPTIONS: dict[Reduction, str] = {
    "mean": (
        "this assumes that each loss was divided by their number. If so, set "
        "loss_reduction='mean', and this warning does not appear. If the losses are added up "
        "without a division, set 'pass_mean'. If each is divided by the terms of all passes, "
        "set 'step_mean'"
    ),
    "step_mean": (
        "the model was given num_items_in_batch, so this assumes that each loss was divided by it. "
        "If the model takes the mean over a pass anyway, set loss_reduction='pass_mean'"
    ),
}
"""The assumption on a step with several backward passes, by the reduction."""


class ItemsHook:
    """A forward hook that observes ``num_items_in_batch``.

    A copy of the model copies the hook. The copy has no owner, and nothing reads it.

    Attributes:
        observed: Whether the model received the number in a pass with gradients.
    """

    def __init__(self) -> None:
        self.observed = False
        self._handle: RemovableHandle | None = None

    def __call__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Observe a call of the model."""
        if kwargs.get(KEYWORD) is not None and torch.is_grad_enabled():
            self.observed = True

    def attach(self, model: nn.Module) -> None:
        """Register the hook on a model, unless it is registered already."""
        if self._handle is None:
            self._handle = model.register_forward_hook(self, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook from its model."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __deepcopy__(self, _: Any) -> ItemsHook:
        return ItemsHook()

    def __reduce__(self) -> Any:
        return ItemsHook, ()


def _accepts_items(model: nn.Module) -> bool:
    """Return whether the forward of a model accepts the number of targets."""
    try:
        accepted = inspect.signature(model.forward).parameters.values()
    except ValueError:  # a model of TorchScript, which runs no hooks
        return False
    return any(p.name == KEYWORD or p.kind == p.VAR_KEYWORD for p in accepted)


class LossReduction:
    """How the losses whose gradients are captured are reduced.

    If ``loss_reduction="auto"`` and the model's calls can show the reduction,
    :meth:`attach` hooks the model. The hook leaves it with this object.

    A rank may have no batch at the first step, so the ranks agree on the reduction.
    """

    def __init__(self, model: nn.Module, options: KFACOptions) -> None:
        self._options = options
        self._agreed = False
        self._hook: ItemsHook | None = None
        if options.loss_reduction == AUTO and _accepts_items(model):
            self._hook = ItemsHook()
            weakref.finalize(self, self._hook.remove).atexit = False

    def current(self) -> Reduction:
        """Return how the losses of this step's passes are reduced.

        "mean" is over the terms of a pass, "step_mean" over those of a whole step.
        """
        if self._options.fisher != "empirical":  # the loss of sampled labels is a sum
            return "sum"
        option = self._options.loss_reduction
        if option == "pass_mean":
            return "mean"
        if option != AUTO:
            return cast(Reduction, option)
        if self._hook is not None and self._hook.observed:
            return "step_mean"
        return "mean"

    @property
    def compared(self) -> str:
        """What ranks compare at each step; "" if :meth:`agree` follows."""
        if self._hook is not None and not self._agreed:
            return ""
        return self.current()

    def agree(self, world: World, has_passes: bool) -> None:
        """Adopt what other ranks have observed, at the first step. Collective.

        Args:
            world: The ranks.
            has_passes: Whether this rank captured passes since the last step.

        Raises:
            RankMismatchError: On every rank, if the model received the number on some
                ranks, and has passes without it on others.
        """
        hook = self._hook
        if hook is None or self._agreed:
            return
        lacks_number = has_passes and not hook.observed
        flags = torch.tensor([float(hook.observed), float(lacks_number)], device="cpu")
        world.on_cpu().all_reduce_max([flags]).wait()
        if flags.all():
            raise RankMismatchError(
                f"the ranks are out of sync: some have called the model with {KEYWORD} (loss "
                f"reduction: step_mean), and others without it (mean); pass it on every rank, or "
                f"set loss_reduction="
            )
        self._agreed = True
        hook.observed = bool(flags[0])

    def attach(self, model: nn.Module) -> None:
        """Register the hook on the model, if there is one."""
        if self._hook is not None:
            self._hook.attach(model)

    def remove(self) -> None:
        """Remove the hook from the model, if there is one."""
        if self._hook is not None:
            self._hook.remove()
