"""Steps of odd layers: used several times or not at all, tied, frozen, or without factors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from contract import (
    assert_same_factors,
    curvature_of,
    each_kronecker,
    eigenpairs_only,
    factors,
    make,
    same,
    take,
)
from models import CLASSES, ZOO
from reference import captured, cross_entropy, layer_factors
from stepped import first_factors, messages, reference
from torch import Tensor, nn

from second_order import SecondOrderWarning

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)
LR, DAMPING = 0.05, 0.1  # those of `make`


# Layers used several times, or not at all; tied and frozen ones.


@each_kronecker
@pytest.mark.parametrize("name", ["shared_linear", "shared_conv"])
def test_a_layer_used_twice_has_the_lumped_statistics(System: Any, name: str) -> None:
    case = ZOO[name]
    assert_same_factors(first_factors(System, case), reference(case.model(), case.batch()))


class TiedLinears(nn.Module):
    """Two modules with one weight and one bias, or without a bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)
        self.a, self.b = nn.Linear(6, 6, bias=bias), nn.Linear(6, 6, bias=bias)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(self.first(x))))))


@each_kronecker
@pytest.mark.parametrize("bias", [True, False])
def test_tied_layers_are_one_block_with_the_lumped_statistics(System: Any, bias: bool) -> None:
    torch.manual_seed(0)
    model = TiedLinears(bias).double()
    uses = captured(model, BATCHES[0][0], lambda out: cross_entropy(out, BATCHES[0][1]), "a", "b")
    expected = layer_factors(model.a, [*uses["a"], *uses["b"]])
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    assert factors(optimizer).keys() == {"first", "a = b", "head"}
    assert_same_factors({"tied": factors(optimizer)["a = b"]}, {"tied": expected})
    names = [row.name for row in optimizer.summary().rows]
    assert len(names) == len(set(names)) == 3


@each_kronecker
def test_a_layer_that_is_never_used_takes_nothing_from_the_others(System: Any) -> None:
    case = ZOO["unused"]
    model = case.model()
    expected = reference(model, case.batch(), cross_entropy, "first", "head")
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    found = factors(optimizer)
    assert_same_factors({name: found[name] for name in expected}, expected)
    assert model.unused.weight.grad is None


@eigenpairs_only
def test_frozen_parameters_rest_and_thawed_ones_are_spanned_again(System: Any) -> None:
    """Each change drops the eigenpairs, and the base goes on alone until the next refresh."""
    model = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
    size = sum(p.numel() for p in model.parameters())
    middle = sum(p.numel() for p in model[2].parameters())
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, size)
    for frozen in (True, False):
        model[2].requires_grad_(not frozen)
        status = {row.name: row.status for row in optimizer.summary().rows}
        assert (status["2.weight"] == "frozen") == frozen
        weights = copy.deepcopy(model)
        with pytest.warns(SecondOrderWarning, match="the parameters that train have changed"):
            take(model, optimizer, BATCHES[2])
        assert not curvature_of(optimizer)
        take(model, optimizer, BATCHES[3])
        vectors = curvature_of(optimizer)["eigenpairs"][1]
        assert vectors.shape == (4, size - middle if frozen else size)
        assert same(model[2], weights[2]) == frozen
        assert not same(model[0], weights[0])
        saved = optimizer.state_dict()["state"]
        assert ("eigenvectors" in saved[2]["curvature"]) != frozen


NETWORKS = ("shared_linear", "tied", "lora", "norms", "transformer", "attention", "language_model")


@eigenpairs_only
@pytest.mark.parametrize("name", NETWORKS)
def test_any_network_learns_its_batch(System: Any, name: str) -> None:
    """Tied, shared and frozen weights, norms, attention, embeddings: all are one vector."""
    case = ZOO[name]
    model = case.model()
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    optimizer = make(System, model, base=torch.optim.Adam, lr=0.03)
    losses = [float(take(model, optimizer, case.batch(), case.loss)) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    assert optimizer.curvature.refreshes == 10
    assert optimizer.curvature.failures == 0
    assert same([p for p in model.parameters() if not p.requires_grad], frozen)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, trained)


@each_kronecker
def test_low_rank_adapters_beside_frozen_layers(System: Any) -> None:
    case = ZOO["lora"]
    model = case.model()
    names = ("0.down", "0.up", "2.down", "2.up")
    expected = reference(model, case.batch(), cross_entropy, *names)
    frozen = model[0].frozen.weight.detach().clone()
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    assert_same_factors(factors(optimizer), expected)
    assert torch.equal(model[0].frozen.weight, frozen)


# Attention, and modules that have no factors.


@each_kronecker
def test_a_layer_without_statistics_is_named_once_also_when_others_come_and_go(
    System: Any,
) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.never, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.head(torch.tanh(self.late(x)) if self.steps > 2 else x)

    model = Late().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(System, model)
        for batch in BATCHES:
            take(model, optimizer, batch)
    assert sum("'never'" in text for text in messages(caught)) == 1
    assert sum("'late'" in text for text in messages(caught)) == 1


@each_kronecker
def test_unsupported_modules_go_to_the_base_and_are_listed_once(System: Any) -> None:
    case = ZOO["transformer"]
    model = case.model()
    start = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(System, model)
        for batch in case.batches(3):
            take(model, optimizer, batch)
        optimizer.summary()
    texts = messages(caught)
    assert sum("without curvature: 2 norm layers; " in text for text in texts) == 1
    rows = {row.name: row for row in optimizer.summary().rows}
    assert rows["1.norm1"].status == rows["1.norm2"].status == "base"
    assert "LayerNorm" in rows["1.norm1"].detail
    assert sum(row.parameters for row in rows.values()) == sum(
        p.numel() for p in model.parameters()
    )
    assert not torch.equal(model[1].norm1.weight, start[1].norm1.weight)
    assert rows["1.attention"].status == rows["1.attention.out_proj"].status == "preconditioned"
