"""Steps with the sampled Fisher, and with scaled losses."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from models import CLASSES, ZOO
from optimizer_cases import (
    KRONECKER,
    SYSTEMS,
    asking,
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    factors,
    make,
    same,
    take,
)
from reference import cross_entropy
from step_reference import SCALERS, assert_near, fixed_labels, reference
from torch import Tensor, nn

from second_order import DHO2

if TYPE_CHECKING:
    from collections.abc import Callable

    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)


def sampled(System: Any, model: nn.Module, likelihood: Any = "categorical", **options: Any) -> Any:
    return make(System, model, fisher=likelihood, **options)


@each_kronecker
def test_the_sampled_fisher_leaves_gradients_and_random_states_unchanged(System: Any) -> None:
    """Labels come from a generator of their own, gradients from a backward of their own."""
    model = MLP.model()
    twin = MLP.model()
    x, y = BATCHES[0]
    optimizer = sampled(System, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state = torch.get_rng_state()
    loss = cross_entropy(model(x), y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    cross_entropy(twin(x), y).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-15)


@each_kronecker
def test_each_micro_batch_samples_its_own_labels(System: Any) -> None:
    """Two passes of one batch with the same labels would be as one."""
    found = []
    for passes in (1, 2):
        model = MLP.model()
        (x, y) = BATCHES[0]
        optimizer = sampled(System, model, lr=0.0)
        for _ in range(passes):
            cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append(factors(optimizer)["4"][1])
    assert not torch.allclose(found[0], found[1], rtol=1e-3)


@each_kronecker
def test_a_step_that_is_repeated_after_loading_samples_the_same_labels(System: Any) -> None:
    model = MLP.model()
    (x, y) = BATCHES[0]
    optimizer = sampled(System, model, lr=0.0)
    found = []
    for step in range(3):
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())
        if step == 2:
            optimizer.load_state_dict(state)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append(factors(optimizer)["4"][1])
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[1])


@each_kronecker
@pytest.mark.parametrize("name", ["mlp", "inplace", "conv_strided", "shared_linear", "batch_norm"])
def test_the_sampled_fisher_with_the_datas_labels_is_the_empirical_fisher(
    System: Any, name: str
) -> None:
    case = ZOO[name]
    model = case.model()
    batch = case.batch()
    plain = case.model()
    if name == "inplace":
        plain[1].inplace = False  # the reference's captured output is a copy anyway
    expected = reference(plain, batch)
    optimizer = sampled(System, model, fixed_labels(batch[1]))
    take(model, optimizer, batch)
    assert_same_factors(factors(optimizer), expected)


class Wrapped(nn.Module):
    """Returns its logits in a form of the caller's choosing."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layer(x))


