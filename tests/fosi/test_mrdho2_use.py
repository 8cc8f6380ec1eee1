"""MRDHO2 in loops of every kind: who leaves when, who fails, what changes, and what is not finite.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import math
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mrdho2_scripts import (
    MOMENTUM,
    assert_one_warning,
    expected_until,
    play,
    serve,
    trajectory_of,
    until,
    worker_part,
)
from mrdho2_training import (
    BATCHES,
    CASE,
    CURVED,
    EPOCH,
    STEPS,
    base_alone,
    gradient,
    loss_at,
    loss_of,
    mrdho2,
    reference,
    worker,
)
from ranks import assert_same_trajectory, replaced, vector
from torch import Tensor, nn

from second_order import RankMismatchError, SecondOrderError
from second_order.fosi.state import EPOCH_START, GRADIENT_SUM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pool import World

LOST_CONTACT = "lost contact with the accelerators"
PAIRS_NOT_FINITE = "the eigenpairs are not finite"


# Loops.


def leaves_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    return worker_part(model, optimizer, rank)


def leaves_accelerator(model: nn.Module, optimizer: Any, rank: int) -> None:
    until(optimizer, 6)
    optimizer.close()
    optimizer.close()
    with replaced(optimizer._curvature.links[0], {"wait": None}):  # does not wait
        until(optimizer, 3)
        assert optimizer.serve(CURVED, lambda batch: loss_of(model, batch)) == 0


def test_workers_continue_after_an_accelerator_exits(world: World) -> None:
    """Its last result is still used; then the base continues alone."""
    results = world.run(play, 3, (leaves_worker, leaves_accelerator))
    expected = expected_until(2, curved=CURVED[:1])
    assert_same_trajectory(trajectory_of(results), expected, rtol=1e-7)
    assert_one_warning(results, "SGD steps alone from now on")
    for result in results[:2]:
        assert result["reports"] == [(True, ""), (True, ""), (False, LOST_CONTACT)]
    assert results[2]["warned"] == []


def one_fails_worker(model: nn.Module, optimizer: Any, rank: int, *_: Any) -> list[Tensor]:
    with optimizer:
        return worker(model, optimizer, rank, 1)


def one_fails_accelerator(
    model: nn.Module, optimizer: Any, rank: int, failing: int, where: str
) -> str:
    """Outside of what the Lanczos run agrees on itself."""
    evaluations = 0

    def loss_fn(batch: Any) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        if where == "judged loss" and rank == failing and evaluations == 2:
            raise KeyError("in the judged loss")
        return loss_of(model, batch)

    def batches() -> Any:
        yield CURVED[0]
        if where == "loader" and rank == failing:
            raise KeyError("in the loader")
        yield CURVED[1]

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("in the delivery")

    wrong = {"send": fails} if where == "delivery" and rank == failing else {}
    wrongly = replaced(optimizer._curvature.links[0], wrong)
    with pytest.raises((KeyError, SecondOrderError)) as caught, optimizer, wrongly:
        optimizer.serve(batches(), loss_fn)
    return repr(caught.value)


@pytest.mark.parametrize(
    ("failing", "where"), [(1, "loader"), (2, "loader"), (2, "delivery"), (2, "judged loss")]
)
def test_one_failed_accelerator_shuts_down_the_others(
    world: World, failing: int, where: str
) -> None:
    """The rank that failed raises its own error. No rank waits for the timeout of half a minute."""
    started = time.monotonic()
    results = world.run(
        play,
        3,
        (one_fails_worker, one_fails_accelerator),
        failing,
        where,
        options={
            "helper_ranks": 2,
            "final_update": "guarded" if where == "judged loss" else "paper",
        },
    )
    assert time.monotonic() - started < 15.0
    epochs = 1 if where == "loader" else 0
    assert len(results[0]["found"]) == STEPS
    assert results[0]["reports"] == [(True, "")] * epochs + [(False, LOST_CONTACT)]
    assert_one_warning(results[:1], "SGD steps alone from now on")
    for rank in 1, 2:
        text = (
            f"KeyError('in the {where}')" if rank == failing else "another accelerator has failed"
        )
        assert text in results[rank]["found"]


# Numbers that are not finite.


def vectors_worker(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    return worker_part(model, optimizer, rank)


def vectors_accelerator(model: nn.Module, optimizer: Any, rank: int) -> list[tuple[bool, int]]:
    """For each message of pairs, whether it says that they are finite, and how many elements."""
    link = optimizer._curvature.links[0]
    sent = []
    sends = link.send

    def send(tensors: Sequence[Tensor], to: int, **note: Any) -> None:
        if "finite" in note:
            sent.append((note["finite"], sum(map(torch.numel, tensors))))
        sends(tensors, to, **note)

    with replaced(link, {"send": send}):
        assert serve(model, optimizer, lambda batch: math.nan * loss_of(model, batch)) == 3
    return sent


def test_non_finite_eigenpairs_are_not_sent(world: World) -> None:
    results = world.run(play, 3, (vectors_worker, vectors_accelerator))
    assert results[2]["found"] == [(False, 0)] * 6, "three epochs, two workers"
    assert all(map(torch.equal, trajectory_of(results), base_alone(workers=2, **MOMENTUM)))
    for result in results[:2]:
        assert result["reports"] == [(False, PAIRS_NOT_FINITE)] * 3
        (line,) = result["warned"]
        assert line == f"epoch 0 has no final update: {PAIRS_NOT_FINITE}"


# Schedulers, copies, and parameters that change.


def all_frozen(rank: int, world_size: int) -> Any:
    """No parameter trains in the second of three epochs."""
    model = CASE.model()
    with mrdho2(model, **MOMENTUM) as optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
        for step, batch in enumerate(BATCHES):
            trains = not EPOCH <= step < 2 * EPOCH
            model.requires_grad_(trains)
            optimizer.zero_grad()
            if trains:
                loss_of(model, batch).backward()
            optimizer.step()
        return [(report.applied, report.reason) for report in optimizer.epochs]


def test_an_epoch_without_trainable_parameters_has_no_final_update(world: World) -> None:
    reports, served = world.run(all_frozen, 2)
    assert [applied for applied, _ in reports] == [True, False, True]
    assert "no parameter trained" in reports[1][1]
    assert served == 2


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
def test_parameters_can_be_frozen_during_an_epoch(world: World, tmp_path: Path, where: str) -> None:
    """That epoch has no final update. In the next one, the accelerators know the new rate."""
    results = world.run(play, 3, (frozen_worker, frozen_accelerator), where, tmp_path / "frozen")
    trajectory_of(results)
    for result in results[:2]:
        applied = [applied for applied, _ in result["reports"]]
        assert applied == [True, False, True]
        (line,) = result["warned"]
        assert "the parameters that train have changed" in line


def grouped(rank: int, world_size: int) -> Any:
    """The second group has a tenth of the first one's rate and peak rate from step 2 on."""
    model = CASE.model()
    params = list(model.parameters())
    groups = [{"params": params[:3], "lr": 0.05}, {"params": params[3:], "lr": 0.05}]
    optimizer = mrdho2(model, groups, **MOMENTUM)
    with optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
        found = worker(model, optimizer, 0, 1, BATCHES[: EPOCH - 1])
        optimizer.param_groups[1]["lr"] *= 0.1
        return found + worker(model, optimizer, 0, 1, BATCHES[EPOCH - 1 : EPOCH])


