"""What an optimizer shares with its curvature: model, parameter groups and ranks.

The optimizer makes one :class:`Training` and passes it to its :class:`Curvature`, which
reads the parameters, the step count and the ranks from it, and warns through it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from second_order.distributed.fsdp import is_dtensor, reshard
from second_order.distributed.world import World
from second_order.errors import warn
from second_order.training.groups import group_params, group_settings
from second_order.utils.modules import remove_handles

__all__ = ["Training", "base_class_names", "step_without_hooks"]


def step_without_hooks(base: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the base's ``step`` without its registered hooks.

    torch replaces the ``step`` of every optimizer class by a function that runs the
    hooks of ``register_step_pre_hook`` and others, marks it as ``hooked``, and keeps
    the original as ``__wrapped__``. Our own optimizer's ``step`` has run the hooks
    already.
    """
    step = type(base).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return functools.partial(step, base)


def base_class_names(base: torch.optim.Optimizer) -> str:
    """Return the class name of a base optimizer, or the names of two combined ones."""
    parts = getattr(base, "parts", (base,))
    return " and ".join(type(part).__name__ for part in parts)


@dataclass
class Training:
    """The training run, from the point of view of this process."""

    name: str  # class name of the optimizer, for messages
    model: nn.Module  # the user's model, without wrappers
    owns_params: bool  # whether the optimized parameters belong to ``model``
    # Class of a module around ``model`` that may change its outputs, or "".
    outer_class: str
    under_ddp: bool  # whether DistributedDataParallel wraps the model
    # The ranks of this rank's role: those that train together, or the helpers.
    world: World
    averages_gradients: bool  # whether the optimizer averages gradients over the ranks
    scaler: Any  # the GradScaler that scales the loss, or None
    base: torch.optim.Optimizer  # shares its groups and state with the optimizer
    # Writes counters and curvature to the optimizer's ``state``.
    publish: Callable[[], None]
    # Verify every layer at every step with statistics, not only at a few.
    debug: bool = False
    steps: int = 0  # number of steps taken
    close_callbacks: list[Callable[[], None]] = field(default_factory=list)
    # Keys of warnings that have been shown.
    warned: set[str] = field(default_factory=set)
    _pre_hooks: list[Callable[..., None]] = field(default_factory=list, init=False)
    _pre_hook_handles: list[RemovableHandle] = field(default_factory=list, init=False)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        return self.base.param_groups

    @property
    def base_name(self) -> str:
        """The class name of the base optimizer, for messages."""
        return base_class_names(self.base)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, or the CPU if all groups are empty."""
        for group in self.groups:
            for p in group["params"]:
                device: torch.device = p.device
                return device
        return torch.device("cpu")

    def count_step(self) -> None:
        """Add a step to those that have been taken."""
        self.steps += 1

    def resume_at(self, steps: int) -> None:
        """Continue after ``steps`` steps, as many as a checkpoint has."""
        self.steps = steps

    def trainable_params(self) -> list[Tensor]:
        """List the parameters of the groups, without frozen ones."""
        return [p for group in self.groups for p in group["params"] if p.requires_grad]

    def averaged_params(self) -> list[Tensor]:
        """List the trainable parameters whose gradients FSDP2 does not average."""
        return [p for p in self.trainable_params() if not is_dtensor(p)]

    def require_process_group(self, action: str) -> None:
        """Check that the process group still exists.

        Raises:
            RuntimeError: If it was destroyed. ``action`` says what the caller wanted.
        """
        if self.world.size > 1 and self.world.is_destroyed:
            raise RuntimeError(
                f"{self.name}: cannot {action} after destroy_process_group(), which has destroyed "
                f"the group of the {self.world.size} processes that train together; call it after "
                f"the last step, or make the optimizer again after init_process_group()"
            )

    def param_names(self) -> dict[int, str]:
        """Return the names of the model's parameters, keyed by the parameters' ids."""
        reshard(self.model)
        return {id(p): name for name, p in self.model.named_parameters()}

    def restrict_to(self, world: World) -> None:
        """Work only with the ranks of ``world`` from now on, which share this role.

        There are two roles: workers, which train, and helpers.
        """
        self.world = world
        self.averages_gradients = self.averages_gradients and world.size > 1

    def add_forward_pre_hook(self, hook: Callable[..., None]) -> None:
        """Register a forward pre-hook on the model until the optimizer is closed."""
        handles = self._pre_hook_handles
        self.close_callbacks.append(self._pre_hooks.clear)
        self.close_callbacks.append(partial(remove_handles, handles))
        # At exit, the model is gone as well, so the finalizer does not run then.
        weakref.finalize(self, remove_handles, handles).atexit = False
        self._pre_hooks.append(hook)
        self._pre_hook_handles.append(self.model.register_forward_pre_hook(hook))

    @contextmanager
    def pre_hooks_removed(self) -> Iterator[None]:
        """Remove the hooks of :meth:`add_forward_pre_hook` inside a ``with`` block."""
        remove_handles(self._pre_hook_handles)
        try:
            yield
        finally:
            remove_handles(self._pre_hook_handles)
            for hook in self._pre_hooks:
                handle = self.model.register_forward_pre_hook(hook)
                self._pre_hook_handles.append(handle)

    def model_tensors(self) -> list[Tensor]:
        """List all parameters, also those outside of the model, and all buffers."""
        params = [*self.model.parameters(), *group_params(self.groups)]
        return list(dict.fromkeys([*params, *self.model.buffers()]))

    def is_first_warning(self, key: str) -> bool:
        """Return True at the first call with a key, to show each warning once."""
        new = key not in self.warned
        self.warned.add(key)
        return new

    def warn(self, message: str) -> None:
        """Show a SecondOrderWarning."""
        warn(message)

    def summary_title(self, *details: str) -> str:
        """Return the first line of a summary: optimizer, base, rate, ranks and step.

        The learning rate is that of the first group.
        """
        rate = "no parameter groups"
        if self.groups:
            rate = f"lr {group_settings(self.groups[0])['lr']:.6g}"
        size = self.world.size
        processes = "1 process" if size == 1 else f"{size} processes"
        parts = ", ".join([rate, *details, processes, f"step {self.steps}"])
        return f"{self.name} over {self.base_name}, {parts}"
