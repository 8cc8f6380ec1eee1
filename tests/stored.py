"""Stored runs of the benchmarks, and tables of the pages that are held against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Runs = list[dict[str, Any]]


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(page: str, *header: str) -> dict[str, list[str]]:
    """The cells of the one table whose header begins so, by the first cell of the row."""
    lines = iter((ROOT / page).read_text().splitlines())
    start = ("| " + " | ".join(header) + " |").replace("|  |", "| |")
    for line in lines:
        if line.startswith(start):
            break
    else:
        raise AssertionError(f"{page} has no table that begins with {start}")
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        found[first] = rest
    assert found
    return found


def by_optimizer(runs: Runs, name: str) -> Runs:
    found = [run for run in runs if run["optimizer"] == name]
    assert found, name
    return found


def number(text: str) -> float:
    return float(text.replace(",", ""))
