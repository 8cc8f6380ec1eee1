"""Averages the gradients over the ranks that train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.training.context import Training

__all__ = ["ARRIVED", "PendingAverage", "Routed", "start_average"]

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


ARRIVED = PendingAverage()


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
        return ARRIVED
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
    if names and training.first_time("frozen gradients"):
        known = training.names()
        listed = ", ".join(repr(known.get(id(p), "(not in the model)")) for p in names[:20])
        training.warn(
            f"frozen parameters have gradients that the processes do not average, and that are "
            f"dropped: {listed}; call zero_grad() after freezing"
        )
