"""second_order.plan and its command: every setting, the recommendation, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import second_order
from second_order import KAISA, Interconnect, Machine
from second_order.__main__ import main
from second_order.planning import calibration
from second_order.planning import plan as planning
from second_order.planning.calibration import calibrate
from second_order.planning.choices import Choice, bytes_of, recommended
from second_order.planning.observation import observe
from second_order.planning.plan import workers_of
from second_order.planning.systems import kaisa

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


def planned(world_size: int | Sequence[int] = 8, **given: Any) -> second_order.Plan:
    return second_order.plan(
        net(), X, world_size, **{"machine": MACHINE, "network": NODES, **given}
    )


def test_every_setting_is_there_and_the_fastest_comes_first() -> None:
    found = planned()
    names = [choice.name for choice in found.choices]
    assert len(names) == len(set(names)) == 2 * (8 + 2 + 1) + 2 + 1, "rows, columns, accelerators"
    assert {"KAISA MEM-OPT, eigen", "KAISA COMM-OPT, reduce, inverse", "DPKFAC, eigen"} <= set(
        names
    )
    assert "KAISA HYBRID 1/4, inverse" in names
    seconds = [choice.seconds for choice in found.choices]
    assert seconds == sorted(seconds)
    assert found.recommended is not None
    of_factors = [c.seconds for c in found.choices if "solver" in c.keywords]
    assert found.recommended.seconds <= 1.03 * of_factors[0]
    assert found.reason.startswith(f"recommended: {found.recommended.name}: ")
    assert all(choice.seconds > found.base > 0 for choice in found.choices)
    assert str(found).count("recommended") == 2, "in its row, and below the table"
    hybrid = next(c for c in found.choices if c.name == "KAISA HYBRID 1/4, eigen")
    assert hybrid.keywords["grad_worker_fraction"] == 0.25
    assert hybrid.intervals == (10, 10)
    KAISA(net(), lr=0.1, **hybrid.keywords)


def test_counts_are_those_of_a_rank_and_a_step() -> None:
    choice = next(c for c in planned(2).choices if c.name == "KAISA COMM-OPT, inverse")
    works = [cost.work for cost in choice.ranks]
    every = {"statistics": 10, "statistics_exchange": 10, "solve": 10, "solve_exchange": 10}
    stages = {t.stage for t in works[0].transfers}
    sent = max(sum(w.moved(s) / every.get(s, 1) for s in stages) for w in works)
    assert choice.sent == pytest.approx(sent)
    kept = {name: size for name, size in choice.held.items() if name != "passing"}
    assert choice.memory == sum(choice.held.values())
    assert sum(kept.values()) == max(w.nbytes() for w in works)
    assert sum(cost.ranks for cost in choice.ranks) == 2


def test_memory_is_honoured() -> None:
    sizes = sorted(choice.memory for choice in planned().choices)
    bound = sizes[len(sizes) // 2]
    found = planned(memory=bound)
    assert [c.fits for c in found.choices] == [c.memory <= bound for c in found.choices]
    assert found.recommended is not None
    assert found.recommended.fits
    assert "do not fit into" in found.reason
    assert "does not fit" in found.summary(rows=None)
    assert all((c.largest_batch or 0) >= 6 for c in found.choices if c.fits), "as given"
    assert all(
        c.largest_batch is None for c in planned(machine=replace(MACHINE, memory=None)).choices
    )
    nothing = planned(memory="1KB")
    assert nothing.recommended is None
    assert "none of 22 settings fits into 1 KB" in nothing.reason
    assert planned().memory == 10**9, "the machine's, where nothing is said"


def choice(name: str, seconds: float, memory: int, *, fits: bool = True) -> Choice:
    words = {"solver": "inverse"}
    return Choice("KAISA", name, words, (1, 1), 4, {}, seconds, memory, {}, 0.0, 0.0, fits=fits)


def test_of_similar_settings_the_smallest_is_recommended() -> None:
    fast, lean, slow = choice("a", 1.0, 90), choice("b", 1.02, 50), choice("c", 1.5, 10)
    best, reason = recommended([fast, lean, slow], None)
    assert best is lean
    assert "within 3% of the fastest, KAISA a, inverse, and 40 B less memory" in reason
    best, reason = recommended([choice("a", 1.0, 90, fits=False), slow], 60)
    assert best is slow
    assert "1 do not fit into 60 B, 1 of them faster" in reason


def test_solves_on_threads_are_free_where_a_core_is_idle_and_work_where_none_is() -> None:
    """On one core DistKFAC is no faster than KAISA that solves as much at once."""
    heavy = replace(MACHINE, eigh=replace(MACHINE.eigh, points=((64.0, 5e-3),)))
    for ranks in (1, 8):
        given: dict[str, Any] = {"solvers": ["eigen"], "systems": ["KAISA", "DistKFAC"]}
        by = {}
        for spare in (0, 1):
            found = planned(ranks, machine=replace(heavy, spare_cores=spare), **given)
            assert found.recommended is not None
            by[spare] = next(c for c in found.choices if c.system == "DistKFAC")
            at_once = next(c for c in found.choices if c.name == "KAISA COMM-OPT, eigen")
            assert (found.recommended.system == "DistKFAC") == bool(spare)
            assert ("no core is left to DistKFAC's threads" in found.reason) == (not spare)
        idle, busy = by[1], by[0]
        assert busy.shared == busy.stages["solve"] == idle.hidden > 0.0
        assert idle.shared == busy.hidden == 0.0
        assert busy.seconds == pytest.approx(sum(idle.stages.values()) + busy.shared)
        assert busy.stages["solve"] >= at_once.stages["solve"] * 0.999
    nobody_knows = replace(heavy, spare_cores=None)
    assert not nobody_knows.solves_beside, "a CPU trains on all its cores"
    assert replace(nobody_knows, device="cuda").solves_beside


def test_idle_cores_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "own_cores", lambda: 3)
    for threads, spare in ((1, 2), (3, 0), (4, 0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert calibration._spare_cores(torch.device("cpu")) == spare
    assert calibration._spare_cores(torch.device("cuda")) == 2, "one runs Python"


def test_intervals_by_budget_keep_to_it() -> None:
    found = planned(intervals=[(1, 1), "auto"])
    assert found.recommended is not None
    assert found.recommended.keywords["inv_update_steps"] == 1, "for the first of the intervals"
    auto = [c for c in found.choices if c.keywords.get("inv_update_steps") == "auto"]
    assert len(auto) == 22
    for each in auto:
        due = sum(s for k, s in each.stages.items() if k.startswith(("statistics", "solve")))
        assert due <= 0.15 * found.base * 1.1
    of_factors: dict[str, Any] = {"systems": ["KAISA", "DPKFAC", "DistKFAC"]}
    few, often = (planned(intervals=[p], **of_factors).choices for p in ((1, 1), (10, 100)))
    assert min(c.seconds for c in few) > min(c.seconds for c in often)


def test_a_plan_is_json() -> None:
    found = json.loads(planned().to_json())
    best = found["recommended"]
    of_factors = [c for c in found["choices"] if "solver" in c["keywords"]]
    assert best == {**best, "system": of_factors[0]["system"]}
    assert sum(row["ranks_alike"] for row in best["ranks"]) == 8
    for row in best["ranks"]:
        assert {"seconds", "operations", "bytes_handed_over", "bytes_moved", "memory"} <= set(row)
    assert Machine.of_json(found["machine"]) == MACHINE
    assert Interconnect.of_json(found["network"]) == NODES
    assert len(found["choices"]) == 25


def test_the_model_is_left_as_it_was() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    second_order.plan(model, X, 2, machine=MACHINE)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_buffers_that_are_replaced_or_expanded_are_there_afterwards() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("last", torch.zeros(4))
            self.register_buffer("mask", torch.ones(4).expand(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x * self.mask[0] + self.last)
            self.last = y.detach().mean(0)
            return y

    model = Recurrent()
    last = model.last
    observe(model, (torch.ones(2, 4),), kaisa())
    assert model.last is last
    assert not last.any()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"factor_exchange": "reduce"}, "MEM-OPT, HYBRID and COMM-OPT"),
        ({"grad_worker_fraction": 0.5}, "MEM-OPT, HYBRID and COMM-OPT"),
        ({"refresh": "trace"}, "not in the model of costs"),
        ({"exchange_dtype": torch.bfloat16}, "not in the model of costs"),
        ({"stats_workers": 1}, "not in the model of costs"),
        ({"hvp": "differences"}, "not in the model of costs"),
    ],
)
def test_what_a_plan_does_not_know_is_refused_by_name(option: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}.*{said}"):
        planned(options=option)


def test_several_numbers_of_ranks_are_planned_as_each_alone() -> None:
    both = planned([8, 2])
    assert [each.world_size for each in (both, *both.others)] == [8, 2]
    assert both.choices == planned(8).choices
    assert both.others == (planned(2),)


def test_passes_are_measured_here_and_counted_elsewhere() -> None:
    model, x = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 32)
    seen = observe(model, x, kaisa())
    assert seen.seconds is not None
    assert seen.passes(MACHINE) == seen.seconds > 0
    assert set(seen.captured) == {"0", "2"}
    assert all(seconds > 0 for seconds in seen.captured.values())
    forward = 2 * 8 * (32 * 16 + 16 * 4)
    assert seen.operations == forward + forward + 2 * 8 * 16 * 4, "no gradient of the input"
    assert seen.activations >= 4 * 8 * 16
    counted = observe(model.to("meta"), x.to("meta"), kaisa())
    assert counted.seconds is None
    assert (counted.operations, counted.activations) == (seen.operations, seen.activations)
    passes = seen.operations / 1e12 + 4 * seen.activations / 1e11
    assert counted.passes(MACHINE) == pytest.approx(passes)
    assert second_order.plan(model, x.to("meta"), 4096, machine=MACHINE).recommended is not None


def test_this_machine_is_measured() -> None:
    machine, links = calibrate(seconds=0.2)
    assert links == second_order.planning.calibration.DEFAULT_NETWORKS["cpu"]
    assert machine.device == "cpu"
    assert machine.product(64, 64, 64) < machine.product(256, 256, 256)
    assert machine.eigh.at(64) > machine.inverse.at(64)
    overheads = {"statistics", "precondition", "inverse", "eigen", "base", "exchange"}
    assert set(machine.overheads) == overheads
    assert 1e-6 < machine.overhead("statistics").layer < 0.1
    with pytest.raises(ValueError, match="seconds=61 is outside 0 to 60"):
        calibrate(seconds=61)


def test_numbers_of_gradient_workers() -> None:
    assert workers_of(1) == [1]
    assert workers_of(12) == [12, 6, 4, 3, 2, 1]
    many = workers_of(4096)
    assert (len(many), many[0], many[-1]) == (8, 4096, 1)
    assert all(4096 % n == 0 for n in many)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("512 MiB", 2**29), (7, 7), ("1.5kb", 1500), ("3e2", 300)],
)
def test_bytes_in_words(text: Any, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"memory": "much"}, ValueError, "'much' is not a number of bytes"),
        ({"memory": 0}, ValueError, "write 80GB"),
        ({"world_size": 0}, ValueError, "world_size"),
        ({"world_size": [2, 0]}, ValueError, "world_size"),
        ({"world_size": []}, ValueError, "one number of ranks at least"),
        ({"systems": ["SGD"]}, ValueError, "systems"),
        ({"systems": "KAISA"}, ValueError, "give a list"),
        ({"solvers": []}, ValueError, "inverse, eigen"),
        ({"intervals": []}, ValueError, "one pair at least"),
        ({"intervals": [10]}, ValueError, "is not a pair"),
        ({"intervals": [(0, 1)]}, ValueError, "factor_update_steps"),
        ({"options": {"solver": "eigen"}}, ValueError, "use solvers="),
        ({"options": {"symmetry": True}}, TypeError, "symmetry"),
        ({"seconds": 61}, ValueError, "seconds"),
        ({"sample_batch": 3}, TypeError, "the model's arguments"),
        ({"sample_batch": (3,)}, ValueError, "no tensor with a batch dimension"),
        ({"sample_batch": torch.ones(2, 3)}, ValueError, "does not take sample_batch"),
        ({"sample_batch": (X, torch.ones(6))}, ValueError, "without targets"),
        ({"machine": None, "device": "cuda"}, ValueError, "move the model and the batch there"),
        ({"machine": None, "device": "meta"}, ValueError, "Machine.given"),
        ({"model": "net"}, TypeError, "give a torch.nn.Module"),
        ({"model": nn.ReLU()}, ValueError, "no parameter of the model trains"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    given: dict[str, Any], kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "measure_machine", None)
    wanted = {"model": net(), "sample_batch": X, "world_size": 2, "machine": MACHINE, **given}
    with pytest.raises(kind, match=said):
        second_order.plan(**wanted)


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
    return path


def test_the_command_prints_tables_and_writes_json(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(script), "--machine", "machine.json", "--world-sizes", "1", "8"]
    words += [
        "--nodes-of",
        "4",
        "--between",
        "1e-3",
        "1e6",
        "--memory",
        "1GB",
        "--json",
        "out.json",
    ]
    words += ["--intervals", "auto", "5/10", "--systems", "KAISA", "DPKFAC"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("recommended: ") == 2
    assert "8 ranks of given; network not measured" in said
    one, eight = json.loads((tmp_path / "out.json").read_text())
    assert (one["world_size"], eight["world_size"], eight["memory"]) == (1, 8, 10**9)
    levels = eight["network"]["levels"]
    assert [level["ranks"] for level in levels] == [4, None]
    assert levels[1]["bandwidth"] == 1e6
    every = {c["keywords"]["inv_update_steps"] for c in eight["choices"]}
    assert every == {"auto", 10}
    assert main(["plan", "planned_script:model_and_batch", *words[2:4], "--memory", "9B"]) == 1
    assert "fits into 9 B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py is not a file"),
        (["no.module:f"], "give train.py or module:function"),
        (["planned_script.py:other"], "has no function 'other'"),
        (["planned_script.py:wrong"], r"wrong\(\) of planned_script.py returns a int"),
        (["planned_script.py", "--inside", "1", "1"], "--inside needs --nodes-of"),
        (["planned_script.py", "--machine", "planned_script.py"], "is not JSON"),
        (["planned_script.py", "--machine", "none.json"], "none.json"),
        (["planned_script.py", "--network", "machine.json"], "without levels"),
        (["planned_script.py", "--network", "machine.json", "--nodes-of", "2"], "leave out"),
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
        (["--world-sizes", "0"], "'0' is not a whole number, 1 or more"),
        (["--memory", "lots"], "'lots' is not a number of bytes"),
        (["--between", "0", "1"], "'0' is not a number above 0"),
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


def test_a_slower_machine_takes_longer() -> None:
    slower = replace(MACHINE, products=replace(MACHINE.products, points=((1.0, 1.0),)))
    assert planned(machine=slower).base > planned().base
