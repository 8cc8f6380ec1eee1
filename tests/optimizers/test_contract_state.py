"""State: torch saves, loads and copies these optimizers like its own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from combinations import fractional_product
from models import ZOO
from optimizer_cases import (
    BASES,
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    each_system,
    each_variant,
    factors,
    hook_count,
    make,
    same,
    take,
)
from reference import cross_entropy
from saved_states import flat, saved_and_loaded, train
from step_reference import assert_near
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from second_order import DHO2

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

each_base = pytest.mark.parametrize("base", BASES)
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


def assert_both_continue_equally(
    one: tuple[nn.Module, Any], other: tuple[nn.Module, Any], *, start: int
) -> None:
    """Train two models, each with its optimizer, and compare them."""
    for model, optimizer in (one, other):
        train(model, optimizer, 2, start=start)
    assert_near(one[0], other[0], rtol=1e-12, atol=1e-14)


@each_system
@each_base
def test_every_base_receives_the_preconditioned_gradient(System: Any, base: str) -> None:
    """The base sees P where it would see the gradient, and nothing else changes for it."""
    Base, options = BASES[base]
    model = MLP.model()
    twin = MLP.model()
    optimizer = make(System, model, base=Base, **options)
    plain = Base(twin.parameters(), **options)
    for batch in BATCHES:
        before = [p.detach().clone() for p in model.parameters()]
        take(model, optimizer, batch)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()  # what the base was given
        plain.step()
        if System is not DHO2 or optimizer.curvature.step < 0:
            assert same(model, twin)
            continue
        # Newton steps lie in the span of the eigenvectors; outside there are none.
        vectors = curvature_of(optimizer)["eigenpairs"][1]
        scale = optimizer.curvature.base_scale
        steps = []
        for m, s in ((model, 1.0), (twin, scale)):
            moved = flat([p - old for p, old in zip(m.parameters(), before, strict=True)])
            steps.append(s * (moved - vectors.t() @ (vectors @ moved)))
        torch.testing.assert_close(steps[0], steps[1], rtol=1e-9, atol=1e-12)
        inside = vectors @ flat([p.grad for p in model.parameters()])
        torch.testing.assert_close(inside, torch.zeros_like(inside), rtol=0, atol=1e-12)
        twin.load_state_dict(model.state_dict())


@each_kronecker
def test_a_checkpoint_contains_the_number_of_steps(System: Any) -> None:
    """Intervals and schedules of the step continue."""
    requests: list[int] = []

    def damping(step: int) -> float:
        requests.append(step)
        return 0.1

    model = MLP.model()
    optimizer = make(System, model, factor_update_steps=3)
    train(model, optimizer, 3)
    resumed = make(System, model, factor_update_steps=3, damping=damping)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    before = factors(resumed)
    train(model, resumed, 1, start=3)
    assert not torch.equal(factors(resumed)["0"][0], before["0"][0])
    assert set(requests) == {3}
    assert {e["curvature"]["steps"] for e in resumed.state_dict()["state"].values()} == {4}


@each_system
@pytest.mark.parametrize("base", ["SGD", "Adam"])
def test_a_bfloat16_models_checkpoint_keeps_the_dtypes_of_the_curvature(
    System: Any, base: str
) -> None:
    """torch's `load_state_dict` would cast all floating state to the parameter's dtype."""
    Base, options = BASES[base]
    model = MLP.model(torch.bfloat16)
    wide: dict[str, Any] = {"factor_dtype": torch.float32}
    own = {**({} if System is DHO2 else wide), "base": Base, **options}
    optimizer = make(System, model, **own)
    for x, y in BATCHES[:3]:
        take(model, optimizer, (x.bfloat16(), y))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = make(System, copy.deepcopy(model), **own)
    resumed.load_state_dict(saved_and_loaded(saved))
    again = resumed.state_dict()
    assert again["state"].keys() == saved["state"].keys()
    for index, entry in saved["state"].items():
        for part, values in entry.items():
            assert again["state"][index][part].keys() == values.keys()
            for key, value in values.items():
                found = again["state"][index][part][key]
                if isinstance(value, torch.Tensor):
                    assert found.dtype == value.dtype, (part, key)
                    assert torch.equal(found, value), (part, key)
                else:
                    assert found == value
    # The control: a cast to bf16 and back would have shown.
    stored = saved["state"][0]["curvature"]["eigenvectors" if System is DHO2 else "A"]
    assert stored.dtype == torch.float32
    assert not torch.equal(stored.bfloat16().float(), stored)


@each_kronecker
def test_statistics_captured_before_a_load_are_dropped(System: Any) -> None:
    """They belong to the parameters before the load."""
    model = MLP.model()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    saved = copy.deepcopy(optimizer.state_dict())
    before = factors(optimizer)
    x, y = BATCHES[1]
    cross_entropy(model(x), y).backward()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert_same_factors(factors(optimizer), before, rtol=0)


@each_system
def test_optimizers_cannot_be_copied_or_pickled(System: Any) -> None:
    """The error names state_dict() as the remedy."""
    optimizer = make(System, MLP.model())
    message = rf"^{System.__name__} cannot be copied.*load_state_dict"
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps, saved_and_loaded):
        with pytest.raises(TypeError, match=message):
            duplicate(optimizer)


@each_kronecker
def test_an_unreferenced_optimizer_is_deleted(System: Any) -> None:
    """Its hooks are removed without the garbage collector."""
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


@each_variant
@pytest.mark.parametrize("steps", [0, 2])
def test_a_closed_optimizer_continues_as_its_base(
    System: Any, options: dict[str, Any], steps: int
) -> None:
    model = MLP.model()
    twin = MLP.model()
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
        optimizer.step()  # and needs no curvature
    train(twin, plain)
    assert same(model, twin)
    optimizer.load_state_dict(full)
    assert not curvature_of(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert hook_count(copy.deepcopy(model)) == hook_count(model) == 0
    str(optimizer.summary())


def get(model: nn.Module, optimizer: Any, flat: bool) -> Any:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_optimizer_state_dict(model, optimizer, options=options)


@each_system
@pytest.mark.parametrize(
    ("base", "flat"), fractional_product(["SGD", "Adam", "AdamW", "RMSprop"], [False, True], part=2)
)
def test_a_fresh_optimizer_can_be_saved_with_dcp(System: Any, base: str, flat: bool) -> None:
    """torch steps an empty optimizer with lr 0 and zero gradients, which must change nothing."""
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
    assert float(entry.get("average_weight", 1)) == 1


@each_system
@pytest.mark.parametrize(
    ("base", "flat", "into"),
    fractional_product(
        ["SGD", "Adam", "AdamW", "RMSprop"], [False, True], ["fresh", "mid-run"], part=4
    ),
)
def test_a_dcp_round_trip_continues_the_trajectory(
    System: Any, base: str, flat: bool, into: str
) -> None:
    Base, options = BASES[base]
    model = MLP.model()
    twin = MLP.model(seed=1)
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
    assert_both_continue_equally((model, optimizer), (twin, resumed), start=4)


@each_system
def test_a_first_step_with_zero_gradients_counts(System: Any) -> None:
    """Checkpointing code takes such steps with a learning rate of 0, and so may a warm-up."""
    model = MLP.model()
    optimizer = make(System, model, weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["curvature"]["steps"] == 1
