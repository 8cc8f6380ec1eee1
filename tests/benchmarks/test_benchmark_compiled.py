"""The cost of hooks in a compiled model: the script runs, and the page has the stored figures."""

from __future__ import annotations

import pytest
from stored_runs import stored, text_of
from torch import nn

import compiled
from workloads import Workload


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 10))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_every_case_is_measured() -> None:
    found = compiled.measure(Workload("tiny", net, (4, 6)), "eager", turns=2, repeats=1)
    assert list(found) == list(compiled.CASES)
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
    assert compiled.ratio(found, "plain") == 1


def test_the_page_has_the_stored_figures_and_idle_hooks_cost_less_than_a_tenth() -> None:
    turns = {record["workload"]: record["turns"] for record in stored("compiled")["records"]}
    idle, busy = (
        [compiled.ratio(of, case) for of in turns.values()] for case in ("idle", "statistics")
    )
    sentence = (
        "without statistics {:.2f} for `mlp` and {:.2f} for `transformer`; with statistics {:.2f}"
    )
    assert f"{sentence} and {{:.2f}}".format(*idle, *busy) in text_of("docs/how-to/fsdp-compile.md")
    assert max(idle) < 1.1
