"""DistKFAC on many processes, whose threads take their time, each its own; and stats workers.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import itertools
import pickle
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerated import noted
from contract import assert_same_factors
from models import ZOO
from ranks import OPTIONS, agreed, assert_same_trajectory, go, shard, vector
from reference import cross_entropy, dense_solve, empirical_fisher
from threaded import (
    BATCHES,
    CASE,
    LAYERS,
    LONG,
    BrokenError,
    Dawdle,
    Delayed,
    Gate,
    delayed,
    distkfac,
    eventually,
    landed,
    solving,
    threads_of,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from second_order import KAISA, DecompositionError, SecondOrderError
from second_order.kfac.plan import distkfac_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pool import World
    from reference import Batch

    from second_order.kronecker.block import KroneckerBlock

NEVER = 10**9


def shards(batches: Sequence[Batch], rank: int, world_size: int) -> list[Batch]:
    return [shard(batch, rank, world_size) for batch in batches]


# When inverses come: invariant 23.


def synchronous(
    rank: int, world_size: int, choices: Sequence[tuple[str, dict[str, Any]]]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Trajectories of KAISA and of DistKFAC."""
    found = []
    for name, options in choices:
        case = ZOO[name]
        pair = []
        for mine in (False, True):
            model = case.model()
            chosen = {**OPTIONS, "solver": "inverse", **options}
            with noted():
                extra = {"exact_blocks": False, "max_staleness": 0}
                optimizer: Any = distkfac(model, **chosen, **extra) if mine else None
                optimizer = optimizer or KAISA(model, **chosen)
            pair.append(go(model, optimizer, case, shards(case.batches(4, 12), rank, world_size)))
            optimizer.close()
        found.append((pair[0], pair[1]))
    return found


CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {}),
    ("mlp", {"solver": "eigen"}),
    ("mlp", {"solver": "eigen", "relative_damping": True, "symmetry_aware": False}),
    ("conv_grouped", {"inv_update_steps": 2, "base": torch.optim.Adam, "lr": 0.01}),
    ("norms", {"factor_update_steps": 2, "kl_clip": None}),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_staleness_it_is_kaisa(world: World, world_size: int) -> None:
    results = world.run(synchronous, world_size, CHOICES)
    for i, choice in enumerate(CHOICES):
        expected = agreed([result[i][0] for result in results])
        found = agreed([result[i][1] for result in results])
        assert_same_trajectory(found, expected, rtol=1e-12, hint=choice)


def train(rank: int, world_size: int, name: str, options: dict[str, Any]) -> list[Tensor]:
    case = ZOO[name]
    model = case.model()
    with distkfac(model, **options) as optimizer:
        return go(model, optimizer, case, shards(case.batches(4, 12), rank, world_size))


def test_exact_blocks_go_as_on_one_process(world: World) -> None:
    options = {"max_staleness": 0}
    expected = train(0, 1, "norms", options)
    assert_same_trajectory(agreed(world.run(train, 3, "norms", options)), expected)


def steps_of_norms(rank: int, world_size: int, batch: Batch) -> dict[str, Tensor]:
    """What the base is given for gains and biases, at the first step."""
    case = ZOO["norms"]
    model = case.model()
    with distkfac(model, max_staleness=0, kl_clip=None, solver="eigen") as optimizer:
        go(model, optimizer, case, [shard(batch, rank, world_size)])
    return {name: parameters_to_gradient(model.get_submodule(name)) for name in ("1", "5")}


def parameters_to_gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def test_exact_blocks_of_many_processes_are_dense_solves_of_the_whole_batch(world: World) -> None:
    case = ZOO["norms"]
    model, batch = case.model(), case.batch(12)
    case.loss(model(batch[0]), batch[1]).backward()
    for found in world.run(steps_of_norms, 3, batch):
        for name, step in found.items():
            F = empirical_fisher(model, *batch, cross_entropy, name)
            gradient = parameters_to_gradient(model.get_submodule(name))
            expected = dense_solve(F, gradient, OPTIONS["damping"])
            torch.testing.assert_close(step, expected, rtol=1e-8, atol=1e-10)


def scheduled(
    rank: int, world_size: int, choices: Sequence[dict[str, Any]]
) -> list[tuple[list[Tensor], list[dict[str, int]], list[dict[str, int]]]]:
    """Trajectories, delays and ages at each step; threads take their time, on each rank its own."""
    found = []
    for options in choices:
        model = CASE.model()
        trajectory, delays, ages = [], [], []
        with solving(Dawdle(rank, 0.006)), distkfac(model, **options) as optimizer:
            for batch in shards(BATCHES, rank, world_size):
                trajectory += go(model, optimizer, CASE, [batch])
                delays.append(optimizer.delays)
                ages.append(optimizer.staleness)
        found.append((trajectory, delays, ages))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_have_the_same_parameters_however_the_threads_are_scheduled(
    world: World, world_size: int
) -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"inverse_threads": 3, "base": torch.optim.Adam, "lr": 0.01},
        {"max_staleness": 1},
        {"max_staleness": 3, "inv_update_steps": 2},
        {"max_staleness": 2, "deterministic": True},
        {"max_staleness": 1, "deterministic": True, "solver": "eigen"},
        {"refresh_warmup_steps": len(BATCHES)},
    ]
    results = world.run(scheduled, world_size, choices)
    for i, options in enumerate(choices):
        of_choice = [result[i] for result in results]
        found = agreed([trajectory for trajectory, _, _ in of_choice])
        for _, delays, ages in of_choice:
            assert delays == of_choice[0][1]
            assert ages == of_choice[0][2]
            assert all(set(each) == set(LAYERS) for each in delays)
            most = options.get("max_staleness", 0 if "refresh_warmup_steps" in options else NEVER)
            assert max(max(each.values()) for each in delays) <= most
        if "deterministic" in options:
            solver = options.get("solver", "inverse")
            expected = delayed(options["max_staleness"], solver=solver)
            assert_same_trajectory(found, expected)
        elif "refresh_warmup_steps" in options:
            assert_same_trajectory(found, delayed(0))


