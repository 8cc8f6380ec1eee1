"""Steps under a GradScaler and under autocast: the statistics are those of the unscaled loss."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    asking,
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    each_system,
    eigenpairs_only,
    factors,
    make,
    same,
    take,
)
from models import CLASSES, ZOO
from reference import cross_entropy
from stepped import SCALERS, assert_near, each_scaler, reference
from torch import Tensor, nn
from torch.nn import functional

from second_order import DHO2

if TYPE_CHECKING:
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)


def scaled(model: nn.Module, optimizer: Any, scaler: Any, batch: Batch, unscale: bool) -> None:
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model(batch[0]), batch[1])).backward()
    if unscale:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(optimizer, **asking(model, optimizer, batch))
    scaler.update()


@each_system
@pytest.mark.parametrize("unscale", [False, True])
@each_scaler
def test_curvature_with_and_without_loss_scaling_agrees(
    System: Any, scaler: str, unscale: bool
) -> None:
    """Captured gradients carry the scale S and G its square, whatever S is at the time."""
    model, twin = MLP.model(), MLP.model()
    scaling = SCALERS[scaler]()
    optimizer, plain = make(System, model, grad_scaler=scaling), make(System, twin)
    for batch in BATCHES:
        scaled(model, optimizer, scaling, batch, unscale)
        take(twin, plain, batch)
        if System is not DHO2 or plain.curvature.refreshes:
            assert_same_curvature(curvature_of(optimizer), curvature_of(plain))
        assert_near(model, twin)
    if scaling.is_enabled():
        assert scaling.get_scale() > 1024


@pytest.mark.refused("AMP float16", message="is called by a GradScaler that it was not told of")
@each_kronecker
def test_a_scaler_that_the_optimizer_was_not_told_of_is_refused(System: Any) -> None:
    """The captured gradients would carry its scale, and training would stall without a word."""
    model = MLP.model()
    optimizer = make(System, model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"grad_scaler=scaler"):
        scaled(model, optimizer, SCALERS["torch.amp"](), BATCHES[0], unscale=False)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    scaled(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), BATCHES[0], unscale=False)


@eigenpairs_only
@pytest.mark.parametrize("scaler", ["torch.amp", "torch.cpu.amp"])
def test_one_process_of_eigenpairs_need_not_be_told_of_its_scaler(System: Any, scaler: str) -> None:
    """Gradients come unscaled, and the curvature closure's loss was never scaled."""
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    scaling = SCALERS[scaler]()
    for batch in BATCHES:
        scaled(model, optimizer, scaling, batch, unscale=False)
        take(twin, plain, batch)
    assert scaling.get_scale() > 1024
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain))
    assert_near(model, twin)


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


@each_system
@pytest.mark.parametrize("where", ["everywhere", "first layer", "last layer"])
@pytest.mark.parametrize("scaler", ["torch.amp", "torch.cpu.amp"])
def test_a_step_skipped_by_the_scaler_leaves_no_trace(System: Any, scaler: str, where: str) -> None:
    """Statistics of the skipped pass are dropped, also those of layers that saw no infinity."""
    model, twin = MLP.model(), MLP.model()
    scaling, other = SCALERS[scaler](), SCALERS[scaler]()
    own = {"warmup_steps": 0} if System is DHO2 else {}
    optimizer = make(System, model, grad_scaler=scaling, **own)
    plain = make(System, twin, grad_scaler=other, **own)
    scaled(model, optimizer, scaling, BATCHES[0], unscale=False)
    scaled(twin, plain, other, BATCHES[0], unscale=False)
    before, known = copy.deepcopy(model), curvature_of(optimizer)
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


@each_kronecker
def test_an_infinite_gradient_without_a_scaler_leaves_factors_finite_and_is_counted(
    System: Any,
) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    known = factors(optimizer)
    assert optimizer.summary().dropped == 0
    hook = infinite_gradient(model[2])
    x, y = BATCHES[1]
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    hook.remove()
    for p in model.parameters():  # the user repairs gradients; statistics are ours to guard
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    # Layers 2 and 0, which the infinity reached, keep what they knew; layer 4 goes on.
    assert optimizer.summary().dropped == 2
    now = factors(optimizer)
    for name in ("0", "2"):
        assert_same_factors({name: now[name]}, {name: known[name]}, rtol=0)
    assert not torch.equal(now["4"][1], known["4"][1])
    take(model, optimizer, BATCHES[2])
    assert all(bool(f.isfinite().all()) for pair in factors(optimizer).values() for f in pair)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not torch.equal(factors(optimizer)["0"][1], known["0"][1])


