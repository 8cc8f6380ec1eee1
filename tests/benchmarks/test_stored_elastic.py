"""The page about restarts has the figures of the stored soak, and these are what it says."""

from __future__ import annotations

import pytest
from stored import ROOT, number, rows, stored

RUNS = stored("elastic")["runs"]
LABELS = {
    "KAISA": "kaisa",
    "DPKFAC": "dpkfac",
    "DistKFAC": "distkfac",
    "DHO2": "dho2",
    "MRDHO2, no accelerators": "mrdho2",
}


def test_every_end_is_that_of_a_training_nobody_has_disturbed() -> None:
    assert set(RUNS) == set(LABELS.values())
    for name, run in RUNS.items():
        lives = run["lives"]
        assert run["kills"] == sum(life["killed"] is not None for life in lives) >= 8, name
        assert run["equal_to_undisturbed_bit_for_bit"], name
        assert run["hung"] == 0, name
        assert {life["processes"] for life in lives} == {1, 2, 3}, name
        assert any(life["spoilt"] for life in lives), name
    near = {name: run["distance_from_one_process"] for name, run in RUNS.items()}
    assert all(near[name] < 1e-8 for name in ("kaisa", "distkfac", "mrdho2"))
    assert near["dho2"] < RUNS["dho2"]["distance_of_two_undisturbed"], "no further than rounding"
    assert near["dpkfac"] > 0.1, "its factors are of its share of the batch"
    assert all(RUNS[name]["kills"] >= 20 for name in ("kaisa", "dpkfac", "distkfac", "dho2"))
    assert RUNS["kaisa"]["kills_under_torchrun"] == 2


@pytest.mark.parametrize("label", LABELS)
def test_the_page_has_the_stored_soak(label: str) -> None:
    run = RUNS[LABELS[label]]
    table = rows("docs/elastic.md", "optimizer", "kills", "other number", "spoilt")
    kills, others, spoilt, same, near = table[label]
    assert number(kills) == run["kills"]
    assert number(others) == run["resumed_on_another_number"]
    assert number(spoilt) == run["checkpoints_spoilt"]
    assert same == "equal bit for bit"
    assert float(near) == pytest.approx(run["distance_from_one_process"], rel=0.06)


def test_the_page_tells_how_far_rounding_takes_dho2() -> None:
    said = f"{RUNS['dho2']['distance_of_two_undisturbed']:.2g} from one after 400"
    assert said in (ROOT / "docs" / "elastic.md").read_text().replace("\n", " ")
    unmet = sum(run["ended_while_they_had_not_met"] for run in RUNS.values())
    assert unmet == 4, "the page says so in words"
