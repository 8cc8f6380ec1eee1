"""Shared by the tests of state, groups and checkpoints: runs, their states, and comparisons."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import torch
from models import ZOO
from optimizer_cases import BASES, curvature_of, make, take
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable

MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


def unhooked(step: Any) -> Any:
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train(model: nn.Module, optimizer: Any, steps: int = 3, start: int = 0) -> None:
    for batch in BATCHES[start : start + steps]:
        take(model, optimizer, batch)


def saved_and_loaded(saved: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


def trained(System: Any, base: str = "SGD", **options: Any) -> tuple[nn.Module, Any]:
    Base, arguments = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **arguments, **options)
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


def are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(are_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(are_equal(x, y) for x, y in zip(a, b, strict=True))
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
