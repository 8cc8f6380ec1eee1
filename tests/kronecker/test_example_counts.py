"""Passes that end in ``.grad`` count once each, and rows count if they have a gradient."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import reference as ref
import torch
from factor_checks import kind_of, pair_statistics
from hypothesis import given
from hypothesis import strategies as st
from models import CLASSES, ZOO, Checkpointed
from optimizer_cases import assert_same_factors, each_kronecker, factors, make, take
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn import functional

from second_order import KAISA, DistKFAC, SecondOrderWarning
from second_order.kronecker.factors import collect_sums
from second_order.kronecker.layers import RowMask, nonzero_row_mask
from second_order.kronecker.storage import unpack_upper_triangular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


MLP = ZOO["mlp"]
F64 = torch.float64
each_fisher = pytest.mark.parametrize("fisher", ["empirical", "categorical"])


def expected(batch: Any = None) -> Any:
    model = MLP.model()
    batch = MLP.batch() if batch is None else batch
    return {n: ref.empirical_factors(model, *batch, cross_entropy, n) for n in ("0", "2", "4")}


# Gradients that are taken inside a step.


def attack(model: nn.Module, x: Tensor, y: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(1e3 * cross_entropy(model(leaf), y), leaf)


def derivative_in_a_graph(model: nn.Module, x: Tensor, y: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(1e3 * model(leaf).sum(), leaf, create_graph=True)


def gradients_of_weights(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(1e3 * cross_entropy(model(x), y), list(model.parameters()))


def backward_into_inputs(model: nn.Module, x: Tensor, y: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    (1e3 * cross_entropy(model(leaf), y)).backward(inputs=[leaf])


EXTRA_PASSES = [attack, derivative_in_a_graph, gradients_of_weights, backward_into_inputs]


@each_kronecker
@each_fisher
@pytest.mark.parametrize("extra_pass", EXTRA_PASSES, ids=lambda f: f.__name__)
def test_gradients_of_other_quantities_add_no_examples(
    System: Any, fisher: str, extra_pass: Callable[..., None]
) -> None:
    x, y = MLP.batch()
    found = []
    for besides in (False, True):
        model = MLP.model()
        optimizer = make(System, model, fisher=fisher)
        if besides and fisher == "empirical":  # labels are drawn by the number of the forward
            extra_pass(model, x, y)
        cross_entropy(model(x), y).backward()
        if besides:
            extra_pass(model, x, y)
        optimizer.step()
        found.append(factors(optimizer))
    assert_same_factors(found[1], found[0])
    if fisher == "empirical":
        assert_same_factors(found[1], expected())


@each_kronecker
def test_a_gradient_penalty_counts_in_the_pass_that_reaches_the_weights(System: Any) -> None:
    """Two of three passes reach the critic's weights: the loss and, through ∇ₓ, the penalty.

    The derivative's own pass, from ones, would multiply G.
    """
    model = MLP.model()
    (x, _) = MLP.batch()
    seen: list[tuple[int, Tensor]] = []

    def listen(i: int, out: Tensor) -> None:
        out.register_hook(lambda g: seen.append((i, g.detach())))

    for i in (0, 2, 4):
        model[i].register_forward_hook(lambda m, x, out, i=i: listen(i, out))
    optimizer = make(System, model)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    seen.clear()
    penalty = (slope.norm(dim=1) - 1).square().mean()
    penalty.backward()
    ended = dict(seen)
    assert 0 in ended
    # Before they are compared with the gradients, of which they do not make all.
    staged = {b.name: collect_sums([b.staged])[0] for b in optimizer._curvature.layers.blocks}
    for i, d in ended.items():
        if bool(d.any()):
            sums = staged[str(i)]
            g = unpack_upper_triangular(sums.factors["G"], d.shape[1])
            torch.testing.assert_close(g.squeeze(0) / sums.head[0], len(d) * d.T @ d)


@each_kronecker
@pytest.mark.parametrize("zeroed_by", ["optimizer", "model"])
def test_a_discriminator_counts_its_own_passes(System: Any, zeroed_by: str) -> None:
    """`zero_grad` also drops the statistics of the generator's loss."""
    model = MLP.model()
    (x, y) = MLP.batch()
    optimizer = make(System, model)
    noise = nn.Linear(5, 5, dtype=F64)
    cross_entropy(model(noise(x)), y).backward()  # the generator's step
    (optimizer if zeroed_by == "optimizer" else model).zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected())


# Accumulation without an option that says so.


