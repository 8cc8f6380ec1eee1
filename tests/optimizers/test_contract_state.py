"""State and groups: what torch's machinery does to an optimizer leaves this one whole."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract import (
    BASES,
    EXACT,
    PAIRS,
    asking,
    assert_same_curvature,
    assert_same_factors,
    base_only,
    curvature_of,
    each_kronecker,
    each_system,
    each_variant,
    eigenpairs_only,
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

from second_order import DHO2, SecondOrderWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
each_base = pytest.mark.parametrize("base", BASES)
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


def unhooked(step: Any) -> Any:
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train(model: nn.Module, optimizer: Any, steps: int = 3, start: int = 0) -> None:
    for batch in BATCHES[start : start + steps]:
        take(model, optimizer, batch)


def saved_and_loaded(saved: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


# The base optimizer.


@each_system
@each_base
def test_every_base_trains_on_the_preconditioned_gradient(System: Any, base: str) -> None:
    """The base sees P where it would see the gradient, and nothing else changes for it."""
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model, base=Base, **options), Base(twin.parameters(), **options)
    for batch in BATCHES:
        before = [p.detach().clone() for p in model.parameters()]
        take(model, optimizer, batch)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()  # what the base was given
        plain.step()
        if System is not DHO2 or optimizer.curvature.step < 0:
            assert same(model, twin)
            continue
        # There are Newton steps besides, in the span of the eigenvectors: outside there are none.
        vectors, scale = curvature_of(optimizer)["eigenpairs"][1], optimizer.curvature.rest_scale
        steps = []
        for m, s in ((model, 1.0), (twin, scale)):
            moved = flat([p - old for p, old in zip(m.parameters(), before, strict=True)])
            steps.append(s * (moved - vectors.t() @ (vectors @ moved)))
        torch.testing.assert_close(steps[0], steps[1], rtol=1e-9, atol=1e-12)
        inside = vectors @ flat([p.grad for p in model.parameters()])
        torch.testing.assert_close(inside, torch.zeros_like(inside), rtol=0, atol=1e-12)
        twin.load_state_dict(model.state_dict())


@each_system
@pytest.mark.parametrize(
    "name", ["NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD", "Adafactor"]
)
def test_the_other_bases_of_torch_do_as_they_do_alone(System: Any, name: str) -> None:
    """Each initialises its state in its own way; a checkpoint in between changes nothing."""
    Base = getattr(torch.optim, name)
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, base=Base, lr=0.01, **base_only(System))
    plain = Base(twin.parameters(), lr=0.01)
    train(model, optimizer)
    resumed = make(System, model, base=Base, lr=0.01, **base_only(System))
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(model, resumed, start=3)
    train(twin, plain)
    again = Base(twin.parameters(), lr=0.01)  # torch casts what it loads: so must the control
    again.load_state_dict(saved_and_loaded(plain.state_dict()))
    train(twin, again, start=3)
    assert same(model, twin)


@each_system
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


@each_system
@each_base
def test_a_checkpoint_continues_the_same_trajectory(System: Any, base: str) -> None:
    Base, options = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **options)
    train(model, optimizer, 4)
    twin = copy.deepcopy(model)
    resumed = make(System, twin, base=Base, **options)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(model, optimizer, 2, start=4)
    train(twin, resumed, 2, start=4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@each_system
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


@each_system
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


@each_system
def test_checkpoint_gives_what_is_known_of_the_curvature(System: Any) -> None:
    """An average goes on where it was: a restart would weigh the next statistic with 1."""
    model = MLP.model()
    optimizer = make(System, model)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    resumed, restarted = make(System, twin), make(System, copy.deepcopy(model))
    resumed.load_state_dict(optimizer.state_dict())
    assert_same_curvature(curvature_of(resumed), curvature_of(optimizer))
    for run in (optimizer, resumed):
        train(model if run is optimizer else twin, run, 1, start=3)
    assert_same_curvature(curvature_of(resumed), curvature_of(optimizer))
    assert not curvature_of(restarted)


@each_kronecker
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


@eigenpairs_only
def test_checkpoint_gives_the_numbers_of_the_step_and_of_the_last_refresh(System: Any) -> None:
    """The next refresh is due where it was, and schedules go on."""
    asked: list[tuple[str, int]] = []

    def schedule(name: str, value: float) -> Callable[[int], Any]:
        return lambda step: asked.append((name, step)) or value

    model = MLP.model()
    optimizer = make(System, model, curvature_interval=3)
    train(model, optimizer, 3)  # refreshed at step 1
    resumed = make(
        System,
        model,
        curvature_interval=schedule("interval", 3),
        newton_scale=schedule("scale", 0.5),
    )
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(model, resumed, 1, start=3)
    assert asked == [("interval", 3), ("scale", 3)]
    assert resumed.curvature.step == 1
    train(model, resumed, 1, start=4)
    assert resumed.curvature.step == 4
    entries = resumed.state_dict()["state"].values()
    assert {(e["curvature"]["steps"], e["curvature"]["refreshed_at"]) for e in entries} == {(5, 4)}


@each_system
def test_learning_rate_set_after_a_load_reaches_the_base(System: Any) -> None:
    """`load_state_dict` makes new groups and a new state: the base works on those."""
    model = MLP.model()
    optimizer = make(System, model, **base_only(System), lr=0.5)
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


@each_system
def test_momentum_loaded_is_the_momentum_used(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, **base_only(System), momentum=0.9)
    train(model, optimizer)
    p = next(model.parameters())
    buffer = optimizer.state_dict()["state"][0]["base"]["momentum_buffer"].clone()
    optimizer.load_state_dict(optimizer.state_dict())
    take(model, optimizer, BATCHES[3])
    expected = 0.9 * buffer + p.grad
    torch.testing.assert_close(optimizer.state[p]["base"]["momentum_buffer"], expected)


@each_system
@pytest.mark.parametrize("base", ["SGD", "Adam"])
def test_checkpoint_of_a_bf16_model_keeps_the_dtypes_and_values_of_curvature(
    System: Any, base: str
) -> None:
    """`load_state_dict` casts floating state to the parameter's dtype: ours is kept from it."""
    Base, options = BASES[base]
    model = MLP.model(torch.bfloat16)
    wide: dict[str, Any] = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
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
    kept = saved["state"][0]["curvature"]["eigenvectors" if System is DHO2 else "A"]
    assert kept.dtype == torch.float32
    assert not torch.equal(kept.bfloat16().float(), kept)


