"""Groups: given anew in mid-run, named, empty, and of the model that is watched."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    each_kronecker,
    each_of_five,
    make,
    same,
    take,
)
from models import ZOO
from torch import nn
from torch.optim.lr_scheduler import StepLR

from second_order import SecondOrderWarning

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


def train(model: nn.Module, optimizer: Any, steps: int = 2, start: int = 0) -> None:
    for batch in BATCHES[start : start + steps]:
        take(model, optimizer, batch)


# Another list of groups.


@each_of_five
def test_settings_that_are_assigned_reach_the_list_that_is_there(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    groups = optimizer.param_groups
    optimizer.param_groups = [{"params": groups[0]["params"], "lr": 0.2}]
    assert optimizer.param_groups is groups is optimizer._base.param_groups
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 1)
    scheduler.step()
    assert groups[0]["lr"] == 0.1
    loaded = make(System, MLP.model())
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.param_groups[0]["lr"] == 0.1


# Whose the parameters are.


@each_of_five
def test_a_model_that_owns_none_of_the_parameters_is_refused(System: Any) -> None:
    """It would train with the base alone, or be kept in the wrong mode."""
    model = MLP.model()
    name = System.__name__
    with pytest.raises(ValueError, match=f"none of the 6 parameters belongs to.*{name} would be"):
        make(System, model.parameters(), model=copy.deepcopy(model))


@each_kronecker
def test_parameters_that_the_model_lacks_are_told_of(System: Any) -> None:
    model, scale = MLP.model(), nn.Parameter(torch.ones(2, 5, dtype=torch.float64))
    with pytest.warns(SecondOrderWarning, match=r"1 of 7 parameters are not.*\(2, 5\)"):
        make(System, [*model.parameters(), scale], model=model)


# Names.


@each_of_five
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "compiled"])
def test_groups_made_of_a_model_are_named(System: Any, wrapped: bool) -> None:
    """As those of `SGD(model.named_parameters())`; wrappers add nothing to the names."""
    model = MLP.model()
    model[0].bias.requires_grad_(False)
    given = torch.compile(model, backend="eager") if wrapped else model
    optimizer = make(System, given)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    (group,) = optimizer.param_groups
    assert group["param_names"] == list(named)
    assert all(p is q for p, q in zip(group["params"], named.values(), strict=True))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == list(named)


@each_of_five
def test_a_group_added_has_names_where_the_others_have(System: Any) -> None:
    """torch refuses to mix the two."""
    model = MLP.model()
    for p in model[4].parameters():
        p.requires_grad_(False)
    optimizer = make(System, model)
    for p in model[4].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": model[4].parameters()})
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2, dtype=torch.float64))})
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names[1:] == [["4.weight", "4.bias"], ["parameter 6"]]
    unnamed = make(System, [*model.parameters()], model=model)
    assert "param_names" not in unnamed.param_groups[0]


# Empty groups.


@each_of_five
def test_an_empty_group_is_passed_over(System: Any) -> None:
    """Also where it is the first."""
    model, twin = MLP.model(), MLP.model()
    groups: list[dict[str, Any]] = [{"params": []}, {"params": list(model.parameters())}]
    optimizer, expected = make(System, groups, model=model), make(System, twin)
    train(model, optimizer, 4)
    train(twin, expected, 4)
    assert same(model, twin)
    str(optimizer.summary())
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer))
    train(model, optimizer, 1, start=4)


@each_of_five
def test_an_optimizer_may_begin_without_parameters(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, [{"params": []}], model=model)
    optimizer.add_param_group({"params": list(model.parameters())})
    twin = MLP.model()
    expected = make(System, twin)
    train(model, optimizer, 4)
    train(twin, expected, 4)
    assert same(model, twin)


# The meta device.


@each_of_five
def test_parameters_on_meta_are_refused_until_they_are_made(System: Any) -> None:
    """`to_empty` makes other ones: an optimizer of the old ones would train nothing."""
    with torch.device("meta"):
        model = MLP.model()
    message = (
        r"parameter '0\.weight' is on the meta device, and has no numbers: materialise first, by "
        rf"model\.to_empty\(device=\.\.\.\) and what fills it, then make {System.__name__}; with "
    )
    for given in ([model], [model.parameters(), model]):
        with pytest.raises(ValueError, match=message):
            make(System, given[0], model=None if len(given) == 1 else model)
    model.to_empty(device="cpu")
    model.load_state_dict(MLP.model().state_dict())
    train(model, make(System, model))
