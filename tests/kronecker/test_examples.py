"""What counts as an example: passes that end in ``.grad``, each once."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import reference as ref
import torch
from contract import assert_same_factors, each_kronecker, factors, make, take
from models import CLASSES, ZOO, Checkpointed
from reference import cross_entropy
from torch import Tensor, nn

from second_order import KAISA, SecondOrderWarning
from second_order.kronecker.triangles import unpack_upper_triangular

if TYPE_CHECKING:
    from collections.abc import Callable

MLP = ZOO["mlp"]
F64 = torch.float64
each_fisher = pytest.mark.parametrize("fisher", ["empirical", "sampled"])


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


BESIDE = [attack, derivative_in_a_graph, gradients_of_weights, backward_into_inputs]


@each_kronecker
@each_fisher
@pytest.mark.parametrize("beside", BESIDE, ids=lambda f: f.__name__)
def test_gradients_beside_the_loss_are_no_examples(
    System: Any, fisher: str, beside: Callable[..., None]
) -> None:
    x, y = MLP.batch()
    found = []
    for besides in (False, True):
        model = MLP.model()
        optimizer = make(System, model, fisher=fisher)
        if besides and fisher == "empirical":  # labels are drawn by the number of the forward
            beside(model, x, y)
        cross_entropy(model(x), y).backward()
        if besides:
            beside(model, x, y)
        optimizer.step()
        found.append(factors(optimizer))
    assert_same_factors(found[1], found[0])
    if fisher == "empirical":
        assert_same_factors(found[1], expected())


@each_kronecker
def test_a_gradient_penalty_counts_with_the_pass_that_ends_in_the_weights(System: Any) -> None:
    """Of the three passes through the critic two end there: the loss and, through ∇ₓ, the penalty.

    The derivative's own pass, from ones, would multiply G.
    """
    model, (x, _) = MLP.model(), MLP.batch()
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
    staged = {b.name: b.staged.sums() for b in optimizer._curvature.layers.blocks}
    for i, d in ended.items():
        if bool(d.any()):
            sums = staged[str(i)]
            g = unpack_upper_triangular(sums.factors["G"], d.shape[1])
            torch.testing.assert_close(g.squeeze(0) / sums.head[0], len(d) * d.T @ d)


@each_kronecker
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("zeroed_by", ["optimizer", "model"])
def test_a_discriminator_counts_its_own_passes(System: Any, zeroed_by: str, to_none: bool) -> None:
    """What the generator's loss leaves in it goes with its gradients."""
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = make(System, model)
    noise = nn.Linear(5, 5, dtype=F64)
    cross_entropy(model(noise(x)), y).backward()  # the generator's step
    (optimizer if zeroed_by == "optimizer" else model).zero_grad(set_to_none=to_none)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected())


# Accumulation that nobody was told of.


def accumulate(model: nn.Module, batch: Any, parts: int, divided: float) -> None:
    x, y = batch
    for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (cross_entropy(model(part[0]), part[1]) / divided).backward()


@each_kronecker
def test_passes_of_a_step_are_counted_and_said_once(System: Any) -> None:
    """4, 4, and the 2 that were left of an epoch."""
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
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
    assert "accumulation_steps=1" in line


@pytest.mark.filterwarnings("error::second_order.SecondOrderWarning")
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_two_losses_of_one_forward_are_no_micro_batches(reentrant: bool | None) -> None:
    """Nor where a checkpoint repeats the forward for each."""
    torch.manual_seed(0)
    model, (x, y) = Checkpointed(reentrant).double(), MLP.batch()
    plain = copy.deepcopy(model)
    plain.reentrant = None
    optimizer = make(KAISA, model)
    loss = cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    wanted = {n: ref.empirical_factors(plain, x, y, cross_entropy, n) for n in names}
    assert_same_factors(factors(optimizer), wanted)


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_a_layer_that_some_micro_batches_pass_by_is_counted_with_the_others() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.rare = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor, rare: bool) -> Tensor:
            out: Tensor = self.body(x)
            return out + self.rare(x) if rare else out

    torch.manual_seed(0)
    model, (x, y) = Branches().double(), MLP.batch()
    optimizer = make(KAISA, model)
    for rare in (True, False):
        (cross_entropy(model(x, rare), y) / 2).backward()
    optimizer.step()
    torch.manual_seed(0)
    logits = Branches().double()(x, True).detach().requires_grad_()
    (d,) = torch.autograd.grad(cross_entropy(logits, y), logits)
    torch.testing.assert_close(factors(optimizer)["rare"][1].squeeze(0), len(x) * d.T @ d)
