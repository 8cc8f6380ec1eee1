"""Defaults: one scale of steps for every base, and a memory that follows the base."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO
from optimizer_cases import each_kronecker, make, take
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adam,
    AdamW,
    Muon,
    RMSprop,
)

from second_order import KAISA, PerStep
from second_order.kfac.schedule import per_step_decay
from second_order.kronecker.factors import layer_mean_curvature
from second_order.optimizers.config import DAMPING, DAMPING_FLOOR
from second_order.utils.checks import is_adaptive

if TYPE_CHECKING:
    from second_order import SecondOrderOptimizer


def options_of(optimizer: SecondOrderOptimizer) -> Any:
    return optimizer._curvature._options  # type: ignore[attr-defined]


@each_kronecker
def test_default_settings_depend_on_the_base(System: type[KAISA]) -> None:
    model = nn.Linear(3, 2)
    for base in (Adadelta, Adafactor, Muon, RMSprop):
        assert is_adaptive(base)
        assert is_adaptive(type("Mine", (base,), {}))
    assert not is_adaptive(torch.optim.ASGD)
    plain, adaptive = (options_of(System(model, lr=0.1, base=base)) for base in (SGD, AdamW))
    assert plain.factor_decay == PerStep(0.995)
    assert adaptive.factor_decay == PerStep(0.978, share=1 / 3)
    own_options = {"damping": 1.0, "kl_clip": 1e-3, "factor_decay": 0.5}
    chosen = options_of(System(model, lr=0.1, base=AdamW, **own_options))
    assert {name: getattr(chosen, name) for name in own_options} == own_options


def test_with_two_bases_the_first_decides_the_defaults() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    adaptive = options_of(KAISA(model, lr=0.1, base=Muon, aux_base=SGD))
    assert adaptive.factor_decay == PerStep(0.978, share=1 / 3)
    assert options_of(KAISA(model, lr=0.1, base=SGD, aux_base=AdamW)).factor_decay == PerStep(0.995)


class ScheduleFree(SGD):
    """A base that keeps other points than the weights."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


GRAFTED = {
    "grafting": "gradient",
    "damping": DAMPING,
    "damping_floor": DAMPING_FLOOR,
    "step_scale": True,
    "kl_clip": "auto",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        *(({"base": base}, GRAFTED) for base in (SGD, Adam, AdamW)),
        ({"damping": 0.2}, {"damping_floor": DAMPING_FLOOR}),
        ({"damping": 0.2, "relative_damping": False}, {"damping_floor": 0.0}),
        ({"grafting": "none"}, {"kl_clip": None, "step_scale": False}),
        ({"grafting": "none", "kl_clip": 1e-3}, {"step_scale": False}),
        ({"base": ScheduleFree}, {"step_scale": False}),
        ({"step_scale": False}, {"step_scale": False}),
    ],
)
@each_kronecker
def test_grafting_is_the_default_and_others_follow_from_it(
    System: type[KAISA], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Absolute damping has no floor. The step scale requires grafting and the base's own points."""
    found = options_of(System(nn.Linear(3, 2), lr=0.1, **options))
    assert {name: getattr(found, name) for name in expected} == expected


def model_and_batch(examples: int) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(examples, 6, generator=generator, dtype=torch.float64)
    return model, x, torch.randint(3, (examples,), generator=generator)


EXACT: dict[str, Any] = {
    "lr": 1.0,
    "factor_dtype": torch.float64,
    "damping": 1e-3,
}


def test_a_short_last_batch_is_weighted_by_its_examples() -> None:
    model, x, y = model_and_batch(64)
    optimizer = KAISA(model, **EXACT, factor_update_steps=1, inv_update_steps=1)
    for examples in (64, 64, 64, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:examples]), y[:examples]).backward()
        optimizer.step()
    found = float(optimizer.state_dict()["state"][0]["curvature"]["examples"])
    assert found == pytest.approx(
        (64 + 64 * 0.995 + 64 * 0.995**2 + 64 * 0.995**3 - 63) / (1 + 0.995 + 0.995**2 + 0.995**3)
    )


