"""Stored runs of several processes say what the pages say of exchanges, shards and restarts."""

from __future__ import annotations

import pytest
from stored import number, rows, stored, text_of

MIB = 2**20


def test_what_leaves_in_the_backward_pass_is_not_waited_for() -> None:
    slowed = [row for row in stored("pipelined")["rows"] if row["dtype"] == "float32"]
    ratios = [row["ratio"] for row in slowed]
    assert f"took {min(ratios):.2f} to {max(ratios):.2f} times that" in text_of("docs/kaisa.md")
    for row in slowed:
        if row["network"] != "fast":
            assert row["pipelined"]["waited"] < row["all_reduce"]["waited"]


def test_bfloat16_takes_half_the_bytes_and_little_of_the_accuracy() -> None:
    found = stored("exchange_dtype")["rows"]
    for row in found:
        exact, narrow = row["bytes"]["sums"]
        assert exact / 2 <= narrow < 0.51 * exact
        assert row["failed"] == 0
    both = [row for row in found if row["kind"] == "both"]
    usual, small = (
        max(row["last"]["worst"] for row in both if row["damping"] == damping)
        for damping in (0.5, 0.05)
    )
    assert f"change by up to {100 * usual:.0f} %" in text_of("docs/kaisa.md")
    assert small > 0.5


def test_what_a_process_keeps_and_sends_of_a_sharded_model() -> None:
    found = {f"{row['system']}, {row['how']}": row for row in stored("sharded")["rows"]}
    for name, cells in rows("docs/stacks.md", "", "parameters").items():
        row = found[name.replace('`factor_exchange="reduce"`', "reduce")]
        kept = ("parameters", "base", "factors", "inverses", "sent")
        expected = [row[key] / MIB for key in kept]
        assert [number(cell) for cell in cells] == pytest.approx(expected, abs=0.006), name


def test_what_64_processes_would_send_and_keep() -> None:
    systems = stored("scaling")["systems"]
    names = ("DPKFAC, balanced", "KAISA COMM-OPT", "KAISA MEM-OPT", "S-SGD")
    sgd = sum(systems["S-SGD"]["bytes moved"].values())
    expected = [
        [sum(systems[name]["bytes moved"].values()) / sgd for name in names],
        [64 * systems[name]["bytes moved by the busiest"] / sgd for name in names],
        *[[systems[name]["bytes kept"][key] / 1e6 for name in names] for key in ("mean", "most")],
    ]
    header = ("", "DPKFAC", "KAISA COMM-OPT", 'KAISA MEM-OPT with "reduce"', "plain SGD")
    table = list(rows("docs/dpkfac.md", *header).values())
    for cells, found in zip(table, expected, strict=True):
        assert list(map(number, cells)) == pytest.approx(found, abs=0.051)
    assert list(map(number, table[0])) == pytest.approx(expected[0], abs=0.006)


KILLED = {
    "KAISA": "kaisa",
    "DPKFAC": "dpkfac",
    "DistKFAC": "distkfac",
    "DHO2": "dho2",
    "MRDHO2, no accelerators": "mrdho2",
}


@pytest.mark.parametrize("label", KILLED)
def test_every_end_is_that_of_a_training_nobody_has_disturbed(label: str) -> None:
    run = stored("elastic")["runs"][KILLED[label]]
    table = rows("docs/faults.md", "optimizer", "kills", "other number", "spoilt")
    kills, others, spoilt, same, near = table[label]
    assert number(kills) == run["kills"] == sum(x["killed"] is not None for x in run["lives"])
    assert number(others) == run["resumed_on_another_number"]
    assert number(spoilt) == run["checkpoints_spoilt"]
    assert same == "equal bit for bit"
    assert run["equal_to_undisturbed_bit_for_bit"]
    assert run["hung"] == 0
    assert float(near) == pytest.approx(run["distance_from_one_process"], rel=0.06)
    if label == "DHO2":
        far = run["distance_of_two_undisturbed"]
        assert f"{far:.2g} from one after 400" in text_of("docs/faults.md")
        assert run["distance_from_one_process"] < far, "no further than rounding"
    elif label != "DPKFAC":  # whose factors are of its share of the batch
        assert run["distance_from_one_process"] < 1e-8
