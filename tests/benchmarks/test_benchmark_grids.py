"""The papers' grids and the benchmark of refreshes by trace, each at a small size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import grids
import trace_refresh
from grids import Point

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
SHORT = Point("MLP", "KAISA", 64, seed=0, steps=10, target=0.0)


def test_a_training_ends_at_its_target_or_after_its_steps() -> None:
    row = grids.train(SHORT)
    assert row["steps"] is None
    assert len(row["losses"]) == len(row["accuracies"]) == 2
    assert row["bytes"] > 0
    assert grids.train(Point("MLP", "KAISA", 64, 0, 10, 1.001 * row["losses"][0]))["steps"] == 5
    assert grids.steps_to(row, row["losses"][1]) in (5, 10)
    assert grids.steps_to(row, -1.0) is None


@pytest.mark.parametrize("network", grids.NETWORKS)
def test_every_network_takes_the_images(network: str) -> None:
    model = grids.NETWORKS[network]()
    assert model(torch.zeros(2, 64)).shape == (2, 10)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert bool(norms) == ("norm" in network)


def on_ranks(rank: int, world_size: int, optimizer: str) -> Any:
    point = Point("MLP", optimizer, 64, seed=0, steps=10, target=0.0)
    return grids.train(point, rank, world_size)["losses"]


def test_kaisa_alone_stands_for_kaisa_on_many_and_dpkfac_does_not(world: World) -> None:
    alone = grids.train(SHORT)["losses"]
    for losses in world.run(on_ranks, 2, "KAISA"):
        assert losses == pytest.approx(alone, rel=1e-2)
    for losses in world.run(on_ranks, 2, "DPKFAC"):
        assert losses != pytest.approx(alone, rel=1e-2)


@pytest.mark.parametrize("name", sorted(grids.GRIDS))
def test_tables_have_a_cell_for_every_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"steps": 5, "losses": [0.04], "accuracies": [0.5], "bytes": 2048}
    monkeypatch.setattr(grids, "train_on", lambda count, points: [dict(found) for _ in points])
    monkeypatch.setattr(grids, "SIZES", (8,))
    measure, tables = grids.GRIDS[name]
    for table in tables(measure(1)):
        assert table.row_count > 0
        cells = [cell for column in table.columns[1:] for cell in column.cells]
        filled = [cell for cell in cells if cell]
        assert filled
        assert name in ("processes", "doubly") or len(filled) == len(cells)


def test_solves_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trace_refresh.TARGETS, "tabular", 1e-9)
    monkeypatch.setitem(trace_refresh.TASKS, "tabular", ("SGD", 0.1))
    every = trace_refresh.measured("tabular", "every 100", 0)
    assert every["due"] == every["solves"] == 22  # of the first 20 steps, of 100 and of 200
    assert every["steps"] is None
    assert every["settled"] == 0
    rule = trace_refresh.measured("tabular", "trace 1, 0", 0)
    assert rule["due"] == 48
    assert 1 <= rule["solves"] < 48
    drift = trace_refresh.measured("tabular", "drift", 0)
    assert 1 < drift["due"] == drift["solves"] < 300
    assert trace_refresh.table([every, rule, drift]).row_count == 3
