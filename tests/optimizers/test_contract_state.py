"""State and groups: what torch's machinery does to an optimizer leaves this one whole."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    BASES,
    assert_same_curvature,
    assert_same_factors,
    base_only,
    curvature_of,
    each_kronecker,
    each_system,
    factors,
    make,
    same,
    take,
)
from models import ZOO
from reference import cross_entropy
from states import flat, saved_and_loaded, train
from torch.optim.lr_scheduler import StepLR

from second_order import DHO2

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
each_base = pytest.mark.parametrize("base", BASES)
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


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
