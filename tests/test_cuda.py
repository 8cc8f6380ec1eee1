"""On a CUDA device every optimizer does as on the CPU, and quiet steps wait for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, measure
from second_order.kronecker.decompositions import eigh

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
]
EVERY: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 4}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "inverse": (KAISA, {**EVERY, "solver": "inverse"}),
    "eigen": (KAISA, {**EVERY, "solver": "eigen"}),
    "Adam": (KAISA, {**EVERY, "base": torch.optim.Adam, "lr": 1e-3}),
    "drift": (KAISA, {}),
    "DPKFAC": (DPKFAC, EVERY),
    "DistKFAC": (DistKFAC, {**EVERY, "max_staleness": 0}),
    "DHO2": (DHO2, {"curvature_interval": 4, "warmup_steps": 0, "lanczos_iterations": 10}),
    "MRDHO2": (MRDHO2, {"epoch_steps": 4}),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 5)
    ).double()


def trained(System: Any, options: dict[str, Any], device: str, steps: int = 12) -> Tensor:
    """The parameters after some steps."""
    model = network().to(device)
    x = torch.randn(steps, 8, 2, 6, 6, dtype=torch.float64).to(device)
    y = torch.randint(5, (steps, 8)).to(device)
    with System(model, **{"lr": 0.05, **options}) as optimizer:
        if System in (DHO2, MRDHO2):
            optimizer.curvature_closure = lambda: cross_entropy(model(x[0]), y[0])
        for xi, yi in zip(x, y, strict=True):
            optimizer.zero_grad()
            cross_entropy(model(xi), yi).backward()
            optimizer.step()
    return parameters_to_vector(model.parameters()).detach().cpu()


@pytest.mark.parametrize("name", CASES)
def test_a_device_trains_as_the_cpu_does(name: str) -> None:
    System, options = CASES[name]
    here, there = (trained(System, options, device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("System", [KAISA, DPKFAC])
@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_a_quiet_step_waits_for_nothing(System: Any, solver: str) -> None:
    model = network().cuda()
    x, y = torch.randn(8, 2, 6, 6, dtype=torch.float64).cuda(), torch.randint(5, (8,)).cuda()
    optimizer = System(model, lr=0.05, solver=solver, factor_update_steps=100, inv_update_steps=100)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def found_on(device: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
    """The factors of a network of masked tokens, and their eigenvalues."""
    torch.manual_seed(0)
    layers = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11, bias=False)
    model, tokens = nn.Sequential(*layers).to(dtype).to(device), torch.randint(11, (3, 4, 6))
    labels = tokens.roll(1, -1)
    labels[:, 1, 4:] = -100
    loss = None if options["factors"] == "inputs" else masked_loss
    found = measure(model, list(zip(tokens, labels, strict=True)), loss=loss, **options)
    every = {f"{name} {k}": getattr(of, k) for name, of in found.items() for k in of.stored}
    corrected = {f"{name} Λ": of.corrected for name, of in found.items()}
    return {name: t.cpu() for name, t in (every | corrected).items() if t is not None}


def masked_loss(output: Tensor, batch: Any) -> Tensor:
    labels = batch[1].flatten()
    return cross_entropy(output.flatten(0, 1).float(), labels, reduction="none")


@pytest.mark.parametrize("keep", ["device", "cpu"])
@pytest.mark.parametrize(
    ("factors", "dtype", "within"),
    [
        ("inputs", torch.float32, 1e-4),
        ("inputs", torch.bfloat16, 2e-2),
        ("kfac", torch.float32, 1e-4),
        ("kfac", torch.bfloat16, 2e-2),
        ("ekfac", torch.float64, 1e-7),  # another rounding has other eigenvectors
    ],
)
def test_a_device_measures_what_the_cpu_does(
    factors: str, dtype: torch.dtype, within: float, keep: str
) -> None:
    options: dict[str, Any] = {"factors": factors, "keep": keep, "progress": False}
    here, there = (found_on(device, dtype, options) for device in ("cpu", "cuda"))
    assert here.keys() == there.keys()
    for name, factor in here.items():
        size = factor.abs().max().item()
        torch.testing.assert_close(there[name], factor, rtol=within, atol=within * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decompositions_are_sound_on_the_device(dtype: torch.dtype) -> None:
    root = torch.randn(3, 40, 40, dtype=dtype).cuda()
    (vectors, values), sound = eigh(root @ root.mT)
    assert bool(sound.all())
    close = {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(vectors * values.unsqueeze(-2) @ vectors.mT, root @ root.mT, **close)
