"""MRDHO2 on parameters that FSDP2 has sharded, on workers and accelerators, each over their own.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerated import noted
from pool import World
from ranks import agreed, assert_same_trajectory, replaced
from reference import half_squared_error
from shards import batches, fsdp, mesh_of, narrow, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from second_order import MRDHO2
from second_order.distributed.mailbox import Mailbox
from second_order.fosi import worker_epochs as module
from second_order.fosi.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from reference import Batch

ROUNDED = 1e-6  # differences of gradients keep a third of the digits fewer
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "epoch_steps": 2,
    "final_update": "paper",
    "largest": 2,
    "smallest": 1,
    "lanczos_iterations": 10,
    "lanczos_tol": 1e-12,
    "hvp": "differences",
    "helper_timeout": 30.0,
}
STEPS = 4
ADAM: dict[str, Any] = {"base": torch.optim.Adam, "momentum": None, "lr": 0.01}
KINDS: list[dict[str, Any]] = [
    {"final_update": "paper"},
    {"final_update": "guarded"},
    {"final_update": "additive"},
    {"final_update": "within", **ADAM},
]
BOTH = ("worker", "accelerator")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks for this file: a mesh of some of them is, to torch's caches, one of earlier runs."""
    ranks = World()
    yield ranks
    ranks.close()


def loss_of(model: Any, batch: Batch) -> Tensor:
    return half_squared_error(model(batch[0]), batch[1])


def made(model: Any, sharded: Sequence[str] = BOTH, how: str = "blocks", **chosen: Any) -> MRDHO2:
    """An optimizer of a model that is sharded afterwards, where the role is among ``sharded``."""
    options = {k: v for k, v in {**OPTIONS, **chosen}.items() if v is not None}
    optimizer = MRDHO2(model, **options)
    if optimizer.role in sharded:
        fsdp(model, how, mesh=DeviceMesh.from_group(optimizer.worker_group, "cpu"))
    return optimizer


def go_on(model: Any, optimizer: MRDHO2, rank: int, data: Sequence[Batch]) -> list[Tensor]:
    """A worker's parameters after each step, or nothing of an accelerator, which serves."""
    if optimizer.role == "accelerator":
        optimizer.serve(batches(9, 9)[6:], lambda batch: loss_of(model, batch))
        return []
    workers = dist.get_world_size(optimizer.worker_group)
    trajectory = []
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model, (x[rank::workers], y[rank::workers])).backward()
        optimizer.step()
        trajectory.append(whole(model))
    return trajectory


