"""The facts of a training that an optimizer and its curvature share, and its warnings.

Warnings wait while the ranks may wait for each other. Whoever turns them into errors
(``python -W error``) would otherwise end one rank's step between two collectives, and leave the
other ranks in the second.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from second_order.contract.groups import members_of
from second_order.distributed.world import World
from second_order.errors import SecondOrderWarning
from second_order.sharded import is_dtensor, reshard
from second_order.stages import Meter

__all__ = ["DeferredWarnings", "Training", "warns_at_its_end"]

P = ParamSpec("P")
R = TypeVar("R")


class DeferredWarnings:
    """Warnings of an optimizer; within methods that :func:`warns_at_its_end` they wait.

    One that is an error is raised at that end, and the remaining ones at the end of the next.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: list[str] = []
        self.held = 0

    def first_time(self, key: str) -> bool:
        """True once for each key, so that a warning is given once."""
        new = key not in self._known
        self._known.add(key)
        return new

    def keep(self, message: str) -> None:
        """Warn at the end of the next method: for hooks, which run while others may wait."""
        self._waiting.append(message)

    def warn(self, message: str) -> None:
        """Warn, now or at the end of the outermost method that runs."""
        self.keep(message)
        self.tell()

    def tell(self, error: BaseException | None = None) -> None:
        """Warn of all that waits, at the first frame outside of this package and torch.

        Beside an error, warnings that are errors become notes of it.
        """
        while self._waiting and not self.held:
            frame, level = sys._getframe(), 1
            ours = ("second_order.", "torch.")
            while frame.f_back and frame.f_globals.get("__name__", "").startswith(ours):
                frame, level = frame.f_back, level + 1
            message = self._waiting.pop(0)
            try:
                warnings.warn(message, SecondOrderWarning, stacklevel=level)
            except SecondOrderWarning:
                if error is None:
                    raise
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(message)


def warns_at_its_end(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate an optimizer's method: warnings wait until it has returned."""

    @functools.wraps(method)
    def told(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        deferred = self._training.warnings
        deferred.held += 1
        try:
            result = method(self, *args, **kwargs)
        except BaseException as error:
            deferred.held -= 1
            deferred.tell(error)
            raise
        deferred.held -= 1
        deferred.tell()
        return result

    return told


@dataclass
class Training:
    """One training, as this process takes part in it.

    Attributes:
        name: Name of the optimizer's class, for messages.
        model: The user's module, without wrappers.
        known: Whether the user gave that module, and not its parameters alone.
        under_ddp: Whether the module was wrapped in DistributedDataParallel.
        world: The processes that train together; on a helper, those that help together.
        averages: Whether the optimizer averages gradients over the processes.
        scaler: The GradScaler that scales the loss, or None.
        warnings: The warnings to the user.
        steps: Number of steps taken.
        trained: The parameters that trained at the last step.
        base: The wrapped optimizer.
        base_name: Name of the base, in messages.
        publish: Shows counters and curvature in the optimizer's ``state``.
        meter: Seconds and bytes of the steps, by stage.
        late_ddp: The handle of the hook that looks who runs the model, where there are helpers.
        places: The modules' entries that parameters had when they were last looked for.
        collected: Parts of the state that other processes keep, once they have been collected here,
            and the rank that has all of them; None for each.
    """

    name: str
    model: nn.Module
    known: bool
    under_ddp: bool
    world: World
    averages: bool
    scaler: Any
    warnings: DeferredWarnings = field(default_factory=DeferredWarnings)
    steps: int = 0
    trained: set[Tensor] = field(default_factory=set)
    base: torch.optim.Optimizer = None  # type: ignore[assignment]
    base_name: str = ""
    publish: Callable[[], None] = lambda: None
    meter: Meter = field(default_factory=Meter)
    late_ddp: Any = None
    places: Sequence[tuple[nn.Module, str, Tensor]] = ()
    collected: tuple[dict[Tensor, dict[str, dict[str, Any]]], int | None] | None = None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, one list with the base's."""
        groups: list[dict[str, Any]] = self.base.param_groups
        return groups

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; groups may be empty."""
        return next((p.device for p in members_of(self.groups)), torch.device("cpu"))

    def training_params(self) -> list[Tensor]:
        """The parameters in the groups that train now."""
        return [p for group in self.groups for p in group["params"] if p.requires_grad]

    def averaged_params(self) -> list[Tensor]:
        """The parameters that train, or did at the last step: backward may precede a freeze.

        FSDP2 averages the gradients of those that it has sharded.
        """
        params = [p for group in self.groups for p in group["params"] if not is_dtensor(p)]
        return [p for p in params if p.requires_grad or p in self.trained]

    def names(self) -> dict[int, str]:
        """The names of the model's parameters, by id."""
        reshard(self.model)
        return {id(p): name for name, p in self.model.named_parameters()}

    def whole_model(self) -> list[Tensor]:
        """All parameters, the model's and others in the groups, and buffers."""
        params = [*self.model.parameters(), *members_of(self.groups)]
        return list(dict.fromkeys([*params, *self.model.buffers()]))

    def first_time(self, key: str) -> bool:
        """True once for each key, so that a warning is given once."""
        return self.warnings.first_time(key)

    def warn(self, message: str) -> None:
        """Warn the user, now or once no rank waits for another."""
        self.warnings.warn(message)

    def titled(self, *what: str) -> str:
        """The first line of a summary: the optimizer, its base, ``what``, and the step."""
        size = self.world.size
        rate = f"lr {self.groups[0]['lr']}" if self.groups else "no parameter groups"
        processes = f"{size} process{'es' if size > 1 else ''}"
        parts = ", ".join([rate, *what, processes, f"step {self.steps}"])
        return f"{self.name} over {self.base_name}, {parts}"
