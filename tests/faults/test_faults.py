"""A sample of faults in small runs, and how the judge rates the ends of processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import faults
from fault_kinds import FAULTS, Fault, helped, solving
from fault_scenes import SYSTEMS, Run, System
from faults import Case, Rank, judge

ROOT = Path(__file__).parents[2]
THREADED = ("DistKFAC 2", "DistKFAC 2+1", "MRDHO2 2+1")
(TWO,) = [system for system in SYSTEMS if system.name == "KAISA 2, all"]
OWN_ERROR = {
    "type": "SecondOrderError",
    "module": "second_order.errors",
    "message": "rank 1 is not what it was",
    "from": "second_order/x.py",
    "chain": [],
}
FOREIGN_ERROR = {**OWN_ERROR, "type": "KeyError", "module": "builtins", "message": "'step'"}


def report(*parameters: float, **more: Any) -> dict[str, Any]:
    found = {"status": "done", "parameters": parameters or (1.0, 2.0), "use": {"bytes": 8.0}}
    return {**found, "warnings": [], "notes": [], "caught": [], "finite": True, **more}


def outcome(*ranks: Rank, expect: str = "continues", **about: Any) -> str:
    case = Case(TWO, Fault("a fault", "a group", lambda run: None, expect=expect, **about), "first")
    return judge(case, [ranks], [report(), report()])[0]


def ended(waited: int = 0, sent: int | None = None, **more: Any) -> Rank:
    return Rank(1, waited, report(**more) if waited == 0 else None, sent)


def test_faults_that_are_reported_or_have_no_effect_are_clean() -> None:
    assert outcome(ended(), ended()) == "clean"
    assert outcome(ended(), ended(), expect="same") == "clean"
    raised = ended(status="raised", error=OWN_ERROR)
    assert outcome(raised, raised, expect="raises") == "clean"
    assert outcome(raised, ended(9, sent=9), expect="raises") == "clean"
    assert outcome(ended(warnings=["a layer"]), ended(), expect="reported") == "clean"
    assert outcome(ended(caught=[OWN_ERROR]), ended(), expect="same") == "clean"


def test_hangs_differences_and_errors_without_a_message_are_not_clean() -> None:
    two = [ended(), ended()]
    raised = ended(status="raised", error=OWN_ERROR)
    puzzled = ended(status="raised", error=FOREIGN_ERROR)
    hung = Rank(1, 9, killed=True)
    other = Rank(1, 0, report(1.0, 2.5))
    assert outcome(ended(), hung) == "hung"
    assert outcome(ended(), other) == "out of sync"
    assert outcome(raised, raised) == "lost", "training had to continue"
    assert outcome(other, other, expect="same") == "lost"
    assert outcome(*two, expect="raises") == "lost"
    assert outcome(*[Rank(1, 0, report(1.0, float("nan")))] * 2) == "lost"
    assert outcome(*[ended(use={"bytes": 0.0})] * 2) == "lost"
    assert outcome(*[ended(notes=["accepted: it loads"])] * 2, expect="same") == "lost"
    assert outcome(raised, puzzled, expect="raises") == "unclear"
    assert outcome(raised, ended(6), expect="raises") == "unclear", "the fault did not send SIGABRT"
    assert outcome(ended(caught=[FOREIGN_ERROR]), ended(), expect="same") == "unclear"


def test_every_fault_finds_a_system_and_a_moment() -> None:
    every = faults.cases("", every=True)
    some = faults.cases("", every=False)
    assert len(every) > len(some) >= 200
    assert {case.fault.name for case in some} == {fault.name for fault in FAULTS}
    assert len({case.name for case in every}) == len(every)
    assert len(faults.cases("^DPKFAC 2 / solves", every=True)) > 3


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
@pytest.mark.parametrize(
    "system",
    [system for system in SYSTEMS if not helped(system) and not system.sharded],
    ids=lambda system: system.name,
)
def test_every_system_refreshes_at_the_moment_of_that_name(system: System, tmp_path: Path) -> None:
    """Otherwise its faulty refreshes would be no test. On one process, with the same options."""
    run = Run(system, rank=0, size=1, moment=system.moments["refresh"], phase=0, directory=tmp_path)
    calls: list[int] = []

    def counted(native: Any) -> Any:
        def routine(*matrices: Any) -> Any:
            calls.append(run.step)
            return native(*matrices)

        return routine

    solving(run, counted)
    run.go({})
    assert calls


ENDS = "ends by an error"
CONTINUES = "continues"
WARNS = "warns"
SAMPLE = {  # None: a slow helper may cause a warning
    "KAISA 2, sharded / solves / solves return NaN on one rank / first": WARNS,
    "DHO2 2, auto / numbers and batches / a clock that runs back on one rank / first": CONTINUES,
    "MRDHO2 2+1 / helpers / is killed before it serves / whole": WARNS,
    # A process ends when its script does, whatever is under way, and however the script ends.
    "KAISA 2, all / one rank alone / is killed / first": ENDS,
    "KAISA 2, all / one rank alone / raises in the loss / between": ENDS,
    **{f"{s} / all ranks / end without close() / whole": None for s in THREADED},
    **{f"{s} / all ranks / are interrupted by Ctrl-C / refresh": ENDS for s in THREADED},
    "DistKFAC 2+1 / one rank alone / raises in the loss / between": ENDS,
    "MRDHO2 2+1 / all ranks / raise in the loss / between": ENDS,
    # Workers continue without helpers, and helpers return from serve() if workers have died.
    "DistKFAC 2+1 / helpers / is killed / whole": WARNS,
    "DistKFAC 2+1 / helpers / is stopped for good / whole": None,
    "DistKFAC 2+1 / one rank alone / is killed / between": ENDS,
    "MRDHO2 2+1 / one rank alone / is killed / between": ENDS,
}


def test_a_sample_of_cases_is_performed(tmp_path: Path) -> None:
    """By a process of its own, which forks."""
    written = tmp_path / "faults.json"
    script = ROOT / "tests" / "faults" / "faults.py"
    command = [sys.executable, str(script), "--json", str(written)]
    command += ["--every", "--jobs", "3", "--only", f"^({'|'.join(map(re.escape, SAMPLE))})$"]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    subprocess.run(command, env=environment, capture_output=True, timeout=200, check=True)
    results = json.loads(written.read_text())["results"]
    keys = ("system", "group", "fault", "moment")
    assert {r["outcome"] for r in results} == {"clean"}, results
    found = {" / ".join(r[key] for key in keys): r["ended"] for r in results}
    assert found == {name: ended or found[name] for name, ended in SAMPLE.items()}
