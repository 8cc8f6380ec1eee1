"""KAISA: what is compared with, dtypes, unequal shards, and when inverses come."""

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from combinations import fractional_product
from models import ZOO
from optimizer_cases import factors, noted, take
from placement_training import KAISA_ALL_REDUCE, Forked, collectives_of_steps, falling, network
from ranks import (
    agreed,
    assert_same_trajectory,
    kaisa,
    shard,
    train,
    vector,
)
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order import RankMismatchError
from second_order.distributed.assignment import Grid, LayerDims, assign_layers
from second_order.kronecker.factors import collect_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4, n=12)
HALVES = {"grad_worker_fraction": 0.5}


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


def test_layers_may_have_different_dtypes(world: World) -> None:
    parallel = world.run(train_mixed, 4, HALVES)
    assert_same_trajectory(agreed(parallel), train_mixed(0, 1, {}), rtol=1e-5)


def accumulate(
    rank: int, world_size: int, batches: Sequence[Batch], micro: int, options: dict[str, Any]
) -> list[Tensor]:
    model = MLP.model()
    optimizer = kaisa(model, **options)
    trajectory = []
    for batch in batches:
        optimizer.zero_grad()
        own_batch = shard(batch, rank, world_size)
        for i in range(micro):
            x, y = shard(own_batch, i, micro)
            (cross_entropy(model(x), y) / micro).backward()
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


def test_micro_batches_on_many_processes_equal_one_batch(world: World) -> None:
    parallel = world.run(accumulate, 2, BATCHES, 3, HALVES)
    assert_same_trajectory(agreed(parallel), train(0, 1, MLP, BATCHES))


def test_a_frozen_layer_stores_no_inverse() -> None:
    model = MLP.model()
    optimizer = kaisa(model)
    take(model, optimizer, BATCHES[0])
    assert all(row.inverse_bytes > 0 for row in optimizer.summary().rows)
    model[2].requires_grad_(False)
    take(model, optimizer, BATCHES[1])
    assert [row.inverse_bytes > 0 for row in optimizer.summary().rows] == [True, False, True]


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


def labels_by_rank(rank: int, world_size: int) -> Any:
    """The same example on every rank; only the drawn labels differ."""
    model = MLP.model()
    optimizer = kaisa(model, fisher="categorical")
    staged = []
    for _ in range(6):
        model(MLP.batch(1)[0]).sum().backward()
        block = optimizer._curvature.layers.blocks[-1]
        staged.append(collect_sums([block.staged])[0].factors["G"].clone())
        block.staged.clear()
    return torch.stack(staged)


def test_each_rank_samples_its_own_labels(world: World) -> None:
    first, second = world.run(labels_by_rank, 2)
    assert not torch.equal(first, second)


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
        gradient = copy.deepcopy(model.branch.weight.grad)
        records.append((vector(model), gradient, factors(optimizer)["branch"]))
    return records


@pytest.mark.parametrize(("workers", "wrap"), fractional_product([1, 2, 4], [False, True], part=2))
def test_some_ranks_may_skip_a_layer(world: World, workers: int, wrap: bool) -> None:
    """A layer has the statistics of the ranks that call it. One that no rank calls stays."""
    uses: list[set[int]] = [set(), {0, 1, 2, 3}, {1, 2}, set()]
    options = {"grad_worker_fraction": workers / 4}
    with noted():
        results = world.run(train_forked, 4, uses, wrap, options)
    for step in range(4):
        agreed([[rank[step][0]] for rank in results])
    for rank in results:
        gradients = [gradient for _, gradient, _ in rank]
        assert [g is None for g in gradients[:3]] == [True, False, False]
        averages = [average for _, _, average in rank]
        assert torch.equal(averages[0][0], torch.zeros_like(averages[0][0]))
        assert torch.equal(averages[3][0], averages[2][0]), "no rank called it in the last step"
        if not wrap:  # DDP leaves what zero_grad left, or a zero
            branch = slice(36, 36 + 42)  # the trunk has 5 x 6 + 6
            assert gradients[3] is None
            assert torch.equal(rank[2][0][branch], rank[3][0][branch])


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
    with noted() as warned:
        for batch in BATCHES[:2]:
            x, y = shard(batch, rank, world_size)
            optimizer.zero_grad()
            cross_entropy(model(x, rank == user), y).backward()
            optimizer.step()
    plan = {b.name: each.inverse_ranks for b, each in optimizer._curvature.plan.items()}
    return plan["branch"], warned


@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize("user", [0, 1])
def test_a_layer_that_is_never_called_is_reported_as_unused(
    world: World, user: int, colocate: bool
) -> None:
    """One rank decomposes its factors, or each of two does one, and one of them sees it called."""
    for rank, (solvers, warned) in enumerate(world.run(train_dead, 2, user, colocate)):
        assert (len(set(solvers)) == 1) is colocate
        assert len(warned) == (rank != user)
        assert all("no statistics arrived for 'branch'" in line for line in warned)


def frozen(model: nn.Module) -> None:
    model.get_parameter("2.weight").requires_grad_(False)


def cast(model: nn.Module) -> None:
    model.get_submodule("4").float()


def normed(model: Any) -> None:
    model[1] = nn.BatchNorm1d(4, affine=False)  # the same parameters, other buffers