@each_system
@each_base
def test_torch_load_takes_the_state_with_its_defaults(System: Any, base: str) -> None:
    """Primitives and tensors only, whatever the options were: no class, enum or callable."""
    Base, options = BASES[base]
    model = MLP.model()
    scale, interval = ("damping", "inv_update_steps")
    if System is DHO2:
        scale, interval = ("newton_scale", "curvature_interval")
    schedules = {scale: lambda step: 0.9**step, interval: lambda step: 1 + step}
    optimizer = make(
        System,
        model,
        base=Base,
        **schedules,
        grad_scaler=torch.amp.GradScaler("cpu", enabled=False),
        **options,
    )
    StepLR(optimizer, 2)
    train(model, optimizer)
    loaded = saved_and_loaded(optimizer.state_dict(), weights_only=True)
    assert loaded["state"].keys() == optimizer.state_dict()["state"].keys()


@each_system
def test_checkpoint_of_the_base_alone_loads_as_the_bases_part(System: Any) -> None:
    """Who changes over from SGD keeps the momentum; curvature starts anew."""
    model, twin = MLP.model(), MLP.model()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, plain)
    twin.load_state_dict(model.state_dict())
    optimizer = make(System, twin, momentum=0.9, **base_only(System))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # torch shares what it loads
    train(model, plain, start=3)
    train(twin, optimizer, start=3)
    assert same(model, twin)

    model = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, 2)
    assert len(curvature_of(optimizer)) == (1 if System is DHO2 else 3)


@each_kronecker
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


