"""KAISA on many processes: the same trajectory however the work is placed, and wherever it resumes.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract import factors, take
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO, Case
from ranks import (
    OPTIONS,
    agreed,
    assert_same_trajectory,
    by_reference,
    counted,
    follow,
    kaisa,
    replaced,
    shard,
    train,
    train_each,
    vector,
)
from reference import ReferenceKFAC, cross_entropy, empirical_factors, weighted_mean
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import second_order
from second_order import RankMismatchError, SecondOrderWarning
from second_order.distributed.assignment import AssignmentCost, Grid, LayerDims, assign_layers
from second_order.kfac import solves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conftest import Launcher
    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP, CONV = ZOO["mlp"], ZOO["conv_grouped"]
BATCHES = MLP.batches(4, n=12)
ADAM = {"base": torch.optim.Adam, "lr": 0.01}
HALVES = {"grad_worker_fraction": 0.5}


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def every_third(step: int) -> int:
    return 3


def growing(step: int) -> int:
    return 1 + step // 2


def falling(step: int) -> float:
    return 0.3 * 0.5**step


def later_more(step: int) -> float:
    return 0.5 + 0.1 * min(step, 4)


# The same trajectory: invariant 21.

# Every two values together; all three at once are drawn for any network below.
PAIRED = [
    ("compute", True, True),
    ("compute", False, False),
    ("memory", True, False),
    ("memory", False, True),
]


def test_one_process_is_the_reference() -> None:
    """What the tests below compare with is K-FAC itself, every solve dense."""
    reference = ReferenceKFAC(MLP.model(), lr=0.05, damping=0.1, kl_clip=OPTIONS["kl_clip"])
    expected = reference.trajectory(BATCHES)
    assert_same_trajectory(train(0, 1, MLP, BATCHES), expected)
    assert_same_trajectory(by_reference(MLP, BATCHES, {}), expected)


def test_the_clip_of_the_tests_is_active_at_some_steps_and_not_at_others() -> None:
    """Always active, it would hide a common scale of all gradients, such as 1 / (N − 1)."""
    model, clipped = MLP.model(), []
    optimizer = kaisa(model)
    for batch in BATCHES:
        twin = copy.deepcopy((model, optimizer))
        clip = twin[1]._curvature.gradients._clip
        clip._options = dataclasses.replace(clip._options, kl_clip=None)
        for one, its in ((model, optimizer), twin):
            take(one, its, batch)
        clipped.append(not torch.allclose(vector(model), vector(twin[0]), rtol=1e-9))
    assert set(clipped) == {True, False}


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize(
    ("world_size", "workers"), [(P, n) for P in (2, 3, 4) for n in divisors(P)]
)
def test_every_placement_gives_the_trajectory_of_one_process(
    world: World, world_size: int, workers: int, solver: str
) -> None:
    """Batch B/P on P ranks is batch B on one, whoever solves, preconditions and sends what."""
    batches = CONV.batches(2, n=12)
    expected = train(0, 1, CONV, batches, {"solver": solver})
    choices = [
        {
            "solver": solver,
            "grad_worker_fraction": workers / world_size,
            "assignment": cost,
            "colocate_factors": colocate,
            "symmetry_aware": triangular,
        }
        for cost, colocate, triangular in PAIRED
    ]
    results = world.run(train_each, world_size, CONV, batches, choices)
    for choice, parallel in zip(choices, zip(*results, strict=True), strict=True):
        assert_same_trajectory(agreed(parallel), expected, hint=choice)


VARIATIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": ADAM,
    "no clip": {"kl_clip": None},
    "clip as callable": {"kl_clip": falling},
    "intervals": {"factor_update_steps": 2, "inv_update_steps": 3},
    "intervals as callables": {"factor_update_steps": growing, "inv_update_steps": every_third},
    "damping as callable": {"damping": falling},
    "decay as callable": {"factor_decay": later_more},
    "relative damping": {"relative_damping": True},
    "refresh warm-up": {"inv_update_steps": 3, "refresh_warmup_steps": 2},
    "some layers": {"skip_layers": ["2"]},
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", VARIATIONS.values(), ids=VARIATIONS)
def test_every_option_gives_the_trajectory_of_one_process(
    world: World, options: dict[str, Any], workers: int
) -> None:
    batches = MLP.batches(7, n=8)
    expected = by_reference(MLP, batches, options)
    differ = not torch.allclose(expected[-1], by_reference(MLP, batches, {})[-1], rtol=1e-6)
    assert differ, "the option does nothing"
    parallel = world.run(train, 4, MLP, batches, {**options, "grad_worker_fraction": workers / 4})
    assert_same_trajectory(agreed(parallel), expected)


@pytest.mark.parametrize(
    "name",
    [
        "shared_linear",
        "sequence_mlp",
        "conv1d",
        "conv3d",
        "norms",
        "lora",
        "transformer",
        "embedding",
        "language_model",
    ],
)
def test_every_kind_of_layer_gives_the_trajectory_of_one_process(world: World, name: str) -> None:
    case = ZOO[name]
    batches = case.batches(3, n=8)
    approx = {"kfac_approx": case.shared} if case.shared else {}
    parallel = world.run(train, 4, case, batches, {**HALVES, **approx})
    assert_same_trajectory(agreed(parallel), train(0, 1, case, batches, approx))


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def mixed() -> nn.Module:
    """The zoo's models are cast after they are built; this one's first layer casts itself back."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), Cast(), nn.Linear(7, 3).double())