def runs(
    rank: int,
    world_size: int,
    sharded: Sequence[str],
    accelerators: int,
    kinds: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    results = []
    for kind in kinds:
        model: Any = narrow()
        with noted() as warned, replaced(module, {"LEAST_FALL": 0.0}):
            optimizer = made(model, sharded, accelerators=accelerators, **kind)
            with optimizer:
                trajectory = go_on(model, optimizer, rank, batches(STEPS))
            reports = [(r.applied, r.reason) for r in optimizer.epochs]
        results.append({"trajectory": trajectory, "reports": reports, "warned": warned})
    return results


@pytest.mark.works("FSDP2", "MRDHO2")
@pytest.mark.parametrize(
    ("world_size", "accelerators", "who"),
    [
        (4, 1, [BOTH]),  # three workers, of which some have no rows of some parameters
        (4, 2, [BOTH, ("worker",), ("accelerator",)]),
    ],
)
def test_the_sharded_trajectory_is_that_of_whole_models(
    world: World, world_size: int, accelerators: int, who: Sequence[Sequence[str]]
) -> None:
    """Whoever is sharded: the workers, the accelerators, or both."""
    workers = world_size - accelerators
    plain = world.run(runs, world_size, (), accelerators, KINDS, timeout=180)
    for sharded in who:
        results = world.run(runs, world_size, sharded, accelerators, KINDS, timeout=180)
        for i, kind in enumerate(KINDS):
            expected = [result[i] for result in plain[:workers]]
            found = [result[i] for result in results[:workers]]
            trajectory = agreed([each["trajectory"] for each in found])
            by_whole = agreed([each["trajectory"] for each in expected])
            assert_same_trajectory(trajectory, by_whole, rtol=ROUNDED, hint=(sharded, kind))
            for each in found:
                assert each["warned"] == []
                assert each["reports"] == expected[0]["reports"]
            assert any(applied for applied, _ in found[0]["reports"])


def early(rank: int, world_size: int, **options: Any) -> tuple[list[Tensor], list[Tensor], str]:
    """Sharded before the optimizer is made, over another one's group, or the default one."""
    found = []
    for accelerators in (2, 0):
        apart = {}
        if accelerators:
            with MRDHO2(narrow(), lr=0.1, accelerators=accelerators) as other:
                apart = {"mesh": DeviceMesh.from_group(other.worker_group, "cpu")}
        model: Any = fsdp(narrow(), **apart)
        optimizer = MRDHO2(model, **{**OPTIONS, "accelerators": accelerators, **options})
        if accelerators == 0:
            batch = batches(9, 9)[6]
            optimizer.curvature_closure = lambda model=model, b=batch: loss_of(model, b)
        with optimizer, noted():
            found.append(go_on(model, optimizer, rank, batches(STEPS)))
            said = str(optimizer.summary())
    return found[0], found[1], said


def late(rank: int, world_size: int, sharded: Sequence[str], **options: Any) -> list[Tensor]:
    model: Any = narrow()
    with made(model, sharded, **options) as optimizer, noted():
        if options.get("accelerators") == 0:
            batch = batches(9, 9)[6]
            optimizer.curvature_closure = lambda: loss_of(model, batch)
        return go_on(model, optimizer, rank, batches(STEPS))


def test_a_model_may_be_sharded_before_and_helpers_may_be_none(world: World) -> None:
    """Without accelerators each process computes pairs once an epoch, in its rows."""
    results = world.run(early, 4, debug=True)
    plain = agreed(world.run(late, 4, (), accelerators=2)[:2])
    assert_same_trajectory(agreed([r[0] for r in results[:2]]), plain, rtol=ROUNDED)
    alone = agreed(world.run(late, 4, (), accelerators=0))
    base = agreed(world.run(late, 4, (), accelerators=0, largest=0, smallest=0))
    assert_same_trajectory(agreed([r[1] for r in results]), alone, rtol=ROUNDED)
    assert_same_trajectory(agreed(world.run(late, 4, ("worker",), accelerators=0)), alone, ROUNDED)
    assert float((base[-1] - alone[-1]).abs().max()) > 1e-3
    assert all("middle.0.weight" in said for *_, said in results)


def test_whole_accelerators_of_sharded_workers_multiply_exactly(world: World) -> None:
    """With hvp="retained", which shards have no second derivatives for."""
    for options in ({"hvp": "retained"}, {"hvp": "auto"}):
        found = agreed(world.run(late, 3, ("worker",), **options)[:2])
        expected = agreed(world.run(late, 3, (), hvp="retained")[:2])
        assert_same_trajectory(found, expected, rtol=1e-9, hint=options)


class Counting(nn.Module):
    """Rows of which some workers have none, a frozen layer, and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b, dtype=torch.float64) for a, b in ((3, 3), (3, 1), (1, 1))
        )
        self.layers[0].requires_grad_(False)
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1))

    def forward(self, _: Any) -> Tensor:
        x = self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x + 1))
        return x.square().sum() * self.count


def everything(model: nn.Module) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    found = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [t.detach().clone() for t in found]


def followed(rank: int, world_size: int, accelerators: int) -> list[list[Tensor]]:
    """The whole model at each point, as it is on a worker, or as an accelerator takes it over."""
    model: Any = Counting()
    found: list[list[Tensor]] = []
    taken = Subject.write_rest

    def noting(me: Subject, *parts: Any) -> None:
        taken(me, *parts)
        found.append(everything(model))

    options = {"how": "layers", "largest": 1, "smallest": 0, "lanczos_iterations": 3}
    with torch.no_grad():
        for t in model.parameters():  # each kind another model, until workers send theirs
            t.add_(0.1 * (rank >= world_size - accelerators))
    with replaced(Subject, {"write_rest": noting}):
        optimizer = made(model, accelerators=accelerators, gradient_averaging=False, **options)
        with optimizer:
            if optimizer.role == "accelerator":
                optimizer.serve([0], model)
                return found
            for step in range(6):
                model.shift += 0.1
                model.count += 1
                if step == 4:  # others train
                    for layer, trains in zip(model.layers, (True, False, True), strict=True):
                        layer.requires_grad_(trains)
                if step % 2 == 0:
                    found.append(everything(model))
                optimizer.zero_grad()
                model(0).backward()
                optimizer.step()
    return found


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
@pytest.mark.parametrize("accelerators", [1, 2])
def test_frozen_parameters_and_buffers_come_along(world: World, accelerators: int) -> None:
    results = world.run(followed, 4, accelerators)
    expected = results[0]
    assert len(expected) == 3
    for found in results[4 - accelerators :]:
        assert len(found) == 3
        for there, here in zip(expected, found, strict=True):
            assert all(map(torch.equal, there, here))


class Adapted(nn.Module):
    """A frozen layer, and one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.body.requires_grad_(False)
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))).square().mean()


