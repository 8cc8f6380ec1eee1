"""Checkpoints by torch.distributed.checkpoint, without processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract import (
    BASES,
    assert_same_curvature,
    base_only,
    curvature_of,
    each_system,
    make,
    same,
)
from models import ZOO
from states import saved_and_loaded, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from woven import woven

from second_order import DHO2

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]

flattened = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
DCP_BASES = pytest.mark.parametrize("base", ["SGD", "Adam", "AdamW", "RMSprop"])


def get(model: nn.Module, optimizer: Any, flat: bool) -> Any:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_optimizer_state_dict(model, optimizer, options=options)


@each_system
@flattened
@DCP_BASES
def test_distributed_checkpoint_of_a_fresh_optimizer(System: Any, base: str, flat: bool) -> None:
    """It steps an empty optimizer with lr 0 and zero gradients: nothing may move by that."""
    Base, options = BASES[base]
    model = MLP.model()
    before = copy.deepcopy(model)
    optimizer = make(System, model, base=Base, **options)
    assert get(model, optimizer, flat)
    assert same(model, before)
    assert optimizer.param_groups[0]["lr"] == options["lr"]
    for entry in optimizer.state_dict()["state"].values():
        assert entry["curvature"]["steps"] == 0
        assert not float(entry["curvature"].get("average_weight", 0))
        assert entry["curvature"].get("refreshed_at", -1) == -1
    train(model, optimizer, 1)
    entry = optimizer.state_dict()["state"][0]["curvature"]
    assert entry["steps"] == 1
    if System is DHO2:  # that was the step before the first refresh
        assert entry["refreshed_at"] == -1
        train(model, optimizer, 1, start=1)
        assert optimizer.curvature.step == 1
    else:
        assert float(entry["average_weight"]) == 1


@each_system
@DCP_BASES
def test_distributed_checkpoint_does_to_the_base_what_it_does_to_it_alone(
    System: Any, base: str
) -> None:
    """Adam's own counter moves in the empty step, with or without us."""
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, base=Base, **base_only(System), **options)
    plain = Base(twin.parameters(), **options)
    get(model, optimizer, False)
    get(twin, plain, False)
    train(model, optimizer)
    train(twin, plain)
    assert same(model, twin)


@each_system
@pytest.mark.parametrize(
    ("base", "flat", "into"),
    woven(["SGD", "Adam", "AdamW", "RMSprop"], [False, True], ["fresh", "mid-run"], part=2),
)
def test_distributed_checkpoint_round_trip_continues_the_trajectory(
    System: Any, base: str, flat: bool, into: str
) -> None:
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model(seed=1)
    optimizer = make(System, model, base=Base, **options)
    resumed = make(System, twin, base=Base, **options)
    train(model, optimizer, 4)
    if into == "mid-run":
        train(twin, resumed, 2)
    saved = saved_and_loaded(get(model, optimizer, flat))
    twin.load_state_dict(saved_and_loaded(get_model_state_dict(model)))
    set_optimizer_state_dict(
        twin, resumed, saved, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    assert_same_curvature(curvature_of(resumed), curvature_of(optimizer), rtol=0)
    train(model, optimizer, 2, start=4)
    train(twin, resumed, 2, start=4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@each_system
def test_distributed_checkpoint_on_disk(System: Any, tmp_path: Any) -> None:
    """Written in mid-run, read into a fresh optimizer's state in place."""
    model, twin = MLP.model(), MLP.model(seed=1)
    optimizer, resumed = (make(System, m, base=torch.optim.Adam) for m in (model, twin))
    train(model, optimizer)
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get(model, optimizer, True)},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    state = {"model": get_model_state_dict(twin), "optimizer": get(twin, resumed, True)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(twin, resumed, state["optimizer"], options=options)
    twin.load_state_dict(state["model"])
    assert_same_curvature(curvature_of(resumed), curvature_of(optimizer), rtol=0)
    train(model, optimizer, start=3)
    train(twin, resumed, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@each_system
def test_a_first_step_with_zero_gradients_is_a_step(System: Any) -> None:
    """Checkpointing code's come with a learning rate of 0, as a warm-up's first step may."""
    model = MLP.model()
    optimizer = make(System, model, weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["curvature"]["steps"] == 1
