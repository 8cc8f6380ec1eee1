"""Settings by preset: which one a model calls for, and that what is given goes before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from second_order import DHO2

GENERAL = {"largest": 10, "newton_scale": 0.1, "warmup_steps": None, "subspace_momentum": "average"}
TUNING = {"largest": 70, "newton_scale": 0.5, "warmup_steps": 0, "subspace_momentum": 0.0}


def body_and_head(frozen: int = 2) -> nn.Sequential:
    """20-20-20-2, of which the first layers are frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
    model.append(nn.Linear(20, 2)).double()
    for layer in [m for m in model if isinstance(m, nn.Linear)][:frozen]:
        layer.requires_grad_(False)
    return model


def options_of(optimizer: DHO2) -> dict[str, Any]:
    return vars(optimizer._curvature.options)


def settings_of(optimizer: DHO2) -> str:
    (line,) = (note for note in optimizer.summary().notes or () if note.startswith("settings: "))
    return line


class Adapted(nn.Module):
    """A small matrix that trains beside a frozen one, in each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(20, 1)
        self.large = nn.Linear(20, 20).requires_grad_(False)
        self.last = nn.Linear(20, 20).requires_grad_(False)


class Embedded(nn.Module):
    """A frozen table of embeddings, which no product runs through anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 20).requires_grad_(False)
        self.rest = nn.Linear(20, 2)


@pytest.mark.parametrize(
    ("model", "preset"),
    [
        (body_and_head(), "fine-tuning"),
        (body_and_head(1), "general"),  # half of the model: a gradient runs the other half, too
        (body_and_head(0), "general"),
        (Adapted(), "general"),  # a product runs from the first layer on
        (Embedded(), "general"),
    ],
    ids=["head", "half", "whole", "adapters", "embedding"],
)
def test_a_frozen_body_is_seen(model: nn.Module, preset: str) -> None:
    optimizer = DHO2(model, lr=0.1)
    expected = TUNING if preset == "fine-tuning" else GENERAL
    assert expected.items() <= options_of(optimizer).items()
    assert settings_of(optimizer).startswith(f"settings: {preset}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"newton_scale": 0.2}, {**TUNING, "newton_scale": 0.2, "lanczos_iterations": 100}),
        ({"warmup_steps": 7, "subspace_momentum": "average"}, {"warmup_steps": 7, "largest": 70}),
        ({"largest": 4}, {"largest": 4, "lanczos_iterations": None, "newton_scale": 0.5}),
        ({"lanczos_iterations": 20}, {"largest": 20, "lanczos_iterations": 20}),
        ({"lanczos_iterations": 20, "largest": 3}, {"largest": 3, "lanczos_iterations": 20}),
        ({"smallest": 40}, {"largest": 70, "smallest": 40, "lanczos_iterations": None}),
        ({"preset": "general"}, {**GENERAL, "lanczos_iterations": None}),
        ({"preset": "full-batch"}, {"largest": 10, "warmup_steps": 100, "newton_scale": 0.5}),
    ],
    ids=str,
)
def test_what_is_given_goes_before_the_preset(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    optimizer = DHO2(body_and_head(), lr=0.1, **given)
    assert expected.items() <= options_of(optimizer).items()
    assert not any(f" {name}=" in settings_of(optimizer) for name in given)
