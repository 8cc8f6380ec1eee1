"""second_order.plan and its command: every setting, the recommendation, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import second_order
from second_order import KAISA, Interconnect, Machine
from second_order.__main__ import main
from second_order.planning import plan as planning
from second_order.planning.machine import calibrate
from second_order.planning.plan import SYSTEMS, Choice, _bytes_of, _recommended

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MACHINE = Machine.given(
    1e12, eigh={64: 1e-3}, inverse={64: 1e-4}, bandwidth=1e11, device="cpu", memory=10**9
)
NODES = Interconnect.of_nodes(4, (1e-5, 1e10), (1e-4, 1e9))


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 5)
    )


X = torch.randn(6, 2, 6, 6)


SMALL: dict[str, Any] = {"systems": ["KAISA", "DPKFAC"], "solvers": ["inverse"]}


def planned(world_size: int | Sequence[int] = 8, **given: Any) -> second_order.Plan:
    return second_order.plan(
        net(), X, world_size, **{"machine": MACHINE, "network": NODES, **SMALL, **given}
    )


def test_every_setting_is_there_and_the_fastest_comes_first() -> None:
    found = planned(systems=list(SYSTEMS), solvers=["inverse", "eigen"])
    names = [choice.name for choice in found.choices]
    assert len(names) == len(set(names)) == 2 * (8 + 1 + 1)
    assert {"KAISA MEM-OPT, eigen", "KAISA COMM-OPT, reduce, inverse", "DPKFAC, eigen"} <= set(
        names
    )
    assert "KAISA HYBRID 2/8, inverse" in names
    seconds = [choice.seconds for choice in found.choices]
    assert seconds == sorted(seconds)
    assert found.recommended is not None
    assert found.recommended.seconds <= 1.03 * seconds[0]
    assert found.reason.startswith(f"recommended: {found.recommended.name}: ")
    assert all(choice.seconds > found.base > 0 for choice in found.choices)
    assert str(found).count("recommended") == 2, "in its row, and below the table"
    hybrid = next(c for c in found.choices if c.name == "KAISA HYBRID 2/8, eigen")
    assert hybrid.keywords["grad_worker_fraction"] == 0.25
    assert hybrid.intervals == (10, 10)
    KAISA(net(), lr=0.1, **hybrid.keywords)


def test_memory_is_honoured() -> None:
    sizes = sorted(choice.memory for choice in planned().choices)
    bound = sizes[len(sizes) // 2]
    found = planned(memory=bound)
    assert [c.fits for c in found.choices] == [c.memory <= bound for c in found.choices]
    assert found.recommended is not None
    assert found.recommended.fits
    assert "do not fit into" in found.reason
    assert "does not fit" in found.summary(rows=None)
    nothing = planned(memory="1KB")
    assert nothing.recommended is None
    assert "none of 9 settings fits into 1 KB" in nothing.reason
    assert planned().memory == 10**9, "the machine's, where nothing is said"


def choice(name: str, seconds: float, memory: int, *, fits: bool = True) -> Choice:
    words = {"solver": "inverse"}
    return Choice("KAISA", name, words, (1, 1), {}, seconds, memory, 0, 0.0, fits=fits)


def test_of_similar_settings_the_smallest_is_recommended() -> None:
    fast, lean, slow = choice("a", 1.0, 90), choice("b", 1.02, 50), choice("c", 1.5, 10)
    best, reason = _recommended([fast, lean, slow], None, MACHINE)
    assert best is lean
    assert "within 3% of the fastest, KAISA a, inverse, and 40 B less memory" in reason
    best, reason = _recommended([choice("a", 1.0, 90, fits=False), slow], 60, MACHINE)
    assert best is slow
    assert "1 do not fit into 60 B, 1 of them faster" in reason


def test_the_model_is_left_as_it_was() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    second_order.plan(model, X, 2, machine=MACHINE, **SMALL)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("512 MiB", 2**29), (7, 7), ("1.5kb", 1500), ("3e2", 300)],
)
def test_bytes_in_words(text: Any, size: int) -> None:
    assert _bytes_of(text) == size


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"memory": "much"}, ValueError, "'much' is not a number of bytes"),
        ({"memory": 0}, ValueError, "write 80GB"),
        ({"world_size": 0}, ValueError, "world_size"),
        ({"world_size": [2, 0]}, ValueError, "world_size"),
        ({"world_size": []}, ValueError, "one of each at least"),
        ({"systems": ["DHO2"]}, ValueError, "some of KAISA, DPKFAC, DistKFAC"),
        ({"systems": "KAISA"}, ValueError, "give a list"),
        ({"solvers": []}, ValueError, "inverse, eigen"),
        ({"intervals": []}, ValueError, "one of each at least"),
        ({"intervals": [10]}, ValueError, "is not a pair"),
        ({"intervals": [(0, 1)]}, ValueError, "intervals"),
        ({"options": {"solver": "eigen"}}, TypeError, "'solver' is a setting that is planned"),
        ({"options": {"symmetry": True}}, TypeError, "unknown to KAISA"),
        ({"seconds": 61}, ValueError, "seconds"),
        ({"sample_batch": 3}, TypeError, "the model's arguments"),
        ({"sample_batch": torch.ones(2, 3)}, ValueError, "does not take sample_batch"),
        ({"sample_batch": (X, torch.ones(6))}, ValueError, "without targets"),
        ({"model": "net"}, TypeError, "give a torch.nn.Module"),
        ({"model": nn.ReLU()}, ValueError, "no parameter of the model trains"),
        ({"model": net().to("meta")}, ValueError, "on the meta device"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    given: dict[str, Any], kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "measure_machine", None)
    wanted = {"model": net(), "sample_batch": X, "world_size": 2, "machine": MACHINE, **given}
    with pytest.raises(kind, match=said):
        second_order.plan(**wanted)


def test_the_title_says_where_the_network_is_from() -> None:
    measured = replace(NODES, measured=True)
    titles = [planned(2, network=n).summary().split(";")[1] for n in (None, NODES, measured)]
    assert titles == [" network assumed", " network as given", " network measured"]


def test_a_plan_leaves_the_process_as_it_was() -> None:
    """Torch's default group sets a hook for uncaught errors; a plan makes no group."""
    hook = sys.excepthook
    planned()
    assert sys.excepthook is hook
    assert not torch.distributed.is_initialized()


