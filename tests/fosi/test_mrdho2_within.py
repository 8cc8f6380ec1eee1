"""MRDHO2 whose pairs serve the steps of the next epoch, and its warm-up.

The reference has dense Hessians, keeps momentum in R^n, and knows no processes. Functions that take
(rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerated import (
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
    train,
    worker,
    write,
)
from ranks import agreed, assert_same_trajectory, vector
from scripted import MOMENTUM, play, serve, told_once, worker_part
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from second_order import SecondOrderWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pool import World

GONE, UNSOUND = "the accelerators are gone", "the eigenpairs are not finite"
WITHIN: dict[str, Any] = {"final_update": "within", **MOMENTUM}
ADAM: dict[str, Any] = {"base": torch.optim.Adam, "lr": 0.02, "betas": (0.8, 0.95)}


def pairs_at(c: Tensor, batch: Any, largest: int = 3, smallest: int = 1) -> tuple[Tensor, Tensor]:
    H = torch.autograd.functional.hessian(lambda w: loss_at(w, batch), c)
    u, Q = torch.linalg.eigh(H)
    picked = [*range(len(u) - 1, len(u) - 1 - largest, -1), *range(smallest)]
    return u[picked], Q[:, picked]


def by_the_book(
    base: Any = torch.optim.SGD,
    beta: float = 0.9,
    clip: float = 3.0,
    alpha: float = 0.1,
    warmup: int = 0,
    every: int = EPOCH,
    sound: Callable[[int], bool] = lambda epoch: True,
    **kwargs: Any,
) -> list[Tensor]:
    """Each epoch's steps by the pairs of the last one's start; none where these are not sound."""
    model = CASE.model()
    optimizer = base(model.parameters(), **kwargs)
    trajectory: list[Tensor] = []
    coming, used = None, None
    momentum: Tensor | float = 0.0
    bound, last = 1.0, math.inf
    for step, batch in enumerate(BATCHES):
        epoch, place = divmod(step - warmup, every)
        if step >= warmup and place == 0:
            used, found = coming, CURVED[epoch % len(CURVED)]
            if used is not None:
                loss = used[2]
                if last < math.inf:
                    bound = min(max(bound * (0.5 if loss > 1.1 * last else 1.5), 1.0), clip)
                last = loss
            else:
                momentum = 0.0
            c = vector(model)
            coming = (*pairs_at(c, found), float(loss_at(c, found))) if sound(epoch) else None
        gradient(model, optimizer, batch)
        if used is None:
            optimizer.step()
        else:
            u, V, _ = used
            g = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            g1 = V @ (V.T @ g)
            rest = (g - g1).split([p.numel() for p in model.parameters()])
            for p, part in zip(model.parameters(), rest, strict=True):
                p.grad = part.view(p.shape)
            before = vector(model)
            optimizer.step()
            d2 = vector(model) - before
            momentum = beta * momentum + (1.0 - beta) * g1
            rates = 1.0 / u.abs().clamp_min(0.01 * float(u.abs().max()))
            s = min(max(float(u[0].abs() / u[2].abs()), 1.0), bound)
            d1 = -alpha * V @ (rates * (V.T @ momentum))
            write(model, before + d1 + s * (d2 - V @ (V.T @ d2)))
        trajectory.append(vector(model))
    return trajectory


# Options, and what the book is told.
CHOICES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Four epochs: what was carried of the momentum once is carried again.
    ({**MOMENTUM, "epoch_steps": 3}, {**MOMENTUM, "every": 3}),
    (ADAM, {**ADAM, "beta": 0.8, "clip": 1.0}),
    ({**MOMENTUM, "warmup_steps": 3, "newton_scale": 0.3}, {**MOMENTUM, "warmup": 3, "alpha": 0.3}),
]


def chosen(rank: int, world_size: int, accelerators: int) -> list[dict[str, Any]]:
    common = {"final_update": "within", "accelerators": accelerators}
    return [train(rank, world_size, {**options, **common}) for options, _ in CHOICES]


@pytest.mark.parametrize(("world_size", "accelerators"), [(2, 1), (3, 1), (3, 2)])
def test_the_next_epochs_steps_are_those_of_dense_hessians(
    world: World, world_size: int, accelerators: int
) -> None:
    """Pairs of c are used E to 2E steps after it; until then the base steps alone, bit for bit."""
    results = world.run(chosen, world_size, accelerators)
    workers = world_size - accelerators
    for i, (options, book) in enumerate(CHOICES):
        found = [result[i] for result in results[:workers]]
        trajectory = agreed([each["trajectory"] for each in found])
        assert_same_trajectory(trajectory, by_the_book(**book), rtol=1e-7, hint=options)
        alone = {k: v for k, v in book.items() if k in ("base", "lr", "momentum", "betas")}
        base = base_alone(workers=workers, **alone)
        every, warmup = options.get("epoch_steps", EPOCH), options.get("warmup_steps", 0)
        first = every + warmup
        assert all(map(torch.equal, trajectory[:first], base))
        assert not torch.allclose(trajectory[first], base[first], rtol=1e-6), "pairs are used"
        epochs = (STEPS - warmup) // every
        for each in found:
            assert each["warned"] == []
            assert [(r.epoch, r.applied, r.reason) for r in each["epochs"]] == [
                (epoch, True, "") for epoch in range(epochs)
            ]
            assert each["curvature"].refreshes == epochs
            assert 0.0 < each["curvature"].gradient_share < 1.0
        assert all(result[i]["served"] in (epochs, epochs + 1) for result in results[workers:])


def warmed(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [train(rank, world_size, {**MOMENTUM, "warmup_steps": w}) for w in (0, 4, 100)]


def test_the_base_alone_warms_up_for_the_paper_too(world: World) -> None:
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


# Failures.


def plain_worker(model: nn.Module, optimizer: Any, rank: int, *_: Any) -> Any:
    found = worker_part(model, optimizer, rank)
    return found, optimizer._curvature.subspace is None, optimizer._curvature.helped


def spoiled_accelerator(model: nn.Module, optimizer: Any, rank: int, epochs: Sequence[int]) -> int:
    def loss_fn(batch: Any) -> Tensor:
        spoils = any(batch is CURVED[epoch] for epoch in epochs)
        return loss_of(model, batch) * (math.nan if spoils else 1.0)

    return serve(model, optimizer, loss_fn)


@pytest.mark.parametrize("epochs", [[0], [1], [0, 1]])
def test_pairs_that_are_not_finite_leave_the_next_epoch_to_the_base(
    world: World, epochs: list[int]
) -> None:
    scene = (plain_worker, spoiled_accelerator)
    results = world.run(play, 3, scene, epochs, options=WITHIN)
    found = agreed([result["found"][0] for result in results[:2]])
    expected = by_the_book(sound=lambda epoch: epoch not in epochs, **MOMENTUM)
    assert_same_trajectory(found, expected, rtol=1e-7)
    told_once(results, f"eigenpairs of epoch {epochs[0]} are not finite")
    for result in results[:2]:
        assert result["reports"] == [
            (False, UNSOUND) if epoch in epochs else (True, "") for epoch in range(3)
        ]


# Checkpoints.


SAVED_AT = (2, 6, 8)  # in the warm-up, in an epoch, at its end
LATER: dict[str, Any] = {**WITHIN, "warmup_steps": 3}


def saved(rank: int, world_size: int) -> tuple[Any, dict[int, bytes]]:
    """The trajectory, and worker 0's checkpoints; c travels along, and the pairs in use."""
    model = CASE.model()
    checkpoints: dict[int, bytes] = {}
    optimizer = mrdho2(model, **LATER)

    def save(step: int) -> None:
        if step in SAVED_AT:
            optimizer.consolidate()
            if rank == 0:
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
                checkpoints[step] = file.getvalue()

    with optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: loss_of(model, batch)), {}
        return worker(model, optimizer, rank, world_size - 1, before=save), checkpoints


