"""State and groups: what torch's machinery does to an optimizer leaves this one whole."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract import (
    BASES,
    EXACT,
    SYSTEMS,
    assert_same_factors,
    factors,
    hook_count,
    identity_curvature,
    make,
    same,
    take,
)
from models import ZOO
from reference import cross_entropy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel

from second_order import SecondOrderWarning

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.parametrize("System", SYSTEMS, ids=lambda system: system.__name__),
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
]
each_base = pytest.mark.parametrize("base", BASES)
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


def unhooked(step: Any) -> Any:
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def train(model: nn.Module, optimizer: Any, steps: int = 3, start: int = 0) -> None:
    for batch in BATCHES[start : start + steps]:
        take(model, optimizer, batch)


def saved_and_loaded(saved: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


# The base optimizer.


@each_base
def test_every_base_trains_on_the_preconditioned_gradient(System: Any, base: str) -> None:
    """The base sees P where it would see the gradient, and nothing else changes for it."""
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model, base=Base, **options), Base(twin.parameters(), **options)
    for x, y in BATCHES:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()  # what the base was given
        plain.step()
        assert same(model, twin)


@pytest.mark.parametrize(
    "name", ["NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD", "Adafactor"]
)
def test_the_other_bases_of_torch_do_as_they_do_alone(System: Any, name: str) -> None:
    """Each initialises its state in its own way; a checkpoint in between changes nothing."""
    Base = getattr(torch.optim, name)
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, base=Base, lr=0.01, skip_layers=["*"])
    plain = Base(twin.parameters(), lr=0.01)
    train(model, optimizer)
    resumed = make(System, model, base=Base, lr=0.01, skip_layers=["*"])
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(model, resumed, start=3)
    train(twin, plain)
    again = Base(twin.parameters(), lr=0.01)  # torch casts what it loads: so must the control
    again.load_state_dict(saved_and_loaded(plain.state_dict()))
    train(twin, again, start=3)
    assert same(model, twin)


@each_base
def test_base_has_a_nested_state_of_its_own(System: Any, base: str) -> None:
    """`state[p]["base"]` is what the base alone would have in `state[p]`: no key more or less."""
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model, base=Base, **options), Base(twin.parameters(), **options)
    train(model, optimizer)
    train(twin, plain)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert set(optimizer.state[p]) == {"base", "curvature"}
        assert optimizer.state[p]["base"].keys() == plain.state[q].keys()


@each_base
def test_a_checkpoint_continues_the_same_trajectory(System: Any, base: str) -> None:
    Base, options = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **options)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    resumed = make(System, twin, base=Base, **options)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(model, optimizer, start=3)
    train(twin, resumed, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@each_base
def test_a_checkpoint_of_a_fresh_optimizer_loads(System: Any, base: str) -> None:
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, base=Base, **options)
    resumed = make(System, twin, base=Base, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares what it loads
    train(model, optimizer)
    train(twin, resumed)
    assert same(model, twin)


class Counting(torch.optim.SGD):
    """Makes its state at construction, as Adagrad does, and sooner than it is needed."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] += 1
        unhooked(torch.optim.SGD.step)(self, closure)


@pytest.mark.parametrize("how", ["constructed", "loaded", "copied"])
def test_state_that_the_base_makes_at_construction_is_kept(System: Any, how: str) -> None:
    """Adagrad before torch 2.13 relies on it."""
    model = MLP.model()
    optimizer = make(System, model, base=Counting)
    if how == "loaded":
        fresh = make(System, model, base=Counting)
        fresh.load_state_dict(optimizer.state_dict())
        optimizer = fresh
    if how == "copied":
        model, optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2)
    assert optimizer.state[model[0].weight]["base"]["steps"] == 2


