"""Steps under a GradScaler and under autocast: the statistics are those of the unscaled loss."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    asking,
    assert_same_curvature,
    curvature_of,
    each_kronecker,
    each_system,
    factors,
    make,
    same,
    take,
)
from models import ZOO
from reference import cross_entropy
from stepped import SCALERS, assert_near, each_scaler, reference
from torch import Tensor, nn

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


@pytest.mark.refused(
    "AMP float16",
    when="untold of the scaler",
    message="is called by a GradScaler that it was not told of",
)
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
