"""DistKFAC with stats workers: which statistics arrive when, and which rank they come from."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from distkfac_training import BATCHES, CASE, LAYERS, LONG, Delayed, distkfac
from optimizer_cases import assert_same_factors
from ranks import agreed, assert_same_trajectory, go, vector
from stats_worker_training import (
    SYNCHRONOUS,
    assert_one_warning,
    ends_stats,
    everywhere,
    factors_here,
    loss_of,
    own_batch,
    owned_by,
    owned_here,
    play,
    quiet,
    refusal,
    roles_of,
    train_on,
    until_all_come,
    until_fed,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order.kronecker.factors import layer_mean_curvature

if TYPE_CHECKING:
    from pool import World
    from reference import Batch


NEVER = 10**9


def watched_worker(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Steps until three messages of each stats worker have been adopted."""
    messages: list[tuple[int, int]] = []  # by whom, and at which snapshot

    def receive(link: Any, original: Any) -> Any:
        message = original()
        if message is not None:
            messages.append((link.peer, message.note["snapshots"] - 1))
        return message

    links = optimizer._curvature.stats_workers.links
    for link in links:
        link.receive = partial(receive, link, link.receive)
    peers = [link.peer for link in links]
    trajectory: list[Tensor] = [vector(model)]
    end = time.monotonic() + LONG
    with optimizer:
        while everywhere(optimizer, min(Counter(m[0] for m in messages)[p] for p in peers)) < 3:
            assert time.monotonic() < end
            trajectory += train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        assert all(len(link._incoming) <= 1 for link in links), "statistics pile up"
        rank = optimizer._training.world.rank
        owned = [block.name for block, owner in owned_by(optimizer) if owner == rank]
        found = factors_here(optimizer)
        assert sorted(found) == sorted(owned)
    return {"messages": messages, "trajectory": trajectory, "factors": found}


