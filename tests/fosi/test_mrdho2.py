"""MRDHO2 on ranks that live: its final updates, its base, its checkpoints, and how it ends.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mrdho2_training import (
    BATCHES,
    CASE,
    CURVED,
    EPOCH,
    STEPS,
    base_alone,
    loss_of,
    mrdho2,
    reference,
    train,
    worker,
)
from ranks import agreed, assert_same_trajectory, replaced, vector
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from second_order import EpochReport, SecondOrderWarning
from second_order.fosi import epochs as module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World

SGD = torch.optim.SGD
ADAM = torch.optim.Adam
MOMENTUM = {"momentum": 0.9, "lr": 0.05}
RAGGED = {1: [0, 9], 2: [0, 4, 9]}  # of a curvature batch, between the accelerators


FALL = 0.03  # required by "guarded" here, because batches and epochs are small


def several(rank: int, world_size: int, choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    with replaced(module, {"MIN_LOSS_FALL": FALL}):
        return [train(rank, world_size, options) for options in choices]


def workers_of(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in results if result["role"] == "worker"]


def trajectory_of(results: Sequence[dict[str, Any]]) -> Sequence[Tensor]:
    return agreed([result["trajectory"] for result in workers_of(results)])


def up_or_down(rank: int, world_size: int, sign: float) -> Any:
    """On the loss or on its negative; trajectory, and losses as they were judged."""
    model = CASE.model()
    options = {"newton_scale": 0.3, "final_update": "guarded", "maximize": sign < 0}
    with replaced(module, {"MIN_LOSS_FALL": FALL}), mrdho2(model, **options) as optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: sign * loss_of(model, batch))
        trajectory = []
        for batch in BATCHES:
            optimizer.zero_grad()
            (sign * loss_of(model, batch)).backward()
            optimizer.step()
            trajectory.append(vector(model))
        return trajectory, [(r.applied, r.loss_before, r.loss_after) for r in optimizer.epochs]


def test_maximizing_the_negative_loss_equals_minimizing_the_loss(world: World) -> None:
    (down, judged), _ = world.run(up_or_down, 2, 1.0)
    (up, judged_too), _ = world.run(up_or_down, 2, -1.0)
    assert_same_trajectory(up, down)
    assert any(applied for applied, *_ in judged)
    for found, expected in zip(judged_too, judged, strict=True):
        assert found == pytest.approx(expected)


# Final updates.


ETA = 0.01
ALPHA = 0.2
CURVATURES = torch.cat([torch.linspace(0.1, 1, 16), torch.linspace(2, 8, 4)])


def quadratic(
    rank: int, world_size: int, helper_ranks: int, choices: Sequence[dict[str, Any]]
) -> list[tuple[list[Tensor], list[EpochReport]]]:
    """The modes' amplitudes after each epoch, of ½ wᵀHw with H = Q diag(u) Qᵀ."""
    Q, _ = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64))
    H = Q @ torch.diag(CURVATURES.double()) @ Q.T
    found = []
    for options in choices:
        w = nn.Parameter(Q @ torch.ones(20, dtype=torch.float64))
        choice = {"lr": ETA, "num_largest": 4, "num_smallest": 1, "epoch_steps": 5, **options}
        optimizer = mrdho2(nn.Module(), [w], helper_ranks=helper_ranks, **choice)
        amplitudes = []
        with optimizer:
            if optimizer.role == "accelerator":
                optimizer.serve([0], lambda _, w=w: 0.5 * w @ H @ w)
                continue
            for _ in range(15):
                optimizer.zero_grad()
                (0.5 * w @ H @ w).backward()
                optimizer.step()
                amplitudes.append(Q.T @ w.detach())
        found.append((amplitudes[4::5], list(optimizer.epochs)))
    return found


