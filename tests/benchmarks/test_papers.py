"""The page of the papers' claims has the stored run's rows, and every row can be measured."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from stored_runs import ROOT, stored

import papers
from claim import Row, markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pool import World

PAGE = ROOT / "docs" / "evidence/papers.md"


def test_the_page_is_written_from_the_stored_run() -> None:
    page = PAGE.read_text("utf-8")
    record = stored("papers")
    assert papers.with_tables(page, record) == page
    first, *others = record["rows"]
    changed = {**record, "rows": [{**first, "our_value": "0.1 ×"}, *others]}
    assert papers.with_tables(page, changed) != page


def test_each_paper_has_its_claims_and_each_disagreement_a_reason() -> None:
    found = papers.rows_of(stored("papers"))
    assert list(dict.fromkeys(row.paper for row in found)) == [
        *("KAISA", "DP-KFAC", "DistKFAC", "DHO2")
    ]
    assert len({row.claim for row in found}) == len(found) >= 25
    for row in found:
        assert row.agrees or row.reason, row.claim
        assert row.values, row.claim


def test_the_command_takes_at_most_ten_minutes() -> None:
    """On two cores that have little else to do."""
    load = float(stored("papers")["machine"]["load"].split()[0])
    if load > 4:
        pytest.skip(f"the stored run shared its machine: {load:g} processes on average")
    assert stored("papers")["seconds"] <= 600


def test_a_row_says_why_it_disagrees() -> None:
    row = Row(
        "KAISA", "saves time", "table 1", "2 ×", "1 ×", "one run", agrees=False, reason="small"
    )
    assert "| saves time (table 1) | 2 × | 1 × | **no**: small |" in markdown([row])
    agreed = dataclasses.replace(row, agrees=True)
    assert "| saves time (table 1) | 2 × | 1 × | ✓ |" in markdown([agreed])


class OnThePool:
    """Runs the claims that need several processes on the shared pool."""

    count = 2

    def __init__(self, world: World) -> None:
        self.world = world

    def together(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.world.run(on_rank, self.count, function, *args)

    def each(self, function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
        return [function(argument) for argument in arguments]


def on_rank(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_every_claim_can_be_measured(world: World) -> None:
    """At a size that says nothing about the claims."""
    gc.freeze()  # the planner collects garbage often
    try:
        found = papers.measure(papers.TINY, OnThePool(world))  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    assert [row.claim for row in found] == [row.claim for row in papers.rows_of(stored("papers"))]
    text = json.dumps([dataclasses.asdict(row) for row in found], allow_nan=False)
    assert "NaN" not in text
    (sent,) = (row for row in found if row.source == "table 2, FactorComm")
    assert sent.values["DPKFAC"] == 0
    assert math.isclose(sent.values["KAISA"] or 0, 0.5, abs_tol=0.05), "triangles are half"
