"""What the tests of state and groups share: a few steps, state through a file, steps unhooked."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from contract import take
from models import ZOO
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


def unhooked(step: Any) -> Any:
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train(model: nn.Module, optimizer: Any, steps: int = 3, start: int = 0) -> None:
    for batch in BATCHES[start : start + steps]:
        take(model, optimizer, batch)


def saved_and_loaded(saved: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)
