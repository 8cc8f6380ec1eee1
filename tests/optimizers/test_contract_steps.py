"""Steps capture the right statistics once, whatever else runs between two steps."""

from __future__ import annotations

import copy
import sys
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from models import CLASSES, ZOO, Checkpointed
from optimizer_cases import (
    SYSTEMS,
    asking,
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    each_system,
    each_variant,
    eigenpairs_only,
    factors,
    make,
    noted,
    same,
    take,
)
from reference import (
    captured,
    cross_entropy,
    damped_dense_solve,
    from_matrix,
    layer_factors,
    to_matrix,
)
from step_reference import assert_near, reference, weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from second_order import DHO2, KAISA, CurvatureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)
# those of `make`
LR = 0.05
DAMPING = 0.1


@pytest.mark.works("plain")
@each_kronecker
def test_a_step_equals_the_dense_solve_with_the_batchs_factors(System: Any) -> None:
    """The plain case that the others of this file are compared with; no clip by default."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    before = copy.deepcopy(model)
    cross_entropy(before(BATCHES[0][0]), BATCHES[0][1]).backward()
    optimizer = make(System, model, kl_clip=None)
    take(model, optimizer, BATCHES[0])
    assert_same_factors(factors(optimizer), expected)
    for name, (A, G) in expected.items():
        old = before.get_submodule(name)
        new = model.get_submodule(name)
        P = damped_dense_solve(A, G, to_matrix(old, old.weight.grad, old.bias.grad), DAMPING)
        weight, bias = from_matrix(old, P)
        torch.testing.assert_close(new.weight, old.weight - LR * weight, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(new.bias, old.bias - LR * bias, rtol=1e-8, atol=1e-12)


@each_system
def test_the_closure_runs_once_with_gradients_and_its_loss_is_returned(System: Any) -> None:
    """Lightning runs forward and backward inside `step(closure)`."""
    model = MLP.model()
    twin = MLP.model()
    optimizer = make(System, model)
    plain = make(System, twin)
    calls = []
    for x, y in BATCHES:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            calls.append(loss)
            return loss

        if System is DHO2:
            optimizer.curvature_closure = asking(model, optimizer, (x, y))["curvature_closure"]
        with torch.no_grad():
            returned = optimizer.step(closure)
        assert returned is calls[-1]
        take(twin, plain, (x, y))
    assert len(calls) == len(BATCHES)
    assert same(model, twin)
    assert optimizer.step() is None
    assert optimizer.step(closure=lambda: 3.5) == 3.5


@each_kronecker
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward_keeps_the_pair(
    System: Any, set_to_none: bool
) -> None:
    """Lightning does it; what the forward saw is not lost, and counts once."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    optimizer.zero_grad(set_to_none)
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)
    assert weights(optimizer) == {1}


@each_kronecker
def test_a_step_after_zero_grad_alone_adds_no_statistics(System: Any) -> None:
    model = MLP.model()
    (x, y) = BATCHES[0]
    optimizer = make(System, model)
    cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(not pair[0].any() for pair in factors(optimizer).values())


class TiedLinears(nn.Module):
    """Two modules with one weight and one bias, or without a bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.head = nn.Linear(6, CLASSES)
        self.a = nn.Linear(6, 6, bias=bias)
        self.b = nn.Linear(6, 6, bias=bias)
        self.b.weight = self.a.weight
        self.b.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(self.first(x))))))


@each_kronecker
@pytest.mark.parametrize("bias", [True, False])
def test_tied_layers_are_one_block(System: Any, bias: bool) -> None:
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
def test_a_layer_without_statistics_is_named_in_one_warning(System: Any) -> None:
    """But not if the forward only skips it at one step, as in models with stochastic depth."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.once = nn.Linear(5, 5)
            self.late = nn.Linear(5, 5)
            self.never = nn.Linear(5, 5)
            self.head = nn.Linear(5, 3)
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            if self.steps != 1:
                x = torch.tanh(self.once(x))
            if self.steps > 2:
                x = torch.tanh(self.late(x))
            return self.head(x)

    model = Skipping().double()
    with noted() as warned:
        optimizer = make(System, model)
        for batch in BATCHES:
            take(model, optimizer, batch)
    (message,) = warned
    assert message.startswith("no statistics arrived for 'late', 'never': at two refreshes, the")


@each_kronecker
def test_training_a_copy_of_the_model_names_the_first_layers(System: Any) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    twin = copy.deepcopy(model)
    optimizer = make(System, model)
    with noted() as warned:
        twin(torch.ones(4, 3)).sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()
    (message,) = warned
    names = f"({', '.join(repr(str(index)) for index in range(10))} and 2 more)"
    assert message.startswith(f"no layer gave statistics {names}: {System.__name__} now trains")
    assert "not a copy or an export of it" in message


