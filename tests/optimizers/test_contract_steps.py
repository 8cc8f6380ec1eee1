"""Steps: whatever runs between two calls of `step`, the right statistics are taken, once.

An optimizer of eigenpairs takes none: it trains as if nothing had run.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from contract import (
    asking,
    assert_same_factors,
    each_kronecker,
    each_system,
    factors,
    make,
    same,
    take,
)
from models import ZOO
from reference import cross_entropy, damped_dense_solve, from_matrix, to_matrix
from stepped import inputs_of, reference, weights
from torch import Tensor

from second_order import DHO2

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)
LR, DAMPING = 0.05, 0.1  # those of `make`


@pytest.mark.works("plain")
@each_kronecker
def test_factors_are_those_of_the_batch_and_the_step_is_their_dense_solve(System: Any) -> None:
    """The plain case that the others of this file are compared with; no clip unless asked for."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    before = copy.deepcopy(model)
    cross_entropy(before(BATCHES[0][0]), BATCHES[0][1]).backward()
    optimizer = make(System, model, kl_clip=None)
    take(model, optimizer, BATCHES[0])
    assert_same_factors(factors(optimizer), expected)
    for name, (A, G) in expected.items():
        old, new = before.get_submodule(name), model.get_submodule(name)
        P = damped_dense_solve(A, G, to_matrix(old, old.weight.grad, old.bias.grad), DAMPING)
        weight, bias = from_matrix(old, P)
        torch.testing.assert_close(new.weight, old.weight - LR * weight, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(new.bias, old.bias - LR * bias, rtol=1e-8, atol=1e-12)


@each_system
def test_closure_is_called_once_with_gradients_enabled_and_its_loss_returned(System: Any) -> None:
    """Lightning runs forward and backward inside `step(closure)`."""
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    calls = []
    for x, y in BATCHES:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            calls.append(loss)
            return loss

        if System is DHO2:
            optimizer.curvature_closure = asking(model, optimizer, (x, y))["curvature_closure"]
        with torch.no_grad():
            returned = optimizer.step(closure)
        assert returned is calls[-1]
        take(twin, plain, (x, y))
    assert len(calls) == len(BATCHES)
    assert same(model, twin)
    assert optimizer.step() is None
    assert optimizer.step(closure=lambda: 3.5) == 3.5


@each_kronecker
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward_keeps_the_pair(
    System: Any, set_to_none: bool
) -> None:
    """Lightning does it; what the forward saw is not lost, and counts once."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    optimizer.zero_grad(set_to_none)
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)
    assert weights(optimizer) == {1}


@each_kronecker
def test_a_step_after_zero_grad_alone_takes_nothing_in(System: Any) -> None:
    model, (x, y) = MLP.model(), BATCHES[0]
    optimizer = make(System, model)
    cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(not pair[0].any() for pair in factors(optimizer).values())


@each_kronecker
def test_zero_grad_drops_the_statistics_of_completed_passes_only(System: Any) -> None:
    """As it drops their gradients."""
    model = MLP.model()
    expected = reference(model, BATCHES[1])
    optimizer = make(System, model)
    first, second = (cross_entropy(model(x), y) for x, y in BATCHES[:2])
    first.backward()
    optimizer.zero_grad()
    second.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_statistics_are_taken_only_every_so_many_steps(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, factor_update_steps=2, inv_update_steps=4)
    seen = []
    for batch in BATCHES:
        take(model, optimizer, batch)
        seen.append(weights(optimizer))
    assert seen == [{1}, {1}, {1.95}, {1.95}]


@each_kronecker
def test_two_backwards_through_one_graph_are_two_passes_of_the_same_statistics(System: Any) -> None:
    """`retain_graph=True`: the inputs are still there, and the mean over passes is what it was."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)
    assert weights(optimizer) == {1}


@each_kronecker
def test_nothing_of_a_pass_is_held_after_its_backward(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    alive = inputs_of(model[2])
    gc.disable()
    try:
        take(model, optimizer, BATCHES[0])
        assert [ref.expired() for ref in alive] == [True]
        cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])  # a graph that sees no backward
        assert [ref.expired() for ref in alive] == [True, True]
    finally:
        gc.enable()
