"""Groups: given anew in mid-run, named, empty, and of the model that is watched."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    EIGENPAIRS,
    assert_same_curvature,
    base_only,
    curvature_of,
    each_kronecker,
    each_of_five,
    factors,
    make,
    same,
    take,
)
from models import ZOO
from pairs import closure_of
from ranks import agreed, shard
from torch import nn
from torch.optim.lr_scheduler import StepLR

from second_order import DHO2, SecondOrderWarning

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


def train(model: nn.Module, optimizer: Any, steps: int = 2, start: int = 0) -> None:
    for batch in BATCHES[start : start + steps]:
        take(model, optimizer, batch)


# Another list of groups.


@each_of_five
@pytest.mark.parametrize("base", ["SGD", "AdamW"])
def test_hyperparameters_of_a_list_assigned_are_used(System: Any, base: str) -> None:
    """The base follows: it would go on with the old list's learning rate."""
    Base = getattr(torch.optim, base)
    model, twin = MLP.model(), MLP.model()
    optimizer, expected = (make(System, m, base=Base) for m in (model, twin))
    train(model, optimizer)
    train(twin, expected)
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.01, "weight_decay": 0.1}]
    expected.param_groups[0].update(lr=0.01, weight_decay=0.1)
    train(model, optimizer, 4, start=2)
    train(twin, expected, 4, start=2)
    assert same(model, twin)
    assert_same_curvature(curvature_of(optimizer), curvature_of(expected), rtol=0)


@each_of_five
def test_the_list_assigned_is_the_list_that_is_there(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    groups = [{"params": optimizer.param_groups[0]["params"], "lr": 0.2}]
    optimizer.param_groups = groups
    assert optimizer.param_groups is groups
    assert groups[0].keys() >= optimizer.defaults.keys()  # what it lacked is filled in
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 1)
    scheduler.step()
    assert groups[0]["lr"] == 0.1
    loaded = make(System, MLP.model())
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.param_groups[0]["lr"] == 0.1


@each_of_five
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_a_list_of_its_own_that_its_base_follows(System: Any, how: str) -> None:
    model = MLP.model()
    optimizer = make(System, model, **base_only(System))
    train(model, optimizer)
    pair = (model, optimizer)
    twin, copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    copied.param_groups = [{**group, "lr": 0.0} for group in copied.param_groups]
    before = copy.deepcopy(twin)
    train(twin, copied, 1, start=2)
    assert same(twin, before)
    train(model, optimizer, 1, start=2)
    assert not same(model, before)


@each_kronecker
def test_layers_of_a_list_assigned_are_planned_anew(System: Any) -> None:
    """What is known of those that stay is kept, those that leave stand still."""
    model = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    train(model, optimizer)
    known = factors(optimizer)["0"]
    whole = optimizer.param_groups
    optimizer.param_groups = [{**whole[0], "params": [*model[0].parameters()]}]
    assert factors(optimizer).keys() == {"0"}
    torch.testing.assert_close(factors(optimizer)["0"], known, rtol=0, atol=0)
    before = copy.deepcopy(model)
    train(model, optimizer, 1, start=2)
    assert same(model[2:], before[2:])
    assert not same(model[0], before[0])
    assert optimizer.state_dict()["state"].keys() == {0, 1}
    buffer = optimizer.state[model[4].weight]["base"]["momentum_buffer"].clone()
    optimizer.param_groups = [{**whole[0], "params": [*model.parameters()]}]  # and back
    train(model, optimizer, 1, start=3)
    assert factors(optimizer).keys() == {"0", "2", "4"}
    expected = 0.9 * buffer + model[4].weight.grad
    torch.testing.assert_close(
        optimizer.state[model[4].weight]["base"]["momentum_buffer"], expected
    )


