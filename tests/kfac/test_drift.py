"""Layers are refreshed as they drift: what is measured, what follows, and what bounds it."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from distkfac_training import Gate, solving
from hypothesis import given
from hypothesis import strategies as st
from models import ZOO
from optimizer_cases import KRONECKER, each_kronecker, make, matrices, take
from ranks import shard, vector
from reference import block as dense_block
from reference import to_matrix
from torch import Tensor, nn

from second_order import KAISA, DistKFAC
from second_order.kfac.schedule import (
    MAX_INTERVAL,
    STEP_OVERHEAD,
    CosineThresholds,
    Drift,
    LayerDrift,
    cost_bounds,
)

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
LAYERS = "0", "2", "4"
BATCHES = MLP.batches(10, n=12)
BY_DRIFT: dict[str, Any] = {"factor_update_steps": "auto", "inv_update_steps": "auto"}
SYSTEMS = {System.__name__: System for System in KRONECKER}


@pytest.mark.parametrize(
    ("interval", "num_stable", "cosine", "bound", "expected"),
    [
        (8, 0, 0.94, 1, (4, 0)),
        (8, 1, 0.94, 1, (4, 0)),
        (1, 0, -1.0, 1, (1, 0)),
        (8, 0, 0.96, 1, (8, 0)),
        (8, 1, 0.96, 1, (8, 0)),  # not in a row
        (8, 0, 0.99, 1, (8, 1)),
        (8, 1, 0.99, 1, (16, 0)),
        (MAX_INTERVAL, 1, 0.99, 1, (MAX_INTERVAL, 0)),
        (1, 1, 0.99, 8, (16, 0)),  # it was 8 steps apart that they were alike
        (2, 0, 0.5, 8, (4, 0)),
        (64, 1, 0.99, 64, (64, 0)),
    ],
)
def test_drift_equals_a_computation_by_hand(
    interval: int, num_stable: int, cosine: float, bound: int, expected: tuple[int, int]
) -> None:
    thresholds = CosineThresholds(halve_below=0.95, double_above=0.985, patience=2)
    found = LayerDrift(interval, num_stable=num_stable).after_refresh(cosine, thresholds, bound)
    assert (found.interval, found.num_stable) == expected
    assert found.cosine == cosine


COSTS = st.lists(st.floats(0.0, 1e13), min_size=1, max_size=20)


@given(costs=COSTS, work=st.floats(1.0, 1e13))
def test_minimum_intervals_bound_the_work_of_passes(costs: list[float], work: float) -> None:
    """Up to the rounding to powers of two, by which one may be the square root of 2 too short."""
    found = cost_bounds(costs, work)
    assert all(every > 0 and every & (every - 1) == 0 for every in found)
    total = sum(map(math.sqrt, costs))
    if all(math.sqrt(cost) * total / (work + STEP_OVERHEAD) < 2**10 for cost in costs):
        spent = sum(cost / every for cost, every in zip(costs, found, strict=True))
        assert spent <= math.sqrt(2) * (work + STEP_OVERHEAD) * (1 + 1e-9)
    by_cost = [every for _, every in sorted(zip(costs, found, strict=True))]
    assert by_cost == sorted(by_cost)


class Layer:
    """As much of a block as a drift looks at."""

    def __init__(self, solved: bool = True) -> None:
        self.solved = solved


def drift_of(intervals: list[int]) -> tuple[Drift, list[Any]]:
    drift = Drift()
    layers = [Layer() for _ in intervals]
    drift.states = {
        layer: LayerDrift(interval)  # type: ignore[misc]
        for layer, interval in zip(layers, intervals, strict=True)
    }
    return drift, layers


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=12), st.integers(0, 64))
def test_layers_are_due_at_multiples_and_not_more_often_than_a_quarter_needs(
    intervals: list[int], step: int
) -> None:
    drift, layers = drift_of(intervals)
    tick = sorted(intervals)[len(intervals) // 4]
    due = drift.layers_due(layers, step)
    assert due == [
        layer
        for layer, every in zip(layers, intervals, strict=True)
        if step % max(every, tick) == 0
    ]
    assert not due or step % tick == 0


def test_a_layer_without_an_inverse_is_tried_at_doubling_intervals() -> None:
    drift, layers = drift_of([1, 1, 1, 1])
    layers[3].solved = False
    tried: list[int] = []
    for step in range(200):
        due = drift.layers_due(layers, step)
        assert due[:3] == layers[:3]  # the others are not concerned
        if layers[3] in due:
            tried.append(step)
        drift.count_without_inverse(due)
    assert tried == [*range(8), 8, 12, 16, 32, 64, 128, 192]
    assert drift.metrics["drift/interval"] == 1
    layers[3].solved = True
    drift.count_without_inverse(layers)
    assert drift.interval(layers[3]) == 1


@pytest.mark.parametrize("num_frozen", [1, 3])
def test_reported_intervals_are_those_of_layers_with_an_inverse(num_frozen: int) -> None:
    drift, layers = drift_of([8, 8, 8, 8])
    for layer in layers[:num_frozen]:
        layer.solved = False
    assert drift.metrics["drift/interval"] == 8
    assert drift.summary_line == "refreshes by drift, every 8 steps"


Cosines = dict[str, float]


def stored_here(optimizer: Any) -> dict[str, Any]:
    """The averages (A, G) of every layer of which this rank has both."""
    return {
        block.name: tuple(matrices(block.factors))
        for block in optimizer._curvature.layers.blocks
        if len(block.ensure_factors().stored) == 2
    }


def cosines_by_hand(before: Any, after: Any, gradients: Any) -> Cosines:
    """Of each layer whose factors are here: P by old and new factors, dense and in float64."""
    found = {}
    for name in after:
        g = gradients[name].flatten()
        eye = torch.eye(len(g), dtype=torch.float64)
        old, new = (
            torch.linalg.solve(dense_block(*both[name]) + 0.1 * eye, g) for both in (before, after)
        )
        found[name] = float(old @ new / (old.norm() * new.norm()))
    return found


def mean_gradients(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    twin = copy.deepcopy(model)
    twin.zero_grad()
    MLP.loss(twin(batch[0]), batch[1]).backward()
    found = {}
    for name in LAYERS:
        layer: Any = twin.get_submodule(name)
        found[name] = to_matrix(layer, layer.weight.grad, layer.bias.grad)
    return found


def second_refresh(rank: int, world_size: int, system: str) -> tuple[Cosines, Cosines, Any]:
    """The cosines of the second refresh, computed by hand on this rank, and by the optimizer."""
    model = MLP.model()
    optimizer = make(SYSTEMS[system], model, **BY_DRIFT)
    first, second = ((10 * x, y) if i else (x, y) for i, (x, y) in enumerate(BATCHES[:2]))
    take(model, optimizer, shard(first, rank, world_size))
    before = stored_here(optimizer)
    gradients = mean_gradients(model, second)
    take(model, optimizer, shard(second, rank, world_size))
    by_hand = cosines_by_hand(before, stored_here(optimizer), gradients)
    states = optimizer._curvature.drift.states
    cosines = {block.name: state.cosine for block, state in states.items()}
    return by_hand, cosines, optimizer.metrics()


@pytest.mark.parametrize("system", SYSTEMS)
def test_cosines_equal_those_of_dense_preconditioning(world: World, system: str) -> None:
    """The cosine of the mean gradient over all ranks, for each placement; sent in float32."""
    results = world.run(second_refresh, 2, system)
    by_hand = {name: each for known, _, _ in results for name, each in known.items()}
    assert set(by_hand) == set(LAYERS)
    assert min(by_hand.values()) < 0.99
    for _, cosines, numbers in results:
        assert cosines == results[0][1]
        for name, expected in by_hand.items():
            assert cosines[name] == pytest.approx(expected, rel=1e-5)
        assert numbers["drift/cosine/min"] == min(cosines.values())
        assert numbers["drift/cosine"] == sorted(cosines.values())[1]


def trained(
    rank: int, world_size: int, system: str, steps: int, changed_at: int, options: Any = None
) -> tuple[list[list[int]], list[list[str]], Any]:
    """Train on one batch repeatedly, and on a very different one from some step on.

    Returns each step's intervals, the layers solved at each, and what is saved.
    """
    model = MLP.model()
    solved = []
    optimizer = make(SYSTEMS[system], model, lr=1e-3, **BY_DRIFT, **(options or {}))
    curvature = optimizer._curvature
    intervals = []
    x, y = BATCHES[0]
    for step in range(steps):
        batch = (x, y) if step < changed_at else (-30 * x.flip(1), y.flip(0))
        take(model, optimizer, shard(batch, rank, world_size))
        landed = {b for b, each in curvature.inverses.states.items() if each.installed_at == step}
        solved.append([b.name for b in curvature.layers.blocks if b in landed])
        intervals.append([curvature.drift.interval(b) for b in curvature.layers.blocks])
    optimizer.consolidate(to=None)
    return intervals, solved, copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("system", SYSTEMS)
def test_intervals_grow_without_drift_and_shrink_with_drift(world: World, system: str) -> None:
    """All ranks have the same intervals."""
    results = world.run(trained, 2, system, 160, 128)
    intervals, solved, _ = results[0]
    assert all(found[:2] == (intervals, solved) for found in results)
    assert intervals[0] == [1, 1, 1]
    assert min(intervals[127]) >= 16
    assert min(intervals[159]) < min(intervals[127])
    for step, names in enumerate(solved[1:], 1):
        for name in names:
            assert step % intervals[step - 1][LAYERS.index(name)] == 0
    assert 12 < sum(map(bool, solved[:128])) < 40


def train_wide(rank: int, world_size: int) -> tuple[list[list[int]], list[Tensor]]:
    """Train with default settings, and return each step's intervals and parameters.

    To refresh the first layer costs more than a step, so that its cost bounds its interval.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = KAISA(model, lr=0.05, momentum=0.9, factor_dtype=torch.float64)
    curvature = optimizer._curvature
    intervals = []
    params = []
    for _ in range(8):
        batch = (torch.randn(12, 700, dtype=torch.float64), torch.randint(3, (12,)))
        take(model, optimizer, shard(batch, rank, world_size))
        intervals.append([curvature.drift.interval(b) for b in curvature.layers.blocks])
        params.append(vector(model))
    return intervals, params


