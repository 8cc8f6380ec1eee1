"""Factors that one process keeps: the same trajectory, a share of the memory, whole checkpoints.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract import take
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO
from ranks import (
    agreed,
    assert_same_trajectory,
    by_reference,
    counted,
    follow,
    kaisa,
    replaced,
    train,
    train_each,
    vector,
)
from reference import cross_entropy, empirical_factors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from second_order import SecondOrderError, SecondOrderWarning
from second_order.kronecker import solvers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP, CONV = ZOO["mlp"], ZOO["conv_grouped"]
BATCHES = MLP.batches(7, n=12)
REDUCE = {"factor_exchange": "reduce"}
SPREAD = {**REDUCE, "grad_worker_fraction": 0.5, "colocate_factors": False}
PAIRS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
GRIDS = [(P, n) for P in (2, 3, 4) for n in range(1, P + 1) if P % n == 0]


def falling(step: int) -> float:
    return 0.3 * 0.5**step


def growing(step: int) -> int:
    return 1 + step // 2


# The same trajectory.


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize(("world_size", "workers"), GRIDS)
def test_every_placement_gives_the_trajectory_of_one_process(
    world: World, world_size: int, workers: int, solver: str
) -> None:
    """Batch B/P on P ranks, each factor on one of them, is batch B on one process."""
    batches = CONV.batches(2, n=12)
    choices = [
        {
            **REDUCE,
            "solver": solver,
            "grad_worker_fraction": workers / world_size,
            "colocate_factors": colocate,
            "symmetry_aware": triangular,
            "relative_damping": relative,
        }
        for colocate, triangular, relative in PAIRS
    ]
    expected = {
        relative: train(0, 1, CONV, batches, {"solver": solver, "relative_damping": relative})
        for relative in (True, False)
    }
    results = world.run(train_each, world_size, CONV, batches, choices)
    for choice, parallel in zip(choices, zip(*results, strict=True), strict=True):
        trajectory = expected[choice["relative_damping"]]
        assert_same_trajectory(agreed(parallel), trajectory, hint=choice)


@pytest.mark.parametrize(
    "name",
    [
        "conv1d",
        "conv_depthwise",
        "embedding",
        "language_model",
        "lora",
        "norms",
        "shared_linear",
        "transformer",
        "unused",
    ],
)
def test_every_kind_of_layer_gives_the_trajectory_of_one_process(world: World, name: str) -> None:
    case = ZOO[name]
    batches = case.batches(3, n=8)
    options = {"relative_damping": True, **({"kfac_approx": case.shared} if case.shared else {})}
    parallel = world.run(train, 4, case, batches, {**SPREAD, **options})
    assert_same_trajectory(agreed(parallel), train(0, 1, case, batches, options))


OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"base": torch.optim.Adam, "lr": 0.01},
    "intervals": {"factor_update_steps": 2, "inv_update_steps": 3},
    "intervals as callables": {"factor_update_steps": growing, "inv_update_steps": 2},
    "damping as callable": {"damping": falling, "relative_damping": True},
    "decay as callable": {"factor_decay": falling},
    "refresh warm-up": {"inv_update_steps": 3, "refresh_warmup_steps": 2},
    "some layers": {"skip_layers": ["2"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_gives_the_trajectory_of_one_process(
    world: World, options: dict[str, Any]
) -> None:
    expected = by_reference(MLP, BATCHES, options)
    parallel = world.run(train, 3, MLP, BATCHES, {**options, **REDUCE})
    assert_same_trajectory(agreed(parallel), expected)


@settings(max_examples=20)
@given(data=st.data(), world_size=st.integers(1, 4), per_rank=st.integers(1, 3))
def test_any_network_on_any_grid_gives_the_trajectory_of_one_process(
    world: World, data: st.DataObject, world_size: int, per_rank: int
) -> None:
    """Fewer layers than ranks, too: some keep nothing."""
    widths = data.draw(st.lists(st.integers(1, 6), max_size=5), "widths")
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    options = {
        "assignment": data.draw(st.sampled_from(["compute", "memory"])),
        "colocate_factors": data.draw(st.booleans()),
        "damping": data.draw(st.floats(1e-2, 10.0)),
        "factor_update_steps": data.draw(st.integers(1, 2)),
        "grad_worker_fraction": data.draw(st.sampled_from(divisors)) / world_size,
        "inv_update_steps": data.draw(st.integers(1, 3)),
        "relative_damping": data.draw(st.booleans()),
        "solver": data.draw(st.sampled_from(["eigen", "inverse"])),
        "symmetry_aware": data.draw(st.booleans()),
    }
    batches = MLP.batches(3, n=world_size * per_rank)
    expected = train_widths(0, 1, widths, batches, options)
    parallel = world.run(train_widths, world_size, widths, batches, {**options, **REDUCE})
    assert_same_trajectory(agreed(parallel), expected)


def network(widths: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        part
        for d_in, d_out in itertools.pairwise(widths)
        for part in (nn.Linear(d_in, d_out), nn.Tanh())
    ]
    return nn.Sequential(*layers[:-1]).double()


def train_widths(
    rank: int,
    world_size: int,
    widths: Sequence[int],
    batches: Sequence[Batch],
    options: dict[str, Any],
) -> list[Tensor]:
    model = network([5, *widths, 3])
    return follow(rank, world_size, model, kaisa(model, **options), MLP, batches)


def test_sampled_labels_are_those_of_the_other_exchange(world: World) -> None:
    """They differ by rank, so that one process is no measure."""
    sampled = {"fisher": "sampled", "inv_update_steps": 2}
    expected = agreed(world.run(train, 2, MLP, BATCHES, sampled))
    found = agreed(world.run(train, 2, MLP, BATCHES, {**sampled, **REDUCE}))
    assert_same_trajectory(found, expected)
    assert not torch.allclose(found[-1], train(0, 1, MLP, BATCHES, {"inv_update_steps": 2})[-1])


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_low_precision_keeps_the_ranks_together(world: World, solver: str) -> None:
    bf16 = {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16, "solver": solver}
    exact = train(0, 1, MLP, BATCHES, {"solver": solver})
    found = agreed(world.run(train, 4, MLP, BATCHES, {**bf16, **SPREAD}))
    assert_same_trajectory(found, exact, rtol=0.05)
    assert not torch.equal(found[-1], exact[-1])


def factors_of_shards(
    rank: int, world_size: int, batch: Batch, counts: Sequence[int]
) -> list[dict[str, Tensor]]:
    x, y = (part.split(list(counts))[rank] for part in batch)
    model = MLP.model()
    optimizer = kaisa(model, **SPREAD, symmetry_aware=False)
    optimizer.zero_grad()
    if counts[rank]:
        cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.consolidate(to=None)
    state = optimizer.state_dict()["state"]
    return [state[index]["curvature"] for index in (0, 2, 4)]


@pytest.mark.parametrize("counts", [[1, 2, 6, 3], [4, 0, 5, 3], [0, 0, 12, 0]], ids=str)
def test_shards_are_weighted_by_their_examples(world: World, counts: list[int]) -> None:
    """A rank without examples may keep a factor of the others'."""
    batch = MLP.batch(12)
    for found in world.run(factors_of_shards, 4, batch, counts):
        for layer, part in zip(("0", "2", "4"), found, strict=True):
            whole = empirical_factors(MLP.model(), *batch, cross_entropy, layer)
            for letter, full in zip("AG", whole, strict=True):
                torch.testing.assert_close(part[letter], full, rtol=1e-10, atol=1e-12)
            means = [full.diagonal(dim1=-2, dim2=-1).mean(-1) for full in whole]
            torch.testing.assert_close(part["mean_eigenvalues"], torch.stack(means))


