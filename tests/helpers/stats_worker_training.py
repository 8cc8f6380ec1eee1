"""What the tests of stats workers share: scenes of a worker's part and a stats worker's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from distkfac_training import BATCHES, CASE, LAYERS, LONG, distkfac, threads_of
from optimizer_cases import matrices, noted
from ranks import go, shard
from reference import cross_entropy
from torch import Tensor, nn

from second_order import SecondOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reference import Batch

    from second_order.kronecker.block import KroneckerBlock


SYNCHRONOUS: dict[str, Any] = {"max_staleness": 0, "inv_update_steps": 2, "momentum": 0.9}


def shards(batches: Sequence[Batch], rank: int, world_size: int) -> list[Batch]:
    return [shard(batch, rank, world_size) for batch in batches]


def owned_by(optimizer: Any) -> list[tuple[KroneckerBlock, int]]:
    """The layers that train, and the rank that solves each."""
    return [(block, layer.inverse_rank("A")) for block, layer in optimizer._curvature.plan.items()]


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


def assert_one_warning(results: Sequence[dict[str, Any]], *texts: str) -> None:
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


def own_batch(optimizer: Any, batch: Batch) -> Batch:
    """A worker's shard."""
    return shard(batch, optimizer._training.world.rank, optimizer._training.world.size)


def train_on(model: nn.Module, optimizer: Any, batches: Sequence[Batch]) -> list[Tensor]:
    return go(model, optimizer, CASE, [own_batch(optimizer, batch) for batch in batches])


def until_fed(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Until all workers have stopped taking statistics from their own passes."""
    found: list[Tensor] = []
    end = time.monotonic() + LONG
    while optimizer._curvature.stats_workers.own_passes:
        assert time.monotonic() < end, "no statistics have come"
        found += train_on(model, optimizer, BATCHES[:1])
        time.sleep(0.002)
    return found


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
        not optimizer._curvature.stats_workers.own_passes
        and all(b.factors.weight != w for b, w in zip(owned, before, strict=True)),
    ):
        assert time.monotonic() < end, "nothing comes of some layers"
        found += train_on(model, optimizer, BATCHES[:1])
        time.sleep(0.002)
    return found


def ends_stats(model: nn.Module, optimizer: Any, how: str) -> int:
    served = optimizer.serve(BATCHES, lambda batch: loss_of(model, batch))
    optimizer.close()
    optimizer.close()
    return int(served)


def factors_here(optimizer: Any) -> dict[str, Any]:
    """Of layers whose factors are kept by this process."""
    return {
        block.name: tuple(matrices(block.factors))
        for block in optimizer._curvature.layers.blocks
        if block.factors is not None and block.factors.stored
    }


def refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (ValueError, SecondOrderError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