@pytest.mark.parametrize(("world_size", "helper_ranks"), [(2, 1), (4, 2)])
def test_equation_17_on_a_quadratic_equals_its_closed_form(
    world: World, world_size: int, helper_ranks: int
) -> None:
    """Invariant 27; and the guard lets pass what lowers the loss, and nothing else."""
    kinds = ["paper", "guarded", "guarded"]
    alphas = [ALPHA, ALPHA, 1.0]
    choices = [
        {"final_update": kind, "newton_scale": alpha}
        for kind, alpha in zip(kinds, alphas, strict=True)
    ]
    results = world.run(quadratic, world_size, helper_ranks, choices)
    u = CURVATURES.double()
    inside = [0, 16, 17, 18, 19]
    alone = (1 - ETA * u) ** 5
    phi = (1 - alone) / (ETA * u)
    for i, (kind, alpha) in enumerate(zip(kinds, alphas, strict=True)):
        per_worker = [result[i] for result in results[: world_size - helper_ranks]]
        updated = alone.clone()
        updated[inside] = 1 - alpha * phi[inside]
        expected = torch.ones(20, dtype=torch.float64)
        updates = set()
        for epoch, amplitudes in enumerate(agreed([each for each, _ in per_worker])):
            before, after = (0.5 * (u * (expected * f) ** 2).sum() for f in (alone, updated))
            made = kind != "guarded" or bool(after <= 0.5 * before)
            updates.add(made)
            expected = expected * (updated if made else alone)
            torch.testing.assert_close(amplitudes, expected, rtol=1e-9, atol=1e-12)
            for _, epochs in per_worker:
                assert len(epochs) == 3
                report = epochs[epoch]
                assert (report.epoch, report.products, report.applied) == (epoch, 20, made)
                if kind != "guarded":
                    assert (report.loss_before, report.loss_after) == (None, None)
                    continue
                assert report.loss_before == pytest.approx(before.item())
                assert report.loss_after == pytest.approx(after.item())
                assert made or "would not have fallen by 50%" in report.reason
                assert made == (report.reason == "")
        assert kind != "guarded" or updates == ({True, False} if alpha == ALPHA else {False})


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (1.0, 0.5, ""),
        (1.0, 0.51, "would not have fallen by 50%"),
        (1.0, 1.01, "would not have fallen by 50%"),
        (-1.0, -1.5, ""),
        (-1.0, -1.49, "would not have fallen by 50%"),
        (0.0, -1e-9, ""),
        (0.0, 0.0, "would not have fallen by 50%"),
        (1.0, math.nan, "is not finite, without the update or with it"),
        (math.inf, 1.0, "is not finite, without the update or with it"),
    ],
)
def test_a_final_update_must_reach_half_of_the_predicted_decrease(
    before: float, after: float, reason: str
) -> None:
    found = module.rejection_reason(before, after)
    assert found == (f"the loss of the accelerators' batches {reason}" if reason else "")


CHOICES: list[dict[str, Any]] = [
    {"final_update": "paper", **MOMENTUM},
    {"final_update": "paper", "base": ADAM, "lr": 0.02},
    {"final_update": "guarded", "newton_scale": 0.3},
]


@pytest.mark.works("plain", "MRDHO2")
@pytest.mark.parametrize(("world_size", "helper_ranks"), [(2, 1), (3, 1)])
def test_final_updates_equal_those_of_dense_hessians(
    world: World, world_size: int, helper_ranks: int
) -> None:
    """The workers' mean gradient is that of the whole batch: accelerators add nothing to it."""
    results = world.run(several, world_size, CHOICES)
    for i, options in enumerate(CHOICES):
        of_case = [result[i] for result in results]
        base = {k: v for k, v in options.items() if k not in ("final_update", "newton_scale")}
        alpha = options.get("newton_scale", 0.1)
        expected, losses = reference(options["final_update"], alpha=alpha, fall=FALL, **base)
        assert_same_trajectory(trajectory_of(of_case), expected, rtol=1e-7, hint=options)
        assert [r["role"] for r in of_case] == ["worker"] * (world_size - 1) + ["accelerator"]
        assert of_case[-1]["served"] == STEPS // EPOCH
        assert not any(result["warned"] for result in of_case)
        for result in workers_of(of_case):
            found = result["epochs"]
            assert [report.epoch for report in found] == [0, 1, 2]
            assert all(report.waited >= 0 and 4 <= report.products <= 111 for report in found)
            if options["final_update"] != "guarded":
                assert all(report.applied and report.reason == "" for report in found)
                continue
            assert [report.applied for report in found] == [False, True, False]
            for report, (before, after) in zip(found, losses, strict=True):
                assert report.loss_before == pytest.approx(before)
                assert report.loss_after == pytest.approx(after)
            report = result["curvature"]
            assert len(report.eigenvalues) == len(report.residuals) == 4
            assert (report.refreshes, report.failures, report.step) == (3, 0, STEPS - EPOCH)
            assert report.products == found[-1].products
            assert report.total_products == sum(each.products for each in found)