def held(rank: int, world_size: int, sign: Path) -> Any:
    """Rank 1's threads are held for four steps."""
    model, gate = CASE.model(), Gate()
    batches = shards(BATCHES, rank, world_size)
    with distkfac(model, refresh_warmup_steps=1) as optimizer:
        trajectory = go(model, optimizer, CASE, batches[:1])
        with solving(gate if rank == 1 else lambda solve: solve()):
            trajectory += go(model, optimizer, CASE, batches[1:5])
        owned = [b.name for b, o in owned_by(optimizer) if o == 1]
        before = optimizer.staleness, optimizer.delays
        gate.open()
        eventually(lambda: landed(optimizer))
        dist.barrier()
        trajectory += go(model, optimizer, CASE, batches[5:6])
        after = optimizer.staleness, optimizer.delays
    return trajectory, owned, before, after


def test_nobody_waits_for_threads_of_another_process(world: World, tmp_path: Path) -> None:
    results = world.run(held, 2, tmp_path / "sign", timeout=LONG)
    agreed([trajectory for trajectory, *_ in results])
    owned = results[0][1]
    assert 0 < len(owned) < 3
    for _, _, (ages, delays), (ages_after, delays_after) in results:
        assert {name: ages[name] for name in owned} == dict.fromkeys(owned, 5)
        assert {name: delays[name] for name in owned} == dict.fromkeys(owned, 0)
        assert {name: delays_after[name] for name in owned} == dict.fromkeys(owned, 4)
        assert {name: ages_after[name] for name in owned} == dict.fromkeys(owned, 5)
    assert results[0][1:] == results[1][1:]


def ddp(rank: int, world_size: int) -> list[Tensor]:
    model = CASE.model()
    wrapped = DistributedDataParallel(model)
    with distkfac(wrapped, max_staleness=2, deterministic=True) as optimizer:
        return go(wrapped, optimizer, CASE, shards(BATCHES, rank, world_size))


def test_under_ddp(world: World) -> None:
    assert_same_trajectory(agreed(world.run(ddp, 2)), delayed(2))


def owners(rank: int, world_size: int) -> list[int]:
    model = nn.ModuleList([nn.Linear(9, 10), *(nn.Linear(4, 5) for _ in range(4))])
    plan = distkfac(model)._curvature.plan
    return [layer.solver("A") for layer in plan.values()]


def test_owners_are_spread_by_cost(world: World) -> None:
    """10³ + 10³ of one layer are more than 5³ + 5³ of four."""
    assert world.run(owners, 2) == [[0, 1, 1, 1, 1]] * 2


def heads(rank: int, world_size: int) -> list[tuple[float, Tensor, tuple[bool, bool]]]:
    """Of workers that have got their statistics from their own passes alone."""
    model = CASE.model()
    with distkfac(model, max_staleness=0) as optimizer:
        curvature = optimizer._curvature
        spread = partial(distkfac_plan, keeps_all=False)
        curvature._system = dataclasses.replace(curvature._system, plan=spread)
        curvature.layers.forget_plan()  # plan anew: each factor goes to its owner
        go(model, optimizer, CASE, shards(BATCHES[:2], rank, world_size))
        known = [block.factors for block in optimizer._curvature.layers.blocks]
    return [(float(f.weight), f.means, (f.a is not None, f.g is not None)) for f in known]  # type: ignore[union-attr]


def test_all_workers_know_the_weights_and_traces_of_all_layers(world: World) -> None:
    """Beside stats workers, too, where each keeps the factors of its own layers alone."""
    alone = heads(0, 1)
    results = world.run(heads, 2)
    assert {kept for *_, kept in results[0]} == {(True, True), (False, False)}
    for result in results:
        for (weight, means, _), (its_weight, its_means, _) in zip(result, alone, strict=True):
            assert weight == its_weight
            torch.testing.assert_close(means, its_means)


# What goes wrong on a thread.


def raising(kind: type[BaseException], solve: Callable[[], Any]) -> Any:
    raise kind("out of paper")


# SystemExit and KeyboardInterrupt are no Exception; what a thread raises ends no process.
RAISED = {kind.__name__: kind for kind in (BrokenError, SystemExit, KeyboardInterrupt)}


def owned_by(optimizer: Any) -> list[tuple[KroneckerBlock, int]]:
    """The layers that train, and the rank that solves each."""
    return [(block, layer.solver("A")) for block, layer in optimizer._curvature.plan.items()]


def failing(solve: Callable[[], Any]) -> Any:
    solve()
    return {}


def plain(solve: Callable[[], Any]) -> Any:
    return solve()


def broken(
    rank: int, world_size: int, how: str, options: dict[str, Any]
) -> tuple[list[Tensor], list[tuple[int, str, str]], list[str], list[str]]:
    """Rank 1's solves of steps 2 to 5 go wrong; errors are caught, and training goes on.

    Returns:
        The trajectory; (step, error, its cause); layers that rank 1 owns; warnings.
    """
    model, errors = CASE.model(), []
    trajectory = []
    work = failing if how == "failing" else partial(raising, RAISED[how])
    with noted() as warned, distkfac(model, **options) as optimizer:
        for step, batch in enumerate(shards(BATCHES, rank, world_size)):
            with solving(work if rank == 1 and 2 <= step < 6 else plain):
                try:
                    go(model, optimizer, CASE, [batch])
                except DecompositionError as error:
                    errors.append((step, str(error), type(error.__cause__).__name__))
            trajectory.append(vector(model))
        owned = [b.name for b, o in owned_by(optimizer) if o == 1]
        assert max(optimizer.staleness.values()) <= 3, "all is well again"
    assert threads_of() == 0
    return trajectory, errors, owned, warned


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("BrokenError", 2), ("BrokenError", 3), ("SystemExit", 2), ("KeyboardInterrupt", 2)],
)
def test_an_exception_on_a_thread_reaches_all_callers(
    world: World, kind: str, world_size: int
) -> None:
    """At the same step, with the layer's name, and nobody hangs."""
    options = {"max_staleness": 1, "deterministic": True}
    results = world.run(broken, world_size, kind, options, timeout=LONG)
    agreed([trajectory for trajectory, *_ in results])
    steps = [[step for step, _, _ in errors] for _, errors, _, _ in results]
    assert steps[0]
    assert all(each == steps[0] for each in steps)
    for rank, (_, errors, owned, _) in enumerate(results):
        for _, message, cause in errors:
            assert all(repr(name) in message for name in owned)
            if rank == 1:
                assert cause == kind
                assert message.startswith("a thread that solves for")
                assert message.endswith(f"has raised: {kind}: out of paper")
            else:
                assert cause == "NoneType"
                assert message.startswith("a thread of another process that solves for")


