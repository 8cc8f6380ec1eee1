"""DHO2 on parameters that FSDP2 has sharded, and MRDHO2: without accelerators it works.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_training import batches, fsdp, mesh_of, narrow, whole
from mrdho2_training import noted
from pool import World
from ranks import agreed, assert_same_trajectory
from reference import half_squared_error
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from second_order import DHO2, MRDHO2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from reference import Batch

ROUNDED = 1e-6  # differences of gradients keep a third of the digits fewer
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "warmup_steps": 0,
    "num_largest": 2,
    "num_smallest": 1,
    "lanczos_iterations": 10,
    "lanczos_tol": 1e-12,
    "hvp": "differences",
}
OF: dict[Any, dict[str, Any]] = {
    DHO2: {"curvature_interval": 2, "weight_decay": 0.01},
    MRDHO2: {"helper_ranks": 0, "epoch_steps": 2},
}
STEPS = 4


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks for this file: a mesh of some of them is, to torch's caches, one of earlier runs."""
    ranks = World(has_other_seed=False)
    yield ranks
    ranks.close()


def loss_of(model: Any, batch: Batch) -> Tensor:
    return half_squared_error(model(batch[0]), batch[1])


def made(model: Any, when: str, System: Any = MRDHO2, **chosen: Any) -> Any:
    """An optimizer of a model that is sharded before it, after it, or never."""
    if when == "before":
        fsdp(model)
    optimizer = System(model, **{**OPTIONS, **OF[System], **chosen})
    if when == "after":
        fsdp(model)
    batch = batches(9, 9)[6]
    optimizer.curvature_closure = lambda: loss_of(model, batch)
    return optimizer


def go_on(
    model: Any, optimizer: Any, rank: int, world_size: int, data: Sequence[Batch]
) -> list[Tensor]:
    trajectory = []
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model, (x[rank::world_size], y[rank::world_size])).backward()
        optimizer.step()
        trajectory.append(whole(model))
    return trajectory


def run(
    rank: int, world_size: int, System: Any, when: str, **options: Any
) -> tuple[list[Tensor], str]:
    model: Any = narrow()
    with noted(), made(model, when, System, **options) as optimizer:
        found = go_on(model, optimizer, rank, world_size, batches(STEPS))
        return found, str(optimizer.summary())


@pytest.mark.works("FSDP2", "DHO2")
@pytest.mark.works("FSDP2", "MRDHO2", when="without accelerators")
@pytest.mark.parametrize("System", [DHO2, MRDHO2])
def test_a_sharded_model_trains_like_a_whole_one(world: World, System: Any) -> None:
    """Each process keeps the pairs of its rows."""
    plain = agreed([found for found, _ in world.run(run, 3, System, "never")])
    results = world.run(run, 3, System, "never", num_largest=0, num_smallest=0)
    base = agreed([found for found, _ in results])
    assert float((base[-1] - plain[-1]).abs().max()) > 1e-3
    for when, options in ("before", {"debug": True}), ("after", {}):
        results = world.run(run, 3, System, when, **options)
        assert_same_trajectory(agreed([found for found, _ in results]), plain, rtol=ROUNDED)
        assert all("middle.0.weight" in messages for _, messages in results)