def adapted(rank: int, world_size: int, sharded: bool) -> tuple[list[Tensor], list[bool]]:
    """Only what is frozen is sharded, on the workers; what trains is whole everywhere."""
    torch.manual_seed(0)
    model = Adapted()
    optimizer = MRDHO2(model, **{**OPTIONS, "hvp": "auto"})
    if sharded:
        mesh = DeviceMesh.from_group(optimizer.worker_group, "cpu")
        fully_shard(model.body, mesh=mesh)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    trajectory: list[Tensor] = []
    with optimizer:
        if optimizer.role == "accelerator":
            optimizer.serve([x], model)
            return [], []
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            trajectory.append(torch.cat([p.detach().flatten() for p in model.head.parameters()]))
    return trajectory, [report.applied for report in optimizer.epochs]


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_what_trains_may_be_whole_beside_frozen_shards(world: World) -> None:
    """As adapters are."""
    found, expected = (world.run(adapted, 3, sharded)[:2] for sharded in (True, False))
    trajectory = agreed([each for each, _ in found])
    assert_same_trajectory(trajectory, agreed([each for each, _ in expected]), rtol=ROUNDED)
    assert all(applied == [True, True] for _, applied in found)


def in_bfloat16(rank: int, world_size: int, narrow_passes: bool) -> Tensor | None:
    """The eigenvalues of a model whose passes are in bfloat16 on sharded accelerators."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10))
    x, y = torch.randn(128, 20), torch.randint(0, 10, (128,))
    choice = {**OPTIONS, "hvp": "auto", "largest": 3, "smallest": 0, "lanczos_iterations": 12}
    optimizer = MRDHO2(model, **{**choice, "newton_scale": 0.0})
    if narrow_passes:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = DeviceMesh.from_group(optimizer.worker_group, "cpu")
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def loss_fn(_: Any = 0) -> Tensor:
        return nn.functional.cross_entropy(model(x).float(), y)

    with optimizer:
        if optimizer.role == "accelerator":
            optimizer.serve([0], loss_fn)
            return None
        for _ in range(2):
            optimizer.zero_grad()
            loss_fn().backward()
            optimizer.step()
        return optimizer.curvature.eigenvalues


def test_differences_are_wide_enough_for_narrow_passes(world: World) -> None:
    """Of float32's width they would be noise: 0.56 in the place of 0.30, for instance."""
    narrow_ones, exact = world.run(in_bfloat16, 2, True)[0], world.run(in_bfloat16, 2, False)[0]
    torch.testing.assert_close(narrow_ones, exact, rtol=0.1, atol=0.0)


def failing(rank: int, world_size: int) -> str:
    """What an accelerator raises whose loss fails, on sharded accelerators."""
    model: Any = narrow()

    def loss_fn(batch: Batch) -> Tensor:
        if rank == world_size - 1:
            raise KeyError("boom")
        return loss_of(model, batch)

    with noted(), made(model, accelerators=2, helper_timeout=5.0) as optimizer:
        if optimizer.role == "accelerator":
            with pytest.raises(Exception) as caught:  # noqa: PT011
                optimizer.serve([batches(1)[0]], loss_fn)
            return repr(caught.value)
        return str(len(go_on(model, optimizer, rank, batches(STEPS))))


def test_an_accelerators_own_error_is_what_it_raises(world: World) -> None:
    *_, last = world.run(failing, 4, timeout=120)
    assert last == "KeyError('boom')"


# Checkpoints.


def state_of(model: Any, optimizer: MRDHO2) -> dict[str, Any]:
    optimizer.consolidate(to=None)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def saved(rank: int, world_size: int, folder: str, **options: Any) -> list[Tensor]:
    """The trajectory after a checkpoint in the middle of the second epoch."""
    model: Any = narrow()
    data = batches(6)
    with made(model, **options) as optimizer:
        if optimizer.role == "accelerator":
            return go_on(model, optimizer, rank, data)
        go_on(model, optimizer, rank, data[:3])
        group = optimizer.worker_group
        dcp.save(state_of(model, optimizer), checkpoint_id=folder, process_group=group)
        return go_on(model, optimizer, rank, data[3:])