# Who keeps what, and what is sent.


def kept(
    rank: int, world_size: int, widths: Sequence[int], options: dict[str, Any]
) -> tuple[list[tuple[bool, bool]], list[Tensor], int, int]:
    """Which factors there are, what all ranks have, and the bytes of factors and inverses."""
    model = network(widths)
    optimizer = kaisa(model, **options)
    x = torch.randn(4, widths[0], dtype=torch.float64)
    for _ in range(2):
        take(model, optimizer, (x + rank, torch.zeros(4, dtype=torch.int64)))
    held = []
    for block, layer in optimizer._curvature.plan.items():
        assert block.factors is not None
        held.append((block.factors.a is not None, block.factors.g is not None))
        if options.get("factor_exchange") == "reduce":
            assert held[-1] == tuple(solver == rank for solver in layer.solvers)
    everywhere = [
        t for b in optimizer._curvature.layers.blocks for t in (b.factors.weight, b.factors.means)
    ]  # type: ignore[union-attr]
    summary = optimizer.summary()
    return held, everywhere, summary.factor_bytes, summary.inverse_bytes


@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_each_factor_is_on_one_rank_and_its_trace_on_all(
    world: World, world_size: int, workers: int, colocate: bool
) -> None:
    """On the one that decomposes it."""
    widths = [9, 8, 7, 6, 3]
    options = {"colocate_factors": colocate, "grad_worker_fraction": workers / world_size}
    results = world.run(kept, world_size, widths, {**options, **REDUCE})
    for layer in range(4):
        for which in range(2):
            assert sum(held[layer][which] for held, *_ in results) == 1
    assert sum(factors for _, _, factors, _ in results) == kept(0, 1, widths, {})[2]
    for _, everywhere, _, _ in results:
        for mine, first in zip(everywhere, results[0][1], strict=True):
            assert torch.equal(mine, first)
    every = world.run(kept, world_size, widths, options)
    assert all(factors == kept(0, 1, widths, {})[2] for _, _, factors, _ in every)


