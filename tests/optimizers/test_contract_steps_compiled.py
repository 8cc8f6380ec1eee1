"""Steps of compiled models, under torch.func, and in every memory layout; see test_compiling."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    each_variant,
    factors,
    make,
    take,
)
from models import CLASSES, ZOO
from reference import cross_entropy
from stepped import assert_near, reference
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)
LR, DAMPING = 0.05, 0.1  # those of `make`


# torch.compile.


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.works("compile")
@each_variant
@pytest.mark.usefixtures("dynamo")
def test_compiled_model_when_the_optimizer_is_made_before_the_first_run(
    System: Any, options: dict[str, Any]
) -> None:
    """Of the model; with drawn labels, of the compiled model."""
    model, twin = MLP.model(), MLP.model()
    compiled = torch.compile(model, backend="aot_eager")
    given = compiled if options.get("fisher") == "sampled" else model
    optimizer = make(System, given, **options)
    plain = make(System, twin, **options)
    for batch in BATCHES[:3]:
        take(compiled, optimizer, batch)
        take(twin, plain, batch)
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain), rtol=1e-9)
    assert_near(model, twin)


@each_kronecker
@pytest.mark.usefixtures("dynamo")
def test_inductor(System: Any) -> None:
    """Slow, for its C++ compiler, whose kernels do not care for hooks that eager would run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, CLASSES), nn.ReLU(inplace=True)).double()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model)
    optimizer, plain = make(System, compiled), make(System, twin)
    try:
        take(compiled, optimizer, BATCHES[0])
    except Exception as error:
        if "CppCompile" in repr(error) or "InvalidCxxCompiler" in repr(error):
            pytest.skip("no C++ compiler")
        raise
    take(twin, plain, BATCHES[0])
    assert_same_factors(factors(optimizer), factors(plain), rtol=1e-8)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-12)


# torch.func, higher derivatives.


@each_kronecker
def test_function_transforms_work_on_a_watched_model_and_leave_no_statistics(System: Any) -> None:
    """`torch.func.grad` and `vmap` of it: per-example gradients of a model in training."""
    model = MLP.model()
    x, y = BATCHES[0]
    expected = reference(model, BATCHES[1])
    optimizer = make(System, model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    assert gradients["0.weight"].shape == (len(x), *model[0].weight.shape)
    take(model, optimizer, BATCHES[1])
    assert_same_factors(factors(optimizer), expected)


# Layouts.
