"""The held-out tasks, their rivals, and the benchmarks on them: each at a small size."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sensitivity
import tasks
import tuned_rivals
from tasks import TASKS, Job, Run
from tuned_rivals import TWICE
from unseen import UNSEEN


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of two judgements, and rivals with two rates."""
    for name in ("unseen head", "unseen diabetes", "digits MLP"):
        task = TASKS[name]()
        short = replace(task, steps=2 * task.every)
        monkeypatch.setitem(TASKS, name, lambda short=short: short)
    for name, rates in list(tuned_rivals.GRIDS.items()):
        two = {rival: of[1:3] for rival, of in rates.items()}
        monkeypatch.setitem(tuned_rivals.GRIDS, name, two)
    monkeypatch.setitem(sensitivity.BASES, "digits MLP", ("SGD", (0.1, 0.003)))


def run(task: str, optimizer: str, losses: list[float], seconds: list[float], seed: int = 0) -> Run:
    return Run(Job(task, optimizer, 0.1, seed), losses, seconds)


# ---------------------------------------------------------------------------------------- the tasks


@pytest.mark.parametrize("name", UNSEEN)
def test_every_rival_takes_a_step_of_every_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(TASKS[name](), steps=2, every=2)
    monkeypatch.setitem(TASKS, name, lambda: one)
    for optimizer in tuned_rivals.GRIDS[name]:
        found = tasks.train(Job(name, optimizer, 0.001, 0))
        assert len(found.losses) == 1
        assert math.isfinite(found.losses[0]), optimizer


# ---------------------------------------------------------------------------------- what is counted


def test_a_rival_is_tuned_by_the_mean_over_its_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that is best on one seed, and breaks off on the other, is not chosen."""
    losses = {(0.1, 100): 1.0, (0.1, 101): 1.2, (0.2, 100): math.nan, (0.2, 101): 0.5}

    def done(jobs: Any, processes: int) -> list[Run]:
        return [Run(job, [losses[job.lr, job.seed]]) for job in jobs]

    monkeypatch.setattr(tasks, "run_all", done)
    best, tried = tasks.tuned(
        {"SGD": [(0.2, {}), (0.1, {})]},
        lambda name, setting, seed: Job("digits MLP", name, setting[0], seed),
        (100, 101),
        1,
    )
    assert best == {"SGD": (0.1, {})}
    assert [(name, r.job.lr, r.job.seed) for name, r in tried] == [
        ("SGD", 0.2, 100),
        ("SGD", 0.2, 101),
        ("SGD", 0.1, 100),
        ("SGD", 0.1, 101),
    ]


def test_the_figures_of_a_task() -> None:
    seconds = [1.0, 2.0]
    ends = {
        "AdamW": [(3.0, 2.0), (3.0, 2.2)],
        "SOAP": [(2.0, 1.5), (2.0, 1.9)],
        "SGD": [(8.0, 4.0), (4.0, 4.0)],
        "KAISA, AdamW": [(1.9, 1.0), (2.5, 1.2)],
        "KAISA, SGD": [(5.0, 4.1), (4.0, math.nan)],
    }
    runs = {
        name: [run("unseen vit", name, list(of), seconds, seed) for seed, of in enumerate(both)]
        for name, both in ends.items()
    }
    found = tuned_rivals.figures(runs, ["AdamW", "SOAP", "SGD"])
    ours = found["KAISA, AdamW"]
    assert ours["loss"] == pytest.approx(1.1)
    assert ours["worst"] == 1.2
    assert ours["worst over base"] == pytest.approx(1.2 / 2.2)
    assert (ours["steps"], ours["seconds"], ours["share of seconds"]) == (15, 1.5, 0.75)
    assert ours["best rival"] == "SOAP"  # losses 1.5 and 1.9, differences -0.5 and -0.7
    assert ours["above best rival"] == pytest.approx((-0.6, 0.1))
    assert found["SOAP"]["above best rival"] is None
    assert found["SGD"]["steps"] == 15
    over_sgd = found["KAISA, SGD"]  # held against SGD; one broke off
    assert over_sgd["worst over base"] == over_sgd["loss"] == math.inf
    assert over_sgd["above best rival"] is None


def test_runs_above_their_base_are_counted_by_seed() -> None:
    theirs = [run("digits MLP", "SGD", [9.0, *[loss] * 5], [], s) for s, loss in enumerate((1, 2))]
    ours = [run("digits MLP", "KAISA, SGD", [0.1, *[1.5] * 5], [], s) for s in range(2)]
    assert sensitivity.compared(ours, theirs) == {"above": 1, "of": 2, "worst ratio": 1.5}
    assert sensitivity.compared(theirs, theirs)["above"] == 0
    ours[1].losses[-1] = math.nan
    assert sensitivity.compared(ours, theirs)["worst ratio"] == math.inf


# ---------------------------------------------------------------------------------------- as called


def test_tasks_keeps_what_it_was_not_asked_for(
    shortened: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.json"
    for task in ("unseen head", "unseen diabetes"):
        asked = ["--tasks", task, "--seeds", "2", "--processes", "1", "--json", str(path)]
        tuned_rivals.main(asked)
        assert task in capsys.readouterr().out
    record = json.loads(path.read_text())["tasks"]
    assert list(record) == ["unseen head", "unseen diabetes"]
    for task, found in record.items():
        names = ["AdamW", "Muon", "SOAP", "SGD"]
        kaisa = [f"KAISA, {base}{rate}" for base in ("AdamW", "SGD") for rate in ("", TWICE)]
        assert list(found["settings"]) == list(found["figures"]) == [*names, *kaisa]
        rates = {name: lr for name, (lr, _) in found["settings"].items()}
        assert rates["KAISA, SGD"] == rates["SGD"] in tuned_rivals.GRIDS[task]["SGD"]
        assert rates[f"KAISA, AdamW{TWICE}"] == 2 * rates["AdamW"]
        assert len(found["tuning"]) == 4 * 2 * 2
        assert {r["job"]["seed"] for r in found["tuning"]} == {100, 101}
        assert [r["job"]["seed"] for r in found["runs"] if r["name"] == "SOAP"] == [0, 1]
        assert not any(r["job"]["options"] for r in found["runs"])