def bytes_of_triangles(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, int]:
    with replaced(solvers, {"TRIANGULAR_FROM": 32}):
        *_, factors, inverses = kept(rank, world_size, [39] * 5, {"solver": "inverse", **options})
    return factors, inverses


def test_large_layers_keep_a_triangle_for_each_factor_and_each_inverse(world: World) -> None:
    """n (n + 1) / 2 elements; and half of all that on each of two processes with one worker."""
    layer = (40 * 41 // 2 + 39 * 40 // 2) * 8
    assert bytes_of_triangles(0, 1, {}) == (4 * layer, 4 * layer)
    alone = {**REDUCE, "grad_worker_fraction": 0.5}
    assert world.run(bytes_of_triangles, 2, alone) == [(2 * layer, 2 * layer)] * 2
    everywhere = {"grad_worker_fraction": 1.0}
    assert world.run(bytes_of_triangles, 2, everywhere) == [(4 * layer, 4 * layer)] * 2


def sent(rank: int, world_size: int, exchange: str) -> tuple[Counter[str], int, int]:
    """Elements by collective in a step that takes statistics alone; those of factors and heads."""
    model = network([9, 8, 7, 3]).float()
    single = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
    optimizer = kaisa(model, inv_update_steps=10, factor_exchange=exchange, **single)
    elements: Counter[str] = Counter()
    all_reduce, all_to_all = dist.all_reduce, dist.all_to_all_single

    def reducing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        elements["all_reduce"] += tensor.numel()
        return all_reduce(tensor, *args, **kwargs)

    def sending(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        elements["all_to_all_single"] += tensor.numel()
        return all_to_all(output, tensor, *args, **kwargs)

    batch = torch.randn(4, 9), torch.zeros(4, dtype=torch.int64)
    take(model, optimizer, batch)
    with replaced(dist, {"all_reduce": reducing, "all_to_all_single": sending}):
        take(model, optimizer, batch)
    sizes = [(10, 8), (9, 7), (8, 3)]
    return elements, sum(n * (n + 1) // 2 for pair in sizes for n in pair), 3 * len(sizes)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_factor_is_sent_to_its_keeper_and_to_nobody_else(world: World, world_size: int) -> None:
    """Each once, where an all-reduce sends each twice; and a few numbers a layer to every rank."""
    both = world.run(sent, world_size, "all_reduce")
    one = world.run(sent, world_size, "reduce")
    for (everything, _, _), (elements, factors, heads) in zip(both, one, strict=True):
        words = everything["all_to_all_single"]  # that ranks compare before a step
        assert elements["all_to_all_single"] == factors + world_size * heads + words
        assert everything["all_reduce"] == elements["all_reduce"] + factors + heads
        assert words == world_size


# A part of the ranks; a rank that fails.


def train_in_groups(
    rank: int, world_size: int, members: list[list[int]]
) -> tuple[list[Tensor], Counter[str]]:
    """Each group on its own, and both collect their factors on their second rank."""
    groups = [dist.new_group(ranks) for ranks in members]
    index = next(i for i, ranks in enumerate(members) if rank in ranks)
    case, position = [MLP, CONV][index], members[index].index(rank)
    model = case.model()
    optimizer = kaisa(model, process_group=groups[index], **SPREAD)
    trajectory = follow(position, 2, model, optimizer, case, case.batches(3, n=12))
    optimizer.consolidate(to=1)
    return trajectory, letters({"optimizer": optimizer.state_dict()})


def test_a_group_keeps_its_factors_among_itself(world: World) -> None:
    members = [[0, 2], [1, 3]]
    results = world.run(train_in_groups, 4, members)
    for case, (first, second) in zip((MLP, CONV), members, strict=True):
        expected = train(0, 1, case, case.batches(3, n=12))
        assert_same_trajectory(agreed([results[first][0], results[second][0]]), expected)
        assert results[second][1] == {"A": 3, "G": 3}
        assert results[first][1].total() < 6


def train_failing(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    """At step 2, rank 1 can decompose nothing."""
    model = MLP.model()
    optimizer = kaisa(model, **options)

    def fails(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")

    trajectory = []
    for step, batch in enumerate(BATCHES[:4]):
        faults = {"eigh": fails} if step == 2 and rank == 1 else {}
        with replaced(torch.linalg, faults):
            trajectory += follow(rank, world_size, model, optimizer, MLP, [batch])
    return trajectory


def test_a_keeper_that_fails_once_leaves_the_old_inverse(world: World) -> None:
    options = {"grad_worker_fraction": 1 / 3}
    found = agreed(world.run(train_failing, 3, {**options, **REDUCE}))
    assert_same_trajectory(found, agreed(world.run(train_failing, 3, options)))
    assert not torch.allclose(found[2], train(0, 1, MLP, BATCHES[:4])[2])


# Layers that are frozen and thawed.


def train_thawing(
    rank: int, world_size: int, frozen: dict[int, Sequence[str]], options: dict[str, Any]
) -> tuple[list[Tensor], list[list[Any]]]:
    """`frozen`: by step, the names of the frozen layers, or of the parameters."""
    model = network([5, 6, 6, 6, 3])
    optimizer = kaisa(model, **options)
    trajectory, keepers = [], []
    for step, batch in enumerate(BATCHES):
        for name, p in model.named_parameters():
            p.requires_grad_(not any(name.startswith(n) for n in frozen.get(step, ())))
        trajectory += follow(rank, world_size, model, optimizer, MLP, [batch])
        known = optimizer._curvature.known
        keepers.append([known[block].keepers for block in optimizer._curvature.layers.blocks])
        for block, layer in optimizer._curvature.plan.items():
            held = tuple(block.stored(which) is not None for which in "AG")
            spread = options.get("factor_exchange") == "reduce"
            assert held == (tuple(s == rank for s in layer.solvers) if spread else (True, True))
    return trajectory, keepers


@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize(("world_size", "workers"), [(2, 1), (3, 3), (4, 2)])
def test_factors_move_when_layers_are_frozen_and_thawed(
    world: World, world_size: int, workers: int, colocate: bool
) -> None:
    """To who decomposes them now; another bias starts its layer anew. No statistic is lost."""
    frozen = {2: ["0."], 3: ["0.", "4.", "6.bias"], 4: ["4."], 5: ["2.weight"]}
    options = {
        "grad_worker_fraction": workers / world_size,
        "colocate_factors": colocate,
        "factor_update_steps": 2,
        "factor_decay": 0.7,
    }
    results = world.run(train_thawing, world_size, frozen, {**options, **REDUCE})
    found = agreed([trajectory for trajectory, _ in results])
    for _, keepers in results:
        assert keepers == results[0][1]
    moves = [a != b for a, b in itertools.pairwise(results[0][1])]
    assert any(moves), "nothing has moved"
    other = world.run(train_thawing, world_size, frozen, options)
    assert_same_trajectory(found, agreed([trajectory for trajectory, _ in other]), rtol=1e-10)
    assert_same_trajectory(found, train_thawing(0, 1, frozen, options)[0])


# Checkpoints of one rank.


def refused(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
    """Asks for its state after every step, first without the factors of the others."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    trajectory, messages = [], []
    for batch in BATCHES[:3]:
        trajectory += follow(rank, world_size, model, optimizer, MLP, [batch])
        with counted() as counts:
            with pytest.raises(SecondOrderError) as error:
                optimizer.state_dict()
            assert not counts
            messages.append(str(error.value))
        optimizer.consolidate(to=0)
        with counted() as counts:
            optimizer.state_dict()
            assert not counts, "whoever asks for it alone would wait for the others"
    return trajectory, messages


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_checkpoint_without_the_factors_of_others_is_refused(
    world: World, world_size: int
) -> None:
    """On every rank, after every step; and asking has changed nothing."""
    results = world.run(refused, world_size, REDUCE)
    found = agreed([trajectory for trajectory, _ in results])
    assert_same_trajectory(found, train(0, 1, MLP, BATCHES[:3]))
    for _, messages in results:
        assert len(messages) == 3
        assert all("KAISA.state_dict() would lack" in message for message in messages)
        assert all("consolidate(to=0) on every process" in message for message in messages)


def test_one_process_needs_no_consolidation() -> None:
    model = MLP.model()
    optimizer = kaisa(model, **REDUCE)
    follow(0, 1, model, optimizer, MLP, BATCHES[:1])
    before = optimizer.state_dict()["state"][0]["curvature"]
    optimizer.consolidate()
    after = optimizer.state_dict()["state"][0]["curvature"]
    assert after.keys() == before.keys() >= {"A", "G", "average_weight", "mean_eigenvalues"}


def nothing_to_collect(rank: int, world_size: int) -> int:
    model = MLP.model()
    optimizer = kaisa(model)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:1])
    with counted() as counts:
        optimizer.state_dict()
        optimizer.consolidate(to=1)
        optimizer.state_dict()
    return counts.total()


def test_with_the_other_exchange_there_is_nothing_to_collect(world: World) -> None:
    assert world.run(nothing_to_collect, 2) == [0, 0]


def consolidated(
    rank: int, world_size: int, to: int | None, options: dict[str, Any], steps: int = 3
) -> dict[str, Any]:
    model = MLP.model()
    optimizer = kaisa(model, **options)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:steps])
    optimizer.consolidate(to=to)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def letters(saved: dict[str, Any]) -> Counter[str]:
    """How many layers have each of their factors."""
    parts = [entry["curvature"] for entry in saved["optimizer"]["state"].values()]
    return Counter(letter for part in parts for letter in "AG" if letter in part)


@pytest.mark.parametrize("to", [0, 2, None])
def test_whoever_saves_has_all_factors(world: World, to: int | None) -> None:
    """The same ones that one process would have."""
    whole = consolidated(0, 1, None, {})
    results = world.run(consolidated, 3, to, SPREAD | {"grad_worker_fraction": 1 / 3})
    for rank, saved in enumerate(results):
        if to in (rank, None):
            assert letters(saved) == {"A": 3, "G": 3}
            for index, entry in whole["optimizer"]["state"].items():
                part = saved["optimizer"]["state"][index]["curvature"]
                assert part.keys() == entry["curvature"].keys()
                for key, value in entry["curvature"].items():
                    if isinstance(value, Tensor):
                        torch.testing.assert_close(part[key], value, rtol=1e-9, atol=1e-12)
        else:
            assert letters(saved).total() < 6
    if to is not None:
        assert sum(letters(saved).total() for saved in results) < 12


def asked_twice(rank: int, world_size: int, to: int | None) -> list[str]:
    """The warnings."""
    model = MLP.model()
    optimizer = kaisa(model, **REDUCE)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:1])
    optimizer.consolidate(to=to)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.state_dict()
        optimizer.state_dict()
    return [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]


def test_who_asks_for_a_state_that_was_collected_elsewhere_is_told(world: World) -> None:
    """Once: a rank's own part can be what is wanted."""
    first, second = world.run(asked_twice, 2, 1)
    (message,) = first
    assert "state_dict() on rank 0 has no more than this process's part" in message
    assert "consolidate(to=1) collected the rest elsewhere" in message
    assert second == []
    assert world.run(asked_twice, 2, None) == [[], []]


def no_such_rank(rank: int, world_size: int, to: int) -> tuple[str, int]:
    optimizer = kaisa(MLP.model(), **REDUCE)
    with counted() as counts, pytest.raises(ValueError, match="there are ranks 0 to") as error:
        optimizer.consolidate(to=to)
    return str(error.value), counts.total()


@pytest.mark.parametrize("to", [-1, 2, 7])
def test_consolidating_to_no_rank_is_refused(world: World, to: int) -> None:
    expected = f"consolidate(to={to}): there are ranks 0 to 1; use None for all of them"
    assert world.run(no_such_rank, 2, to) == [(expected, 0)] * 2


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for each in value.values() for t in tensors_in(each)]
    return []


def after_consolidation(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Bytes in state besides those kept; and whether a state may be asked for."""
    model = MLP.model()
    optimizer = kaisa(model, **REDUCE)
    found = []
    for batch in BATCHES[:2]:
        follow(rank, world_size, model, optimizer, MLP, [batch])
        for how in ("collected", "stepped"):
            if how == "collected":
                optimizer.consolidate(to=None)
                saved = optimizer.state_dict()["state"].values()
                allowed = True
            else:
                follow(rank, world_size, model, optimizer, MLP, [batch])
                with pytest.raises(SecondOrderError, match="consolidate"):
                    optimizer.state_dict()
                saved, allowed = optimizer.state.values(), False
            curvature = [parts["curvature"] for parts in saved]
            kept_here = {
                id(b.stored(which)) for b in optimizer._curvature.layers.blocks for which in "AG"
            }
            copies = [
                part[which]
                for part in curvature
                for which in "AG"
                if which in part and id(part[which]) not in kept_here
            ]
            found.append((sum(t.nbytes for t in copies), allowed))
    return found


def test_collected_factors_go_with_the_next_step(world: World) -> None:
    for found in world.run(after_consolidation, 2):
        collected, stepped = found[0::2], found[1::2]
        assert all(size > 0 and allowed for size, allowed in collected)
        assert all(size == 0 and not allowed for size, allowed in stepped)


def resume(
    rank: int, world_size: int, data: bytes, options: dict[str, Any], steps: int = 3
) -> list[Tensor]:
    saved = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = kaisa(model, **options)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return follow(rank, world_size, model, optimizer, MLP, BATCHES[steps:])


def written(saved: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    return buffer.getvalue()


INTERVALS = {"inv_update_steps": 3}


@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize("before", [2, 4])
def test_a_checkpoint_continues_on_any_number_of_processes_with_either_exchange(
    world: World, before: int, triangular: bool
) -> None:
    options = {**INTERVALS, "momentum": 0.9, "solver": "inverse", "symmetry_aware": triangular}
    expected = train(0, 1, MLP, BATCHES, options)[3:]
    data = written(world.run(consolidated, before, 0, {**options, **SPREAD})[0])
    for after, exchange in itertools.product((1, 2, 3), ("reduce", "all_reduce")):
        choice = {**options, "factor_exchange": exchange, "grad_worker_fraction": 1 / after}
        parallel = world.run(resume, after, data, choice)
        assert_same_trajectory(agreed(parallel), expected, hint=f"on {after}, {exchange}")


def test_a_checkpoint_of_the_other_exchange_continues(world: World) -> None:
    """Each rank keeps what is its own of it."""
    expected = train(0, 1, MLP, BATCHES, INTERVALS)[3:]
    data = written(world.run(consolidated, 2, 0, INTERVALS)[1])
    for after in (1, 2, 3):
        parallel = world.run(resume, after, data, {**INTERVALS, **REDUCE})
        assert_same_trajectory(agreed(parallel), expected, hint=f"on {after}")


def save_frozen(rank: int, world_size: int) -> dict[str, Any]:
    """A layer is frozen when the checkpoint is written, and thaws afterwards."""
    model = MLP.model()
    optimizer = kaisa(model.parameters(), model=model, **REDUCE)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:2])
    model.get_submodule("2").requires_grad_(False)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[2:3])
    optimizer.consolidate()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def resume_thawed(rank: int, world_size: int, data: bytes, first: bool) -> list[Tensor]:
    """`first`: the layer is frozen when the checkpoint is loaded."""
    saved = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = kaisa(model.parameters(), model=model, **REDUCE)
    model.get_submodule("2").requires_grad_(not first)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    model.get_submodule("2").requires_grad_(True)
    return follow(rank, world_size, model, optimizer, MLP, BATCHES[3:])


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_has_the_factors_of_frozen_layers(world: World, first: bool) -> None:
    saved = save_frozen(0, 1)
    expected = resume_thawed(0, 1, written(saved), first)
    data = written(world.run(save_frozen, 3)[0])
    assert letters(torch.load(io.BytesIO(data))) == {"A": 3, "G": 3}
    for after in (2, 3):
        parallel = world.run(resume_thawed, after, data, first)
        assert_same_trajectory(agreed(parallel), expected, hint=f"on {after}")


# torch.distributed.checkpoint.


def sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, how: StateDictOptions
) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=how),
    }


def save_dcp(rank: int, world_size: int, path: str, flat: bool, options: dict[str, Any]) -> None:
    model = MLP.model()
    optimizer = kaisa(model, **options)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:3])
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    dcp.save(sharded(model, optimizer, how), checkpoint_id=path)


def load_dcp(
    rank: int, world_size: int, path: str, flat: bool, options: dict[str, Any]
) -> list[Tensor]:
    model = MLP.model(seed=5)
    optimizer = kaisa(model, **options)
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = sharded(model, optimizer, how)
    dcp.load(state, checkpoint_id=path, no_dist=world_size == 1)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=how)
    return follow(rank, world_size, model, optimizer, MLP, BATCHES[3:])


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("before", [2, 4])
def test_distributed_checkpoint_needs_no_consolidation(
    world: World, tmp_path: Path, before: int, flat: bool
) -> None:
    """Each rank writes and reads its own factors."""
    options = {**INTERVALS, "momentum": 0.9}
    expected = train(0, 1, MLP, BATCHES, options)[3:]
    world.run(save_dcp, before, str(tmp_path), flat, {**options, **SPREAD})
    for after, exchange in ((1, "reduce"), (2, "all_reduce"), (3, "reduce"), (4, "reduce")):
        choice = {**options, "factor_exchange": exchange}
        parallel = world.run(load_dcp, after, str(tmp_path), flat, choice)
        assert_same_trajectory(agreed(parallel), expected, hint=f"on {after}, {exchange}")


def full_state(rank: int, world_size: int, to: Any) -> Counter[str]:
    model = MLP.model()
    optimizer = kaisa(model, **REDUCE)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:1])
    if to != "nobody":
        optimizer.consolidate(to=to)
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=how)
    return letters({"optimizer": {"state": state.get("state", {})}})


def test_a_full_state_needs_consolidation(world: World) -> None:
    """What rank 0 alone writes is no part of a checkpoint, but all of it."""
    for error in world.run(full_state, 2, "nobody", expect_errors=True):
        assert isinstance(error, SecondOrderError)
        assert "consolidate(to=0)" in str(error)
    for to in (0, None):
        first, second = world.run(full_state, 2, to)
        assert first == {"A": 3, "G": 3}
        assert not second  # torch gives it to rank 0 alone


# Factors that are missing.


def without(saved: dict[str, Any], *lost: tuple[int, str]) -> dict[str, Any]:
    """A checkpoint without some factors: (index of the weight, "A" or "G")."""
    saved = copy.deepcopy(saved)
    for index, letter in lost:
        del saved["optimizer"]["state"][index]["curvature"][letter]
    return saved


def resume_damaged(
    rank: int, world_size: int, data: bytes, options: dict[str, Any]
) -> tuple[list[Tensor], list[list[str]], list[str]]:
    """Parameters, and the layers without an inverse, after each step; warnings."""
    saved = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = kaisa(model, **options)
    trajectory, unsolved = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for batch in BATCHES[3:]:
            trajectory += follow(rank, world_size, model, optimizer, MLP, [batch])
            unsolved.append(
                [block.name for block in optimizer._curvature.layers.blocks if not block.solved]
            )
    messages = [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]
    return trajectory, unsolved, messages


@pytest.mark.parametrize("lost", [[(2, "A")], [(2, "G")], [(2, "A"), (2, "G"), (4, "A")]], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_layer_whose_factor_is_lost_starts_anew(
    world: World, world_size: int, lost: list[tuple[int, str]]
) -> None:
    """With a warning on every rank, and one step on its plain gradient; the others do not mind."""
    whole = world.run(consolidated, 2, 0, REDUCE)[0]
    data = written(without(whole, *lost))
    names = sorted({str(index) for index, _ in lost})
    options = {"kl_clip": None, "grad_worker_fraction": 1 / world_size, **REDUCE}
    results = world.run(resume_damaged, world_size, data, options)
    found = agreed([trajectory for trajectory, _, _ in results])
    expected = expected_after_loss(written(whole), names)
    assert_same_trajectory(found, expected)
    for _, unsolved, messages in results:
        assert unsolved == [names, [], [], []]
        assert len(messages) == len(names)
        for name, message in zip(names, messages, strict=True):
            assert f"a factor of layer {name!r} is lost" in message
            assert "without consolidate()" in message


def expected_after_loss(data: bytes, names: Sequence[str]) -> list[Tensor]:
    """By one process: SGD for those layers at first, then without their past."""
    saved = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = kaisa(model, kl_clip=None, skip_layers=names)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = follow(0, 1, model, optimizer, MLP, BATCHES[3:4])
    state = copy.deepcopy(optimizer.state_dict())  # close() clears what it shares
    for index in map(int, names):
        state["state"][index]["curvature"] = {"steps": 4}
    optimizer.close()
    optimizer = kaisa(model, kl_clip=None)
    optimizer.load_state_dict(state)
    return first + follow(0, 1, model, optimizer, MLP, BATCHES[4:])


@pytest.mark.parametrize(("statistics", "refreshes"), [(2, 3), (2, 1), (3, 1), (3, 2)])
def test_a_lost_layer_is_back_after_a_step_whatever_the_intervals(
    world: World, statistics: int, refreshes: int
) -> None:
    """Found out in step 3. Nobody says that it is never called."""
    data = written(without(world.run(consolidated, 2, 0, REDUCE)[0], (0, "G")))
    options = {"factor_update_steps": statistics, "inv_update_steps": refreshes, **REDUCE}
    results = world.run(resume_damaged, 2, data, options)
    agreed([trajectory for trajectory, _, _ in results])
    for _, unsolved, messages in results:
        assert unsolved == [["0"], [], [], []]
        (message,) = messages
        assert "a factor of layer '0' is lost" in message


def saved_at_once(rank: int, world_size: int, data: bytes) -> dict[str, Any]:
    model = MLP.model()
    optimizer = kaisa(model, **REDUCE)
    optimizer.load_state_dict(torch.load(io.BytesIO(data))["optimizer"])
    optimizer.consolidate(to=None)
    return {"optimizer": optimizer.state_dict()}


def test_a_lost_factor_is_missing_from_the_next_checkpoint_as_well(world: World) -> None:
    """And not a matrix of zeros there."""
    whole = world.run(consolidated, 2, 0, REDUCE)[0]
    data = written(without(whole, (0, "G"), (2, "A")))
    for saved in world.run(saved_at_once, 2, data):
        state = saved["optimizer"]["state"]
        found = {(i, w) for i in (0, 2, 4) for w in "AG" if w in state[i]["curvature"]}
        assert found == {(0, "A"), (2, "G"), (4, "A"), (4, "G")}
        for index, which in found:
            expected = whole["optimizer"]["state"][index]["curvature"][which]
            assert torch.equal(state[index]["curvature"][which], expected)


def saved_twice(
    rank: int, world_size: int, data: bytes, freeze: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Rank 0 saves, and saves again, while a layer has nothing; and another is frozen then."""
    saved = torch.load(io.BytesIO(data))
    model = MLP.model()
    optimizer = kaisa(model, factor_update_steps=2, **REDUCE)
    optimizer.load_state_dict(saved["optimizer"])
    trajectory = follow(rank, world_size, model, optimizer, MLP, BATCHES[3:4])
    factors: list[Tensor] = []
    for _ in range(1 if freeze else 2):
        optimizer.consolidate(to=0)
        if rank == 0:
            state = optimizer.state_dict()["state"]
            parts = [state[index]["curvature"] for index in (2, 4)]
            factors = [part[letter].clone() for part in parts for letter in "AG"]
    model.get_submodule("2").requires_grad_(not freeze)
    return trajectory + follow(rank, world_size, model, optimizer, MLP, BATCHES[4:]), factors


@pytest.mark.parametrize("freeze", [False, True])
def test_a_rank_that_saves_does_not_part_from_the_others(world: World, freeze: bool) -> None:
    whole = world.run(consolidated, 3, 0, REDUCE)[0]
    results = world.run(saved_twice, 3, written(without(whole, (0, "G"))), freeze, timeout=20)
    agreed([trajectory for trajectory, _ in results])
    kept_parts = [whole["optimizer"]["state"][index]["curvature"] for index in (2, 4)]
    expected = [part[letter] for part in kept_parts for letter in "AG"]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], expected, strict=True))


# Copies.


def train_copy(
    rank: int, world_size: int, how: str, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """A copy after two steps; both go on."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:2])
    if how == "deepcopy":
        twin, copied = copy.deepcopy((model, optimizer))
    else:
        twin, copied = pickle.loads(pickle.dumps((model, optimizer)))
    of_copy = follow(rank, world_size, twin, copied, MLP, BATCHES[2:])
    return of_copy, follow(rank, world_size, model, optimizer, MLP, BATCHES[2:])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("workers", [1, 4])
def test_copies_of_model_and_optimizer_go_on(world: World, how: str, workers: int) -> None:
    options = {"grad_worker_fraction": workers / 4, "momentum": 0.9, "inv_update_steps": 2}
    expected = train(0, 1, MLP, BATCHES, {"momentum": 0.9, "inv_update_steps": 2})[2:]
    results = world.run(train_copy, 4, how, {**options, **REDUCE})
    assert_same_trajectory(agreed([original for _, original in results]), expected)
    assert_same_trajectory(agreed([copied for copied, _ in results]), expected)


# Eigenvectors that are refined.


def train_counting(
    rank: int, world_size: int, options: dict[str, Any]
) -> tuple[list[Tensor], Counter[str]]:
    """The trajectory, and how many matrices were decomposed in which way from step 5 on."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    counts: Counter[str] = Counter()
    native = {"eigh": torch.linalg.eigh, "qr": torch.linalg.qr}

    def counting(name: str, matrix: Tensor) -> Any:
        counts[name] += len(matrix)
        return native[name](matrix)

    batch = MLP.batch(48)
    trajectory = follow(rank, world_size, model, optimizer, MLP, [batch] * 5)
    with replaced(torch.linalg, {name: partial(counting, name) for name in native}):
        trajectory += follow(rank, world_size, model, optimizer, MLP, [batch] * 15)
    return trajectory, counts


WARM: dict[str, Any] = {
    "eigen_refresh": "warm",
    "relative_damping": True,
    "damping": 1.0,
    "lr": 0.3,
    "kl_clip": 1e-3,
}


@pytest.mark.parametrize("exchange", ["all_reduce", "reduce"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_refined_eigenvectors_train_as_eigendecompositions_do(
    world: World, world_size: int, exchange: str
) -> None:
    """Close by, on all ranks bit for bit the same, and with few eigendecompositions."""
    options = {**WARM, "factor_exchange": exchange, "colocate_factors": False}
    results = world.run(train_counting, world_size, options)
    found = agreed([trajectory for trajectory, _ in results])
    full, full_counts = train_counting(0, 1, {**WARM, "eigen_refresh": "full"})
    moved = (full[-1] - full[0]).norm()
    assert moved > 0.1
    assert (found[-1] - full[-1]).norm() < 0.01 * moved
    assert not torch.equal(found[-1], full[-1])
    counts: Counter[str] = Counter()
    for _, each in results:
        counts += each
    assert full_counts == {"eigh": 15 * 6}
    assert counts["qr"] == 15 * 6, "three layers, two factors each"
    assert counts["eigh"] < 0.2 * counts["qr"]


def test_a_batch_of_another_kind_is_decomposed_anew() -> None:
    """Eigenvectors of the past are no guide to factors that have nothing to do with it."""
    model = MLP.model()
    optimizer = kaisa(model, factor_decay=0.0, **WARM)
    take(model, optimizer, MLP.batch(48))
    other = torch.randn(48, 5, dtype=torch.float64) @ torch.diag(torch.logspace(2, -2, 5)).double()
    calls: Counter[str] = Counter()
    native = torch.linalg.eigh

    def counting(matrix: Tensor) -> Any:
        calls["eigh"] += len(matrix)
        return native(matrix)

    twin, exact = copy.deepcopy((model, optimizer))
    exact._curvature.solves._options = copy.copy(exact._curvature.solves._options)
    object.__setattr__(exact._curvature.solves._options, "eigen_refresh", "full")
    batch = (other, torch.zeros(48, dtype=torch.int64))
    with replaced(torch.linalg, {"eigh": counting}):
        take(model, optimizer, batch)
    assert calls["eigh"] > 0
    take(twin, exact, batch)
    assert_same_trajectory([vector(model)], [vector(twin)], rtol=0.01)


def test_a_checkpoint_has_no_eigenvectors_to_start_from() -> None:
    model = MLP.model()
    optimizer = kaisa(model, **WARM)
    follow(0, 1, model, optimizer, MLP, BATCHES[:2])
    saved = written({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert_same_trajectory(
        resume(0, 1, saved, {**WARM, "inv_update_steps": 100}, steps=2),
        resume(0, 1, saved, {**WARM, "eigen_refresh": "full", "inv_update_steps": 100}, steps=2),
        rtol=0,
    )
