"""Stored runs of the benchmarks, and tables of the pages that are held against them."""

from __future__ import annotations

import json
import math
import re
import statistics
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Runs = list[dict[str, Any]]


@cache
def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@cache
def text_of(page: str) -> str:
    """A page in one line."""
    return " ".join((ROOT / page).read_text().split())


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
    return only(runs, optimizer=name)


def only(runs: Runs, **entries: Any) -> Runs:
    """The runs with these entries."""
    found = [run for run in runs if all(run[key] == value for key, value in entries.items())]
    assert found, entries
    return found


def number(text: str) -> float:
    return float(text.replace(",", ""))


def numbers(text: str) -> list[float]:
    """All that a cell or a sentence has: '0.24 (0.18 to 0.29)'."""
    return [number(each) for each in re.findall(r"-?\d[\d,]*\.?\d*", text.replace("−", "-"))]


def steps_of(cell: str) -> float:
    """'1,710 (2.6 s)' -> 1710; 'never' and 'not in 400' are infinite."""
    return (
        math.inf
        if cell.startswith(("never", "not in"))
        else number(cell.split(maxsplit=1)[0].rstrip(","))
    )


def median(steps: Iterable[float | None]) -> float:
    """With None for what never came."""
    return statistics.median(math.inf if step is None else step for step in steps)
