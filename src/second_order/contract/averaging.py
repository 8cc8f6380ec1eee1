"""Gradients on their way to their mean over the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.world import PendingReduction, World

__all__ = ["PendingAverage", "Route", "Routed", "start_average"]

Routed: TypeAlias = tuple[Sequence[Tensor], Sequence[int]] | None
Route: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Routed]


class PendingAverage:
    """The exchange of one step's gradients, under way from construction on.

    Args:
        params: The parameters whose gradients are averaged, the same on every rank.
        world: The ranks.
        route: Gives the parts of the gradients, and the rank that alone gets the mean of each; None
            for all of them everywhere.

    Raises:
        TypeError: For a sparse gradient.
    """

    def __init__(self, params: list[Tensor], world: World, route: Route) -> None:
        self._done = not params  # all parameters are frozen, or others average
        self._params = params
        if self._done:
            return
        self._missing = [p for p in params if p.grad is None]
        self._gradients = [
            torch.zeros_like(p, memory_format=torch.contiguous_format) if p.grad is None else p.grad
            for p in params
        ]
        for gradient in self._gradients:
            if gradient.is_sparse:
                raise TypeError(
                    "a sparse gradient cannot be averaged in buckets; use sparse=False in the "
                    "embedding, or wrap the model in DistributedDataParallel"
                )
        # A gradient that is None everywhere stays None, as it would for the base alone.
        torch._foreach_div_(self._gradients, float(world.size))  # first: a sum in float16 overflows
        device = params[0].device
        self._present = torch.ones(len(params), device=device)
        if self._missing:
            self._present = torch.tensor([float(p.grad is not None) for p in params], device=device)
        routed = route(params, self._gradients)
        self._work: PendingReduction = (
            world.all_reduce([*self._gradients, self._present])
            if routed is None
            else world.reduce([*routed[0], self._present], [*routed[1], None])
        )

    def wait(self) -> None:
        """Wait until the means are in place; at once if they are."""
        if self._done:
            return
        self._done = True
        self._work.wait()
        if self._missing:
            for p, g, n in zip(self._params, self._gradients, self._present.tolist(), strict=True):
                if p.grad is None and n > 0:
                    p.grad = g


def start_average(training: Training, route: Route) -> PendingAverage:
    """Start to average gradients, if the optimizer does."""
    params = training.averaged_params() if training.averages else []
    return PendingAverage(params, training.world, route)
