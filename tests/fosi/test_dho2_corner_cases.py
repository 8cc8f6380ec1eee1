"""Where curvature could go wrong without a word: autocast, warm starts, no rows, strange input."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from optimizer_cases import same
from ranks import agreed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from second_order import DHO2, SecondOrderWarning

if TYPE_CHECKING:
    from pool import World


def trained(steps: int = 40) -> tuple[nn.Module, Any]:
    """A float32 network after a while of training, and its loss on the curvature batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    x = torch.randn(128, 20)
    y = torch.randint(5, (128,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, lambda: cross_entropy(model(x), y)


def test_autocast_does_not_change_a_step() -> None:
    """Its algebra is not autocast; the refresh, at the first step, is not under autocast here."""
    model, _ = trained()
    twin = copy.deepcopy(model)
    x = torch.ones(4, 20)
    y = torch.tensor([0, 1, 2, 3])
    for each, under in ((model, True), (twin, False)):
        optimizer = DHO2(each, lr=0.1, momentum=0.9, warmup_steps=0)
        for step in range(3):
            optimizer.zero_grad()
            cross_entropy(each(x), y).backward()
            if step == 0:
                assert optimizer.curvature.refreshes == 0
            with torch.autocast("cpu", torch.bfloat16, enabled=under and step > 0):
                optimizer.step(curvature_closure=lambda each=each: cross_entropy(each(x), y))
    assert same(model, twin)


def test_a_warm_start_finds_curvature_outside_of_the_last_subspace() -> None:
    w = nn.Parameter(torch.ones(50, dtype=torch.float64))
    d = torch.zeros(50, dtype=torch.float64)
    d[:2] = torch.tensor([10.0, 9.0])
    optimizer = DHO2([w], lr=0.01, num_largest=2, warmup_steps=0, curvature_interval=2)
    optimizer.curvature_closure = lambda: 0.5 * (d * w * w).sum()
    for step in range(5):
        if step == 2:
            d[40] = 100.0
        optimizer.zero_grad()
        (0.5 * (d * w * w).sum()).backward()
        optimizer.step()
    expected = torch.tensor([100.0, 10.0], dtype=torch.float64)
    torch.testing.assert_close(optimizer.curvature.eigenvalues, expected, rtol=1e-3, atol=0)


def test_the_vectors_follow_the_dtype_of_the_parameters() -> None:
    """Otherwise, parameters would be rounded to float32 at each step."""
    model, _ = trained()
    x = torch.ones(4, 20)
    y = torch.tensor([0, 1, 2, 3])
    optimizer = DHO2(model, lr=0.1, momentum=0.9, warmup_steps=0, curvature_interval=2)
    optimizer.curvature_closure = lambda: cross_entropy(model(x), y)
    for step in range(4):
        if step == 2:
            model.double()
            x = x.double()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with (
            pytest.warns(SecondOrderWarning, match="or their dtype") if step == 2 else nullcontext()
        ):
            optimizer.step()
    weight = next(model.parameters())
    assert not torch.equal(weight, weight.float().double())
    assert optimizer._curvature.subspace.basis.vectors.dtype == torch.float64


@pytest.mark.parametrize(
    "options",
    [{"momentum": 1.0}, {"momentum": 0.9, "dampening": 1.0, "subspace_momentum": "base"}],
)
def test_a_momentum_that_ignores_the_gradient_raises(options: dict[str, Any]) -> None:
    """At once, or at the step that a schedule has led to."""
    model, loss = trained(1)
    with pytest.raises(ValueError, match="the gradient has the weight 0 in the span"):
        DHO2(model, lr=0.1, **options)
    started = {**options, "momentum": 0.5, "dampening": 0.0}
    optimizer = DHO2(model, lr=0.1, warmup_steps=0, curvature_closure=loss, **started)
    optimizer.param_groups[0].update(options)
    loss().backward()
    with pytest.raises(ValueError, match="use a momentum and a dampening below 1"):
        optimizer.step()
    DHO2(model, lr=0.1, num_largest=0, **options)  # without Newton steps


def few_unknowns(rank: int, world_size: int, layout: str, count: int) -> list[Tensor]:
    w = nn.Parameter(torch.full((count,), 2.0, dtype=torch.float64))
    optimizer = DHO2(
        [w],
        lr=0.1,
        momentum=0.9,
        num_largest=1,
        layout=layout,
        warmup_steps=1,
        curvature_interval=1,
    )
    trajectory = []
    for _ in range(4):
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step(curvature_closure=lambda: w.square().sum())
        trajectory.append(w.detach().clone())
    return trajectory


@pytest.mark.parametrize("layout", ["row", "column"])
def test_a_process_can_have_no_rows(world: World, layout: str) -> None:
    alone = few_unknowns(0, 1, layout, 1)
    together = agreed(world.run(few_unknowns, 2, layout, 1))
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


def test_a_loss_from_before_the_last_step_is_detected() -> None:
    model, loss = trained(1)
    old = loss()
    optimizer = DHO2(model, lr=0.1, warmup_steps=1, curvature_closure=lambda: old)
    for _ in range(2):
        optimizer.zero_grad()
        loss().backward()
        if optimizer.state:
            with pytest.raises(RuntimeError, match="evaluate it in every call"):
                optimizer.step()
        else:
            optimizer.step()
