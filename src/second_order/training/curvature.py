"""The interface between an optimizer and its curvature, in the order of a step.

prepare        before gradients are exchanged: assign layers to ranks, or refresh eigenpairs
precondition   p.grad <- the gradient that the base sees
step_base      the base's step
correct        scale or correct the parameters' change
watch          turn capture on or off for the coming passes
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
    """The identity: it leaves the base optimizer as it is. Base class of all curvatures."""

    helps = False  # whether this process is a helper, whose steps only call prepare()
    parts_suffice = False  # whether torch.distributed.checkpoint may save each rank's part
    scaler_matters = ""  # why the optimizer needs to know a GradScaler; "" if it does not

    def __init__(self, training: Training) -> None:
        self.training = training

    # ------------------------------------------------------------------- construction and changes

    def description(self) -> list[str]:
        """The options that must be equal on all ranks, one per line."""
        return []

    def begin(self) -> None:
        """Check the processes, give them their roles, and assign layers to them. Collective.

        Raises:
            ValueError: If these processes or devices do not support the options. Nothing has
                changed then.
        """

    def replan(self) -> None:
        """Search the model for layers again, after parameters or groups have changed."""

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Adopt the shards that have replaced parameters in the groups."""

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context manager that removes all hooks from the model and restores them."""
        return nullcontext()

    def close(self) -> None:
        """Stop threads and remove hooks. The base trains alone from now on."""

    # ------------------------------------------------------------------------------------- a step

    def facts(self) -> list[tuple[str, Any]]:
        """The values that decide which collectives a step issues, by name. Primitives only."""
        return []

    def prepare(self) -> None:
        """Prepare a step before gradients are exchanged. Collective."""

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Parts of the gradients and the rank that receives each mean; None: every rank does."""
        return None

    def precondition(self, pending: PendingAverage) -> None:
        """Replace ``p.grad`` by the gradient that the base sees. Collective."""
        pending.wait()

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base take its step."""
        step()

    def correct(self) -> None:
        """Correct the parameters after the base's step."""

    def watch(self) -> None:
        """Turn capture on or off for the passes of the next step."""

    def drop_pending(self) -> None:
        """Drop the statistics of the backward passes since the last step."""

    # -------------------------------------------------------------------------------------- state

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The ``"curvature"`` part of each parameter that has one. Tensors are not copied."""
        return {}

    def state_to_save(self) -> dict[Tensor, dict[str, Any]]:
        """Entries of these parts that only checkpoints have: tensors that later steps replace.

        ``optimizer.state`` does not have them, because it would keep the old ones in memory.
        """
        return {}

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if a checkpoint's ``"curvature"`` parts do not fit the model."""

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load the ``"curvature"`` parts of a checkpoint, in the dtypes of the checkpoint."""

    @property
    def kept_elsewhere(self) -> str:
        """A name for state that only other processes store; "" if there is none."""
        return ""

    @property
    def dispensable(self) -> bool:
        """Whether training can resume without the state that only other processes store."""
        return False

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Send the state that some of ``ranks`` lack to them. Collective.

        A ``"base"`` part replaces the part on this rank. A ``"curvature"`` part is added to it.
        """
        return {}

    # ---------------------------------------------------------------------------------- reporting

    def summary(self) -> Summary:
        """A table of the layers that are preconditioned."""
        return Summary(self.training.titled(), [])

    def metrics(self) -> dict[str, float]:
        """Numbers to log. Every rank has the same names. No communication."""
        return {}
