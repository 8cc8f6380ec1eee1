"""KAISA on many processes: which differ, in how many collectives, and what each keeps.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from contract import take
from models import ZOO
from placed import KAISA_ALL_REDUCE, collectives_of_steps, falling, network
from ranks import kaisa, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from second_order import RankMismatchError, SecondOrderWarning
from second_order.distributed.assignment import AssignmentCost, Grid, LayerDims, assign_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4, n=12)
# Ranks that differ.


def build(rank: int, world_size: int, variant: str) -> None:
    """Rank 1 builds something else."""
    odd = rank == 1
    options: dict[str, Any] = {}
    params: Any = None
    model: nn.Module = network([5, 4, 5, 3])
    if variant == "norm":  # the same parameters, other buffers
        model.append(nn.BatchNorm1d(3) if odd else nn.GroupNorm(1, 3))
    elif odd:
        if variant == "width":
            model = network([5, 4, 6, 3])
        elif variant == "depth":
            model = network([5, 4, 5, 4, 3])
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
                "refresh": {"refresh": "interval"},
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
    "exchange": r"factor_exchange='all_reduce'.*factor_exchange='reduce'",
    "refresh": r"'refresh': 'drift'.*'refresh': 'interval'",
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


# How many collectives.


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("exchange", ["all_reduce", "reduce"])
def test_a_handful_of_collectives_however_many_layers(
    world: World, workers: int, solver: str, exchange: str
) -> None:
    """A word; gradients; statistics; which solves failed, and the solves; to receivers."""
    shares = {"grad_worker_fraction": workers / 4}
    options = {"solver": solver, "factor_exchange": exchange, **shares}
    few, many = (
        world.run(collectives_of_steps, 4, KAISA_ALL_REDUCE, layers, torch.float32, options)
        for layers in (3, 8)
    )
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
    model = network([5, 40, 3, 3, 3, 3])
    optimizer = kaisa(model, grad_worker_fraction=workers / world_size)
    take(model, optimizer, shard(BATCHES[0], rank, world_size))
    summary = optimizer.summary()
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for block in optimizer._curvature.layers.blocks
        if block.inverse is not None
        for part in block.inverse.tensors
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
