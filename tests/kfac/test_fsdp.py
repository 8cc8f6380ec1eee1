"""FSDP2: parameters in rows on several ranks, preconditioned by their layers' workers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsdp_training import (
    ADAM,
    AT_ONCE,
    CHOICES,
    GRADIENT,
    MOMENTUM,
    accumulated,
    by_choice,
    fsdp,
    go_on,
    narrow,
    shares,
    train_sharded,
    whole,
)
from optimizer_cases import make, take
from ranks import OPTIONS, agreed, assert_same_trajectory, counted, elements_sent, replaced
from reference import half_squared_error
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon

from instruments import bytes_by_stage
from second_order import DPKFAC, KAISA, DistKFAC
from second_order.kfac import sharded_gradients

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from pool import World
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
TIGHT = 1e-10


def assert_equal_runs(
    choices: Sequence[Any], found: Sequence[Any], expected: Sequence[Any], hint: Any = ""
) -> None:
    for choice, actual, trajectory in zip(choices, found, expected, strict=True):
        assert_same_trajectory(actual, trajectory, rtol=TIGHT, hint=(choice, hint))


@pytest.mark.works("FSDP2", "KAISA", "DPKFAC", "DistKFAC")
@pytest.mark.parametrize(("world_size", "ways"), [(2, ["blocks"]), (3, ["root", "layers"])])
def test_fsdp_trajectories_equal_those_of_ddp(
    world: World, world_size: int, ways: Sequence[str]
) -> None:
    """On three ranks, some ranks have one row of a layer, or none."""
    expected = by_choice(world.run(train_sharded, world_size, CHOICES, "ddp"))
    for how in ways:
        found = by_choice(world.run(train_sharded, world_size, CHOICES, how))
        assert_equal_runs(CHOICES, found, expected, how)


def test_fsdp_trajectories_equal_those_of_one_process(world: World) -> None:
    """They differ from those of the base alone."""
    spread = [
        (KAISA, {**MOMENTUM, "factor_exchange": "reduce", "solver": "inverse"}),
        (KAISA, {**MOMENTUM, "grad_worker_fraction": 1 / 3, "solver": "inverse"}),
        (KAISA, {**MOMENTUM, "colocate_factors": False, "solver": "inverse"}),
    ]
    found = by_choice(world.run(train_sharded, 3, spread, "blocks"))
    found += by_choice(world.run(train_sharded, 1, spread[:1], "blocks"))
    (expected,) = train_sharded(0, 1, spread[:1], "")
    (base,) = train_sharded(0, 1, [(KAISA, {**MOMENTUM, "skip_layers": ["*"]})], "")
    for trajectory in found:
        assert_same_trajectory(trajectory, expected, rtol=TIGHT)
    assert float((base[-1] - expected[-1]).abs().max()) > 1e-3


def with_outliers(rank: int, world_size: int, how: str) -> list[tuple[list[Tensor], list[float]]]:
    """For each system, the trajectory whose eighth batch has outliers, and ν of each step."""
    found = []
    for System in (KAISA, DPKFAC, DistKFAC):
        model = narrow()
        trained: Any = model if how == "plain" else fsdp(model, how)
        chosen = {"inv_update_steps": 3, **GRADIENT, "kl_clip": "auto", "lr": 0.01}
        trajectory = []
        clips = []
        with System(trained, **{**options_of(System), **chosen}) as optimizer:
            for i, (x, y) in enumerate(shares(rank, world_size, 9)):
                batch = (x, 100 * y) if i == 7 else (x, y)
                trajectory += go_on(trained, optimizer, [batch])
                clips.append(optimizer.metrics()["clip"])
        found.append((trajectory, clips))
    return found


def test_a_batch_of_outliers_is_clipped_equally_on_all_ranks(world: World) -> None:
    """Also on ranks that precondition no layer."""
    results = world.run(with_outliers, 3, "layers")
    whole_model = with_outliers(0, 1, "plain")
    for i, (trajectory, clips) in enumerate(whole_model):
        assert clips[:5] == [1.0] * 5
        assert clips[7] < 0.5
        for rank in range(3):
            assert results[rank][i][1] == results[0][i][1]
        if i != 1:  # DPKFAC's factors are of one rank's data
            assert results[0][i][1] == pytest.approx(clips, rel=1e-9)
            assert_same_trajectory(results[0][i][0], trajectory, rtol=TIGHT)


def test_an_optimizer_created_before_fully_shard_adopts_the_shards(world: World) -> None:
    choices = CHOICES[:2]
    made_after = by_choice(world.run(train_sharded, 2, choices, "layers"))
    made_before = by_choice(world.run(train_sharded, 2, choices, "layers", before=True))
    assert_equal_runs(choices, made_before, made_after)


@pytest.mark.works("HSDP", "KAISA", "DPKFAC", "DistKFAC")
def test_hsdp_trains_like_one_process(world: World) -> None:
    """Two replicas on four ranks."""
    choices = [CHOICES[0], CHOICES[3], CHOICES[5]]
    expected = by_choice(world.run(train_sharded, 4, choices, "ddp"))
    found = by_choice(world.run(train_sharded, 4, choices, "blocks", replicas=2))
    assert_equal_runs(choices, found, expected)


def test_a_compiled_sharded_model_trains_like_an_uncompiled_one(world: World) -> None:
    choices = CHOICES[:1]
    plain = by_choice(world.run(train_sharded, 2, choices, "blocks"))
    compiled = by_choice(world.run(train_sharded, 2, choices, "blocks", compiles=True))
    assert_equal_runs(choices, compiled, plain)


@pytest.mark.parametrize("synchronised", [True, False])
def test_gradient_accumulation_works_with_and_without_gradient_sync(
    world: World, synchronised: bool
) -> None:
    expected = agreed(world.run(accumulated, 2, "ddp", synchronised))
    for how in ("blocks", "layers"):
        found = agreed(world.run(accumulated, 2, how, synchronised))
        assert_same_trajectory(found, expected, rtol=TIGHT, hint=how)


def options_of(System: Any) -> dict[str, Any]:
    """Options with which inverses do not depend on threads."""
    return {**OPTIONS, **(AT_ONCE if System is DistKFAC else {})}


def traffic(
    rank: int, world_size: int, System: Any, bucket_bytes: int
) -> tuple[Counter[str], int, list[Tensor]]:
    """Collectives and elements of a step without statistics, and the trajectory."""
    model = fsdp(narrow())
    options = {
        **options_of(System),
        **MOMENTUM,
        "factor_update_steps": 2,
        "inv_update_steps": 2,
    }
    trajectory = []
    with (
        replaced(sharded_gradients, {"BUCKET_BYTES": bucket_bytes}),
        System(model, **options) as optimizer,
    ):
        for x, y in shares(rank, world_size, 2):
            optimizer.zero_grad()
            half_squared_error(model(x), y).backward()
            with counted() as counts, elements_sent(rank, world_size) as elements:
                optimizer.step()
            trajectory.append(whole(model))
    return +counts, elements["all_to_all_single"], trajectory


@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])
def test_a_bucket_takes_one_all_to_all_each_way(world: World, System: Any) -> None:
    """Two all-reduces compare what ranks are about to do, and sum the clip's change."""
    size = 3
    n = sum(p.numel() for p in narrow().parameters())
    results = world.run(traffic, size, System, 2**20)
    for counts, _, _ in results:
        assert counts == {"all_to_all_single": 2, "all_reduce": 2}
    sent = sum(elements for _, elements, _ in results)
    assert sent <= 2 * n, "rows go to one rank, and back"
    separate = world.run(traffic, size, System, 8)  # every layer by itself
    for counts, _, _ in separate:
        assert counts["all_to_all_single"] > 2
        assert counts["all_to_all_single"] % 2 == 0
    one, many = (agreed([trajectory for _, _, trajectory in each]) for each in (results, separate))
    assert_same_trajectory(many, one, rtol=1e-12)