def accumulate(model: nn.Module, batch: Any, parts: int, divided: float) -> None:
    x, y = batch
    for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (cross_entropy(model(part[0]), part[1]) / divided).backward()


@each_kronecker
def test_passes_of_a_step_are_counted_with_one_warning(System: Any) -> None:
    """4, 4, and the 2 that were left of an epoch."""
    model = MLP.model()
    twin = MLP.model()
    optimizer = make(System, model)
    plain = make(System, twin)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, parts in zip(MLP.batches(3), (4, 4, 2), strict=True):
            optimizer.zero_grad()
            accumulate(model, batch, parts, parts)
            optimizer.step()
            take(twin, plain, batch)
            assert_same_factors(factors(optimizer), factors(plain), rtol=1e-9)
    (line,) = [str(w.message) for w in caught if w.category is SecondOrderWarning]
    assert "4 backward passes in a step" in line
    assert "set loss_reduction='mean'" in line


@each_kronecker
def test_an_explicit_loss_reduction_has_no_warning(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, loss_reduction="mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        accumulate(model, MLP.batch(), 2, 2)
        optimizer.step()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_two_losses_of_one_forward_pass_are_not_micro_batches(reentrant: bool | None) -> None:
    """Also if a checkpoint repeats the forward pass. G is the sum of both, with a warning."""
    torch.manual_seed(0)
    model = Checkpointed(reentrant).double()
    (x, y) = MLP.batch()
    plain = copy.deepcopy(model)
    plain.reentrant = None
    optimizer = make(KAISA, model)

    def separate_backwards() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    with pytest.warns(SecondOrderWarning, match="add the losses, and call backward"):
        separate_backwards()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    expected_factors = {n: ref.empirical_factors(plain, x, y, cross_entropy, n) for n in names}
    expected_factors = {n: (A, 2 * G) for n, (A, G) in expected_factors.items()}
    assert_same_factors(factors(optimizer), expected_factors)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        separate_backwards()


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_labels_sampled_in_two_calls_count_equally_in_one_backward() -> None:
    found = []
    for at_once in (True, False):
        model = MLP.model()
        (x, y) = MLP.batch()
        optimizer = make(KAISA, model, fisher="categorical")
        losses = [cross_entropy(model(part), y[: len(part)]) for part in (x, 2 * x)]
        for loss in [sum(losses)] if at_once else losses:
            loss.backward()
        optimizer.step()
        assert {row.status for row in optimizer.summary().rows} == {"preconditioned"}
        found.append(factors(optimizer))
    assert_same_factors(*found, rtol=1e-12)


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_a_layer_that_some_micro_batches_skip_is_counted() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, CLASSES)
            self.rare = nn.Linear(5, CLASSES)

        def forward(self, x: Tensor, rare: bool) -> Tensor:
            out: Tensor = self.body(x)
            return out + self.rare(x) if rare else out

    torch.manual_seed(0)
    model = Branches().double()
    (x, y) = MLP.batch()
    optimizer = make(KAISA, model)
    for rare in (True, False):
        (cross_entropy(model(x, rare), y) / 2).backward()
    optimizer.step()
    torch.manual_seed(0)
    logits = Branches().double()(x, True).detach().requires_grad_()
    (d,) = torch.autograd.grad(cross_entropy(logits, y), logits)
    # Half of the step's terms do not come by.
    torch.testing.assert_close(factors(optimizer)["rare"][1].squeeze(0), len(x) * d.T @ d / 2)


SEEDS = st.integers(0, 2**16)


