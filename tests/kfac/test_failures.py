"""All ranks survive, or report, what fails on one of them."""

from __future__ import annotations

import copy
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from models import ZOO
from optimizer_cases import each_kronecker, factors, make, noted, take
from ranks import agreed, kaisa, replaced, shard, vector
from reference import cross_entropy, empirical_factors, weighted_mean
from torch import Tensor, nn

from second_order import DecompositionError, DistKFAC
from second_order.kfac.inversion import Inverses
from second_order.kronecker.solvers import SOLVERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pool import World


MLP = ZOO["mlp"]
LAYERS = ("0", "2", "4")
BATCHES = MLP.batches(8, n=12)
NATIVE = {
    "eigen": ("eigh", torch.linalg.eigh),
    "inverse": ("cholesky_ex", torch.linalg.cholesky_ex),
}
REFRESHED = {"inv_update_steps": 2}


@contextmanager
def failing(
    solver: str, fault: str, is_chosen: Callable[[Tensor], bool] = lambda matrix: True
) -> Iterator[None]:
    """Make the decompositions of the chosen matrices fail, and those of every retry."""
    name, native = NATIVE[solver]

    def routine(matrix: Tensor) -> Any:
        result = native(matrix)
        if not is_chosen(matrix):
            return result
        if fault == "raises":
            raise torch.linalg.LinAlgError(f"linalg.{name}: failed to converge")
        if fault == "crashes":  # what no routine of torch should raise
            raise KeyError("out of luck")
        return tuple(p * float("nan") if p.is_floating_point() else p for p in result)

    with replaced(torch.linalg, {name: routine}):
        yield


def inverses(optimizer: Any) -> dict[str, list[Tensor]]:
    return {
        block.name: [part.clone() for part in block.inverse.tensors]
        for block in optimizer._curvature.layers.blocks
        if block.inverse is not None
    }


