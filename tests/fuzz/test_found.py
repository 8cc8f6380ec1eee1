"""What random trainings have found, each as small as it gets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from fuzz_models import Part, Spec
from fuzz_training import Example, judge, train

if TYPE_CHECKING:
    from pool import World

LINEAR = Part("Linear", {"in_features": 3, "out_features": 2, "bias": True})
MODEL = Spec("rows", (3,), (LINEAR, Part("Tanh")), 2, "linear", "", "classes")
PAIRS = {"lr": 0.05, "largest": 2, "curvature_interval": 3, "warmup_steps": 1}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_that_is_cast_goes_on_in_rows(world: World, dtype: str) -> None:
    """As it does where every process steps whole parameters."""
    example = Example("DHO2", 2, 0, MODEL, dtype, PAIRS, habits=("another dtype later",))
    columns = replace(example, options={**PAIRS, "layout": "column"})
    rows, whole = world.run(train, 2, example), world.run(train, 2, columns)
    assert judge(example, rows).name == "trains"
    torch.testing.assert_close(rows[0]["parameters"], whole[0]["parameters"], rtol=1e-5, atol=1e-6)