def test_the_memory_of_factors_in_steps_does_not_depend_on_the_interval() -> None:
    assert per_step_decay(PerStep(0.95), 1, 0) == 0.95
    assert per_step_decay(PerStep(0.95), 10, 10) == pytest.approx(0.95**10)
    model, x, y = model_and_batch(20)
    weights = []
    for every in (1, 5):
        torch.manual_seed(0)
        of = copy.deepcopy(model)
        quick = {"factor_update_steps": every, "inv_update_steps": 5}
        optimizer = KAISA(of, **{**EXACT, **quick})
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(of(x), y).backward()
            optimizer.step()
        weights.append(float(optimizer.state_dict()["state"][0]["curvature"]["average_weight"]))
    assert weights[0] == pytest.approx(sum(0.995**k for k in range(6)))
    assert weights[1] == pytest.approx(1 + 0.995**5)


@pytest.mark.parametrize("fields", [{"decay": 1.0}, {"decay": 0.9, "share": 1.5}])
def test_a_memory_in_steps_is_validated(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=list(fields)[-1]):
        PerStep(**fields)


def test_early_in_a_run_factors_remember_a_share_of_its_steps() -> None:
    memory = PerStep(0.978, share=1 / 3)
    assert per_step_decay(memory, 1, 0) == per_step_decay(memory, 1, 6) == 0.5
    assert per_step_decay(memory, 1, 30) == pytest.approx(0.9)
    assert per_step_decay(memory, 5, 30) == pytest.approx(0.9**5)
    assert per_step_decay(memory, 10, 10_000) == pytest.approx(0.978**10)
    model, x, y = model_and_batch(20)
    optimizer = KAISA(model, lr=1e-3, base=AdamW, inv_update_steps=1)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    weight = float(optimizer.state_dict()["state"][0]["curvature"]["average_weight"])
    assert weight == pytest.approx(1 + 0.5 + 0.25 + 0.125)


NAMES = "mlp", "conv", "embedding", "norms", "transformer"


def preconditioned(System: Any, name: str, scale: str, **options: Any) -> Any:
    """An optimizer whose last step has left preconditioned gradients, and its model."""
    case = ZOO[name]
    model = case.model()
    approx = {"kfac_approx": case.shared} if case.shared else {}
    chosen = {"grafting": scale, "precondition_norms": True, **approx, **options}
    optimizer = make(System, model, lr=0.0, **chosen)
    for batch in case.batches(2, n=8):
        take(model, optimizer, batch, case.loss)
    return optimizer


@settings(max_examples=10)
@given(
    name=st.sampled_from(NAMES),
    solver=st.sampled_from(["eigen", "inverse"]),
    relative=st.booleans(),
    damping=st.floats(0.01, 10.0),
)
@each_kronecker
def test_grafting_multiplies_newton_steps_by_the_mean_damped_curvature(
    System: type[SecondOrderOptimizer], name: str, solver: str, relative: bool, damping: float
) -> None:
    options: dict[str, Any] = {"solver": solver, "relative_damping": relative}
    options |= {"damping": damping, "damping_floor": 0.0}
    newton, scaled = (preconditioned(System, name, s, **options) for s in ("none", "gradient"))
    blocks: Any = [each._curvature.layers.active for each in (newton, scaled)]
    assert blocks[0]
    for plain, other in zip(*blocks, strict=True):
        mean = layer_mean_curvature(plain.ensure_factors().means)
        assert mean > 0
        times_mean = mean + damping * (mean if relative else 1.0)
        for p, q in zip(plain.params, other.params, strict=True):
            torch.testing.assert_close(q.grad, p.grad * times_mean, rtol=1e-9, atol=1e-14)