def in_bfloat16(rank: int, world_size: int, narrow_passes: bool) -> Tensor | None:
    """The eigenvalues of a sharded model whose passes are in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10))
    x = torch.randn(128, 20)
    y = torch.randint(0, 10, (128,))
    if narrow_passes:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=policy)
    choice = {**OPTIONS, **OF[MRDHO2], "hvp": "auto", "num_largest": 3, "num_smallest": 0}

    def loss_fn() -> Tensor:
        return nn.functional.cross_entropy(model(x).float(), y)

    with MRDHO2(model, **{**choice, "lanczos_iterations": 12, "newton_scale": 0.0}) as optimizer:
        optimizer.curvature_closure = loss_fn
        loss_fn().backward()
        optimizer.step()
        return optimizer.curvature.eigenvalues


def test_finite_differences_work_with_low_precision_passes(world: World) -> None:
    """With differences as short as float32 needs, they would be noise: 0.56 instead of 0.30."""
    narrow_ones = world.run(in_bfloat16, 2, True)[0]
    exact = world.run(in_bfloat16, 2, False)[0]
    torch.testing.assert_close(narrow_ones, exact, rtol=0.1, atol=0.0)


# Checkpoints.


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    optimizer.consolidate(to=None)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def saved(rank: int, world_size: int, folder: str) -> list[Tensor]:
    """The trajectory after a checkpoint in the middle of the second interval."""
    model: Any = narrow()
    data = batches(6)
    with noted(), made(model, "after") as optimizer:
        go_on(model, optimizer, rank, world_size, data[:3])
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
        return go_on(model, optimizer, rank, world_size, data[3:])


def resumed(rank: int, world_size: int, folder: str, when: str, before: str) -> list[Tensor]:
    """Loaded after a step, after `zero_grad`, or immediately."""
    model: Any = narrow()
    data = batches(6)
    with noted(), made(model, when) as optimizer:
        go_on(model, optimizer, rank, world_size, data[: before == "step"])
        if before == "zero_grad":
            optimizer.zero_grad()
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return go_on(model, optimizer, rank, world_size, data[3:])


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_a_checkpoint_resumes_on_other_ranks(world: World, tmp_path: Path) -> None:
    """By the pairs in use; whole, or on more processes."""
    expected = agreed(world.run(saved, 2, str(tmp_path)))
    places = [(2, "step"), (3, "at once"), (2, "zero_grad")]
    for size, before in places:
        found = agreed(world.run(resumed, size, str(tmp_path), "after", before))
        assert_same_trajectory(found, expected, rtol=1e-5, hint=(size, before))


def sharded_in_use(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What the published state has of eigenpairs before a model is sharded, and after it."""
    model: Any = narrow()
    with noted(), made(model, "never", DHO2) as optimizer:

        def stored_names() -> list[str]:
            return [key for entry in optimizer.state.values() for key in entry["curvature"]]

        go_on(model, optimizer, rank, world_size, batches(3))
        optimizer.state_dict()
        before = stored_names()
        fsdp(model)
        optimizer.zero_grad()
        return before, stored_names()


def test_dropped_eigenpairs_are_not_in_the_state(world: World) -> None:
    ((before, after),) = world.run(sharded_in_use, 1)
    assert "eigenvectors" in before
    assert "eigenvectors" not in after


# What is refused.


def refusals(rank: int, world_size: int) -> dict[str, str]:
    def refusal(model: Any, System: Any = MRDHO2, **options: Any) -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            System(model, lr=0.1, **options)
        return str(caught.value)

    later: Any = narrow()
    with noted(), MRDHO2(later, lr=0.1) as optimizer:
        if optimizer.role == "worker":
            fsdp(later, mesh=DeviceMesh.from_group(optimizer.worker_group, "cpu"))
            with pytest.raises(ValueError, match="helpers and their workers hold whole models"):
                optimizer.zero_grad()
    sharded = fsdp(narrow(), "root") if rank == 0 else narrow()
    found = {
        "everybody": refusal(fsdp(narrow(), "root")),
        "one kind": refusal(sharded, gradient_averaging=False),
    }
    for System, alone in (DHO2, {}), (MRDHO2, {"helper_ranks": 0}):
        wrong = {
            "retained": {"hvp": "retained", **alone},
            "outputs": {"curvature": "gauss-newton", "num_smallest": 0, **alone},
        }
        for name, options in wrong.items():
            found[f"{System.__name__}, {name}"] = refusal(fsdp(narrow(), "root"), System, **options)
        replicas = fsdp(narrow(), "root", mesh=mesh_of(world_size, 1))
        found[f"{System.__name__}, replicas"] = refusal(replicas, System, **alone)
        found[f"{System.__name__}, partly"] = refusal(partly(), System, **alone)
    return found


def partly() -> Any:
    model = narrow()
    fully_shard(model, ignored_params=set(model.head.parameters()))
    return model


@pytest.mark.refused(
    "FSDP2",
    "MRDHO2",
    when="with accelerators",
    message="helpers and their workers hold whole models",
)
@pytest.mark.refused("HSDP", "DHO2", message="shard over a mesh of one dimension")
@pytest.mark.refused("HSDP", "MRDHO2", message="shard over a mesh of one dimension")
def test_unsupported_shards_raise_on_every_rank(world: World) -> None:
    for found in world.run(refusals, 2):
        for who in "everybody", "one kind":
            assert "helpers and their workers hold whole models" in found[who]
            assert "use helper_ranks=0" in found[who]
        for name in "DHO2", "MRDHO2":
            messages = {why: found[f"{name}, {why}"] for why in ("partly", "retained")}
            assert f"{name}: fully_shard has sharded 8 of 10 parameters" in messages["partly"]
            assert "use hvp='differences'" in messages["retained"]
            assert re.search("replicas.*one dimension", found[f"{name}, replicas"])
            assert re.search("gauss-newton.*curvature='hessian'", found[f"{name}, outputs"])