def same_inverses(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> set[str]:
    """Names of the layers whose inverses are equal bit for bit."""
    assert a.keys() == b.keys()
    return {n for n in a if all(torch.equal(p, q) for p, q in zip(a[n], b[n], strict=True))}


def fail_once(
    rank: int, world_size: int, where: int, fault: str, options: dict[str, Any]
) -> tuple[list[Tensor], set[str], list[str], list[int], list[str]]:
    """At the second refresh, `where` cannot decompose anything."""
    model = MLP.model()
    optimizer = kaisa(model, **REFRESHED, **options)
    trajectory = []
    stored = set()
    failed = []
    with noted() as warned:
        for step, batch in enumerate(BATCHES[:6]):
            before = inverses(optimizer)
            own_batch = shard(batch, rank, world_size)
            if step == 2 and rank == where:
                with failing(options["solver"], fault):
                    take(model, optimizer, own_batch)
            else:
                take(model, optimizer, own_batch)
            if step == 2:
                stored = same_inverses(before, inverses(optimizer))
            if step == 4:
                assert not same_inverses(before, inverses(optimizer)), "new inverses"
            failed.append(optimizer.summary().failed)
            trajectory.append(vector(model))
    solved_there = [
        row.name
        for row in optimizer.summary().rows
        if re.search(rf"solve (\d\+)?{where}\b", row.computed_by)
    ]
    return trajectory, stored, warned, failed, solved_there


@pytest.mark.parametrize(
    ("solver", "fault", "workers"),
    fractional_product(["eigen", "inverse"], ["raises", "nan", "crashes"], [1, 2, 4], part=3),
)
def test_all_ranks_keep_the_last_inverse_if_one_rank_fails(
    world: World, solver: str, fault: str, workers: int
) -> None:
    """Other layers have new inverses, and the next refresh succeeds."""
    options = {"solver": solver, "grad_worker_fraction": workers / 4}
    results = world.run(fail_once, 4, 0, fault, options)
    agreed([trajectory for trajectory, *_ in results])
    affected = set(results[0][4])
    assert affected, "the rank that fails decomposes layers"
    assert affected < set(LAYERS), "and other ranks do"
    for _, stored, warned, failed, _ in results:
        assert stored <= affected
        assert failed == [0, 0, len(affected), len(affected), 0, 0]
        assert len(warned) == len(affected)
        for name in affected:
            (line,) = [w for w in warned if f"layer '{name}'" in w]
            assert "could not be decomposed at step 2" in line
            assert "its last inverse is kept" in line
    assert set.union(*(stored for _, stored, *_ in results)) == affected
    if fault == "crashes":
        assert all("KeyError: 'out of luck'" in line for line in results[0][2])


def fail_to_damp(
    rank: int, world_size: int, where: int
) -> tuple[list[Tensor], list[int], list[str]]:
    """At the second refresh, `where` has no memory to compute γ, even of others' layers."""
    model = MLP.model()
    optimizer = kaisa(model, **REFRESHED)

    def out_of_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError

    trajectory = []
    failed = []
    with noted() as warned:
        for step, batch in enumerate(BATCHES[:6]):
            faults = {"compute_dampings": out_of_memory} if (step, rank) == (2, where) else {}
            with replaced(Inverses, faults):
                take(model, optimizer, shard(batch, rank, world_size))
            failed.append(optimizer.summary().failed)
            trajectory.append(vector(model))
    return trajectory, failed, warned


def test_all_ranks_keep_all_inverses_if_one_rank_cannot_damp(world: World) -> None:
    """Also those of layers that the other rank decomposes."""
    results = world.run(fail_to_damp, 2, 1)
    agreed([trajectory for trajectory, *_ in results])
    for _, failed, warned in results:
        assert failed == [0, 0, len(LAYERS), len(LAYERS), 0, 0]
        assert len(warned) == len(LAYERS)


def one_side_fails(
    rank: int, world_size: int, size: int, colocate: bool
) -> tuple[list[Tensor], list[str]]:
    """Matrices of one size cannot be decomposed at the second refresh."""
    model = MLP.model()
    optimizer = kaisa(model, colocate_factors=colocate, **REFRESHED)
    found = []
    with noted() as warned:
        for step, batch in enumerate(BATCHES[:4]):
            own_batch = shard(batch, rank, world_size)
            with failing("eigen", "raises", lambda m, s=step: s == 2 and m.shape[-1] == size):
                take(model, optimizer, own_batch)
            found.append(vector(model))
    return found, warned


@pytest.mark.parametrize(("world_size", "colocate"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize(("size", "layer"), [(8, "2"), (3, "4")], ids=["A", "G"])
def test_a_failed_factor_is_reported(
    world: World, world_size: int, colocate: bool, size: int, layer: str
) -> None:
    """The other factor may be valid on another rank."""
    results = world.run(one_side_fails, world_size, size, colocate)
    agreed([found for found, _ in results])
    for _, (line,) in results:
        assert f"layer {layer!r} could not be decomposed at step 2" in line


def fail_for_ever(
    rank: int, world_size: int, where: int, options: dict[str, Any]
) -> tuple[int, str, list[Tensor], int]:
    """The step at which the error came, and its message."""
    model = MLP.model()
    optimizer = kaisa(model, **REFRESHED, **options)
    trajectory = []
    with noted() as warned:
        for step, batch in enumerate(BATCHES):
            with failing("eigen", "raises", lambda _, now=step: rank == where and now >= 2):
                try:
                    take(model, optimizer, shard(batch, rank, world_size))
                except DecompositionError as error:
                    found = step, str(error)
                    break
            trajectory.append(vector(model))
        else:
            raise AssertionError("no error came")
    return *found, trajectory, len(warned)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_too_many_consecutive_failures_raise_on_every_rank(world: World, workers: int) -> None:
    """At the same step, with the same parameters until then."""
    options = {"grad_worker_fraction": workers / 4}
    results = world.run(fail_for_ever, 4, 0, options)
    agreed([trajectory for _, _, trajectory, _ in results])
    for step, message, _, warned in results:
        assert step == 6
        assert message == results[0][1]
        assert "could not be decomposed 3 refreshes in a row" in message
        assert "raise damping, lower lr, or name them in skip_layers" in message
        named = re.findall(r"'(\d)'", message)
        assert named
        assert warned == len(named), "once per layer"


def fail_now_and_then(rank: int, world_size: int) -> list[Tensor]:
    """Two refreshes in a row of each three, with a limit of three."""
    model = MLP.model()
    optimizer = kaisa(model)
    trajectory = []
    with noted():
        for step, batch in enumerate(BATCHES):
            with failing("eigen", "raises", lambda _, now=step: rank == 1 and now % 3 > 0):
                take(model, optimizer, shard(batch, rank, world_size))
            trajectory.append(vector(model))
    return trajectory


def test_failures_that_are_not_consecutive_do_not_raise(world: World) -> None:
    agreed(world.run(fail_now_and_then, 2))


def with_bad_gradients(
    rank: int,
    world_size: int,
    where: set[int],
    layer: str,
    bad: float,
    options: dict[str, Any],
) -> list[tuple[Any, int, Tensor]]:
    """Two steps. In the second, statistics have a bad value on some ranks, and gradients do not."""
    model = MLP.model()
    bad_now = False

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        def replace(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient[0, 0] = bad
            return gradient

        if bad_now:
            output.register_hook(replace)

    model.get_submodule(layer).register_forward_hook(hook)
    optimizer = kaisa(model, **options)
    records = []
    for step, batch in enumerate(BATCHES[:2]):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        clean = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if step == 1 and rank in where:
            optimizer.zero_grad()
            bad_now = True
            cross_entropy(model(x), y).backward()
            for p, gradient in zip(model.parameters(), clean, strict=True):
                p.grad.copy_(gradient)
        optimizer.step()
        records.append((factors(optimizer), optimizer.summary().dropped, vector(model)))
    return records


@pytest.mark.parametrize(
    ("where", "layer", "bad"),
    fractional_product([{0}, {1, 3}], ["0", "4"], [math.nan, math.inf], part=2),
)
def test_non_finite_statistics_of_one_rank_are_dropped(
    world: World, where: set[int], layer: str, bad: float
) -> None:
    """A bad gradient at a layer's output reaches that layer and all layers before it."""
    affected = {"0": "0", "4": "024"}[layer]
    options = {"grad_worker_fraction": 0.5, "factor_decay": 0.5}
    results = world.run(with_bad_gradients, 4, where, layer, bad, options)
    agreed([[parameters for _, _, parameters in rank] for rank in results])
    assert [rank[1][1] for rank in results] == [len(affected) * (r in where) for r in range(4)]

    model = MLP.model()
    first = {n: empirical_factors(model, *BATCHES[0], cross_entropy, n) for n in LAYERS}
    nn.utils.vector_to_parameters(results[0][0][2], model.parameters())
    for name in LAYERS:
        usable = [r for r in range(4) if name not in affected or r not in where]
        shards = [shard(BATCHES[1], r, 4) for r in usable]
        each = [empirical_factors(model, x, y, cross_entropy, name) for x, y in shards]
        counted = sum(len(x) for x, _ in shards) / len(BATCHES[1][0])
        for i, old in enumerate(first[name]):
            new = weighted_mean([f[i] for f in each], [len(x) for x, _ in shards])
            if i == 1:  # G is a mean over all terms of the loss, and those dropped add zero to it
                new = new * counted
            # W = 1, then 1.5: X + (x - X) / 1.5.
            expected = old + (new - old) / 1.5
            for rank in results:
                torch.testing.assert_close(rank[1][0][name][i], expected, rtol=1e-9, atol=1e-12)


def test_statistics_that_are_non_finite_everywhere_leave_the_averages_unchanged(
    world: World,
) -> None:
    results = world.run(with_bad_gradients, 2, {0, 1}, "4", math.nan, {})
    for (before, dropped_before, _), (after, dropped, _) in results:
        assert (dropped_before, dropped) == (0, 3)
        for name in LAYERS:
            assert all(torch.equal(a, b) for a, b in zip(before[name], after[name], strict=True))


def with_huge_loss(
    rank: int, world_size: int, System: Any, factor: float
) -> tuple[list[Tensor], list[str]]:
    """The parameters and the warnings, if the loss of the first step is much larger, in float32."""
    model = MLP.model().float()
    optimizer = make(System, model, momentum=0.0, factor_dtype=torch.float32)
    trajectory = []
    with noted() as warned:
        for step, (x, y) in enumerate(BATCHES[:5]):
            optimizer.param_groups[0]["lr"] = 0.1 if step else 0.0
            scale = 1.0 if step else factor
            batch = shard((x.float(), y), rank, world_size)
            take(model, optimizer, batch, lambda x, y, by=scale: by * cross_entropy(x, y))
            for block in optimizer._curvature.layers.blocks:
                assert all(bool(each.isfinite().all()) for each in block.factors.entries.values())
            trajectory.append(vector(model))
    assert all(block.solved for block in optimizer._curvature.layers.blocks)
    return trajectory, [line for line in warned if "usable statistics" in line]


def with_huge_losses(rank: int, world_size: int, System: Any) -> list[Any]:
    return [with_huge_loss(rank, world_size, System, 10.0**e) for e in range(16, 23)]


@each_kronecker
def test_running_averages_stay_finite_whatever_the_size_of_gradients(
    world: World, System: Any
) -> None:
    """Sums that overflow only when they are scaled or added are dropped, with a warning."""
    results = world.run(with_huge_losses, 2, System)
    named: set[str] = set()
    for by_rank in zip(*results, strict=True):
        agreed([trajectory for trajectory, _ in by_rank])
        for _, warned in by_rank:
            assert len(warned) == len(set(warned))
            named |= set(warned)
    text = "layer {!r} has no usable statistics at step 0, and 1 of its captured pairs were dropped"
    for layer in LAYERS:
        assert any(text.format(layer) in line for line in named)


EACH_SECOND = {"inv_update_steps": 2, "factor_update_steps": 1}


def without_inverses(optimizer: Any) -> dict[str, Any]:
    """The state of an optimizer as if it had made no refresh yet."""
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for name in {"inverse_requested"} & entry["curvature"].keys():
            entry["curvature"][name] = 1
    return state


def broken(*args: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


@each_kronecker
def test_after_an_out_of_memory_error_every_layer_is_refreshed(System: Any) -> None:
    """The failed refresh is repeated at the next step."""
    model = MLP.model()
    options = {"max_staleness": 0} if System is DistKFAC else {}
    optimizer = make(System, model, **EACH_SECOND, **options)
    take(model, optimizer, BATCHES[0])
    kind = SOLVERS[optimizer._curvature._options.solver]
    optimizer.load_state_dict(without_inverses(optimizer))  # a refresh is due out of turn
    with replaced(kind, {"combine": broken}), pytest.raises(torch.OutOfMemoryError):
        take(model, optimizer, BATCHES[1])
    take(model, optimizer, BATCHES[2])
    assert all(block.solved for block in optimizer._curvature.layers.blocks)
    assert not optimizer._curvature.inverses.pending
