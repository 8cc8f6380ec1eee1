"""Options in a parameter group: those of layers act on its layers, and all others raise."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from optimizer_cases import KRONECKER, each_kronecker, each_of_five, factors, make, same, take
from option_tables import keywords_of
from ranks import agreed, follow
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from second_order import KAISA, RankMismatchError, TraceRule

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)


def groups_of(model: nn.Module, **own: Any) -> list[dict[str, Any]]:
    """Two groups, of which the first, of the first two layers, has options of its own."""
    body = [*model[:4].parameters()]
    head = [*model[4:].parameters()]
    return [{"params": body, **own}, {"params": head}]


def stepped(System: Any, own: dict[str, Any], steps: int = 1, **options: Any) -> Any:
    """A model and its optimizer after some steps; gradients are the preconditioned ones."""
    model = MLP.model()
    optimizer = make(System, groups_of(model, **own), **options)
    for batch in BATCHES[:steps]:
        take(model, optimizer, batch)
    return model, optimizer


def gradients(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Those of the first two layers, and of the last one."""
    parts = (model[:4], model[4:])
    return tuple(parameters_to_vector([p.grad for p in part.parameters()]) for part in parts)  # type: ignore[return-value]


@each_kronecker
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"relative_damping": True, "grafting": "gradient"},
        {"solver": "inverse", "inv_update_steps": TraceRule(every=1)},
        {"damping": lambda step: 0.1},
    ],
    ids=["absolute", "relative", "inverse by trace", "callable"],
)
def test_a_groups_damping_applies_to_its_layers(System: Any, options: Any) -> None:
    mixed, optimizer = stepped(System, {"damping": 0.7}, **options)
    usual, _ = stepped(System, {}, **options)
    strong, _ = stepped(System, {}, **{**options, "damping": 0.7})
    assert torch.equal(gradients(mixed)[0], gradients(strong)[0])
    assert torch.equal(gradients(mixed)[1], gradients(usual)[1])
    assert not torch.equal(gradients(mixed)[0], gradients(usual)[0])
    assert "group 0: damping 0.7" in str(optimizer.summary())
    found = optimizer.curvature()
    if "relative_damping" not in options:
        assert [found[name].damping for name in found] == [0.7, 0.7, 0.1]


@each_kronecker
def test_a_groups_factor_decay_applies_to_its_layers(System: Any) -> None:
    _, mixed = stepped(System, {"factor_decay": 0.5, "lr": 0.0}, 3, lr=0.0)
    _, usual = stepped(System, {}, 3, lr=0.0)
    _, short = stepped(System, {}, 3, lr=0.0, factor_decay=0.5)
    for name, optimizer in (("0", short), ("2", short), ("4", usual)):
        assert same(factors(mixed)[name], factors(optimizer)[name])
    assert not same(factors(short)["4"], factors(usual)["4"])


@each_kronecker
def test_precondition_false_equals_skip_layers(System: Any) -> None:
    model, optimizer = stepped(System, {"precondition": False}, 3)
    twin = MLP.model()
    skipping = make(System, groups_of(twin), skip_layers=["0", "2"])
    for batch in BATCHES[:3]:
        take(twin, skipping, batch)
    assert same(model, twin)
    rows = {row.name: row for row in optimizer.summary().rows}
    assert rows["0"].status == "base"
    assert rows["0"].detail == "precondition=False in its parameter group"
    optimizer.add_param_group({"params": [], "precondition": False})


def test_standalone_matrices_and_experts_fall_back_by_their_group() -> None:
    model = ZOO["attention"].model()
    matrix = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    model.register_parameter("alone", matrix)
    rest = [p for p in model.parameters() if p is not matrix]
    for own in ({}, {"precondition": False}):
        groups = [{"params": [matrix], **own}, {"params": rest}]
        optimizer = make(KAISA, groups, unsupported_layers="gradient_factors")
        names = {row.name for row in optimizer.summary().rows if row.status == "preconditioned"}
        assert ("alone" in names) is not bool(own)