def stored_sizes(rank: int, world_size: int, how: str) -> tuple[int, int, int, int]:
    """Bytes of parameters, of the base's state, of factors and of inverses on this rank."""
    model = narrow()
    trained = DistributedDataParallel(model) if how == "ddp" else fsdp(model, how)
    options = {**OPTIONS, **ADAM, "factor_exchange": "reduce"}
    optimizer = KAISA(trained, **options)
    go_on(trained, optimizer, shares(rank, world_size, 2))

    def size(tensors: Any) -> int:
        return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)

    parts = [state["base"] for state in optimizer.state.values()]
    rows = optimizer.summary().rows
    return (
        size(model.parameters()),
        size(part[key] for part in parts for key in ("exp_avg", "exp_avg_sq")),
        sum(row.factor_bytes for row in rows),
        sum(row.inverse_bytes for row in rows),
    )


def test_ranks_store_their_rows_and_their_layers_factors(world: World) -> None:
    whole_model = world.run(stored_sizes, 2, "ddp")[0]
    parts = world.run(stored_sizes, 2, "blocks")
    assert max(rank[0] for rank in parts) < whole_model[0]
    assert max(rank[3] for rank in parts) < whole_model[3]
    params, states, factors, inverses = map(sum, zip(*parts, strict=True))
    assert params == whole_model[0]
    assert states == whole_model[1]
    assert factors == sum(rank[2] for rank in world.run(stored_sizes, 2, "ddp"))
    assert inverses == whole_model[3], "each on the one rank that uses it"


