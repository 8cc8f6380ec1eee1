"""The description of a task: the model, the data, the number of steps, and the reported loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LANGUAGE_KEYWORDS", "Task"]

FLOOR = 0.05  # final learning rate of a schedule, as a share of its peak

LANGUAGE_KEYWORDS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1, "betas": (0.9, 0.95)},
    "Muon": {"weight_decay": 0.1, "betas": (0.9, 0.95)},
    "SOAP": {"weight_decay": 0.1},
}
"""Options of the optimizers for language models."""


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained and evaluated.

    Attributes:
        make: Makes the model, with torch's global random number generator.
        batches: Yields batches without end, for a seed.
        loss_of: Training loss of the model on a batch.
        judge: The loss of the model that is reported.
        steps: Number of training steps.
        every: Number of steps between two evaluations.
        warmup: Steps in which the learning rate rises, before it falls. None: it is constant.
        keywords: Options of the optimizers by name, where they differ from the default settings.
        at_end: Metrics of the trained model by name. If "loss" is one of them, it replaces the
            loss of the last evaluation as the result of the run.
    """

    make: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    loss_of: Callable[[nn.Module, Any], Tensor]
    judge: Callable[[nn.Module], float]
    steps: int
    every: int
    warmup: int | None = None
    keywords: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    at_end: Callable[[nn.Module], dict[str, float]] | None = None

    def share_of_rate(self, step: int) -> float:
        """The learning rate of a step, as a share of its peak."""
        if self.warmup is None:
            return 1.0
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / (self.steps - self.warmup)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))

    def on(self, device: str) -> Task:
        """The same task on a GPU with autocast to bfloat16. Batches must be single tensors."""

        def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
            # The copy from pinned memory does not synchronize with the device.
            device_batch = batch.pin_memory().to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16):
                return self.loss_of(model, device_batch)

        return replace(self, make=lambda: self.make().to(device), loss_of=loss_of)
