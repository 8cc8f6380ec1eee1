"""The stored runs of what `measure` costs, and what it is good for, are what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/measured.json").read_text())
PAGE = (ROOT / "docs/how-to/curvature.md").read_text("utf-8")


USES: dict[str, list[str]] = json.loads(
    (ROOT / "benchmarks/results/curvature_uses.json").read_text()
)["printed"]


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
        floor = floors[name]
        ratio = found[name] / floors[name]
        assert cells == [f"{1e3 * found[name]:,.0f}", f"{1e3 * floor:,.0f}", f"{ratio:.2f}"]
        assert ratio < {"inputs": 1.35, "kfac": 1.25}[name]


def test_owners_store_their_share_and_little_more() -> None:
    rows = {f"{keep}, {ranks}": cells for keep, ranks, *cells in table("memory")}
    assert rows.keys() == STORED["memory"].keys()
    for name, cells in rows.items():
        found = STORED["memory"][name]
        assert cells == [f"{found[key] / 2**20:.1f}" for key in ("peak", "factors")]
    found = STORED["memory"]["owner, 4"]
    assert found["peak"] < found["triangles"] / 4 + found["a layer"] + 3 * 2**20


def test_large_models_equal_the_computed_sizes() -> None:
    rows = {f"{model}, {factors}": cells for model, factors, *cells in table("paper")}
    assert rows.keys() == STORED["paper"].keys()
    for name, cells in rows.items():
        assert cells == [f"{nbytes / 2**30:.2f}" for nbytes in STORED["paper"][name].values()]


@pytest.mark.parametrize("name", ["time", "memory", "paper"])
def test_a_table_is_there(name: str) -> None:
    assert table(name)


def _rows_after(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading of the page, without what is empty."""
    part = PAGE[PAGE.index(heading) :]
    lines = re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE)[0].splitlines()[2:]
    cells = [[c.strip().replace(" %", "%") for c in line.strip("|").split("|")] for line in lines]
    return [[c for c in row if c] for row in cells]


def test_influence_figures_equal_the_stored_run() -> None:
    found = [re.findall(r"0\.\d+", line) for line in USES["influence"] if "seed" in line]
    plain = " ".join(PAGE.split())
    for column in zip(*found, strict=True):
        assert "{}, {} and {}".format(*column) in plain


def test_compression_figures_equal_the_stored_run() -> None:
    ranks = USES["compression"][2].split()[1:]
    means: dict[str, dict[str, str]] = {}
    for kind in ("plain SVD", "whitened"):
        own_lines = [line for line in USES["compression"] if line.strip().startswith(kind)]
        rows = [[float(n) for n in re.findall(r"\d\.\d+", line)] for line in own_lines]
        averages = (f"{sum(column) / len(rows):.2f}" for column in zip(*rows, strict=True))
        means[kind] = dict(zip(ranks, averages, strict=True))
    plain = " ".join(PAGE.split())
    for rank in ("16", "24"):
        assert f"{means['whitened'][rank]} against {means['plain SVD'][rank]}" in plain


def test_continual_learning_figures_equal_the_stored_run() -> None:
    printed = [line.split() for line in USES["continual"][3:]]
    assert len(printed) == 4
    for row, line in zip(_rows_after("Learning without forgetting"), printed, strict=True):
        assert row[-3:] == line[-3:]
        assert [each for each in line[1:3] if each != "0"] == row[1:-3]


def test_calibration_figures_equal_the_stored_run() -> None:
    printed = [line.split()[-4:] for line in USES["laplace"][-6:]]
    rows = _rows_after("Laplace's approximation of a last layer")
    assert [row[-4:] for row in rows] == printed
