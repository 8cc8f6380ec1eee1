"""What an optimizer and its curvature share: the model, the groups, the ranks, and warnings."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import is_dtensor, reshard
from second_order.distributed.world import World
from second_order.errors import SecondOrderWarning
from second_order.training.groups import group_params, group_settings

__all__ = ["Training", "base_class_names", "step_without_hooks", "warn"]


def step_without_hooks(base: torch.optim.Optimizer) -> Callable[[], None]:
    """A base's step without the hooks that the wrapper's own step already runs."""
    step = type(base).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return functools.partial(step, base)


def base_class_names(base: torch.optim.Optimizer) -> str:
    """The name of a base, or of two, in messages."""
    parts = getattr(base, "parts", (base,))
    return " and ".join(type(part).__name__ for part in parts)


def warn(message: str) -> None:
    """Give a SecondOrderWarning."""
    warnings.warn(message, SecondOrderWarning, stacklevel=3)


@dataclass
class Training:
    """One training, as this process takes part in it."""

    name: str  # of the optimizer's class, for messages
    model: nn.Module  # the user's module, without wrappers
    owns_params: bool  # the parameters belong to that module
    outer_class: str  # class of a module around one that was found by its parameters; "" for none
    under_ddp: bool  # the module was wrapped in DistributedDataParallel
    world: World  # the processes that train together; on a helper, those that help together
    averages_gradients: bool  # the optimizer averages gradients over the processes
    scaler: Any  # the GradScaler that scales the loss, or None
    base: torch.optim.Optimizer  # shares its groups and state with the optimizer
    publish: Callable[[], None]  # shows counters and curvature in ``state``
    debug: bool = False  # verify at every step what is else verified at the first ones
    steps: int = 0  # number of steps taken
    close_callbacks: list[Callable[[], None]] = field(
        default_factory=list
    )  # run as the optimizer closes
    warned: set[str] = field(default_factory=set)  # keys of warnings that appeared

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        return self.base.param_groups

    @property
    def base_name(self) -> str:
        """The name of the base, or of two, in messages."""
        return base_class_names(self.base)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; groups may be empty."""
        for group in self.groups:
            for p in group["params"]:
                device: torch.device = p.device
                return device
        return torch.device("cpu")

    def trainable_params(self) -> list[Tensor]:
        """The parameters in the groups that train now."""
        return [p for group in self.groups for p in group["params"] if p.requires_grad]

    def averaged_params(self) -> list[Tensor]:
        """The parameters that train, but those whose gradients FSDP2 averages."""
        return [p for p in self.trainable_params() if not is_dtensor(p)]

    def require_process_group(self, doing: str) -> None:
        """Raise RuntimeError if the process group that other ranks are reached by is gone."""
        if self.world.size > 1 and self.world.is_destroyed:
            raise RuntimeError(
                f"{self.name}: {doing} after destroy_process_group(), which has destroyed the "
                f"group of the {self.world.size} processes that train together; destroy it once "
                f"training is over, or make the optimizer anew after init_process_group()"
            )

    def param_names(self) -> dict[int, str]:
        """The names of the model's parameters, by id."""
        reshard(self.model)
        return {id(p): name for name, p in self.model.named_parameters()}

    def restrict_to(self, team: World) -> None:
        """Train with these ranks only from now on: the others help."""
        self.world = team
        self.averages_gradients = self.averages_gradients and team.size > 1

    def model_tensors(self) -> list[Tensor]:
        """All parameters, the model's and others in the groups, and buffers."""
        params = [*self.model.parameters(), *group_params(self.groups)]
        return list(dict.fromkeys([*params, *self.model.buffers()]))

    def is_first_warning(self, key: str) -> bool:
        """True once for each key, so that a warning is given once."""
        new = key not in self.warned
        self.warned.add(key)
        return new

    def warn(self, message: str) -> None:
        """Give a SecondOrderWarning."""
        warn(message)

    def summary_title(self, *what: str) -> str:
        """The first line of a summary: the optimizer, its base, ``what``, and the step."""
        size = self.world.size
        rate = (
            f"lr {group_settings(self.groups[0])['lr']}" if self.groups else "no parameter groups"
        )
        processes = f"{size} process{'es' if size > 1 else ''}"
        parts = ", ".join([rate, *what, processes, f"step {self.steps}"])
        return f"{self.name} over {self.base_name}, {parts}"
