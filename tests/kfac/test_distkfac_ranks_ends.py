"""DistKFAC beside stats workers that end, fail, or send what is not finite.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import agreed
from threaded import BATCHES, LONG
from torch import Tensor, nn
from workers import (
    ends_stats,
    loss_of,
    play,
    quiet,
    refusal,
    roles_of,
    told_once,
    train_on,
    until_fed,
)

if TYPE_CHECKING:
    from pool import World
    from reference import Batch


def outgrown_worker(model: nn.Module, optimizer: Any, how: str) -> None:
    """The model grows by a layer that the stats worker lacks."""
    with optimizer:
        until_fed(model, optimizer)
        model.append(nn.Linear(3, 3).double())
        optimizer.add_param_group({"params": list(model[-1].parameters())})
        fails_worker(model, optimizer, how)


def outgrown_stats(model: nn.Module, optimizer: Any, how: str) -> str:
    return refusal(lambda: ends_stats(model, optimizer, how))


def test_a_stats_worker_whose_workers_model_grows_ends_and_says_why(world: World) -> None:
    """Workers go on."""
    results = world.run(play, 2, (outgrown_worker, outgrown_stats), {}, "", timeout=2 * LONG)
    _, (helper,) = roles_of(results)
    assert helper.startswith("SecondOrderError: the workers' model has 8 parameters")
    assert helper.endswith("build and change the same model on every rank")
    told_once(results, "has left, died", "from the training passes again")


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


@pytest.mark.parametrize("how", ["close", "exception"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_serve_returns_when_the_workers_have_ended(world: World, world_size: int, how: str) -> None:
    results = world.run(play, world_size, (ends_worker, ends_stats), {}, how, timeout=LONG)
    assert quiet(results)
    assert roles_of(results)[1][0] >= 1


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
