"""`summary()`: every parameter is in it once, with who has it, why, and what it costs."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from models import ZOO
from optimizer_cases import each_kronecker, make, take
from torch import Tensor, nn

from second_order import DPKFAC, KAISA, LayerRow, SecondOrderWarning, register_layer

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def by_name(optimizer: Any) -> dict[str, LayerRow]:
    return {row.name: row for row in optimizer.summary().rows}


@each_kronecker
def test_a_row_for_every_layer_with_its_kind_parameters_and_sizes(System: Any) -> None:
    model = ZOO["conv_grouped"].model()
    rows = by_name(make(System, model))
    assert list(rows) == ["0", "2", "5"]
    assert [row.kind for row in rows.values()] == ["Conv2d", "Conv2d", "Linear"]
    assert [row.status for row in rows.values()] == ["preconditioned"] * 3
    assert rows["2"].detail == "2 x A 19², G 3²"  # two groups of 2 channels x 9 + 1, to 3
    assert rows["5"].detail == f"A {model[5].in_features + 1}², G 3²"
    for name, row in rows.items():
        assert row.parameters == sum(p.numel() for p in model.get_submodule(name).parameters())
        expected = "owner 0" if System is DPKFAC else "solve 0, precondition 0"
        assert row.computed_by == expected


@each_kronecker
def test_rows_of_the_base_give_the_reason(System: Any) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3, 3))

    model = nn.Sequential(
        nn.Linear(3, 3), nn.LayerNorm(3), Own(), nn.Linear(3, 3),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    )  # fmt: skip
    rows = by_name(make(System, model, skip_layers=["3"]))
    reasons = {name: row.detail for name, row in rows.items() if row.status == "base"}
    assert "LayerNorm" in reasons["1"]
    assert reasons["2"] == "Own has no Kronecker factors"
    assert reasons["3"] == "skip_layers: '3'"
    assert all(name == "0" or name in reasons or name.startswith("4") for name in rows)
    assert "0" not in reasons
    assert not any(row.factor_bytes or row.computed_by for n, row in rows.items() if n != "0")


class Scale(nn.Module):
    """A gain that a user registers."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class TiedLayers(nn.Module):
    """An output layer with the weight of the embedding, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 8)
        self.output = nn.Linear(8, 5)
        self.output.weight = self.tokens.weight


NORMS = [
    nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.BatchNorm2d(8),
    nn.SyncBatchNorm(8), nn.InstanceNorm2d(8, affine=True), Scale(),
]  # fmt: skip


@each_kronecker
def test_a_reason_names_the_option_that_would_include_the_parameters(System: Any) -> None:
    """Exactly those rows name it that have an exact block if it is set."""
    register_layer(Scale, gain=lambda module, x: x, weight="gamma", bias=None)

    def rows(precondition_norms: bool) -> dict[str, LayerRow]:
        layers = [nn.Linear(8, 8), nn.LSTM(8, 8), nn.PReLU(), TiedLayers(), *copy.deepcopy(NORMS)]
        model = nn.Sequential(*layers, copy.deepcopy(NORMS[0]).requires_grad_(False))
        options = {"precondition_norms": precondition_norms, "skip_layers": ["4"]}
        return by_name(make(System, model.parameters(), model=model, **options))

    named = {name for name, row in rows(False).items() if "precondition_norms=True" in row.detail}
    exact = {name for name, row in rows(True).items() if "exact" in row.detail}
    assert {name.removesuffix(".gamma") for name in named} == exact
    assert (
        len(exact) == 7
    )  # four norms, the scale, the frozen norm and the bias; not the skipped norm
    assert not any("precondition_norms" in row.detail for row in rows(True).values())


@each_kronecker
def test_memory_is_unknown_before_the_first_step_and_then_a_number(System: Any) -> None:
    model = ZOO["mlp"].model()
    optimizer = make(System, model)
    assert "of this process: not known before the first step\n" in str(optimizer.summary())
    take(model, optimizer, ZOO["mlp"].batches(1)[0])
    summary = optimizer.summary()
    assert f"factors {summary.factor_bytes / 2**20:.2f} MiB" in str(summary)
    assert summary.factor_bytes > 0


class Experts(nn.Module):
    """Experts in two parameters, as Mixtral's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 5, 16))
        self.down = nn.Parameter(torch.randn(4, 16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nd,edh,eho->no", x, self.up, self.down)


class Vision(nn.Module):
    """A token of the model itself, and norms in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embedding, self.token = (nn.Parameter(torch.zeros(n, 8)) for n in (3, 1))
        layers = nn.LayerNorm, lambda n: nn.Linear(n, n), nn.LayerNorm
        self.blocks = nn.ModuleList(nn.Sequential(*(each(8) for each in layers)) for _ in "12")


def message_and_summary(System: Any, argument: Any, /, **options: Any) -> tuple[str, Any]:
    """The warning at construction, and the optimizer."""
    with pytest.warns(SecondOrderWarning, match="without curvature") as caught:
        optimizer = make(System, argument, **options)
    (message,) = (str(each.message) for each in caught if "without curv" in str(each.message))
    return message, optimizer


def share_in(message: str) -> float:
    """The share that a warning begins with."""
    found = re.match(r"(\d+\.\d)% of the parameters preconditioned; ", message)
    assert found, message
    return float(found[1]) / 100


def test_the_share_is_100_percent_only_if_nothing_is_left_out() -> None:
    message, optimizer = message_and_summary(KAISA, nn.Sequential(nn.Linear(200, 200), nn.PReLU()))
    assert message.startswith("99.9% of the parameters preconditioned; ")
    assert "\n99.9% of the parameters preconditioned; " in str(optimizer.summary())
    optimizer = make(KAISA, nn.Linear(200, 200))
    assert "\n100.0% of the parameters preconditioned; " in str(optimizer.summary())


@each_kronecker
def test_modules_that_the_user_left_out_are_not_named(System: Any) -> None:
    """By skip_layers, or by their parameter group. The summary has them."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.PReLU())
    message, _ = message_and_summary(System, model, skip_layers=["1"])
    names = "2 (PReLU), and the modules that you left out"
    assert f"trained by SGD alone, without curvature: {names}; summary()" in message

    groups = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "precondition": False},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        optimizers = [make(System, model[:2], skip_layers=["1"]), make(System, groups, model=model)]
    assert all(by_name(optimizer)["1"].status == "base" for optimizer in optimizers)


def share_of(model: nn.Module, *names: str) -> float:
    """The share of the parameters whose names have one of these beginnings."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    return sum(n for name, n in sizes.items() if name.startswith(names)) / sum(sizes.values())


@each_kronecker
def test_only_trainable_parameters_are_counted(System: Any) -> None:
    """The groups may also have frozen parameters."""
    model = Vision().double().requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    model.token.requires_grad_(True)
    message, optimizer = message_and_summary(System, model.parameters(), model=model)
    own_share = share_of(model, "blocks.1.1")
    assert share_in(message) == pytest.approx(own_share, abs=1e-3)
    assert ": token, 2 norm layers; " in message
    assert optimizer.summary().preconditioned_share == pytest.approx(own_share)
    rows = by_name(optimizer)
    assert {rows[name].status for name in ("pos_embedding", "blocks.0.0", "blocks.0.1")} == {
        "frozen"
    }


def mixture() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), Experts(), nn.LayerNorm(5), nn.Linear(5, 3))


def norms_alone() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    model[0].requires_grad_(False), model[2].requires_grad_(False)
    return model


@each_kronecker
@pytest.mark.parametrize("model", [mixture, norms_alone])
def test_low_coverage_is_reported_with_remedies(System: Any, model: Any) -> None:
    message, optimizer = message_and_summary(System, model().double())
    share = share_in(message)
    assert share < 0.5
    assert optimizer.summary().preconditioned_share == pytest.approx(share, abs=1e-3)
    assert "unsupported_layers='gradient_factors'" in message
