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


def by_name(runs: Runs) -> dict[str, Runs]:
    found: dict[str, Runs] = {}
    for run in runs:
        found.setdefault(run["name"], []).append(run)
    return found


def share_of(runs: Runs, rival: Runs, key: str) -> float:
    """The steps or seconds until the rival's last loss, over the rival's: median over seeds."""
    shares = []
    for run, other in zip(runs, rival, strict=True):
        goal = other["losses"][-1]
        place = next((i for i, loss in enumerate(run["losses"]) if loss <= goal), None)
        if place is None:
            shares.append(math.inf)
        elif key == "steps":
            shares.append((place + 1) / len(other["losses"]))
        else:
            shares.append(run["seconds"][place] / other["seconds"][-1])
    return statistics.median(shares)


def shares_of_the_larger_model() -> tuple[float, float]:
    """The shares of AdamW's steps and seconds after which KAISA reaches AdamW's last loss."""
    record = stored("larger")
    adamw, kaisa = record["runs"]
    met = next(i for i, loss in enumerate(kaisa["losses"]) if loss <= adamw["losses"][-1])
    steps = (met + 1) * record["every"] / record["size"]["steps"]
    return steps, kaisa["seconds"][met] / adamw["seconds"][-1]


def ratios_to_the_base(task: dict[str, Any]) -> dict[float, list[float]]:
    """KAISA's last loss over its base's, by the share of the base's learning rate."""
    base = task["base"]
    levels = {}
    for run in task["runs"]:
        job = run["job"]
        key = (job["warmup"], job["optimizer"], job["lr"], job["seed"])
        levels[key] = statistics.mean(run["losses"][-5:])
    longest = max(warmup for warmup, *_ in levels)
    seeds = sorted({seed for *_, seed in levels})
    found: dict[float, list[float]] = {share: [] for share in (0.5, 1.0, 2.0, 4.0)}
    for warmup, lr in task["rates"].items():
        rises = 0 if warmup == "none" else longest
        for share, ratios in found.items():
            for seed in seeds:
                level = levels[rises, f"KAISA, {base}", share * lr, seed]
                ratios.append(level / levels[rises, base, lr, seed])
    return found