# What rank 1 has instead, and what is said of it.
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "width": (
        {"widths": [5, 4, 6, 3]},
        r"0 has \[2\.weight: \(5, 4\).*1 has \[2\.weight: \(6, 4\)",
    ),
    "depth": (
        {"widths": [5, 4, 5, 4, 3]},
        r"0 has \[4\.weight: \(3, 5\).*1 has \[4\.weight: \(4, 5",
    ),
    "dtype": ({"change": cast}, r"0 has \[4\.weight.*float64.*1 has \[4\.weight.*float32"),
    "frozen": ({"change": frozen}, r"0 has \[2\.weight.*=True\].*1 has \[2\.weight.*=False\]"),
    "norm": ({"change": normed}, r"rank 0 has .*rank 1 has"),
    "damping": ({"damping": falling}, r"'damping': 0\.1.*rank 1 has"),
    "exchange": ({"factor_exchange": "reduce"}, r"'all_reduce'.*factor_exchange='reduce'"),
    "base": ({"base": torch.optim.Adam}, r"0 has \[.*(SGD|momentum).*1 has \[.*(Adam|betas)"),
    "aux_base": ({"base": torch.optim.Muon, "aux_base": torch.optim.AdamW}, r"rank 1 has"),
    "averaging": ({"gradient_averaging": False}, r"rank 1 has"),
    "lr": ({"lr": 0.1}, r"rank 0 has .*0\.05.*rank 1 has .*0\.1"),
}


def build(rank: int, world_size: int, variant: str) -> None:
    """Rank 1 builds something else."""
    options = dict(DIFFERENCES[variant][0]) if rank == 1 else {}
    model = network(options.pop("widths", [5, 4, 5, 3]))
    options.pop("change", lambda _: None)(model)
    with noted():
        optimizer = kaisa(model, **options)
    # A difference that passes unnoticed must show as one, not as a hang of the test.
    dist.barrier()
    raise AssertionError(f"rank {rank} built {optimizer}")


@pytest.mark.parametrize("variant", DIFFERENCES)
def test_different_options_on_ranks_raise_at_construction(world: World, variant: str) -> None:
    """Every rank, naming the first difference, and no rank waits for another."""
    errors = world.run(build, 3, variant, expect_errors=True, timeout=20)
    for error in errors:
        assert isinstance(error, RankMismatchError), error
        assert re.search(DIFFERENCES[variant][1], str(error)), error


@pytest.mark.parametrize(
    ("workers", "solver", "exchange"),
    fractional_product([1, 2, 4], ["eigen", "inverse"], ["all_reduce", "reduce"], part=2),
)
def test_the_number_of_collectives_does_not_grow_with_depth(
    world: World, workers: int, solver: str, exchange: str
) -> None:
    """A step compares a word, averages gradients and sums the clip; others depend on the step."""
    shares = {"grad_worker_fraction": workers / 4}
    options = {"solver": solver, "factor_exchange": exchange, **shares}
    few, many = (
        world.run(collectives_of_steps, 4, KAISA_ALL_REDUCE, layers, torch.float32, options)
        for layers in (3, 8)
    )
    assert few == many == [few[0]] * 4
    row = int(workers > 1)
    column = 2 * int(workers < 4)
    refresh, statistics, neither = few[0]
    assert neither == 2 + column
    assert statistics == 3 + column
    assert refresh == 4 + row + column


def stored(rank: int, world_size: int, workers: int) -> tuple[int, int, list[str]]:
    """Bytes of factors and of inverses, and who computes what."""
    model = network([5, 40, 3, 3, 3, 3])
    optimizer = kaisa(model, grad_worker_fraction=workers / world_size)
    take(model, optimizer, shard(BATCHES[0], rank, world_size))
    summary = optimizer.summary()
    return summary.factor_bytes, summary.inverse_bytes, [row.computed_by for row in summary.rows]


def test_a_smaller_fraction_stores_fewer_inverses(world: World) -> None:
    """Every layer's inverse is on fP ranks."""
    alone = stored(0, 1, 1)
    for workers in (1, 2, 4):
        results = world.run(stored, 4, workers)
        assert sum(inverse for _, inverse, _ in results) == workers * alone[1]
        assert all(factor == alone[0] for factor, _, _ in results)
        assert all(lines == results[0][2] for _, _, lines in results)


def placed_as(rank: int, world_size: int, choices: Sequence[dict[str, Any]]) -> list[Any]:
    models = [
        nn.ModuleList([nn.Linear(9, 10), *(nn.Linear(4, 5) for _ in range(8))]) for _ in choices
    ]
    optimizers = [kaisa(model, **each) for model, each in zip(models, choices, strict=True)]
    return [[layer.inverse_ranks for layer in each._curvature.plan.values()] for each in optimizers]


def test_the_placement_options_place_layers(world: World) -> None:
    dims = [LayerDims(1, 10, 10), *[LayerDims(1, 5, 5)] * 8]
    choices = [{"colocate_factors": both} for both in (True, False)]
    expected = [
        [
            (each.a_inverse_rank, each.g_inverse_rank)
            for each in assign_layers(dims, Grid(1, 2), cost="compute", colocate_factors=both)
        ]
        for both in (True, False)
    ]
    assert expected[0] != expected[1]
    assert world.run(placed_as, 2, choices) == [expected] * 2


@pytest.mark.parametrize(
    ("option", "num_calls"), [("inv_update_steps", 1), ("factor_update_steps", 2)]
)
def test_a_step_evaluates_an_interval_once(option: str, num_calls: int) -> None:
    """The passes before the step also evaluate when statistics are due."""
    calls: Counter[int] = Counter()

    def interval(step: int) -> int:
        calls[step] += 1
        return 2

    model = MLP.model()
    optimizer = kaisa(model, **{option: interval})
    for batch in BATCHES:
        take(model, optimizer, batch)
    assert [calls[step] for step in range(len(BATCHES))] == [num_calls] * len(BATCHES)
