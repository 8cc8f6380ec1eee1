"""What the pages of DHO2, MRDHO2 and Lanczos say of measurements: the stored runs say the same."""

from __future__ import annotations

import math
import re
import statistics

import pytest
from stored import by_optimizer, number, rows, stored

GOALS = {
    "frozen body, linear head": "linear head",
    "frozen body, two-layer head": "two-layer head",
    "Poisson PINN": "PINN",
    "deep autoencoder": "autoencoder",
    "GRU": "GRU",
    "linear head, cached features": "cached features",
}


def test_refreshes_by_budget() -> None:
    records = {row["task"]: row for row in stored("refresh_budget")["rows"]}
    table = rows("docs/dho2.md", "task", "measured", "first refresh at step")
    assert table.keys() == records.keys()
    for task, (measured, first, price) in table.items():
        record = records[task]
        assert record["overhead"] == 0.2
        assert float(measured) == pytest.approx(100 * record["measured"], abs=0.051)
        assert number(first) == record["refreshes"][0]
        assert float(price) == pytest.approx(record["price"], rel=0.03)


def test_trainings_that_are_thrown_away() -> None:
    runs = stored("bounded")["runs"]
    table = rows("docs/dho2.md", "task, eigenpairs", "trainings")
    assert sum(int(cells[0]) for cells in table.values()) == 50
    for label, cells in table.items():
        of = [run for run in runs if run["task"] == label.partition(",")[0]]
        worst = {
            on: [
                (run["worst"] or math.inf) / run["first"] for run in of if run["trust_region"] is on
            ]
            for on in (True, False)
        }
        assert [int(cell) for cell in cells[:3]] == [
            len(worst[True]),
            *(sum(share > 10 for share in worst[on]) for on in (True, False)),
        ]
        assert float(cells[3]) == pytest.approx(max(worst[True]), abs=0.051)


def test_where_dho2_gains_seconds() -> None:
    runs = stored("fosi_gain")["runs"]
    table = rows("docs/dho2.md", "task, target", "seeds")
    assert {GOALS[label.partition(":")[0]] for label in table} == {run["name"] for run in runs}
    for label, (seeds, *cells) in table.items():
        of = [run for run in runs if run["name"] == GOALS[label.partition(":")[0]]]
        pairs = [by_optimizer(of, name) for name in ("Adam", "DHO2")]
        assert [run["seed"] for run in pairs[0]] == [run["seed"] for run in pairs[1]]
        assert len(pairs[0]) == int(seeds)
        for cell, theirs in zip(cells, pairs, strict=False):
            steps = statistics.median(
                math.inf if run["steps"] is None else run["steps"] for run in theirs
            )
            assert (math.inf if cell.startswith("not") else number(cell.split(", ")[0])) == steps
            seconds = statistics.median(run["seconds"] for run in theirs)
            assert float(cell.split()[-2]) == pytest.approx(seconds, abs=0.0051)
        for cell, key in zip(cells[2:], ("taken", "seconds"), strict=True):
            ratios = [ours[key] / base[key] for base, ours in zip(*pairs, strict=True)]
            told = [float(text) for text in re.findall(r"[\d.]+", cell)]
            expected = [statistics.median(ratios), min(ratios), max(ratios)][: len(told)]
            assert told == pytest.approx(expected, abs=0.0051), label


def test_final_updates_of_mrdho2() -> None:
    runs = stored("final_updates")["runs"]
    table = rows("docs/mrdho2.md", "", "base alone", "guarded", "paper", "additive")
    tasks = dict.fromkeys(run["task"] for run in runs)
    assert len(table) == len(tasks)
    for (label, cells), name in zip(table.items(), tasks, strict=True):
        base = {
            r["seed"]: r["loss"] for r in runs if (r["task"], r["update"]) == (name, "base alone")
        }
        assert float(cells[0]) == pytest.approx(statistics.median(base.values()), rel=0.006), label
        for cell, update in zip(cells[1:], ("guarded", "paper", "additive"), strict=True):
            ours = [run for run in runs if (run["task"], run["update"]) == (name, update)]
            ratios = [run["loss"] / base[run["seed"]] for run in ours]
            middle, worst = re.findall(r"[\d.,]+", cell)[:2]
            assert number(middle) == pytest.approx(statistics.median(ratios), rel=0.006), label
            assert number(worst.rstrip(",")) == pytest.approx(max(ratios), rel=0.006), label
            if "of" in cell:
                counts = f"{sum(r['applied'] for r in ours)} of {sum(r['epochs'] for r in ours)}"
                assert cell.endswith(counts)


def test_curvature_beside_curvlinops() -> None:
    records = {record["task"]: record for record in stored("curvature_rivals")["records"]}
    table = rows("docs/spectrum.md", "estimate", "products", "ms", "error")
    assert table.keys() == records.keys()
    for label, cells in table.items():
        record = records[label]
        for who, (products, ms, error) in (("ours", cells[:3]), ("theirs", cells[3:6])):
            assert int(products) == record[who]["products"], label
            taken = 1000 * statistics.median(record[who]["seconds"])
            assert float(ms) == pytest.approx(taken, abs=0.51), label
            assert error == told_error(record[who].get("error")), label
        assert cells[6] == told_error(record.get("difference")), label


def told_error(error: float | None) -> str:
    """0.0123 -> '0.012', 1.23e-9 -> '1e-9'."""
    if error is None:
        return ""
    return f"{error:.2g}" if error >= 1e-4 else re.sub(r"e-0?", "e-", f"{error:.0e}")


def test_mrdho2_beside_its_base_at_equal_time() -> None:
    runs = stored("final_updates")["timed"]["runs"]
    table = rows("docs/mrdho2.md", "", "base alone", "within, at equal steps")
    tried = rows("docs/mrdho2.md", "tried")
    for k, (task, cells) in enumerate(table.items()):
        of = {
            rule: {r["seed"]: r for r in runs if (r["task"], r["rule"]) == (task, rule)}
            for rule in ("base alone", "within", *tried)
        }
        base = {seed: run["losses"][-1] for seed, run in of["base alone"].items()}
        assert float(cells[0]) == pytest.approx(statistics.median(base.values()), rel=0.006)
        ours = of["within"]
        logs = [math.log(run["losses"][-1] / base[seed]) for seed, run in ours.items()]
        told = [number(x.replace("−", "-")) for x in re.findall(r"[−+]?[\d.]+", cells[1])]
        assert told[0] == pytest.approx(math.exp(statistics.median(logs)), rel=0.006)
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        assert told[1:] == pytest.approx([statistics.fmean(logs), error], abs=0.0051)
        both = (of["within"], of["base alone"])
        own, floor = (statistics.median(r["seconds"] for r in each.values()) for each in both)
        assert float(cells[3]) == pytest.approx(own / floor, abs=0.0051)
        for rule, ratios in tried.items():
            found = of[rule].items()
            losses = [math.inf if r["losses"][-1] is None else r["losses"][-1] for _, r in found]
            quotients = [loss / base[s] for loss, (s, _) in zip(losses, found, strict=True)]
            if ratios[k] == "diverges":
                assert all(map(math.isinf, quotients))
                continue
            middle, worst = map(number, re.findall(r"[\d.]+", ratios[k]))
            assert middle == pytest.approx(statistics.median(quotients), rel=0.006)
            assert worst == pytest.approx(max(quotients), rel=0.006)