@each_kronecker
def test_group_options_are_saved_and_take_effect_when_changed(System: Any) -> None:
    model, optimizer = stepped(System, {"damping": 0.7, "factor_decay": 0.5}, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    again = make(System, groups_of(twin))
    again.load_state_dict(saved)
    assert [group.get("damping") for group in again.param_groups] == [0.7, None]
    for batch in BATCHES[2:]:
        take(model, optimizer, batch)
        take(twin, again, batch)
    torch.testing.assert_close(
        parameters_to_vector(twin.parameters()),
        parameters_to_vector(model.parameters()),
        rtol=1e-12,
        atol=0,
    )

    for group in saved["param_groups"]:  # as of a run without these options
        group.pop("damping", None)
    other = MLP.model()
    unchanged = make(System, groups_of(other, damping=0.3))
    unchanged.load_state_dict(saved)
    assert [group.get("damping") for group in unchanged.param_groups] == [0.3, None]

    saved["param_groups"][0]["damping"] = "much"
    with pytest.raises(ValueError, match=r"param_groups\[0\]: damping='much' .*Nothing has been"):
        unchanged.load_state_dict(saved)
    saved["param_groups"][0] |= {"damping": 0.3, "precondition": False}
    with pytest.raises(ValueError, match=r"'precondition': False, and here it is True"):
        unchanged.load_state_dict(saved)

    before = gradients(model)
    optimizer.param_groups[0]["damping"] = 1e3
    take(model, optimizer, BATCHES[0])
    assert float(gradients(model)[0].norm()) < 0.1 * float(before[0].norm())
    optimizer.param_groups[0]["damping"] = -1.0
    with pytest.raises(ValueError, match=r"of parameter group 0: damping=-1\.0 is outside"):
        take(model, optimizer, BATCHES[0])


@each_of_five
def test_options_that_groups_cannot_set_raise_with_the_remedy(System: Any) -> None:
    """At construction and later; those of the base and of other programs do not."""
    model = MLP.model()
    name = System.__name__
    options = keywords_of(System) | {"damping", "factor_decay", "precondition"}
    options -= {"damping", "factor_decay", "precondition"} if System in KRONECKER else set()
    optimizer = make(System, groups_of(model)[:1], model=model)
    for option in options:
        message = f"parameter group 1 has {option}=0.5, which cannot differ between groups; "
        message += (
            rf"set .* as in {name}\(\.\.\., {option}=" if option in keywords_of(System) else ""
        )
        groups = groups_of(model)
        groups[1][option] = 0.5
        with pytest.raises(ValueError, match=message):
            make(System, groups)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(groups[1])
    assert len(optimizer.param_groups) == 1
    make(System, [{"params": model.parameters(), "weight_decay": 0.1, "name": "all"}])


WRONG = [("damping", -1.0), ("damping", "auto"), ("factor_decay", 1.0), ("precondition", 0)]


@pytest.mark.parametrize(("option", "value"), WRONG)
def test_invalid_group_values_raise(option: str, value: Any) -> None:
    model = MLP.model()
    with pytest.raises((TypeError, ValueError), match=f"'{option}' of parameter group 0: {option}"):
        make(KAISA, groups_of(model, **{option: value}))


@pytest.mark.parametrize(("option", "value"), [("damping", 0.2), ("precondition", False)])
def test_a_layer_in_two_groups_raises_with_its_name(option: str, value: Any) -> None:
    """At construction, and by a group that is added, after which everything is as before."""
    model = MLP.model()
    others = [p for name, p in model.named_parameters() if name != "2.weight"]
    separate = [{"params": [model[2].weight], option: value}, {"params": others}]
    with pytest.raises(ValueError, match=f"layer '2' has its weight .*different '{option}'"):
        make(KAISA, separate)
    weights = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
    optimizer = make(KAISA, weights)
    with pytest.raises(ValueError, match="layer '0' has its weight"):
        optimizer.add_param_group({"params": [model[0].bias], option: value})
    assert len(optimizer.param_groups) == 1
    take(model, optimizer, BATCHES[0])


SPREAD: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (0, {"grad_worker_fraction": 0, "factor_exchange": "reduce"}),
    (2, {"grafting": "gradient", "base": torch.optim.AdamW}),
]


def trained(rank: int, world_size: int, own: dict[str, Any]) -> list[list[Tensor]]:
    """Trajectories by all ways to spread the work."""
    trajectories = []
    for system, options in SPREAD:
        model = MLP.model()
        with make(KRONECKER[system], groups_of(model, **own), **options) as optimizer:
            trajectories.append(follow(rank, world_size, model, optimizer, MLP, BATCHES))
    return trajectories


def with_own_damping(rank: int, world_size: int) -> str:
    model = MLP.model()
    try:
        make(KAISA, groups_of(model, damping=0.1 + rank))
    except RankMismatchError as error:
        return str(error)
    return ""


def test_group_options_apply_equally_on_every_rank(world: World) -> None:
    own = {"damping": 0.7, "factor_decay": 0.5}
    ranks = world.run(trained, 2, own)
    expected = trained(0, 1, own)
    for i, trajectory in enumerate(expected):
        found = agreed([rank[i] for rank in ranks])
        torch.testing.assert_close(found, trajectory, rtol=1e-9, atol=1e-12)
    assert all("damping" in message for message in world.run(with_own_damping, 2))


def test_a_layer_of_a_module_cannot_be_excluded_alone() -> None:
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    projections = [attention.in_proj_weight, attention.in_proj_bias]
    others = [p for p in attention.parameters() if all(p is not own for own in projections)]
    groups = [{"params": projections, "precondition": False}, {"params": others}]
    with pytest.raises(ValueError, match=r"the parameters of its module in .* 'precondition'"):
        KAISA(groups, lr=0.1, model=attention)