def test_checkpoint_gives_the_weight_of_the_running_averages(System: Any) -> None:
    """The average goes on where it was: a restart would weigh the next statistic with 1."""
    model = MLP.model()
    optimizer = make(System, model)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    resumed, restarted = make(System, twin), make(System, copy.deepcopy(model))
    resumed.load_state_dict(optimizer.state_dict())
    assert_same_factors(factors(resumed), factors(optimizer))
    for run in (optimizer, resumed):
        train(model if run is optimizer else twin, run, 1, start=3)
    assert_same_factors(factors(resumed), factors(optimizer))
    assert not factors(restarted)


def test_checkpoint_gives_the_number_of_the_step(System: Any) -> None:
    """Intervals and schedules of the step go on where they were."""
    asked: list[int] = []

    def damping(step: int) -> float:
        asked.append(step)
        return 0.1

    model = MLP.model()
    optimizer = make(System, model, factor_update_steps=3)
    train(model, optimizer, 3)
    resumed = make(System, model, factor_update_steps=3, damping=damping)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    before = factors(resumed)
    train(model, resumed, 1, start=3)
    assert not torch.equal(factors(resumed)["0"][0], before["0"][0])
    assert set(asked) == {3}
    assert {e["curvature"]["steps"] for e in resumed.state_dict()["state"].values()} == {4}


def test_learning_rate_set_after_a_load_reaches_the_base(System: Any) -> None:
    """`load_state_dict` makes new groups and a new state: the base works on those."""
    model = MLP.model()
    optimizer = make(System, model, skip_layers=["*"], lr=0.5)
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    take(model, optimizer, BATCHES[3])
    scheduler.step()
    before = [p.detach().clone() for p in model.parameters()]
    take(model, optimizer, BATCHES[4])
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p, old - 0.25 * p.grad, rtol=1e-12, atol=1e-15)
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    take(model, optimizer, BATCHES[5])
    assert same(model.parameters(), before)


def test_momentum_loaded_is_the_momentum_used(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, skip_layers=["*"], momentum=0.9)
    train(model, optimizer)
    p = next(model.parameters())
    buffer = optimizer.state_dict()["state"][0]["base"]["momentum_buffer"].clone()
    optimizer.load_state_dict(optimizer.state_dict())
    take(model, optimizer, BATCHES[3])
    expected = 0.9 * buffer + p.grad
    torch.testing.assert_close(optimizer.state[p]["base"]["momentum_buffer"], expected)


@pytest.mark.parametrize("base", ["SGD", "Adam"])
def test_checkpoint_of_a_bf16_model_keeps_the_dtypes_and_values_of_factors(
    System: Any, base: str
) -> None:
    """`load_state_dict` casts floating state to the parameter's dtype: factors are kept from it."""
    Base, options = BASES[base]
    model = MLP.model(torch.bfloat16)
    own = {"factor_dtype": torch.float32, "inv_dtype": torch.float32, "base": Base, **options}
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
    A, _ = factors(optimizer)["0"]
    assert saved["state"][0]["curvature"]["A"].dtype == torch.float32
    assert not torch.equal(A.bfloat16().double(), A)


@each_base
def test_torch_load_takes_the_state_with_its_defaults(System: Any, base: str) -> None:
    """Primitives and tensors only, whatever the options were: no class, enum or callable."""
    Base, options = BASES[base]
    model = MLP.model()
    optimizer = make(
        System,
        model,
        base=Base,
        damping=lambda step: 0.9**step,
        inv_update_steps=lambda step: 1 + step,
        grad_scaler=torch.amp.GradScaler("cpu", enabled=False),
        **options,
    )
    StepLR(optimizer, 2)
    train(model, optimizer)
    loaded = saved_and_loaded(optimizer.state_dict(), weights_only=True)
    assert loaded["state"].keys() == optimizer.state_dict()["state"].keys()


def test_checkpoint_of_the_base_alone_loads_as_the_bases_part(System: Any) -> None:
    """Who changes over from SGD keeps the momentum; curvature starts anew."""
    model, twin = MLP.model(), MLP.model()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, plain)
    twin.load_state_dict(model.state_dict())
    optimizer = make(System, twin, momentum=0.9, skip_layers=["*"])
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # torch shares what it loads
    train(model, plain, start=3)
    train(twin, optimizer, start=3)
    assert same(model, twin)

    model = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, 1)
    assert len(factors(optimizer)) == 3


