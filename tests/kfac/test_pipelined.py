"""Statistics that leave while the backward pass runs: the training of "all_reduce"."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from models import ZOO
from ranks import agreed, kaisa, replaced, shard, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order import RankMismatchError
from second_order.kfac import spd_kfac as pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6, n=12)
Log = list[tuple[str, int]]


def run(model: Any, optimizer: Any, batch: Batch, parts: int = 1, before: Any = None) -> None:
    """A step over a batch in micro-batches."""
    optimizer.zero_grad()
    if before is not None:
        before()
    x, y = batch
    for one, other in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        if len(one):
            (cross_entropy(model(one), other) / parts).backward()
    optimizer.step()


def plain(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    model = MLP.model()
    optimizer = kaisa(model, **options)
    found = []
    for batch in BATCHES:
        run(model, optimizer, shard(batch, rank, ranks))
        found.append(vector(model))
    return found


def accumulated(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """As many micro-batches as the step likes."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    found = []
    for batch, parts in zip(BATCHES, (2, 2, 1, 3, 2, 2), strict=True):
        run(model, optimizer, shard(batch, rank, ranks), parts)
        found.append(vector(model))
    return found


def frozen(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """Layers and a bias that are frozen and thaw, also between a pass and its step."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    found = []
    for step, batch in enumerate(BATCHES):
        model[0].requires_grad_(step not in (1, 2))
        model[2].bias.requires_grad_(step != 3)
        optimizer.zero_grad()
        x, y = shard(batch, rank, ranks)
        cross_entropy(model(x), y).backward()
        if step == 4:
            model[4].requires_grad_(False)
            model[4].weight.grad = model[4].bias.grad = None
        optimizer.step()
        model[4].requires_grad_(True)
        found.append(vector(model))
    return found


class Branches(nn.Module):
    """Branches that are taken in a given order, some not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)
        self.never = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.order: Sequence[int] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for i in self.order:
            x = self.branches[i](x).tanh()
        return self.head(x)


