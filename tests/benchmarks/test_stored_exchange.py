"""The stored runs of exchanges in the backward pass and in bfloat16, and the page about them."""

from __future__ import annotations

from stored import ROOT, stored

PAGE = " ".join((ROOT / "docs" / "kaisa.md").read_text().split())


def test_what_leaves_in_the_backward_pass_is_not_waited_for() -> None:
    rows = stored("pipelined")["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["apart"] < 0.01
        if row["dtype"] == "float32" and row["network"] != "fast":
            assert row["pipelined"]["waited"] < row["all_reduce"]["waited"]
            assert row["ratio"] < 1
    ratios = [row["ratio"] for row in rows if row["dtype"] == "float32"]
    assert f"took {min(ratios):.2f} to {max(ratios):.2f} times that" in PAGE


def test_bfloat16_takes_half_the_bytes_and_little_of_the_accuracy() -> None:
    rows = stored("exchange_dtype")["rows"]
    assert len(rows) == 3 * 2 * 2 * 3
    for row in rows:
        assert row["failed"] == 0
        exact, narrow = row["bytes"]["sums"]
        assert exact / 2 <= narrow < 0.51 * exact
        if row["kind"] == "both":
            exact, narrow = row["bytes"]["decompositions"]
            assert exact / 2 <= narrow < 0.51 * exact
            assert row["last"]["median"] < 0.05
            if row["damping"] == 0.5:
                assert row["last"]["worst"] < 0.06
    both = [row for row in rows if row["kind"] == "both"]
    wrong = [
        max(row["last"]["worst"] for row in both if row["damping"] == each) for each in (0.5, 0.05)
    ]
    assert f"change by up to {100 * wrong[0]:.0f} %" in PAGE
    assert wrong[1] > 0.5