def resumed(
    rank: int, world_size: int, folder: str, sharded: Sequence[str], before: str, **options: Any
) -> list[Tensor]:
    """Loaded after a step, after `zero_grad`, or at once."""
    model: Any = narrow()
    data = batches(6)
    with made(model, sharded, **options) as optimizer:
        if optimizer.role == "accelerator":
            return go_on(model, optimizer, rank, data)
        go_on(model, optimizer, rank, data[: before == "step"])
        if before == "zero_grad":
            optimizer.zero_grad()
        state, group = state_of(model, optimizer), optimizer.worker_group
        dcp.load(state, checkpoint_id=folder, process_group=group)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return go_on(model, optimizer, rank, data[3:])


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
@pytest.mark.parametrize("kind", [{"final_update": "paper"}, {"final_update": "within", **ADAM}])
def test_an_epoch_under_way_goes_on_elsewhere(
    world: World, tmp_path: Path, kind: dict[str, Any]
) -> None:
    """By c and p as they were saved, and by the pairs in use; whole, or on more workers."""
    expected = agreed(world.run(saved, 3, str(tmp_path), **kind)[:2])
    places = [(3, BOTH, "step"), (4, BOTH, "at once"), (3, BOTH, "zero_grad"), (3, (), "step")]
    for size, sharded, before in places:
        found = agreed(world.run(resumed, size, str(tmp_path), sharded, before, **kind)[: size - 1])
        assert_same_trajectory(found, expected, rtol=1e-5, hint=(size, sharded, before))


# What is refused.


def refusals(rank: int, world_size: int) -> dict[str, str]:
    def refusal(model: Any, **options: Any) -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            MRDHO2(model, lr=0.1, **options)
        return str(caught.value)

    everybody = fsdp(narrow(), "root")
    replicas = fsdp(narrow(), "root", mesh=mesh_of(world_size, 1))
    team = [0] if rank == 0 else list(range(1, world_size))
    group = dist.new_group(team, use_local_synchronization=True)
    alone = dist.new_group([rank], use_local_synchronization=True)
    partly = narrow()
    mine = {"mesh": DeviceMesh.from_group(group, "cpu")}
    if rank == 0:  # one kind of processes alone is wrong, and all hear of it
        fully_shard(partly, ignored_params=set(partly.head.parameters()), **mine)
    else:
        fully_shard(partly, **mine)
    apart, helpers = fsdp(narrow(), "root", **mine), {"accelerators": world_size - 1}
    one_kind = fsdp(narrow(), "root", **mine) if rank == 0 else narrow()
    lonely = fsdp(narrow(), "root", mesh=DeviceMesh.from_group(alone, "cpu")) if rank else narrow()
    return {
        "one kind": refusal(one_kind, **helpers),
        "lonely": refusal(lonely, **helpers),
        "parameters": refusal(list(apart.parameters()), gradient_averaging=False, **helpers),
        "everybody": refusal(everybody, accelerators=1),
        "replicas": refusal(replicas, accelerators=0),
        "partly": refusal(partly, gradient_averaging=False, **helpers),
        "retained": refusal(apart, hvp="retained", **helpers),
        "outputs": refusal(apart, curvature="gauss-newton", smallest=0, **helpers),
    }


@pytest.mark.refused("HSDP", "MRDHO2", message="shard over a mesh of one dimension")
def test_other_shards_are_refused_on_every_rank(world: World) -> None:
    for found in world.run(refusals, 3):
        assert "sharded over the ranks [0, 1, 2]" in found["everybody"]
        assert "works with the ranks [0, 1]" in found["everybody"]
        assert "DeviceMesh.from_group(optimizer.worker_group" in found["everybody"]
        assert re.search("MRDHO2: .*replicas.*one dimension", found["replicas"])
        assert "MRDHO2: fully_shard has sharded 8 of 10 parameters" in found["partly"]
        assert "use hvp='differences'" in found["retained"]
        assert re.search("gauss-newton.*use curvature='hessian'", found["outputs"])
        assert "sharded the model on ranks [0] and not on [1, 2]" in found["one kind"]
        assert "sharded over the ranks [1], and the optimizer works with" in found["lonely"]
        assert "give model=" in found["parameters"]


def spoilt(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """A run in which one worker's rows of a point, or of a trial, are no vector."""
    post = Mailbox.post

    def spoiling(me: Mailbox, called: str, tensors: Any, **note: Any) -> None:
        post(me, called, [tensors[0][None]] if called == name else tensors, **note)

    with replaced(Mailbox, {"post": spoiling}):
        (found,) = runs(rank, world_size, BOTH, 1, [{"final_update": "guarded"}])
    return found


@pytest.mark.parametrize("name", ["point/0/1", "try/0/1"])
def test_one_workers_malformed_rows_cost_an_update(world: World, name: str) -> None:
    *workers, accelerator = world.run(spoilt, 3, name)
    agreed([worker["trajectory"] for worker in workers])
    for worker in workers:
        (first, why), (second, _) = worker["reports"]
        assert not first
        assert why
        assert second
    told = [line for line in accelerator["warned"] if line.startswith("refused: ")]
    assert len(told) == 1
    assert name in told[0]
