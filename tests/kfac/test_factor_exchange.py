"""Factors that one process keeps: a share of the memory, sent to nobody else.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from contract import take
from models import ZOO
from placed import network
from ranks import kaisa, replaced
from reference import cross_entropy, empirical_factors
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
REDUCE = {"factor_exchange": "reduce"}
SPREAD = {**REDUCE, "grad_worker_fraction": 0.5, "colocate_factors": False}


# The same trajectory.


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
        held.append((block.factors.stored["A"] is not None, block.factors.stored["G"] is not None))
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
        assert elements["all_to_all_single"] == factors + world_size * heads
        assert everything["all_reduce"] == elements["all_reduce"] + factors + heads
        assert everything["all_to_all_single"] == 0


# A part of the ranks; a rank that fails.