@eigenpairs_only
@pytest.mark.parametrize(
    ("rows", "shape", "message"),
    [
        (4, (2, 2), r"eigenvectors of shape \(2, 2\) for a parameter of shape \(3, 6\)"),
        (2, (3, 6), r"\[2, 4\] eigenvectors for one model"),
    ],
)
def test_eigenvectors_of_wrong_shape_are_refused_before_anything_changes(
    System: Any, rows: int, shape: tuple[int, ...], message: str
) -> None:
    model = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    saved["state"][0]["curvature"]["eigenvectors"].zero_()
    saved["state"][4]["curvature"]["eigenvectors"] = torch.zeros(rows, *shape)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@each_system
def test_groups_of_wrong_size_are_refused_before_anything_changes(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    train(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    other = ZOO["conv"].model()
    theirs = make(System, other)
    for batch in ZOO["conv"].batches(2):
        take(other, theirs, batch)
    saved = theirs.state_dict()
    saved["param_groups"][0]["params"].append(99)
    with pytest.raises(ValueError, match=r"factor|eigenvectors|group"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


@each_kronecker
def test_statistics_from_before_a_load_do_not_count(System: Any) -> None:
    """They are of other parameters than those that come with the checkpoint."""
    model = MLP.model()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    saved, before = copy.deepcopy(optimizer.state_dict()), factors(optimizer)
    x, y = BATCHES[1]
    cross_entropy(model(x), y).backward()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert_same_factors(factors(optimizer), before, rtol=0)


# Groups.


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


@eigenpairs_only
def test_a_group_added_in_mid_run_is_spanned_from_the_next_refresh_on(System: Any) -> None:
    """Until then the base goes on alone, and says so."""
    model = MLP.model()
    first = [*model[0].parameters(), *model[2].parameters()]
    optimizer = make(System, first, model=model, momentum=0.9)
    train(model, optimizer, 2)  # refreshed at step 1
    buffer = optimizer.state[model[0].weight]["base"]["momentum_buffer"].clone()
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.2})
    assert optimizer.param_groups[1].keys() == optimizer.param_groups[0].keys()
    assert optimizer.param_groups[1]["momentum"] == 0.9
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(SecondOrderWarning, match="eigenpairs are dropped, and SGD goes on alone"):
        train(model, optimizer, 1, start=2)
    for p, old, rate in zip(model.parameters(), before, [0.05] * 4 + [0.2] * 2, strict=True):
        momentum = 0.9 * buffer + p.grad if p is model[0].weight else None
        if momentum is not None or rate == 0.2:
            step = p.grad if momentum is None else momentum
            torch.testing.assert_close(p, old - rate * step, rtol=1e-12, atol=1e-14)
    train(model, optimizer, 1, start=3)
    assert optimizer.curvature.step == 3
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, len(flat(model.parameters())))
    assert all("eigenvectors" in e["curvature"] for e in optimizer.state_dict()["state"].values())


@eigenpairs_only
@pytest.mark.parametrize("base", ["SGD", "Adam"])
def test_groups_cut_the_vector_and_change_nothing(System: Any, base: str) -> None:
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
    groups = [{"params": list(layer.parameters())} for layer in model if list(layer.parameters())]
    optimizer = make(System, groups, base=Base, **options)
    plain = make(System, twin, base=Base, **options)
    train(model, optimizer, 6)
    train(twin, plain, 6)
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain), rtol=1e-7)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-11)


@each_kronecker
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


@each_kronecker
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


@each_system
def test_groups_given_are_not_changed(System: Any) -> None:
    model = MLP.model()
    groups = [{"params": list(model.parameters()), "lr": 0.01}]
    make(System, groups, model=model)
    assert groups[0].keys() == {"params", "lr"}


# Schedulers and the base's own switches: with identity curvature nothing may differ from the base.


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
@pytest.mark.parametrize("how", ["nothing", "identity"])
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


@each_system
def test_real_curvature_is_not_the_base_alone(System: Any) -> None:
    """The control of the test above."""
    model, twin = MLP.model(), MLP.model()
    train(model, make(System, model))
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.05))
    assert not same(model, twin)


@each_system
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