def partly_sharded(rank: int, world_size: int, sharded: bool) -> list[Tensor]:
    """FSDP2 ignores two layers, whose gradients the optimizer averages."""
    model = narrow()
    if sharded:
        ignored = {*model.head.parameters(), *model.conv.parameters()}
        fully_shard(model, ignored_params=ignored)
    optimizer = KAISA(model, **{**OPTIONS, **MOMENTUM})
    return go_on(model, optimizer, shares(rank, world_size))


def test_layers_that_fsdp_ignores_are_averaged_and_preconditioned(world: World) -> None:
    expected = agreed(world.run(partly_sharded, 2, False))
    assert_same_trajectory(agreed(world.run(partly_sharded, 2, True)), expected, rtol=TIGHT)


def frozen_in_between(rank: int, world_size: int, sharded: bool) -> list[Tensor]:
    """A layer is frozen for a step, and an evaluation comes between."""
    model = narrow()
    if sharded:
        fsdp(model)
    optimizer = KAISA(model, **{**OPTIONS, **MOMENTUM})
    trajectory = []
    for step, batch in enumerate(shares(rank, world_size, 4)):
        model.middle[0].requires_grad_(step != 2)
        with torch.no_grad():
            model(batch[0])
        trajectory += go_on(model, optimizer, [batch])
    return trajectory


def test_layers_can_freeze_and_unfreeze_under_fsdp(world: World) -> None:
    expected = agreed(world.run(frozen_in_between, 2, False))
    assert_same_trajectory(agreed(world.run(frozen_in_between, 2, True)), expected, rtol=TIGHT)


WAYS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "in twos": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def train(
    rank: int, world_size: int, fsdp_options: dict[str, Any] | None, twice: bool, **options: Any
) -> list[Tensor]:
    """By FSDP2, or by DistributedDataParallel; some with a layer that is used twice."""
    model: Any = narrow()
    if twice:
        square = nn.Linear(8, 8).double()
        torch.nn.init.eye_(square.weight)
        torch.nn.init.zeros_(square.bias)
        model.norm = nn.Sequential(model.norm, square, square)
    if fsdp_options is None:
        model = DistributedDataParallel(model)
    else:
        fsdp(model, "layers", **fsdp_options)
    with KAISA(model, **{**OPTIONS, **MOMENTUM, **options}) as optimizer:
        return go_on(model, optimizer, shares(rank, world_size))


