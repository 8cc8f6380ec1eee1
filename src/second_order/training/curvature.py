"""How an optimizer calls its curvature.

prepare        plan anew, refresh what is due          before gradients travel
precondition   p.grad <- what the base is to see
step_base      the base's step
correct        what is left to do to the parameters
watch          what the coming passes are to leave
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.reporting.summary import Summary
from second_order.training.averaging import PendingAverage, Routed
from second_order.training.context import Training

__all__ = ["Curvature"]


class Curvature:
    """A curvature that leaves a base optimizer as it is; base class of the real ones."""

    helps = False  # this process helps others: prepare() is all of its steps
    parts_suffice = False  # torch.distributed.checkpoint may save each rank's part by itself
    scaler_matters = ""  # why a GradScaler has to be announced; "" if it need not be

    def __init__(self, training: Training) -> None:
        self.training = training

    # ------------------------------------------------------------------- construction and changes

    def description(self) -> list[str]:
        """Options in lines, which must be equal on all ranks, as model and groups must."""
        return []

    def begin(self) -> None:
        """Begin, once all ranks agree: check the processes, give them their roles, and plan.

        Raises before anything has changed if processes or devices cannot do what is asked.
        """

    def replan(self) -> None:
        """Look at the model again, after parameters or groups have changed."""

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Go on with the shards, in the groups by now, of parameters; or raise."""

    def unwatched(self) -> AbstractContextManager[None]:
        """Make a context manager that takes all hooks off the model and puts them back."""
        return nullcontext()

    def close(self) -> None:
        """End threads, hooks and messages; from now on the base steps alone."""

    # ------------------------------------------------------------------------------------- a step

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has; primitives."""
        return []

    def prepare(self) -> None:
        """Plan anew, and refresh what is due, before gradients travel."""

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Parts of the gradients, and the rank that alone gets the mean of each; None: all do."""
        return None

    def precondition(self, pending: PendingAverage) -> None:
        """Replace ``p.grad``, once its mean has arrived, by the gradient that the base sees."""
        pending.wait()

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base take its step."""
        step()

    def correct(self) -> None:
        """Correct the parameters after the base's step."""

    def watch(self) -> None:
        """Turn capture on or off for the coming passes, as the coming step needs."""

    def drop_pending(self) -> None:
        """Drop statistics of the backward passes since the last step."""

    # -------------------------------------------------------------------------------------- state

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The ``"curvature"`` part of each parameter that has one; tensors are shared."""
        return {}

    def state_to_save(self) -> dict[Tensor, dict[str, Any]]:
        """More of these parts, for checkpoints alone: tensors that later steps replace.

        If ``optimizer.state`` had them, old ones would stay in memory.
        """
        return {}

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if a checkpoint's ``"curvature"`` parts do not fit the model."""

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over the ``"curvature"`` parts of a checkpoint, in the dtypes they were saved in."""

    @property
    def kept_elsewhere(self) -> str:
        """A name for state that only other processes keep; "" if there is none."""
        return ""

    @property
    def dispensable(self) -> bool:
        """Whether training can resume without what only other processes keep."""
        return False

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Collect the parts of the state that the ranks ``ranks`` lack; a collective.

        A ``"base"`` part replaces the one here, a ``"curvature"`` part is added to it.
        """
        return {}

    # ------------------------------------------------------------------------------- what is told

    def summary(self) -> Summary:
        """A table of the parameters and layers that are preconditioned."""
        return Summary(self.training.titled(), [])

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by names that are the same on every rank; nothing is sent."""
        return {}
