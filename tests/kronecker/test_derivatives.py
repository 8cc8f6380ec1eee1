"""A loss that contains derivatives: one warning, and none if they are not in the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import each_kronecker, make
from torch import Tensor, nn

from second_order import KAISA

Backward = Callable[[nn.Module, Tensor], Any]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def derivative_warnings(optimizer: Any, model: nn.Module, run_backward: Backward) -> list[str]:
    """The warnings about derivatives in three steps."""
    x = torch.randn(10, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            run_backward(model, x.clone().requires_grad_())
            optimizer.step()
    return [str(each.message) for each in caught if "contains derivatives by" in str(each.message)]


def penalize_inputs(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.square().mean() + 0.1 * slope.square().sum()).backward()


def penalize_weights(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    (loss + 0.1 * sum(g.square().sum() for g in gradients)).backward()


def penalize_after_backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    penalty.backward()


@pytest.mark.parametrize("penalize", [penalize_inputs, penalize_weights, penalize_after_backward])
def test_one_warning_names_the_layers(penalize: Backward) -> None:
    model = make_model()
    (message,) = derivative_warnings(make(KAISA, model), model, penalize)
    assert "gradient penalties" in message
    assert "'0', '2'" in message
    assert "docs/how-to/pinns.md" in message
    assert "DHO2" in message


@each_kronecker
def test_each_system_warns(System: Any) -> None:
    model = make_model()
    assert len(derivative_warnings(make(System, model), model, penalize_inputs)) == 1


def test_sampled_labels_do_not_hide_derivatives() -> None:
    model = make_model()
    optimizer = make(KAISA, model, fisher="gaussian")
    assert len(derivative_warnings(optimizer, model, penalize_inputs)) == 1


def log_slope(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    assert slope.requires_grad  # but it is not in the loss
    output.square().mean().backward()


def multiply_by_hessian(model: nn.Module, x: Tensor) -> None:
    params = [*model.parameters()]
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, params, create_graph=True)
    torch.autograd.grad(sum(g.sum() for g in gradients), params, retain_graph=True)
    loss.backward()


def keep_graph(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward(create_graph=True)


@pytest.mark.parametrize("run_backward", [log_slope, multiply_by_hessian, keep_graph])
def test_derivatives_outside_of_the_loss_do_not_warn(run_backward: Backward) -> None:
    model = make_model()
    assert derivative_warnings(make(KAISA, model), model, run_backward) == []