def test_warnings_show_the_line_of_the_users_code() -> None:
    """The line that makes the optimizer, calls step() or calls backward()."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = sys._getframe().f_lineno
        optimizer = KAISA(model, lr=LR, skip_layers=["none"])
        optimizer.step()
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    lines = [first + 1, first + 2, first + 5]
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line) for line in lines]


@each_kronecker
@pytest.mark.parametrize("frozen", [(0,), (0, 2, 4)])
def test_layers_that_become_trainable_do_not_warn(System: Any, frozen: tuple[int, ...]) -> None:
    """Some of them, or all. Their first passes may run before they are captured."""
    model = nn.Sequential(*MLP.model(), nn.PReLU().double())
    for index in frozen:
        model[index].requires_grad_(False)
    optimizer = System(model.parameters(), model=model, lr=LR)
    with noted() as warned:
        for step, batch in enumerate([BATCHES[0]] * 8):
            if step == 5:
                model.requires_grad_(True)
            take(model, optimizer, batch)
    assert warned == []
    assert optimizer.metrics()["layers/solved"] == 3


@pytest.mark.works("compile")
@each_variant
@pytest.mark.usefixtures("dynamo")
def test_the_optimizer_may_be_created_before_a_compiled_models_first_run(
    System: Any, options: dict[str, Any]
) -> None:
    """Of the model; with drawn labels, of the compiled model."""
    model = MLP.model()
    twin = MLP.model()
    compiled = torch.compile(model, backend="aot_eager")
    argument = compiled if options.get("fisher") == "categorical" else model
    optimizer = make(System, argument, **options)
    plain = make(System, twin, **options)
    for batch in BATCHES[:3]:
        take(compiled, optimizer, batch)
        take(twin, plain, batch)
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain), rtol=1e-9)
    assert_near(model, twin)


ACCUMULATING = ["mlp", "conv_grouped", "shared_linear", "sequence_mlp", "inplace"]


@pytest.mark.parametrize(
    ("System", "name", "k"), fractional_product(SYSTEMS, ACCUMULATING, [2, 4], part=2)
)
def test_k_micro_batches_equal_one_batch(System: Any, name: str, k: int) -> None:
    """Each loss is divided by k."""
    case = ZOO[name]
    model = case.model()
    twin = case.model()
    optimizer = make(System, model)
    plain = make(System, twin)
    for x, y in case.batches(3):
        optimizer.zero_grad()
        parts = list(zip(x.chunk(k), y.chunk(k), strict=True))
        for part_x, part_y in parts:
            (case.loss(model(part_x), part_y) / k).backward()
        outputs = [asking(model, optimizer, part, case.loss) for part in parts]
        optimizer.step(**{name: [each[name] for each in outputs] for name in outputs[0]})
        take(twin, plain, (x, y), case.loss)
        if System is not DHO2:
            assert_same_factors(factors(optimizer), factors(plain), rtol=1e-9)
        assert_near(model, twin, atol=1e-11)


def validate(model: nn.Module, batch: Batch) -> None:
    model.eval()
    with torch.no_grad():
        model(batch[0])
    with torch.inference_mode():
        model(batch[0])
    model.train()


def forward_without_backward(model: nn.Module, batch: Batch) -> None:
    cross_entropy(model(batch[0]), batch[1])


def no_grad_in_training_mode(model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        model(batch[0])


@each_kronecker
def test_a_model_in_eval_mode_is_preconditioned(System: Any) -> None:
    """Fine-tuning with frozen batch norm: `requires_grad` counts, not `training`."""
    case = ZOO["batch_norm"]
    model = case.model().eval()
    expected = reference(model, case.batch())
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    assert_same_factors(factors(optimizer), expected)


def average(model: nn.Module, batch: Batch) -> None:
    ema = AveragedModel(model)
    cross_entropy(ema(batch[0]), batch[1]).backward()
    ema.update_parameters(model)


@each_system
@pytest.mark.parametrize(
    ("when", "disturb"),
    fractional_product(
        ["before the forward", "before the backward", "before the step"],
        [validate, no_grad_in_training_mode, forward_without_backward, average],
        part=2,
    ),
)
def test_other_passes_do_not_change_a_step(
    System: Any, disturb: Callable[[nn.Module, Batch], None], when: str
) -> None:
    model = MLP.model()
    twin = MLP.model()
    optimizer = make(System, model)
    plain = make(System, twin)
    for (x, y), other in pairwise(BATCHES):
        optimizer.zero_grad()
        if when == "before the forward":
            disturb(model, other)
        loss = cross_entropy(model(x), y)
        if when == "before the backward":
            disturb(model, other)
            optimizer.zero_grad()
        loss.backward()
        if when == "before the step":
            disturb(model, other)
        optimizer.step(**asking(model, optimizer, (x, y)))
        take(twin, plain, (x, y))
        assert same(model, twin)
        if System is not DHO2 or plain.curvature.refreshes:
            assert_same_curvature(curvature_of(optimizer), curvature_of(plain), rtol=0)


@eigenpairs_only
def test_reentrant_checkpointing_raises_with_the_remedy(System: Any) -> None:
    """Nothing has changed then."""
    torch.manual_seed(0)
    model = Checkpointed(True).double()
    optimizer = make(System, model, warmup_steps=0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CurvatureError, match=r"checkpoint\(\.\.\., use_reentrant=False\)"):
        take(model, optimizer, BATCHES[0])
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
