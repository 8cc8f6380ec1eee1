"""Bases that are not torch's: Lion, and schedule-free ones with `train()` and `eval()`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import ZOO
from optimizer_cases import (
    DHO2,
    KAISA,
    base_only,
    each_kronecker,
    factors,
    make,
    same,
    take,
)
from reference import cross_entropy
from saved_states import saved_and_loaded
from step_reference import assert_near
from third_party_bases import (
    Counting,
    GetSGD,
    Lion,
    OwnTensor,
    OwnTensorSGD,
    ScheduleFree,
)

from second_order import AuxBase

torch.serialization.add_safe_globals([OwnTensor])
pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)
THIRD: dict[str, tuple[Any, dict[str, Any]]] = {
    "Lion": (Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "ScheduleFree": (ScheduleFree, {"lr": 0.05}),
    "OwnTensorSGD": (OwnTensorSGD, {"lr": 0.05}),
    "GetSGD": (GetSGD, {"lr": 0.05}),
    "Counting": (Counting, {"lr": 0.05}),
}
each_third = pytest.mark.parametrize("base", THIRD)


def ready(optimizer: Any) -> Any:
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


@each_kronecker
@each_third
def test_without_layers_training_equals_the_base(System: Any, base: str) -> None:
    Base, options = THIRD[base]
    model = MLP.model()
    twin = copy.deepcopy(model)
    plain = ready(Base(twin.parameters(), **options))
    optimizer = ready(make(System, model, base=Base, **options, **base_only(System)))
    for batch in BATCHES[:4]:
        take(model, optimizer, batch)
        take(twin, plain, batch)
        assert same(model, twin)


@each_kronecker
@each_third
def test_a_resumed_run_is_equal_bit_for_bit(System: Any, base: str) -> None:
    Base, options = THIRD[base]
    model = MLP.model()
    optimizer = ready(make(System, model, base=Base, **options))
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
    twin = copy.deepcopy(model)
    resumed = make(System, twin, base=Base, **options)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for batch in BATCHES[2:5]:
        take(model, optimizer, batch)
        take(twin, resumed, batch)
        assert same(model, twin)
    if Base is Lion:
        assert resumed._base.signs == 3


def test_torchaos_8_bit_base_trains_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    low_bit = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it would take seconds

    def made() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
        return model, make(KAISA, model, base=low_bit.AdamW8bit, lr=1e-3, block_size=64)

    batches = [(torch.randn(16, 64), torch.randint(3, (16,))) for _ in range(4)]
    model, optimizer = made()
    for batch in batches[:2]:
        take(model, optimizer, batch)
    assert type(optimizer.state[model[0].weight]["base"]["exp_avg"]).__name__ == "OptimState8bit"
    twin, resumed = made()
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for batch in batches[2:]:
        take(model, optimizer, batch)
        take(twin, resumed, batch)
    assert_near(model, twin, rtol=1e-5, atol=1e-6)


@each_kronecker
def test_train_and_eval_reach_a_schedule_free_base(System: Any) -> None:
    """And the gradient that it gets is preconditioned: it does not train as it would alone."""
    model = MLP.model()
    optimizer = make(System, model, base=ScheduleFree, lr=0.05)
    with pytest.raises(RuntimeError, match=r"call optimizer.train\(\) before training"):
        take(model, optimizer, BATCHES[0])
    assert same(model, MLP.model())
    optimizer.train()
    assert not optimizer.state  # looking for state has made none
    twin = copy.deepcopy(model)
    plain = ready(ScheduleFree(twin.parameters(), lr=0.05))
    for batch in BATCHES:
        take(model, optimizer, batch)
        take(twin, plain, batch)
    assert not torch.allclose(model[0].weight, twin[0].weight)
    y = copy.deepcopy(model)
    known = factors(optimizer)
    optimizer.eval()
    for p, q in zip(y.parameters(), model.parameters(), strict=True):
        z = optimizer.state[q]["base"]["z"]
        torch.testing.assert_close(q, (p - 0.1 * z) / 0.9)
    cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    optimizer.train()
    assert_near(model, y, rtol=1e-12, atol=1e-14)
    assert factors(optimizer).keys() == known.keys()


def test_train_and_eval_reach_both_bases() -> None:
    model = MLP.model()
    optimizer = make(
        KAISA, model, base=ScheduleFree, aux_base=AuxBase(torch.optim.AdamW, layers=["4"])
    )
    optimizer.train()
    modes = {g["aux_base"]: g.get("train_mode") for g in optimizer.param_groups}
    assert modes == {False: True, True: None}
    take(model, optimizer, BATCHES[0])
    optimizer.eval()
    assert not next(g for g in optimizer.param_groups if not g["aux_base"])["train_mode"]


@pytest.mark.parametrize("two", [False, True], ids=["base", "both"])
def test_state_that_belongs_to_no_parameter_is_exported_and_imported(two: bool) -> None:
    """Of each of two bases separately. MADGRAD counts its steps in `state["k"]`."""
    model = MLP.model()
    options = {"aux_base": Counting} if two else {}
    optimizer = make(KAISA, model, lr=0.1, base=Counting, skip_layers=["*"], **options)
    twin = copy.deepcopy(model)
    plain = Counting(twin.parameters())
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
        take(twin, plain, batch)
        assert same(model, twin)
    exported = optimizer.export_base_state(aux_base=two)
    assert exported["state"].keys() == {"k"}
    assert exported["state"]["k"].item() == 2
    resumed = make(KAISA, model, base=Counting, skip_layers=["*"], **options)
    saved = optimizer.state_dict() if two else plain.state_dict()
    resumed.load_state_dict(saved_and_loaded(saved))
    take(model, resumed, BATCHES[2])
    take(twin, plain, BATCHES[2])
    assert same(model, twin)


def test_schedule_free_bases_are_refused_if_steps_are_corrected() -> None:
    with pytest.raises(TypeError, match="ScheduleFree, which has train"):
        make(DHO2, MLP.model(), base=ScheduleFree)
    model = MLP.model()
    optimizer = make(DHO2, model, base=Lion, lr=0.01)
    take(model, optimizer, BATCHES[0])
