"""MRDHO2 in scripts: loops of every kind, who leaves when, and what it reports.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from accelerated import (
    BATCHES,
    CASE,
    CURVED,
    EPOCH,
    STEPS,
    base_alone,
    gradient,
    loss_of,
    mrdho2,
    noted,
    reference,
    worker,
)
from ranks import agreed, assert_same_trajectory, replaced, vector
from torch import Tensor, nn

from second_order import SecondOrderError
from second_order.lanczos.spectrum import Pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pool import World

MOMENTUM = {"momentum": 0.9, "lr": 0.05}
GONE, UNSOUND = "the accelerators are gone", "the eigenpairs are not finite"


def couriers() -> int:
    return sum(t.name == "second_order courier" for t in threading.enumerate())


def play(
    rank: int,
    world_size: int,
    scene: tuple[Callable[..., Any], Callable[..., Any]],
    *args: Any,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A scene on one rank: a worker's part of it or an accelerator's; what it warned of."""
    model = CASE.model()
    optimizer = mrdho2(model, **{"final_update": "paper", **MOMENTUM, **(options or {})})
    part = scene[optimizer.role == "accelerator"]
    with noted() as warned:
        found = part(model, optimizer, rank, *args)
    assert couriers() == 0, "no thread is left"
    dist.barrier()  # until then the store, which an accelerator has, is there
    reports = [(r.applied, r.reason) for r in optimizer.epochs]
    return {"found": found, "warned": warned, "reports": reports}


def until(optimizer: Any, steps: int) -> None:
    """The usual loop of an accelerator, which does not know that it is one."""
    model = optimizer._training.model
    for step in range(steps):
        gradient(model, optimizer, BATCHES[step])
        optimizer.step(curvature_closure=lambda: loss_of(model, CURVED[0]))


