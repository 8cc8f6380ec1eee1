"""Plans for thousands of ranks end in seconds, and say what each rank alone would have said."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from stored import rows
from test_planning_counts import MODELS
from torch import nn

import papers
import second_order
from second_order import Interconnect, Machine
from second_order.__main__ import main
from second_order.distributed import shares
from second_order.planning.counts import Case
from second_order.planning.memory import largest_batch
from second_order.planning.observation import Observation
from second_order.planning.plan import peak_memory
from second_order.planning.systems import PLANNED, workers_of
from second_order.planning.times import StepTimes, rank_costs, step_times

if TYPE_CHECKING:
    from pathlib import Path

    from second_order.planning.choices import Choice

DEVICE = Machine.given(
    1e13, eigh={256: 8e-3, 1024: 6e-2}, inverse={256: 4e-4, 1024: 2e-3}, bandwidth=2e12
)
PROCESSOR = replace(DEVICE, device="cpu", bandwidth=2e10)
SEEN = Observation(examples=2, activations=1000, operations=1e6)
LAYERS, RANKS = 300, 4096
SECONDS = 20.0  # below 10 where nothing else runs: a busy machine takes more of the processor, too

PAGE = "docs/planning.md"
PAGES_MACHINE = Machine.given(
    flops={256: 4e12, 1024: 2e13, 4096: 4e13},
    eigh={256: 8e-3, 1024: 6e-2, 4096: 1.1},
    inverse={256: 4e-4, 1024: 2e-3, 4096: 2.5e-2},
    bandwidth=2e12,
)
PAGES_NETWORK = Interconnect.of_nodes(8, inside=(1e-5, 1e11), between=(2e-5, 2.5e10))


def deep(widths: list[int]) -> tuple[nn.Module, torch.Tensor]:
    pairs = list(pairwise(widths))
    with torch.device("meta"):
        layers = [m for pair in pairs for m in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers), torch.empty(32, widths[0])


def of_one_shape() -> tuple[nn.Module, torch.Tensor]:
    return deep([256] * (LAYERS + 1))


def of_many_shapes() -> tuple[nn.Module, torch.Tensor]:
    generator = random.Random(0)
    return deep([generator.randint(200, 900) for _ in range(LAYERS + 1)])


@pytest.mark.no_cover  # which would count half as much again to the seconds
@pytest.mark.parametrize("machine", [DEVICE, PROCESSOR], ids=["device", "processor"])
def test_hundreds_of_layers_on_thousands_of_ranks_in_seconds(machine: Machine) -> None:
    """Where no two layers are of one size, too; and ranks agree in little of a step."""
    model, x = of_many_shapes() if machine is DEVICE else of_one_shape()
    begun = time.process_time()
    found = second_order.plan(model, x, RANKS, machine=machine)
    assert time.process_time() - begun < SECONDS
    assert len(found.choices) > 36
    for choice in found.choices:
        assert choice.stages["compare"] < 0.02 * choice.seconds, choice.name


def of_owners(model: nn.Module, x: torch.Tensor, network: Interconnect) -> Choice:
    """The default setting of DPKFAC as the page has it."""
    only: dict[str, Any] = {"systems": ["DPKFAC"], "solvers": ["inverse"]}
    found = second_order.plan(model, x, RANKS, machine=PAGES_MACHINE, network=network, **only)
    return next(c for c in found.choices if "gradient_exchange" not in c.keywords)


def test_the_page_has_what_all_reduces_save() -> None:
    with torch.device("meta"):
        model, x = papers.resnet(50), torch.empty(32, 3, 224, 224)
    page = rows(PAGE, "", "gradients to owners")
    for row, worth in (("a message for each rank", 0), ("all-reduces", shares.MESSAGE_BYTES)):
        with patch.object(shares, "MESSAGE_BYTES", worth):
            choice = of_owners(model, x, PAGES_NETWORK)
        names = "average_gradients", "precondition_exchange"
        counted = [*(choice.stages[name] for name in names), choice.seconds]
        assert page[row] == [f"{1e3 * seconds:.1f}" for seconds in counted]


def test_the_page_has_what_agreement_takes() -> None:
    page = rows(PAGE, "width, network", "agreement")
    flat = Interconnect.flat(1e-4, 1e9)
    for width, network, name in (
        (256, PAGES_NETWORK, "the network above"),
        (8, flat, "100 µs and 1 GB/s"),
    ):
        choice = of_owners(*deep([width] * (LAYERS + 1)), network)
        agreed, step = choice.stages["compare"], choice.seconds
        said = [f"{1e3 * agreed:.1f}", f"{1e3 * step:.0f}", f"{100 * agreed / step:.1f} %"]
        assert page.pop(f"{width}, {name}") == said
    assert not page
    assert flat.all_reduce(16, range(RANKS)) == pytest.approx(2 * 12 * 1e-4, rel=1e-3)


SCRIPT = """
import torch
from torch import nn

