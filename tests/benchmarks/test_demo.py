"""The demo: KAISA, Adam, AdamW and Muon on two tasks, run as users run it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ranks import script

import demo
from demo import Run, Task

if TYPE_CHECKING:
    from pool import World

COMPETITORS = [(task.name, name) for task in demo.TASKS for name in task.optimizers]


def test_prints_tables_draws_and_stores_the_runs(world: World, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    stored = tmp_path / "demo.json"
    options = "--steps", 3, "--figure", picture, "--json", stored
    output, _ = world.run(script, 2, "demo", *options, timeout=200.0)
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(stored.read_text("utf-8"))
    assert record["processes"] == 2
    assert [(found["task"], found["optimizer"]) for found in record["runs"]] == COMPETITORS
    for found in record["runs"]:
        assert found["steps"] == [0, 3]
        assert found["losses"][-1] < found["losses"][0]
        assert f"{found['losses'][-1]:.3f}" in output


def test_judges_every_25_steps_and_at_the_end(world: World) -> None:
    (run,) = world.run(trained, 1, 1, "Adam", 55)
    assert run.steps == [0, 25, 50, 55]
    assert run.seconds[0] == 0
    assert all(earlier < later for earlier, later in pairwise(run.seconds))
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize(("task", "name"), [(0, "Muon"), (0, "KAISA, AdamW"), (1, "KAISA, Adam")])
def test_the_processes_share_each_batch(world: World, task: int, name: str) -> None:
    alone, shared = (world.run(trained, count, task, name, 4)[0] for count in (1, 2))
    assert alone.losses == pytest.approx(shared.losses, rel=5e-3)


def trained(rank: int, world_size: int, task: int, name: str, steps: int) -> Run:
    return demo.train(demo.TASKS[task], name, steps, quiet=True)


@pytest.mark.filterwarnings("ignore:.*trained by AdamW alone")
def test_every_competitor_gets_all_parameters() -> None:
    for task, name in COMPETITORS:
        found: Task = next(each for each in demo.TASKS if each.name == task)
        model = found.make()
        groups: list[dict[str, Any]] = [
            group for each in found.optimizers[name](model) for group in each.param_groups
        ]
        stepped = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(stepped) == sorted(id(parameter) for parameter in model.parameters())