def worker_part(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    with optimizer:
        return worker(model, optimizer, rank, 2)


def serve(model: nn.Module, optimizer: Any, loss_fn: Any = None, batches: Any = CURVED) -> int:
    def plain(batch: Any) -> Tensor:
        return loss_of(model, batch)

    with optimizer:
        return optimizer.serve(batches, loss_fn or plain)


def trajectory_of(results: Sequence[dict[str, Any]]) -> Sequence[Tensor]:
    found = agreed([result["found"] for result in results[:2]])
    assert len(found) == STEPS, "no step is lost"
    return found


def expected_until(epochs: int, **options: Any) -> list[Tensor]:
    """So many epochs with final updates, then the base alone."""
    options = {"with_update": lambda epoch: epoch < epochs, **MOMENTUM, **options}
    return reference("paper", **options)[0]


def told_once(results: Sequence[dict[str, Any]], text: str) -> None:
    for result in results[:2]:
        (line,) = result["warned"]
        assert text in line


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
    with replaced(optimizer._curvature.line.courier, {"wait": None}):  # waits for nobody
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
    kept = optimizer._curvature.line.courier._shared
    assert optimizer._curvature.epochs.start is optimizer._curvature.epochs.total is None
    assert not kept.received
    assert not kept.expected
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

    def fails(*_: Any) -> None:
        raise KeyError("in the delivery")

    wrong = {"_deliver": fails} if where == "delivery" and rank == failing else {}
    wrongly = replaced(optimizer._curvature.accelerator, wrong)
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
    vectors, courier, sent = Pairs.vectors, optimizer._accelerator._courier, []
    posts = courier.post

    def post(name: str, tensors: Sequence[Tensor], **note: Any) -> None:
        if name.startswith("pairs/"):
            sent.append((note["finite"], len(tensors)))
        posts(name, tensors, **note)

    spoilt = replaced(Pairs, {"vectors": lambda pairs: vectors(pairs) * math.nan})
    with spoilt, replaced(courier, {"post": post}):
        assert serve(model, optimizer) == 3
    return sent


def test_vectors_that_are_not_finite_are_not_sent(world: World) -> None:
    """Be the eigenvalues as sound as they may; workers would refuse them, but need not get them."""
    results = world.run(play, 3, (vectors_worker, vectors_accelerator))
    assert results[2]["found"] == [(False, 0)] * 6, "three epochs, two workers"
    assert all(map(torch.equal, trajectory_of(results), base_alone(workers=2, **MOMENTUM)))
    for result in results[:2]:
        assert result["reports"] == [(False, UNSOUND)] * 3


def disagrees_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    """The second has got pairs of the second epoch that it cannot use."""
    courier = optimizer._curvature.line.courier
    waits = courier.wait

    def wait(name: str, *args: Any) -> Any:
        message = waits(name, *args)
        if name.startswith("pairs/1/1/"):
            message[1]["finite"] = False
        return message

    with replaced(courier, {"wait": wait}):
        return worker_part(model, optimizer, rank)


def disagrees_accelerator(model: nn.Module, optimizer: Any, rank: int) -> int:
    return serve(model, optimizer)


def test_pairs_that_one_worker_cannot_use_are_used_by_none(world: World) -> None:
    results = world.run(play, 3, (disagrees_worker, disagrees_accelerator), timeout=30.0)
    expected, _ = reference("paper", with_update=lambda epoch: epoch != 1, **MOMENTUM)
    assert_same_trajectory(trajectory_of(results), expected, rtol=1e-7)
    for result in results[:2]:
        assert result["reports"] == [(True, ""), (False, UNSOUND), (True, "")]


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


# Time.


def slow(rank: int, world_size: int, sign: Path, seconds: float) -> Any:
    """The accelerator begins to sleep when worker 0 has begun to wait, then worker 1 does."""
    model = CASE.model()
    optimizer = mrdho2(model, final_update="paper")
    if optimizer.role == "accelerator":

        def loss_fn(batch: Any) -> Tensor:
            while batch is CURVED[1] and not sign.exists():
                time.sleep(0.005)
            time.sleep(seconds if batch is CURVED[1] else 0.0)
            return loss_of(model, batch)

        return serve(model, optimizer, loss_fn)
    waits = optimizer._curvature.epochs._await

    def wait(*args: Any) -> Any:
        late = sign.with_name("late")
        if rank == 0 and optimizer._curvature.epochs.number > 0:
            (sign if optimizer._curvature.epochs.number == 1 else late).touch()
        if rank == 1 and optimizer._curvature.epochs.number == 2:
            while not late.exists():
                time.sleep(0.005)
            time.sleep(seconds)
        return waits(*args)

    with optimizer, replaced(optimizer._curvature.epochs, {"_await": wait}):
        worker(model, optimizer, rank, 2)
    return [report.waited for report in optimizer.epochs]


def test_a_worker_reports_how_long_it_has_waited(world: World, tmp_path: Path) -> None:
    """For accelerators, and with that for workers who wait for them longer."""
    *waited, served = world.run(slow, 3, tmp_path / "waiting", 0.1)
    assert served == 3
    assert waited[0][1] >= 0.1
    assert waited[0][2] >= 0.1
    assert min(map(min, waited)) >= 0.0


def slow_verdict(rank: int, world_size: int, seconds: float) -> Any:
    model = CASE.model()
    optimizer = mrdho2(model, final_update="guarded")
    if optimizer.role == "accelerator":
        judge = optimizer._curvature.accelerator._judge

        def late(*args: Any) -> None:
            time.sleep(seconds)
            judge(*args)

        with replaced(optimizer._curvature.accelerator, {"_judge": late}):
            return serve(model, optimizer)
    with optimizer:
        worker(model, optimizer, rank, 1, BATCHES[:EPOCH])
    return [report.waited for report in optimizer.epochs]


def test_a_worker_reports_how_long_it_has_waited_for_a_verdict(world: World) -> None:
    (waited,), _ = world.run(slow_verdict, 2, 0.3)
    assert waited >= 0.25


# Schedulers, copies, and parameters that change.


def scheduled(rank: int, world_size: int) -> Any:
    model = CASE.model()
    optimizer = mrdho2(model, final_update="paper", **MOMENTUM)
    if optimizer.role == "accelerator":
        return serve(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, EPOCH, gamma=0.5)
    trajectory = []
    with optimizer:
        for batch in BATCHES:
            gradient(model, optimizer, batch)
            optimizer.step()
            scheduler.step()
            trajectory.append(vector(model))
    return trajectory


def test_schedules_reach_the_base_and_scale_the_newton_step(world: World) -> None:
    found, _ = world.run(scheduled, 2)
    expected, _ = reference("paper", decay=0.5, **MOMENTUM)
    assert_same_trajectory(found, expected, rtol=1e-7)


def copied_worker(
    model: nn.Module, optimizer: Any, rank: int, way: str
) -> tuple[list[Tensor], list[Tensor]]:
    """A copy that is made in mid-epoch, and the original goes on."""
    twins: list[Any] = []

    def copy_both(step: int) -> None:
        if step == 6:
            both = (model, optimizer)
            if way == "deepcopy":
                twins.extend(copy.deepcopy(both))
            else:
                twins.extend(pickle.loads(pickle.dumps(both)))

    with optimizer:
        found = worker(model, optimizer, rank, 2, before=copy_both)
    assert twins[1].role == "worker"
    assert twins[1].worker_group.size() == 2
    with twins[1]:
        return found, worker(twins[0], twins[1], rank, 2, BATCHES[6:])


def copied_accelerator(model: nn.Module, optimizer: Any, rank: int, way: str) -> int:
    twin = copy.deepcopy(optimizer)
    assert twin.role == "accelerator"
    assert twin.serve(CURVED, lambda _: None) == 0
    return serve(model, optimizer)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_goes_on_as_the_base_alone(world: World, way: str) -> None:
    results = world.run(play, 3, (copied_worker, copied_accelerator), way)
    found = agreed([result["found"][0] for result in results[:2]])
    assert_same_trajectory(found, expected_until(3), rtol=1e-7)
    twins = agreed([result["found"][1] for result in results[:2]])
    assert_same_trajectory(twins, expected_until(1)[6:], rtol=1e-7)
    assert all(result["warned"] == [] for result in results)


def freeze(model: nn.Module) -> None:
    first = next(model.parameters())
    first.requires_grad_(False)
    first.grad = None


def frozen_worker(
    model: nn.Module, optimizer: Any, rank: int, where: str, sign: Path
) -> list[Tensor]:
    def change(step: int) -> None:
        if step == 6:
            freeze(model)
        while step == 2 * EPOCH and where == "everywhere" and not sign.exists():
            time.sleep(0.005)

    with optimizer:
        return worker(model, optimizer, rank, 2, before=change)


def frozen_accelerator(model: nn.Module, optimizer: Any, rank: int, where: str, sign: Path) -> None:
    if where == "workers":
        serve(model, optimizer)
        return
    with optimizer:
        for step in range(STEPS):
            if step == 6:
                freeze(model)
                sign.touch()
            optimizer.step(curvature_closure=lambda: loss_of(model, CURVED[0]))


@pytest.mark.parametrize("where", ["workers", "everywhere"])
def test_parameters_frozen_in_mid_epoch(world: World, tmp_path: Path, where: str) -> None:
    """That epoch has no final update; in the next the accelerators know of it, told or not."""
    results = world.run(play, 3, (frozen_worker, frozen_accelerator), where, tmp_path / "frozen")
    trajectory_of(results)
    for result in results[:2]:
        applied = [applied for applied, _ in result["reports"]]
        assert applied == [True, False, True]
        (line,) = result["warned"]
        assert "the parameters that train have changed" in line


def frequent(rank: int, world_size: int) -> int:
    model = CASE.model()
    optimizer = mrdho2(model, final_update="guarded", epoch_steps=1)
    half = optimizer._curvature
    listened_for = half.line.courier._shared.expected
    with optimizer:
        if optimizer.role == "accelerator":
            optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
        else:
            worker(model, optimizer, rank, 1)
            assert len(optimizer.epochs) == STEPS
        return len(listened_for)


def test_what_is_listened_for_does_not_grow(world: World) -> None:
    assert max(world.run(frequent, 2)) <= 2


def grouped(rank: int, world_size: int) -> Any:
    """The second group's rate falls to nothing at step 2."""
    model = CASE.model()
    params = list(model.parameters())
    groups = [{"params": params[:3], "lr": 0.05}, {"params": params[3:], "lr": 0.05}]
    optimizer = mrdho2(model, groups, final_update="additive", momentum=0.9)
    with optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
        found = []
        for step, batch in enumerate(BATCHES[:8]):
            if step == 2:
                optimizer.param_groups[1]["lr"] *= 0.0
            gradient(model, optimizer, batch)
            optimizer.step()
            found.append([p.detach().clone() for p in params])
        return found


def test_each_group_has_its_own_newton_scale_in_a_final_update(world: World) -> None:
    found, _ = world.run(grouped, 2)
    for before, after in itertools.pairwise(found[1:]):
        assert all(map(torch.equal, before[3:], after[3:])), "a group of lr 0 does not move"
        assert not torch.equal(before[0], after[0])


def reloaded(rank: int, world_size: int) -> Any:
    """In the middle of an epoch, into the optimizer that has saved it, a step later."""
    model = CASE.model()
    optimizer = mrdho2(model, final_update="paper", **MOMENTUM, helper_timeout=10.0)
    with optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
        found = worker(model, optimizer, 0, 1, BATCHES[:6])
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        worker(model, optimizer, 0, 1, BATCHES[6:7])
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        return found + worker(model, optimizer, 0, 1, BATCHES[6:])


def test_a_checkpoint_of_the_epoch_under_way_is_taken_back(world: World) -> None:
    found, _ = world.run(reloaded, 2)
    assert_same_trajectory(found, reference("paper", **MOMENTUM)[0], rtol=1e-7)