@pytest.mark.parametrize("letter", ["A", "G"])
def test_factors_of_wrong_shape_are_refused_before_anything_changes(
    System: Any, letter: str
) -> None:
    model = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    last = len(saved["state"]) - 2  # the last weight: the layers before it fit
    saved["state"][0]["curvature"]["A"].zero_()
    saved["state"][last]["curvature"][letter] = torch.zeros(1, 2, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"factor {letter} of layer '4' has shape \(1, 2, 2\)"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


def test_groups_of_wrong_size_are_refused_before_anything_changes(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    train(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    other = ZOO["conv"].model()
    theirs = make(System, other)
    take(other, theirs, ZOO["conv"].batch())
    saved = theirs.state_dict()
    saved["param_groups"][0]["params"].append(99)
    with pytest.raises(ValueError, match=r"factor|group"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


# Groups.


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


def test_biases_in_a_group_of_their_own(System: Any) -> None:
    """As for weight decay: the layer is one block all the same, each parameter in its group."""
    model, twin = MLP.model(), MLP.model()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "lr": 0.2},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    optimizer, plain = make(System, groups, model=model, lr=0.1), make(System, twin, lr=0.1)
    before = MLP.model()
    train(model, optimizer, 1)
    train(twin, plain, 1)
    assert_same_factors(factors(optimizer), factors(plain), rtol=0)
    for p, q, old in zip(*(m.parameters() for m in (model, twin, before)), strict=True):
        expected = old + (q - old) * (2 if p.dim() == 2 else 1)
        torch.testing.assert_close(p, expected, rtol=1e-12, atol=1e-14)


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
    assert same(model, twin)


def test_a_group_added_lists_again_nothing_that_was_listed(System: Any) -> None:
    model = ZOO["norms"].model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = [*model[0].parameters(), *model[1].parameters()]
        optimizer = make(System, first, model=model)
        optimizer.add_param_group({"params": list(model[4].parameters())})
        optimizer.add_param_group({"params": list(model[5].parameters())})
    texts = [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]
    assert sum("GroupNorm" in text for text in texts) == 1
    assert sum("LayerNorm" in text for text in texts) == 1


def test_groups_given_are_not_changed(System: Any) -> None:
    model = MLP.model()
    groups = [{"params": list(model.parameters()), "lr": 0.01}]
    make(System, groups, model=model)
    assert groups[0].keys() == {"params", "lr"}


# Schedulers and the base's own switches: with identity curvature nothing may differ from the base.


def wrapped(System: Any, how: str, model: nn.Module, plain: Any, **options: Any) -> Any:
    """A system that should do no more than its base."""
    if how == "no layer":
        return make(System, model, skip_layers=["*"], **options)
    return identity_curvature(System, model, plain, BATCHES[0], **options)


SCHEDULERS: dict[str, Callable[..., Any]] = {
    "StepLR": partial(StepLR, step_size=2, gamma=0.3),
    "OneCycleLR": partial(OneCycleLR, max_lr=0.08, total_steps=6),
    "CosineAnnealingLR": partial(CosineAnnealingLR, T_max=6),
}


@pytest.mark.parametrize("how", ["no layer", "identity factors"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
@each_base
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


def test_real_curvature_is_not_the_base_alone(System: Any) -> None:
    """The control of the test above."""
    model, twin = MLP.model(), MLP.model()
    train(model, make(System, model))
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.05))
    assert not same(model, twin)


def test_a_scheduler_sees_that_step_was_called(System: Any, recwarn: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    scheduler = StepLR(optimizer, 1)
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
        scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


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


def test_a_tensor_learning_rate_changed_in_place_is_followed(System: Any) -> None:
    model = MLP.model()
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = make(System, model, lr=rate, kl_clip=1e-3)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    assert same(model.parameters(), before)


def test_capturable_reaches_the_base(System: Any) -> None:
    """On the CPU Adam itself refuses it at the first step, with its own words."""
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, base=torch.optim.Adam, capturable=True)
    plain = torch.optim.Adam(twin.parameters(), capturable=True)
    assert optimizer.param_groups[0]["capturable"] is True
    with pytest.raises(AssertionError) as expected:
        train(twin, plain, 1)
    with pytest.raises(AssertionError) as found:
        train(model, optimizer, 1)
    assert str(found.value) == str(expected.value)


def test_differentiable_is_refused_with_a_reason(System: Any) -> None:
    with pytest.raises(ValueError, match="differentiable=True is not supported: the precond"):
        make(System, MLP.model(), differentiable=True)
    make(System, MLP.model(), differentiable=False)


# Hooks on the step.


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


# Pickle, deepcopy, saving the model, averaged copies.


def by_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def by_torch_save(pair: Any) -> Any:
    return saved_and_loaded(pair, weights_only=False)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
@each_base
def test_a_copy_of_model_and_optimizer_captures_into_the_copy(
    System: Any, base: str, duplicate: Callable[[Any], Any], fisher: str
) -> None:
    """It continues the trajectory, and neither of the two sees the other's passes."""
    Base, options = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, fisher=fisher, **options)
    scheduler = StepLR(optimizer, 1, gamma=0.9)  # its patched `step` must not come along
    train(model, optimizer, 2)
    scheduler.step()
    twin, copied = duplicate((model, optimizer))
    assert copied.param_groups[0]["params"][0] is next(twin.parameters())
    before, parameters = factors(optimizer), copy.deepcopy(model)
    train(twin, copied, 2, start=2)
    assert_same_factors(factors(optimizer), before, rtol=0)
    assert same(model, parameters)
    train(model, optimizer, 2, start=2)
    assert same(model, twin)
    assert_same_factors(factors(copied), factors(optimizer), rtol=0)
    assert hook_count(twin) == hook_count(model)
    del copied
    gc.collect()
    assert hook_count(twin) == 0


@pytest.mark.parametrize("when", ["fresh", "after a step"])
def test_a_copy_of_a_fused_base_steps(System: Any, when: str) -> None:
    model = MLP.model()
    optimizer = make(System, model, base=torch.optim.AdamW, fused=True)
    if when != "fresh":
        train(model, optimizer, 1)
    twin, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer)
    train(twin, copied)
    assert same(model, twin)


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


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_removing_the_optimizer_removes_its_hooks(System: Any, fisher: str) -> None:
    model = MLP.model()
    model[0].register_forward_hook(lambda *_: None)
    optimizer = make(System, model, fisher=fisher)
    train(model, optimizer, 1)
    assert hook_count(model) > 1
    del optimizer
    gc.collect()
    assert hook_count(model) == 1  # the user's own


def test_the_optimizer_goes_while_a_graph_of_its_model_lives(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    x, y = BATCHES[0]
    loss = cross_entropy(model(x), y)
    del optimizer
    gc.collect()
    loss.backward()
    assert hook_count(model) == 0


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_a_closed_optimizer_goes_on_as_its_base(System: Any, fisher: str) -> None:
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, fisher=fisher, momentum=0.9)
    optimizer.close()
    assert hook_count(model) == 0
    plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer)
    train(twin, plain)
    assert same(model, twin)
    optimizer.load_state_dict(optimizer.state_dict())
    copied_model, _ = copy.deepcopy((model, optimizer))
    assert hook_count(model) == 0
    assert hook_count(copied_model) == 0
    str(optimizer.summary())


