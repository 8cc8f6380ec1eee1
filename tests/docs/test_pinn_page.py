"""The page on PINNs: what the script prints, and which layers are frozen."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from page_scripts import NUMBER, python_blocks, run_script, scripts
from pool import Forks
from torch.nn.functional import mse_loss

from second_order import KAISA, SecondOrderWarning

PAGE = "docs/how-to/pinns.md"


def errors_of(printed: str) -> dict[str, float]:
    found = re.findall(r"^([\w-]+): .* relative error (\S+)$", printed, re.M)
    return {name: float(error) for name, error in found}


def test_the_script_prints_the_lines_and_the_order_of_the_page(
    tmp_path: Path, forks: Forks
) -> None:
    """A thousand steps amplify rounding, so that errors differ between machines."""
    ((code, shown),) = scripts(PAGE)
    printed = run_script(code, tmp_path, forks)
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    for text in (printed, shown):
        errors = errors_of(text)
        assert errors["L-BFGS"] < min(errors["Adam"], errors["KAISA"])
        assert errors["KAISA"] < 1.5 * errors["Adam"]


def train(model: Any, optimizer: Any) -> dict[str, str]:
    """The status of each layer after two steps."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    return {row.name: row.status for row in optimizer.summary().rows}


def test_adapters_train_and_the_frozen_layer_trains_once_it_is_added() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(python_blocks(PAGE)[-1], PAGE, "exec"), names)
    model = names["model"]
    optimizer = names["optimizer"]
    layer = model[0].layer
    frozen = layer.weight.clone()
    adapted = dict.fromkeys(("0.down", "0.up", "2"), "preconditioned")
    assert train(model, optimizer) == adapted
    assert torch.equal(layer.weight, frozen)

    layer.requires_grad_(True)
    with pytest.warns(SecondOrderWarning, match="'0.layer.weight', '0.layer.bias'; add them"):
        assert train(model, optimizer) == adapted
    assert torch.equal(layer.weight, frozen)
    optimizer.add_param_group({"params": [*layer.parameters()]})
    assert train(model, optimizer) == {"0.layer": "preconditioned", **adapted}
    assert not torch.equal(layer.weight, frozen)


def test_a_layer_that_is_frozen_after_construction_trains_when_it_is_unfrozen() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = KAISA(model, lr=1e-3, base=torch.optim.AdamW)
    layer = model[0].requires_grad_(False)
    frozen = layer.weight.clone()
    assert train(model, optimizer)["0"] == "frozen"
    assert torch.equal(layer.weight, frozen)
    layer.requires_grad_(True)
    assert train(model, optimizer)["0"] == "preconditioned"
    assert not torch.equal(layer.weight, frozen)


def train_burgers(network: torch.nn.Module, optimizer: KAISA, steps: int) -> None:
    """Train with derivatives by ``autograd.grad``, and a boundary term with its own pass."""
    points = 2 * torch.rand(200, 2) - 1
    edges = 2 * torch.rand(80, 2) - 1
    edges[:40, 0] = -1.0
    edges[40:, 1] = 0.0
    targets = -torch.sin(torch.pi * edges[:, :1]) * (edges[:, 1:] == 0)
    for _ in range(steps):
        optimizer.zero_grad()
        inside = points.clone().requires_grad_()
        u = network(inside)
        (first,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), inside, create_graph=True)
        residual = first[:, 1:] + u * first[:, :1] - 0.01 / torch.pi * second[:, :1]
        loss = residual.square().mean() + mse_loss(network(edges), targets)
        loss.backward()
        optimizer.step()


def burgers_network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    tanh = torch.nn.Tanh()
    layers = [torch.nn.Linear(2, 20), tanh, torch.nn.Linear(20, 20), tanh, torch.nn.Linear(20, 1)]
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_step_warns_about_derivatives(seed: int) -> None:
    """On seed 1, the boundary term hides them from the first two comparisons."""
    network = burgers_network(seed)
    optimizer = KAISA(network, lr=0.005, base=torch.optim.Adam)
    with pytest.warns(SecondOrderWarning, match="derivatives.*at '0', '2'.*pinns.md.*DHO2"):
        train_burgers(network, optimizer, steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the loss contains derivatives")
        warnings.filterwarnings("ignore", "'")  # of the comparisons
        train_burgers(network, optimizer, steps=20)


@pytest.mark.parametrize("seed", range(4))
def test_debug_finds_derivatives_behind_a_boundary_term(seed: int) -> None:
    """Seed 1 is one on which the first two comparisons find nothing."""
    network = burgers_network(seed)
    optimizer = KAISA(network, lr=0.005, base=torch.optim.Adam, debug=True)
    with pytest.warns(SecondOrderWarning):
        train_burgers(network, optimizer, steps=60)
    assert optimizer.summary().preconditioned_share == 0.0
