"""Two bases in one object: copies, checkpoints, schedules, scaled losses, processes."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from aux_base_cases import (
    BATCHES,
    CASE,
    PAIRS,
    SGD,
    AdamW,
    ByHand,
    Muon,
    backward,
    each_pair,
    optim,
    two,
)
from combinations import fractional_product
from optimizer_cases import KAISA, KRONECKER, each_kronecker, make, same, take
from ranks import agreed, assert_same_trajectory, train
from saved_states import saved_and_loaded
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from second_order import (
    AuxBase,
    export_base_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


@each_kronecker
@each_pair
def test_a_resumed_run_is_equal_bit_for_bit(System: Any, pair: str) -> None:
    model = CASE.model()
    optimizer = two(System, pair, model)
    for batch in BATCHES[:3]:
        take(model, optimizer, batch)
    twin = CASE.model(seed=1)
    twin.load_state_dict(model.state_dict())
    resumed = two(System, pair, twin, aux_layers=["nothing"])
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for batch in BATCHES[3:6]:
        take(model, optimizer, batch)
        take(twin, resumed, batch)
        assert same(model, twin)
    resumed.param_groups[1]["lr"] = 0.5
    assert "lr 0.5" in str(resumed.summary())
    assert "lr 0.5" not in str(optimizer.summary())


class Remembering(AdamW):
    """Makes something of a state that it is given."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.looked_at = [set(part) for part in self.state.values()]


