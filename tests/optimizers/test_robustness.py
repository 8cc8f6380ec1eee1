"""Newly trainable layers, process groups, first steps, refused options, and default devices."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from models import ZOO
from optimizer_cases import (
    SYSTEMS,
    each_of_five,
    each_system,
    hook_count,
    make,
    noted,
    take,
)
from ranks import vector
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, SecondOrderWarning, TraceRule

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(8)


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_a_newly_trainable_layer_is_refreshed_when_it_has_statistics(how: str) -> None:
    """Not at the next of the long intervals, and without a warning that it is never called."""
    model = MLP.model()
    intervals = {"factor_update_steps": 100, "inv_update_steps": 100}
    late = list(model[2].parameters())
    if how == "unfrozen":
        model[2].requires_grad_(False)
        optimizer = make(KAISA, list(model.parameters()), model=model, **intervals)
    else:
        others = [*model[0].parameters(), *model[4].parameters()]
        with noted():
            optimizer = make(KAISA, others, model=model, **intervals)
    for batch in BATCHES[:3]:
        take(model, optimizer, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        if how == "unfrozen":
            model[2].requires_grad_(True)
        else:
            optimizer.add_param_group({"params": late})
        for batch in BATCHES[3:6]:
            take(model, optimizer, batch)
    held = {row.name: row.inverse_bytes for row in optimizer.summary().rows}
    assert all(held[name] > 0 for name in ("0", "2", "4"))


@each_system
def test_launched_processes_without_a_process_group_are_warned(
    System: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(SecondOrderWarning, match=r"each process trains alone; call .*init_process"):
        System(MLP.model(), lr=0.1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        System(MLP.model(), lr=0.1)


def groups_of_many(rank: int, world_size: int) -> int:
    before = dist.new_group
    made = []
    dist.new_group = lambda *a, **k: made.append(a) or before(*a, **k)  # type: ignore[assignment]
    try:
        for _ in range(3):
            KAISA(MLP.model(), lr=0.1, grad_worker_fraction=0.5)
    finally:
        dist.new_group = before
    return len(made)


def test_several_optimizers_share_process_groups(world: World) -> None:
    """A row, a column and what they compare in, for as many optimizers as there are."""
    assert world.run(groups_of_many, 4) == [3, 3, 3, 3]


def warm_up_from_zero(rank: int, world_size: int, system: int, zeros: bool) -> list[Tensor]:
    """The first step has lr 0, and one rank has no gradients at that step."""
    model = MLP.model()
    optimizer = make(SYSTEMS[system], model, lr=0.0)
    x, y = BATCHES[0]
    if rank == 0 or zeros:
        (cross_entropy(model(x), y) * float(rank == 0)).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    for batch in BATCHES[1:4]:
        take(model, optimizer, batch)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("zeros", [False, True], ids=["no gradient", "gradients of zero"])
@pytest.mark.parametrize("system", range(len(SYSTEMS)))
def test_a_first_step_with_lr_zero_keeps_ranks_in_sync(
    world: World, system: int, zeros: bool
) -> None:
    first, second = world.run(warm_up_from_zero, 2, system, zeros, timeout=30)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


SYSTEMS = [KAISA, DPKFAC, DistKFAC, DHO2, MRDHO2]


class ByTensor(torch.optim.SGD):
    """A base that is not known to be elementwise."""


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "fraction": (KAISA, {"grad_worker_fraction": 0.75}, "0.75 with 2 processes gives 1.5 gradient"),
    "device": (DistKFAC, {"inverse_device": "cuda"}, "inverse_device='cuda', but the parameters"),
    "stats": (DistKFAC, {"stats_workers": 2}, "stats_workers=2 with 2 processes leaves none to"),
    "helpers": (MRDHO2, {"helper_ranks": 2}, "helper_ranks=2 with 2 processes leaves none to"),
    "base": (DHO2, {"base": ByTensor}, "not known to be elementwise; use layout"),
}
UNEQUAL: dict[str, tuple[Any, str, list[Any]]] = {
    "fractions": (KAISA, "grad_worker_fraction", [1.0, 0.75]),
    "stats": (DistKFAC, "stats_workers", [1, 2]),
    "helpers": (MRDHO2, "helper_ranks", [2, 1]),
    "epochs": (MRDHO2, "epoch_steps", [3, 4]),
    "bounds": (DPKFAC, "max_factor_dim", [100, 200]),
}


def refusal(System: Any, rank: int, **options: Any) -> str:
    """The error of a constructor that has changed nothing."""
    model = MLP.model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(float(rank))
    before = vector(model)
    try:
        System(model, lr=0.1, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        assert torch.equal(vector(model), before), "the parameters have been overwritten"
        assert hook_count(model) == 0
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusals(rank: int, world_size: int) -> dict[str, str]:
    found = {name: refusal(System, rank, **o) for name, (System, o, _) in REFUSED.items()}
    found |= {
        f"unequal {name}": refusal(System, rank, **{option: values[rank]})
        for name, (System, option, values) in UNEQUAL.items()
    }
    for System, option in ((DistKFAC, "stats_workers"), (MRDHO2, "helper_ranks")):
        model = DistributedDataParallel(MLP.model())
        before = vector(model)
        with pytest.raises(ValueError, match=f"{option}=1 with a model in DistributedData"):
            System(model, lr=0.1, **{option: 1})
        assert torch.equal(vector(model), before)
    found["valid"] = refusal(KAISA, rank, grad_worker_fraction=0.5)  # no rank waits
    return found


def test_all_ranks_raise_before_parameters_are_overwritten(world: World) -> None:
    for found in world.run(refusals, 2):
        for name, (_, _, message) in REFUSED.items():
            assert message in found[name], name
        for name in UNEQUAL:
            assert found[f"unequal {name}"].startswith("RankMismatchError"), name
        assert found["valid"] == "accepted"


def outsiders(rank: int, world_size: int) -> dict[str, str]:
    group = dist.new_group([0])
    others: dict[str, Any] = {"text": "gloo", "object": object(), "ranks": [0, 1]}
    if rank == 1:
        others["a group of others"] = group
    return {
        f"{System.__name__} {name}": refusal(System, rank, process_group=value)
        for System in SYSTEMS
        for name, value in others.items()
    }


def test_a_process_group_must_contain_this_process(world: World) -> None:
    first, second = world.run(outsiders, 2)
    assert len(second) == len(first) + len(SYSTEMS)
    for name, message in [*first.items(), *second.items()]:
        if name.endswith("a group of others"):
            assert "this process is not a member of process_group=" in message, name
        else:
            assert "is not a torch.distributed.ProcessGroup; pass what" in message, name


def train_on_default_device(
    rank: int, world_size: int, System: Any, default: str
) -> dict[str, list[Tensor]]:
    """A run with a checkpoint, the model on the CPU; batches and the model are made before."""
    options = {
        KAISA: {"fisher": "categorical"},
        DistKFAC: {"precondition_norms": True, "inv_update_steps": TraceRule()},
        MRDHO2: {"helper_ranks": world_size - 1},
    }.get(System, {})
    torch.manual_seed(0)
    model = MLP.model()
    found: dict[str, list[Tensor]] = {}
    with torch.device(default):
        optimizer = make(System, model, **options)
        for i, batch in enumerate(BATCHES[:5]):
            take(model, optimizer, batch)
            if i == 2:
                optimizer.consolidate(to=None)
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.summary()
        optimizer.metrics()
        role = getattr(optimizer, "role", "worker")
        optimizer.close()
    found[role] = [p.detach().clone() for p in model.parameters()]
    return found


@pytest.mark.parametrize("processes", [1, 2])
@each_of_five
def test_the_default_device_changes_nothing(System: Any, processes: int, world: World) -> None:
    plain = world.run(train_on_default_device, processes, System, "cpu")
    other = world.run(train_on_default_device, processes, System, "meta")
    for one, two in zip(plain, other, strict=True):
        assert one.keys() == two.keys()
        for p, q in zip(one.get("worker", []), two.get("worker", []), strict=True):
            assert torch.equal(p, q)
