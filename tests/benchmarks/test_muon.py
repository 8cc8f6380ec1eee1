"""Muon as the demo and the benchmarks have it: torch's, but in float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muon import Muon

OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
SHAPES = (16, 16), (48, 16), (16, 48)


def stepped(
    kind: Callable[..., torch.optim.Optimizer], model: nn.ParameterList, steps: int
) -> Tensor:
    """All that a copy of the model has moved by."""
    trained = deepcopy(model)
    optimizer = kind(trained.parameters(), **OPTIONS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in trained:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return moved(model, trained)


def moved(before: nn.ParameterList, after: nn.ParameterList) -> Tensor:
    with torch.no_grad():
        return torch.cat([(b - a).flatten() for a, b in zip(before, after, strict=True)])


def by_hand(model: nn.ParameterList, steps: int) -> Tensor:
    """The same in float64, by singular values: a polynomial of X acts on each of them alone."""
    trained = deepcopy(model).double()
    generator = torch.Generator().manual_seed(1)
    averages = [torch.zeros_like(p) for p in trained]
    for _ in range(steps):
        for p, average in zip(trained, averages, strict=True):
            gradient = torch.randn(p.shape, generator=generator).double()
            average.copy_(0.95 * average + 0.05 * gradient)
            u, s, vt = torch.linalg.svd(0.05 * gradient + 0.95 * average, full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            length = 0.1 * 0.2 * max(p.shape) ** 0.5
            p.data = (1 - 0.1 * 0.1) * p.data - length * (u * s) @ vt
    return moved(model.double(), trained)


@pytest.fixture
def model() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList(torch.randn(shape) for shape in SHAPES)


def test_is_the_published_algorithm_to_float32(model: nn.ParameterList) -> None:
    actual = stepped(Muon, model, 4)
    error = (actual.double() - by_hand(model, 4)).norm() / actual.norm()
    assert error < 1e-5


def test_is_torchs_own_to_bfloat16(model: nn.ParameterList) -> None:
    actual = stepped(Muon, model, 4)
    expected = stepped(torch.optim.Muon, model, 4)
    error = (actual - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.02