def ordered(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """Each rank reaches its layers in an order of its own, or none, or one of them twice."""
    model = Branches().double()
    optimizer = kaisa(model, **options)
    orders = [[0, 1, 2], [2, 1, 0], [1], [], [0, 0, 2], [2, 0, 1]]
    found = []
    for step, batch in enumerate(BATCHES):
        model.order = orders[(step + 2 * rank) % 6]
        x, y = shard(batch, rank, ranks)
        if (step, rank) == (3, 1):  # no batch at all
            optimizer.zero_grad()
            optimizer.step()
        else:
            run(model, optimizer, (x[:, :5], y))
        found.append(vector(model))
    return found


def broken(model: nn.Sequential, x: Tensor) -> Tensor:
    """An output whose backward pass raises when it has come half the way."""

    def stop(gradient: Tensor) -> None:
        raise ArithmeticError

    half = model[:3](x)
    half.register_hook(stop)
    return model[3:](half)


def thrown_away(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """Passes whose gradients are dropped, and one that an exception ends, on some ranks alone."""
    model = MLP.model()
    optimizer = kaisa(model, **options)

    def before(step: int, x: Tensor, y: Tensor) -> None:
        if step == 3 and rank == 0:
            with pytest.raises(ArithmeticError):
                cross_entropy(broken(model, x), y).backward()
        elif step in (2, 4) and rank <= step - 3:
            cross_entropy(model(3 * x), y).backward()
        (optimizer if step < 4 else model).zero_grad()

    found = []
    for step, batch in enumerate(BATCHES):
        share = shard(batch, rank, ranks)
        run(model, optimizer, share, before=partial(before, step, *share))
        found.append(vector(model))
    return found


def in_ddp(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """With DDP's buckets in the same passes, ``no_sync``, a closure, and steps that are skipped."""
    model = MLP.model()
    trained = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = kaisa(trained, grad_scaler=scaler, **options)
    found = []
    for step, batch in enumerate(BATCHES):
        x, y = shard(batch, rank, ranks)
        optimizer.zero_grad()
        parts = 1
        if step in (1, 2):
            parts = 2
            with trained.no_sync():
                scaler.scale(cross_entropy(trained(x[:2]), y[:2]) / 2).backward()
            x = x[2:]
            y = y[2:]
        loss = cross_entropy(trained(x), y) / parts
        if step == 3:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(vector(model))
    return found


def parted(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """One rank freezes a layer after a pass, raises, and then continues with the others."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    found = []
    for step, batch in enumerate(BATCHES[:4]):
        x, y = shard(batch, rank, ranks)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if step == 2:
            model[2].requires_grad_(rank == 0)
            with pytest.raises(RankMismatchError, match="the ranks are out of sync"):
                optimizer.step()
            model[2].requires_grad_(True)
        optimizer.step()
        found.append(vector(model))
    return found


def interleaved(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """Two optimizers, whose passes come in another order on each rank."""
    pair = [MLP.model(seed=seed) for seed in (1, 2)]
    optimizers = [kaisa(model, **options) for model in pair]
    found = []
    for batch in BATCHES:
        x, y = shard(batch, rank, ranks)
        for model in pair if rank else pair[::-1]:
            cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([vector(model) for model in pair]))
    return found


SCENES: dict[str, Callable[[int, int, dict[str, Any]], list[Tensor]]] = {
    each.__name__: each
    for each in (
        *(plain, accumulated, frozen, ordered, thrown_away),
        *(in_ddp, parted, interleaved),
    )
}


@contextmanager
def logged(log: Log) -> Iterator[None]:
    """Note where each sum begins, in a pass or at a step, and its size."""
    all_reduce = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        where = "step" if torch._C._current_graph_task_id() == -1 else "pass"
        log.append((where, tensor.numel()))
        return all_reduce(tensor, *args, **kwargs)

    with replaced(dist, {"all_reduce": noted}):
        yield


def both(
    rank: int, ranks: int, name: str, limit: int, options: dict[str, Any] | None = None
) -> tuple[list[Tensor], list[Tensor], Log]:
    """The trajectories by either exchange; where the second began its sums, and their sizes."""
    log: Log = []
    options = options or {}
    expected = SCENES[name](rank, ranks, options)
    with replaced(pipeline, {"FUSED_BYTES": limit}), logged(log):
        return expected, SCENES[name](rank, ranks, {**options, "factor_exchange": "pipelined"}), log


@pytest.mark.parametrize("name", SCENES)
def test_pipelining_does_not_change_the_trajectory(world: World, name: str) -> None:
    """And something left in a pass."""
    results = world.run(both, 2, name, 1)
    expected, found = (agreed([each[i] for each in results]) for i in range(2))
    largest = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    assert largest < 1e-14  # matrices that are decomposed one by one are rounded in another way
    assert not torch.equal(found[0], found[-1])
    for _, _, log in results:
        assert any(where == "pass" for where, _ in log)


def test_with_one_bucket_training_is_equal_bit_for_bit(world: World) -> None:
    """On two ranks, where there is one order of addition."""
    for name in ("plain", "ordered"):
        results = world.run(both, 2, name, 2**20)
        assert all(torch.equal(a, b) for x, y, _ in results for a, b in zip(x, y, strict=True))


def test_sums_are_rounded_to_the_communication_dtype_before_sending(world: World) -> None:
    """As at the step: they take the bytes of the factors, and not those of what adds them up."""
    results = world.run(both, 2, "plain", 2**20, {"factor_dtype": torch.bfloat16})
    assert all(torch.equal(a, b) for x, y, _ in results for a, b in zip(x, y, strict=True))


def left_alone(rank: int, ranks: int) -> tuple[str, float]:
    """An exception ends a pass of rank 1, which does not come to the step."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = MLP.model()
    optimizer = kaisa(model, factor_exchange="pipelined", process_group=group)
    x, y = shard(BATCHES[0], rank, ranks)
    for _ in range(2):
        run(model, optimizer, (x, y))
    optimizer.zero_grad()
    start = time.monotonic()
    if rank == 1:
        with pytest.raises(ArithmeticError):
            cross_entropy(broken(model, x), y).backward()
        time.sleep(2.5)
        return "", 0.0
    cross_entropy(model(x), y).backward()
    with pytest.raises(RankMismatchError) as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_misses_a_step_raises_within_the_timeout(world: World) -> None:
    (message, seconds), _ = world.run(left_alone, 2)
    assert "rank 0 is about to take a step" in message
    assert seconds < 10
