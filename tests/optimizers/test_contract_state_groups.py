"""Groups, schedulers and hooks of torch work as with the base."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from models import ZOO
from optimizer_cases import (
    BASES,
    SYSTEMS,
    base_only,
    each_kronecker,
    each_system,
    factors,
    identity_curvature,
    make,
    same,
    take,
)
from reference import cross_entropy
from saved_states import train, unhooked
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


@each_kronecker
def test_an_added_group_has_all_defaults_and_its_layers_are_preconditioned(
    System: Any,
) -> None:
    model = MLP.model()
    first = [*model[0].parameters(), *model[2].parameters()]
    optimizer = make(System, first, model=model, momentum=0.9)
    train(model, optimizer, 2)
    before = optimizer.state_dict()["state"][0]["curvature"]["average_weight"].clone()
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.2})
    assert optimizer.param_groups[1].keys() == optimizer.param_groups[0].keys()
    assert optimizer.param_groups[1]["momentum"] == 0.9
    head = [p.detach().clone() for p in model[4].parameters()]
    train(model, optimizer, 1, start=2)
    assert factors(optimizer).keys() == {"0", "2", "4"}
    for p, old in zip(model[4].parameters(), head, strict=True):
        torch.testing.assert_close(p, old - 0.2 * p.grad)  # p.grad holds P
    after = optimizer.state_dict()["state"][0]["curvature"]["average_weight"]
    torch.testing.assert_close(after, before * 0.95 + 1)  # what was known is kept
    train(model, optimizer, 1, start=3)
    momentum = optimizer.state[model[4].weight]["base"]["momentum_buffer"]
    assert not torch.equal(momentum, model[4].weight.grad)


def wrapped(System: Any, how: str, model: nn.Module, plain: Any, **options: Any) -> Any:
    """A system that steps like its base."""
    if how == "nothing":
        return make(System, model, **base_only(System), **options)
    return identity_curvature(System, model, plain, BATCHES[0], **options)


SCHEDULERS: dict[str, Callable[..., Any]] = {
    "StepLR": partial(StepLR, step_size=2, gamma=0.3),
    "OneCycleLR": partial(OneCycleLR, max_lr=0.08, total_steps=6),
    "CosineAnnealingLR": partial(CosineAnnealingLR, T_max=6),
}


@each_system
@pytest.mark.parametrize(
    ("base", "schedule", "how"),
    fractional_product([*BASES], [*SCHEDULERS], ["nothing", "identity"], part=3),
)
def test_without_curvature_scheduled_training_equals_the_base_bit_for_bit(
    System: Any, base: str, schedule: str, how: str
) -> None:
    Base, options = BASES[base]
    model = MLP.model()
    twin = MLP.model()
    plain = Base(twin.parameters(), **options)
    optimizer = wrapped(System, how, model, plain, base=Base, **options)
    arguments = {"cycle_momentum": base != "Adagrad"} if schedule == "OneCycleLR" else {}
    schedulers = [SCHEDULERS[schedule](opt, **arguments) for opt in (optimizer, plain)]
    rates = set()
    for batch in BATCHES:
        take(model, optimizer, batch)
        take(twin, plain, batch)
        assert same(model, twin)
        rates.add(plain.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
        for key, value in plain.param_groups[0].items():
            if key != "params":
                assert optimizer.param_groups[0][key] == value
    assert len(rates) > 1


SWITCHES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "SGD maximize": (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    "SGD tensor lr": (torch.optim.SGD, {"momentum": 0.9, "lr": torch.tensor(0.02)}),
    "SGD nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "Adam tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.02)}),
    "AdamW fused tensor lr": (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.02)}),
    "RMSprop maximize": (torch.optim.RMSprop, {"maximize": True}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
}


@pytest.mark.parametrize(("System", "switch"), fractional_product(SYSTEMS, [*SWITCHES], part=2))
def test_the_bases_keywords_reach_the_base(System: Any, switch: str) -> None:
    Base, options = SWITCHES[switch]
    options = {"lr": 0.02, **options}
    model = MLP.model()
    twin = MLP.model()
    plain = Base(twin.parameters(), **options)
    optimizer = identity_curvature(System, model, plain, BATCHES[0], base=Base, **options)
    train(model, optimizer, 4)
    train(twin, plain, 4)
    assert same(model, twin)
    name = next(key for key in options if key not in ("momentum", "weight_decay"))
    assert optimizer.param_groups[0][name] == options[name]


@each_system
def test_differentiable_raises_with_the_reason(System: Any) -> None:
    with pytest.raises(ValueError, match="differentiable=True is not supported: the precond"):
        make(System, MLP.model(), differentiable=True)
    make(System, MLP.model(), differentiable=False)


@each_system
def test_step_hooks_run_once_per_step(System: Any) -> None:
    """torch wraps `step` per class, when one is first made: the base's is not called for ours."""
    Base = type("Base", (torch.optim.SGD,), {"step": unhooked(torch.optim.SGD.step)})
    Wrapper = type("Wrapper", (System,), {"step": unhooked(System.step)})
    model = MLP.model()
    calls = []
    optimizer = make(Wrapper, model, base=Base)
    handle = register_optimizer_step_post_hook(lambda opt, *_: calls.append(type(opt)))
    optimizer.register_step_pre_hook(lambda opt, *_: calls.append("pre"))
    try:
        train(model, optimizer, 2)
    finally:
        handle.remove()
    assert calls == ["pre", Wrapper] * 2


@each_system
def test_a_step_inside_backward_raises(System: Any) -> None:
    """Nothing changes."""
    model = MLP.model()
    optimizers = {p: make(System, [p], model=model) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="make one optimizer for the whole model"):
        cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    assert same(model, before)
    assert not any(optimizer.state for optimizer in optimizers.values())
