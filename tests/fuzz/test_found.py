"""Bugs that random training runs have found, each as a small test."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from optimizer_cases import each_system, make, take
from reference import cross_entropy
from torch import Tensor, nn

from fuzz_models import Part, Spec
from fuzz_training import Example, judge, train
from second_order import DHO2

if TYPE_CHECKING:
    from pool import World

LINEAR = Part("Linear", {"in_features": 3, "out_features": 2, "bias": True})
MODEL = Spec("rows", (3,), (LINEAR, Part("Tanh")), 2, "linear", "", "classes")
PAIRS = {"lr": 0.05, "num_largest": 2, "curvature_interval": 3, "warmup_steps": 1}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_cast_model_trains_equally_in_rows_and_columns(world: World, dtype: str) -> None:
    example = Example("DHO2", 2, 0, MODEL, dtype, PAIRS, habits=frozenset({"another dtype later"}))
    columns = replace(example, options={**PAIRS, "layout": "column"})
    rows = world.run(train, 2, example)
    whole = world.run(train, 2, columns)
    assert judge(example, rows).name == "trains"
    torch.testing.assert_close(rows[0]["parameters"], whole[0]["parameters"], rtol=1e-5, atol=1e-6)


@each_system
def test_closing_does_not_change_an_earlier_state_dict(System: Any) -> None:
    """A checkpoint may be written after the `with` block."""
    model = nn.Linear(3, 2)
    optimizer = make(System, model)
    for _ in range(3):
        take(model, optimizer, (torch.randn(4, 3), torch.tensor([0, 1, 0, 1])))
    saved = optimizer.state_dict()
    before = set(saved["state"][0]["curvature"])
    optimizer.close()
    assert set(saved["state"][0]["curvature"]) == before
    assert before - {"steps", "version", "base_class"}
    again = make(System, nn.Linear(3, 2))
    again.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_curvature_that_vanishes_makes_no_endless_steps() -> None:
    """The Gauss-Newton matrix of a saturated softmax: 1e-100, and other batches' gradients of 1."""
    model = nn.Linear(3, 2, bias=False).double()
    before = model.weight.detach().clone()
    x = torch.eye(3, dtype=torch.float64)
    y = torch.tensor([0, 1, 0])
    optimizer = DHO2(model, lr=0.1, num_largest=2, curvature_interval=2, warmup_steps=0)
    sharp = [1.0]

    def curvature() -> Tensor:
        return sharp[0] * cross_entropy(model(x), y)

    optimizer.curvature_closure = curvature
    for step in range(8):
        sharp[0] = 1.0 if step < 2 else 1e-100
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.curvature.eigenvalues.abs().max() > 1e-3
    assert float((model.weight.detach() - before).norm()) < 10.0
    sharp[0] = 1e-5
    for _ in range(2):
        optimizer.step()
    assert float(optimizer.curvature.eigenvalues.abs().max()) < 1e-4, "small curvature counts"