def test_intervals_do_not_depend_on_the_number_of_ranks_that_share_a_batch(world: World) -> None:
    """Neither do parameters, but for rounding."""
    intervals, params = train_wide(0, 1)
    assert max(intervals[-1]) > 1
    for found_intervals, found_params in world.run(train_wide, 2):
        assert found_intervals == intervals
        torch.testing.assert_close(found_params, params, rtol=1e-9, atol=1e-12)


@each_kronecker
def test_a_resumed_run_has_the_same_intervals(System: Any) -> None:
    intervals, _, (weights, saved) = trained(0, 1, System.__name__, 41, 1000)
    model = MLP.model()
    model.load_state_dict(weights)
    resumed = make(System, model, lr=1e-3, **BY_DRIFT)
    resumed.load_state_dict(saved)
    curvature = resumed._curvature
    assert max(intervals[-1]) >= 4
    assert [curvature.drift.interval(b) for b in curvature.layers.blocks] == intervals[-1]
    for _ in range(3):  # steps 41 to 43: new inverses are not a change
        take(model, resumed, BATCHES[0])
        assert [curvature.drift.interval(b) for b in curvature.layers.blocks] == intervals[-1]


class Returning(nn.Module):
    """An MLP whose last layers, from ``rest_from`` on, are only called from some step on."""

    def __init__(self, called_from: int, rest_from: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = MLP.model()
        self.called_from = called_from
        self.rest_from = rest_from
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        is_called = self.step >= self.called_from
        self.step += 1
        for i, layer in enumerate(self.layers):
            if isinstance(layer, nn.Linear) and i >= self.rest_from and not is_called:
                x = nn.functional.linear(x, layer.weight, layer.bias)
            else:
                x = layer(x)
        return x


def train_returning(
    rank: int, world_size: int, system: str, rest_from: int, resume_at: int = -1
) -> tuple[list[list[str]], list[bool], Tensor]:
    """The layers that were tried at each step, whether its passes were captured, and the result."""
    model = Returning(called_from=100, rest_from=rest_from)
    optimizer = make(SYSTEMS[system], model, lr=1e-3, **BY_DRIFT)
    tried: list[list[str]] = []
    captured: list[bool] = []
    for step in range(170):
        if step == resume_at:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(SYSTEMS[system], model, lr=1e-3, **BY_DRIFT)
            optimizer.load_state_dict(saved)
        curvature = optimizer._curvature
        tried.append([block.name for block in curvature._schedule.layers_due(step)])
        captured.append(curvature.layers.capture.gate.open)
        take(model, optimizer, shard(BATCHES[step % 3], rank, world_size))
    assert optimizer.metrics()["layers/solved"] == 3
    return tried, captured, vector(model)


@pytest.mark.parametrize("system", SYSTEMS)
def test_capture_rests_if_no_layer_has_statistics(world: World, system: str) -> None:
    """All ranks find the layers again at the same step, after 64 steps at most."""
    results = world.run(train_returning, 2, system, 0)
    tried, captured, vectors = results[0]
    for others_tried, others_captured, others_vectors in results[1:]:
        assert others_tried == tried
        assert others_captured == captured
        assert torch.equal(others_vectors, vectors)
    steps = [step for step, names in enumerate(tried) if names]
    assert [step for step, is_captured in enumerate(captured) if is_captured] == steps
    assert [step for step in steps if step < 100] == [*range(8), 8, 12, 16, 32, 64]
    assert [step for step in steps if step >= 100][:3] == [128, 129, 130]


@each_kronecker
def test_a_layer_without_statistics_rests_while_others_are_refreshed(System: Any) -> None:
    tried, _, _ = train_returning(0, 1, System.__name__, 4)
    late = [step for step, names in enumerate(tried) if "layers.4" in names]
    others = [step for step, names in enumerate(tried) if "layers.0" in names]
    assert others[:8] == late[:8]
    assert min(step for step in late if step >= 100) <= 164


@pytest.mark.parametrize("rest_from", [0, 4])
def test_a_resumed_run_tries_layers_without_statistics_at_the_same_steps(rest_from: int) -> None:
    tried, captured, vectors = train_returning(0, 1, "KAISA", rest_from)
    resumed = train_returning(0, 1, "KAISA", rest_from, resume_at=90)
    assert resumed[:2] == (tried, captured)
    assert torch.equal(resumed[2], vectors)


@each_kronecker
def test_a_numeric_interval_ignores_drift(System: Any) -> None:
    model = MLP.model()
    found = []
    optimizer = make(System, model, inv_update_steps=10, factor_update_steps="auto")
    for step in range(22):
        take(model, optimizer, BATCHES[step % 2])
        landed = {each.installed_at for each in optimizer._curvature.inverses.states.values()}
        found += [step] * (step in landed)
    assert found == [0, 10, 20]
    assert optimizer._curvature.drift is None


def test_a_step_waits_for_threads_before_the_next_refresh() -> None:
    model = MLP.model()
    gate = Gate()
    options = {"max_staleness": None, "inverse_threads": 1, "lr": 1e-3}
    with make(DistKFAC, model, **BY_DRIFT, **options) as optimizer:
        curvature = optimizer._curvature
        while min(map(curvature.drift.interval, curvature.layers.blocks)) < 8:
            take(model, optimizer, BATCHES[0])
        while not curvature._schedule.layers_due(optimizer._training.steps):
            take(model, optimizer, BATCHES[0])
        before = dict(curvature.inverses.states)
        launched = optimizer._training.steps
        due = curvature._schedule.layers_due(launched)
        with solving(gate), gate.open_when_waited_for():
            next_due = launched + 1
            take(model, optimizer, BATCHES[0])
            while not curvature._schedule.layers_due(optimizer._training.steps):
                assert all(curvature.inverses.states[b] is before[b] for b in due)
                take(model, optimizer, BATCHES[0])
                next_due += 1
        assert next_due >= launched + 8
        landed = [curvature.inverses.states[b] for b in due]
        assert {each.installed_at for each in landed} == {next_due - 1}
        assert {each.step for each in landed} == {launched}


def test_a_layer_without_statistics_has_no_cosine() -> None:
    model = MLP.model()
    model[1].unused = nn.Linear(3, 3)
    optimizer = make(KAISA, model, **BY_DRIFT)
    for batch in BATCHES[:3]:
        take(model, optimizer, batch)
    states = optimizer._curvature.drift.states
    cosines = {block.name: state.cosine for block, state in states.items()}
    assert math.isnan(cosines["1.unused"])
    assert optimizer.metrics()["drift/cosine/min"] > 0.1


class Switchable(nn.Linear):
    """A Linear whose pairs do not reproduce its gradient while it is switched."""

    is_wrong = False

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output + nn.functional.linear(x.sin(), self.weight) if self.is_wrong else output


def test_layers_are_due_at_once_after_all_of_them_have_lost_their_inverses() -> None:
    torch.manual_seed(0)
    model = Switchable(4, 3)
    optimizer = KAISA(model, lr=1e-6, debug=True)
    x = torch.randn(16, 4)
    y = torch.randn(16, 3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    layer = optimizer._curvature.layers.blocks[0]
    for _ in range(30):
        step()
    assert optimizer._curvature.drift.interval(layer) > 4
    model.is_wrong = True
    while layer.solved:
        step()
    model.is_wrong = False
    step()
    step()
    assert layer.solved