@eigenpairs_only
@pytest.mark.parametrize("switch", [s for s in SWITCHES if "maximize" not in s])
def test_the_bases_switches_leave_the_split_as_it_is(System: Any, switch: str) -> None:
    """Which kernels step the base makes no difference but of rounding."""
    Base, options = SWITCHES[switch]
    options = {"lr": 0.02, **options}
    plain_options = {k: v for k, v in options.items() if k not in ("foreach", "fused")}
    plain_options["lr"] = 0.02
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, base=Base, **options)
    plain = make(System, twin, base=Base, foreach=False, **plain_options)
    train(model, optimizer, 4)
    train(twin, plain, 4)
    assert optimizer.curvature.step == 3
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@eigenpairs_only
@pytest.mark.parametrize("base", ["SGD", "AdamW", "RMSprop"])
def test_maximizing_the_negative_loss_is_minimizing_the_loss(System: Any, base: str) -> None:
    Base, options = BASES[base]
    model, twin = MLP.model(), MLP.model()
    optimizer = make(System, model, base=Base, maximize=True, **options)
    plain = make(System, twin, base=Base, **options)
    for batch in BATCHES:
        take(model, optimizer, batch, lambda outputs, y: -cross_entropy(outputs, y))
        take(twin, plain, batch)
    assert optimizer.curvature.step == plain.curvature.step == 5
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-11)


@each_system
def test_a_tensor_learning_rate_changed_in_place_is_followed(System: Any) -> None:
    model, twin = MLP.model(), MLP.model()
    rate = torch.tensor(0.1, dtype=torch.float64)
    own = {} if System is DHO2 else {"kl_clip": 1e-3}
    optimizer, plain = make(System, model, lr=rate, **own), make(System, twin, lr=0.1, **own)
    train(model, optimizer, 2)
    train(twin, plain, 2)
    optimizer.param_groups[0]["lr"].fill_(0.025)
    plain.param_groups[0]["lr"] = 0.025
    train(model, optimizer, 2, start=2)
    train(twin, plain, 2, start=2)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-11)
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    assert same(model.parameters(), before)


@each_system
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


@each_system
def test_differentiable_is_refused_with_a_reason(System: Any) -> None:
    with pytest.raises(ValueError, match="differentiable=True is not supported: the precond"):
        make(System, MLP.model(), differentiable=True)
    make(System, MLP.model(), differentiable=False)


# Hooks on the step.


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


# Pickle, deepcopy, saving the model, averaged copies.


def by_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def by_torch_save(pair: Any) -> Any:
    return saved_and_loaded(pair, weights_only=False)


@each_variant
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
@each_base
def test_a_copy_of_model_and_optimizer_captures_into_the_copy(
    System: Any, options: dict[str, Any], base: str, duplicate: Callable[[Any], Any]
) -> None:
    """It continues the trajectory, and neither of the two sees the other's passes."""
    Base, others = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **options, **others)
    scheduler = StepLR(optimizer, 1, gamma=0.9)  # its patched `step` must not come along
    train(model, optimizer, 2)
    scheduler.step()
    twin, copied = duplicate((model, optimizer))
    assert copied.param_groups[0]["params"][0] is next(twin.parameters())
    before, parameters = curvature_of(optimizer), copy.deepcopy(model)
    train(twin, copied, 2, start=2)
    assert_same_curvature(curvature_of(optimizer), before, rtol=0)
    assert same(model, parameters)
    train(model, optimizer, 2, start=2)
    assert same(model, twin)
    assert_same_curvature(curvature_of(copied), curvature_of(optimizer), rtol=0)
    assert hook_count(twin) == hook_count(model)
    del copied
    gc.collect()
    assert hook_count(twin) == 0


@each_system
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


@eigenpairs_only
@pytest.mark.parametrize("base", ["SGD", "Adam"])
def test_nothing_is_left_of_an_optimizer_that_goes(System: Any, base: str) -> None:
    """It hangs nothing on the model, nor does the model, or the closure, keep it."""
    Base, options = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **options)
    optimizer.curvature_closure = lambda: cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    train(model, optimizer)
    assert hook_count(model) == 0
    alive = weakref.ref(optimizer), weakref.ref(optimizer._curvature.subspace.basis.vectors)
    del optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


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
    copied_model, _ = copy.deepcopy((model, optimizer))
    assert hook_count(model) == 0
    assert hook_count(copied_model) == 0
    str(optimizer.summary())


