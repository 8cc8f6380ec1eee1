"""The benchmark of MRDHO2's final updates: its quadratic, the JSON, and the table."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest
from ranks import script
from rich.console import Console

import final_updates
from final_updates import UPDATES, Run

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World


def test_on_the_quadratic_only_the_paper_s_update_loses_to_the_base(
    world: World, tmp_path: Path
) -> None:
    output = tmp_path / "runs.json"
    arguments = ("--only", "quadratic", "--seeds", "1", "--output", output)
    printed, _ = world.run(script, 2, "final_updates", *arguments)
    losses = {r["update"]: r["loss"] for r in json.loads(output.read_text())["runs"]}
    assert tuple(losses) == UPDATES
    assert losses["guarded"] <= 1.02 * losses["base alone"]
    assert losses["additive"] <= 1.02 * losses["base alone"]
    assert losses["paper"] > 10 * losses["base alone"]
    assert "to base" in printed


def test_the_table_divides_medians_by_the_base_s() -> None:
    runs = [Run("task", "base alone", seed, loss, 1.0) for seed, loss in enumerate((1.0, 2.0, 9.0))]
    runs += [Run("task", "guarded", seed, 3.0, 2.0, 4, 5, 0.25) for seed in range(3)]
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(final_updates.table(runs))
    base, guarded = [line.split() for line in captured.get().splitlines() if "task " in line][1:]
    assert "1.000" in base
    assert "1.500" in guarded
    assert "12 of 15" in " ".join(guarded)


@pytest.mark.parametrize("task", final_updates.tasks(), ids=lambda task: task.name)
def test_every_task_has_a_loss(task: final_updates.Task) -> None:
    assert task.whole(task.make()).isfinite()
    assert task.steps % task.epoch_steps < task.epoch_steps <= task.steps