@pytest.mark.parametrize(("limit", "raised"), [(9, []), (3, [4, 5]), (2, [3, 4, 5])])
def test_failing_decompositions_of_one_are_everybodys(
    world: World, limit: int, raised: list[int]
) -> None:
    """All keep the last inverse, say so once, and raise together."""
    options = {"max_staleness": 0, "max_consecutive_failures": limit}
    results = world.run(broken, 2, "failing", options, timeout=LONG)
    agreed([trajectory for trajectory, *_ in results])
    for _, errors, owned, warned in results:
        assert [step for step, _, _ in errors] == raised
        assert len(warned) == len(owned)
        for name, line in zip(owned, warned, strict=True):
            assert f"layer {name!r} could not be decomposed at step 2" in line
            assert "its last inverse is kept" in line
        for _, message, _ in errors:
            assert f"could not be decomposed {limit} refreshes in a row" in message
            assert all(repr(name) in message for name in owned)


# Checkpoints and copies: invariant 28.

SYNCHRONOUS: dict[str, Any] = {"max_staleness": 0, "inv_update_steps": 2, "momentum": 0.9}


def saved(rank: int, world_size: int, options: dict[str, Any]) -> bytes:
    """After four steps; the usual lines."""
    model, buffer = CASE.model(), io.BytesIO()
    with distkfac(model, **options) as optimizer:
        go(model, optimizer, CASE, shards(BATCHES[:4], rank, world_size))
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, buffer)
    return buffer.getvalue()


def resumed(rank: int, world_size: int, data: bytes, options: dict[str, Any]) -> list[Tensor]:
    state, model = torch.load(io.BytesIO(data)), CASE.model(seed=5)
    with noted() as warned, distkfac(model, **options) as optimizer:
        go(model, optimizer, CASE, shards(BATCHES[:1], rank, world_size))  # it is in use already
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        found = go(model, optimizer, CASE, shards(BATCHES[4:], rank, world_size))
    assert warned == []
    return found


@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_checkpoint_continues_on_any_number_of_processes(world: World, before: int) -> None:
    model = CASE.model()
    with distkfac(model, **SYNCHRONOUS) as optimizer:
        expected = go(model, optimizer, CASE, BATCHES)[4:]
    data = world.run(saved, before, SYNCHRONOUS)[0]
    for after in (1, 2, 4):
        found = agreed(world.run(resumed, after, data, SYNCHRONOUS))
        assert_same_trajectory(found, expected, hint=f"from {before} to {after}")


def in_flight(
    rank: int, world_size: int, how: str, data: bytes
) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    """Something is done in mid-flight; all ranks' solves are held until then and longer."""
    model, gate = CASE.model(), Gate()
    batches = shards(BATCHES, rank, world_size)
    options = {"momentum": 0.9, "refresh_warmup_steps": 1, "inverse_threads": 4}
    optimizer = distkfac(model, **options)
    found, other = go(model, optimizer, CASE, batches[:1]), []
    with solving(gate):
        found += go(model, optimizer, CASE, batches[1:3])
    assert len(optimizer._curvature.solves.flights) == 3
    if how == "load":
        state = torch.load(io.BytesIO(data))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    elif how == "freeze":
        model[2].requires_grad_(False)
    else:
        twin, copied = (
            copy.deepcopy((model, optimizer))
            if how == "deepcopy"
            else pickle.loads(pickle.dumps((model, optimizer)))
        )
        other = go(twin, copied, CASE, batches[3:6])
        eventually(lambda: landed(copied))
        dist.barrier()
        other += go(twin, copied, CASE, batches[6:7])
        assert max(copied.staleness.values()) <= 4
        copied.close()
    found += go(model, optimizer, CASE, batches[3:4])
    ages = optimizer.staleness
    gate.open()
    found += go(model, optimizer, CASE, batches[4:])
    optimizer.close()
    return found, other, ages


@pytest.mark.parametrize("how", ["load", "freeze", "deepcopy", "pickle"])
def test_in_mid_flight(world: World, how: str) -> None:
    data = world.run(saved, 2, {"momentum": 0.9})[0] if how == "load" else b""
    results = world.run(in_flight, 2, how, data, timeout=LONG)
    agreed([found for found, _, _ in results])
    agreed([other for _, other, _ in results])
    expected = {
        "load": dict.fromkeys(LAYERS, 1),
        "freeze": {"0": 1, "4": 1},
    }.get(how, dict.fromkeys(LAYERS, 4))
    for _, _, ages in results:
        assert ages == expected


# Stats workers.


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def play(
    rank: int,
    world_size: int,
    scene: tuple[Callable[..., Any], Callable[..., Any]],
    options: dict[str, Any],
    *args: Any,
) -> dict[str, Any]:
    """A scene on one rank: a worker's part of it or a stats worker's; what it warned of.

    The optimizer begins with the `layers` among the options, or with all.
    """
    model = CASE.model()
    options = {"model": model, "stats_workers": 1, "helper_timeout": LONG, **options}
    layers = [model.get_submodule(name) for name in options.pop("layers", LAYERS)]
    params = [p for layer in layers for p in layer.parameters()]
    with noted() as warned:
        optimizer = distkfac(params, **options)
        found = scene[optimizer.role == "stats"](model, optimizer, *args)
    assert threads_of("second_order") == 0, "no thread is left"
    dist.barrier()  # until then the store, which a stats worker has, is there
    return {"role": optimizer.role, "found": found, "warned": warned}


