"""The stored run of `make measured` is what the page says, and what was aimed at."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/measured.json").read_text())
PAGE = (ROOT / "docs/curvature.md").read_text("utf-8")


def table(name: str) -> list[list[str]]:
    """The rows of the page's table of a name."""
    (text,) = re.findall(rf"<!-- measured: {name} -->\n(?:\|.*\n){{2}}((?:\|.*\n)+)", PAGE)
    lines = text.strip().splitlines()
    return [[cell.strip(' `"') for cell in line.strip("|").split("|")] for line in lines]


def test_time_is_near_its_floor() -> None:
    found = STORED["seconds"]
    floors = {
        "inputs": found["forward"] + found["products of A"],
        "kfac": found["forward and backward"] + found["of A and G"],
    }
    for name, *cells in table("time"):
        floor, ratio = floors[name], found[name] / floors[name]
        assert cells == [f"{1e3 * found[name]:,.0f}", f"{1e3 * floor:,.0f}", f"{ratio:.2f}"]
        assert ratio < {"inputs": 1.35, "kfac": 1.25}[name]


def test_memory_by_owner_is_a_share_a_layer_and_little_more() -> None:
    rows = {f"{keep}, {ranks}": cells for keep, ranks, *cells in table("memory")}
    assert rows.keys() == STORED["memory"].keys()
    for name, cells in rows.items():
        found = STORED["memory"][name]
        assert cells == [f"{found[key] / 2**20:.1f}" for key in ("peak", "factors")]
    found = STORED["memory"]["owner, 4"]
    assert found["peak"] < found["triangles"] / 4 + found["a layer"] + 6 * 2**20


def test_large_models_are_those_on_paper() -> None:
    rows = {f"{model}, {factors}": cells for model, factors, *cells in table("paper")}
    assert rows.keys() == STORED["paper"].keys()
    for name, cells in rows.items():
        assert cells == [f"{nbytes / 2**30:.2f}" for nbytes in STORED["paper"][name].values()]


@pytest.mark.parametrize("name", ["time", "memory", "paper"])
def test_a_table_is_there(name: str) -> None:
    assert table(name)
