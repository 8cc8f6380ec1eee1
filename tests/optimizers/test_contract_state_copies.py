"""Copies of model and optimizer, and removal: nothing is shared, and nothing is left."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    assert_same_factors,
    curvature_of,
    each_kronecker,
    each_variant,
    factors,
    hook_count,
    make,
    same,
    take,
)
from models import ZOO
from reference import cross_entropy
from states import saved_and_loaded, train
from stepped import assert_near
from torch import nn
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


# Pickle, deepcopy, saving the model, averaged copies.


@each_variant
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps, saved_and_loaded])
def test_an_optimizer_is_neither_copied_nor_pickled(
    System: Any, options: dict[str, Any], duplicate: Callable[[Any], Any]
) -> None:
    """Its state_dict() is the way, and the model's copies are as ever."""
    model = MLP.model()
    optimizer = make(System, model, **options)
    train(model, optimizer, 2)
    with pytest.raises(TypeError, match=rf"^{System.__name__} cannot be copied.*load_state_dict"):
        duplicate(optimizer)
    twin = copy.deepcopy(model)
    resumed = make(System, twin, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, start=2)
    train(twin, resumed, 2, start=2)
    assert_near(model, twin, rtol=1e-12, atol=1e-14)


@each_kronecker
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_an_averaged_copy_of_the_model_captures_nothing(System: Any, fisher: str) -> None:
    """Not even when somebody trains it."""
    model = MLP.model()
    optimizer = make(System, model, fisher=fisher)
    train(model, optimizer, 1)
    ema = AveragedModel(model)
    before = factors(optimizer)
    x, y = BATCHES[1]
    cross_entropy(ema(x), y).backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), before, rtol=0)
    weight = optimizer.state_dict()["state"][0]["curvature"]["average_weight"]
    assert float(weight) == 1
    ema.update_parameters(model)
    train(model, optimizer, 1)  # the model itself is still watched
    assert float(optimizer.state_dict()["state"][0]["curvature"]["average_weight"]) == 1.95


@each_kronecker
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_saving_the_model_takes_no_optimizer_along(System: Any, fisher: str) -> None:
    def size(model: nn.Module) -> int:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        return buffer.tell()

    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 3)).double()
    bare = size(model)
    optimizer = make(System, model, fisher=fisher)
    x, y = torch.randn(8, 100, dtype=torch.float64), torch.randint(3, (8,))
    take(model, optimizer, (x, y))
    assert factors(optimizer)["0"][0].nbytes > 8000  # what would have come along
    assert size(model) < bare + 8000
    loaded = saved_and_loaded(model, weights_only=False)
    assert same(loaded, model)
    before = factors(optimizer)
    take(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1), (x, y))
    optimizer.step()
    assert_same_factors(factors(optimizer), before, rtol=0)


# Removal.


@each_kronecker
def test_an_optimizer_goes_as_soon_as_nobody_has_it(System: Any) -> None:
    """Its hooks with it, before anybody looks for garbage."""
    model = MLP.model()
    optimizer = make(System, model)
    train(model, optimizer, 1)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
        assert hook_count(model) == 0
    finally:
        gc.enable()


@each_kronecker
def test_the_optimizer_goes_while_a_graph_of_its_model_lives(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    x, y = BATCHES[0]
    loss = cross_entropy(model(x), y)
    del optimizer
    gc.collect()
    loss.backward()
    assert hook_count(model) == 0


@each_variant
@pytest.mark.parametrize("steps", [0, 2])
def test_a_closed_optimizer_goes_on_as_its_base(
    System: Any, options: dict[str, Any], steps: int
) -> None:
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, momentum=0.9, **options)
    train(model, optimizer, steps)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        plain.state[q] = copy.deepcopy(dict(optimizer.state[p].get("base", {})))
    full = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    assert hook_count(model) == 0
    assert not curvature_of(optimizer)
    for x, y in BATCHES[:3]:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()  # and asks for no curvature
    train(twin, plain)
    assert same(model, twin)
    optimizer.load_state_dict(full)
    assert not curvature_of(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert hook_count(copy.deepcopy(model)) == hook_count(model) == 0
    str(optimizer.summary())


@each_kronecker
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_two_optimizers_of_one_model_do_not_disturb_each_other(System: Any, fisher: str) -> None:
    """Each captures its own layers' pairs, also after the other is gone."""
    model = MLP.model()
    body = make(System, model[0].parameters(), model=model, fisher=fisher)
    head = make(System, model[4].parameters(), model=model, fisher=fisher)
    train(model, body, 1)
    assert factors(body).keys() == {"0"}
    del head
    gc.collect()
    train(model, body, 1)
    assert float(body.state_dict()["state"][0]["curvature"]["average_weight"]) == 1.95