def roles_of(results: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """What workers and stats workers have found."""
    by_role: dict[str, list[Any]] = {"worker": [], "stats": []}
    for result in results:
        by_role[result["role"]].append(result["found"])
    return by_role["worker"], by_role["stats"]


def quiet(results: Sequence[dict[str, Any]]) -> bool:
    return not any(result["warned"] for result in results)


def told_once(results: Sequence[dict[str, Any]], *texts: str) -> None:
    for result in results:
        if result["role"] == "worker":
            (line,) = result["warned"]
            assert all(text in line for text in texts), line


def everywhere(optimizer: Any, number: float) -> float:
    """The least that any worker says."""
    if optimizer._training.world.size == 1:
        return number
    least = torch.tensor([number])
    dist.all_reduce(least, dist.ReduceOp.MIN, group=optimizer.worker_group)
    return least.item()


def mine(optimizer: Any, batch: Batch) -> Batch:
    """A worker's shard."""
    return shard(batch, optimizer._training.world.rank, optimizer._training.world.size)


def train_on(model: nn.Module, optimizer: Any, batches: Sequence[Batch]) -> list[Tensor]:
    return go(model, optimizer, CASE, [mine(optimizer, batch) for batch in batches])


def until_fed(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Until all workers have stopped taking statistics from their own passes."""
    found: list[Tensor] = []
    end = time.monotonic() + LONG
    while optimizer._curvature.helpers.own_passes:
        assert time.monotonic() < end, "no statistics have come"
        found += train_on(model, optimizer, BATCHES[:1])
        time.sleep(0.002)
    return found


def watched_worker(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Steps until three messages of each stats worker have been adopted."""
    messages: list[tuple[str, str]] = []

    def arrived(helper: Any, original: Any, name: str) -> Any:
        message = original(name)
        if message is not None:
            messages.append((helper.name, name))
        return message

    for helper in optimizer._curvature.helpers.active:
        original = helper.courier.arrived
        helper.courier.arrived = lambda name, h=helper, o=original: arrived(h, o, name)
    names = [helper.name for helper in optimizer._curvature.helpers.active]
    trajectory: list[Tensor] = [vector(model)]
    end = time.monotonic() + LONG
    with optimizer:
        while everywhere(optimizer, min([m[0] for m in messages].count(n) for n in names)) < 3:
            assert time.monotonic() < end
            trajectory += train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        for helper in optimizer._curvature.helpers.active:
            assert len(helper.courier._shared.expected) <= 1, "what is listened for grows"
        rank = optimizer._training.world.rank
        owned = [block.name for block, owner in owned_by(optimizer) if owner == rank]
        found = factors_here(optimizer)
        assert sorted(found) == sorted(owned)
    return {"messages": messages, "trajectory": trajectory, "factors": found}


def watched_stats(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Which batches it had, at which points."""
    index = optimizer._training.world.rank
    points: list[tuple[int, Tensor]] = []

    def loss(number: int) -> tuple[Tensor, str]:
        points.append((number, vector(model)))
        return loss_of(model, BATCHES[number]), "ignored"

    with optimizer:
        sent = optimizer.serve([1 + index, 3 + index, 5 + index], loss)
    assert sent in (len(points), len(points) - 1)
    return {"points": points}


@pytest.mark.parametrize(("world_size", "helpers"), [(2, 1), (3, 1), (4, 2)])
def test_statistics_are_those_of_the_helpers_batches_at_the_points_it_got(
    world: World, world_size: int, helpers: int
) -> None:
    """The running averages are, message for message, what a dense reference makes of them."""
    options = {"stats_workers": helpers, "factor_update_steps": NEVER, "factor_decay": 0.8}
    results = world.run(
        play, world_size, (watched_worker, watched_stats), options, timeout=2 * LONG
    )
    assert quiet(results)
    workers, stats = roles_of(results)
    assert (len(workers), len(stats)) == (world_size - helpers, helpers)
    trajectory = agreed([worker["trajectory"] for worker in workers])
    for helper in stats:
        numbers = [number for number, _ in helper["points"]]
        assert numbers == [numbers[i % 3] for i in range(len(numbers))], "over and over"
        steps = [
            next(i for i, w in enumerate(trajectory) if torch.equal(w, point))
            for _, point in helper["points"][:-1]
        ]
        assert steps == sorted(steps), "newer ones every time"
        assert len(set(steps)) > 1
    layers: list[str] = []
    for worker in workers:
        model = CASE.model()
        reference = Delayed(model, factor_decay=0.8)
        reference.update_factors(BATCHES[0])  # of its own passes, at step 0
        for name, key in worker["messages"]:
            helper = stats[int(name.rsplit(maxsplit=1)[1]) - len(workers)]
            number, point = helper["points"][int(key.split("/")[1])]
            nn.utils.vector_to_parameters(point, model.parameters())
            reference.update_factors(BATCHES[number])
        expected = reference.factors()
        assert_same_factors(
            worker["factors"], {name: expected[name] for name in worker["factors"]}, rtol=1e-8
        )
        layers += worker["factors"]
    assert sorted(layers) == list(LAYERS), "each is somebody's"


def held_worker(model: nn.Module, optimizer: Any, sign: Path, wrap: bool) -> Any:
    """Statistics come from its own passes until the helper is let go on."""
    wrapped = (
        DistributedDataParallel(model, process_group=optimizer.worker_group) if wrap else model
    )
    with optimizer:
        found = train_on(wrapped, optimizer, BATCHES)
        assert optimizer._curvature.helpers.own_passes
        optimizer._training.world.group and everywhere(optimizer, 0.0)
        sign.touch()
        until_fed(wrapped, optimizer)
        optimizer.zero_grad()
        loss_of(wrapped, mine(optimizer, BATCHES[0])).backward()
        captured = not optimizer._curvature.nothing_captured()
        optimizer.step()
        train_on(wrapped, optimizer, BATCHES[:2])
    return found, captured


def held_stats(model: nn.Module, optimizer: Any, sign: Path, wrap: bool) -> int:
    def loss(batch: Batch) -> Tensor:
        end = time.monotonic() + LONG
        while not sign.exists():
            assert time.monotonic() < end
            time.sleep(0.005)
        return loss_of(model, batch)

    with optimizer:
        return optimizer.serve(BATCHES, loss)


@pytest.mark.parametrize("wrap", [False, True], ids=["", "DDP"])
@pytest.mark.parametrize(("world_size", "helpers"), [(2, 1), (3, 1), (4, 2)])
def test_nobody_waits_for_stats_workers(
    world: World, tmp_path: Path, world_size: int, helpers: int, wrap: bool
) -> None:
    """Until they say something it is a run without them; then nothing is captured any more."""
    averaging = {"gradient_averaging": False} if wrap else {}
    options = {**SYNCHRONOUS, "stats_workers": helpers, **averaging}
    results = world.run(
        play,
        world_size,
        (held_worker, held_stats),
        options,
        tmp_path / "sign",
        wrap,
        timeout=2 * LONG,
    )
    assert quiet(results)
    workers, _ = roles_of(results)
    assert len(workers) == world_size - helpers
    model = CASE.model()
    with distkfac(model, **SYNCHRONOUS) as optimizer:
        expected = go(model, optimizer, CASE, BATCHES)
    assert_same_trajectory(agreed([found for found, _ in workers]), expected)
    assert not any(captured for _, captured in workers)


def scaled_on(model: nn.Module, optimizer: Any, batches: Sequence[Batch]) -> list[Tensor]:
    """As `train_on`, with the optimizer's scaler; the fourth batch overflows, and is skipped."""
    scaler, found = optimizer._training.scaler, []
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, (x * float("inf") if i == 3 else x, y))).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(vector(model))
    return found


def scaled_worker(model: nn.Module, optimizer: Any, sign: Path, how: str) -> Any:
    with optimizer:
        found = scaled_on(model, optimizer, BATCHES)
        assert optimizer._curvature.helpers.own_passes
        sign.touch()
        end = time.monotonic() + LONG
        while optimizer._curvature.helpers.own_passes:
            assert time.monotonic() < end, "no statistics have come"
            scaled_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        fed = scaled_on(model, optimizer, BATCHES)
    return found, fed, optimizer._training.scaler.get_scale()


def scaled_stats(model: nn.Module, optimizer: Any, sign: Path, how: str) -> int:
    """Serves, or runs the usual loop, with a scaler of its own that no worker hears of."""
    if how == "serve":
        return held_stats(model, optimizer, sign, wrap=False)
    eventually(sign.exists)
    with optimizer:
        while not optimizer._curvature.dismissed:
            scaled_on(model, optimizer, BATCHES)
    return 0


@pytest.mark.parametrize("how", ["serve", "loop"])
def test_one_worker_beside_a_stats_worker_takes_a_grad_scaler(
    world: World, tmp_path: Path, how: str
) -> None:
    """Nobody else is to agree on what it skips. Until the stats worker speaks it is one process."""
    options = {**SYNCHRONOUS, "grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**7)}
    model = CASE.model()
    with distkfac(model, **copy.deepcopy(options)) as optimizer:
        expected = scaled_on(model, optimizer, BATCHES)
    assert torch.equal(expected[3], expected[2]), "a step is skipped"
    results = world.run(
        play, 2, (scaled_worker, scaled_stats), options, tmp_path / "sign", how, timeout=2 * LONG
    )
    assert quiet(results)
    (found, fed, scale), *others = roles_of(results)[0]
    assert not others
    assert_same_trajectory(found, expected)
    assert torch.equal(fed[3], fed[2])
    assert all(bool(w.isfinite().all()) for w in fed)
    assert scale == 2.0**5, "halved by the two that overflowed"


def loop_worker(model: nn.Module, optimizer: Any, how: str) -> Any:
    trajectory: list[Tensor] = []
    with optimizer:
        for epoch in range(2):
            trajectory += train_on(model, optimizer, BATCHES)
            loop_end(model, optimizer, how, epoch)
    return trajectory


def loop_stats(model: nn.Module, optimizer: Any, how: str) -> int:
    """The same loop, by a rank that does not know what it is."""
    with optimizer:
        for epoch in range(2):
            for batch in BATCHES:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            loop_end(model, optimizer, how, epoch)
    return optimizer._training.world.rank


def loop_end(model: nn.Module, optimizer: Any, how: str, epoch: int) -> None:
    """What every rank does after an epoch."""
    if how == "consolidate":
        optimizer.consolidate(to=0)
        if dist.get_rank() == 0:
            assert "A" in optimizer.state_dict()["state"][0]["curvature"]
    elif how == "freeze":
        model[2].requires_grad_(epoch == 1)
    elif how == "group" and epoch == 0:
        optimizer.param_groups[0]["lr"] = 0.01


@pytest.mark.parametrize("how", ["plain", "consolidate", "freeze"])
@pytest.mark.parametrize(("world_size", "helpers"), [(2, 1), (3, 1), (5, 2)])
def test_the_usual_loop_on_every_rank(
    world: World, world_size: int, helpers: int, how: str
) -> None:
    options = {"stats_workers": helpers}
    results = world.run(play, world_size, (loop_worker, loop_stats), options, how, timeout=LONG)
    assert quiet(results)
    found = agreed(roles_of(results)[0])
    assert len(found) == 2 * len(BATCHES)


def owned_here(optimizer: Any) -> list[Any]:
    rank = optimizer._training.world.rank
    return [block for block, owner in owned_by(optimizer) if owner == rank]


def until_all_come(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Until workers are fed, and have statistics of every layer that came after the next step."""
    found = train_on(model, optimizer, BATCHES[:1])
    owned = owned_here(optimizer)
    before = [float(block.factors.weight) for block in owned]
    end = time.monotonic() + LONG
    while not everywhere(
        optimizer,
        not optimizer._curvature.helpers.own_passes
        and all(b.factors.weight != w for b, w in zip(owned, before, strict=True)),
    ):
        assert time.monotonic() < end, "nothing comes of some layers"
        found += train_on(model, optimizer, BATCHES[:1])
        time.sleep(0.002)
    return found


def frozen_worker(model: nn.Module, optimizer: Any) -> Any:
    """Three times, with a layer frozen in the second: layers of which more statistics have come."""
    found = []
    with optimizer:
        until_fed(model, optimizer)
        for frozen in (False, True, False):
            model[2].requires_grad_(not frozen)
            until_all_come(model, optimizer)
            found.append([block.name for block in owned_here(optimizer)])
    return found


def frozen_stats(model: nn.Module, optimizer: Any) -> int:
    return ends_stats(model, optimizer, "")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stats_worker_follows_what_workers_freeze(world: World, world_size: int) -> None:
    """Of layers that train statistics go on coming."""
    results = world.run(play, world_size, (frozen_worker, frozen_stats), {}, timeout=2 * LONG)
    assert quiet(results)
    workers, _ = roles_of(results)
    for i, layers in enumerate((LAYERS, ("0", "4"), LAYERS)):
        assert sorted(name for worker in workers for name in worker[i]) == list(layers)


def added_worker(model: nn.Module, optimizer: Any, directory: Path, when: str) -> Any:
    """A layer joins the optimizer; until more statistics of all have come, before and after."""
    with optimizer:
        found = until_all_come(model, optimizer)
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.02})
        found += until_all_come(model, optimizer)
        (directory / "fed").touch()
        end = time.monotonic() + LONG
        while not everywhere(optimizer, when == "never" or (directory / "added").exists()):
            assert time.monotonic() < end
            found += train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        found += until_all_come(model, optimizer)
        found += until_all_come(model, optimizer)
        assert set(optimizer.staleness) == set(LAYERS)
        return found, [block.name for block in owned_here(optimizer)]


def added_stats(model: nn.Module, optimizer: Any, directory: Path, when: str) -> int:
    """It serves and adds nothing, or runs the usual loop and adds the layer when it gets there."""
    if when == "never":
        return ends_stats(model, optimizer, "")
    batches = itertools.cycle(BATCHES)
    with optimizer:
        while not optimizer._curvature.dismissed:
            there = when == "sooner" or (directory / "fed").exists()
            if there and not (directory / "added").exists():
                optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.02})
                (directory / "added").touch()
            optimizer.zero_grad()
            loss_of(model, next(batches)).backward()
            optimizer.step()
    return len(optimizer.param_groups)


@pytest.mark.parametrize("every", [1, NEVER])
@pytest.mark.parametrize("when", ["never", "sooner", "later"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stats_worker_follows_what_workers_add(
    world: World, tmp_path: Path, world_size: int, when: str, every: int
) -> None:
    """Statistics of the new layer come, whenever the stats worker adds it, and if it never does."""
    options = {"layers": LAYERS[:2], "factor_update_steps": every}
    results = world.run(
        play, world_size, (added_worker, added_stats), options, tmp_path, when, timeout=4 * LONG
    )
    assert quiet(results)
    workers, _ = roles_of(results)
    agreed([found for found, _ in workers])
    assert sorted(name for _, owned in workers for name in owned) == list(LAYERS)


def outgrown_worker(model: nn.Module, optimizer: Any, where: str) -> Any:
    """The model grows by a layer, which is not to be added."""
    with optimizer:
        until_fed(model, optimizer)
        model.append(nn.Linear(3, 3).double())
        groups = [list(group["params"]) for group in optimizer.param_groups]
        said = refusal(lambda: optimizer.add_param_group({"params": list(model[-1].parameters())}))
        after = [group["params"] for group in optimizer.param_groups]
        assert list(map(len, after)) == list(map(len, groups))
        if where == "refused":
            model.pop(-1)
            until_all_come(model, optimizer)
        else:
            fails_worker(model, optimizer, "")
    return said


def outgrown_stats(model: nn.Module, optimizer: Any, where: str) -> str:
    return refusal(lambda: ends_stats(model, optimizer, ""))


@pytest.mark.parametrize("where", ["refused", "kept"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_that_grows_beside_a_stats_worker_is_refused(
    world: World, world_size: int, where: str
) -> None:
    """Before anything changes. If it stays, the stats worker ends, and says why; workers go on."""
    results = world.run(
        play, world_size, (outgrown_worker, outgrown_stats), {}, where, timeout=2 * LONG
    )
    workers, (helper,) = roles_of(results)
    remedy = "make the optimizer of a model that has all its layers"
    for said in workers:
        assert said.startswith("SecondOrderError: the model has changed; a model cannot grow")
        assert remedy in said
    if where == "refused":
        assert quiet(results)
        assert helper == ""
    else:
        assert helper.startswith("SecondOrderError: the workers' model has 8 parameters")
        assert remedy in helper
        told_once(results, "has left, died", "from the training passes again")


def at_once_worker(model: nn.Module, optimizer: Any) -> list[str]:
    curvature = optimizer._curvature
    helps = optimizer.role == "stats"
    couriers = [curvature.courier] if helps else list(curvature.helpers.couriers)
    assert all(courier._shared.connected.is_set() for courier in couriers)
    optimizer.close()
    return [courier.failure for courier in couriers]


at_once_stats = at_once_worker


@pytest.mark.parametrize(("world_size", "helpers"), [(2, 1), (4, 2)])
def test_closing_at_once_finds_everybody_connected(
    world: World, world_size: int, helpers: int
) -> None:
    """Nobody looks for a store that has gone already, for as long as the timeout."""
    results = world.run(
        play,
        world_size,
        (at_once_worker, at_once_stats),
        {"stats_workers": helpers},
        timeout=2 * LONG,
    )
    assert quiet(results)
    assert all(failure == "" for result in results for failure in result["found"])


class OutOfPaperError(Exception):
    pass


def ends_worker(model: nn.Module, optimizer: Any, how: str) -> str:
    until_fed(model, optimizer)
    if how == "close":
        optimizer.close()
    elif how == "exception":
        try:
            with optimizer:
                raise OutOfPaperError
        except OutOfPaperError:
            pass
    return how


def ends_stats(model: nn.Module, optimizer: Any, how: str) -> int:
    served = optimizer.serve(BATCHES, lambda batch: loss_of(model, batch))
    optimizer.close()
    optimizer.close()
    return int(served)


@pytest.mark.parametrize("how", ["close", "exception"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_serve_returns_when_the_workers_have_ended(world: World, world_size: int, how: str) -> None:
    results = world.run(play, world_size, (ends_worker, ends_stats), {}, how, timeout=LONG)
    assert quiet(results)
    assert roles_of(results)[1][0] >= 1


def dropped(rank: int, world_size: int) -> Any:
    """A worker that closes nothing, and has no optimizer any more."""
    model = CASE.model()
    optimizer = distkfac(model, stats_workers=1, helper_timeout=LONG)
    if optimizer.role == "stats":
        with optimizer:
            served = optimizer.serve(BATCHES, lambda batch: loss_of(model, batch))
        dist.barrier()
        return served
    until_fed(model, optimizer)
    del optimizer
    gc.collect()
    eventually(lambda: threads_of("second_order") == 0)
    dist.barrier()
    return None


def test_serve_returns_when_the_workers_optimizer_is_gone(world: World) -> None:
    assert world.run(dropped, 2, timeout=LONG)[1] >= 1


def fails_worker(model: nn.Module, optimizer: Any, how: str) -> Any:
    """It goes on when the helper is gone, and its own passes count again."""
    with optimizer:
        end = time.monotonic() + LONG
        while optimizer._curvature.helpers.active:
            assert time.monotonic() < end, "the loss is not noticed"
            train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        assert optimizer._curvature.helpers.own_passes
        before = [block.factors.weight.clone() for block in optimizer._curvature.layers.blocks]
        trajectory = train_on(model, optimizer, BATCHES)
        assert not any(
            map(torch.equal, before, [b.factors.weight for b in optimizer._curvature.layers.blocks])
        )
        assert max(optimizer.staleness.values()) < len(BATCHES)
        return trajectory


def fails_stats(model: nn.Module, optimizer: Any, how: str) -> Any:
    calls = itertools.count()

    def loss(batch: Batch) -> Tensor:
        if next(calls) == 3:
            raise OutOfPaperError("in the loss")
        return loss_of(model, batch)

    if how == "leaves":
        for batch in BATCHES[:3]:
            loss_of(model, batch).backward()
            optimizer.step()
        optimizer.close()
        return "left"
    try:
        with optimizer:
            optimizer.serve(iter(BATCHES[:3]) if how == "runs dry" else BATCHES, loss)
    except (OutOfPaperError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "OutOfPaperError: in the loss"),
        ("runs dry", "ValueError: batches is empty, or an iterator that has ended; give a loader"),
        ("leaves", "left"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_helper_that_ends_leaves_workers_to_their_own_passes(
    world: World, world_size: int, how: str, said: str
) -> None:
    """Its exception is raised where it belongs, and workers say once what has become of it."""
    results = world.run(play, world_size, (fails_worker, fails_stats), {}, how, timeout=LONG)
    workers, (helper,) = roles_of(results)
    assert helper == said
    agreed(workers)
    name = f"stats worker {world_size - 1}"
    told_once(results, f"{name} has left, died", "from the training passes again")


def one_left_worker(model: nn.Module, optimizer: Any) -> Any:
    with optimizer:
        until_fed(model, optimizer)
        end = time.monotonic() + LONG
        while len(optimizer._curvature.helpers.active) == 2:
            assert time.monotonic() < end
            train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        heard = optimizer._curvature.helpers.active[0].heard
        while everywhere(optimizer, optimizer._curvature.helpers.active[0].heard - heard) < 2:
            assert time.monotonic() < end
            train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        return optimizer._curvature.helpers.own_passes


def one_left_stats(model: nn.Module, optimizer: Any) -> str:
    return (
        str(fails_stats(model, optimizer, "raises"))
        if optimizer._training.world.rank == 0
        else str(ends_stats(model, optimizer, ""))
    )


def test_one_helper_that_ends_leaves_the_others(world: World) -> None:
    results = world.run(
        play, 4, (one_left_worker, one_left_stats), {"stats_workers": 2}, timeout=LONG
    )
    assert roles_of(results)[0] == [False, False]
    told_once(results, "stats worker 2 has left, died", "the others go on")


def spoiled_worker(model: nn.Module, optimizer: Any, sound: int, stop: Path) -> Any:
    """Until the helper's tenth message has been heard."""
    with optimizer:
        trajectory: list[Tensor] = []
        end = time.monotonic() + LONG
        while everywhere(optimizer, min(h.heard for h in optimizer._curvature.helpers.active)) < 10:
            assert time.monotonic() < end
            trajectory += train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        trajectory += train_on(model, optimizer, BATCHES)
        weights = [float(block.factors.weight) for block in optimizer._curvature.layers.blocks]
        ages = optimizer.staleness
        return trajectory, optimizer._curvature.helpers.own_passes, weights, ages


def spoiled_stats(model: nn.Module, optimizer: Any, sound: int, stop: Path) -> int:
    """All its batches but the first so many are spoiled."""
    calls = itertools.count()

    def loss(batch: Batch) -> Tensor:
        return loss_of(model, batch) * (1.0 if next(calls) < sound else float("nan"))

    with optimizer:
        return optimizer.serve(BATCHES, loss)


@pytest.mark.parametrize("sound", [0, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_statistics_that_are_not_finite_are_dropped_and_told_once(
    world: World, tmp_path: Path, world_size: int, sound: int
) -> None:
    """Without any that are sound, or any more, workers go on with their own."""
    results = world.run(
        play,
        world_size,
        (spoiled_worker, spoiled_stats),
        {},
        sound,
        tmp_path / "stop",
        timeout=LONG,
    )
    workers, _ = roles_of(results)
    found = agreed([trajectory for trajectory, *_ in workers])
    assert all(bool(w.isfinite().all()) for w in found)
    told = [result["warned"] for result in results if result["role"] == "worker"]
    assert all(len(lines) <= 1 for lines in told), told
    assert any(lines for lines in told)
    assert all("not finite: they are dropped" in line for lines in told for line in lines)
    for _, own_passes, _, ages in workers:
        assert own_passes
        assert set(ages) == set(LAYERS), "all layers are preconditioned"


# Checkpoints with stats workers.


def saves_worker(model: nn.Module, optimizer: Any, path: str) -> Any:
    with optimizer:
        until_fed(model, optimizer)
        train_on(model, optimizer, BATCHES[:4])
        refused = ""
        try:
            optimizer.state_dict()
        except SecondOrderError as error:
            refused = str(error)
        buffer, found = io.BytesIO(), vector(model)
        if path:
            state = {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            dcp.save(state, checkpoint_id=path, process_group=optimizer.worker_group)
        optimizer.consolidate(to=0)
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, buffer)
        rank = optimizer._training.world.rank
        kept = {b.name for b, owner in owned_by(optimizer) if owner == rank}
        parts = {name: pair for name, pair in factors_here(optimizer).items() if name in kept}
    return buffer.getvalue(), refused, parts, found


def saves_stats(model: nn.Module, optimizer: Any, path: str) -> int:
    with optimizer:
        return optimizer.serve(BATCHES, lambda batch: loss_of(model, batch))


def factors_here(optimizer: Any) -> dict[str, Any]:
    """Of layers whose factors are kept by this process."""
    return {
        block.name: tuple(block.factors.matrices(torch.float64))
        for block in optimizer._curvature.layers.blocks
        if block.factors is not None and block.factors.a is not None
    }


def loads_worker(model: nn.Module, optimizer: Any, data: bytes, path: str) -> Any:
    with optimizer:
        if path:
            state = {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(state, checkpoint_id=path, process_group=optimizer.worker_group)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        else:
            state = torch.load(io.BytesIO(data))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        parts, found = factors_here(optimizer), vector(model)
        trajectory = train_on(model, optimizer, BATCHES[4:])
    return parts, found, trajectory


def loads_stats(model: nn.Module, optimizer: Any, data: bytes, path: str) -> int:
    return saves_stats(model, optimizer, path)


@pytest.mark.parametrize("distributed", [False, True], ids=["torch.save", "dcp"])
@pytest.mark.parametrize(
    ("before", "after"), [((3, 1), (4, 2)), ((4, 1), (3, 1)), ((4, 2), (2, 1))]
)
def test_a_checkpoint_with_stats_workers(
    world: World,
    tmp_path: Path,
    before: tuple[int, int],
    after: tuple[int, int],
    distributed: bool,
) -> None:
    """Owners' factors need consolidate(), are refused without, and arrive where they belong."""
    path = str(tmp_path / "dcp") if distributed else ""
    options = {"stats_workers": before[1]}
    results = world.run(
        play, before[0], (saves_worker, saves_stats), options, path, timeout=2 * LONG
    )
    assert quiet(results)
    workers, _ = roles_of(results)
    whole: dict[str, Any] = {}
    for _, refused, parts, _ in workers:
        assert "DistKFAC.state_dict() would lack the factors" in refused
        assert "call optimizer.consolidate(to=0) on every process first" in refused
        whole |= parts
    assert sorted(whole) == list(LAYERS)
    options = {"stats_workers": after[1]}
    results = world.run(
        play, after[0], (loads_worker, loads_stats), options, workers[0][0], path, timeout=2 * LONG
    )
    assert quiet(results)
    loaded, _ = roles_of(results)
    agreed([trajectory for _, _, trajectory in loaded])
    names: list[str] = []
    for parts, found, _ in loaded:
        assert torch.equal(found, workers[0][3])
        for name, pair in parts.items():
            assert all(map(torch.equal, pair, whole[name]))
        names += parts
    assert sorted(names) == list(LAYERS)


def test_one_process_takes_up_a_checkpoint_of_stats_workers(world: World) -> None:
    results = world.run(play, 3, (saves_worker, saves_stats), {}, "", timeout=2 * LONG)
    data = roles_of(results)[0][0][0]
    found = world.run(resumed, 1, data, {"max_staleness": 0})[0]
    assert len(found) == len(BATCHES) - 4


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("norms", {"doubly_factored": {"4": (9, 4)}}),
    ("batch_norm", {"conv_factors": "cheap", "solver": "eigen"}),
    ("mlp", {"fisher": "sampled", "symmetry_aware": False}),
    ("mlp", {"factor_dtype": torch.bfloat16, "inv_dtype": torch.float32}),
]


def kinds(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Any:
    """Statistics of a helper; then, on rank 0, a checkpoint."""
    case, buffer = ZOO[name], io.BytesIO()
    model = case.model()
    with noted() as warned:
        optimizer = distkfac(model, stats_workers=1, helper_timeout=LONG, **options)
        batches = case.batches(3, 12)
        with optimizer:
            if optimizer.role == "stats":
                optimizer.serve(batches, lambda batch: case.loss(model(batch[0]), batch[1]))
                found = []
            else:
                end = time.monotonic() + LONG
                while optimizer._curvature.helpers.own_passes:
                    assert time.monotonic() < end
                    go(model, optimizer, case, [mine(optimizer, batches[0])])
                heard = optimizer._curvature.helpers.active[0].heard
                while (
                    everywhere(optimizer, optimizer._curvature.helpers.active[0].heard - heard) < 2
                ):
                    assert time.monotonic() < end
                    go(model, optimizer, case, [mine(optimizer, batches[0])])
                found = go(model, optimizer, case, [mine(optimizer, batch) for batch in batches])
                assert set(optimizer.staleness) == {
                    block.name for block in optimizer._curvature.layers.blocks
                }
                optimizer.consolidate(to=0)
                if rank == 0:
                    torch.save(optimizer.state_dict(), buffer)
    dist.barrier()
    return found, buffer.getvalue(), warned


@pytest.mark.parametrize(("name", "options"), KINDS, ids=["exact", "cheap", "sampled", "bfloat16"])
def test_statistics_of_every_kind_of_layer_travel(
    world: World, name: str, options: dict[str, Any]
) -> None:
    results = world.run(kinds, 3, name, options, timeout=2 * LONG)
    found = agreed([trajectory for trajectory, _, _ in results[:2]])
    assert all(bool(w.isfinite().all()) for w in found)
    assert not any(warned for _, _, warned in results)
    state = torch.load(io.BytesIO(results[0][1]))
    model = ZOO[name].model()
    with distkfac(model, **options) as optimizer:
        optimizer.load_state_dict(state)
        for block in optimizer._curvature.layers.blocks:
            assert all(factor is not None for factor in block.factors.stored.values())
            assert float(block.factors.weight) > 2.0


# Roles that cannot be.


def refused(rank: int, world_size: int) -> dict[str, str]:
    attempts: dict[str, Any] = {
        "all": lambda: distkfac(CASE.model(), stats_workers=world_size),
        "DDP": lambda: distkfac(DistributedDataParallel(CASE.model()), stats_workers=1),
        "apart": lambda: distkfac(CASE.model(), max_staleness=rank),
        "deterministic": lambda: distkfac(CASE.model(), max_staleness=2, deterministic=rank == 1),
    }
    return {name: refusal(attempt) for name, attempt in attempts.items()}


def refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (ValueError, SecondOrderError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_roles_and_options_that_do_not_go_together_are_refused_everywhere(world: World) -> None:
    for found in world.run(refused, 2, timeout=LONG):
        assert "stats_workers=2 with 2 processes leaves none to train" in found["all"]
        assert (
            "DistributedDataParallel(model, process_group=optimizer.worker_group)" in found["DDP"]
        )
        assert found["apart"].startswith("RankMismatchError")
        assert found["deterministic"].startswith("RankMismatchError")


def scalers(rank: int, world_size: int) -> dict[int, str]:
    """What is said to a GradScaler, by the number of stats workers."""
    found = {}
    for helpers in range(world_size - 1):
        scaler = torch.amp.GradScaler("cpu")
        try:
            distkfac(CASE.model(), stats_workers=helpers, grad_scaler=scaler).close()
        except ValueError as error:
            found[helpers] = str(error)
    return found


def test_a_grad_scaler_is_refused_where_several_workers_average(world: World) -> None:
    """On every rank, the stats worker's included."""
    for found in world.run(scalers, 3, timeout=LONG):
        assert sorted(found) == [0, 1]
        for helpers, message in found.items():
            averaged = f"gradients averaged by the optimizer over {3 - helpers} processes"
            assert f"grad_scaler=GradScaler with {averaged}" in message
            assert "wrap the model in DistributedDataParallel, or use" in message
