"""The interface between an optimizer and its curvature, and the average of gradients.

prepare        before gradients are exchanged: assign layers to ranks, or refresh eigenpairs
precondition   p.grad <- the gradient that the base sees
step_base      the base's step
correct        scale or correct the parameters' change
watch          turn capture on or off for the coming passes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.reporting.summary import Summary
from second_order.training.context import Training

__all__ = ["NO_AVERAGE", "Curvature", "PendingAverage", "Routed", "start_average"]

Routed: TypeAlias = tuple[Sequence[Tensor], Sequence[int]] | None


class PendingAverage:
    """One step's average of gradients, which may still be running; ``finish`` completes it."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait until the mean gradients have arrived."""
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()


NO_AVERAGE = PendingAverage()


class Curvature:
    """The identity: it leaves the base optimizer as it is. Base class of all curvatures."""

    is_helper = False  # whether this process is a helper, whose steps only call prepare()
    saves_by_rank = False  # whether torch.distributed.checkpoint may save each rank's part
    scaler_reason = ""  # why the optimizer needs to know a GradScaler; "" if it does not

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

    def hooks_removed(self) -> AbstractContextManager[None]:
        """Return a context manager that removes all hooks from the model and restores them."""
        return nullcontext()

    def close(self) -> None:
        """Stop threads and remove hooks. The base trains alone from now on."""

    # ------------------------------------------------------------------------------------- a step

    def fingerprint_values(self) -> list[tuple[str, Any]]:
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

    def finish_step(self) -> None:
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
    def remote_state(self) -> str:
        """A name for state that only other processes store; "" if there is none."""
        return ""

    @property
    def resumes_without_remote_state(self) -> bool:
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
        return Summary(self.training.summary_title(), [])

    def metrics(self) -> dict[str, float]:
        """Numbers to log. Every rank has the same names. No communication."""
        return {}


# ------------------------------------------------------------------------- average of gradients


def start_average(
    training: Training, route: Callable[[Sequence[Tensor], Sequence[Tensor]], Routed]
) -> PendingAverage:
    """Start to average the gradients, on the ranks that ``route`` returns. Collective.

    Raises:
        TypeError: If a gradient is sparse.
    """
    _drop_frozen_gradients(training)
    params = training.averaged_params()
    if not params:  # all are frozen, or others average
        return NO_AVERAGE
    world = training.world
    gradients = []
    for p in params:
        zeros = torch.zeros_like(p, memory_format=torch.contiguous_format)
        gradients.append(zeros if p.grad is None else p.grad)
    if any(gradient.is_sparse for gradient in gradients):
        raise TypeError(
            "a sparse gradient cannot be averaged in buckets; use sparse=False in the embedding, "
            "or wrap the model in DistributedDataParallel"
        )
    torch._foreach_div_(gradients, float(world.size))  # first: a sum in float16 overflows

    # Ranks may have different default dtypes, so every message names its dtype.
    missing = [p for p in params if p.grad is None]
    device = params[0].device
    present = torch.ones(len(params), dtype=torch.float32, device=device)
    if missing:  # otherwise nothing is uploaded to the device
        here = [float(p.grad is not None) for p in params]
        present = torch.tensor(here, dtype=torch.float32, device=device)
    routed = route(params, gradients)
    if routed is None:
        work = world.all_reduce([*gradients, present])
    else:
        parts, owners = routed
        work = world.reduce([*parts, present], [*owners, None])

    def finish() -> None:
        work.wait()
        if missing:  # a gradient that is None everywhere stays None, as for the base alone
            for p, gradient, ranks in zip(params, gradients, present.tolist(), strict=True):
                if p.grad is None and ranks > 0:
                    p.grad = gradient

    return PendingAverage(finish)


def _drop_frozen_gradients(training: Training) -> None:
    """Drop the gradients of frozen parameters, which differ between ranks."""
    names = []
    for group in training.groups:
        for p in group["params"]:
            if not p.requires_grad and p.grad is not None:
                p.grad = None
                names.append(p)
    if names and training.is_first_warning("frozen gradients"):
        known = training.param_names()
        listed = ", ".join(repr(known.get(id(p), "(not in the model)")) for p in names[:20])
        training.warn(
            f"frozen parameters have gradients that the processes do not average, and that are "
            f"dropped: {listed}; call zero_grad() after freezing"
        )
