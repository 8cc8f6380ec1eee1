"""Parameters that are frozen when an optimizer gets their model, and train later."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from second_order import DHO2, KAISA


def make_model() -> nn.Sequential:
    """A network whose first two layers are frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[:2].requires_grad_(False)
    return model


def take_step(model: nn.Module, optimizer: Any) -> list[str]:
    """Take a step, and return the warnings about frozen parameters."""
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return [str(each.message) for each in caught if "frozen" in str(each.message)]


@pytest.mark.parametrize("system", [KAISA, DHO2])
def test_one_warning_names_the_parameters_that_would_not_train(system: Any) -> None:
    model = make_model()
    optimizer = system(model, lr=0.01)
    assert take_step(model, optimizer) == []
    model[0].requires_grad_(True)
    (message,) = take_step(model, optimizer)
    assert message.startswith(f"{system.__name__} does not train")
    assert "'0.weight', '0.bias'; add them by add_param_group()" in message
    model[1].requires_grad_(True)
    assert take_step(model, optimizer) == []


def test_parameters_of_an_added_group_do_not_warn_but_others_do() -> None:
    model = make_model()
    optimizer = KAISA(model, lr=0.01)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[0].parameters()]})
    assert take_step(model, optimizer) == []
    model[1].requires_grad_(True)
    (message,) = take_step(model, optimizer)
    assert "'1.weight', '1.bias'; add them" in message


def test_parameters_without_a_gradient_do_not_warn() -> None:
    model = make_model()
    optimizer = KAISA(model, lr=0.01)
    model[0].requires_grad_(True)
    model[0].forward = torch.no_grad()(model[0].forward)
    assert take_step(model, optimizer) == []


def test_the_remedy_of_the_warning_trains_them() -> None:
    model = make_model()
    optimizer = KAISA(model.parameters(), model=model, lr=0.01)
    model[0].requires_grad_(True)
    weight = model[0].weight.detach().clone()
    assert take_step(model, optimizer) == []
    assert not torch.equal(weight, model[0].weight)
