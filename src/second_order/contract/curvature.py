"""What an optimizer asks of the curvature that it owns.

    prepare        plan anew, refresh what is due          before gradients travel
    precondition   p.grad <- what the base is to see
    step_base      the base's step
    correct        what is left to do to the parameters
    watch          what the passes to come are to leave here

Between ``prepare`` and ``precondition`` gradients set out for the ranks that ``route`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.contract.averaging import Routed
from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.report import Summary

__all__ = ["Curvature"]


class Curvature:
    """What does nothing to a base optimizer; the wings of the package do more.

    Args:
        training: What it serves.
    """

    scaler_matters = ""
    """Why a GradScaler has to be announced; "" if it need not be."""

    parts_suffice = False
    """Whether ``torch.distributed.checkpoint`` may save each rank's part by itself."""

    read_by_all: tuple[str, ...] = ()
    """Entries of a checkpoint that every rank reads, whoever keeps what."""

    def __init__(self, training: Training) -> None:
        self.training = training

    # ------------------------------------------------------------------------------ construction

    def description(self) -> list[str]:
        """What all ranks must have alike, beside the model and its groups."""
        return []

    def averaging_processes(self) -> int:
        """How many processes average gradients, where the optimizer does."""
        return self.training.world.size

    def check_processes(self) -> None:
        """Raise what these processes and devices cannot do, before anything has changed."""

    def begin(self) -> None:
        """All ranks agree: give them their roles, plan, and watch the model."""

    # ----------------------------------------------------------------------------------- a step

    @property
    def instead(self) -> Callable[[], None] | None:
        """What this process does at a step instead of training; None where it trains."""
        return None

    def nothing_captured(self) -> bool:
        """Whether no statistic has arrived since the last step."""
        return True

    def facts(self) -> list[tuple[str, Any]]:
        """What decides which collectives a step has, by name; primitives."""
        return []

    def prepare(self) -> None:
        """Plan anew, and refresh what is due, before gradients travel."""

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Parts of the gradients, and the rank that alone gets the mean of each; None: all do."""
        return None

    def precondition(self, average: Callable[[], None]) -> None:
        """Replace ``p.grad`` in place by what the base is to see.

        Args:
            average: Waits until gradients are the mean over the processes; to be called before
                gradients are read, as often as it suits.
        """
        average()

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base step."""
        step()

    def correct(self) -> None:
        """Do to the parameters what is left after the base's step."""

    def watch(self) -> None:
        """Look at the passes to come, as the step to come needs it."""

    def drop_pending(self) -> None:
        """Forget what backward passes have left since the last step."""

    def replan(self) -> None:
        """Parameters or groups have changed: look at the model again."""

    # ------------------------------------------------------------------------------------ state

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The ``"curvature"`` part of each parameter that has one; tensors are shared."""
        return {}

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if a checkpoint's ``"curvature"`` parts do not fit the model."""

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over the ``"curvature"`` parts of a checkpoint, in the dtypes they were saved in."""

    @property
    def kept_elsewhere(self) -> str:
        """What other processes keep, and a ``state_dict`` of this one would lack; "" if nothing."""
        return ""

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Parts of the state that this process lacks, on the ranks that want them; a collective.

        A ``"base"`` part replaces what is here, a ``"curvature"`` part is added to it.
        """
        return {}

    def preconditioned(self) -> list[Tensor]:
        """The parameters whose gradients it replaces, or whose steps it corrects."""
        return []

    def awake(self) -> None:
        """Go on after a copy, with another training's base and groups."""

    def summary(self) -> Summary:
        """A table of what is preconditioned."""
        return Summary(self.training.titled(), [])

    def close(self) -> None:
        """End what goes on beside training; from now on the base steps alone."""
