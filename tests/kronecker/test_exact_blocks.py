"""Exact blocks of gains and biases, against per-example gradients by a loop of autograd."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import reference as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CLASSES, Pool
from optimizer_cases import make, matrices, take
from reference import cross_entropy
from tolerances import near
from torch import Tensor, nn

from second_order import DistKFAC
from second_order.kfac import plan
from second_order.kronecker.exact import ExactBlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from reference import Batch

F64 = torch.float64
few = settings(max_examples=4)
SEEDS = st.integers(0, 2**16)
each_solver = pytest.mark.parametrize("solver", ["eigen", "inverse"])

# Each, and the shape of one of its inputs.
PER_EXAMPLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(5), (5,)),
    "LayerNorm of two axes": (lambda: nn.LayerNorm((2, 3), eps=0.1), (2, 3)),
    "LayerNorm of three axes": (lambda: nn.LayerNorm((2, 1, 3)), (2, 1, 3)),
    "LayerNorm, no bias": (lambda: nn.LayerNorm(5, bias=False), (5,)),
    "RMSNorm": (lambda: nn.RMSNorm(5, eps=0.1), (5,)),
    "RMSNorm of two axes": (lambda: nn.RMSNorm((3, 2)), (3, 2)),
    "GroupNorm of a vector": (lambda: nn.GroupNorm(2, 4), (4,)),
    "GroupNorm of a sequence": (lambda: nn.GroupNorm(2, 4, eps=0.1), (4, 3)),
    "GroupNorm of a map": (lambda: nn.GroupNorm(3, 3), (3, 2, 2)),
}
BATCHED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "BatchNorm1d of a sequence": (lambda: nn.BatchNorm1d(3, eps=0.1), (3, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 2, 3)),
    "BatchNorm2d, no averages": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), (2, 2, 1, 3)),
}
ALL = PER_EXAMPLE | BATCHED


def network(name: str, n: int, seed: int = 0) -> tuple[nn.Sequential, Batch]:
    """The layer, named "0", and a head; gain, bias and running averages are all different."""
    torch.manual_seed(seed)
    build, shape = ALL[name]
    model = nn.Sequential(
        build(), nn.Flatten(), nn.Tanh(), nn.Linear(math.prod(shape), CLASSES)
    ).double()
    with torch.no_grad():
        for tensor in (*model[0].parameters(), *model[0].buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model, (2 * torch.randn(n, *shape, dtype=F64) + 1, torch.randint(CLASSES, (n,)))


def distkfac(params_or_model: Any, **options: Any) -> Any:
    return make(
        DistKFAC, params_or_model, **{"async_inverse": False, "precondition_norms": True, **options}
    )


def exact_block(optimizer: Any, name: str = "0") -> ExactBlock:
    (block,) = (b for b in optimizer._curvature.layers.blocks if b.name == name)
    assert isinstance(block, ExactBlock)
    return block


def curvature(optimizer: Any, name: str = "0") -> Tensor:
    """G of an exact block: a matrix, or its diagonal as one. A is 1."""
    a, g = matrices(exact_block(optimizer, name).ensure_factors())
    assert torch.equal(a, torch.ones_like(a))
    return torch.block_diag(*g)


def after_a_step(model: nn.Module, batch: Batch, **options: Any) -> Any:
    optimizer = distkfac(model, lr=0.0, **options)
    take(model, optimizer, batch)
    return optimizer


def coupled_fisher(model: nn.Sequential, batch: Batch) -> Tensor:
    """The Fisher block of a batch norm in training mode.

    x̂ depends on the whole batch, and the d of an example on its own loss term.
    """
    x, y = batch
    module: Any = model[0]
    ((_, d),) = ref.captured(model, x, lambda outputs: cross_entropy(outputs, y), "0")["0"]
    axes = [0, *range(2, x.dim())]
    mean = x.mean(axes, keepdim=True)
    variance = x.var(axes, unbiased=False, keepdim=True)
    hat = (x - mean) / (variance + module.eps).sqrt()
    rows = []
    for n in range(len(x)):
        gain, bias = (part.reshape(len(part), -1).sum(1) for part in (d[n] * hat[n], d[n]))
        rows.append(len(x) * torch.cat([gain, bias]))
    return sum(torch.outer(row, row) for row in rows) / len(x)  # type: ignore[return-value]


def entries(model: nn.Sequential, part: str) -> slice:
    """Those of gain or bias among all of the layer."""
    gain = model[0].weight.numel()
    return {"both": slice(None), "gain": slice(gain), "bias": slice(gain, None)}[part]


def keep_only(model: nn.Sequential, part: str) -> None:
    """Freeze the rest of the layer."""
    if part == "gain" and getattr(model[0], "bias", None) is not None:
        model[0].bias.requires_grad_(False)
    if part == "bias":
        model[0].weight.requires_grad_(False)


def parts_of(name: str) -> list[str]:
    return ["both"] if "RMS" in name or "no bias" in name else ["both", "gain", "bias"]


# E[ĝ ĝᵀ].


@pytest.mark.parametrize("name", PER_EXAMPLE)
@few
@given(n=st.integers(1, 5), data=st.data(), seed=SEEDS)
def test_an_exact_block_is_the_mean_outer_product_of_gradients(
    name: str, n: int, data: Any, seed: int
) -> None:
    model, batch = network(name, n, seed)
    part = data.draw(st.sampled_from(parts_of(name)))
    at = entries(model, part)
    keep_only(model, part)
    expected = ref.empirical_fisher(model, *batch, cross_entropy, "0")[at, at]
    for approx in ("expand", "reduce"):  # both agree without positions
        near(curvature(after_a_step(model, batch, kfac_approx=approx)), expected)


@pytest.mark.parametrize("name", BATCHED)
@few
@given(n=st.integers(2, 5), part=st.sampled_from(["both", "gain", "bias"]), seed=SEEDS)
def test_batch_norm_in_training_mode_has_an_exact_block(
    name: str, n: int, part: str, seed: int
) -> None:
    model, batch = network(name, n, seed)
    at = entries(model, part)
    expected = coupled_fisher(model, batch)[at, at]
    keep_only(model, part)
    near(curvature(after_a_step(model, batch)), expected)


# Positions of a sequence.


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.RMSNorm(4)], ids=["LayerNorm", "RMSNorm"])
def test_positions_are_expanded_or_reduced(norm: nn.Module) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(norm, nn.Tanh(), nn.Linear(4, CLASSES)).double()
    pooled = nn.Sequential(*plain, Pool())
    x = torch.randn(3, 5, 4, dtype=F64)
    each = torch.randint(CLASSES, (3, 5))
    one = torch.randint(CLASSES, (3,))
    # A loss term a position: positions are examples. One an example: they are parts of it.
    rows = x.flatten(0, 1), each.flatten()
    expand = ref.empirical_fisher(plain, *rows, cross_entropy, "0")
    reduce = ref.empirical_fisher(pooled, x, one, cross_entropy, "0")
    near(curvature(after_a_step(plain, (x, each), kfac_approx="expand")), expand)
    near(curvature(after_a_step(pooled, (x, one), kfac_approx="reduce")), reduce)
    other = curvature(after_a_step(pooled, (x, one), kfac_approx="expand"))
    assert (other - reduce).norm() > 0.05 * reduce.norm()


# What is done with it.


def solved(
    model: nn.Module, batch: Batch, names: list[str], **options: Any
) -> tuple[Tensor, Tensor, Any]:
    """The gradients of some parameters as a vector, the step made of them, the optimizer."""
    params = dict(model.named_parameters())
    x, y = batch
    gradients = torch.autograd.grad(cross_entropy(model(x), y), [params[n] for n in names])
    optimizer = distkfac(model, lr=1.0, damping=0.03, **options)
    before = [params[n].detach().clone() for n in names]
    take(model, optimizer, batch)
    steps = [(b - params[n].detach()).flatten() for b, n in zip(before, names, strict=True)]
    return torch.cat([g.flatten() for g in gradients]), torch.cat(steps), optimizer


@each_solver
@pytest.mark.parametrize("most", [256, 1], ids=["matrix", "diagonal"])
@pytest.mark.parametrize("name", ["LayerNorm of two axes", "RMSNorm", "BatchNorm2d"])
def test_a_step_equals_the_dense_solve(name: str, most: int, solver: str) -> None:
    """Damped by γ itself, with either solver."""
    model, batch = network(name, 4)
    names = [f"0.{each}" for each, _ in model[0].named_parameters()]
    with mock.patch.object(plan, "MAX_EXACT_DIM", most):
        gradient, step, optimizer = solved(model, batch, names, solver=solver)
    F = curvature(optimizer)
    assert len(F) == len(gradient)
    assert (exact_block(optimizer).shape.groups > 1) == (most == 1)
    near(step, ref.dense_solve(F, gradient, 0.03), rtol=1e-8)


def test_the_clip_applies_to_exact_blocks() -> None:
    found = []
    for clip in (None, 1e-7):
        model, batch = network("LayerNorm", 6)
        optimizer = distkfac(model, kl_clip=clip, lr=1.0)
        take(model, optimizer, batch)
        found.append([p.grad.clone() for p in model.parameters()])
    nu = float(found[1][-1].norm() / found[0][-1].norm())
    assert nu < 0.5
    for free, clipped in zip(*found, strict=True):
        torch.testing.assert_close(clipped, nu * free, rtol=1e-9, atol=0)
