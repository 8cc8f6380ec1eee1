"""MRDHO2 in loops of every kind: who leaves when, who fails, and what is not finite.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerated import CURVED, STEPS, base_alone, loss_of, reference, worker
from ranks import agreed, assert_same_trajectory, replaced
from scripted import (
    MOMENTUM,
    expected_until,
    play,
    serve,
    told_once,
    trajectory_of,
    until,
    worker_part,
)
from torch import Tensor, nn

from second_order import SecondOrderError
from second_order.lanczos.spectrum import Pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World

GONE, UNSOUND = "the accelerators are gone", "the eigenpairs are not finite"


# Loops.


def loop_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    return worker_part(model, optimizer, rank)


def loop_accelerator(model: nn.Module, optimizer: Any, rank: int) -> int:
    with optimizer:
        until(optimizer, STEPS)
    return len(optimizer.epochs)


def test_the_usual_loop_on_every_rank(world: World) -> None:
    results = world.run(play, 3, (loop_worker, loop_accelerator))
    expected = expected_until(3, curved=CURVED[:1])
    assert_same_trajectory(trajectory_of(results), expected, rtol=1e-7)
    assert all(result["warned"] == [] for result in results)


def leaves_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    return worker_part(model, optimizer, rank)


def leaves_accelerator(model: nn.Module, optimizer: Any, rank: int) -> None:
    until(optimizer, 6)
    optimizer.close()
    optimizer.close()
    with replaced(optimizer._curvature.mailbox, {"wait": None}):  # waits for nobody
        until(optimizer, 3)
        assert optimizer.serve(CURVED, lambda batch: loss_of(model, batch)) == 0


def test_an_accelerator_that_leaves_early(world: World) -> None:
    """What it has computed is still used; then the base goes on alone."""
    results = world.run(play, 3, (leaves_worker, leaves_accelerator))
    expected = expected_until(2, curved=CURVED[:1])
    assert_same_trajectory(trajectory_of(results), expected, rtol=1e-7)
    told_once(results, "SGD goes on alone")
    for result in results[:2]:
        assert result["reports"] == [(True, ""), (True, ""), (False, GONE)]
    assert results[2]["warned"] == []


def closes_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    def close(step: int) -> None:
        if step == 6:
            optimizer.close()
            optimizer.close()

    with optimizer:
        found = worker(model, optimizer, rank, 2, before=close)
    kept = optimizer._curvature.mailbox
    assert optimizer._curvature.epochs.start is optimizer._curvature.epochs.total is None
    assert not kept._received
    assert not kept._expected
    return found


def closes_accelerator(model: nn.Module, optimizer: Any, rank: int) -> int:
    return serve(model, optimizer)


def test_workers_that_close_early(world: World) -> None:
    results = world.run(play, 3, (closes_worker, closes_accelerator))
    assert_same_trajectory(trajectory_of(results), expected_until(1), rtol=1e-7)
    assert all(result["warned"] == [] for result in results)
    assert all(result["reports"] == [(True, "")] for result in results[:2])
    assert results[2]["found"] in (1, 2), "the second may have been asked for in vain"


def raises_worker(model: nn.Module, optimizer: Any, rank: int) -> Any:
    def fail(step: int) -> None:
        if step == 5:
            raise KeyError("in the loop")

    with pytest.raises(KeyError, match="in the loop"), optimizer:
        worker(model, optimizer, rank, 2, before=fail)


def raises_accelerator(model: nn.Module, optimizer: Any, rank: int) -> int:
    return serve(model, optimizer)


def test_an_exception_in_the_loop_reaches_the_caller(world: World) -> None:
    """And the accelerators return."""
    results = world.run(play, 3, (raises_worker, raises_accelerator))
    assert all(result["warned"] == [] for result in results)
    assert results[2]["found"] in (1, 2)


def fails_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    return worker_part(model, optimizer, rank)


def fails_accelerator(model: nn.Module, optimizer: Any, rank: int) -> None:
    def loss_fn(batch: Any) -> Tensor:
        if batch is CURVED[1]:
            raise KeyError("in the loss")
        return loss_of(model, batch)

    with pytest.raises(KeyError, match="in the loss"):  # outside of `with`
        optimizer.serve(CURVED, loss_fn)


def test_an_exception_in_the_loss_reaches_the_caller_of_serve(world: World) -> None:
    results = world.run(play, 3, (fails_worker, fails_accelerator))
    assert_same_trajectory(trajectory_of(results), expected_until(1), rtol=1e-7)
    told_once(results, "SGD goes on alone")


def one_fails_worker(model: nn.Module, optimizer: Any, rank: int, *_: Any) -> list[Tensor]:
    with optimizer:
        return worker(model, optimizer, rank, 1)


def one_fails_accelerator(
    model: nn.Module, optimizer: Any, rank: int, failing: int, where: str
) -> str:
    """Outside of what the Lanczos run agrees on itself."""

    def batches() -> Any:
        yield CURVED[0]
        if where == "loader" and rank == failing:
            raise KeyError("in the loader")
        yield CURVED[1]

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("in the delivery")

    wrong = {"post": fails} if where == "delivery" and rank == failing else {}
    wrongly = replaced(optimizer._curvature.mailbox, wrong)
    with pytest.raises((KeyError, SecondOrderError)) as caught, optimizer, wrongly:
        optimizer.serve(batches(), lambda batch: loss_of(model, batch))
    return repr(caught.value)


@pytest.mark.parametrize(("failing", "where"), [(1, "loader"), (2, "loader"), (2, "delivery")])
def test_one_accelerator_that_fails_takes_the_others_along(
    world: World, failing: int, where: str
) -> None:
    """With its own error where it failed; nobody waits for a timeout, which is half a minute."""
    begun = time.monotonic()
    results = world.run(
        play,
        3,
        (one_fails_worker, one_fails_accelerator),
        failing,
        where,
        options={"accelerators": 2},
    )
    assert time.monotonic() - begun < 15.0
    epochs = 1 if where == "loader" else 0
    assert len(results[0]["found"]) == STEPS
    assert results[0]["reports"] == [(True, "")] * epochs + [(False, GONE)]
    told_once(results[:1], "SGD goes on alone")
    for rank in 1, 2:
        text = (
            f"KeyError('in the {where}')" if rank == failing else "another accelerator has failed"
        )
        assert text in results[rank]["found"]


def empty_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    with pytest.raises(SecondOrderError, match=rf"rank {rank} is a worker: it trains"):
        optimizer.serve(CURVED, lambda _: None)
    return worker_part(model, optimizer, rank)


def empty_accelerator(model: nn.Module, optimizer: Any, rank: int) -> None:
    with pytest.raises(ValueError, match="batches is empty"):
        serve(model, optimizer, batches=iter([CURVED[0]]))


def test_an_iterator_that_ends_is_told(world: World) -> None:
    results = world.run(play, 3, (empty_worker, empty_accelerator))
    assert_same_trajectory(trajectory_of(results), expected_until(1), rtol=1e-7)
    told_once(results, "SGD goes on alone")


# Numbers that are not finite.


def spoiled_worker(
    model: nn.Module, optimizer: Any, rank: int, epochs: Sequence[int]
) -> tuple[list[Tensor], int]:
    return worker_part(model, optimizer, rank), optimizer.curvature.failures


def spoiled_accelerator(model: nn.Module, optimizer: Any, rank: int, epochs: Sequence[int]) -> int:
    def loss_fn(batch: Any) -> Tensor:
        spoils = any(batch is CURVED[epoch] for epoch in epochs)
        return loss_of(model, batch) * (math.nan if spoils else 1.0)

    return serve(model, optimizer, loss_fn)


@pytest.mark.parametrize("epochs", [[0, 1, 2], [0, 2], [1]])
def test_eigenpairs_that_are_not_finite_are_left_out(world: World, epochs: list[int]) -> None:
    results = world.run(play, 3, (spoiled_worker, spoiled_accelerator), epochs)
    found = agreed([result["found"][0] for result in results[:2]])
    expected, _ = reference("paper", with_update=lambda epoch: epoch not in epochs, **MOMENTUM)
    assert_same_trajectory(found, expected, rtol=1e-7)
    if len(epochs) == 3:
        assert all(map(torch.equal, found, base_alone(workers=2, **MOMENTUM)))
    told_once(results, f"eigenpairs of epoch {epochs[0]} are not finite")
    for result in results[:2]:
        assert result["found"][1] == len(epochs)
        assert result["reports"] == [
            (False, UNSOUND) if epoch in epochs else (True, "") for epoch in range(3)
        ]
    assert results[2]["found"] == 3


def vectors_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    return worker_part(model, optimizer, rank)


def vectors_accelerator(model: nn.Module, optimizer: Any, rank: int) -> list[tuple[bool, int]]:
    """For each message of pairs, whether it says that they are finite, and how many tensors."""
    vectors, mailbox, sent = Pairs.vectors, optimizer._curvature.mailbox, []
    posts = mailbox.post

    def post(name: str, tensors: Sequence[Tensor], **note: Any) -> None:
        if name.startswith("pairs/"):
            sent.append((note["finite"], len(tensors)))
        posts(name, tensors, **note)

    spoilt = replaced(Pairs, {"vectors": lambda pairs: vectors(pairs) * math.nan})
    with spoilt, replaced(mailbox, {"post": post}):
        assert serve(model, optimizer) == 3
    return sent


def test_vectors_that_are_not_finite_are_not_sent(world: World) -> None:
    """Be the eigenvalues as sound as they may; workers would refuse them, but need not get them."""
    results = world.run(play, 3, (vectors_worker, vectors_accelerator))
    assert results[2]["found"] == [(False, 0)] * 6, "three epochs, two workers"
    assert all(map(torch.equal, trajectory_of(results), base_alone(workers=2, **MOMENTUM)))
    for result in results[:2]:
        assert result["reports"] == [(False, UNSOUND)] * 3


def judged_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    return worker_part(model, optimizer, rank)


def judged_accelerator(model: nn.Module, optimizer: Any, rank: int) -> int:
    seen: list[Any] = []

    def loss_fn(batch: Any) -> Tensor:
        """Sound for the Hessian, which evaluates it once."""
        seen.append(batch)
        again = sum(each is batch for each in seen) > 1
        return loss_of(model, batch) * (math.nan if again else 1.0)

    return serve(model, optimizer, loss_fn)


def test_a_verdict_that_is_not_finite_is_told_as_such(world: World) -> None:
    results = world.run(
        play, 3, (judged_worker, judged_accelerator), options={"final_update": "guarded"}
    )
    assert all(map(torch.equal, trajectory_of(results), base_alone(workers=2, **MOMENTUM)))
    reason = "the loss of the accelerators' batches is not finite"
    assert all(result["reports"] == [(False, reason)] * 3 for result in results[:2])