def train_mixed(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = mixed()
    optimizer = kaisa(model, **options)
    trajectory = []
    for x, y in MLP.batches(3, n=8, dtype=torch.float32):
        take(model, optimizer, shard((x, y), rank, world_size))
        trajectory.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    return trajectory


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_layers_of_different_dtypes(world: World, workers: int) -> None:
    parallel = world.run(train_mixed, 4, {"grad_worker_fraction": workers / 4})
    assert_same_trajectory(agreed(parallel), train_mixed(0, 1, {}), rtol=1e-5)


def train_thawing(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    """Frozen for steps 2 and 3: a weight with its bias, and the bias of another layer."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    trajectory = []
    for step, batch in enumerate(MLP.batches(6, n=8)):
        for name in ("0.weight", "0.bias", "4.bias"):
            model.get_parameter(name).requires_grad_(step not in (2, 3))
        trajectory += follow(rank, world_size, model, optimizer, MLP, [batch])
    return trajectory


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_layers_frozen_and_thawed(world: World, workers: int) -> None:
    parallel = world.run(train_thawing, 4, {"grad_worker_fraction": workers / 4})
    assert_same_trajectory(agreed(parallel), train_thawing(0, 1, {}))


def narrow_mlp(widths: Sequence[int]) -> nn.Module:
    layers = [
        part
        for d_in, d_out in itertools.pairwise([5, *widths, 3])
        for part in (nn.Linear(d_in, d_out), nn.Tanh())
    ]
    return nn.Sequential(*layers[:-1])


def train_widths(rank: int, world_size: int, widths: Sequence[int], *rest: Any) -> list[Tensor]:
    return train(rank, world_size, Case("mlp", lambda: narrow_mlp(widths), (5,)), *rest)


@settings(max_examples=30)
@given(data=st.data(), world_size=st.integers(2, 4), per_rank=st.integers(1, 3))
def test_any_network_on_any_grid_gives_the_trajectory_of_one_process(
    world: World, data: st.DataObject, world_size: int, per_rank: int
) -> None:
    """Fewer layers than ranks, too: some have nothing to solve, some nothing to send."""
    widths = data.draw(st.lists(st.integers(1, 6), max_size=5), "widths")
    options = {
        "grad_worker_fraction": data.draw(st.sampled_from(divisors(world_size))) / world_size,
        "assignment": data.draw(st.sampled_from(["compute", "memory"])),
        "colocate_factors": data.draw(st.booleans()),
        "symmetry_aware": data.draw(st.booleans()),
        "solver": data.draw(st.sampled_from(["eigen", "inverse"])),
        "damping": data.draw(st.floats(1e-2, 10.0)),
        "inv_update_steps": data.draw(st.integers(1, 3)),
    }
    batches = MLP.batches(3, n=world_size * per_rank)
    parallel = world.run(train_widths, world_size, widths, batches, options)
    assert_same_trajectory(agreed(parallel), train_widths(0, 1, widths, batches, options))


def accumulate(
    rank: int, world_size: int, batches: Sequence[Batch], micro: int, options: dict[str, Any]
) -> list[Tensor]:
    model = MLP.model()
    optimizer = kaisa(model, accumulation_steps=micro, **options)
    trajectory = []
    for batch in batches:
        optimizer.zero_grad()
        mine = shard(batch, rank, world_size)
        for i in range(micro):
            x, y = shard(mine, i, micro)
            (cross_entropy(model(x), y) / micro).backward()
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


def test_micro_batches_on_many_processes_are_one_batch(world: World) -> None:
    parallel = world.run(accumulate, 2, BATCHES, 3, HALVES)
    assert_same_trajectory(agreed(parallel), train(0, 1, MLP, BATCHES))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_low_precision_keeps_the_ranks_together(world: World, solver: str, workers: int) -> None:
    """bfloat16 has three digits: near the exact trajectory, and still equal on all ranks."""
    bf16 = {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16, "solver": solver}
    parallel = world.run(train, 4, MLP, BATCHES, {**bf16, "grad_worker_fraction": workers / 4})
    exact = train(0, 1, MLP, BATCHES, {"solver": solver})
    trajectory = agreed(parallel)
    assert_same_trajectory(trajectory, exact, rtol=0.03)
    assert not torch.equal(trajectory[-1], exact[-1])


def widest_dtypes(rank: int, world_size: int, dtype: torch.dtype) -> list[set[torch.dtype]]:
    model = MLP.model(torch.float32)
    optimizer = kaisa(model, factor_dtype=dtype, inv_dtype=dtype, **HALVES)
    take(model, optimizer, shard(MLP.batch(8, torch.float32), rank, world_size))
    kept = [
        {part.dtype for part in vars(block.inverse).values()}
        for block in optimizer._curvature.layers.blocks
        if block.inverse is not None
    ]
    state = optimizer.state_dict()["state"]
    kept += [{part["curvature"]["A"].dtype} for part in state.values() if "A" in part["curvature"]]
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_factors_and_inverses_are_kept_in_the_dtype_asked_for(
    world: World, dtype: torch.dtype
) -> None:
    for kept in world.run(widest_dtypes, 2, dtype):
        assert len(kept) > 3
        assert set.union(*kept) == {dtype}


# Unequal shards: invariant 10.


def factors_of_shards(
    rank: int, world_size: int, batch: Batch, counts: Sequence[int]
) -> tuple[Any, Tensor]:
    x, y = (part.split(list(counts))[rank] for part in batch)
    model = MLP.model()
    optimizer = kaisa(model, **HALVES)
    take(model, optimizer, (x, y))
    return factors(optimizer), vector(model)


def test_unequal_shards_are_weighted_by_their_examples(world: World) -> None:
    counts = [1, 2, 6, 3]
    batch = MLP.batch(sum(counts))
    results = world.run(factors_of_shards, 4, batch, counts)
    assert all(torch.equal(parameters, results[0][1]) for _, parameters in results)
    shards = list(zip(*(part.split(counts) for part in batch), strict=True))
    for layer in ("0", "2", "4"):
        whole = empirical_factors(MLP.model(), *batch, cross_entropy, layer)
        each = [empirical_factors(MLP.model(), x, y, cross_entropy, layer) for x, y in shards]
        for i, full in enumerate(whole):
            torch.testing.assert_close(weighted_mean([f[i] for f in each], counts), full)
            for averages, _ in results:
                torch.testing.assert_close(averages[layer][i], full, rtol=1e-10, atol=1e-12)
            plain = torch.stack([f[i] for f in each]).mean(0)
            assert (plain - full).norm() > 0.03 * full.norm(), "the weights make no difference"


# Gradients: averaged by whom.


def train_wrapped(
    rank: int, world_size: int, as_view: bool, given: str, options: dict[str, Any]
) -> tuple[list[Tensor], bool]:
    model = MLP.model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    if given == "the model":
        optimizer = kaisa(wrapped, **options)
    else:
        optimizer = kaisa(wrapped.parameters(), model=wrapped, **options)
    trajectory = []
    for batch in BATCHES:
        take(wrapped, optimizer, shard(batch, rank, world_size))
        trajectory.append(vector(model))
    names = {row.name for row in optimizer.summary().rows}
    return trajectory, names == {"0", "2", "4"}


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("given", ["the model", "the parameters"])
@pytest.mark.parametrize("averaging", ["auto", True, False])
def test_ddp_is_looked_through_and_changes_nothing(
    world: World, as_view: bool, given: str, averaging: Any
) -> None:
    """An average of equal gradients is that gradient, so that True does no harm."""
    options = {**HALVES, "momentum": 0.9, "gradient_averaging": averaging}
    results = world.run(train_wrapped, 2, as_view, given, options)
    assert all(named for _, named in results)
    expected = train(0, 1, MLP, BATCHES, {"momentum": 0.9})
    assert_same_trajectory(agreed([trajectory for trajectory, _ in results]), expected)


@pytest.mark.parametrize("as_view", [True, False])
def test_ddp_and_sampled_labels(world: World, as_view: bool) -> None:
    """The sampled loss has gradients of its own, of which DDP must not hear."""
    options = {"fisher": "sampled", "inv_update_steps": 2}
    results = world.run(train_wrapped, 2, as_view, "the model", options)
    expected = agreed(world.run(train, 2, MLP, BATCHES, options))
    assert_same_trajectory(agreed([trajectory for trajectory, _ in results]), expected)


def collectives_under_ddp(rank: int, world_size: int) -> int:
    """DDP's own are not called by name."""
    model = DistributedDataParallel(MLP.model())
    optimizer = kaisa(model, inv_update_steps=2, factor_update_steps=2)
    take(model, optimizer, shard(BATCHES[0], rank, world_size))
    with counted() as counts:
        take(model, optimizer, shard(BATCHES[1], rank, world_size))
    return counts.total()


def test_ddp_leaves_nothing_to_average(world: World) -> None:
    """But for the word that ranks compare."""
    assert world.run(collectives_under_ddp, 2) == [1, 1]


def train_by_hand(rank: int, world_size: int, average: bool) -> list[Tensor]:
    model = MLP.model()
    optimizer = kaisa(model, gradient_averaging=False)
    trajectory = []
    for batch in BATCHES:
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        for p in model.parameters() if average else ():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world_size
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


def test_gradients_can_be_averaged_by_the_user(world: World) -> None:
    parallel = world.run(train_by_hand, 2, average=True)
    assert_same_trajectory(agreed(parallel), train(0, 1, MLP, BATCHES))


def test_gradients_that_nobody_averages_stay_apart(world: World) -> None:
    first, second = world.run(train_by_hand, 2, average=False)
    assert not torch.equal(first[0], second[0])


def starts(rank: int, world_size: int, averaging: Any) -> list[Tensor]:
    model = ZOO["batch_norm"].model(seed=rank)
    model.get_buffer("1.running_mean").fill_(rank)
    kaisa(model, gradient_averaging=averaging)
    return [t.clone() for t in model.state_dict().values()]


def test_all_ranks_start_from_the_first_ones_parameters_and_buffers(world: World) -> None:
    results = world.run(starts, 3, "auto")
    expected = ZOO["batch_norm"].model(seed=0).state_dict().values()
    for tensors in results:
        for tensor, first in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, first)


def test_without_averaging_parameters_are_the_users_business(world: World) -> None:
    first, second = world.run(starts, 2, False)
    assert not torch.equal(first[0], second[0])


# Layers that are not used.


class Forked(nn.Module):
    """A trunk, a branch that the input may skip, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.head(torch.tanh(self.branch(x)) if branch else x)


def train_forked(
    rank: int, world_size: int, uses: Sequence[set[int]], wrap: bool, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor | None, Any]]:
    """`uses`: for each step, the ranks that take the branch."""
    torch.manual_seed(0)
    model = Forked().double()
    called = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
    optimizer = kaisa(called, weight_decay=0.1, **options)
    records = []
    for batch, users in zip(BATCHES, uses, strict=False):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(called(x, rank in users), y).backward()
        optimizer.step()
        grad = model.branch.weight.grad
        records.append(
            (vector(model), None if grad is None else grad.clone(), factors(optimizer)["branch"])
        )
    return records


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "DDP"])
def test_a_layer_that_some_ranks_skip(world: World, workers: int, wrap: bool) -> None:
    """It takes part with what the others saw; skipped by all, it has no gradient and stays."""
    uses: list[set[int]] = [set(), {0, 1, 2, 3}, {1, 2}, set()]
    options = {"grad_worker_fraction": workers / 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        results = world.run(train_forked, 4, uses, wrap, options)
    for step in range(4):
        agreed([[rank[step][0]] for rank in results])
    start = vector(Forked().double()).numel()
    assert all(len(rank[0][0]) == start for rank in results)
    for rank in results:
        gradients = [gradient for _, gradient, _ in rank]
        assert gradients[0] is None
        assert gradients[1] is not None
        assert gradients[2] is not None
        if not wrap:  # DDP leaves what zero_grad left, or a zero
            assert gradients[3] is None
        averages = [average for _, _, average in rank]
        assert torch.equal(averages[0][0], torch.zeros_like(averages[0][0]))
        assert torch.equal(averages[3][0], averages[2][0]), "nobody saw it in the last step"
    branch = slice(36, 36 + 42)  # the trunk has 5 x 6 + 6
    for rank in results:
        before, after = rank[2][0][branch], rank[3][0][branch]
        if not wrap:
            assert torch.equal(before, after)


class Dead(Forked):
    """Whose branch is off for every input."""

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.head(x + torch.relu(self.branch(x) - 1e3) if branch else x)


def train_dead(rank: int, world_size: int, user: int, colocate: bool) -> tuple[Any, list[str]]:
    """One rank alone calls the branch."""
    torch.manual_seed(0)
    model = Dead().double()
    optimizer = kaisa(model, colocate_factors=colocate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in BATCHES[:2]:
            x, y = shard(batch, rank, world_size)
            optimizer.zero_grad()
            cross_entropy(model(x, rank == user), y).backward()
            optimizer.step()
    plan = {b.name: each.solvers for b, each in optimizer._curvature.plan.items()}
    return plan["branch"], [str(w.message) for w in caught]


@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize("user", [0, 1])
def test_a_dead_layer_that_one_rank_alone_calls_is_not_called_unused(
    world: World, user: int, colocate: bool
) -> None:
    """One rank decomposes its factors, or each of two does one, and one of them sees it called."""
    for solvers, warned in world.run(train_dead, 2, user, colocate):
        assert len(set(solvers)) == (1 if colocate else 2)
        assert warned == []


def forked_statistics(rank: int, world_size: int) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = Forked().double()
    optimizer = kaisa(model, kl_clip=None, damping=1e12, lr=1e12, **HALVES)
    before = vector(model)
    x, y = shard(BATCHES[0], rank, world_size)
    cross_entropy(model(x, rank != 0), y).backward()
    optimizer.step()
    return factors(optimizer)["branch"], before - vector(model)


def test_what_a_rank_skips_is_averaged_over_the_others(world: World) -> None:
    """Statistics over those who have some; gradients over all, where skipping counts zero."""
    results = world.run(forked_statistics, 4)
    torch.manual_seed(0)
    model = Forked().double()
    gradient = torch.zeros(36 + 42 + 21, dtype=torch.float64)
    sums = [torch.zeros(1, 7, 7, dtype=torch.float64), torch.zeros(1, 6, 6, dtype=torch.float64)]
    for rank in range(4):
        x, y = shard(BATCHES[0], rank, 4)
        model.zero_grad()
        cross_entropy(model(x, rank != 0), y).backward()
        gradient += (
            torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                    for p in model.parameters()
                ]
            )
            / 4
        )
        if rank != 0:
            upper = nn.Sequential(model.trunk, nn.Tanh(), model.branch, nn.Tanh(), model.head)
            found = empirical_factors(upper, x, y, cross_entropy, "2")
            sums = [total + part / 3 for total, part in zip(sums, found, strict=True)]
    for averages, step in results:
        torch.testing.assert_close(averages[0], sums[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(averages[1], sums[1], rtol=1e-10, atol=1e-12)
        # With a huge damping, and a learning rate as huge, the step is the gradient.
        torch.testing.assert_close(step, gradient, rtol=1e-6, atol=1e-6)


def train_idle(rank: int, world_size: int, idle: int, options: dict[str, Any]) -> list[Tensor]:
    """From step 1 on, one rank has no data, and takes its steps all the same."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    trajectory = []
    for step, batch in enumerate(BATCHES):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        if rank != idle or step == 0:
            # Two of three ranks: the mean over three is to be the mean over the two.
            (cross_entropy(model(x), y) * (1.0 if step == 0 else 1.5)).backward()
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


@pytest.mark.parametrize("idle", [0, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_rank_without_data_takes_part(world: World, idle: int, workers: int) -> None:
    options = {"grad_worker_fraction": workers / 3, "factor_update_steps": 10}
    first, *rest = BATCHES
    others = [
        tuple(torch.cat([part[: 4 * idle], part[4 * idle + 4 :]]) for part in batch)
        for batch in rest
    ]
    expected = train(0, 1, MLP, [first, *others], {"factor_update_steps": 10})
    assert_same_trajectory(agreed(world.run(train_idle, 3, idle, options)), expected)


def train_unused(rank: int, world_size: int) -> tuple[bool, bool, int]:
    case = ZOO["unused"]
    model = case.model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = kaisa(model, weight_decay=0.1, **HALVES)
        before = model.get_parameter("unused.weight").clone()
        for batch in case.batches(3, n=8):
            take(model, optimizer, shard(batch, rank, world_size))
    named = [w for w in caught if "'unused'" in str(w.message)]
    after = model.get_parameter("unused.weight")
    return after.grad is None, torch.equal(before, after), len(named)


def test_a_gradient_that_is_none_everywhere_stays_none(world: World) -> None:
    """As it would for the base alone: no weight decay either. It is named once a rank."""
    assert world.run(train_unused, 4) == [(True, True, 1)] * 4


def train_without_layers(rank: int, world_size: int, how: str) -> list[Tensor]:
    model = MLP.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = kaisa(model, skip_layers=["*"] if how == "skipped" else (), **HALVES)
    if how == "closed":
        optimizer.close()
    return follow(rank, world_size, model, optimizer, MLP, BATCHES)


@pytest.mark.parametrize("how", ["skipped", "closed"])
def test_with_nothing_to_precondition_it_is_the_base(world: World, how: str) -> None:
    model = MLP.model()
    base = torch.optim.SGD(model.parameters(), lr=OPTIONS["lr"])
    expected = follow(0, 1, model, base, MLP, BATCHES)
    assert_same_trajectory(agreed(world.run(train_without_layers, 4, how)), expected, rtol=1e-12)


# Ranks that differ.


def build(rank: int, world_size: int, variant: str) -> None:
    """Rank 1 builds something else."""
    odd = rank == 1
    options: dict[str, Any] = {}
    params: Any = None
    model: nn.Module = narrow_mlp([4, 5]).double()
    if variant == "norm":  # the same parameters, other buffers
        model.append(nn.BatchNorm1d(3) if odd else nn.GroupNorm(1, 3))
    elif odd:
        if variant == "width":
            model = narrow_mlp([4, 6]).double()
        elif variant == "depth":
            model = narrow_mlp([4, 5, 4]).double()
        elif variant == "dtype":
            model.get_submodule("4").float()
        elif variant == "frozen":
            model.get_parameter("2.weight").requires_grad_(False)
        elif variant == "parameters":
            params = list(model.parameters())[2:]
        elif variant == "DDP":
            # DDP's own construction is a collective, which is none of ours.
            stand_in = DistributedDataParallel.__new__(DistributedDataParallel)
            nn.Module.__init__(stand_in)
            stand_in.module = model
            model = stand_in
        else:
            options = {
                "damping": {"damping": 0.2},
                "damping callable": {"damping": falling},
                "solver": {"solver": "inverse"},
                "fraction": {"grad_worker_fraction": 0.5},
                "colocation": {"colocate_factors": False},
                "assignment": {"assignment": "memory"},
                "exchange": {"factor_exchange": "reduce"},
                "refresh": {"eigen_refresh": "warm"},
                "interval": {"inv_update_steps": 2},
                "clip": {"kl_clip": None},
                "base": {"base": torch.optim.Adam},
                "averaging": {"gradient_averaging": False},
                "skip": {"skip_layers": ["2"]},
                "dtypes": {"inv_dtype": torch.float32},
                "triangles": {"symmetry_aware": False},
                "sampled": {"fisher": "sampled"},
                "lr": {"lr": 0.1},
                "momentum": {"momentum": 0.9},
            }[variant]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = (
            kaisa(model, **options) if params is None else kaisa(params, model=model, **options)
        )
    # A difference that passes unnoticed must show as one, not as a hang of the test.
    dist.barrier()
    raise AssertionError(f"rank {rank} built {optimizer}")


DIFFERENCES = {
    "width": r"rank 0 has \[2\.weight: \(5, 4\).*rank 1 has \[2\.weight: \(6, 4\)",
    "depth": r"rank 0 has \[4\.weight: \(3, 5\).*rank 1 has \[4\.weight: \(4, 5\)",
    "dtype": r"rank 0 has \[4\.weight.*float64.*rank 1 has \[4\.weight.*float32",
    "frozen": r"rank 0 has \[2\.weight.*=True\].*rank 1 has \[2\.weight.*=False\]",
    "parameters": r"rank 1 has",
    "DDP": r"rank 1 has",
    "damping": r"'damping': 0\.1.*'damping': 0\.2",
    "damping callable": r"'damping': 0\.1.*rank 1 has",
    "solver": r"'solver': 'eigen'.*'solver': 'inverse'",
    "fraction": r"rank 0 has .*1\.0.*rank 1 has .*0\.5",
    "colocation": r"rank 0 has .*True.*rank 1 has .*False",
    "assignment": r"rank 0 has .*compute.*rank 1 has .*memory",
    "exchange": r"rank 0 has .*all_reduce.*rank 1 has .* reduce",
    "refresh": r"'eigen_refresh': 'full'.*'eigen_refresh': 'warm'",
    "interval": r"'inv_update_steps': 1.*'inv_update_steps': 2",
    "clip": r"'kl_clip': 0\.0025.*'kl_clip': None",
    "base": r"rank 0 has \[.*(SGD|momentum).*rank 1 has \[.*(Adam|betas)",
    "averaging": r"rank 1 has",
    "skip": r"'skip_layers': \(\).*'skip_layers': \('2',\)",
    "dtypes": r"'inv_dtype': torch\.float64.*'inv_dtype': torch\.float32",
    "triangles": r"'symmetry_aware': True.*'symmetry_aware': False",
    "sampled": r"'fisher': 'empirical'.*'fisher': 'sampled'",
    "lr": r"rank 0 has .*0\.05.*rank 1 has .*0\.1",
    "momentum": r"rank 0 has .*momentum.*rank 1 has .*momentum",
    "norm": r"rank 0 has .*rank 1 has",
}


@pytest.mark.parametrize("variant", DIFFERENCES)
def test_ranks_that_differ_are_told_at_construction(world: World, variant: str) -> None:
    """Every rank, naming the first difference, and no rank waits for another."""
    errors = world.run(build, 3, variant, expect_errors=True, timeout=20)
    for error in errors:
        assert isinstance(error, RankMismatchError), error
        assert re.search(DIFFERENCES[variant], str(error)), error


# Groups of processes.


def train_in_groups(
    rank: int, world_size: int, members: Sequence[Sequence[int]], options: dict[str, Any]
) -> list[Tensor] | None:
    """Each group on its own, all at the same time; the data differ by group."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    for index, ranks in enumerate(members):
        if rank in ranks:
            case = [MLP, CONV][index]
            model = case.model()
            optimizer = kaisa(model, process_group=groups[index], **options)
            position = list(ranks).index(rank)
            batches = case.batches(3, n=12)
            return follow(position, len(ranks), model, optimizer, case, batches)
    return None


@pytest.mark.parametrize(
    "members", [[[1, 3]], [[1, 2, 3]], [[0, 2], [1, 3]], [[2, 3], [0, 1]]], ids=str
)
@pytest.mark.parametrize("alone", [False, True], ids=["comm-opt", "mem-opt"])
def test_a_group_trains_by_itself(world: World, members: list[list[int]], alone: bool) -> None:
    fraction = 0.0 if alone else 1.0
    results = world.run(train_in_groups, 4, members, {"grad_worker_fraction": fraction})
    for case, ranks in zip((MLP, CONV), members, strict=False):
        expected = train(0, 1, case, case.batches(3, n=12))
        assert_same_trajectory(agreed([results[rank] for rank in ranks]), expected)
    outside = set(range(4)) - set(itertools.chain(*members))
    assert all(results[rank] is None for rank in outside)


def groups_made(rank: int, world_size: int, workers: int) -> list[int]:
    """At construction, by three steps, and by layers frozen and a group added."""
    model = narrow_mlp([4] * 11).double()
    counts = []
    with counted("new_group") as made:
        first = [p for name, p in model.named_parameters() if not name.startswith("22")]
        optimizer = kaisa(first, model=model, grad_worker_fraction=workers / world_size)
        counts.append(made["new_group"])
        for batch in BATCHES[:3]:
            take(model, optimizer, shard(batch, rank, world_size))
        counts.append(made["new_group"])
        model.get_parameter("4.weight").requires_grad_(False)
        take(model, optimizer, shard(BATCHES[0], rank, world_size))
        optimizer.add_param_group({"params": list(model.get_submodule("22").parameters())})
        take(model, optimizer, shard(BATCHES[0], rank, world_size))
        counts.append(made["new_group"])
    return counts


@pytest.mark.parametrize(("workers", "groups"), [(1, 1), (2, 3), (4, 1)])
def test_no_group_a_layer(world: World, workers: int, groups: int) -> None:
    """One for words, a row and a column, once; no row or column where it is everybody."""
    assert world.run(groups_made, 4, workers) == [[groups] * 3] * 4


# How many collectives.


def collectives_of_steps(
    rank: int, world_size: int, layers: int, workers: int, options: dict[str, Any]
) -> list[int]:
    """Of a step that refreshes all, one that takes statistics, and one that does neither."""
    model = narrow_mlp([4] * (layers - 1)).float()
    options = {
        "factor_dtype": torch.float32,
        "inv_dtype": torch.float32,
        "factor_update_steps": 2,
        "inv_update_steps": 4,
        "grad_worker_fraction": workers / world_size,
        **options,
    }
    optimizer = kaisa(model, **options)
    each = []
    for step, (x, y) in enumerate(MLP.batches(6, n=8, dtype=torch.float32)):
        with counted() as counts:
            take(model, optimizer, shard((x, y), rank, world_size))
        if step in (4, 2, 1):
            each.append(counts.total())
    refresh, (statistics, neither) = each[2], (each[1], each[0])
    return [refresh, statistics, neither]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("exchange", ["all_reduce", "reduce"])
def test_a_handful_of_collectives_however_many_layers(
    world: World, workers: int, solver: str, exchange: str
) -> None:
    """A word; gradients; statistics; which solves failed, and the solves; to receivers."""
    options = {"solver": solver, "factor_exchange": exchange}
    few = world.run(collectives_of_steps, 4, 3, workers, options)
    many = world.run(collectives_of_steps, 4, 12, workers, options)
    assert few == many == [few[0]] * 4
    row, column = int(workers > 1), int(workers < 4)
    refresh, statistics, neither = few[0]
    assert neither == 2 + column
    assert statistics == 3 + column
    assert refresh == 4 + row + column
    assert refresh <= 6


# What each rank keeps.


def kept(rank: int, world_size: int, workers: int) -> tuple[int, int, list[str], int]:
    """Bytes of factors and inverses, who computes what, and bytes really held by inverses."""
    model = narrow_mlp([40, 3, 3, 3]).double()
    optimizer = kaisa(model, grad_worker_fraction=workers / world_size)
    take(model, optimizer, shard(BATCHES[0], rank, world_size))
    summary = optimizer.summary()
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for block in optimizer._curvature.layers.blocks
        if block.inverse is not None
        for part in vars(block.inverse).values()
    }
    lines = [row.computed_by for row in summary.rows]
    return summary.factor_bytes, summary.inverse_bytes, lines, sum(storages.values())


def test_a_smaller_fraction_keeps_fewer_inverses(world: World) -> None:
    """Every layer's inverse is on fP ranks, and nothing else of it anywhere."""
    alone = kept(0, 1, 1)
    for workers in (1, 2, 4):
        results = world.run(kept, 4, workers)
        assert sum(inverse for _, inverse, _, _ in results) == workers * alone[1]
        assert all(factor == alone[0] for factor, _, _, _ in results)
        assert all(lines == results[0][2] for _, _, lines, _ in results)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_an_inverse_holds_no_more_memory_than_it_says(world: World, workers: int) -> None:
    """No message of all ranks, padded to the longest, stays alive behind a small part of it."""
    for _, inverse, _, held in world.run(kept, 4, workers):
        assert held <= 1.1 * inverse


def placed_as(rank: int, world_size: int, choices: Sequence[dict[str, Any]]) -> list[Any]:
    models = [
        nn.ModuleList([nn.Linear(9, 10), *(nn.Linear(4, 5) for _ in range(8))]) for _ in choices
    ]
    optimizers = [kaisa(model, **each) for model, each in zip(models, choices, strict=True)]
    return [[layer.solvers for layer in each._curvature.plan.values()] for each in optimizers]


def test_layers_are_placed_as_asked_for(world: World) -> None:
    dims = [LayerDims(1, 10, 10), *[LayerDims(1, 5, 5)] * 8]
    pairs: list[tuple[AssignmentCost, bool]] = [
        (cost, both) for cost in ("compute", "memory") for both in (True, False)
    ]
    choices = [{"assignment": cost, "colocate_factors": both} for cost, both in pairs]
    expected = [
        [
            (each.a_solver, each.g_solver)
            for each in assign_layers(dims, Grid(1, 2), cost=cost, colocate_factors=both)
        ]
        for cost, both in pairs
    ]
    assert len(set(map(str, expected))) == 3, "apart, both costs come to the same"
    assert world.run(placed_as, 2, choices) == [expected] * 2


def placements(rank: int, world_size: int) -> list[str]:
    optimizer = kaisa(narrow_mlp([4, 4, 4]).double(), **HALVES)
    return [row.computed_by for row in optimizer.summary().rows]


def test_the_summary_says_who_computes_what(world: World) -> None:
    """n³ of the layers (5+1, 4), (4+1, 4) twice, and (4+1, 3): 280, 189, 189, 152."""
    assert (
        world.run(placements, 4)
        == [
            [
                "solve 0, precondition 0+1",
                "solve 2, precondition 2+3",
                "solve 3, precondition 2+3",
                "solve 1, precondition 0+1",
            ]
        ]
        * 4
    )


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
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_copies_of_model_and_optimizer_go_on(world: World, how: str, workers: int) -> None:
    options = {"grad_worker_fraction": workers / 4, "momentum": 0.9}
    expected = train(0, 1, MLP, BATCHES, {"momentum": 0.9})[2:]
    results = world.run(train_copy, 4, how, options)
    assert_same_trajectory(agreed([original for _, original in results]), expected)
    assert_same_trajectory(agreed([copied for copied, _ in results]), expected)


# Checkpoints: invariant 28.

SGD_MOMENTUM = {"lr": 0.05, "momentum": 0.9, "solver": "inverse"}
BASES = {"SGD": SGD_MOMENTUM, "Adam": {**ADAM, "solver": "eigen"}}
INTERVALS = {"inv_update_steps": 3, "factor_update_steps": 1}
LONG = MLP.batches(7, n=12)
BOUNDARY = 3  # where the inverses are refreshed anyhow


def placed(world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """The middle of the three regimes, where there is one."""
    return {**INTERVALS, **options, "grad_worker_fraction": 0.5 if world_size % 2 == 0 else 1.0}


def train_and_save(
    rank: int, world_size: int, options: dict[str, Any], steps: int = BOUNDARY
) -> bytes:
    model = MLP.model()
    optimizer = kaisa(model, **options)
    follow(rank, world_size, model, optimizer, MLP, LONG[:steps])
    buffer = io.BytesIO()
    with counted() as counts:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert not counts, "whoever asks for it alone would wait for the others"
    torch.save(saved, buffer)
    return buffer.getvalue()


def load_and_train(
    rank: int,
    world_size: int,
    data: bytes,
    options: dict[str, Any],
    steps: int = BOUNDARY,
    *,
    wasted: int = 0,
) -> list[Tensor]:
    """`wasted`: steps before the checkpoint is loaded, which it makes undone."""
    saved = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = kaisa(model, **options)
    follow(rank, world_size, model, optimizer, MLP, LONG[-1:] * wasted)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return follow(rank, world_size, model, optimizer, MLP, LONG[steps:])


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_checkpoint_continues_on_any_number_of_processes(
    world: World, base: str, before: int
) -> None:
    """Any rank's will do: rank 3's is rank 0's."""
    options = BASES[base]
    expected = train(0, 1, MLP, LONG, {**INTERVALS, **options})
    checkpoints = world.run(train_and_save, before, placed(before, options))
    for after in (1, 2, 4):
        parallel = world.run(load_and_train, after, checkpoints[-1], placed(after, options))
        assert_same_trajectory(agreed(parallel), expected[BOUNDARY:], hint=f"on {after}")


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_four_ranks_with_any_fraction_load_a_checkpoint_of_any_other(
    world: World, fraction: float
) -> None:
    """What the published K-FAC for PyTorch does not: at 0.5 it fails."""
    expected = train(0, 1, MLP, LONG, INTERVALS)[BOUNDARY:]
    options = {**INTERVALS, "grad_worker_fraction": fraction}
    data = world.run(train_and_save, 4, {**INTERVALS, "grad_worker_fraction": 0.5})[0]
    assert_same_trajectory(agreed(world.run(load_and_train, 4, data, options)), expected)


def test_between_refreshes_a_checkpoint_continues_alike_on_any_number(world: World) -> None:
    """Inverses are computed anew then: another trajectory, but the same one everywhere."""
    data = world.run(train_and_save, 2, placed(2, {}), 4)[0]
    expected = by_reference(MLP, LONG, INTERVALS, refresh_at=4)[4:]
    for after in (1, 2, 3, 4):
        for wasted in (0, 2):
            parallel = world.run(load_and_train, after, data, placed(after, {}), 4, wasted=wasted)
            assert_same_trajectory(agreed(parallel), expected, hint=f"on {after}")


@pytest.mark.parametrize("triangular", [True, False])
def test_triangles_and_squares_read_each_others_checkpoints(world: World, triangular: bool) -> None:
    expected = train(0, 1, MLP, LONG, INTERVALS)[BOUNDARY:]
    data = world.run(train_and_save, 2, {**INTERVALS, "symmetry_aware": triangular})[0]
    options = {**INTERVALS, "symmetry_aware": not triangular}
    assert_same_trajectory(agreed(world.run(load_and_train, 2, data, options)), expected)


def test_a_checkpoint_into_a_group(world: World) -> None:
    """Loading needs no collective either: two ranks of four load, the others know nothing."""
    expected = train(0, 1, MLP, LONG, INTERVALS)[BOUNDARY:]
    data = world.run(train_and_save, 4, {**INTERVALS, **HALVES})[1]
    results = world.run(load_in_group, 4, data, INTERVALS)
    assert_same_trajectory(agreed([results[1], results[2]]), expected)


def load_in_group(rank: int, world_size: int, data: bytes, options: dict[str, Any]) -> Any:
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        return None
    return load_and_train(rank - 1, 2, data, {**options, "process_group": group})


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sampled_labels_are_drawn_as_if_nothing_had_happened(world: World, world_size: int) -> None:
    """They depend on step and rank alone, so that a resumed run draws the same ones."""
    sampled = {"fisher": "sampled", "factor_update_steps": 1, "inv_update_steps": 3}
    whole = agreed(world.run(train, world_size, MLP, LONG, sampled))
    data = world.run(train_and_save, world_size, sampled)[0]
    torch.manual_seed(123)
    resumed = agreed(world.run(load_and_train, world_size, data, sampled))
    assert_same_trajectory(resumed, whole[BOUNDARY:])
    empirical = train(0, 1, MLP, LONG, {"inv_update_steps": 3})
    assert not torch.allclose(whole[-1], empirical[-1])


def labels_by_rank(rank: int, world_size: int) -> Any:
    """The same example on every rank; only the drawn labels differ."""
    model = MLP.model()
    optimizer = kaisa(model, fisher="sampled")
    staged = []
    for _ in range(6):
        model(MLP.batch(1)[0]).sum().backward()
        block = optimizer._curvature.layers.blocks[-1]
        staged.append(block.staged.sums().factors["G"].clone())
        block.staged.clear()
    return torch.stack(staged)


def test_ranks_draw_labels_of_their_own(world: World) -> None:
    first, second = world.run(labels_by_rank, 2)
    assert not torch.equal(first, second)


# torch.distributed.checkpoint.


def save_dcp(rank: int, world_size: int, path: str, flat: bool, options: dict[str, Any]) -> None:
    model = MLP.model()
    optimizer = kaisa(model, **options)
    follow(rank, world_size, model, optimizer, MLP, LONG[:BOUNDARY])
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=how),
    }
    dcp.save(state, checkpoint_id=path, no_dist=world_size == 1)


def load_dcp(
    rank: int, world_size: int, path: str, flat: bool, options: dict[str, Any]
) -> list[Tensor]:
    model = MLP.model(seed=5)
    optimizer = kaisa(model, **options)
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=how),
    }
    dcp.load(state, checkpoint_id=path, no_dist=world_size == 1)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=how)
    return follow(rank, world_size, model, optimizer, MLP, LONG[BOUNDARY:])


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("base", BASES)
def test_distributed_checkpoint_saved_on_two_loads_on_one_and_four(
    world: World, tmp_path: Path, base: str, flat: bool
) -> None:
    options = BASES[base]
    expected = train(0, 1, MLP, LONG, {**INTERVALS, **options})[BOUNDARY:]
    world.run(save_dcp, 2, str(tmp_path), flat, placed(2, options))
    for after in (1, 4):
        parallel = world.run(load_dcp, after, str(tmp_path), flat, placed(after, options))
        assert_same_trajectory(agreed(parallel), expected, hint=f"on {after}")