def watched_stats(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Which batches it had, at which points."""
    index = optimizer._training.world.rank
    points: list[tuple[int, Tensor]] = []

    def loss(number: int) -> tuple[Tensor, str]:
        points.append((number, vector(model)))
        return loss_of(model, BATCHES[number]), "ignored"

    with optimizer:
        sent = optimizer.serve([1 + index, 3 + index, 5 + index], loss)
    assert sent in (len(points), len(points) - 1)
    return {"points": points}


@pytest.mark.parametrize(("world_size", "helpers"), [(2, 1), (4, 2)])
def test_stats_workers_compute_statistics_of_their_batches_at_the_received_weights(
    world: World, world_size: int, helpers: int
) -> None:
    """The running averages are, message for message, what a dense reference makes of them."""
    options = {"stats_workers": helpers, "factor_update_steps": NEVER, "factor_decay": 0.8}
    results = world.run(
        play, world_size, (watched_worker, watched_stats), options, timeout=2 * LONG
    )
    assert quiet(results)
    workers, stats = roles_of(results)
    assert (len(workers), len(stats)) == (world_size - helpers, helpers)
    trajectory = agreed([worker["trajectory"] for worker in workers])
    for helper in stats:
        numbers = [number for number, _ in helper["points"]]
        assert numbers == [numbers[i % 3] for i in range(len(numbers))], "batches repeat"
        steps = [
            next(i for i, w in enumerate(trajectory) if torch.equal(w, point))
            for _, point in helper["points"][:-1]
        ]
        assert steps == sorted(steps), "snapshots become newer"
        assert len(set(steps)) > 1
    layers: list[str] = []
    for worker in workers:
        model = CASE.model()
        reference = Delayed(model, factor_decay=0.8)
        reference.update_factors(BATCHES[0])  # of its own passes, at step 0
        for peer, index in worker["messages"]:
            number, point = stats[peer - len(workers)]["points"][index]
            nn.utils.vector_to_parameters(point, model.parameters())
            reference.update_factors(BATCHES[number])
        expected = reference.factors()
        assert_same_factors(
            worker["factors"], {name: expected[name] for name in worker["factors"]}, rtol=1e-8
        )
        layers += worker["factors"]
    assert sorted(layers) == list(LAYERS), "each layer has one owner"


def held_worker(model: nn.Module, optimizer: Any, sign: Path, wrap: bool) -> Any:
    """Statistics come from the worker's own passes until the helper continues."""
    wrapped = (
        DistributedDataParallel(model, process_group=optimizer.worker_group) if wrap else model
    )
    with optimizer:
        found = train_on(wrapped, optimizer, BATCHES)
        assert optimizer._curvature.stats_workers.own_passes
        optimizer._training.world.group and everywhere(optimizer, 0.0)
        sign.touch()
        until_fed(wrapped, optimizer)
        optimizer.zero_grad()
        loss_of(wrapped, own_batch(optimizer, BATCHES[0])).backward()
        captured = any(not b.staged.empty for b in optimizer._curvature.layers.blocks)
        optimizer.step()
        train_on(wrapped, optimizer, BATCHES[:2])
    return found, captured


def held_stats(model: nn.Module, optimizer: Any, sign: Path, wrap: bool) -> int:
    def loss(batch: Batch) -> Tensor:
        end = time.monotonic() + LONG
        while not sign.exists():
            assert time.monotonic() < end
            time.sleep(0.005)
        return loss_of(model, batch)

    with optimizer:
        return optimizer.serve(BATCHES, loss)


@pytest.mark.parametrize(("world_size", "helpers", "wrap"), [(2, 1, False), (4, 2, True)])
def test_workers_do_not_wait_for_stats_workers(
    world: World, tmp_path: Path, world_size: int, helpers: int, wrap: bool
) -> None:
    """They capture their own statistics until messages arrive, and none afterwards."""
    averaging = {"gradient_averaging": False} if wrap else {}
    options = {**SYNCHRONOUS, "stats_workers": helpers, **averaging}
    results = world.run(
        play,
        world_size,
        (held_worker, held_stats),
        options,
        tmp_path / "sign",
        wrap,
        timeout=2 * LONG,
    )
    assert quiet(results)
    workers, _ = roles_of(results)
    assert len(workers) == world_size - helpers
    model = CASE.model()
    with distkfac(model, **SYNCHRONOUS) as optimizer:
        expected = go(model, optimizer, CASE, BATCHES)
    assert_same_trajectory(agreed([found for found, _ in workers]), expected)
    assert not any(captured for _, captured in workers)


def loop_worker(model: nn.Module, optimizer: Any, how: str) -> Any:
    trajectory: list[Tensor] = []
    with optimizer:
        for epoch in range(2):
            trajectory += train_on(model, optimizer, BATCHES)
            loop_end(model, optimizer, how, epoch)
    return trajectory


def loop_stats(model: nn.Module, optimizer: Any, how: str) -> int:
    """The worker's loop on a stats worker."""
    with optimizer:
        for epoch in range(2):
            for batch in BATCHES:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            loop_end(model, optimizer, how, epoch)
    return optimizer._training.world.rank


def loop_end(model: nn.Module, optimizer: Any, how: str, epoch: int) -> None:
    """What every rank does after an epoch."""
    if how == "consolidate":
        optimizer.consolidate(to=0)
        if dist.get_rank() == 0:
            assert "A" in optimizer.state_dict()["state"][0]["curvature"]
    elif how == "freeze":
        model[2].requires_grad_(epoch == 1)


@pytest.mark.parametrize(
    ("world_size", "helpers", "how"), [(2, 1, "freeze"), (5, 2, "consolidate"), (5, 2, "freeze")]
)
def test_stats_workers_can_run_the_usual_training_loop(
    world: World, world_size: int, helpers: int, how: str
) -> None:
    options = {"stats_workers": helpers}
    results = world.run(play, world_size, (loop_worker, loop_stats), options, how, timeout=LONG)
    assert quiet(results)
    found = agreed(roles_of(results)[0])
    assert len(found) == 2 * len(BATCHES)


def added_worker(model: nn.Module, optimizer: Any, directory: Path, when: str) -> Any:
    """A layer joins the optimizer; until more statistics of all have come, before and after."""
    with optimizer:
        found = until_all_come(model, optimizer)
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.02})
        found += until_all_come(model, optimizer)
        (directory / "fed").touch()
        end = time.monotonic() + LONG
        while not everywhere(optimizer, when == "never" or (directory / "added").exists()):
            assert time.monotonic() < end
            found += train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        found += until_all_come(model, optimizer)
        found += until_all_come(model, optimizer)
        assert set(optimizer.staleness) == set(LAYERS)
        return found, [block.name for block in owned_here(optimizer)]


def added_stats(model: nn.Module, optimizer: Any, directory: Path, when: str) -> int:
    """It serves and adds nothing, or runs the usual loop and adds the layer when it gets there."""
    if when == "never":
        return ends_stats(model, optimizer, "")
    batches = itertools.cycle(BATCHES)
    with optimizer:
        while not optimizer._curvature.workers_closed:
            there = when == "sooner" or (directory / "fed").exists()
            if there and not (directory / "added").exists():
                optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.02})
                (directory / "added").touch()
            optimizer.zero_grad()
            loss_of(model, next(batches)).backward()
            optimizer.step()
    return len(optimizer.param_groups)


