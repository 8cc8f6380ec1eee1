"""The tables of 4,096 ranks are those of the stored run, and hold what the page says of them."""

from __future__ import annotations

from typing import Any

import pytest
from stored_runs import ROOT, number, rows, stored

PAGE = "docs/evidence/planning.md"
RUNS: dict[tuple[str, str, int, int], dict[str, Any]] = {
    (run["system"], run["model"], run["ranks"], run["rank"]): run
    for run in stored("many_ranks")["rows"]
}


def test_the_table_of_first_ranks_is_of_the_stored_run() -> None:
    table = rows(PAGE, "system, ranks", "step, s", "messages")
    assert len(table) == 10
    for label, cells in table.items():
        system, _, ranks = label.rpartition(", ")
        run = RUNS[system, "narrow", int(number(ranks)), 0]
        names = ("step_s", "collectives", "sent_mb", "step_mb", "state_mb")
        for name, cell in zip(names, cells, strict=True):
            digits = len(cell.partition(".")[2])
            assert number(cell) == round(run[name], digits), (label, name)


@pytest.mark.parametrize(("system", "rank", "most"), [
    (system, rank, most)
    for system, model, most, rank in RUNS
    if most > 64 and model == "narrow"
])  # fmt: skip
def test_a_step_takes_the_memory_of_64_ranks(system: str, rank: int, most: int) -> None:
    run = RUNS[system, "narrow", most, rank]
    few = RUNS[system, "narrow", 64, 0 if rank == 0 else 32]
    assert run["groups"] == few["groups"] <= 2
    assert run["construction_mb"] <= 1.02 * few["construction_mb"]
    assert run["step_mb"] <= 1.02 * few["step_mb"]
    assert run["construction_s"] < 1.0


def test_the_largest_owner_of_resnet_50() -> None:
    for system, cells in rows(PAGE, "ResNet-50, rank 0").items():
        found = [RUNS[system, "resnet50", ranks, 0]["step_mb"] for ranks in (64, 4096)]
        assert [number(cell) for cell in cells] == [round(each) for each in found]
        assert found[1] <= 1.01 * found[0]


def test_the_page_names_what_still_grows() -> None:
    few, many = (RUNS["DHO2, rows", "narrow", ranks, 0]["next_s"] for ranks in (64, 4096))
    text = (ROOT / PAGE).read_text()
    assert f"{many - few:.1f} s per step" in text
