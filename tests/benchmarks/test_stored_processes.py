"""Stored runs of several processes say what the pages say of exchanges, shards and restarts."""

from __future__ import annotations

from collections import Counter

import pytest
from stored_runs import number, rows, stored, text_of

KILLED = {
    "KAISA": "kaisa",
    "DPKFAC": "dpkfac",
    "DistKFAC": "distkfac",
    "DHO2": "dho2",
    "MRDHO2, no accelerators": "mrdho2",
}


@pytest.mark.parametrize("label", KILLED)
def test_every_run_ends_like_an_undisturbed_run(label: str) -> None:
    run = stored("elastic")["runs"][KILLED[label]]
    table = rows("docs/evidence/reliability.md", "optimizer", "kills", "other number", "damaged")
    kills, others, spoilt, same, near = table[label]
    assert number(kills) == run["kills"] == sum(x["killed"] is not None for x in run["lives"])
    assert number(others) == run["resumed_on_another_number"]
    assert number(spoilt) == run["checkpoints_cut_short"]
    assert same == "equal bit for bit"
    assert run["equal_to_undisturbed_bit_for_bit"]
    assert run["hung"] == 0
    assert float(near) == pytest.approx(run["distance_from_one_process"], rel=0.06)
    if label == "DHO2":
        far = run["distance_of_two_undisturbed"]
        assert f"{far:.2g} from one after 400" in text_of("docs/evidence/reliability.md")
        assert run["distance_from_one_process"] < far, "no further than rounding"
    elif label != "DPKFAC":  # whose factors are of its share of the batch
        assert run["distance_from_one_process"] < 1e-8


def test_faults_and_what_became_of_them() -> None:
    results = stored("faults")["results"]
    assert len(results) >= 200
    assert {result["outcome"] for result in results} == {"clean"}
    kinds = {result["fault"] for result in results}
    clean = [result for result in results if result["outcome"] == "clean"]
    ends = Counter(result["ended"] for result in clean)
    ((label, cells),) = rows("docs/evidence/reliability.md", "test", "cases", "continues").items()
    assert label == f"injected faults, {len(kinds)} kinds"
    wrong = len(results) - len(clean)
    counts = [len(results), ends["continues"], ends["warns"], ends["ends by an error"], wrong]
    assert cells == [f"{count:,}" for count in counts]
