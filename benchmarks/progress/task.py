"""What a task says: what is trained, how long, and by which loss a run is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OF_LANGUAGE", "Task"]

FLOOR = 0.05  # of the peak, to which a schedule lets the learning rate fall

OF_LANGUAGE: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1, "betas": (0.9, 0.95)},
    "Muon": {"weight_decay": 0.1, "betas": (0.9, 0.95)},
    "SOAP": {"weight_decay": 0.1},
}
"""The keywords that language models are trained with."""


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        make: The model, from torch's random numbers.
        batches: Without end, for a seed.
        loss_of: Of the model and a batch.
        judge: Of the model: the loss that is reported.
        steps: How many.
        every: Steps between two judgements.
        warmup: Steps in which the learning rate rises, before it falls; None: it is constant.
        keywords: Of optimizers, by name, where the task's are not their defaults.
        at_end: Of the model once it is trained: figures by name. If "loss" is among them, a run is
            judged by that instead of the last judgement.
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
        passed = (step - self.warmup) / (self.steps - self.warmup)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * passed))

    def on(self, device: str) -> Task:
        """The same training on a GPU, in bfloat16 by autocast; its batches are single tensors."""

        def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
            # Pinned, so that the copy does not wait for the device.
            moved = batch.pin_memory().to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16):
                return self.loss_of(model, moved)

        return replace(self, make=lambda: self.make().to(device), loss_of=loss_of)
