"""Steps of compiled models, under torch.func, and in every memory layout; see test_compiling."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    each_variant,
    eigenpairs_only,
    factors,
    make,
    take,
)
from models import CLASSES, ZOO
from reference import cross_entropy, damped_dense_solve, from_matrix, parameters_of, to_matrix
from stepped import assert_near, reference
from torch import Tensor, nn

from second_order import CurvatureError, SecondOrderWarning

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


@eigenpairs_only
@pytest.mark.usefixtures("dynamo")
def test_eigenpairs_do_not_care_when_the_model_was_compiled_nor_give_way_to_it(
    System: Any,
) -> None:
    """Nothing is hung on the model; the closure must evaluate the one that is not compiled."""
    model = MLP.model()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(BATCHES[0][0])
    optimizer = make(System, compiled, warmup_steps=0)
    x, y = BATCHES[0]
    cross_entropy(compiled(x), y).backward()
    with pytest.raises(CurvatureError, match="evaluate the module that is not compiled"):
        optimizer.step(curvature_closure=lambda: cross_entropy(compiled(x), y))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        take(compiled, optimizer, BATCHES[0])
    assert optimizer.curvature.refreshes == 1


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

CONVOLUTIONS = [name for name in ZOO if name.startswith("conv")]
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of a batch


@each_kronecker
@pytest.mark.parametrize(
    ("name", "channels_last"),
    [
        *((name, False) for name in CONVOLUTIONS),
        *((name, True) for name in CONVOLUTIONS if name != "conv1d"),
    ],
)
def test_convolutions_of_every_kind_in_both_layouts(
    System: Any, name: str, channels_last: bool
) -> None:
    """Grouped, dilated, circular, "same": factors from patches one by one, and a dense solve."""
    case = ZOO[name]
    x, y = case.batch(4)
    plain, model = case.model(), case.model()
    if channels_last:
        layout = LAYOUTS[x.dim()]
        model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    expected = reference(plain, (x, y))
    cross_entropy(plain(x), y).backward()
    optimizer = make(System, model)
    take(model, optimizer, (x, y))
    assert_same_factors(factors(optimizer), expected)
    for layer, (A, G) in expected.items():
        old, new = plain.get_submodule(layer), model.get_submodule(layer)
        bias = None if old.bias is None else old.bias.grad
        P = damped_dense_solve(A, G, to_matrix(old, old.weight.grad, bias), DAMPING)
        for start, change, found in zip(
            parameters_of(old), from_matrix(old, P), parameters_of(new), strict=True
        ):
            if found is not None:
                torch.testing.assert_close(found, start - LR * change, rtol=1e-8, atol=1e-10)
