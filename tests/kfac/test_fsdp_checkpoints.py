"""Sharded models and torch.distributed.checkpoint: by name, on any number of processes, and DDP."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_training import ADAM, AT_ONCE, GRADIENT, MOMENTUM, fsdp, go_on, narrow, shares
from placement_training import sharded
from ranks import OPTIONS, agreed, assert_same_trajectory
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from second_order import DPKFAC, KAISA, DistKFAC

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
BETWEEN: dict[str, Any] = {"inv_update_steps": 3, **GRADIENT}
"""The checkpoint is written after two steps: between two refreshes, and before the step scale."""
CASES = {
    "KAISA": (KAISA, {**MOMENTUM, **BETWEEN}),
    "reduce": (KAISA, {**ADAM, **BETWEEN, "factor_exchange": "reduce"}),
    "DPKFAC": (DPKFAC, {**ADAM, **BETWEEN}),
    "DistKFAC": (DistKFAC, {**MOMENTUM, **AT_ONCE, **BETWEEN}),
    "on threads": (DistKFAC, {**ADAM, "deterministic": True, "max_staleness": 2}),
}


def made(case: str, how: str) -> tuple[Any, Any]:
    System, options = CASES[case]
    model = narrow()
    trained: Any = DistributedDataParallel(model) if how == "ddp" else model
    if how == "fsdp":
        fsdp(model)
    return trained, System(trained, **{**OPTIONS, **options})


def saved(rank: int, world_size: int, folder: str, case: str, how: str) -> list[Tensor]:
    """Two steps, a checkpoint by all ranks, and the four steps that follow."""
    model, optimizer = made(case, how)
    data = shares(rank, world_size, 6)
    with optimizer:
        go_on(model, optimizer, data[:2])
        state = sharded(model, optimizer, StateDictOptions())
        dcp.save(state, checkpoint_id=folder)
        return go_on(model, optimizer, data[2:])


def resumed(rank: int, world_size: int, folder: str, case: str, how: str) -> list[Tensor]:
    """The four steps that follow a checkpoint."""
    model, optimizer = made(case, how)
    with optimizer:
        state = sharded(model, optimizer, StateDictOptions())
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return go_on(model, optimizer, shares(rank, world_size, 6)[2:])


@pytest.mark.parametrize("case", ["KAISA", "reduce", "DistKFAC", "on threads"])
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    world: World, tmp_path: Path, case: str
) -> None:
    """From two ranks to as many, bit for bit; to three and to DDP, and back."""
    folder = str(tmp_path / "sharded")
    expected = agreed(world.run(saved, 2, folder, case, "fsdp"))
    for found in world.run(resumed, 2, folder, case, "fsdp"):
        assert all(map(torch.equal, found, expected))
    for size, how in ((3, "fsdp"), (2, "ddp")):
        found = agreed(world.run(resumed, size, folder, case, how))
        assert_same_trajectory(found, expected, rtol=1e-8, hint=(size, how))
    plain = str(tmp_path / "plain")
    agreed(world.run(saved, 2, plain, case, "ddp"))
    found = agreed(world.run(resumed, 3, plain, case, "fsdp"))
    assert_same_trajectory(found, expected, rtol=1e-8)


def test_factors_return_to_their_owners(world: World, tmp_path: Path) -> None:
    """DPKFAC's statistics are of the owners' batches, and so of this number of ranks."""
    folder = str(tmp_path)
    expected = agreed(world.run(saved, 2, folder, "DPKFAC", "fsdp"))
    for how in ("fsdp", "ddp"):
        found = agreed(world.run(resumed, 2, folder, "DPKFAC", how))
        assert_same_trajectory(found, expected, rtol=1e-10, hint=how)
        assert how == "ddp" or all(map(torch.equal, found, expected))


def by_one_rank(rank: int, world_size: int) -> list[list[Tensor]]:
    """A whole state collected on all ranks, loaded by `set_` and by `load_state_dict` itself."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = made("reduce", "fsdp")
    data = shares(rank, world_size)
    go_on(model, optimizer, data[:2])
    optimizer.consolidate(to=None)
    weights = copy.deepcopy(get_model_state_dict(model, options=options))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    trajectories = [go_on(model, optimizer, data[2:])]
    twin, other = made("reduce", "fsdp")
    set_model_state_dict(twin, {**weights}, options=options)
    set_optimizer_state_dict(twin, other, copy.deepcopy(state), options=options)
    trajectories.append(go_on(twin, other, data[2:]))

    plain, third = made("reduce", "")
    plain.load_state_dict(weights)
    numbers = {name: i for i, name in enumerate(dict(plain.named_parameters()))}
    by_number = {
        "state": {numbers[name]: entry for name, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }
    third_model, fourth = made("reduce", "fsdp")
    set_model_state_dict(third_model, {**weights}, options=options)
    for target, its in ((plain, third), (third_model, fourth)):
        its.load_state_dict(copy.deepcopy(by_number))
        trajectories.append(go_on(target, its, data[2:]))
    return trajectories


def test_a_full_state_dict_loads_anywhere(world: World) -> None:
    for expected, *others in world.run(by_one_rank, 2):
        for found in others:
            assert_same_trajectory(found, expected, rtol=1e-8)