@each_of_five
def test_a_group_cut_in_two_is_named_anew(System: Any) -> None:
    """Names that are too many would be refused when the checkpoint is loaded."""
    model = MLP.model()
    optimizer = make(System, model)
    (group,) = optimizer.param_groups
    params, names = group["params"], group["param_names"]
    halves = [{**group, "params": params[:2]}, {**group, "params": params[2:], "lr": 0.01}]
    optimizer.param_groups = halves
    assert [g["param_names"] for g in halves] == [names[:2], names[2:]]
    train(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    own = [{**group, "param_names": [f"my {name}" for name in names]}]
    optimizer.param_groups = own
    assert own[0]["param_names"][0] == "my 0.weight"


@each_of_five
def test_a_group_copied_with_other_members_is_named_anew(System: Any) -> None:
    """By the names of others, a checkpoint would be taken for one in another order."""
    model = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    train(model, optimizer)
    (group,) = optimizer.param_groups
    params, names = group["params"], group["param_names"]
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups = [{**group, "params": [*params[2:], *params[:2]]}]
    assert optimizer.param_groups[0]["param_names"] == [*names[2:], *names[:2]]
    with pytest.raises(ValueError, match="make the groups in the order that they were saved in"):
        optimizer.load_state_dict(saved)
    optimizer.param_groups = [{**group, "params": params[2:4]}, {**group, "params": params[:2]}]
    assert [g["param_names"] for g in optimizer.param_groups] == [names[2:4], names[:2]]


@each_of_five
def test_names_of_a_part_of_the_model_are_not_anothers(System: Any) -> None:
    """Such as a part's own named_parameters() gives; what is called by nobody else's name stays."""
    model = MLP.model()
    optimizer = make(System, [{"params": [*model[0].named_parameters()]}], model=model)
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["weight", "bias"]
    optimizer.param_groups = [{**group, "params": group["params"][::-1]}]
    assert optimizer.param_groups[0]["param_names"] == ["bias", "weight"]
    optimizer.param_groups = [{**group, "params": [*model[2].parameters()]}]
    assert optimizer.param_groups[0]["param_names"] == ["2.weight", "2.bias"]
    own = {**group, "param_names": ["mine", "2.bias"], "params": [model[0].weight, model[2].bias]}
    optimizer.param_groups = [own]
    assert own["param_names"] == ["mine", "2.bias"]


@pytest.mark.parametrize("System", EIGENPAIRS)
def test_eigenpairs_of_other_parameters_are_dropped(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    train(model, optimizer, 3)
    assert curvature_of(optimizer)
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": [*model[0].parameters()]}]
    with pytest.warns(SecondOrderWarning, match="eigenpairs are dropped"):
        train(model, optimizer, 1, start=3)


@each_of_five
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("a tuple", TypeError, "param_groups=tuple is not a list of groups"),
        ("parameters", TypeError, "param_groups=list is not a list of groups"),
        ("no params", TypeError, r"param_groups\[0\]\['params'\] is not a list of tensors"),
        ("twice", ValueError, "param_groups has a parameter twice"),
        ("a copy's", ValueError, "none of the 6 parameters belongs to model=Sequential"),
    ],
)
def test_a_list_that_cannot_be_one_changes_nothing(
    System: Any, what: str, error: type[Exception], message: str
) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    group, groups = optimizer.param_groups[0], optimizer.param_groups
    wrong: dict[str, Any] = {
        "a tuple": tuple(groups),
        "parameters": list(model.parameters()),
        "no params": [{"lr": 0.1}],
        "twice": [group, {**group, "params": [model[0].weight]}],
        "a copy's": [{**group, "params": list(copy.deepcopy(model).parameters())}],
    }
    with pytest.raises(error, match=message):
        optimizer.param_groups = wrong[what]
    assert optimizer.param_groups is groups
    train(model, optimizer)


@each_of_five
def test_an_optimizer_without_groups_has_a_summary(System: Any) -> None:
    """As torch's own have none for a moment, while groups are put together anew."""
    model = MLP.model()
    optimizer = make(System, model)
    groups = optimizer.param_groups
    optimizer.param_groups = []
    title = str(optimizer.summary()).splitlines()[0]
    assert title.startswith(f"{System.__name__} over SGD, no parameter groups, ")
    assert optimizer.recipe().rows == []
    optimizer.step()
    optimizer.param_groups = groups
    assert "lr 0.05" in str(optimizer.summary())
    assert sum(row.parameters for row in optimizer.summary().rows) == sum(
        p.numel() for p in model.parameters()
    )


def test_groups_that_maximize_and_minimize_leave_the_old_ones() -> None:
    model = MLP.model()
    optimizer = make(DHO2, model)
    groups = optimizer.param_groups
    halves = [{**groups[0], "params": [*part.parameters()]} for part in (model[:2], model[2:])]
    halves[1]["maximize"] = True
    with pytest.raises(ValueError, match="maximize differs between the groups"):
        optimizer.param_groups = halves
    assert optimizer.param_groups is groups
    train(model, optimizer)


def spread(rank: int, world_size: int, layout: str) -> list[torch.Tensor]:
    """The base is in pieces: these follow, too."""
    model = MLP.model()
    optimizer = DHO2(
        model, lr=0.1, momentum=0.9, layout=layout, warmup_steps=1, largest=2, curvature_interval=2
    )
    optimizer.curvature_closure = closure_of(model)
    for i, batch in enumerate(BATCHES):
        if i == 2:
            optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.01}]
        if i == 4:
            halves = [[*part.parameters()] for part in (model[:2], model[2:])]
            old = optimizer.param_groups[0]
            optimizer.param_groups = [
                {**old, "params": half, "lr": lr}
                for half, lr in zip(halves, (0.02, 0), strict=True)
            ]
        take(model, optimizer, shard(batch, rank, world_size))
    return [p.detach().clone() for p in model.parameters()]


def test_a_base_in_pieces_follows_a_list_assigned(world: World) -> None:
    (expected,) = world.run(spread, 1, "row")
    for layout in ("row", "column"):
        found = agreed(world.run(spread, 2, layout))
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


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


@each_of_five
def test_a_group_on_meta_is_refused(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    groups = optimizer.param_groups
    unmade = nn.Linear(3, 3, device="meta")
    with pytest.raises(ValueError, match="'\\(not in the model\\)' is on the meta device"):
        optimizer.add_param_group({"params": unmade.parameters()})
    with pytest.raises(ValueError, match="is on the meta device"):
        optimizer.param_groups = [{**groups[0], "params": [*groups[0]["params"], unmade.weight]}]
    assert optimizer.param_groups is groups
    assert len(groups) == 1
    train(model, optimizer)


@each_of_five
def test_what_is_frozen_may_be_on_meta(System: Any) -> None:
    """Weights that are offloaded are there between passes."""
    model = nn.ModuleDict({"here": MLP.model(), "away": nn.Linear(3, 3, device="meta")})
    model["away"].requires_grad_(False)
    train(model["here"], make(System, model))
