"""Options: what is whose, of which model, and where processes and sharding allow it."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from models import ZOO
from optimizer_cases import (
    SYSTEMS,
    asking,
    each_kronecker,
    each_system,
    eigenpairs_only,
    same,
    take,
)
from option_tables import ALL, keywords_of, mlp, rows, takes
from saved_states import saved_and_loaded
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, AuxBase, DistKFAC
from second_order.optimizers.config import (
    CommonOptions,
    DistKFACOptions,
    DPKFACOptions,
    EpochOptions,
    FOSIOptions,
    KAISAOptions,
    KFACOptions,
)
from second_order.optimizers.consistency import to_primitive
from second_order.optimizers.keywords import documented

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

SGD = torch.optim.SGD
Adam = torch.optim.Adam


UNKNOWN = [
    ("factor_update_steps", "factor_update_freq", SGD),
    ("curvature_interval", "curvature_intervall", SGD),
    ("curvature_closure", "curvature_closur", SGD),
    ("weight_decay", "weight_deacy", SGD),
    ("betas", "beta", Adam),
]


@pytest.mark.parametrize(("System", "close", "wrong", "base"), rows(UNKNOWN))
def test_an_unknown_keyword_suggests_the_closest_one(
    System: Any, close: str, wrong: str, base: Any
) -> None:
    """Among those of the system and of the base."""
    with pytest.raises(TypeError, match=f"unknown keyword '{wrong}'.*did you mean '{close}'"):
        System(mlp(), lr=0.1, base=base, **{wrong: 0.5})


@each_system
def test_a_keyword_of_adamw_suggests_it_as_the_base(System: Any) -> None:
    with pytest.raises(TypeError, match=r"'betas'.*one of SGD; .*pass base=torch\.optim\.AdamW$"):
        System(mlp(), lr=0.1, betas=(0.9, 0.999))


@each_system
def test_our_options_are_keyword_only_and_differ_from_the_bases(System: Any) -> None:
    """A name of both would be taken from the base without a word."""
    _, first, second, *others = inspect.signature(System.__init__).parameters.values()
    assert (first.name, second.name) == ("params", "lr")
    own_names = {p.name for p in others if p.kind is not p.VAR_KEYWORD}
    assert {p.kind for p in others} == {first.KEYWORD_ONLY, first.VAR_KEYWORD}
    for base in (SGD, Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        assert own_names.isdisjoint(inspect.signature(base).parameters)


@each_system
def test_the_docstring_describes_every_keyword(System: Any) -> None:
    own_names = typing.get_type_hints(System.__init__)
    documented = inspect.getdoc(System) or ""
    assert all(
        f"\n    {name}: " in documented for name in own_names.keys() - {"return", "base_kwargs"}
    )


def test_options_are_undocumented_if_python_has_removed_docstrings() -> None:
    """As `python -OO` does."""

    class Bare(KAISA):
        pass

    assert documented()(Bare) is Bare
    assert Bare.__doc__ is None


@each_system
def test_only_optimizers_with_two_bases_document_them(System: Any) -> None:
    assert ("aux_base" in (inspect.getdoc(System) or "")) is ("aux_base" in keywords_of(System))


OPTIONS: dict[Any, tuple[Any, ...]] = {
    KAISA: (KAISAOptions, KFACOptions, CommonOptions),
    DPKFAC: (DPKFACOptions, KFACOptions, CommonOptions),
    DistKFAC: (DistKFACOptions, KFACOptions, CommonOptions),
    DHO2: (FOSIOptions, CommonOptions),
    MRDHO2: (EpochOptions, CommonOptions),
}
OTHERWISE: dict[Any, dict[str, Any]] = {DistKFAC: {"precondition_norms": True}}
ABSENT = {  # fields that are not keywords
    DHO2: {"aux_base"},
    MRDHO2: {
        *("aux_base", "curvature_interval", "overhead", "lr_scale_guard", "subspace_momentum"),
        *("warm_start", "trust_region", "layout"),
    },
}


@pytest.mark.parametrize("System", ALL)
def test_signatures_equal_the_configuration(System: Any) -> None:
    expected: dict[str, Any] = {}
    for kind in OPTIONS[System]:
        expected |= {each.name: each.default for each in dataclasses.fields(kind)}
    expected |= OTHERWISE.get(System, {})
    for name in ABSENT.get(System, {"adaptive"}):
        del expected[name]
    found = inspect.signature(System).parameters
    own_names = keywords_of(System) - {"curvature_closure"}
    assert {name: found[name].default for name in own_names} == expected


def test_kaisa_has_at_most_32_keywords() -> None:
    assert len(keywords_of(KAISA)) < 32


@each_system
def test_the_model_cannot_be_passed_twice(System: Any) -> None:
    model = mlp()
    with pytest.raises(TypeError, match="two models"):
        System(model, model=mlp(), lr=0.1)
    with pytest.raises(TypeError, match=r"model='resnet' is not a torch\.nn\.Module"):
        System(model.parameters(), model="resnet", lr=0.1)
    System(model, model=model, lr=0.1)


def refusals(rank: int, world_size: int, system: int) -> dict[str, str]:
    """The messages of what is refused when the optimizer averages gradients itself."""
    System = SYSTEMS[system]
    model = mlp()
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
def test_grad_scaler_raises_if_the_optimizer_averages_gradients(world: World, system: int) -> None:
    """One rank would skip its step alone. Not under DDP, nor with a scaler that talks to others."""
    for found in world.run(refusals, 2, system):
        message = found["GradScaler"]
        assert "GradScaler with gradients averaged by the optimizer over 2 processes" in message
        assert "wrap the model in DistributedDataParallel, or use" in message
        assert set(found.values()) == {message, ""}


@each_system
def test_uninitialized_lazy_modules_raise(System: Any) -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' is not initialized yet; run one batch"):
        System(nn.Sequential(nn.LazyLinear(3)), lr=0.1)


NUMBERS: list[tuple[str, Any, str]] = [
    ("damping", -1.0, r"damping=-1\.0 is outside \[0, inf\); "),
    ("factor_decay", 1.0, r"factor_decay=1\.0 is outside \[0, 1\); 'auto' counts"),
    ("kl_clip", 0.0, r"kl_clip=0\.0 is outside \(0, inf\]; use a positive number, 'auto', or None"),
    ("grad_worker_fraction", -0.5, r"grad_worker_fraction=-0\.5 is outside \[0, 1\]; 1\.0 is"),
    ("factor_update_steps", 0, "factor_update_steps=0 is below 1; use 1 for every step"),
    ("inv_update_steps", -3, "inv_update_steps=-3 is below 1; use 1 for every step"),
    ("damping_floor", -0.1, r"damping_floor=-0\.1 is outside \[0, 1\]; 0 for no floor"),
    ("num_largest", -1, "num_largest=-1 is below 0; use 0 for none"),
    ("num_smallest", -2, "num_smallest=-2 is below 0; use 0 for none"),
    ("curvature_interval", 0, "curvature_interval=0 is below 1; use 1 for every step"),
    ("overhead", 0.0, r"overhead=0\.0 is outside \(0, 10\]; 0\.(15|2)"),
    ("warmup_steps", -1, "warmup_steps=-1 is below 0; use 0 to begin with a refresh"),
    ("newton_scale", -0.1, r"newton_scale=-0\.1 is outside \[0, inf\); 0\.1 is the default"),
    ("lr_scale_clip", 0.5, r"lr_scale_clip=0\.5 is outside \[1, inf\]; 1\.0 for no scaling"),
    (
        "lanczos_iterations",
        9,
        r"lanczos_iterations=9 is below 10; use 4 \(num_largest \+ num_smallest\)",
    ),
    ("lanczos_tol", -1e-3, r"lanczos_tol=-0\.001 is outside \[0, inf\); 1e-2 is the default"),
    ("eigenvalue_floor", -0.1, r"eigenvalue_floor=-0\.1 is outside \[0, 1\]; 0\.01 is usual"),
    ("subspace_momentum", 1.0, r"subspace_momentum=1\.0 is outside \[0, 1\); use 'average'"),
    ("seed", -1, "seed=-1 is below 0; use 0"),
    ("seed", 2**70, rf"seed={2**70} is above {2**63 - 1}, 2\^63 - 1; use a smaller one"),
    ("debug", 0, "debug=0 is below 1; use True for every 100 steps, False for never"),
    ("max_factor_dim", 0, "max_factor_dim=0 is below 1.*use 1"),
    ("lr", float("nan"), "lr=nan is outside"),
    ("helper_timeout", float("inf"), r"helper_timeout=inf is outside \[0\.1, 1e\+06\]; 60\.0"),
    ("doubly_factored", {"0": (2.5, 4)}, r"doubly_factored=.*both integers"),
    ("curvature_closure", [], r"the curvature closure is \[\]; pass a function"),
]
CHOICES: list[tuple[str, Any, str]] = [
    ("solver", "eigne", "solver='eigne' is not one of 'inverse', 'eigen'; did you mean 'eigen'"),
    ("fisher", "emprical", "'empirical', 'categorical', .*; did you mean 'empirical'"),
    ("fisher", "gausian", "fisher='gausian' is not one of .*did you mean 'gaussian'"),
    ("kfac_approx", "reduced", "'expand', 'reduce'; did you mean 'reduce'"),
    ("factor_exchange", "reduced", "'all_reduce', 'reduce', 'pipelined'; did you mean 'reduce'"),
    (
        "exchange_dtype",
        torch.float16,
        r"exchange_dtype=torch\.float16 .*65504\); use torch\.float32",
    ),
    ("step_scale", "on", "step_scale='on' is not one of 'auto', True, False"),
    (
        "loss_reduction",
        "none",
        "loss_reduction='none' is not one of 'auto', 'mean', 'pass_mean', 'sum', 'step_mean'",
    ),
    ("gradient_averaging", "always", "gradient_averaging='always' is not one of 'auto', True"),
    ("factor_dtype", torch.float16, r"factor_dtype=torch\.float16 .*65504\); use torch\.float32"),
    (
        "lanczos_dtype",
        torch.bfloat16,
        r"lanczos_dtype=torch\.bfloat16 is not one of torch\.float32, torch\.float64",
    ),
    ("hvp", "retain", "'retained', 'recomputed', 'differences'; did you mean 'retained'"),
    ("curvature", "gauss", "curvature='gauss' is not one of .*'gauss-newton'"),
    ("layout", "rows", "layout='rows' is not one of 'row', 'column'; did you mean 'row'"),
    ("subspace_momentum", "mean", "subspace_momentum='mean' is not one of 'average', 'base'"),
]
FLAGS = (
    "relative_damping",
    "colocate_factors",
    "async_inverse",
    "deterministic",
    "precondition_norms",
    "lr_scale_guard",
    "warm_start",
    "trust_region",
)
TYPES: list[tuple[str, Any, str]] = [
    ("damping", "often", r"damping='often' is not a number; "),
    ("kl_clip", "off", "kl_clip='off' is not a number; use a positive number, 'auto', or None"),
    ("factor_update_steps", 1.5, r"factor_update_steps=1\.5 is not an integer; use"),
    ("inv_update_steps", True, "inv_update_steps=True is not an integer; use"),
    ("skip_layers", "head", r"skip_layers='head' is not a sequence .*; write skip_layers=\['head'"),
    ("skip_layers", {"head"}, r"skip_layers=\{'head'\} is not a sequence .*; write skip_layers="),
    ("num_smallest", None, "num_smallest=None is not an integer; use 0 for none"),
    ("subspace_momentum", True, "subspace_momentum=True is not a number; use 'average'"),
    ("grad_scaler", 1024.0, r"grad_scaler=1024\.0 has no scale\(\); pass a torch\.amp\.GradScaler"),
    ("lr", "0.1", "lr='0.1' is not a number; a finite number or a tensor"),
    ("debug", 1.5, r"debug=1\.5 is not an integer; use True for every 100 steps"),
    ("process_group", {}, "process_group={} is not a .*ProcessGroup; pass what"),
    *((name, torch.ones(2), f"{name}=tensor.* is not a flag; use True or False") for name in FLAGS),
    ("curvature_closure", 3, "the curvature closure is 3; pass a function"),
    ("base", "SGD", r"base='SGD' is not an optimizer class; pass the class itself"),
    ("base", torch.optim.Optimizer, r"base=Optimizer has no step\(\) .*; pass one of them, as in"),
    ("base", KAISA, "is a second-order optimizer; use a first-order"),
]


NUMPY = [
    ("damping", np.float32(0.5)),
    ("inv_update_steps", np.int64(2)),
    ("overhead", np.float32(0.5)),
    ("newton_scale", np.float32(0.5)),
    ("warmup_steps", np.int64(2)),
    ("seed", np.int64(2)),
]


@pytest.mark.parametrize(("System", "option", "value"), rows(NUMPY))
def test_numbers_of_numpy_are_numbers_and_checkpoints_load_without_it(
    System: Any, option: str, value: Any
) -> None:
    model = mlp()
    plain_model = mlp()
    optimizer = System(model, **{"lr": np.float32(0.25), option: value})
    plain = System(plain_model, **{"lr": 0.25, option: value.item()})
    train_twice(optimizer, model)
    train_twice(plain, plain_model)
    assert same(model, plain_model)
    saved_and_loaded(optimizer.state_dict())


def test_numbers_of_numpy_are_numbers_in_the_bases_and_in_groups() -> None:
    half = np.float32(0.5)
    model = mlp()
    base = {"base": torch.optim.AdamW, "betas": (half, 0.9), "weight_decay": half}
    base["amsgrad"] = np.True_
    aux_base = AuxBase(torch.optim.AdamW, kwargs={"eps": half})
    groups = [{"params": list(model.parameters()), "lr": half, "damping": half}]
    for options in ({"model": model, **base}, {"model": model, **base, "aux_base": aux_base}):
        optimizer = KAISA(groups, **options)
        train_twice(optimizer, model)
        saved_and_loaded(optimizer.state_dict())
    for number in (half, np.int64(3), np.True_):
        assert to_primitive(number) == number


def test_schedulers_can_set_numbers_of_numpy() -> None:
    model = mlp()
    optimizer = KAISA(model, lr=0.1)
    train_twice(optimizer, model)
    optimizer.param_groups[0]["lr"] = np.float64(0.05)
    loaded = saved_and_loaded(optimizer.state_dict())
    assert loaded["param_groups"][0]["lr"] == 0.05


@pytest.mark.parametrize(("System", "option", "value", "message"), rows(NUMBERS + CHOICES))
def test_an_invalid_value_raises_with_value_bound_and_remedy(
    System: Any, option: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        System(mlp(), **{"lr": 0.1, option: value})


@pytest.mark.parametrize(("System", "option", "value", "message"), rows(TYPES))
def test_an_invalid_type_raises_with_value_and_remedy(
    System: Any, option: str, value: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        System(mlp(), **{"lr": 0.1, option: value})


@eigenpairs_only
def test_every_option_has_tested_invalid_values(System: Any) -> None:
    """But for those that every optimizer has, and the closure, which is tested by itself."""
    tested = {row[0] for row in NUMBERS + CHOICES + TYPES}
    others = {"model"}
    assert keywords_of(System) - tested == others


def train_twice(optimizer: Any, model: nn.Module) -> None:
    for batch in ZOO["mlp"].batches(2):
        take(model, optimizer, batch)


SCHEDULES = [
    ("damping", -1.0, ValueError, r"damping=-1\.0 is outside"),
    ("factor_decay", 1.0, ValueError, r"factor_decay=1\.0 is outside"),
    ("kl_clip", 0.0, ValueError, r"kl_clip=0\.0 is outside"),
    ("factor_update_steps", 0, ValueError, "factor_update_steps.*=0 is below 1"),
    ("inv_update_steps", 0.5, TypeError, r"inv_update_steps.*=0\.5 is not an integer"),
    ("newton_scale", -1.0, ValueError, r"newton_scale=-1\.0 is outside"),
    ("newton_scale", "fast", TypeError, "newton_scale='fast' is not a number"),
    ("curvature_interval", 0, ValueError, "curvature_interval.*=0 is below 1"),
    ("curvature_interval", 0.5, TypeError, r"curvature_interval.*=0\.5 is not an integer"),
]


@pytest.mark.parametrize(
    ("System", "option", "value", "error", "message"), rows(SCHEDULES, SYSTEMS)
)
def test_values_of_callables_have_the_same_bounds(
    System: Any, option: str, value: Any, error: Any, message: str
) -> None:
    model = mlp()
    options: dict[str, Any] = {option: lambda step: value}
    if takes(System, "warmup_steps"):
        options["warmup_steps"] = 0
    with pytest.raises(error, match=message):  # the first step does not evaluate the interval
        train_twice(System(model, lr=0.1, **options), model)


@each_kronecker
@pytest.mark.parametrize("form", [list, tuple])
def test_skip_layers_matches_names_patterns_and_classes(
    System: Any, form: Callable[..., Any]
) -> None:
    model = ZOO["norms"].model()
    optimizer = System(model, lr=0.1, skip_layers=form(["Conv*", "7"]))
    rows = {row.name: row for row in optimizer.summary().rows}
    assert rows["0"].detail == "skip_layers: 'Conv*'"
    assert rows["7"].detail == "skip_layers: '7'"
    assert rows["4"].status == "preconditioned"


@eigenpairs_only
@pytest.mark.parametrize("closure", [3, "loss", [], [None], torch.tensor(1.0)], ids=str)
def test_a_curvature_closure_must_be_callable(System: Any, closure: Any) -> None:
    model = mlp()
    optimizer = System(model, lr=0.1, warmup_steps=0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError), match=r"curvature closure.*function"):
        optimizer.curvature_closure = closure
    assert optimizer.curvature_closure is None
    x, y = ZOO["mlp"].batch()
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises((TypeError, ValueError), match=r"curvature closure.*function"):
        optimizer.step(curvature_closure=closure)
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.step(**asking(model, optimizer, (x, y)))
    assert optimizer.curvature.refreshes == 1


@pytest.mark.parametrize("System", ALL)
@pytest.mark.parametrize("no_model", [5, "model", None, {"params": 1}, torch.ones(3)], ids=str)
def test_values_that_are_neither_modules_nor_parameters_raise(System: Any, no_model: Any) -> None:
    with pytest.raises(TypeError, match=rf"{System.__name__} got .*{System.__name__}\("):
        System(no_model, model=mlp(), lr=0.1)