class Output:
    """As transformers has it."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda logits: logits,
    "dict": lambda logits: {"hidden": logits * 2, "logits": logits},
    "tuple": lambda logits: (logits, logits * 2),
    "object": Output,
}


def logits_of(output: Any) -> Tensor:
    if isinstance(output, (dict, tuple)):
        return output["logits"] if isinstance(output, dict) else output[0]
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize(
    ("System", "form", "likelihood"),
    fractional_product(KRONECKER, [*FORMS], ["categorical", "bernoulli", "gaussian"], part=3),
)
def test_the_sampled_fisher_finds_the_logits(System: Any, form: str, likelihood: str) -> None:
    found = []
    for shape in ("tensor", form):
        torch.manual_seed(0)
        model = Wrapped(FORMS[shape]).double()
        optimizer = sampled(System, model, likelihood)
        logits_of(model(BATCHES[0][0])).sum().backward()
        optimizer.step()
        found.append(factors(optimizer))
    assert_same_factors(found[1], found[0], rtol=0)
    assert float(found[0]["layer"][1].abs().sum()) > 0


@each_kronecker
@pytest.mark.parametrize(
    "form", [lambda logits: {"hidden": logits}, lambda logits: 3, lambda logits: (3, logits)]
)
def test_the_sampled_fisher_raises_for_outputs_without_logits(
    System: Any, form: Callable[[Tensor], Any]
) -> None:
    model = Wrapped(form).double()
    optimizer = sampled(System, model)
    with pytest.raises(TypeError, match=r"fisher=f .* loss=f of measure"):
        model(BATCHES[0][0])
    del optimizer


def scaled(model: nn.Module, optimizer: Any, scaler: Any, batch: Batch, unscale: bool) -> None:
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model(batch[0]), batch[1])).backward()
    if unscale:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(optimizer, **asking(model, optimizer, batch))
    scaler.update()


@pytest.mark.parametrize(
    ("System", "scaler", "unscale"), fractional_product(SYSTEMS, [*SCALERS], [False, True], part=2)
)
def test_loss_scaling_does_not_change_the_curvature(
    System: Any, scaler: str, unscale: bool
) -> None:
    """Captured gradients carry the scale S and G its square, whatever S is at the time."""
    model = MLP.model()
    twin = MLP.model()
    scaling = SCALERS[scaler]()
    optimizer = make(System, model, grad_scaler=scaling)
    plain = make(System, twin)
    for batch in BATCHES:
        scaled(model, optimizer, scaling, batch, unscale)
        take(twin, plain, batch)
        if System is not DHO2 or plain.curvature.refreshes:
            assert_same_curvature(curvature_of(optimizer), curvature_of(plain))
        assert_near(model, twin)
    if scaling.is_enabled():
        assert scaling.get_scale() > 1024


@pytest.mark.refused(
    "AMP float16",
    when="without `grad_scaler=`",
    message="is called by a GradScaler that it does not know",
)
@each_kronecker
def test_a_grad_scaler_that_was_not_passed_raises(System: Any) -> None:
    """The captured gradients would carry its scale, and training would stall without a word."""
    model = MLP.model()
    optimizer = make(System, model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"grad_scaler=scaler"):
        scaled(model, optimizer, SCALERS["torch.amp"](), BATCHES[0], unscale=False)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    scaled(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), BATCHES[0], unscale=False)


def infinite_gradient(layer: nn.Module) -> Any:
    """From now on the gradient at the layer's output has one infinity; returns the hook."""

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("inf")
        return gradient

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        output = output * 1  # behind the layer's own output, so that the layer sees it
        output.register_hook(spoil)
        return output

    return layer.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("System", "scaler", "where"),
    fractional_product(
        SYSTEMS,
        ["torch.amp", "torch.cpu.amp"],
        ["everywhere", "first layer", "last layer"],
        part=2,
    ),
)
def test_a_step_skipped_by_the_scaler_changes_nothing(System: Any, scaler: str, where: str) -> None:
    """Statistics of the skipped pass are dropped, also those of layers that saw no infinity."""
    model = MLP.model()
    twin = MLP.model()
    scaling = SCALERS[scaler]()
    other = SCALERS[scaler]()
    own = {"warmup_steps": 0} if System is DHO2 else {}
    optimizer = make(System, model, grad_scaler=scaling, **own)
    plain = make(System, twin, grad_scaler=other, **own)
    scaled(model, optimizer, scaling, BATCHES[0], unscale=False)
    scaled(twin, plain, other, BATCHES[0], unscale=False)
    before = copy.deepcopy(model)
    known = curvature_of(optimizer)
    x, y = BATCHES[3]
    if where == "everywhere":
        scaled(model, optimizer, scaling, (x * float("inf"), y), unscale=False)
    else:
        hook = infinite_gradient(model[0] if where == "first layer" else model[4])
        scaled(model, optimizer, scaling, (x, y), unscale=False)
        hook.remove()
    assert scaling.get_scale() == 512  # the scaler did skip the step
    assert same(model, before)
    assert_same_curvature(curvature_of(optimizer), known, rtol=0)
    for batch in BATCHES[1:]:
        scaled(model, optimizer, scaling, batch, unscale=False)
        scaled(twin, plain, other, batch, unscale=False)
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain))
    assert_near(model, twin)
