"""second_order.plan: every setting, the recommendation, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import second_order
from second_order import Interconnect, Machine
from second_order.planning import plan as planning
from second_order.planning.cost import Costs, Setting
from second_order.planning.plan import Choice, _recommended

if TYPE_CHECKING:
    from pool import World

MACHINE = Machine("given", {64: 1e-6, 1024: 1e-3}, {64: 1e-3}, {64: 1e-4}, memory=1e9, device="cpu")
LINKS = Interconnect(1e-5, 1e9)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 5)
    )


X = torch.randn(6, 2, 6, 6)


class Storing(nn.Module):
    """Stores an output, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.last = self.layer(torch.ones(2, 3))


@dataclass
class Wrapped:
    logits: torch.Tensor


class Wrapping(nn.Module):
    """Returns an object that torch does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Wrapped:
        return Wrapped(self.layer(x))


def planned(world_size: int = 8, **arguments: Any) -> second_order.Plan:
    return second_order.plan(net(), X, world_size, machine=MACHINE, network=LINKS, **arguments)


def test_every_setting_is_there_and_the_fastest_comes_first() -> None:
    found = planned()
    names = [choice.setting.name for choice in found.choices]
    assert len(names) == len(set(names)) == 2 * (2 * 4 + 1 + 1)
    assert {"KAISA MEM-OPT, eigen", "KAISA COMM-OPT, reduce, inverse", "DPKFAC, eigen"} <= {*names}
    assert "KAISA HYBRID 2/8, inverse" in names
    seconds = [choice.seconds for choice in found.choices]
    assert seconds == sorted(seconds)
    assert found.recommended is not None
    assert found.recommended.seconds <= 1.03 * seconds[0]
    assert found.reason.startswith(f"recommended: {found.recommended.setting.name}: ")
    assert all(choice.seconds > 0 for choice in found.choices)
    assert str(found).count("recommended") == 2, "in its row, and below the table"
    assert "8 ranks, given; network given; the base optimizer alone takes" in str(found)
    assert "and 8 slower settings" in str(found)
    assert [c.setting.mode for c in planned(1, systems=["KAISA"]).choices] == ["", ""]


def test_a_choice_has_the_keywords_of_its_optimizer() -> None:
    found = planned(systems=["DPKFAC"], inv_update_steps=40)
    assert [choice.keywords["solver"] for choice in found.choices] == [
        choice.setting.solver for choice in found.choices
    ]
    for choice in found.choices:
        assert choice.keywords["inv_update_steps"] == 40
        assert choice.keywords.keys() == {"solver", "factor_update_steps", "inv_update_steps"}


def test_memory_is_honored() -> None:
    sizes = sorted(choice.memory for choice in planned().choices)
    bound = sizes[len(sizes) // 2]
    found = planned(memory=bound)
    assert [c.fits for c in found.choices] == [c.memory <= bound for c in found.choices]
    assert found.recommended is not None
    assert found.recommended.fits
    assert "does not fit" in found.summary(rows=None)
    nothing = planned(memory=1e3)
    assert nothing.recommended is None
    assert "no setting fits into 1 KB" in nothing.reason
    assert planned().memory == 1e9, "the machine's by default"


def choice(system: str, seconds: float, memory: int, *, fits: bool = True) -> Choice:
    setting = Setting(system, "inverse", 1, 1, 1, 1)
    return Choice(setting, Costs({}, 0.0, 0, 0), seconds, memory, 0.0, fits=fits)


def test_of_similar_settings_the_smallest_is_recommended() -> None:
    fast = choice("KAISA", 1.0, 90)
    lean = choice("DPKFAC", 1.02, 50)
    slow = choice("KAISA", 1.5, 1)
    assert _recommended([fast, lean, slow], None)[0] is lean
    assert _recommended([choice("KAISA", 1.0, 90, fits=False), slow], 60)[0] is slow


def test_the_model_is_left_as_it_was() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    second_order.plan(model, X, 2, machine=MACHINE)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_rows_and_activations_are_those_of_the_batch() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    found = planning.run_model(model, X, torch.device("cpu"), (), is_timed=False)
    assert [layer.rows for layer in found.layers] == [6 * 16, 6]
    assert found.activation_bytes == pytest.approx(4 * (X.numel() + 6 * 64 + 6 * 5), rel=0.1)
    assert found.flops == 2 * 6 * (2 * 16 * 4 * 18 + 3 * 64 * 5), "no gradient of the input"
    assert found.parameter_bytes == found.trained_bytes == sum(p.nbytes for p in model.parameters())


class Attending(nn.Module):
    """An attention, whose out_proj it does not call, and a layer with more rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.wide = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        return self.attention(x, x, x, need_weights=False)[0], self.wide(z)