@pytest.mark.parametrize(
    ("when", "every"), [("never", 1), ("sooner", NEVER), ("later", 1), ("later", NEVER)]
)
def test_a_stats_worker_follows_added_parameter_groups(
    world: World, tmp_path: Path, when: str, every: int
) -> None:
    """Statistics of the new layer come, whenever the stats worker adds it, and if it never does."""
    options = {"layers": LAYERS[:2], "factor_update_steps": every}
    results = world.run(
        play, 3, (added_worker, added_stats), options, tmp_path, when, timeout=4 * LONG
    )
    assert quiet(results)
    workers, _ = roles_of(results)
    agreed([found for found, _ in workers])
    assert sorted(name for _, owned in workers for name in owned) == list(LAYERS)


def outgrown_worker(model: nn.Module, optimizer: Any, how: str) -> None:
    """The model grows by a layer that the stats worker lacks."""
    with optimizer:
        until_fed(model, optimizer)
        model.append(nn.Linear(3, 3).double())
        optimizer.add_param_group({"params": list(model[-1].parameters())})
        fails_worker(model, optimizer, how)


def outgrown_stats(model: nn.Module, optimizer: Any, how: str) -> str:
    return refusal(lambda: ends_stats(model, optimizer, how))


def test_a_stats_worker_raises_if_the_workers_model_grows(world: World) -> None:
    """Workers continue."""
    results = world.run(play, 2, (outgrown_worker, outgrown_stats), {}, "", timeout=2 * LONG)
    _, (helper,) = roles_of(results)
    assert helper.startswith("SecondOrderError: the workers' model has 8 parameters")
    assert helper.endswith("build and change the same model on every rank")
    assert_one_warning(results, "lost contact with", "from the training passes again")


class OutOfPaperError(Exception):
    pass


def frozen_worker(model: nn.Module, optimizer: Any) -> tuple[int, Tensor]:
    """Everything is frozen for some steps, and trains again."""
    until_fed(model, optimizer)
    (link,) = optimizer._curvature.stats_workers.links
    before = vector(model)
    fetched = link._num_fetched
    model.requires_grad_(False)
    end = time.monotonic() + LONG
    while link._num_fetched < fetched + 3:
        assert time.monotonic() < end, "the stats worker has ended"
        optimizer.zero_grad()
        optimizer.step()
        time.sleep(0.002)
    assert torch.equal(vector(model), before)
    model.requires_grad_(True)
    until_fed(model, optimizer)
    active = len(optimizer._curvature.stats_workers.links)
    optimizer.close()
    return active, vector(model)


def frozen_stats(model: nn.Module, optimizer: Any) -> int:
    return ends_stats(model, optimizer, "")


def test_a_stats_worker_idles_while_all_layers_are_frozen(world: World) -> None:
    results = world.run(play, 2, (frozen_worker, frozen_stats), {}, timeout=2 * LONG)
    ((active, weights),), (served,) = roles_of(results)
    assert active == 1
    assert weights.isfinite().all()
    assert served > 3
    assert quiet(results)


def reloads_worker(model: nn.Module, optimizer: Any) -> int:
    """Worker 1 loads a checkpoint twice, the other once."""
    until_fed(model, optimizer)
    optimizer.consolidate(to=None)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(1 + optimizer._training.world.rank):
        optimizer.load_state_dict(state)
    until_fed(model, optimizer)
    optimizer.close()
    return int(optimizer._curvature.stats_workers.plan_version)


def reloads_stats(model: nn.Module, optimizer: Any) -> int:
    return ends_stats(model, optimizer, "")


def test_one_worker_may_load_more_often_than_another(world: World) -> None:
    scene = (reloads_worker, reloads_stats)
    results = world.run(play, 3, scene, {}, timeout=2 * LONG)
    versions, _ = roles_of(results)
    assert versions[0] == versions[1]


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


@pytest.mark.parametrize(("world_size", "how"), [(2, "exception"), (3, "close")])
def test_serve_returns_when_all_workers_have_exited(
    world: World, world_size: int, how: str
) -> None:
    results = world.run(play, world_size, (ends_worker, ends_stats), {}, how, timeout=LONG)
    assert quiet(results)
    assert roles_of(results)[1][0] >= 1