def test_a_base_can_convert_its_loaded_state() -> None:
    """Each base sees only the state of its own parameters."""
    model = CASE.model()
    optimizer = make(KAISA, model, base=Muon, aux_base=Remembering)
    take(model, optimizer, BATCHES[0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._base.parts[1].looked_at == [{"step", "exp_avg", "exp_avg_sq"}] * 8
    take(model, optimizer, BATCHES[1])


@pytest.mark.parametrize(
    ("System", "flat", "fresh"), fractional_product(KRONECKER, [False, True], [False, True], part=2)
)
def test_a_dcp_round_trip_continues_the_run(System: Any, flat: bool, fresh: bool) -> None:
    """By names; a fresh optimizer is stepped by it with zero gradients, and must not move."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = CASE.model()
    twin = CASE.model()
    optimizer, resumed = (two(System, "Muon AdamW apart", m) for m in (model, twin))
    for batch in BATCHES[: 0 if fresh else 3]:
        take(model, optimizer, batch)
    saved = saved_and_loaded(get_optimizer_state_dict(model, optimizer, options=options))
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, resumed, saved, options=options)
    assert [(g["aux_base"], g["lr"]) for g in resumed.param_groups] == [(False, 0.02), (True, 3e-3)]
    for batch in BATCHES[3:6]:
        take(model, optimizer, batch)
        take(twin, resumed, batch)
        assert same(model, twin)


def test_a_checkpoint_of_other_bases_raises_before_anything_changes() -> None:
    model = CASE.model()
    optimizer = two(KAISA, "Muon AdamW", model)
    take(model, optimizer, BATCHES[0])
    saved = optimizer.state_dict()
    hand = [{"params": p} for p in optimizer.param_groups[0]["params"]]
    others: list[tuple[Callable[[], Any], str]] = [
        (lambda: make(KAISA, model), "the optimizer over SGD has 1 with"),
        (
            lambda: make(KAISA, hand, model=model, base=Muon),
            "has 2 parameter groups.*the optimizer over Muon has 2 with",
        ),
        (lambda: two(KAISA, "SGD AdamW", model), "saved by Muon, and the base here is SGD"),
        (
            lambda: two(KAISA, "Muon AdamW", model, aux_layers=["up"]),
            r"2 parameter groups with \[2, 8\] parameters, but .* has 2 with \[1, 9\]",
        ),
        (
            lambda: two(KAISA, "Muon AdamW", [{"params": model.up.weight}], model=model),
            r"has 2 parameter groups.*the optimizer over Muon and AdamW has 1 with",
        ),
    ]
    for build, message in others:
        other = build()
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(saved)
        assert str(other.state_dict()) == str(before)
    swapped = copy.deepcopy(saved)
    swapped["param_groups"][0]["aux_base"] = True
    with pytest.raises(ValueError, match="has 'aux_base': True, and here it is False"):
        optimizer.load_state_dict(swapped)
    one = make(KAISA, model, base=AdamW)
    with pytest.raises(ValueError, match=r"has 1 parameter groups.*optimizer over Muon and AdamW"):
        optimizer.load_state_dict(one.state_dict())


def test_plain_optimizers_load_and_return_their_parts() -> None:
    model = CASE.model()
    twin = CASE.model()
    optimizer = two(KAISA, "Muon AdamW", model, skip_layers=["*"])
    for batch in BATCHES[:3]:
        take(model, optimizer, batch)
    saved = saved_and_loaded(optimizer.state_dict())
    plain = ByHand("Muon AdamW", twin)
    twin.load_state_dict(model.state_dict())
    plain.base.load_state_dict(export_base_state(saved))
    plain.aux_base.load_state_dict(export_base_state(saved, aux_base=True))
    take(model, optimizer, BATCHES[3])
    backward(twin, BATCHES[3])
    plain.step()
    assert same(model, twin)
    first = plain.base.state_dict()
    second = plain.aux_base.state_dict()
    count = len(plain.hidden)
    second["param_groups"][0]["params"] = list(range(count, count + len(plain.others)))
    merged = {
        "state": {**first["state"], **{count + k: v for k, v in second["state"].items()}},
        "param_groups": [*first["param_groups"], *second["param_groups"]],
    }
    back = two(KAISA, "Muon AdamW", twin, skip_layers=["*"])
    back.load_state_dict(merged)
    take(model, optimizer, BATCHES[4])
    take(twin, back, BATCHES[4])
    assert same(model, twin)
    with pytest.raises(ValueError, match="with one base; leave aux_base=True out"):
        export_base_state(make(KAISA, model).state_dict(), aux_base=True)


def slower(step: int) -> float:
    return 1 / (1 + step)


def halved(step: int) -> float:
    return 0.5**step


# One scheduler for both bases, or one for each.
SCHEDULES: dict[str, tuple[Callable[[Any], Any], list[Callable[[Any], Any]]]] = {
    "one for both": (
        partial(LambdaLR, lr_lambda=slower),
        [partial(LambdaLR, lr_lambda=slower)] * 2,
    ),
    "each its own": (
        partial(LambdaLR, lr_lambda=[slower, halved]),
        [partial(LambdaLR, lr_lambda=each) for each in (slower, halved)],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_change_both_bases(schedule: str) -> None:
    model = CASE.model()
    twin = CASE.model()
    optimizer = two(KAISA, "Muon AdamW", model, skip_layers=["*"])
    plain = ByHand("Muon AdamW", twin)
    together, separate = SCHEDULES[schedule]
    bases = (plain.base, plain.aux_base)
    schedulers = [
        together(optimizer),
        *(one(base) for one, base in zip(separate, bases, strict=True)),
    ]
    rates = set()
    for batch in BATCHES[:5]:
        take(model, optimizer, batch)
        backward(twin, batch)
        plain.step()
        assert same(model, twin)
        for scheduler in schedulers:
            scheduler.step()
        rates.add(tuple(group["lr"] for group in optimizer.param_groups))
    assert len(rates) == 5


def test_momentum_schedules_need_both_bases() -> None:
    """Cycling that of one alone would go unnoticed."""
    model = CASE.model()
    cycle = partial(OneCycleLR, max_lr=0.1, total_steps=6)
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        cycle(two(KAISA, "Muon AdamW", model))
    optimizer = KAISA(model, lr=0.1, base=optim.Adam, aux_base=AdamW)
    cycle(optimizer)
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.95, 0.95]


@pytest.mark.parametrize("pair", ["SGD AdamW", "Muon AdamW"])
@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_two_processes_train_like_one(world: World, pair: str, fraction: float) -> None:
    """Muon rounds to bfloat16 inside, so that rounding before it may be 1 % after it."""
    base, aux_base, keywords, _, special = PAIRS[pair]
    options = {"base": base, "aux_base": AuxBase(aux_base, kwargs=special), **keywords}
    batches = CASE.batches(4)
    spread = {**options, "grad_worker_fraction": fraction}
    found = agreed(world.run(train, 2, CASE, batches, spread))
    alone = train(0, 1, CASE, batches, options)
    assert_same_trajectory(found, alone, rtol=1e-8 if base is SGD else 1e-2)