def train_each_way(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    found = {way: train(rank, world_size, options, False) for way, options in WAYS.items()}
    found["DDP"] = train(rank, world_size, None, False)
    found["twice"] = train(rank, world_size, {}, True)
    found["DDP, twice"] = train(rank, world_size, None, True)
    return found


def test_kaisa_trains_under_every_kind_of_fsdp_like_under_ddp(world: World) -> None:
    results = world.run(train_each_way, 2)
    found = {way: agreed([rank[way] for rank in results]) for way in results[0]}
    for way in WAYS:
        assert_same_trajectory(found[way], found["DDP"], rtol=TIGHT, hint=way)
    assert_same_trajectory(found["twice"], found["DDP, twice"], rtol=TIGHT)


def step_of_muon(rank: int, world_size: int, sharded: bool, System: Any) -> tuple[Tensor, Tensor]:
    """Muon's gradients and parameters at a step, by a system or by Muon alone."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 4, bias=False)
    model: Any = nn.Sequential(*layers).double()
    x = torch.randn(8, 6).double()
    y = torch.randn(8, 4).double()
    trained = fully_shard(model) if sharded else DistributedDataParallel(model)
    if System is None:
        optimizer = Muon(trained.parameters(), lr=0.05)
    else:
        options = {"inv_update_steps": 1, "damping": 0.1, "relative_damping": False}
        optimizer = System(trained, lr=0.05, base=Muon, **options)
    half_squared_error(trained(x[rank::world_size]), y[rank::world_size]).backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    whole_ones = [getattr(g, "full_tensor", lambda g=g: g)().flatten() for g in gradients]
    return torch.cat(whole_ones), whole(model)


def steps_of_muon(rank: int, world_size: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Sharded and by DDP: of Muon alone, and of each system."""
    systems = (None, KAISA, DPKFAC, partial(DistKFAC, **AT_ONCE))
    return [
        [step_of_muon(rank, world_size, sharded, System) for System in systems]
        for sharded in (True, False)
    ]


def test_muon_receives_the_same_gradients_under_fsdp(world: World) -> None:
    """Muon orthogonalizes in bfloat16, and rounds products of shards differently."""
    sharded, by_ddp = world.run(steps_of_muon, 2)[0]
    alone = sharded[0]
    alone_by_ddp = by_ddp[0]
    assert torch.equal(alone[0], alone_by_ddp[0])
    assert float((alone[1] - alone_by_ddp[1]).abs().max()) > 1e-5, "Muon's own rounding"
    for found, expected in zip(sharded[1:], by_ddp[1:], strict=True):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(found[1], expected[1], rtol=0.0, atol=5e-3)
        assert float((found[0] - alone[0]).abs().max()) > 1e-3, "preconditioned"


def of_shards(rank: int, world_size: int, System: Any, sharded: bool) -> dict[str, Any]:
    """Products with the curvature, and numbers to log."""
    model = narrow()
    if sharded:
        fsdp(model)
        assert any(isinstance(p, DTensor) for p in model.parameters())
    optimizer = System(model, **options_of(System))
    with bytes_by_stage() as sent:
        go_on(model, optimizer, shares(rank, world_size))
    curvature = optimizer.curvature(dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    covered = {n: size for layer in curvature.values() for n, size in layer.shapes.items()}
    v = {n: torch.randn(size, generator=generator).double() for n, size in covered.items()}
    whole = {}
    for name, p in model.named_parameters():
        if name in v:
            whole[name] = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
    params = curvature.apply(whole)
    found = optimizer.metrics()
    numbers = {n: found[n] for n in ("clip", "damping/max", "layers/solved")}
    stages = {name for name, nbytes in sent.items() if nbytes > 0}
    solved = curvature.solve(v, damping=0.1) | {f"F {n}": x for n, x in params.items()}
    return {"solved": solved, "numbers": numbers, "stages": stages}


@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])
def test_measure_returns_the_same_curvature_under_fsdp(world: World, System: Any) -> None:
    sharded = world.run(of_shards, 2, System, True)
    plain = world.run(of_shards, 2, System, False)
    for result, expected in zip(sharded, plain, strict=True):
        assert "conv.weight" in result["solved"]
        assert result["solved"].keys() == expected["solved"].keys()
        for name, x in result["solved"].items():
            torch.testing.assert_close(x, expected["solved"][name], rtol=1e-9, atol=1e-12)
        assert result["numbers"] == pytest.approx(expected["numbers"], rel=1e-9, nan_ok=True)
        assert result["stages"] == sharded[0]["stages"]


class UnknownModule(nn.Module):
    """A matrix that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix @ self.matrix)


def test_factors_of_gradients_are_not_fisher_information() -> None:
    model = nn.Sequential(UnknownModule(), nn.Linear(4, 3)).double()
    optimizer = make(KAISA, model, unsupported_layers="gradient_factors")
    take(model, optimizer, (torch.randn(12, 4).double(), torch.randint(3, (12,))))
    assert optimizer.metrics()["layers"] == 2
    curvature = optimizer.curvature()
    assert list(curvature) == ["1"]
    assert "are no Fisher information" in curvature.uncovered["0.matrix"]