def ragged(rank: int, world_size: int) -> tuple[str, Any, int]:
    """Two accelerators with unequal parts of a batch, and DistributedDataParallel for workers."""
    model = CASE.model()
    optimizer = mrdho2(model, helper_ranks=2, gradient_averaging=False)
    with warnings.catch_warnings(), optimizer:
        warnings.simplefilter("error", SecondOrderWarning)
        if optimizer.role == "accelerator":
            a, b = RAGGED[2][rank - (world_size - 2) :][:2]

            def loss_fn(batch: Any) -> tuple[Tensor, int]:
                x, y = batch
                return loss_of(model, (x[a:b], y[a:b])), b - a

            return optimizer.role, optimizer.serve(CURVED, loss_fn), b - a
        wrapped = DistributedDataParallel(model, process_group=optimizer.worker_group)
        found = worker(model, optimizer, rank, world_size - 2, wrapped=wrapped)
        return optimizer.role, found, wrapped.process_group.size()


@pytest.mark.works("DDP", "MRDHO2")
@pytest.mark.parametrize("world_size", [3, 4])
def test_accelerators_weight_their_examples_and_ddp_spans_the_workers(
    world: World, world_size: int
) -> None:
    """One worker too: its group is one of its own, not the default one."""
    results = world.run(ragged, world_size)
    workers = results[:-2]
    assert all(role == "worker" and size == world_size - 2 for role, _, size in workers)
    assert [served for _, served, _ in results[-2:]] == [3, 3]
    found = agreed([trajectory for _, trajectory, _ in workers])
    assert_same_trajectory(found, reference("paper")[0], rtol=1e-7)


def test_weights_are_not_rounded_to_the_vectors_dtype(world: World) -> None:
    narrow = {"lanczos_dtype": torch.float32, "lanczos_iterations": 20, "lanczos_tol": 1e-6}
    (found,) = world.run(several, 2, [narrow])[0]
    last = found["trajectory"][-1]
    assert all(report.applied for report in found["epochs"])
    assert (last.float().double() != last).double().mean() > 0.9
    torch.testing.assert_close(last, reference("paper")[0][-1], rtol=1e-3, atol=1e-3)


# Nothing but the base.


BASES = [{"base": SGD, "momentum": 0.9}, {"base": ADAM, "lr": 0.02}]


def test_without_eigenpairs_training_equals_the_base_bit_for_bit(world: World) -> None:
    """Then all ranks are workers, because there is nothing to help with."""
    nothing = {"num_largest": 0, "num_smallest": 0}
    results = world.run(several, 2, [{**nothing, **options} for options in BASES])
    for i, options in enumerate(BASES):
        for workers in 1, 2:
            found = (
                [train(0, 1, {**nothing, **options})]
                if workers == 1
                else [result[i] for result in results]
            )
            assert [result["role"] for result in found] == ["worker"] * workers
            expected = base_alone(workers=workers, **options)
            assert all(map(torch.equal, trajectory_of(found), expected))
            assert all(list(result["epochs"]) == [] for result in found)