# Killed and resumed.

UNTIL_KILLED = """
    import os, sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from contract import take
    from models import ZOO
    from ranks import kaisa, shard

    path = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = ZOO["mlp"]
    model = case.model(seed=rank)
    optimizer = kaisa(model, momentum=0.9, inv_update_steps=3, grad_worker_fraction=0.0)
    for step, batch in enumerate(case.batches(7, n=12)):
        if step % 3 == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
        if step == 5:
            print("two steps after the checkpoint", flush=True)
            time.sleep(600)
        take(model, optimizer, shard(batch, rank, world_size), case.loss)
"""


def test_killed_and_resumed_with_another_world_size(
    world: World, launch: Launcher, tmp_path: Path
) -> None:
    """Slow (two processes): kill -9 in the midst of training, as a scheduler of restarts sees it.

    Two ranks die at step 5; three others go on from the checkpoint of step 3.
    """
    path = tmp_path / "checkpoint"
    here = f"{Path(__file__).parents[1]}:{Path(second_order.__file__).parents[1]}"
    run = launch(UNTIL_KILLED, 2, path, environment={"PYTHONPATH": here})
    for rank in range(2):
        run.wait_for("two steps after the checkpoint", rank)
    for rank in range(2):
        run.kill(rank)
    options = {"momentum": 0.9, "inv_update_steps": 3}
    placed_anew = {**options, "grad_worker_fraction": 1 / 3}
    parallel = world.run(load_and_train, 3, path.read_bytes(), placed_anew, steps=3)
    assert_same_trajectory(agreed(parallel), train(0, 1, MLP, LONG, options)[3:])