def model_and_batch():
    with torch.device("meta"):
        layers = [m for _ in range(300) for m in (nn.Linear(64, 64), nn.Tanh())]
        return nn.Sequential(*layers), torch.empty(32, 64)
"""


def test_the_command_plans_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.py").write_text(SCRIPT, "utf-8")
    (tmp_path / "machine.json").write_text(json.dumps(DEVICE.as_json()), "utf-8")
    begun = time.process_time()
    assert main(["plan", "deep.py", "--world-sizes", "4096", "--machine", "machine.json"]) == 0
    assert time.process_time() - begun < SECONDS
    assert "4096 ranks of given" in capsys.readouterr().out


class EachAlone(Case):
    """A case whose ranks are all counted by themselves."""

    @property
    def _alike(self) -> list[int]:  # type: ignore[override]
        return list(range(self.ranks))


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("KAISA", {"solver": "eigen", "colocate_factors": False}),
    ("KAISA", {"factor_exchange": "reduce", "other_matrices": "gradient"}),
    ("DPKFAC", {"other_matrices": "gradient"}),
    ("DPKFAC", {"gradient_exchange": "all_reduce"}),
    ("DistKFAC", {"preconditioner_scale": "gradient"}),
]


@pytest.mark.parametrize("small", [0, shares.SMALL_BYTES])
@pytest.mark.parametrize(("system", "chosen"), SETTINGS)
@pytest.mark.parametrize("model", list(MODELS))
def test_ranks_alike_cost_what_each_alone_would(
    model: str, system: str, chosen: dict[str, Any], small: int
) -> None:
    """Bit for bit, with statistics measured and without."""
    make, batch = MODELS[model]
    with torch.device("meta"):
        net, inputs = make(), batch()
    links = Interconnect.of_nodes(4, (1e-5, 1e10), (1e-4, 1e9))
    for ranks in (1, 2, 3, 8, 12, 64):
        workers = workers_of(ranks, 4) if system == "KAISA" else [0]
        for each in workers:
            words = {"grad_worker_fraction": each / ranks} if system == "KAISA" else {}
            planned = PLANNED[system](**chosen, **words)
            network = planned.network(net, inputs, momentum=0.9)
            measured = {layer.name: 1e-3 * i for i, layer in enumerate(network.layers)}
            with patch.object(shares, "SMALL_BYTES", small):
                for captured in ({}, measured):
                    seen: list[tuple[StepTimes, Any]] = []
                    for kind in (Case, EachAlone):
                        case = kind(network, planned, ranks, examples=2)
                        costs = rank_costs(case, PROCESSOR, links, passes=1.0, captured=captured)
                        assert sum(cost.ranks for cost in costs) == ranks
                        works = [cost.work for cost in costs]
                        peak = peak_memory(case, costs, SEEN), largest_batch(1e6, works, 10.0)
                        seen.append((step_times(costs), peak))
                    assert seen[0] == seen[1]
                    assert len(costs) == ranks