def test_a_closed_optimizer_stays_closed_when_a_group_is_added(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model[0].parameters(), model=model)
    optimizer.close()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert hook_count(model) == 0


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


@pytest.mark.parametrize("order", ["first", "second"])
def test_an_optimizer_of_the_same_layers_may_come_and_go(System: Any, order: str) -> None:
    model = MLP.model()
    pair = {"first": make(System, model), "second": make(System, model)}
    kept = pair.pop(order)
    pair.clear()
    gc.collect()
    train(model, kept, 1)
    assert len(factors(kept)) == 3
    assert float(kept.state_dict()["state"][0]["curvature"]["average_weight"]) == 1


# torch.distributed.checkpoint, without processes.

flattened = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
DCP_BASES = pytest.mark.parametrize("base", ["SGD", "Adam", "AdamW", "RMSprop"])


def get(model: nn.Module, optimizer: Any, flat: bool) -> Any:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_optimizer_state_dict(model, optimizer, options=options)


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
    train(model, optimizer, 1)
    weight = optimizer.state_dict()["state"][0]["curvature"]["average_weight"]
    assert float(weight) == 1


@DCP_BASES
def test_distributed_checkpoint_does_to_the_base_what_it_does_to_it_alone(
    System: Any, base: str
) -> None:
    """Adam's own counter moves in the empty step, with or without us."""
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, base=Base, skip_layers=["*"], **options)
    plain = Base(twin.parameters(), **options)
    get(model, optimizer, False)
    get(twin, plain, False)
    train(model, optimizer)
    train(twin, plain)
    assert same(model, twin)


