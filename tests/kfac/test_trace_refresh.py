"""Layers are refreshed when the trace of their curvature has changed (THOR)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from optimizer_cases import each_kronecker, factors, make, take
from ranks import agreed, assert_same_trajectory, counted, shard, vector
from reference import block as dense_block
from torch import nn

from second_order import DPKFAC, KAISA, DistKFAC, TraceRule

if TYPE_CHECKING:
    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
LAYERS = 3
BATCHES = MLP.batches(10, n=12)
TRACED: dict[str, Any] = {"inv_update_steps": TraceRule(every=1), "momentum": 0.9}


def parts(optimizer: Any) -> dict[str, Any]:
    """The inverse that each layer has here."""
    blocks = optimizer._curvature.layers.blocks
    return {block.name: block.inverse for block in blocks}


def solved_now(optimizer: Any, before: dict[str, Any]) -> set[str]:
    return {name for name, now in parts(optimizer).items() if now is not before.get(name)}


def traces(optimizer: Any) -> Any:
    return optimizer._curvature.traces


def trained(optimizer: Any, model: nn.Module, batches: list[Batch]) -> list[set[str]]:
    """The layers that are refreshed at each step."""
    solved = []
    for batch in batches:
        before = parts(optimizer)
        take(model, optimizer, batch, MLP.loss)
        solved.append(solved_now(optimizer, before))
    return solved


@each_kronecker
@pytest.mark.parametrize("relative", [False, True])
def test_layers_whose_trace_changed_are_refreshed(System: Any, relative: bool) -> None:
    """The curvature is built from A and G, as a matrix of all of the layer's weights."""
    model = MLP.model()
    upper = 0.08 if relative else 0.04
    rule = TraceRule(upper, every=1)
    options = {**TRACED, "relative_damping": relative, "inv_update_steps": rule}
    optimizer = make(System, model, **options)
    last: dict[str, float] = {}
    counts = {True: 0, False: 0}  # by whether a layer was to be refreshed
    for batch in BATCHES:
        before = parts(optimizer)
        take(model, optimizer, batch, MLP.loss)
        solved = solved_now(optimizer, before)
        for name, (A, G) in factors(optimizer).items():
            curvature = dense_block(A, G)
            mean = float(curvature.trace()) / len(curvature)
            trace = mean + 0.1 * (mean if relative else 1.0)
            expected = name not in last or abs(trace - last[name]) > upper * last[name]
            assert (name in solved) == expected
            counts[expected] += 1
            if expected:
                last[name] = trace
    assert min(counts.values()) > 5  # so that both are tested
    assert traces(optimizer).num_skipped == counts[False]
    assert traces(optimizer).num_due == LAYERS * len(BATCHES)


def larger(batch: Batch) -> Batch:
    x, y = batch
    return 10 * x, y


@pytest.mark.parametrize("lower", [0.0, 0.9])
def test_a_damping_schedule_triggers_a_refresh(lower: float) -> None:
    """Also for stopped layers, which stay stopped. A smaller change has no effect."""
    model = MLP.model()
    changes = {3: 0.11, 5: 0.3}
    optimizer = make(
        KAISA,
        model,
        lr=1e-4,
        damping=lambda step: changes[max(s for s in changes if s <= step)] if step >= 3 else 0.1,
        inv_update_steps=TraceRule(0.95, lower, every=1),
        relative_damping=True,
    )
    solved = trained(optimizer, model, BATCHES[:7])
    assert [len(names) for names in solved] == [LAYERS, 0, 0, 0, 0, LAYERS, 0]
    assert len(traces(optimizer).stopped) == (LAYERS if lower else 0)


SYSTEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "KAISA": (KAISA, {"grad_worker_fraction": 0.5, "colocate_factors": False}),
    "KAISA-reduce": (KAISA, {"factor_exchange": "reduce", "colocate_factors": False}),
    "DPKFAC": (DPKFAC, {}),
    "DistKFAC": (DistKFAC, {}),
    "DistKFAC-threads": (DistKFAC, {"max_staleness": 2, "deterministic": True}),
}


def on_ranks(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Any:
    System, own = SYSTEMS[name]
    model = MLP.model()
    path = []
    with counted() as messages:
        optimizer = make(System, model, **{**TRACED, **own, **options})
        for batch in BATCHES:
            take(model, optimizer, shard(batch, rank, world_size), MLP.loss)
            path.append(vector(model))
    rule = traces(optimizer)
    outcome = None
    if rule is not None:
        outcome = rule.num_due, rule.num_skipped, sorted(block.name for block in rule.stopped)
    optimizer.close()
    return path, outcome, sum(messages.values())


@pytest.mark.parametrize("name", SYSTEMS)
def test_ranks_agree_on_refreshed_layers_with_one_message(world: World, name: str) -> None:
    options = {"inv_update_steps": TraceRule(0.08, 0.01, every=1)}
    results = world.run(on_ranks, 4, name, options)
    path = agreed([result[0] for result in results])
    num_due, num_skipped, names = results[0][1]
    assert all(result[1] == results[0][1] for result in results)
    assert 0 < num_skipped < num_due
    assert names
    every = world.run(on_ranks, 4, name, {"inv_update_steps": 1})
    assert all(a[2] <= b[2] + len(BATCHES) for a, b in zip(results, every, strict=True))
    assert not torch.equal(path[-1], every[0][0][-1])
    if name != "DPKFAC":  # whose factors are those of one rank's batches
        alone = on_ranks(0, 1, name, options)
        assert_same_trajectory(path, alone[0])
        assert alone[1] == results[0][1]


SETTLING: dict[str, Any] = {"inv_update_steps": TraceRule(0.6, 0.1, every=1)}


def stopped_layers(optimizer: Any) -> set[str]:
    return {block.name for block in traces(optimizer).stopped}


@each_kronecker
def test_stopped_layers_are_in_checkpoints(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, **SETTLING)
    trained(optimizer, model, BATCHES[:3])
    resumed = make(System, model, **SETTLING)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert stopped_layers(resumed) == stopped_layers(optimizer) != set()
    (first,) = trained(resumed, model, [larger(BATCHES[3])])
    assert not first & stopped_layers(optimizer)


def test_a_lower_bound_above_the_upper_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TraceRule\(upper=0.1, lower=0.2\): swap"):
        TraceRule(0.1, 0.2)
    with pytest.raises(ValueError, match=r"upper=-0.1 is outside"):
        TraceRule(-0.1)
