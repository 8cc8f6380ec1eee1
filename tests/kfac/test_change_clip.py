"""A step's change is held against the usual one, so that outliers do not throw a model back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from models import ZOO
from optimizer_cases import KRONECKER, each_kronecker, make, take
from ranks import shard
from torch import nn
from torch.nn.utils import parameters_to_vector

from second_order import KAISA
from second_order.kfac.precondition import UsualChange

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(12, n=12)
OPTIONS: dict[str, Any] = {"grafting": "gradient", "kl_clip": "auto", "lr": 0.01}
SYSTEMS = {System.__name__: System for System in KRONECKER}
SIZES = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))
CHANGES = st.lists(SIZES, min_size=1, max_size=30)


def coefficients(changes: list[float]) -> list[float]:
    """ν of each step: by four times the average of the bounded changes before it.

    It is the mean of at most twenty changes, and forgets a twentieth at a step then.
    """
    found: list[float] = []
    average = 0.0
    for i, change in enumerate(changes):
        part = 1.0
        if i >= 5 and change > 0:
            part = min(max(4 * average / change, 4e-4), 1.0)
        average += (part * change - average) / min(i + 1, 20)
        found.append(math.sqrt(part))
    return found


def nu(usual: UsualChange, change: float) -> float:
    """ν, 1 where there is none."""
    found = usual.update(torch.tensor(change, dtype=torch.float64))
    return 1.0 if found is None else float(found)


@example([0.0] * 8)
@example([*[1.0] * 20, 400.0, 1.0, *[100.0] * 30])
@example([*[1.0] * 20, -1e-12])
@given(CHANGES)
def test_the_bound_is_four_times_the_running_average(changes: list[float]) -> None:
    """Rounding can make a change slightly negative. It is then not a large change."""
    usual = UsualChange()
    found = [nu(usual, change) for change in changes]
    assert found == pytest.approx(coefficients(changes), rel=1e-9)


def trained(rank: int, world_size: int, system: str, options: Any) -> tuple[Any, list[float]]:
    """Parameters after eight batches and one of outliers, and ν of each step."""
    model = MLP.model()
    optimizer = make(SYSTEMS[system], model, **{**OPTIONS, **options})
    clips = []
    for i, (x, y) in enumerate(BATCHES[:9]):
        batch = (100.0 * x, y) if i == 8 else (x, y)
        take(model, optimizer, shard(batch, rank, world_size))
        clips.append(optimizer.metrics()["clip"])
    return parameters_to_vector(model.parameters()).detach(), clips


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_batch_of_outliers_is_clipped_equally_on_all_ranks(
    world: World, system: str, base: Any
) -> None:
    results = world.run(trained, 2, system, {"base": base})
    for parameters, clips in results:
        assert torch.equal(parameters, results[0][0])
        assert clips == results[0][1]
        assert clips[:5] == [1.0] * 5
        assert clips[8] < 0.5
    _, without_clip = trained(0, 1, system, {"base": base, "kl_clip": None})
    assert without_clip == [1.0] * 9


@each_kronecker
def test_steps_without_preconditioned_layers_do_not_enter_the_average(System: Any) -> None:
    """Layers that are unfrozen late take their first steps in full."""
    model = MLP.model()
    optimizer = make(System, model, **OPTIONS, skip_layers=["4"])
    for p in model[:4].parameters():
        p.requires_grad_(False)
    for batch in BATCHES[:6]:
        take(model, optimizer, batch)
    assert optimizer._curvature.clip.usual.steps == 0
    for p in model[:4].parameters():
        p.requires_grad_(True)
    for batch in BATCHES[6:10]:
        take(model, optimizer, batch)
        assert optimizer.metrics()["clip"] == 1.0
    assert optimizer._curvature.clip.usual.steps > 0


@pytest.mark.parametrize("kl_clip", [1e-6, lambda step: 1e-6], ids=["number", "callable"])
def test_updates_are_clipped_before_they_are_rounded(kl_clip: Any) -> None:
    """Without the clip, these would overflow float16."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).half()
    newton = {"damping": 1e-9, "relative_damping": False, "grafting": "none"}
    optimizer = KAISA(model, lr=1e-3, kl_clip=kl_clip, **newton)
    model(torch.randn(2, 4).half()).square().sum().backward()
    gradient = model.weight.grad.clone()
    optimizer.step()
    assert optimizer.metrics()["clip"] < 0.1
    assert bool(model.weight.grad.isfinite().all())
    assert not torch.equal(model.weight.grad, gradient)