@each_kronecker
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_under_autocast_are_float32_and_near_the_float64_reference(
    System: Any, dtype: torch.dtype
) -> None:
    """Activations are rounded; sums of them are not."""
    case = ZOO["conv"]
    batch = case.batch(64)
    expected = reference(case.model(), batch)
    model = case.model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    own = {"factor_dtype": torch.float32, "inv_dtype": torch.float32, "grad_scaler": scaler}
    optimizer = make(System, model, **own)
    with torch.autocast("cpu", dtype):
        loss = cross_entropy(model(batch[0].float()), batch[1])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert optimizer.state_dict()["state"][0]["curvature"]["A"].dtype == torch.float32
    for name, found in factors(optimizer).items():
        for actual, right in zip(found, expected[name], strict=True):
            assert float((actual - right).norm() / right.norm()) < 1e-2
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@eigenpairs_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eigenvalues_under_autocast_are_near_those_of_float64(
    System: Any, dtype: torch.dtype
) -> None:
    """The curvature closure evaluates under autocast as well; vectors are float32."""
    case = ZOO["conv"]
    x, y = case.batch(64)
    exact, model = case.model(), case.model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    own = {"warmup_steps": 0, "smallest": 0, "lanczos_tol": 1e-3, "lanczos_iterations": 60}
    plain, optimizer = make(System, exact, **own), make(System, model, grad_scaler=scaler, **own)
    take(exact, plain, (x, y))

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype):
            return cross_entropy(model(x.float()), y)

    scaler.scale(loss()).backward()
    scaler.step(optimizer, curvature_closure=loss)
    found, right = (o.curvature.eigenvalues for o in (optimizer, plain))
    assert float((found - right).norm() / right.norm()) < 3e-2
    vectors = optimizer.state_dict()["state"][0]["curvature"]["eigenvectors"]
    assert vectors.dtype == torch.float32
    assert_near(model.double(), exact, rtol=0, atol=5e-3)


@each_kronecker
@pytest.mark.parametrize("where", ["outside", "inside", "sampled"])
def test_sums_under_autocast_are_not_rounded_wherever_the_backward_runs(
    System: Any, where: str
) -> None:
    """With inputs that bf16 holds exactly A is exact; a product in bf16 would keep eight bits."""
    model = nn.Linear(5, CLASSES, bias=False)
    x = torch.randint(-9, 10, (64, 5)).float()
    y = torch.randint(CLASSES, (64,))
    own = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
    optimizer = make(System, model, fisher="sampled" if where == "sampled" else "empirical", **own)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(x), y)
        if where == "inside":
            loss.backward()
    if where != "inside":
        loss.backward()
    optimizer.step()
    A = factors(optimizer)[optimizer._curvature.layers.blocks[0].name][0][0]
    exact = x.double().T @ x.double() / 64
    assert torch.equal(A, exact)
    assert not torch.equal(exact.bfloat16().double(), exact)


@each_kronecker
def test_a_residual_added_in_place_under_autocast_is_as_legal_as_without_us(System: Any) -> None:
    """Autocast lets autograd save a bf16 copy, so the layer's float32 input is free to change."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            x += self.layer(x)
            return x

    case = ZOO["mlp"]
    own = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
    results = []
    for attach in (False, True):
        model = nn.Sequential(Residual(), nn.Linear(5, CLASSES))
        torch.nn.init.eye_(model[0].layer.weight)
        optimizer = make(System, model, **own) if attach else None
        x, y = case.batch(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        results.append(optimizer)
    optimizer = results[-1]
    optimizer.step()
    x = functional.layer_norm(case.batch()[0], (5,))
    expected = x.T @ x / len(x)
    found = factors(optimizer)["0.layer"][0][0, :5, :5]
    assert float((found - expected).norm() / expected.norm()) < 1e-2