def warmed(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [train(rank, world_size, {**MOMENTUM, "warmup_steps": w}) for w in (0, 4, 100)]


def test_the_base_steps_alone_during_warm_up(world: World) -> None:
    """An epoch of it makes c the point where the base has arrived; 100 steps are all there are."""
    at_once, later, never = ([r[i] for r in world.run(warmed, 2)] for i in range(3))
    assert_same_trajectory(at_once[0]["trajectory"], reference("paper", **MOMENTUM)[0], rtol=1e-7)
    base = base_alone(**MOMENTUM)
    assert all(map(torch.equal, never[0]["trajectory"], base))
    assert (never[0]["epochs"], never[1]["served"]) == ([], 0)
    found = later[0]["trajectory"]
    assert all(map(torch.equal, found[:7], base))
    assert not torch.allclose(found[7], base[7], rtol=1e-6), "the first final update"
    assert [report.epoch for report in later[0]["epochs"]] == [0, 1]


def test_without_accelerators_mrdho2_equals_dho2() -> None:
    """With an interval of an epoch."""
    model = CASE.model()
    closure = lambda: loss_of(model, CURVED[0])  # noqa: E731
    with pytest.warns(SecondOrderWarning, match="as DHO2 does"):
        optimizer = mrdho2(model, curvature_closure=closure, **MOMENTUM)
    found = worker(model, optimizer, 0, 1)
    base = base_alone(**MOMENTUM)
    assert all(map(torch.equal, found[:EPOCH], base))
    assert not torch.allclose(found[EPOCH], base[EPOCH], rtol=1e-6)


# Checkpoints.


def save_by_dcp(rank: int, world_size: int, path: Any) -> list[Any] | None:
    """c and the sum of gradients of an epoch under way, and what a new optimizer reads of them."""
    found: list[Any] = []
    for again in (False, True):
        model = CASE.model()
        optimizer = mrdho2(model, **MOMENTUM)
        with optimizer:
            if optimizer.role == "accelerator":
                optimizer.serve(CURVED, lambda batch, model=model: loss_of(model, batch))
                continue
            if not again:
                worker(model, optimizer, rank, 1, BATCHES[: EPOCH + 2])
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            if again:
                dcp.load(state, checkpoint_id=path, no_dist=True)
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
            else:
                dcp.save(state, checkpoint_id=path, no_dist=True)
            sums = optimizer._curvature.sums
            found.append([sums.start.clone(), sums.gradient_sum.clone()])
    return found or None


def test_a_distributed_checkpoint_contains_the_epochs_start_and_sum(
    world: World, tmp_path: Any
) -> None:
    (start, total), read = world.run(save_by_dcp, 2, tmp_path / "saved")[0]
    assert float(start.abs().max()) > 0.1
    assert all(map(torch.equal, (start, total), read))


def sums_of_any(rank: int, world_size: int, path: Any) -> float:
    """Read what a process without accelerators has saved."""
    model = CASE.model()
    with mrdho2(model, **MOMENTUM) as optimizer:
        if optimizer.role == "accelerator":
            return float(optimizer.serve(CURVED, lambda batch: loss_of(model, batch)))
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert optimizer._curvature.sums is None
        worker(model, optimizer, 0, 1, BATCHES[:EPOCH])
        return float(optimizer.epochs[-1].applied)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_a_distributed_checkpoint_loads_with_accelerators_and_without(
    world: World, tmp_path: Any
) -> None:
    model = CASE.model()
    closure = partial(loss_of, model, CURVED[0])
    optimizer = mrdho2(model, curvature_closure=closure, **MOMENTUM)
    worker(model, optimizer, 0, 1, BATCHES[: EPOCH + 1])
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "alone", no_dist=True)
    assert world.run(sums_of_any, 2, tmp_path / "alone") == [1.0, 1.0]

    world.run(save_by_dcp, 2, tmp_path / "with accelerators")
    model.zero_grad()
    optimizer = mrdho2(model, curvature_closure=closure, **MOMENTUM)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "with accelerators", no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.training.steps == EPOCH + 2


RESUMED = {"final_update": "paper", "newton_scale": 0.3, **MOMENTUM}
SAVED_AT = {"in the middle of an epoch": 6, "at its end": 8}


def saved(rank: int, world_size: int) -> tuple[str, Any, dict[int, bytes]]:
    """The trajectory, and the checkpoints of worker 0 from which it resumes."""
    model = CASE.model()
    checkpoints: dict[int, bytes] = {}
    optimizer = mrdho2(model, **RESUMED)

    def save(step: int) -> None:
        if step in SAVED_AT.values() and rank == 0:
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), file)
            checkpoints[step] = file.getvalue()

    with optimizer:
        if optimizer.role == "accelerator":
            served = optimizer.serve(CURVED[:2], lambda batch: loss_of(model, batch))
            return optimizer.role, served, {}
        trajectory = worker(model, optimizer, rank, world_size - 1, before=save)
        return optimizer.role, trajectory, checkpoints


def resumed(
    rank: int, world_size: int, helper_ranks: int, checkpoints: dict[int, bytes], everywhere: bool
) -> dict[int, Any]:
    """Every checkpoint carried on with; accelerators load it too, and serve, or do neither."""
    found = {}
    for step, data in checkpoints.items():
        model = CASE.model(seed=1)
        optimizer = mrdho2(model, helper_ranks=helper_ranks, **RESUMED)
        if everywhere or optimizer.role == "worker":
            parts = torch.load(io.BytesIO(data))
            model.load_state_dict(parts[0])
            optimizer.load_state_dict(parts[1])
        with optimizer:
            if optimizer.role == "accelerator":
                if everywhere:
                    optimizer.serve(CURVED[:2], lambda batch, model=model: loss_of(model, batch))
                    continue
                for _ in BATCHES[step:]:  # the usual loop
                    optimizer.step(curvature_closure=partial(loss_of, model, CURVED[0]))
                continue
            workers = world_size - helper_ranks
            trajectory = worker(model, optimizer, rank, workers, BATCHES[step:])
            found[step] = trajectory, [(each.epoch, each.applied) for each in optimizer.epochs]
    return found