class Tokens(nn.Module):
    """An embedding, attention over what is not padded, norms, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 7)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, tokens: Tensor, length: int) -> Tensor:
        x = self.embedding(tokens)
        mask = (torch.arange(tokens.shape[1]) < length).expand(tokens.shape[1], -1)
        x = x + functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), mask)
        return self.head(torch.tanh(self.inner(self.norm(x))))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def padded(tokens: Tensor, labels: Tensor, to: int) -> tuple[Tensor, Tensor]:
    more = to - tokens.shape[1]
    return functional.pad(tokens, (0, more)), functional.pad(labels, (0, more), value=-100)


@each_kronecker
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_padding_does_not_change_the_factors(System: Any, approx: str) -> None:
    """Four tokens, padded to sixteen with mask 0 and label -100."""
    torch.manual_seed(0)
    twin = Tokens().double()
    model = copy.deepcopy(twin)
    batch = torch.randint(9, (3, 4)), torch.randint(CLASSES, (3, 4))
    options: dict[str, Any] = {"kfac_approx": approx}
    if System is DistKFAC:
        options["precondition_norms"] = True
    found = []
    for each, (tokens, labels) in ((model, padded(*batch, 16)), (twin, batch)):
        optimizer = make(System, each, **options)
        token_loss(each(tokens, 4), labels).backward()
        optimizer.step()
        found.append(factors(optimizer))
    assert {"embedding", "q", "k", "v", "inner", "head"} <= set(found[1])
    for name, pair in found[1].items():
        for a, b in zip(found[0][name], pair, strict=True):
            # Gradients of all keys add up to zero, and to rounding.
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-25)


@given(seed=SEEDS, dead=st.sets(st.integers(0, 5), max_size=5))
def test_rows_without_a_gradient_are_not_examples(seed: int, dead: set[int]) -> None:
    """The factors of every kind of layer are those without these rows."""
    for module, x, d in pairs_of_all_kinds(seed):
        alive = [i for i in range(len(x)) if i not in dead]
        d[list(dead)] = 0
        for bias in (False, True) if getattr(module, "bias", None) is not None else (False,):
            options = {"has_bias": bias, "approximation": "expand", "dtype": F64}
            found = pair_statistics(module, x, d, **options)
            without = pair_statistics(module, x[alive], d[alive], **options)
            assert found.num_examples == without.num_examples
            for a, b in zip(found.factors.values(), without.factors.values(), strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(50,), (50, 3), (2, 5, 5)])
def test_rows_that_begin_with_zeros_are_examples(shape: tuple[int, ...]) -> None:
    d = torch.zeros(4, *shape)
    d.flatten(1)[0, -1] = 1.0
    d.flatten(1)[2, 0] = -1.0
    d.flatten(1)[3, -2] = torch.nan
    found = nonzero_row_mask(d)
    assert found.mask is not None
    assert found.mask.tolist() == [True, False, True, True]
    assert found.count == 3


def pairs_of_all_kinds(seed: int) -> Sequence[tuple[nn.Module, Tensor, Tensor]]:
    """(layer, input, gradient of the output), six examples each, of layers with positions."""
    torch.manual_seed(seed)
    normal = [
        (nn.Linear(4, 3), torch.randn(6, 4)),
        (nn.Linear(4, 3), torch.randn(6, 5, 4)),
    ]
    inputs = [(m.double(), x.double()) for m, x in normal]
    found = [(m, x, torch.randn_like(m(x)).detach()) for m, x in inputs]
    embedding = nn.Embedding(7, 3, dtype=F64)
    tokens = torch.randint(7, (6, 5))
    return [*found, (embedding, tokens, torch.randn(6, 5, 3, dtype=F64))]


@given(seed=SEEDS, dead=st.sets(st.integers(0, 5)))
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_masks_on_a_device_equal_selected_rows(approx: Any, seed: int, dead: set[int]) -> None:
    """On a device, the mask is used without a synchronization."""
    for module, x, d in pairs_of_all_kinds(seed):
        d[list(dead)] = 0
        options = {"approximation": approx, "dtype": F64}
        bias = getattr(module, "bias", None) is not None
        picked = pair_statistics(module, x, d, has_bias=bias, **options)
        mask = kind_of(module).gradient_rows(module, x, d).gradient.any(1)
        rows = RowMask(mask, mask.sum())
        masked = pair_statistics(module, x, d, has_bias=bias, row_mask=rows, **options)
        assert float(masked.num_examples) == picked.num_examples
        for a, b in zip(masked.factors.values(), picked.factors.values(), strict=True):
            torch.testing.assert_close(a, b)


class Dead(nn.Module):
    """A branch whose ReLU is off for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, CLASSES)
        self.branch = nn.Linear(5, CLASSES)
        nn.init.constant_(self.branch.bias, -1e3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out + torch.relu(self.branch(x))


@each_kronecker
@pytest.mark.filterwarnings("error::second_order.SecondOrderWarning")
def test_a_layer_with_zero_gradients_has_statistics(System: Any) -> None:
    torch.manual_seed(0)
    model = Dead().double()
    before = model.branch.weight.detach().clone()
    optimizer = make(System, model)
    for batch in MLP.batches(3):
        take(model, optimizer, batch)
    assert torch.equal(model.branch.weight, before)
    assert {row.name: row.status for row in optimizer.summary().rows}["branch"] != "base"
    nn.init.zeros_(model.branch.bias)  # it wakes
    take(model, optimizer, MLP.batch())
    assert not torch.equal(model.branch.weight, before)