def test_each_group_has_its_own_newton_scale_in_a_final_update(world: World) -> None:
    """By equation 17 with α of each group, from the same dense pairs."""
    found, _ = world.run(grouped, 2)
    model = CASE.model()
    params = list(model.parameters())
    start = vector(model)
    groups = [{"params": params[:3], "lr": 0.05}, {"params": params[3:], "lr": 0.05}]
    plain = torch.optim.SGD(groups, **MOMENTUM)
    total = torch.zeros_like(start)
    for step, batch in enumerate(BATCHES[:EPOCH]):
        if step == EPOCH - 1:
            plain.param_groups[1]["lr"] *= 0.1
        gradient(model, plain, batch)
        total += torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
        plain.step()
    H = torch.autograd.functional.hessian(lambda w: loss_at(w, CURVED[0]), start)
    u, Q = torch.linalg.eigh(H)
    picked = [*range(len(u) - 3, len(u)), 0]
    u = u[picked].abs()
    V = Q[:, picked]
    first = sum(p.numel() for p in params[:3])
    alpha = torch.cat([torch.full((first,), 0.1), torch.full((len(start) - first,), 0.01)])
    end = vector(model)
    expected = end - alpha * (V @ ((V.T @ total) / u)) - V @ (V.T @ (end - start))
    assert_same_trajectory(found[-1:], [expected], rtol=1e-7)


def momentum_of_one(rank: int, world_size: int) -> int:
    model = CASE.model()
    with mrdho2(model, momentum=1.0) as optimizer:
        if optimizer.role == "accelerator":
            return int(optimizer.serve(CURVED, lambda batch: loss_of(model, batch)))
        worker(model, optimizer, 0, 1, BATCHES[:EPOCH])
        return len(optimizer.epochs)


def test_workers_can_have_any_momentum(world: World) -> None:
    """Final updates have none. Newton steps would ignore the gradient with this one."""
    assert world.run(momentum_of_one, 2) == [1, 1]


def without_sums(state: dict[str, Any]) -> dict[str, Any]:
    """The same checkpoint, of an epoch that has no final update."""
    state = copy.deepcopy(state)
    for part in state["state"].values():
        part["curvature"]["epoch_sums"] = 0.0
        part["curvature"].pop(EPOCH_START, None)
        part["curvature"].pop(GRADIENT_SUM, None)
    return state


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
        optimizer.load_state_dict(without_sums(state))
        assert optimizer._curvature.sums is None
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        return found + worker(model, optimizer, 0, 1, BATCHES[6:])


def sums_on_one(rank: int, world_size: int) -> Any:
    """Worker 1 loads a checkpoint without sums; worker 0 keeps its own."""
    model = CASE.model()
    optimizer = mrdho2(model, **MOMENTUM, helper_timeout=10.0)
    with optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
        worker(model, optimizer, rank, 2, BATCHES[:2])
        if rank == 1:
            optimizer.load_state_dict(without_sums(optimizer.state_dict()))
        with pytest.raises(RankMismatchError, match="sum of the epoch's gradients"):
            worker(model, optimizer, rank, 2, BATCHES[2:3])
        return optimizer.training.steps


def test_workers_compare_whether_they_have_sums(world: World) -> None:
    """Only a worker with sums waits for the accelerators' answers together with the others."""
    assert world.run(sums_on_one, 3)[:2] == [2, 2]


def test_a_checkpoint_during_an_epoch_restores_its_start(world: World) -> None:
    found, _ = world.run(reloaded, 2)
    assert_same_trajectory(found, reference("paper", **MOMENTUM)[0], rtol=1e-7)