def test_a_checkpoint_resumes_on_any_number_of_workers_and_accelerators(world: World) -> None:
    """Invariant 28; in an epoch, c and the sum of its gradients travel along.

    Accelerators take the batches that they would have taken.
    """
    results = world.run(saved, 2)
    _, whole, checkpoints = results[0]
    assert set(checkpoints) == set(SAVED_AT.values())
    for world_size, helper_ranks, everywhere in (2, 1, True), (3, 1, True), (3, 2, False):
        found = world.run(resumed, world_size, helper_ranks, checkpoints, everywhere)
        for step in checkpoints:
            workers = [result[step] for result in found[: world_size - helper_ranks]]
            trajectory = agreed([each for each, _ in workers])
            hint = (world_size, helper_ranks, step)
            if everywhere:  # batches are not those of `saved` otherwise
                assert_same_trajectory(trajectory, whole[step:], rtol=1e-7, hint=hint)
            epochs = [1, 2] if step == 6 else [2]
            assert all(numbers == [(k, True) for k in epochs] for _, numbers in workers)


def in_parts(
    rank: int, world_size: int, cut: int, frozen_at: int, closed: bool
) -> tuple[list[Tensor], list[tuple[int, bool]]]:
    """A run of two scripts; the first one saves at step `cut`, before or after it closes."""
    model = CASE.model()
    first = next(model.parameters())
    trajectory: list[Tensor] = []
    reports: list[tuple[int, bool]] = []
    state: Any = None

    for start, stop in ((0, cut), (cut, STEPS)):
        first.requires_grad_(True)
        optimizer = mrdho2(model, **RESUMED)
        if optimizer.role == "accelerator":
            with optimizer:
                optimizer.serve(CURVED, partial(loss_of, model))
            continue

        def change(step: int, start: int = start) -> None:
            if start + step >= frozen_at:
                first.requires_grad_(False)
                first.grad = None

        if state is not None:
            change(0)
            optimizer.load_state_dict(state)
        with optimizer:
            trajectory += worker(model, optimizer, 0, 1, BATCHES[start:stop], before=change)
            state = copy.deepcopy(optimizer.state_dict())
        if closed:
            state = copy.deepcopy(optimizer.state_dict())
        reports += [(report.epoch, report.applied) for report in optimizer.epochs]
    return trajectory, reports


@pytest.mark.filterwarnings("ignore:the parameters that train have changed")
@pytest.mark.parametrize(
    ("cut", "frozen_at", "closed"), [(6, STEPS, False), (6, STEPS, True), (7, 5, False)]
)
def test_a_run_of_two_scripts_makes_the_final_updates_of_one(
    world: World, cut: int, frozen_at: int, closed: bool
) -> None:
    """The first script ends in the middle of an epoch; parameters may have been frozen in it."""
    whole, reports = world.run(in_parts, 2, STEPS, frozen_at, False)[0]
    assert reports == [(0, True), (1, frozen_at == STEPS), (2, True)]
    found = world.run(in_parts, 2, cut, frozen_at, closed)[0]
    assert found[1] == reports
    assert_same_trajectory(found[0], whole, rtol=1e-7)


def stepped_after_close(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Two steps of an epoch, then two without accelerators, saved, and continued with them."""
    model = CASE.model()
    optimizer = mrdho2(model, **RESUMED)
    for start, stop in ((0, 4), (4, EPOCH + 6)):
        if start:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = mrdho2(model, **RESUMED)
            if optimizer.role == "worker":
                optimizer.load_state_dict(state)
        with optimizer:
            if optimizer.role == "accelerator":
                optimizer.serve(CURVED, partial(loss_of, model))
                continue
            worker(model, optimizer, 0, 1, BATCHES[start : start + 2])
            if start == 0:
                optimizer.close()
            worker(model, optimizer, 0, 1, BATCHES[start + 2 : stop])
    return [(report.epoch, report.applied) for report in optimizer.epochs]


def test_an_epoch_with_steps_after_close_has_no_final_update(world: World) -> None:
    assert world.run(stepped_after_close, 2)[0] == [(0, False), (1, True)]
