"""Steps of odd layers: used several times or not at all, tied, frozen, or without factors."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from contract import (
    BASES,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    eigenpairs_only,
    factors,
    make,
    same,
    take,
)
from models import CLASSES, ZOO, Pool
from reference import captured, cross_entropy, layer_factors
from stepped import first_factors, inputs_of, messages, reference
from torch import Tensor, nn

from second_order import SecondOrderWarning
from second_order.fosi import pieces as flat

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
def test_tied_weights_with_biases_of_their_own_go_to_the_base(System: Any) -> None:
    torch.manual_seed(0)
    model = TiedLinears(bias=True).double()
    model.b.bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    plain = copy.deepcopy(model)
    x, y = BATCHES[0]
    cross_entropy(plain(x), y).backward()
    optimizer = make(System, model)
    take(model, optimizer, (x, y))
    assert factors(optimizer).keys() == {"first", "head"}
    rows = {row.name: row for row in optimizer.summary().rows}
    assert rows["a"].status == rows["b"].status == "base"
    assert rows["a"].detail == "tied weights with separate biases or types"
    assert plain.a.weight.grad is not None
    torch.testing.assert_close(model.a.weight, plain.a.weight - LR * plain.a.weight.grad)


@each_kronecker
def test_a_layer_unused_in_a_forward_keeps_what_it_knows(System: Any) -> None:
    """Its gradient is None, as for the base alone; the others are preconditioned."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.skip = False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.head(x if self.skip else torch.tanh(self.middle(x)))

    model = Optional().double()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    known, weight = factors(optimizer), model.middle.weight.detach().clone()
    model.skip = True
    expected = reference(model, BATCHES[1], cross_entropy, "first", "head")
    take(model, optimizer, BATCHES[1])
    now = factors(optimizer)
    assert_same_factors({"m": now["middle"]}, {"m": known["middle"]}, rtol=0)
    assert torch.equal(model.middle.weight, weight)
    for name, pair in expected.items():
        for old, new, average in zip(known[name], pair, now[name], strict=True):
            torch.testing.assert_close(average, (0.95 * old + new) / 1.95)
    model.skip = False
    take(model, optimizer, BATCHES[2])
    assert not torch.equal(model.middle.weight, weight)


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
@pytest.mark.parametrize("packed_below", [2, flat.PACKED_BELOW])
@pytest.mark.parametrize("base", BASES)
def test_a_layer_without_a_gradient_stays_as_it_is(
    System: Any, base: str, packed_below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is None, as for the base alone: eigenvectors that are not exact reach it not."""
    Base, options = BASES[base]
    case = ZOO["unused"]
    model = case.model()
    monkeypatch.setattr(flat, "PACKED_BELOW", packed_below)
    optimizer = make(System, model, base=Base, lanczos_iterations=5, lanczos_tol=1.0, **options)
    unused = [p.detach().clone() for p in model.unused.parameters()]
    used = [p.detach().clone() for p in model.first.parameters()]
    for batch in case.batches(4):
        take(model, optimizer, batch)
    assert optimizer.curvature.refreshes == 2
    assert model.unused.weight.grad is None
    assert same(model.unused.parameters(), unused)
    assert not same(model.first.parameters(), used)


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


@eigenpairs_only
@pytest.mark.parametrize("what", ["layer", "bias"])
def test_what_is_frozen_at_construction_is_not_spanned_until_it_thaws(
    System: Any, what: str
) -> None:
    model = MLP.model()
    parts = list(model[0].parameters()) if what == "layer" else [model[0].bias]
    for p in parts:
        p.requires_grad_(False)
    optimizer = make(System, list(model.parameters()), model=model)
    before = [p.detach().clone() for p in parts]
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
    size = sum(p.numel() for p in model.parameters())
    held = sum(p.numel() for p in parts)
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, size - held)
    assert same(parts, before)
    for p in parts:
        p.requires_grad_(True)
    for batch in BATCHES[2:]:
        take(model, optimizer, batch)
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, size)
    assert not any(map(torch.equal, parts, before))


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
def test_freeze_train_and_unfreeze(System: Any) -> None:
    """`requires_grad` is looked at in each step: a frozen layer rests, a thawed one is back."""
    model = MLP.model()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    known, frozen = factors(optimizer), model[2].weight.detach().clone()
    model[2].requires_grad_(False)
    assert {row.name: row.status for row in optimizer.summary().rows}["2"] == "frozen"
    for batch in BATCHES[1:3]:
        take(model, optimizer, batch)
    assert torch.equal(model[2].weight, frozen)
    assert not torch.equal(factors(optimizer)["0"][0], known["0"][0])
    model[2].requires_grad_(True)
    expected = reference(model, BATCHES[3], cross_entropy, "2")["2"]
    take(model, optimizer, BATCHES[3])
    assert not torch.equal(model[2].weight, frozen)
    # It may have kept what it knew or not: the new statistic is in, and nothing of between.
    weight = float(optimizer.state[model[2].weight]["curvature"]["average_weight"])
    assert weight in (1, 1.95)
    for old, new, average in zip(known["2"], expected, factors(optimizer)["2"], strict=True):
        torch.testing.assert_close(average, ((weight - 1) * old + new) / weight)


@each_kronecker
def test_the_input_of_a_frozen_layer_is_not_held_and_its_passes_do_not_count(System: Any) -> None:
    """Autograd saves no input for a frozen weight, and neither do we."""
    model = MLP.model()
    optimizer = make(System, model, accumulation_steps=1)
    model[2].requires_grad_(False)
    alive = inputs_of(model[2])
    linear_only = nn.Sequential(model[0], model[2])  # tanh would keep its own output
    loss = linear_only(BATCHES[0][0]).square().mean()
    gc.collect()
    assert [ref.expired() for ref in alive] == [True]
    loss.backward()
    model[2].requires_grad_(True)
    expected = reference(model, BATCHES[1], cross_entropy, "2")
    cross_entropy(model(BATCHES[1][0]), BATCHES[1][1]).backward()  # without zero_grad between
    optimizer.step()
    assert_same_factors({"2": factors(optimizer)["2"]}, expected)


@each_kronecker
def test_layers_frozen_at_construction_and_thawed_later(System: Any) -> None:
    """Given as parameters, they are in the groups from the start."""
    model = MLP.model()
    model[0].requires_grad_(False)
    optimizer = make(System, list(model.parameters()), model=model)
    take(model, optimizer, BATCHES[0])
    assert {row.name: row.status for row in optimizer.summary().rows}["0"] == "frozen"
    model[0].requires_grad_(True)
    expected = reference(model, BATCHES[1], cross_entropy, "0")
    take(model, optimizer, BATCHES[1])
    assert_same_factors({"0": factors(optimizer)["0"]}, expected)
    assert {row.name: row.status for row in optimizer.summary().rows}["0"] == "preconditioned"


@each_kronecker
@pytest.mark.parametrize("when", ["at construction", "later"])
def test_one_frozen_bias(System: Any, when: str) -> None:
    """A loses its homogeneous coordinate, the weight is preconditioned, the bias stays."""
    model = MLP.model()
    if when == "at construction":
        model[2].bias.requires_grad_(False)
    optimizer = make(System, model)
    if when == "later":
        take(model, optimizer, BATCHES[0])
        model[2].bias.requires_grad_(False)
    bias, expected = model[2].bias.detach().clone(), reference(model, BATCHES[1])
    take(model, optimizer, BATCHES[1])
    A, G = expected["2"]
    assert_same_factors({"2": factors(optimizer)["2"]}, {"2": (A[:, :-1, :-1], G)})
    assert torch.equal(model[2].bias, bias)
    assert optimizer.state[model[2].weight]["curvature"]["A"] is not None
    model[2].bias.requires_grad_(True)
    take(model, optimizer, BATCHES[2])
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@each_kronecker
def test_a_bias_whose_weight_is_frozen_is_trained_by_the_base(System: Any) -> None:
    model = MLP.model()
    model[2].weight.requires_grad_(False)
    x, y = BATCHES[0]
    plain = copy.deepcopy(model)
    cross_entropy(plain(x), y).backward()
    take(model, make(System, model), (x, y))
    expected = plain[2].bias - LR * plain[2].bias.grad
    torch.testing.assert_close(model[2].bias, expected, rtol=1e-12, atol=1e-14)


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
def test_a_transformer_encoder_layer_trains_with_its_projections_in_blocks(System: Any) -> None:
    """`nn.MultiheadAttention` reads `out_proj.weight` and never calls the module."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), encoder, Pool(), nn.Linear(8, CLASSES)).double()
    x, y = torch.randn(16, 3, 4, dtype=torch.float64), torch.randint(CLASSES, (16,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(System, model, lr=0.1, kl_clip=1e-2)
        losses = [float(take(model, optimizer, (x, y))) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert not [text for text in messages(caught) if "self_attn" in text]
    names = {"1.self_attn", "1.self_attn.out_proj", "1.linear1", "1.linear2"}
    assert names <= factors(optimizer).keys()


@each_kronecker
def test_the_summary_says_which_layers_gave_no_statistics(System: Any) -> None:
    """After a step that a layer took no part in, it is the base's, and counts as such."""
    case = ZOO["unused"]
    model = case.model()
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    summary = optimizer.summary()
    rows = {row.name: row for row in summary.rows}
    assert rows["first"].status == "preconditioned"
    assert rows["unused"].status != "preconditioned"
    ours = sum(row.parameters for row in summary.rows if row.name in ("first", "head"))
    total = sum(p.numel() for p in model.parameters())
    assert summary.preconditioned_share == pytest.approx(ours / total)


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


@each_kronecker
def test_what_the_base_has_gets_its_gradient_as_it_is(System: Any) -> None:
    case = ZOO["norms"]
    model = case.model()
    plain = copy.deepcopy(model)
    x, y = case.batch()
    cross_entropy(plain(x), y).backward()
    take(model, make(System, model, skip_layers=["7", "Conv*"]), (x, y))
    for index in (0, 1, 5, 7):  # convolution, group norm, layer norm, the last Linear
        for p, q in zip(model[index].parameters(), plain[index].parameters(), strict=True):
            torch.testing.assert_close(p, q - LR * q.grad, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(model[4].weight, plain[4].weight - LR * plain[4].weight.grad)