def test_distributed_checkpoint_has_an_entry_for_every_trainable_parameter(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    for entries in (get(model, optimizer, False)["state"],):
        assert entries.keys() == dict(model.named_parameters()).keys()
    train(model, optimizer)
    assert get(model, optimizer, False)["state"].keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("into", ["fresh", "mid-run"])
@flattened
@DCP_BASES
def test_distributed_checkpoint_round_trip_continues_the_trajectory(
    System: Any, base: str, flat: bool, into: str
) -> None:
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model(seed=1)
    optimizer = make(System, model, base=Base, **options)
    resumed = make(System, twin, base=Base, **options)
    train(model, optimizer)
    if into == "mid-run":
        train(twin, resumed, 2)
    saved = saved_and_loaded(get(model, optimizer, flat))
    twin.load_state_dict(saved_and_loaded(get_model_state_dict(model)))
    set_optimizer_state_dict(
        twin, resumed, saved, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    assert_same_factors(factors(resumed), factors(optimizer), rtol=0)
    train(model, optimizer, start=3)
    train(twin, resumed, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


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
    assert_same_factors(factors(resumed), factors(optimizer), rtol=0)
    train(model, optimizer, start=3)
    train(twin, resumed, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("what", ["all", "no layers", "no gradient"])
def test_a_first_step_with_zero_learning_rate_is_a_step(System: Any, what: str) -> None:
    """A warm-up from 0 must not be taken for the empty step of checkpointing code."""
    model = MLP.model()
    optimizer = make(System, model, lr=0.0, skip_layers=["*"] if what == "no layers" else [])
    x, y = BATCHES[0]
    loss = cross_entropy(model(x), y)
    (loss * 0.0 if what == "no gradient" else loss).backward()
    optimizer.step()
    assert len(factors(optimizer)) == (0 if what == "no layers" else 3)
    assert optimizer.state_dict()["state"][0]["curvature"]["steps"] == 1


# The class.


def test_signature_of_step_is_that_of_torch(System: Any) -> None:
    """`step` stays a method that takes a closure: schedulers and scalers call it as such."""
    assert list(inspect.signature(System.step).parameters) == ["self", "closure"]
    assert inspect.ismethod(make(System, MLP.model()).step)
    assert not getattr(make(System, MLP.model()), "_step_supports_amp_scaling", False)
    assert issubclass(System, torch.optim.Optimizer)


def test_defaults_are_the_bases(System: Any) -> None:
    """OneCycleLR and CyclicLR read `defaults["momentum"]` and `defaults["betas"]`."""
    model = MLP.model()
    sgd = make(System, model, momentum=0.8)
    adam = make(System, model, base=torch.optim.Adam, betas=(0.7, 0.8))
    assert sgd.defaults["momentum"] == 0.8
    assert adam.defaults["betas"] == (0.7, 0.8)
    assert EXACT.keys().isdisjoint(sgd.param_groups[0])  # options of ours are no group's
