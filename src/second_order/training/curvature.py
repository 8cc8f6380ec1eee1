"""The interface between an optimizer and its curvature, and the averaging of gradients.

A step of the optimizer calls, in this order:

    prepare         before gradients are averaged: assign layers, or refresh eigenpairs
    precondition    replace p.grad by the preconditioned gradient
    step_base       run the step of the base optimizer, and perhaps scale it
    finish_step     add to the step, or send the new parameters to helper ranks
    watch           turn capture on or off for the passes of the next step

:func:`start_average` averages the gradients between ``prepare`` and ``precondition``.
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
"""Gradient slices, and the rank that receives each mean; None: every rank does."""


class PendingAverage:
    """The average of one step's gradients, in progress; ``finish`` completes it."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait until the mean gradients have arrived. Later calls do nothing."""
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()


NO_AVERAGE = PendingAverage()


class Curvature:
    """Base class of all curvatures.

    By itself it leaves the base optimizer unchanged.
    """

    # Whether this process is a helper, whose steps only call prepare().
    is_helper = False
    # Whether torch.distributed.checkpoint may save each rank's part.
    saves_by_rank = False
    # Why the optimizer needs the GradScaler, if there is one; "" if it does not.
    scaler_reason = ""

    def __init__(self, training: Training) -> None:
        self.training = training

    # --------------------------------------------------------- construction and changes

    def description(self) -> list[str]:
        """List the options that must be equal on all ranks, one per line."""
        return []

    def begin(self) -> None:
        """Check the ranks, split them into roles, and assign layers to them.

        Collective.

        Raises:
            ValueError: If these ranks or devices do not support the options. Nothing
                has changed then.
        """

    def replan(self) -> None:
        """Search the model for layers again, because parameters or groups changed."""

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Adopt the shards that replaced parameters in the groups under FSDP2."""

    def hooks_removed(self) -> AbstractContextManager[None]:
        """Return a context manager that removes all hooks, and restores them."""
        return nullcontext()

    def close(self) -> None:
        """Stop threads and remove hooks.

        From now on the base optimizer trains alone.
        """

    # --------------------------------------------------------------------------- a step

    def fingerprint_values(self) -> list[tuple[str, Any]]:
        """List names and values that decide which collectives a step issues.

        The values are primitives. Ranks compare a fingerprint of them at every step.
        """
        return []

    def prepare(self) -> None:
        """Prepare a step before gradients are exchanged. Collective."""

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Choose the ranks that receive the mean gradients."""
        return None

    def precondition(self, pending: PendingAverage) -> None:
        """Wait for ``pending``, and precondition ``p.grad`` in place. Collective."""
        pending.wait()

    def step_base(self, step: Callable[[], None]) -> None:
        """Run ``step``, the base optimizer's step.

        A curvature may scale what it changes.
        """
        step()

    def finish_step(self) -> None:
        """Add to the base's step, or send the new parameters to helper ranks."""

    def watch(self) -> None:
        """Turn capture on or off for the passes of the next step."""

    def drop_pending(self) -> None:
        """Discard the statistics captured since the last step."""

    # ---------------------------------------------------------------------------- state

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Return each parameter's ``"curvature"`` part.

        Tensors are shared, not copied.
        """
        return {}

    def state_to_save(self) -> dict[Tensor, dict[str, Any]]:
        """Return the entries that checkpoints have in addition to :meth:`state`.

        They are tensors that later steps replace. ``optimizer.state`` excludes them,
        because it would keep the old tensors in memory.
        """
        return {}

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Check a checkpoint's ``"curvature"`` parts before anything is loaded.

        Raises:
            ValueError: If they do not fit the model.
        """

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load a checkpoint's ``"curvature"`` parts, in the checkpoint's dtypes."""

    @property
    def remote_state(self) -> str:
        """What state only other ranks store, for messages; "" if there is none."""
        return ""

    @property
    def resumes_without_remote_state(self) -> bool:
        """Whether training can resume without the state that only other ranks store."""
        return False

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Send to ``ranks`` the state that they lack. Collective.

        Returns:
            The parts that this rank received. A ``"base"`` part replaces the rank's
            own, and a ``"curvature"`` part adds to it.
        """
        return {}

    # ------------------------------------------------------------------------ reporting

    def summary(self) -> Summary:
        """Return a table of the preconditioned layers."""
        return Summary(self.training.summary_title(), [])

    def metrics(self) -> dict[str, float]:
        """Return numbers to log, with the same names on every rank.

        Does not communicate.
        """
        return {}


# --------------------------------------------------------------- averaging of gradients


def start_average(
    training: Training, route: Callable[[Sequence[Tensor], Sequence[Tensor]], Routed]
) -> PendingAverage:
    """Start to average the gradients over the ranks. Collective.

    ``route`` chooses the ranks that receive each mean; see :meth:`Curvature.route`.

    Raises:
        TypeError: If a gradient is sparse.
    """
    _drop_frozen_gradients(training)
    params = training.averaged_params()
    if not params:  # every parameter is frozen or sharded
        return NO_AVERAGE
    world = training.world

    # A rank without a gradient contributes zeros.
    gradients = []
    for p in params:
        zeros = torch.zeros_like(p, memory_format=torch.contiguous_format)
        gradients.append(zeros if p.grad is None else p.grad)
    if any(gradient.is_sparse for gradient in gradients):
        raise TypeError(
            "a sparse gradient cannot be averaged in buckets; use sparse=False in the embedding, "
            "or wrap the model in DistributedDataParallel"
        )
    # Divide before the sum, which could overflow.
    torch._foreach_div_(gradients, float(world.size))

    # Count for each parameter the ranks that have a gradient. The dtype is explicit,
    # because ranks may have different default dtypes.
    missing = [p for p in params if p.grad is None]
    device = params[0].device
    present = torch.ones(len(params), dtype=torch.float32, device=device)
    if missing:  # otherwise the step has no upload to the device
        flags = [float(p.grad is not None) for p in params]
        present = torch.tensor(flags, dtype=torch.float32, device=device)

    # Send gradients and counts in the same messages.
    routed = route(params, gradients)
    if routed is None:
        work = world.all_reduce([*gradients, present])
    else:
        parts, owners = routed
        work = world.reduce([*parts, present], [*owners, None])

    def finish() -> None:
        work.wait()
        if missing:  # a gradient that is None on every rank stays None
            counts = present.tolist()
            for p, gradient, count in zip(params, gradients, counts, strict=True):
                if p.grad is None and count > 0:
                    p.grad = gradient

    return PendingAverage(finish)


def _drop_frozen_gradients(training: Training) -> None:
    """Drop the gradients of frozen parameters, which the ranks do not average."""
    dropped = []
    for group in training.groups:
        for p in group["params"]:
            if not p.requires_grad and p.grad is not None:
                p.grad = None
                dropped.append(p)
    if dropped and training.is_first_warning("frozen gradients"):
        names = training.param_names()
        members = [repr(names.get(id(p), "(not in the model)")) for p in dropped[:20]]
        listed = ", ".join(members)
        training.warn(
            f"frozen parameters have gradients, which the ranks do not average; they are "
            f"discarded: {listed}; call zero_grad() after you freeze parameters"
        )
