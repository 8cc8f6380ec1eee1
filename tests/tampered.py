"""What the tests of checkpoints share: trainings, their states, and whether these are alike."""

from __future__ import annotations

import copy
from typing import Any

import torch
from contract import BASES, curvature_of, make, take
from models import ZOO
from torch import Tensor, nn

MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


def train(model: nn.Module, optimizer: Any, steps: int = 3, start: int = 0) -> None:
    for batch in BATCHES[start : start + steps]:
        take(model, optimizer, batch)


def trained(System: Any, base: str = "SGD", **options: Any) -> tuple[nn.Module, Any]:
    Base, given = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **given, **options)
    train(model, optimizer)
    return model, optimizer


def containers(value: Any) -> Any:
    """A copy whose tensors are the same."""
    if isinstance(value, dict):
        return {key: containers(inner) for key, inner in value.items()}
    return [containers(inner) for inner in value] if isinstance(value, list) else value


def snapshot(model: nn.Module, optimizer: Any) -> Any:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return copy.deepcopy(
        (model.state_dict(), optimizer.state_dict(), groups, curvature_of(optimizer))
    )


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


PLAIN: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    **{n: {"lr": 0.1} for n in ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"]},
    **{n: {"lr": 0.1} for n in ["Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor"]},
}


def plain(name: str, model: nn.Module, steps: int = 2) -> Any:
    optimizer = getattr(torch.optim, name)(model.parameters(), **PLAIN[name])
    train(model, optimizer, steps)
    return optimizer
