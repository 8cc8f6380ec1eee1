"""The page states the losses by learning rate of the stored runs."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace

import pytest
from stored_runs import ROOT, rows, stored, text_of
from test_stored_runs import tuned_tasks

import rates
from tasks import TASKS, Job, Run, train
from unseen import NEW, UNSEEN

PAGE = "docs/evidence/benchmarks.md"
NAMES = {"AdamW": "AdamW", "Muon": "Muon", "KAISA over AdamW": "KAISA, AdamW"}


def losses_of(name: str) -> dict[float, float]:
    """The mean loss by learning rate."""
    by_rate: dict[float, list[float]] = {}
    for run in stored("rates")["runs"]:
        if run["job"]["optimizer"] == name:
            by_rate.setdefault(run["job"]["lr"], []).append(run["losses"][-1])
    return {lr: statistics.mean(of) for lr, of in by_rate.items()}


def seconds_of(name: str) -> float:
    runs = stored("rates")["runs"]
    return statistics.median(r["seconds"][-1] for r in runs if r["job"]["optimizer"] == name)


def near(losses: dict[float, float]) -> list[float]:
    return [lr for lr, loss in losses.items() if loss <= 1.05 * min(losses.values())]


def test_the_table_of_the_page() -> None:
    table = rows(PAGE, "optimizer", "lowest loss", "its rate")
    assert list(table) == list(NAMES)
    for label, cells in table.items():
        losses = losses_of(NAMES[label])
        best = min(losses, key=lambda lr: losses[lr])
        low, high = (pick(near(losses)) for pick in (min, max))
        spread = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        seconds = f"{seconds_of(NAMES[label]):.1f}"
        assert cells == [f"{losses[best]:.3f}", f"{best:g}", spread, seconds]


def test_the_sensitivity_to_the_learning_rate_is_as_stated() -> None:
    page = text_of(PAGE)
    widths = {}
    for name in NAMES.values():
        rates_near = near(losses_of(name))
        widths[name] = rates_near[-1] / rates_near[0]
    assert "So KAISA is as sensitive as Muon, and less than AdamW" in page
    assert widths["KAISA, AdamW"] == pytest.approx(widths["Muon"])
    assert widths["KAISA, AdamW"] > widths["AdamW"]
    adamw = losses_of("AdamW")
    kaisa = losses_of("KAISA, AdamW")
    above = kaisa[min(adamw, key=lambda lr: adamw[lr])] / min(kaisa.values()) - 1
    assert f"At AdamW's best rate, it ends {above:.0%}".replace("%", " %") in page


def test_the_first_steps_at_small_rates_are_as_stated() -> None:
    page = text_of("docs/how-to/tune.md")

    def mean_losses(name: str, lr: float, *steps: int) -> list[str]:
        runs = [
            run["losses"]
            for run in stored("rates")["runs"]
            if run["job"]["optimizer"] == name and run["job"]["lr"] == lr
        ]
        every = NEW[rates.TASK]().every
        return [f"{statistics.mean(of[n // every - 1] for of in runs):.2f}" for n in steps]

    first, second, third = mean_losses("AdamW", 0.001, 10, 30, 60)
    assert f"AdamW's loss is {first}, {second} and {third} after 10, 30 and 60 steps" in page
    first, second, third = mean_losses("KAISA, AdamW", 0.001, 10, 30, 60)
    assert f"KAISA's is {first}, {second} and {third}." in page
    first, second = mean_losses("AdamW", 0.004, 10, 20)
    assert f"AdamW's is {first} and {second} after 10 and 20 steps" in page
    first, second = mean_losses("KAISA, AdamW", 0.004, 10, 20)
    assert f"KAISA's is {first} and {second}." in page


def test_the_first_steps_by_damping_are_as_stated() -> None:
    losses: dict[float, list[float]] = {}
    for run in stored("defaults")["tried"]:
        job = run["job"]
        options = job["options"]
        is_named = (job["task"], job["optimizer"]) == ("digits MLP", "KAISA, Adam")
        by_inverse = options.keys() <= {"damping", "solver"} and options.get("solver") != "eigen"
        if is_named and job["lr"] == 0.01 and by_inverse:
            index = 15 // TASKS["digits MLP"]().every - 1
            losses.setdefault(options.get("damping", 0.1), []).append(run["losses"][index])
    large, default = (statistics.mean(losses[damping]) for damping in (1.0, 0.1))
    page = text_of("docs/how-to/tune.md")
    assert f"is {large:.2f} with `damping=1.0`, and {default:.2f} with 0.1" in page


def test_each_optimizer_has_seven_rates_around_its_best() -> None:
    for name in NAMES.values():
        losses = losses_of(name)
        assert list(losses) == sorted(losses)
        assert len(losses) == 7
        assert max(losses) == pytest.approx(64 * min(losses))
        best = min(losses, key=lambda lr: losses[lr])
        assert min(losses) < best < max(losses)


def test_the_runs_are_those_that_the_page_describes() -> None:
    record = stored("rates")
    jobs = [run["job"] for run in record["runs"]]
    assert {job["task"] for job in jobs} == {record["task"]} == {rates.TASK}
    assert {job["seed"] for job in jobs} == {0, 1}
    assert not any(job["options"] for job in jobs), "default settings"
    task = NEW[rates.TASK]()
    assert f"in {task.steps} steps (`make rates`, two seeds, an {record['machine']['cpu']})" in (
        text_of(PAGE)
    )


def test_the_task_tuned_nothing() -> None:
    assert rates.TASK in NEW.keys() - UNSEEN.keys()
    assert rates.TASK not in tuned_tasks()
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        if file.name != "rates.json":
            assert not re.search(rf'"task": "{rates.TASK}"', file.read_text()), file.name


def test_a_run_that_diverged_is_not_near_the_best() -> None:
    runs = [
        Run(Job(rates.TASK, "AdamW", lr, seed), [math.nan if seed and i > 5 else 2.0 + 0.08 * i])
        for i, lr in enumerate(rates.rates_of("AdamW"))
        for seed in range(2)
    ]
    losses = rates.mean_losses(runs, "AdamW")
    assert rates.near_best(losses) == rates.rates_of("AdamW")[:2]
    assert list(losses.values())[-1] == math.inf


def test_every_optimizer_takes_a_step_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(TASKS[rates.TASK](), steps=2, every=2)
    monkeypatch.setitem(TASKS, rates.TASK, lambda: short)
    jobs = rates.jobs_of(0, list(rates.MIDDLE))
    assert len(jobs) == 21
    for job in jobs[:3]:
        assert math.isfinite(train(job).losses[-1])