def resumed(rank: int, world_size: int, checkpoints: dict[int, bytes]) -> dict[int, Any]:
    found = {}
    for step, data in checkpoints.items():
        model = CASE.model(seed=1)
        optimizer = mrdho2(model, **LATER)
        parts = torch.load(io.BytesIO(data))
        model.load_state_dict(parts[0])
        optimizer.load_state_dict(parts[1])
        with optimizer:
            if optimizer.role == "accelerator":
                optimizer.serve(CURVED, lambda batch, model=model: loss_of(model, batch))
                continue
            found[step] = worker(model, optimizer, rank, world_size - 1, BATCHES[step:])
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_continues_with_the_pairs_in_use(world: World, workers: int) -> None:
    """Invariant 28: on as many workers, and on another number."""
    whole, checkpoints = world.run(saved, workers + 1)[0]
    assert set(checkpoints) == set(SAVED_AT)
    for again in (1, 2):
        results = world.run(resumed, again + 1, checkpoints)
        for step in checkpoints:
            found = agreed([result[step] for result in results[:again]])
            assert_same_trajectory(found, whole[step:], rtol=1e-7, hint=(again, step))


def kept_by_dcp(rank: int, world_size: int, path: Any, final_update: str) -> list[Any] | None:
    """c and the sum of gradients of an epoch under way, and what a new optimizer reads of them."""
    found: list[Any] = []
    for again in (False, True):
        model = CASE.model()
        optimizer = mrdho2(model, **{**WITHIN, "final_update": final_update})
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
            epochs = optimizer._curvature
            found.append([None if t is None else t.clone() for t in (epochs.start, epochs.total)])
    return found or None


@pytest.mark.parametrize("final_update", ["within", "guarded"])
def test_a_distributed_checkpoint_tells_an_epochs_start_from_its_sum(
    world: World, tmp_path: Any, final_update: str
) -> None:
    """It is read in place: into room for both."""
    (start, total), (start_read, total_read) = world.run(
        kept_by_dcp, 2, tmp_path / "saved", final_update
    )[0]
    assert float(start.abs().max()) > 0.1
    assert torch.equal(start, start_read)
    assert final_update == "within" or torch.equal(total, total_read)


def test_without_accelerators_it_is_dho2() -> None:
    """With an interval of an epoch, whatever the final update."""
    model = CASE.model()
    with pytest.warns(SecondOrderWarning, match="as DHO2 does"):
        optimizer = mrdho2(model, curvature_closure=lambda: loss_of(model, CURVED[0]), **WITHIN)
    found = worker(model, optimizer, 0, 1)
    base = base_alone(**MOMENTUM)
    assert all(map(torch.equal, found[:EPOCH], base))
    assert not torch.allclose(found[EPOCH], base[EPOCH], rtol=1e-6)
