"""Checkpoints of other versions and other bases, and the way back to the base alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract import BASES, base_only, each_of_five, make, same
from models import ZOO
from states import PLAIN, alike, plain, snapshot, train, trained

import second_order
from second_order import KAISA, DistKFAC, export_base_state

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]


# Versions.


def as_version_0(saved: Any) -> Any:
    """As the package wrote it before there was a version."""
    saved = copy.deepcopy(saved)
    for entry in saved["state"].values():
        for key in ("version", "base_class"):
            del entry["curvature"][key]
    for group in saved["param_groups"]:
        group.pop("param_names", None)
    return saved


@each_of_five
@pytest.mark.parametrize("base", BASES)
def test_checkpoints_without_a_version_load_as_ever(System: Any, base: str) -> None:
    Base, options = BASES[base]
    model, optimizer = trained(System, base)
    saved = as_version_0(optimizer.state_dict())
    twin = copy.deepcopy(model)
    resumed = make(System, twin, base=Base, **options)
    resumed.load_state_dict(saved)
    train(model, optimizer, 2, start=3)
    train(twin, resumed, 2, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    part = resumed.state_dict()["state"][0]["curvature"]
    assert part["version"] == 1
    assert part["base_class"] == {base: 1}


# Of which base.


@pytest.mark.parametrize("ours", ["SGD", "AdamW", "Adam", "RMSprop", "Adafactor"])
def test_a_plain_state_of_another_base_is_refused(ours: str) -> None:
    """By its settings: it would end in `KeyError: 'step'` at the next step."""
    model = MLP.model()
    optimizer = make(KAISA, model, base=getattr(torch.optim, ours), **PLAIN[ours])
    train(model, optimizer, 1)
    for theirs in PLAIN:
        saved = plain(theirs, MLP.model()).state_dict()
        if theirs == ours:
            optimizer.load_state_dict(saved)
            continue
        before = snapshot(model, optimizer)
        with pytest.raises(ValueError, match=rf"by an optimizer with.*and the base here is {ours}"):
            optimizer.load_state_dict(saved)
        assert alike(snapshot(model, optimizer), before)
    train(model, optimizer, 2)


@each_of_five
@pytest.mark.parametrize("version", [0, 1])
def test_ours_over_another_base_is_refused_naming_it(System: Any, version: int) -> None:
    _, theirs = trained(System, "SGD")
    model, optimizer = trained(System, "AdamW")
    saved = theirs.state_dict() if version else as_version_0(theirs.state_dict())
    before = snapshot(model, optimizer)
    by = "SGD" if version else "an optimizer with .*"
    with pytest.raises(ValueError, match=f"saved by {by}, and the base here is AdamW"):
        optimizer.load_state_dict(saved)
    assert alike(snapshot(model, optimizer), before)


class OfSomebody(torch.optim.SGD):
    """A base that torch does not know, with entries and settings of its own."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, taste: str = "good") -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["taste"] = taste
            for p in group["params"]:
                self.state[p]["best"] = float("inf")


@each_of_five
def test_a_base_of_somebody_keeps_what_it_likes(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, base=OfSomebody)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    resumed = make(System, twin, base=OfSomebody)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[twin[0].weight]["base"]["best"] == float("inf")
    alone = OfSomebody(MLP.model().parameters(), lr=0.1)
    resumed.load_state_dict(alone.state_dict())
    with pytest.raises(ValueError, match=r"saved by an optimizer with.*here is OfSomebody"):
        resumed.load_state_dict(plain("AdamW", MLP.model()).state_dict())


# And back to the base alone.


@each_of_five
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("version", [0, 1])
def test_the_base_goes_on_alone_with_what_is_exported(System: Any, base: str, version: int) -> None:
    """Momentum and hyperparameters go on: as if the wrapper had done nothing from there on."""
    Base, options = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **options, **base_only(System))
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.03
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    alone = Base(twin.parameters(), **options)
    alone.load_state_dict(export_base_state(saved if version else as_version_0(saved)))
    assert alone.param_groups[0]["lr"] == 0.03
    assert "peak_lr" not in alone.param_groups[0]
    assert alone.state[twin[0].weight].keys() == optimizer.state[model[0].weight]["base"].keys()
    train(model, optimizer, start=3)
    train(twin, alone, start=3)
    assert same(model, twin)


def test_export_takes_a_plain_state_as_it_is_and_nothing_else() -> None:
    saved = plain("AdamW", MLP.model()).state_dict()
    exported = export_base_state(saved)
    assert exported["param_groups"] == saved["param_groups"]
    assert alike(exported["state"], saved["state"])
    wrong: list[Any] = [
        None,
        [],
        {},
        {"state": {}},
        {"state": {0: None}, "param_groups": []},
        {"state.0.weight.base.exp_avg": 1},
    ]
    for value in wrong:
        with pytest.raises(ValueError, match="no state of an optimizer"):
            export_base_state(value)
    fresh = make(DistKFAC, MLP.model())
    assert export_base_state(fresh.state_dict())["state"] == {}
    assert "export_base_state" in second_order.__all__
