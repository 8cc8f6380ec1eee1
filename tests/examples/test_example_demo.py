"""The demo: KAISA beside Adam, AdamW and Muon on two tasks, as it is run."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ranks import replaced, script

import demo
from demo import Run, Task, rise_and_fall

if TYPE_CHECKING:
    from conftest import TorchRunner
    from pool import World

COMPETITORS = [(task.name, name) for task in demo.TASKS for name in task.optimizers]


def run_of(*losses: float) -> Run:
    steps = [25 * i for i in range(len(losses))]
    return Run("task", "Adam", steps, [0.1 * step for step in steps], list(losses))


def test_prints_tables_draws_and_stores_the_runs(torchrun: TorchRunner, tmp_path: Path) -> None:
    """Slow: processes of their own."""
    picture, stored = tmp_path / "demo.png", tmp_path / "demo.json"
    run = torchrun(Path(demo.__file__), 2, "--steps", 3, "--figure", picture, "--json", stored)
    assert run.wait(200.0) == 0, run.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(stored.read_text("utf-8"))
    assert record["processes"] == 2
    assert [(found["task"], found["optimizer"]) for found in record["runs"]] == COMPETITORS
    for found in record["runs"]:
        assert found["steps"] == [0, 3]
        assert found["losses"][-1] < found["losses"][0]
        assert f"{found['losses'][-1]:.3f}" in run.output


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
    return demo.train(demo.TASKS[task], name, steps, silent=True)


def test_one_process_is_enough(world: World, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    (output,) = world.run(script, 1, "demo", "--steps", 1, "--figure", picture)
    assert all(name in output for _, name in COMPETITORS)
    assert "steps of every training" not in output
    assert picture.exists()


def shortened(rank: int, world_size: int, picture: Path) -> str:
    """What the demo prints where a step of each training takes so long, as the first rank finds."""
    cost = {"cost_of": lambda *_: (1.0, 50.0 if rank else 0.6)}
    done = {
        "train": lambda task, name, steps, silent: Run(task.name, name, [0, steps], [0, 1], [2, 1])
    }
    with replaced(demo, cost | done):
        told: str = script(rank, world_size, "demo", "--figure", picture)
    return told


def test_a_slow_machine_takes_fewer_steps_all_alike(world: World, tmp_path: Path) -> None:
    """130 s are 5 first blocks of a second, and 41 steps of 5 × 0.6 s."""
    told, silent = world.run(shortened, 2, tmp_path / "demo.png")
    assert "50 steps of every training: 500 would take more than 130 s" in told
    assert told.count("50") >= len(COMPETITORS)
    assert not silent


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1e4, 500), (192.1, 500), (191.9, 475), (32.1, 100), (3, 25), (-5, 25)]
)
def test_as_many_steps_as_there_is_time_for(world: World, seconds: float, steps: int) -> None:
    """One training begins with 2 s, and takes 0.4 s for each further step."""
    assert world.run(steps_within, 1, seconds) == [steps]


def steps_within(rank: int, world_size: int, seconds: float) -> int:
    alone = {"TASKS": demo.TASKS[1:], "cost_of": lambda *_: (1.0, 0.2)}
    with replaced(demo, alone):
        return demo.steps_within(seconds)


def test_the_trial_counts_the_first_steps_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a judgement, of which there are three, to each block."""
    run = Run("task", "KAISA", [0, 25, 35], [0.0, 5.0, 6.0], [3.0, 2.0, 1.0])
    monkeypatch.setattr(demo, "train", lambda *args, **kwargs: run)
    clock = iter([100.0, 100.0 + 6.0 + 3 * 0.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert demo.cost_of(demo.TASKS[0], "KAISA") == pytest.approx((5.0 + 2 * 0.5, 0.1 + 0.5 / 25))


def test_the_rate_rises_in_a_tenth_of_the_steps_and_falls_to_a_twentieth() -> None:
    shares = [rise_and_fall(500, step) for step in range(501)]
    assert shares[0] == pytest.approx(1 / 50)
    assert max(shares) == shares[49] == shares[50] == 1
    assert shares[275] == pytest.approx((1 + 0.05) / 2)
    assert shares[500] == pytest.approx(0.05)
    assert all(earlier >= later for earlier, later in pairwise(shares[50:]))


def test_first_at_a_loss() -> None:
    run = run_of(4, 3, 2.5, 2.6, 2)
    assert run.first_at(2.5) == 2
    assert run.first_at(2.55) == 2
    assert run.first_at(1.9) is None


def test_what_is_not_reached_is_called_never(capsys: pytest.CaptureFixture[str]) -> None:
    demo.Console(width=80).print(demo.table([run_of(4, 3, 2), run_of(4, 3.5, 3)]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "Adam " in line]
    assert rows[-2:] == [
        ["Adam", "50", "5.0", "2.000", "100.0"],
        ["Adam", "never", "never", "3.000", "100.0"],
    ]


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
