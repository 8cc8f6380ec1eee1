"""Options: what is whose, of which model, and where processes and sharding allow it."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import SYSTEMS, each_system, hook_count
from tables import keywords_of, mlp, rows
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
SGD, Adam = torch.optim.SGD, torch.optim.Adam


# Keywords.

UNKNOWN = [
    ("damping", "dampin", SGD),
    ("kl_clip", "kl_clp", SGD),
    ("factor_update_steps", "factor_update_freq", SGD),
    ("grad_worker_fraction", "grad_worker_frac", SGD),
    ("gradient_exchange", "gradient_exchnge", SGD),
    ("curvature_interval", "curvature_intervall", SGD),
    ("warmup_steps", "warmup", SGD),
    ("lanczos_iterations", "lanczos_iteration", Adam),
    ("newton_scale", "newton_lr_scale", Adam),
    ("curvature_closure", "curvature_closur", SGD),
    ("momentum", "momentun", SGD),
    ("weight_decay", "weight_deacy", SGD),
    ("betas", "beta", Adam),
    ("amsgrad", "amsgrd", Adam),
]


@pytest.mark.parametrize(("System", "close", "wrong", "base"), rows(UNKNOWN))
def test_unknown_keyword_names_the_closest_known_one(
    System: Any, close: str, wrong: str, base: Any
) -> None:
    """Among those of the system and of the base."""
    with pytest.raises(TypeError, match=f"unknown keyword '{wrong}'.*did you mean '{close}'"):
        System(mlp(), lr=0.1, base=base, **{wrong: 0.5})


@each_system
@pytest.mark.parametrize(
    ("base", "options"),
    [
        (SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "foreach": False}),
        (Adam, {"betas": (0.8, 0.9), "eps": 1e-5, "amsgrad": True}),
        (torch.optim.AdamW, {"weight_decay": 0.3, "maximize": True}),
        (torch.optim.RMSprop, {"alpha": 0.7, "centered": True}),
    ],
)
def test_keywords_of_the_base_reach_it(
    System: Any, base: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    group = System(mlp(), lr=0.2, base=base, **options).param_groups[0]
    assert group["lr"] == 0.2
    assert {name: group[name] for name in options} == options


@each_system
def test_every_option_of_ours_is_keyword_only_and_none_is_the_bases(System: Any) -> None:
    """A name of both would be taken from the base without a word."""
    _, first, *others = inspect.signature(System.__init__).parameters.values()
    assert first.name == "params_or_model"
    ours = {p.name for p in others if p.kind is not p.VAR_KEYWORD} - {"lr"}
    assert {p.kind for p in others} == {first.KEYWORD_ONLY, first.VAR_KEYWORD}
    for base in (SGD, Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        assert ours.isdisjoint(inspect.signature(base).parameters)


@each_system
def test_type_checkers_see_the_keywords_that_there_are(System: Any) -> None:
    """Those of the optimizer's dataclass, by way of `typed`; each has its meaning told."""
    kind = vars(sys.modules[System.__module__])[f"{System.__name__}Keywords"]
    seen = {each.name for each in dataclasses.fields(kind)}
    ours = typing.get_type_hints(System.__init__)
    assert keywords_of(System) <= seen
    documented = inspect.getdoc(System) or ""
    assert all(f"\n    {name}: " in documented for name in ours.keys() - {"return", "base_kwargs"})


# The model.


@each_system
def test_parameters_without_a_model_are_refused_where_layers_are_looked_at(System: Any) -> None:
    """With the line to write."""
    model, name = mlp(), System.__name__
    if System is DHO2:
        System(model.parameters(), lr=0.1)
    else:
        with pytest.raises(TypeError) as error:
            System(model.parameters(), lr=0.1)
        assert f"write {name}(params, model=model, lr=...)" in str(error.value)
    with pytest.raises(TypeError, match="two models"):
        System(model, model=mlp(), lr=0.1)
    with pytest.raises(TypeError, match=r"model='resnet' is not a torch\.nn\.Module"):
        System(model.parameters(), model="resnet", lr=0.1)
    System(model, model=model, lr=0.1)


@each_system
def test_a_module_stands_for_its_trainable_parameters(System: Any) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = System(model, lr=0.1)
    expected = [p for p in model.parameters() if p.requires_grad]
    found = optimizer.param_groups[0]["params"]
    assert [id(p) for p in found] == [id(p) for p in expected]


@each_system
def test_a_refusal_leaves_the_model_as_it_was(System: Any) -> None:
    model = mlp()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    for wrong in (
        {"damping": -1.0},
        {"flavour": 1},
        {"base": torch.optim.LBFGS},
        {"solver": "x"},
        {"layout": "x"},
        {"largest": -1},
    ):
        with pytest.raises((TypeError, ValueError)):
            System(model, lr=0.1, **wrong)
    with pytest.raises(ValueError, match="learning rate"):
        System(model, lr=-0.1)
    assert hook_count(model) == 0
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


# Gradient workers.


# Processes and sharding.


def refusals(rank: int, world_size: int, system: int) -> dict[str, str]:
    """The messages of what is refused when the optimizer averages gradients itself."""
    System, model = SYSTEMS[system], mlp()
    wrapped = DistributedDataParallel(mlp())
    return {
        "GradScaler": refusal(System, model, grad_scaler=torch.amp.GradScaler("cpu")),
        "disabled": refusal(System, model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False)),
        "ShardedGradScaler": refusal(System, model, grad_scaler=ShardedGradScaler("cpu")),
        "under DDP": refusal(System, wrapped, grad_scaler=torch.amp.GradScaler("cpu")),
        "averaging off": refusal(
            System,
            model,
            grad_scaler=torch.amp.GradScaler("cpu"),
            gradient_averaging=False,
        ),
    }


def refusal(System: Any, model: nn.Module, **options: Any) -> str:
    """What the system says to that; nothing if it takes it."""
    try:
        System(model, lr=0.1, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("system", range(len(SYSTEMS)))
def test_grad_scaler_is_refused_where_the_optimizer_averages_gradients_itself(
    world: World, system: int
) -> None:
    """One rank would skip its step alone. Not under DDP, nor with a scaler that talks to others."""
    for found in world.run(refusals, 2, system):
        message = found["GradScaler"]
        assert "GradScaler with gradients averaged by the optimizer over 2 processes" in message
        assert "wrap the model in DistributedDataParallel, or use" in message
        assert set(found.values()) == {message, ""}


@each_system
def test_a_lazy_module_must_have_seen_a_batch(System: Any) -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' is not initialised yet; run one batch"):
        System(nn.Sequential(nn.LazyLinear(3)), lr=0.1)