def test_a_plan_is_the_same_where_a_process_group_is_initialized() -> None:
    alone = planned([1, 4])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        beside = planned([1, 4])
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    for first, second in zip((alone, *alone.others), (beside, *beside.others), strict=True):
        found, expected = (
            {c.name: (c.kept, c.sent) for c in each.choices} for each in (second, first)
        )
        assert found == expected


# The command.

SCRIPT = """
import torch
from torch import nn

def model_and_batch():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), torch.randn(12, 6)

def wrong():
    return 3

if __name__ == "__main__":
    raise SystemExit("it trains")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "planned_script.py"
    path.write_text(SCRIPT, "utf-8")
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE.as_json()), "utf-8")
    (tmp_path / "empty.json").write_text("{}", "utf-8")
    return path


def test_the_command_prints_tables_and_writes_json(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nodes.json").write_text(json.dumps(NODES.as_json()), "utf-8")
    words = ["plan", str(script), "--machine", "machine.json", "--world-sizes", "1", "8"]
    words += ["--network", "nodes.json", "--memory", "1GB", "--json", "out.json"]
    words += ["--solvers", "inverse", "--intervals", "1/10", "5/10", "--systems", "KAISA", "DPKFAC"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("recommended: ") == 2
    assert "8 ranks of given; network as given" in said
    one, eight = json.loads((tmp_path / "out.json").read_text())
    assert (one["world_size"], eight["world_size"], eight["memory"]) == (1, 8, 10**9)
    levels = eight["network"]["levels"]
    assert [level["ranks"] for level in levels] == [4, None]
    assert levels[1]["bandwidth"] == 1e9
    every = {c["keywords"]["inv_update_steps"] for c in eight["choices"]}
    assert every == {10}
    assert main(["plan", "planned_script:model_and_batch", *words[2:4], "--memory", "9B"]) == 1
    assert "fits into 9 B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "No such file.*nowhere.py"),
        (["no.module:f"], "No module named 'no'"),
        (["planned_script.py:other"], r"no function other\(\)"),
        (["planned_script.py:wrong"], r"no function wrong\(\) that .* returns \(model, batch\)"),
        (["planned_script.py", "--machine", "planned_script.py"], "no numbers of a Machine"),
        (["planned_script.py", "--machine", "none.json"], "none.json"),
        (["planned_script.py", "--network", "empty.json"], "no numbers of a Interconnect"),
        (["planned_script.py", "--world-sizes", "0"], "world_size=0 is below 1"),
        (["planned_script.py", "--memory", "lots"], "'lots' is not a number of bytes"),
    ],
)
def test_the_command_tells_what_is_wrong(
    script: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--machine" not in words:
        words = [*words, "--machine", "machine.json"]
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m second_order plan: ")
    assert re.search(said, error)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world-sizes", "many"], "invalid int value"),
        (["--intervals", "10"], "not two intervals, as 10/100"),
        (["--systems", "SGD"], "invalid choice"),
    ],
)
def test_words_that_make_no_sense(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "train.py", *words])
    assert said in capsys.readouterr().err


def test_a_plan_is_json_and_several_numbers_of_ranks_are_planned_as_each_alone() -> None:
    torch.manual_seed(0)
    both = planned([2, 1])
    assert [each.world_size for each in (both, *both.others)] == [2, 1]
    alone = planned(1)
    assert [c.sent for c in both.others[0].choices] == [c.sent for c in alone.choices]
    found = json.loads(both.to_json())
    assert found["recommended"]["system"] in {choice["system"] for choice in found["choices"]}
    assert Machine.of_json(found["machine"]) == MACHINE
    assert Interconnect.of_json(found["network"]) == NODES


def test_solves_on_threads_are_free_where_a_core_is_idle_and_work_where_none_is() -> None:
    """A CPU trains on all its cores where nobody says otherwise."""
    by = {}
    for spare in (None, 1):
        machine = replace(MACHINE, spare_cores=spare)
        found = planned(1, machine=machine, systems=["DistKFAC"])
        by[spare] = found.choices[0]
        assert ("no core is left to DistKFAC's threads" in found.reason) == (not spare)
    busy, idle = by[None], by[1]
    assert busy.hidden == 0.0 < idle.hidden
    assert busy.seconds == pytest.approx(idle.seconds + idle.hidden)
    assert idle.stages["solve"] < 0.5 * busy.stages["solve"]
    assert replace(MACHINE, device="cuda").solves_beside


def test_this_machine_is_measured() -> None:
    machine, links = calibrate(seconds=0.2)
    assert links == second_order.planning.machine.DEFAULT_NETWORKS["cpu"]
    assert machine.eigh.at(64) > machine.inverse.at(64)
    assert 0 < machine.launch + machine.python < 1e-2
    with pytest.raises(ValueError, match="seconds=61 is outside 0 to 60"):
        calibrate(seconds=61)


def test_more_work_is_seen() -> None:
    """Passes of a model that is given by its numbers take the time of their products."""
    slow = replace(MACHINE, products=replace(MACHINE.products, points=((1.0, 1e-3),)))
    (alone,) = planned(1, systems=["KAISA"], machine=slow).choices
    forward = 6 * (16 * 4 * 18 + 64 * 5)
    assert alone.stages["passes"] > 2 * 1e-3 * forward


def test_a_slower_machine_takes_longer() -> None:
    slower = replace(MACHINE, products=replace(MACHINE.products, points=((1.0, 1.0),)))
    assert planned(machine=slower).base > planned().base