def fails_worker(model: nn.Module, optimizer: Any, how: str) -> Any:
    """The worker continues after the helper is gone, and its own passes count again."""
    with optimizer:
        end = time.monotonic() + LONG
        while optimizer._curvature.stats_workers.links:
            assert time.monotonic() < end, "the loss is not noticed"
            train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        assert optimizer._curvature.stats_workers.own_passes
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

    if how == "closes":
        for batch in BATCHES[:3]:
            loss_of(model, batch).backward()
            optimizer.step()
        optimizer.close()
        return "closed"
    try:
        with optimizer:
            optimizer.serve(iter(BATCHES[:3]) if how == "ends" else BATCHES, loss)
    except (OutOfPaperError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("world_size", "how", "error_text"),
    [
        (3, "raises", "OutOfPaperError: in the loss"),
        (2, "ends", "ValueError: batches is empty, or an iterator that has ended; give a loader"),
        (3, "closes", "closed"),
    ],
)
def test_after_a_stats_worker_exits_workers_capture_their_own_statistics(
    world: World, world_size: int, how: str, error_text: str
) -> None:
    """The stats worker raises its exception, and each worker warns once."""
    results = world.run(play, world_size, (fails_worker, fails_stats), {}, how, timeout=LONG)
    workers, (helper,) = roles_of(results)
    assert helper == error_text
    agreed(workers)
    name = f"stats worker {world_size - 1}"
    assert_one_warning(results, f"lost contact with {name}", "from the training passes again")


def is_solved_everywhere(optimizer: Any, name: str) -> bool:
    """Whether a layer has an inverse on all workers; they agree."""
    (block,) = [block for block in optimizer._curvature.layers.blocks if block.name == name]
    solved = everywhere(optimizer, float(block.solved))
    assert solved == float(block.solved)
    return bool(solved)


def unverified_worker(model: Any, optimizer: Any, patched: str, sign: Path) -> list[Tensor]:
    """Layer 2 falls back when the stats worker fails to verify it, and recovers afterwards."""
    plain = model[2].forward
    if patched == "everywhere":
        model[2].forward = lambda x: 3 * plain(x)
    with optimizer:
        found = until_fed(model, optimizer)
        end = time.monotonic() + LONG
        while is_solved_everywhere(optimizer, "2"):
            assert time.monotonic() < end, "the layer does not fall back"
            found += train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        sign.touch()
        vars(model[2]).pop("forward", None)
        end = time.monotonic() + LONG
        while not is_solved_everywhere(optimizer, "2"):
            assert time.monotonic() < end, "the layer does not recover"
            found += train_on(model, optimizer, BATCHES[:1])
            time.sleep(0.002)
        found += train_on(model, optimizer, BATCHES)
        rows = {row.name: row.status for row in optimizer.summary().rows}
        assert rows == dict.fromkeys(LAYERS, "preconditioned")
    return found


def unverified_stats(model: Any, optimizer: Any, patched: str, sign: Path) -> int:
    plain = model[2].forward
    model[2].forward = lambda x: 3 * plain(x)

    def loss(batch: Batch) -> Tensor:
        if sign.exists():
            vars(model[2]).pop("forward", None)
        return loss_of(model, batch)

    with optimizer:
        return optimizer.serve(BATCHES, loss)


@pytest.mark.parametrize("options", [{}, SYNCHRONOUS], ids=["threads", "synchronous"])
@pytest.mark.parametrize("patched", ["stats", "everywhere"])
def test_a_layer_that_a_stats_worker_cannot_verify_falls_back_on_all_workers(
    world: World, tmp_path: Path, patched: str, options: dict[str, Any]
) -> None:
    """Until it passes, and with one warning."""
    results = world.run(
        play,
        3,
        (unverified_worker, unverified_stats),
        options,
        patched,
        tmp_path / "sign",
        timeout=4 * LONG,
    )
    agreed(roles_of(results)[0])
    assert_one_warning(results, "'2': the inputs and output gradients of its calls")


def curvature_worker(model: nn.Module, optimizer: Any) -> tuple[float, list[float]]:
    """The mean curvature of all layers after a refresh, and that of the layers owned here."""
    with optimizer:
        until_fed(model, optimizer)
        train_on(model, optimizer, BATCHES[:3])
        found = optimizer._curvature.mean_curvature
        owned = [
            float(layer_mean_curvature(block.factors.means)) for block in owned_here(optimizer)
        ]
        return found, owned


def curvature_stats(model: nn.Module, optimizer: Any) -> int:
    with optimizer:
        return optimizer.serve(BATCHES[1:], lambda batch: 2.0 * loss_of(model, batch))


def test_the_mean_curvature_comes_from_the_stats_workers_statistics(world: World) -> None:
    """A stats worker sends the statistics of a layer to its owner alone, which reports them."""
    options = {"max_staleness": 0, "relative_damping": True, "damping_floor": "auto"}
    results = world.run(play, 3, (curvature_worker, curvature_stats), options, timeout=2 * LONG)
    workers, _ = roles_of(results)
    curvatures = [each for _, owned in workers for each in owned]
    assert len(curvatures) == len(LAYERS)
    expected = (sum(map(math.sqrt, curvatures)) / len(curvatures)) ** 2
    for found, _ in workers:
        assert found == pytest.approx(expected, rel=1e-6)
