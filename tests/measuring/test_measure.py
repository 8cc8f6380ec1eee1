"""`measure`: sums over a data set, against sums by hand over entries without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from measured import (
    CUTS,
    ENTRIES,
    F64,
    MODELS,
    ByHand,
    batches_of,
    close,
    data_of,
    model_of,
    terms,
)
from torch import Tensor, nn

from second_order import KroneckerCurvature, LayerCurvature, SecondOrderError, measure

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def measured(name: str, factors: Any, dtype: torch.dtype = F64, **options: Any) -> Any:
    model, data = model_of(name, dtype), data_of(name, dtype)
    if factors != "inputs":
        options.setdefault("loss", terms)
    loader = batches_of(data, options.pop("cuts", CUTS))
    return model, measure(model, loader, factors=factors, progress=False, **options)


def same(one: KroneckerCurvature, other: KroneckerCurvature, within: float = 1e-10) -> None:
    assert list(one) == list(other)
    for name in one:
        for letter, factor in other[name].factors.items():
            close(one[name].factors[letter], factor, within)
        if other[name].corrected is not None:
            close(one[name].corrected, other[name].corrected, within)


def corrected(found: LayerCurvature, group: int, gradients: list[Tensor]) -> Tensor:
    """Sums over entries of their squared gradients in the eigenbasis of the factors."""
    a, g = found.eigen["A"][1], found.eigen["G"][1]
    assert a is not None
    assert g is not None
    return torch.stack([(g[group].T @ each @ a[group]).square() for each in gradients]).sum(0)


# ------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_those_of_entries_without_padding(name: str) -> None:
    for dtype, within in ((F64, 1e-12), (torch.float32, 1e-5)):
        model, curvature = measured(name, "inputs", dtype)
        by_hand = ByHand(model, data_of(name, dtype), gradients=False)
        tied = {"GPT-2": {"lm_head"}, "Whisper": {"proj_out"}}.get(name, set())
        experts = {layer for layer in by_hand.x if " " in layer}
        assert bool(experts) == (name == "Mixtral")
        for layer in experts:
            block, expert = layer.split()
            close(curvature[block].A[int(expert)], by_hand.a(layer), within)
        assert set(by_hand.x) - set(curvature) - experts == tied
        for layer in set(by_hand.x) - tied - experts:
            close(curvature[layer].A[0], by_hand.a(layer), within)
            assert curvature[layer].rows == by_hand.rows[layer]


@pytest.mark.parametrize("name", MODELS)
def test_pairs_and_corrected_eigenvalues_are_those_of_entries(name: str) -> None:
    model, curvature = measured(name, "ekfac")
    by_hand = ByHand(model, data_of(name), gradients=True)
    for layer in set(by_hand.x) & set(curvature):
        found = curvature[layer]
        size = by_hand.x[layer].shape[0]
        close(found.A[0, :size, :size], by_hand.a(layer))
        close(found.G[0], by_hand.g(layer))
        close(found.corrected[0], corrected(found, 0, by_hand.weights[layer]) / by_hand.terms, 1e-7)
        assert found.examples == by_hand.terms
    for layer in (each for each in by_hand.x if " " in each):
        block, expert = layer.split()
        found, i = curvature[block], int(expert)
        close(found.A[i], by_hand.a(layer))
        close(found.G[i], by_hand.g(layer))
        values = corrected(found, i, by_hand.weights[layer]) / by_hand.terms
        close(found.corrected[i], values, 1e-7)


def test_labels_are_drawn_from_the_model() -> None:
    model = nn.Linear(3, 4, bias=False).to(F64)
    x = torch.randn(4000, 3, dtype=F64)
    curvature = measure(model, x.split(64), factors="kfac", progress=False)
    p = model(x).softmax(-1)
    close(curvature["(model)"].G[0], torch.diag(p.mean(0)) - p.T @ p / len(x), 0.1)
    again = measure(model, x.split(64), factors="kfac", seed=1, progress=False)
    assert not torch.equal(again["(model)"].G, curvature["(model)"].G)


@pytest.mark.parametrize("factors", ["inputs", "kfac", "ekfac"])
def test_it_does_not_matter_how_data_are_cut(factors: str) -> None:
    whole = measured("Llama", factors)[1]
    for cuts in (((0, ENTRIES),), ((0, 1), (1, 9), (9, 10))):
        same(measured("Llama", factors, cuts=cuts)[1], whole)


@pytest.mark.parametrize("factors", ["inputs", "kfac", "ekfac"])
def test_a_budget_and_the_hosts_memory_change_nothing(factors: str) -> None:
    whole = measured("Llama", factors)[1]
    parts = measured("Llama", factors, memory=8 * 3 * 23 * 23)[1]
    assert parts.report.passes > whole.report.passes
    same(parts, whole)
    same(measured("Llama", factors, keep="cpu")[1], whole)


def test_layers_that_read_one_tensor_share_a_factor_until_they_do_not() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.turns = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turns += 1
            return self.a(x) + self.b(x if self.turns % 3 else 2 * x)

    x = torch.randn(6, 3, dtype=F64)
    model = Turning().to(F64)
    curvature = measure(model, x.split(2), progress=False)
    assert curvature["a"].stored["A"] is not curvature["b"].stored["A"]
    close(curvature["a"].A[0], x.T @ x / 6)
    model, llama = measured("Llama", "inputs")
    attention = [f"model.layers.0.self_attn.{k}_proj" for k in "qkv"]
    assert len({id(llama[name].stored["A"]) for name in attention}) == 1


# -------------------------------------------------------------------- what is left as it was


@pytest.mark.parametrize("factors", ["inputs", "ekfac"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(factors: str, fails: bool) -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 2)
    )
    model[1].eval()
    model[4].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones(4, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    batches: list[Any] = [torch.randn(5, 3), torch.randn(2, 7 if fails else 3)]
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError, match="shapes"):
            measure(model, batches, factors=factors, progress=False)
    else:
        measure(model, batches, factors=factors, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert [p.grad is not None for p in model.parameters()] == [True] + [False] * 5
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert [p.requires_grad for p in model.parameters()] == [True] * 4 + [False, True]
    for module in model.modules():
        assert not [*module._forward_hooks, *module._forward_pre_hooks]


# --------------------------------------------------------------------------- saves and budgets


@pytest.mark.parametrize("factors", ["inputs", "ekfac"])
@pytest.mark.parametrize("stop", range(1, 6))
def test_a_killed_run_goes_on_to_the_same_numbers(factors: str, stop: int, tmp_path: Path) -> None:
    whole = measured("Llama", factors)[1]
    model, loader = model_of("Llama"), batches_of(data_of("Llama"))
    given = [0]

    class Killed(BaseException):
        pass

    def call(model: nn.Module, batch: Any) -> Any:
        given[0] += 1
        if given[0] > stop:
            raise Killed
        return model(**batch)

    options: dict[str, Any] = {"factors": factors, "checkpoint": tmp_path, "checkpoint_every": 1}
    options |= {"progress": False, "loss": None if factors == "inputs" else terms}
    try:
        measure(model, loader, call=call, **options)
    except Killed:
        given[0] = -100
        same(measure(model, loader, call=call, **options), whole, 1e-14)
        passes = 1 if factors == "inputs" else 2
        assert given[0] == -100 + 3 * passes - stop
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused() -> None:
    model, x = nn.Linear(2, 2), [torch.randn(3, 2)]
    for options, text in (
        ({"factors": "A"}, "not one of"),
        ({"keep": "disk"}, "not one of"),
        ({"loss": terms}, "takes no loss"),
        ({"layers": ["Conv*"]}, "no module"),
        ({"memory": 3}, "less than one layer"),
        ({"likelihood": "poisson"}, "not one of"),
        ({"checkpoint_every": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            measure(model, x, progress=False, **options)
    with pytest.raises(ValueError, match="once only"):
        measure(model, iter(x), factors="ekfac", progress=False)
    with pytest.raises(SecondOrderError, match="no example"):
        measure(model, [], progress=False)
    with pytest.raises(TypeError, match="of which nobody knows the number"):
        measure(model, x, factors="kfac", loss=lambda out, batch: out.sum(), progress=False)
    with pytest.raises(ValueError, match="no layer"):
        measure(nn.BatchNorm1d(2), x, progress=False)


def test_a_factor_that_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].register_forward_pre_hook(lambda m, args: (args[0] / 0,))
    with pytest.warns(UserWarning, match="'1': its A is not finite"):
        curvature = measure(model, [torch.randn(3, 2)], progress=False)
    assert list(curvature) == ["0"]
    assert curvature.uncovered["1.weight"] == "its A is not finite"
    assert "its A is not finite" in str(curvature.report)
