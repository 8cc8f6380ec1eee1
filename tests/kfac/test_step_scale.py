"""The step scale follows from the slope of the loss along the last step, and γ has a floor."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import ZOO
from optimizer_cases import KRONECKER, each_kronecker, make, take
from ranks import replaced, shard
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from second_order import KAISA
from second_order.checkpoint.saved import SavedPart
from second_order.kfac import step_scale as rule
from second_order.kfac.step_scale import (
    ADAPTIVE_BOUNDS,
    PLAIN_BOUNDS,
    ScaleBounds,
    StepScale,
)
from second_order.kronecker.factors import layer_mean_curvature
from second_order.optimizers.config import DAMPING, DAMPING_FLOOR

if TYPE_CHECKING:
    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(10, n=12)
GRADIENT: dict[str, Any] = {"grafting": "gradient"}
FOLLOWS: dict[str, Any] = {**GRADIENT, "momentum": 0.9}  # refreshed at every step
ADAM: dict[str, Any] = {**GRADIENT, "base": torch.optim.Adam, "lr": 0.01}
SYSTEMS = {System.__name__: System for System in KRONECKER}


def expected_scales(
    slopes: list[tuple[float, int]], bounds: ScaleBounds, is_scheduled: bool = False
) -> list[float]:
    """τ after each slope and step, by the formula at the top of the module."""
    scale = 1.0
    last_step: int | None = None
    scales: list[float] = []
    signs: list[float] = []
    sizes: list[float] = []

    def average(values: list[float]) -> float:
        weights = [rule.DECAY**k for k in range(len(values))][::-1]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights or [1.0])

    for s, step in slopes:
        usual = average(sizes)
        signs.append(math.copysign(1.0, s) if s else 0.0)
        sizes.append(abs(s))
        evidence = average(signs) + (0.3 if scale <= 1 or is_scheduled else -0.3)
        has_risen = -s > 2 * usual > 0
        log_change = max(s / usual, -4.0) / 2 if has_risen else 0.0
        if evidence < 0:
            log_change += evidence
        elif not has_risen:
            log_change += 0.2 * evidence * (1 if last_step is None else min(step - last_step, 4))
        last_step = step
        high = min(bounds.high, 2.0) if is_scheduled else bounds.high
        scale = min(max(scale * math.exp(log_change), bounds.low), high)
        scales.append(scale)
    return scales


@pytest.mark.parametrize("bounds", [PLAIN_BOUNDS, ADAPTIVE_BOUNDS], ids=["plain", "adaptive"])
@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize(
    "slopes",
    [
        [1.0] * 20,
        [-1.0] * 20,
        [1.0, -1.0] * 10,
        [1.0, 1.0, 1.0, -3.0, 1.0, 1.0],  # one rise
        [1.0, 1.0, -1e6, 1.0],
        [1e-9, -2e-9, 5.0, -1e-3],
    ],
    ids=str,
)
def test_the_scale_follows_from_the_slopes(
    slopes: list[float], every: int, bounds: ScaleBounds
) -> None:
    scale = StepScale(bounds)
    scales: list[float] = []
    at = [(s, every * i) for i, s in enumerate(slopes)]
    for s, step in at:
        scale.update(s, 0.1, step)
        scales.append(scale.state.scale)
    assert scales == pytest.approx(expected_scales(at, bounds), rel=1e-12)
    assert all(bounds.low <= tau <= bounds.high for tau in scales)


@pytest.mark.parametrize(
    "signs",
    [[1.0] * 20, [1.0, -1.0] * 20, [1.0, -1.0, -1.0] * 14, [-1.0] * 20],
    ids=["falls", "noise", "mostly rises", "rises"],
)
def test_while_a_schedule_changes_the_rate_the_scale_needs_less_evidence(
    signs: list[float],
) -> None:
    scale = StepScale(PLAIN_BOUNDS)
    scales: list[float] = []
    scale.update(math.nan, 1.0, 0)
    at = [(s, i + 1) for i, s in enumerate(signs)]
    for s, step in at:
        scale.update(s, 1.0 / (step + 1), step)
        scales.append(scale.state.scale)
    assert scales == pytest.approx(expected_scales(at, PLAIN_BOUNDS, is_scheduled=True), rel=1e-12)
    assert max(scales) <= 2.0


@given(st.lists(st.floats(-1.0, 1.0) | st.just(math.nan), min_size=1, max_size=30))
def test_over_adaptive_bases_the_scale_is_two_while_the_rate_changes(
    slopes: list[float],
) -> None:
    """For any slopes. Once the rate is constant, the scale follows the slopes again."""
    scale = StepScale(ADAPTIVE_BOUNDS)
    scale.update(math.nan, 1.0, 0)
    for i, s in enumerate(slopes):
        scale.update(s, 1.0 / (i + 2), i + 1)
        assert scale.state.scale == 2.0
    for step in range(
        200, 240
    ):  # 10% of all steps after its last change, a rate counts as constant
        scale.update(-1.0, 1.0, step)
    assert scale.state.scale < 2.0


def test_a_scheduled_rate_bounds_the_scale_even_if_the_last_step_is_unknown() -> None:
    scale = StepScale(PLAIN_BOUNDS)
    for step in range(40):
        scale.update(1.0, 0.1, step)
    scale.update(math.nan, 0.1, 40)
    assert scale.state.scale == 5.0
    scale.update(math.nan, 0.05, 41)
    assert scale.state.scale == 2.0


@pytest.mark.parametrize(
    ("rate", "moving"),
    [
        (lambda step: 0.01, []),
        (lambda step: 0.01 * (step + 1), range(1, 100)),
        (lambda step: 0.01 * min(step, 20), range(1, 23)),  # the last change is at step 20
        (lambda step: 0.01 * 0.5 ** (step // 50), range(50, 56)),
    ],
    ids=["constant", "moving", "warm-up", "halved"],
)
def test_noisy_slopes_raise_the_scale_only_while_the_rate_changes(
    rate: Callable[[int], float], moving: Sequence[int]
) -> None:
    """The loss rises along every second step. With a constant rate, τ remains 1."""
    scale = StepScale(PLAIN_BOUNDS)
    longer = []
    for step in range(100):
        before = scale.state.scale
        scale.update((-1.0) ** step, rate(step), step)
        if scale.state.scale > max(before, 1.1):
            longer.append(step)
        if step == 60:  # continues in another process
            saved = scale.saved()
            scale = StepScale(PLAIN_BOUNDS)
            scale.load({torch.zeros(()): SavedPart(0, "curvature", "weight", saved)})
            assert scale.saved() == saved
    after_first = [step for step in longer if step > 5]  # the first signs are not yet an average
    assert set(after_first) <= set(moving)
    assert bool(after_first) == bool(moving)


def gradients_of(model: nn.Module, batch: Batch) -> list[Tensor]:
    twin = copy.deepcopy(model)
    twin.zero_grad()
    MLP.loss(twin(batch[0]), batch[1]).backward()
    return [p.grad for p in twin.parameters() if p.grad is not None]


def measured(rank: int, world_size: int, system: str, options: Any) -> tuple[list[float], Any]:
    """The slopes that the optimizer measures, and those computed from weights and gradients."""
    model = MLP.model()
    optimizer = make(SYSTEMS[system], model, **options)
    scale = optimizer._curvature.step_scale
    update = scale.update
    slopes: list[float] = []
    expected: list[float] = []

    def record(slope: float, rate: float, step: int) -> None:
        slopes.append(slope)
        update(slope, rate, step)

    with replaced(scale, {"update": record}):
        for i, batch in enumerate(BATCHES[:6]):
            before = [p.detach().clone() for p in model.parameters()]
            take(model, optimizer, shard(batch, rank, world_size))
            if i + 1 < 6:
                step = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
                gradients = gradients_of(model, BATCHES[i + 1])
                products = zip(gradients, step, strict=True)
                expected.append(-sum(float(g.flatten() @ d.flatten()) for g, d in products))
    return slopes, expected


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_slope_is_the_next_mean_gradient_along_the_scaled_step(
    world: World, system: str
) -> None:
    """The mean is that over all ranks. Slopes are summed in float32 on each rank."""
    for slopes, expected in world.run(measured, 2, system, FOLLOWS):
        assert math.isnan(slopes[0])
        assert slopes[1:] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("options", [FOLLOWS, ADAM], ids=["SGD", "Adam"])
@each_kronecker
def test_only_preconditioned_weights_are_scaled(System: Any, options: dict[str, Any]) -> None:
    ends = []
    states = []
    for factor in (1.0, 0.25):
        model = MLP.model()
        optimizer = make(System, model, **options, skip_layers=["2"])
        take(model, optimizer, BATCHES[0])
        scale = optimizer._curvature.step_scale
        scale.state = scale.state._replace(scale=factor)
        before = [p.detach().clone() for p in model.parameters()]
        with replaced(scale, {"update": lambda *arguments: None}):
            take(model, optimizer, BATCHES[1])
        ends.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
        states.append(
            [
                {k: v for k, v in optimizer.state[p]["base"].items() if isinstance(v, Tensor)}
                for p in model.parameters()
            ]
        )
    scaled = [1.0 if name.startswith("2.") else 0.25 for name, _ in MLP.model().named_parameters()]
    assert scaled.count(1.0) == 2
    for whole, part, factor in zip(*ends, scaled, strict=True):
        torch.testing.assert_close(part, factor * whole, rtol=1e-9, atol=1e-15)
    for a, b in zip(*states, strict=True):
        assert a.keys() == b.keys() != set()
        assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("options", [FOLLOWS, ADAM], ids=["SGD", "Adam"])
def test_a_bias_that_layers_share_is_scaled_once(options: dict[str, Any]) -> None:
    moves = []
    for factor in (1.0, 0.25):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh()).double()
        model[2].bias = model[0].bias
        optimizer = make(KAISA, model, **options)
        batches = [(torch.randn(8, 5).double(), torch.randint(5, (8,))) for _ in range(2)]
        take(model, optimizer, batches[0])
        scale = optimizer._curvature.step_scale
        scale.state = scale.state._replace(scale=factor)
        before = model[0].bias.detach().clone()
        with replaced(scale, {"update": lambda *arguments: None}):
            take(model, optimizer, batches[1])
        moves.append(model[0].bias.detach() - before)
    torch.testing.assert_close(moves[1], 0.25 * moves[0], rtol=1e-9, atol=1e-15)


def test_the_next_step_does_not_change_the_step_of_a_saved_state() -> None:
    model = MLP.model()
    optimizer = make(KAISA, model, **FOLLOWS, maximize=True)
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
    states = optimizer.state_dict()["state"].values()
    saved = [entry["curvature"]["last_step"] for entry in states]
    before = [step.clone() for step in saved]
    take(model, optimizer, BATCHES[2])
    assert all(map(torch.equal, saved, before))


def test_without_grafting_or_step_scale_steps_are_unchanged() -> None:
    chosen: list[dict[str, Any]] = [
        {"grafting": "none", "kl_clip": None},
        {"grafting": "none", "kl_clip": 1e-3},
        {"grafting": "gradient", "step_scale": False},
    ]
    for options in chosen:
        model = MLP.model()
        optimizer = make(KAISA, model, **options)
        for batch in BATCHES[:4]:
            take(model, optimizer, batch)
        assert optimizer.metrics()["step_scale"] == 1.0
        assert optimizer._curvature.step_scale is None


def dampings(rank: int, world_size: int, system: str, options: Any) -> list[dict[str, float]]:
    """γ of each layer at the second refresh, where it is kept, and the layers' curvature."""
    model = MLP.model()
    chosen = {"relative_damping": True, "damping": "auto", "damping_floor": "auto", **options}
    optimizer = make(SYSTEMS[system], model, **chosen)
    curvature = optimizer._curvature
    with torch.no_grad():
        model[4].weight.mul_(1e-4)  # the gradients of the layers below nearly vanish
    for batch in BATCHES[:2]:
        mean = curvature.mean_curvature
        take(model, optimizer, shard(batch, rank, world_size))
    states = curvature.inverses.states
    found = {b.name: float(states[b].damping) for b in states if b.inverse is not None}
    own = {
        block.name: float(layer_mean_curvature(block.ensure_factors().means))
        for block in curvature.plan
    }
    return [found, own, {"mean": mean, "mean afterwards": curvature.mean_curvature}]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_damping_floor_uses_all_layers(world: World, system: str, world_size: int) -> None:
    for options in ({}, ADAM):
        results = world.run(dampings, world_size, system, options)
        raised = 0
        for found, own, arguments in results:
            assert arguments == results[0][2]
            for name, damping in found.items():
                expected = DAMPING * max(own[name], DAMPING_FLOOR * arguments["mean"])
                assert damping == pytest.approx(expected, rel=1e-5)
                raised += own[name] < DAMPING_FLOOR * arguments["mean"]
            if world_size == 1:
                root = statistics.mean(map(math.sqrt, own.values()))
                assert arguments["mean afterwards"] == pytest.approx(root**2, rel=1e-5)
        assert raised > 0


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("every", [10, "auto"])
def test_maximizing_the_negative_loss_equals_minimizing_the_loss(base: Any, every: Any) -> None:
    found = []
    for sign in (1.0, -1.0):
        model = MLP.model()
        keywords: dict[str, Any] = {"base": base, "maximize": sign < 0, "weight_decay": 0.01}
        optimizer = KAISA(model, lr=0.05, inv_update_steps=every, **keywords)
        for x, y in MLP.batches(12):
            optimizer.zero_grad()
            (sign * cross_entropy(model(x), y)).backward()
            optimizer.step()
        found.append((parameters_to_vector(model.parameters()), optimizer.metrics()))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-12, atol=0.0)
    assert found[1][1]["step_scale"] == pytest.approx(found[0][1]["step_scale"], rel=1e-12)
