"""Groups, schedulers and hooks: what torch's machinery does to a base it does to this one."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    BASES,
    KAISA,
    PLAIN,
    base_only,
    each_kronecker,
    each_system,
    factors,
    identity_curvature,
    make,
    same,
    take,
)
from models import ZOO
from reference import cross_entropy
from states import train, unhooked
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from woven import woven

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


@each_kronecker
def test_a_group_added_in_mid_run_has_all_defaults_and_its_layers_are_preconditioned(
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


@each_system
@pytest.mark.parametrize("form", ["generators", "lists", "one tensor", "named"])
def test_groups_may_be_given_in_every_form_torch_takes(System: Any, form: str) -> None:
    model, twin = MLP.model(), MLP.model()
    parts: dict[str, Callable[[nn.Module], Any]] = {
        "generators": lambda layer: [{"params": layer.parameters(), "lr": 0.01}],
        "lists": lambda layer: [{"params": list(layer.parameters()), "lr": 0.01}],
        "one tensor": lambda layer: [{"params": p, "lr": 0.01} for p in layer.parameters()],
        "named": lambda layer: [{"params": layer.named_parameters(), "lr": 0.01}],
    }
    layers = [model[0], model[2], model[4]]
    groups = [group for layer in layers for group in parts[form](layer)]
    optimizer = make(System, groups, model=model)
    expected = make(System, twin, lr=0.01)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6
    train(model, optimizer)
    train(twin, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def wrapped(System: Any, how: str, model: nn.Module, plain: Any, **options: Any) -> Any:
    """A system that should do no more than its base."""
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
    woven([*BASES], [*SCHEDULERS], ["nothing", "identity"], part=2),
)
def test_under_a_scheduler_bitwise_equal_to_the_base_alone(
    System: Any, base: str, schedule: str, how: str
) -> None:
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
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


@each_system
def test_real_curvature_is_not_the_base_alone(System: Any) -> None:
    """The control of the test above."""
    model, twin = MLP.model(), MLP.model()
    train(model, make(System, model))
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.05))
    assert not same(model, twin)


SWITCHES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "SGD one by one": (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "SGD maximize": (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    "SGD tensor lr": (torch.optim.SGD, {"momentum": 0.9, "lr": torch.tensor(0.02)}),
    "SGD nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam foreach": (torch.optim.Adam, {"foreach": True}),
    "Adam fused": (torch.optim.Adam, {"fused": True}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "Adam maximize": (torch.optim.Adam, {"maximize": True}),
    "Adam tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.02)}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW fused tensor lr": (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.02)}),
    "RMSprop foreach": (torch.optim.RMSprop, {"foreach": True}),
    "RMSprop maximize": (torch.optim.RMSprop, {"maximize": True}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "Adagrad foreach": (torch.optim.Adagrad, {"foreach": True}),
}


@each_system
@pytest.mark.parametrize("switch", SWITCHES)
def test_the_bases_switches_pass_through(System: Any, switch: str) -> None:
    Base, options = SWITCHES[switch]
    options = {"lr": 0.02, **options}
    model, twin = MLP.model(), MLP.model()
    plain = Base(twin.parameters(), **options)
    optimizer = identity_curvature(System, model, plain, BATCHES[0], base=Base, **options)
    train(model, optimizer, 4)
    train(twin, plain, 4)
    assert same(model, twin)
    name = next(key for key in options if key not in ("momentum", "weight_decay"))
    assert optimizer.param_groups[0][name] == options[name]


@each_system
def test_differentiable_is_refused_with_a_reason(System: Any) -> None:
    with pytest.raises(ValueError, match="differentiable=True is not supported: the precond"):
        make(System, MLP.model(), differentiable=True)
    make(System, MLP.model(), differentiable=False)


@each_system
@pytest.mark.parametrize("wrapper_first", [True, False])
def test_global_and_own_step_hooks_fire_once_a_step(System: Any, wrapper_first: bool) -> None:
    """In either order of construction: torch wraps `step` per class, when one is first made."""
    Base = type("Base", (torch.optim.SGD,), {"step": unhooked(torch.optim.SGD.step)})
    Wrapper = type("Wrapper", (System,), {"step": unhooked(System.step)})
    model, twin = MLP.model(), MLP.model()

    def wrap() -> Any:
        return make(Wrapper, model, base=Base)

    optimizer = wrap() if wrapper_first else None
    alone = Base(twin.parameters(), lr=0.1)
    optimizer = optimizer or wrap()
    calls: Counter[tuple[str, str]] = Counter()

    def count(name: str) -> Any:
        return lambda opt, *_: calls.update([(name, type(opt).__name__)])

    handles = [
        register_optimizer_step_pre_hook(count("global pre")),
        register_optimizer_step_post_hook(count("global post")),
    ]
    optimizer.register_step_pre_hook(count("pre"))
    optimizer.register_step_post_hook(count("post"))
    try:
        train(model, optimizer, 2)
        assert calls == dict.fromkeys(
            [(name, "Wrapper") for name in ("global pre", "global post", "pre", "post")], 2
        )
        train(twin, alone, 1)
        assert calls["global post", "Base"] == 1
    finally:
        for handle in handles:
            handle.remove()


KNOWN = inspect.signature(KAISA).parameters
OPTIONS = {k: v for k, v in PLAIN.items() if k in KNOWN and k != "lr"}


class FastaiWrapper:
    """How fastai wraps torch's optimizers: groups of lists, hyperparameters by another name."""

    def __init__(self, params: Any, opt: Any, **kwargs: Any) -> None:
        self.opt = opt([{"params": list(part)} for part in params], **kwargs)

    def set_hypers(self, lr: float) -> None:
        for group in self.opt.param_groups:
            group["lr"] = lr

    def clear_state(self) -> None:
        self.opt.state = defaultdict(dict, {})


def test_fastai() -> None:
    model = MLP.model()
    opt_func = partial(
        FastaiWrapper, opt=partial(KAISA, model=model, **{**OPTIONS, "momentum": 0.9})
    )
    wrapper = opt_func([model[:2].parameters(), model[2:].parameters()], lr=0.5)
    wrapper.set_hypers(0.05)
    twin = MLP.model()
    optimizer = make(KAISA, twin, momentum=0.9)
    for batch in BATCHES[:2]:
        take(model, wrapper.opt, batch)
        take(twin, optimizer, batch)
    assert same(model, twin)
    wrapper.clear_state()  # fastai does so where a model is loaded without its optimizer
    assert not wrapper.opt.state
    for group in wrapper.opt.param_groups:
        for p in group["params"]:
            assert "momentum_buffer" not in wrapper.opt._base.state[p]
    take(model, wrapper.opt, BATCHES[2])
    buffer = wrapper.opt.state[model[0].weight]["base"]["momentum_buffer"]
    torch.testing.assert_close(buffer, model[0].weight.grad)  # of one step
    assert wrapper.opt.state_dict()["state"][0]["base"]


@each_system
def test_a_step_from_a_hook_within_backward_is_refused(System: Any) -> None:
    """Before anything changes; and one step later all is as if it had not been tried."""
    model = MLP.model()
    optimizers = {p: make(System, [p], model=model) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="Make one optimizer of the model"):
        cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    assert same(model, before)
    assert not any(optimizer.state for optimizer in optimizers.values())