@each_kronecker
def test_a_closed_optimizer_stays_closed_when_a_group_is_added(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model[0].parameters(), model=model)
    optimizer.close()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert hook_count(model) == 0


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


@eigenpairs_only
def test_two_optimizers_of_parts_of_a_model_have_eigenpairs_of_their_own(System: Any) -> None:
    """Each of its block of the Hessian, as if the other were not there."""
    model, twin = MLP.model(), MLP.model()
    body = make(System, model[0].parameters(), model=model)
    head = make(System, model[4].parameters(), model=model)
    alone = make(System, twin[0].parameters())
    for x, y in BATCHES:
        twin[4].load_state_dict(model[4].state_dict())
        take(twin, alone, (x, y))
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        for optimizer in (body, head):
            optimizer.step(**asking(model, optimizer, (x, y)))
        assert same(model[0], twin[0])
    assert_same_curvature(curvature_of(body), curvature_of(alone), rtol=0)
    assert body.curvature.refreshes == head.curvature.refreshes > 1


@each_kronecker
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
def test_distributed_checkpoint_has_an_entry_for_every_trainable_parameter(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    for entries in (get(model, optimizer, False)["state"],):
        assert entries.keys() == dict(model.named_parameters()).keys()
    train(model, optimizer)
    assert get(model, optimizer, False)["state"].keys() == dict(model.named_parameters()).keys()


@each_system
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
@pytest.mark.parametrize("what", ["all", "nothing for us", "no gradient"])
def test_a_first_step_with_zero_learning_rate_is_a_step(System: Any, what: str) -> None:
    """A warm-up from 0 must not be taken for the empty step of checkpointing code."""
    model = MLP.model()
    options = base_only(System) if what == "nothing for us" else {}
    if System is DHO2:
        options["warmup_steps"] = 0
    optimizer = make(System, model, lr=0.0, **options)
    x, y = BATCHES[0]
    loss = cross_entropy(model(x), y)
    (loss * 0.0 if what == "no gradient" else loss).backward()
    optimizer.step(**asking(model, optimizer, BATCHES[0]))
    known = 1 if System is DHO2 else 3
    assert len(curvature_of(optimizer)) == (0 if what == "nothing for us" else known)
    assert optimizer.state_dict()["state"][0]["curvature"]["steps"] == 1


@each_system
def test_a_first_step_with_zero_gradients_is_a_step(System: Any) -> None:
    """With a learning rate it is none of checkpointing code's."""
    model = MLP.model()
    optimizer = make(System, model, weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["curvature"]["steps"] == 1


# The class.


@each_system
def test_signature_of_step_is_that_of_torch(System: Any) -> None:
    """`step` stays a method that takes a closure: schedulers and scalers call it as such."""
    ours = ["curvature_closure"] if System is DHO2 else []
    parameters = inspect.signature(System.step).parameters
    assert list(parameters) == ["self", "closure", *ours]
    for name in ours:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None
    assert inspect.ismethod(make(System, MLP.model()).step)
    assert not getattr(make(System, MLP.model()), "_step_supports_amp_scaling", False)
    assert issubclass(System, torch.optim.Optimizer)


@each_system
def test_defaults_are_the_bases(System: Any) -> None:
    """OneCycleLR and CyclicLR read `defaults["momentum"]` and `defaults["betas"]`."""
    model = MLP.model()
    sgd = make(System, model, momentum=0.8)
    adam = make(System, model, base=torch.optim.Adam, betas=(0.7, 0.8))
    assert sgd.defaults["momentum"] == 0.8
    assert adam.defaults["betas"] == (0.7, 0.8)
    ours = (PAIRS if System is DHO2 else EXACT).keys() - {"lr"}
    assert ours.isdisjoint(sgd.param_groups[0])  # options of ours are no group's