def test_alone_a_refresh_takes_a_few_layers_at_a_time() -> None:
    """An old inverse can go before the next layers' new ones come."""
    found = []
    for most in (1, 1800, 2**20):
        model, parts = MLP.model(), []
        optimizer = kaisa(model)
        decompose = optimizer._curvature.solves._solver.decompose

        def noted(problems: Any, *args: Any, parts: Any = parts, go_on: Any = decompose) -> Any:
            parts.append(len(problems) // 2)
            return go_on(problems, *args)

        with (
            replaced(solves, {"PART_BYTES": most}),
            replaced(optimizer._curvature.solves._solver, {"decompose": noted}),
        ):
            take(model, optimizer, BATCHES[0])
        found.append(parts)
    assert found == [[1, 1, 1], [2, 1], [3]]


def test_a_frozen_layer_holds_no_inverse() -> None:
    model = MLP.model()
    optimizer = kaisa(model)
    take(model, optimizer, BATCHES[0])
    assert all(row.inverse_bytes > 0 for row in optimizer.summary().rows)
    model[2].requires_grad_(False)
    take(model, optimizer, BATCHES[1])
    assert [row.inverse_bytes > 0 for row in optimizer.summary().rows] == [True, False, True]


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_the_warm_up_is_so_many_steps_and_no_more(warmup: int) -> None:
    model, changed, before = MLP.model(), [], None
    never = {"inv_update_steps": 100, "factor_update_steps": 100}
    optimizer = kaisa(model, refresh_warmup_steps=warmup, **never)
    for step, batch in enumerate(MLP.batches(6)):
        take(model, optimizer, batch)
        now = optimizer._curvature.layers.blocks[0].inverse
        if now is not before:
            changed.append(step)
        before = now
    assert changed == list(range(max(warmup, 1)))


@pytest.mark.parametrize("how", ["loaded", "thawed"])
def test_a_layer_without_an_inverse_gets_one_at_the_next_step(how: str) -> None:
    """Not at the next of the long intervals."""
    options: dict[str, Any] = {"inv_update_steps": 100, "kl_clip": None}
    model = MLP.model()
    optimizer = kaisa(model, **options)
    for batch in MLP.batches(3):
        take(model, optimizer, batch)
    if how == "loaded":
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = kaisa(model, **options)
        optimizer.load_state_dict(saved)
    else:
        model[2].requires_grad_(False)
        take(model, optimizer, MLP.batch(6))
        model[2].requires_grad_(True)
    x, y = MLP.batch(6)
    plain = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    take(model, optimizer, (x, y))
    for p, gradient in zip(model.parameters(), plain, strict=True):
        assert not torch.allclose(p.grad, gradient, rtol=1e-3)


def test_a_checkpoint_without_mean_eigenvalues_gets_those_of_its_factors() -> None:
    """As those of the first version are; a relative damping is made of them."""
    model = MLP.model()
    donor = kaisa(model, relative_damping=True)
    take(model, donor, MLP.batch(6))
    saved = copy.deepcopy(donor.state_dict())
    for entry in saved["state"].values():
        entry["curvature"].pop("mean_eigenvalues", None)
    loaded = kaisa(model, relative_damping=True)
    loaded.load_state_dict(saved)
    for mine, its in zip(
        loaded._curvature.layers.blocks, donor._curvature.layers.blocks, strict=True
    ):
        torch.testing.assert_close(mine.factors.means, its.factors.means)


def test_a_checkpoint_loads_where_a_layer_is_frozen_from_the_start() -> None:
    """Its A has no homogeneous coordinate then; it starts anew when it thaws, and says so."""
    model = MLP.model()
    optimizer = kaisa(model)
    take(model, optimizer, BATCHES[0])
    saved = optimizer.state_dict()
    resumed = MLP.model()
    first = next(m for m in resumed.modules() if isinstance(m, nn.Linear))
    first.requires_grad_(False)
    optimizer = kaisa(resumed.parameters(), model=resumed)
    with pytest.warns(SecondOrderWarning, match="not taken over: it is frozen"):
        optimizer.load_state_dict(saved)
    assert len(factors(optimizer)) == len(saved["state"]) // 2 - 1
    first.requires_grad_(True)
    for batch in BATCHES[1:]:
        take(resumed, optimizer, batch)
    assert len(factors(optimizer)) == len(saved["state"]) // 2
