"""DHO2's curvature closure: how it is given, how it fails, and that a refresh leaves no trace."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from dho2_training import BATCHES, CASE, CURVED, QUICK, closure_of, dho2, go, vector
from optimizer_cases import noted, same
from reference import cross_entropy
from saved_states import are_equal
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from second_order import DHO2, MRDHO2, CurvatureError, SecondOrderWarning


def test_the_curvature_closure_can_be_passed_in_three_ways() -> None:
    trajectories = []
    for how in ("constructor", "assignment", "step", "step before own"):
        model = CASE.model()
        good = closure_of(model)
        bad = closure_of(model, CASE.batch(5, seed=1))
        own = {"constructor": good, "step before own": bad}.get(how)
        optimizer = dho2(model, curvature_closure=own, momentum=0.9, **QUICK)
        if how == "assignment":
            optimizer.curvature_closure = good
        options = {"curvature_closure": good} if how.startswith("step") else {}
        trajectories.append([])
        for x, y in BATCHES:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step(**options)
            trajectories[-1].append(vector(model))
    for trajectory in trajectories[1:]:
        assert same(trajectory, trajectories[0])


@pytest.mark.filterwarnings("ignore:MRDHO2 with 1 process")
@pytest.mark.parametrize(("System", "step"), [(DHO2, 200), (MRDHO2, 100)])
def test_a_missing_closure_is_reported_at_the_first_step(System: Any, step: int) -> None:
    """Once, with the step that needs it. Not if nothing needs one."""
    messages = []
    for options in ({}, {"curvature_closure": lambda: None}, {"num_largest": 0}):
        model = CASE.model()
        optimizer = System(model, lr=0.1, **options)
        with noted() as warned:
            go(model, optimizer, BATCHES[:2])
        messages.append(warned)
    ((message,), *others) = messages
    assert "no curvature closure yet" in message
    assert f"at step {step}, requires one; pass " in message
    assert others == [[], []]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


def freed(model: nn.Module) -> Tensor:
    loss = closure_of(model)()
    loss.backward()
    return loss


def broken(model: nn.Module) -> Tensor:
    raise KeyError("the file of the batch")


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "freed": (freed, CurvatureError, r"without calling backward\(\)"),
    "vector": (lambda model: model(CURVED[0]).sum(1), CurvatureError, r"\(30,\).*mean or its sum"),
    "detached": (lambda model: closure_of(model)().detach(), CurvatureError, "detach"),
    "none": (lambda model: None, CurvatureError, "NoneType"),
    "once": (
        lambda model: cross_entropy(Once.apply(model(CURVED[0])), CURVED[1]),
        CurvatureError,
        "Once.*once_differentiable.*differences",
    ),
    "its own": (broken, KeyError, "the file of the batch"),
    "missing": (None, CurvatureError, r"DHO2\(..., curv.*assign.*step\(curv.*=f\)"),
}


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", WRONG)
def test_a_failed_closure_changes_nothing_and_training_continues(name: str, first: bool) -> None:
    function, error, text = WRONG[name]
    at = 2 if first else 6
    kwargs = {"momentum": 0.9, **QUICK}
    model = CASE.model()
    straight = CASE.model()
    expected = go(straight, dho2(straight, **kwargs), BATCHES)
    optimizer = dho2(model, **kwargs)
    go(model, optimizer, BATCHES[:at])
    x, y = BATCHES[at]
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.curvature_closure = None if function is None else lambda: function(model)
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    before = copy.deepcopy(
        (model.state_dict(), optimizer.state_dict(), optimizer.curvature.products)
    )
    random = torch.get_rng_state()
    with pytest.raises(error, match=text):
        optimizer.step()
    assert are_equal(before[0], model.state_dict())
    assert are_equal(before[1], optimizer.state_dict())
    assert before[2] == optimizer.curvature.products
    assert torch.equal(random, torch.get_rng_state())
    for p, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, values)
    optimizer.curvature_closure = closure_of(model)
    optimizer.step()
    assert same([vector(model), *go(model, optimizer, BATCHES[at + 1 :])], expected[at:])


def test_non_finite_curvature_keeps_the_last_eigenpairs() -> None:
    """It is as if the refresh had not been due, but for the counts and the warning."""
    steady = CASE.model()
    model = CASE.model()
    expected = go(steady, dho2(steady, momentum=0.9, curvature_interval=100), BATCHES[:10])
    optimizer = dho2(model, momentum=0.9)
    found = go(model, optimizer, BATCHES[:6])
    values = optimizer.curvature.eigenvalues
    optimizer.curvature_closure = lambda: closure_of(model)() * math.inf
    with pytest.warns(
        SecondOrderWarning,
        match="step 6 failed, .*was decomposed wrongly: the last eigenpairs stay in use",
    ):
        found += go(model, optimizer, BATCHES[6:10])
    assert same(found, expected)
    report = optimizer.curvature
    assert torch.equal(report.eigenvalues, values)
    assert (report.failures, report.refreshes, report.step) == (1, 2, 6)
    assert "failed: 1" in str(optimizer.summary())
