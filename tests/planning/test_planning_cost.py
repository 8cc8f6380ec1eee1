"""The cost model against numbers by hand, and against what optimizers keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from second_order import DPKFAC, KAISA, DistKFAC, Interconnect, Machine
from second_order.kronecker.layers import FactorShape
from second_order.planning.cost import Layer, Setting, cheapest_workers, predict, worker_counts

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

# Products of 1 Gflop per second; 1 ms for an eigendecomposition, 0.1 ms for an inverse.
MACHINE = Machine("given", {1: 2e-9}, {1000: 1e-3}, {1000: 1e-4})
LINKS = Interconnect(latency=1e-3, bandwidth=1e6)
SQUARE = FactorShape(1, 10, 10)


def setting(system: str, ranks: int, workers: int, **others: Any) -> Setting:
    keywords = {
        "solver": "inverse",
        "factor_update_steps": 2,
        "inv_update_steps": 4,
        **others,
    }
    return Setting(system, ranks=ranks, workers=workers, **keywords)


def test_the_parts_of_a_step_by_hand() -> None:
    """Four equal layers on two ranks."""
    layers = [Layer(SQUARE, rows=30)] * 4
    costs = predict(layers, setting("KAISA", 2, 2), MACHINE, LINKS)
    factors = 4 * 2 * 55 * 4  # bytes of eight triangles
    inverses = 4 * 2 * 100 * 4
    expected = {
        "statistics": 4 * 2 * 30 * 100 * 1e-9 / 2,
        "statistics exchange": 2 * (1e-3 + factors / 2 / 1e6) / 2,
        "inverses": 2 * 2 * 1e-4 / 4,
        "inverse exchange": (1e-3 + inverses / 2 / 1e6) / 4,
        "precondition": 4 * 2 * 2 * 1000 * 1e-9,
        "gradient exchange": 0.0,
    }
    assert costs.parts == pytest.approx(expected)
    assert costs.sent == pytest.approx(2 * factors / 2 / 2 + inverses / 2 / 4)
    assert costs.curvature_bytes == factors + inverses + 4 * 400

    owners = predict(layers, setting("DPKFAC", 2, 1), MACHINE, LINKS)
    assert owners.parts["statistics"] == pytest.approx(expected["statistics"] / 2)
    assert owners.parts["statistics exchange"] == 0
    assert owners.sent == 4 * 400 / 2
    assert owners.curvature_bytes == (factors + inverses) / 2 + 4 * 400


def test_inverses_on_threads_cost_nothing_if_training_runs_on_a_device() -> None:
    layers = [Layer(SQUARE)]
    training_on = {
        device: Machine("given", {1: 2e-9}, {10: 1e-3}, {10: 1e-4}, device=device)
        for device in ("cpu", "cuda")
    }
    seconds = {
        device: predict(layers, setting("DistKFAC", 1, 1), machine, LINKS).parts["inverses"]
        for device, machine in training_on.items()
    }
    assert seconds == {"cpu": pytest.approx(2 * 1e-4 / 4), "cuda": 0.0}


SYSTEMS: dict[str, Any] = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(255, 300), nn.Tanh(), nn.Linear(300, 256))


def stored_bytes(rank: int, size: int, system: str, keywords: dict[str, Any]) -> int:
    """Bytes of factors, inverses and the last step on this rank."""
    model = wide()
    x = torch.randn(8, 255, generator=torch.Generator().manual_seed(rank))
    with SYSTEMS[system](model, lr=0.01, **keywords) as optimizer:
        model(x).square().mean().backward()
        optimizer.step()
        last_step = sum(p.nbytes for p in model.parameters())
        return int(optimizer.summary().total_bytes) + last_step


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
@pytest.mark.parametrize(
    ("system", "workers", "owned"),
    [("KAISA", 4, False), ("KAISA", 2, True), ("KAISA", 1, False), ("DPKFAC", 1, False)],
)
def test_memory_of_factors_and_inverses(
    world: World, system: str, workers: int, owned: bool, solver: str
) -> None:
    """The fullest rank keeps what the cost model predicts."""
    chosen = setting(system, 4, workers, solver=solver, owned_factors=owned)
    shapes = [FactorShape(1, 256, 300), FactorShape(1, 301, 256)]
    costs = predict([Layer(shape) for shape in shapes], chosen, MACHINE, LINKS)
    found = max(world.run(stored_bytes, 4, system, chosen.keywords))
    assert found == pytest.approx(costs.curvature_bytes, rel=0.01)


def test_a_slow_network_needs_all_workers_and_slow_products_need_few() -> None:
    """With one worker a gradient is sent at every step; with all, every rank multiplies it."""
    shapes = [FactorShape(1, 65, 64)] * 6

    def workers(flops: float, links: Interconnect) -> int:
        machine = Machine("given", {1: 2 / flops}, {64: 1e-6}, {64: 1e-6})
        return cheapest_workers(shapes, 4, machine, links, solver="inverse", inv_update_steps=10)

    assert workers(1e15, Interconnect(1e-3, 1e6)) == 4
    assert workers(1e7, Interconnect(1e-9, 1e12)) == 1


def test_numbers_of_gradient_workers() -> None:
    assert worker_counts(1) == [1]
    assert worker_counts(12) == [12, 6, 4, 3, 2, 1]


def test_keywords_select_the_setting() -> None:
    chosen = setting("KAISA", 8, 2, owned_factors=True, solver="eigen")
    assert chosen.name == "KAISA HYBRID 2/8, reduce, eigen"
    assert chosen.keywords["grad_worker_fraction"] == 0.25
    assert chosen.keywords["factor_exchange"] == "reduce"