class Tied(nn.Module):
    """An embedding of ten words, and the output layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (Attending(), (torch.randn(3, 7, 8), torch.randn(100, 8)), [21, 21, 100]),
        (Tied(), torch.zeros(3, 7, dtype=torch.int64), [21 + 21]),
    ],
    ids=["attention", "tied"],
)
def test_rows_of_attentions_and_tied_layers(
    model: nn.Module, batch: Any, expected: list[int]
) -> None:
    found = planning.run_model(model, batch, torch.device("cpu"), (), is_timed=False)
    assert [layer.rows for layer in found.layers] == expected


def test_a_plan_needs_no_grad_mode() -> None:
    with torch.no_grad():
        assert planned().recommended is not None


def alone(rank: int, size: int) -> str:
    """Only one rank of a group makes a plan."""
    if rank == 1:
        return ""
    return second_order.plan(net(), X, 8, systems=["DPKFAC"]).network.origin


def test_one_rank_of_a_group_can_make_a_plan(world: World) -> None:
    assert world.run(alone, 2) == ["assumed", ""]


def test_a_model_on_the_meta_device() -> None:
    arguments = {"machine": MACHINE, "network": LINKS}
    here = second_order.plan(net(), X, 8, **arguments)
    meta = second_order.plan(net().to("meta"), X.to("meta"), 8, **arguments)
    assert [c.seconds for c in meta.choices] == [c.seconds for c in here.choices]
    assert [c.memory for c in meta.choices] == [c.memory for c in here.choices]


def test_the_machine_at_hand_is_measured() -> None:
    found = second_order.plan(net(), {"input": X}, 4, systems=["DPKFAC"], skip_layers=["0"])
    assert found.network.origin == "assumed"
    assert found.machine.device == "cpu"
    assert found.memory is None
    assert all(choice.seconds > 0 for choice in found.choices)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size"),
        ({"systems": ["DHO2"]}, ValueError, "some of KAISA, DPKFAC, DistKFAC"),
        ({"systems": "KAISA"}, ValueError, "pass a list"),
        ({"inv_update_steps": 0}, ValueError, "inv_update_steps"),
        ({"memory": "80GB"}, TypeError, "memory='80GB' is not a number; bytes"),
        ({"memory": -5}, ValueError, "memory=-5 is outside"),
        ({"base_state": -1.0}, ValueError, "base_state=-1.0 is outside"),
        ({"sample_batch": 3}, TypeError, "the model's arguments"),
        ({"sample_batch": torch.ones(2, 3)}, ValueError, "does not take sample_batch"),
        ({"sample_batch": (X, torch.ones(6))}, ValueError, "without targets"),
        ({"model": "net"}, TypeError, "pass a torch.nn.Module"),
        ({"model": Storing(), "sample_batch": torch.ones(2, 3)}, ValueError, "cannot be copied"),
        ({"model": Wrapping(), "sample_batch": torch.ones(2, 3)}, ValueError, "a Wrapped, depends"),
        ({"model": nn.ReLU()}, ValueError, "no parameter of the model requires a gradient"),
        ({"model": net().to("meta"), "machine": None}, ValueError, "pass machine="),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: dict[str, Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "measure_ranks", None)
    all_arguments = {
        "model": net(),
        "sample_batch": X,
        "world_size": 2,
        "machine": MACHINE,
        **arguments,
    }
    with pytest.raises(kind, match=message):
        second_order.plan(**all_arguments)
