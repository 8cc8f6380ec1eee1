"""What hooks cost a compiled model: the script runs, and the page has the stored figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import compiled
from workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ROWS = {
    "plain": "without an optimizer of this package",
    "idle": "hooks, at steps without statistics",
    "statistics": "hooks, at steps with statistics",
    "broken": "a break of the graph at each layer",
    "eager": "not compiled, without hooks",
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 10))


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_every_case_is_measured() -> None:
    found = compiled.measure(Workload("tiny", net, (4, 6)), "eager", turns=2, repeats=1)
    assert list(found) == list(compiled.CASES) == list(ROWS)
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
    assert compiled.ratio(found, "plain") == 1


def test_the_page_has_the_stored_figures_and_idle_hooks_cost_less_than_a_tenth() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "compiled.json").read_text())
    page = (ROOT / "docs" / "compile.md").read_text()
    records = {record["workload"]: record["turns"] for record in stored["records"]}
    assert "| a pass | " + " | ".join(f"`{name}`" for name in records) + " |" in page
    for case, said in ROWS.items():
        cells = [f"{compiled.ratio(turns, case):.2f}" for turns in records.values()]
        if case == "plain":
            medians = (statistics.median(turns[case]) for turns in records.values())
            cells = [f"1 ({median:.1f} ms)" for median in medians]
        assert f"| {said} | " + " | ".join(cells) + " |" in page
    for turns in records.values():
        assert compiled.ratio(turns, "idle") < 1.1
