"""Gradients on their way to their mean over the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.contract.training import Training

__all__ = ["PendingAverage", "Route", "Routed", "start_average"]

Routed: TypeAlias = tuple[Sequence[Tensor], Sequence[int]] | None
Route: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Routed]


class PendingAverage:
    """The exchange of one step's gradients, under way.

    Args:
        finish: Waits for it, and puts the means in place; None if there is nothing to wait for.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait until the means are in place; at once if they are."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def start_average(training: Training, route: Route) -> PendingAverage:
    """Start to average gradients, if the optimizer does; a collective then.

    Args:
        training: The training, whose averaged parameters are the same on every rank.
        route: Gives the parts of the gradients, and the rank that alone gets the mean of each; None
            for all of them everywhere.

    Raises:
        TypeError: For a sparse gradient.
    """
    world, params = training.world, training.averaged_params() if training.averages else []
    if training.averages:
        _drop_frozen(training)
    if not params:  # all are frozen, or others average
        return PendingAverage()
    layout = torch.contiguous_format
    gradients = [
        torch.zeros_like(p, memory_format=layout) if p.grad is None else p.grad for p in params
    ]
    if any(gradient.is_sparse for gradient in gradients):
        raise TypeError(
            "a sparse gradient cannot be averaged in buckets; use sparse=False in the embedding, "
            "or wrap the model in DistributedDataParallel"
        )
    torch._foreach_div_(gradients, float(world.size))  # first: a sum in float16 overflows
    here = [float(p.grad is not None) for p in params]
    present = torch.ones(len(params), device=params[0].device)
    if 0.0 in here:  # else the device is sent nothing
        present = torch.tensor(here, device=params[0].device)
    routed = route(params, gradients)
    work = (
        world.all_reduce([*gradients, present])
        if routed is None
        else world.reduce([*routed[0], present], [*routed[1], None])
    )

    def finish() -> None:
        work.wait()
        if 0.0 in here:  # a gradient that is None everywhere stays None, as for the base alone
            for p, g, n in zip(params, gradients, present.tolist(), strict=True):
                if p.grad is None and n > 0:
                    p.grad = g

    return PendingAverage(finish)


def _drop_frozen(training: Training) -> None:
    """Drop gradients of frozen parameters, which are not averaged: they differ between ranks."""
    params = (p for group in training.groups for p in group["params"] if not p.requires_grad)
    left = [p for p in params if p.grad is not None and p not in training.trained]
    for p in left:
        p.grad = None
    if left and training.first_time("frozen gradients"):
        names = training.names()
        listed = ", ".join(repr(names.get(id(p), "(not in the model)")) for p in left[:20])
        training.warn(
            f"frozen parameters have gradients that the processes have not averaged, and that are "
            f"dropped: {listed}; call zero_grad() after freezing"
        )
