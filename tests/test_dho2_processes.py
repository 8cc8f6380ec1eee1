"""DHO2 on many processes: rows and columns give what one process gives, each rank keeps its part.

Neither n = 89 nor the five eigenpairs divide by the number of processes, and curvature batches are
ragged. Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract import same
from pairs import ADAM, BATCHES, CURVED, go, take, vector
from ranks import agreed, assert_same_trajectory, counted, replaced, shard
from reference import cross_entropy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2, CurvatureError, SecondOrderError, SecondOrderWarning
from second_order.lanczos import spectrum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pool import World
    from reference import Batch

LAYOUTS = "row", "column"
STEPS = 11
# Lanczos need not have converged to give every number of processes the same.
OPTIONS: dict[str, Any] = {
    "largest": 4,
    "smallest": 1,
    "warmup_steps": 2,
    "curvature_interval": 4,
    "lanczos_iterations": 10,
    "lanczos_tol": 0.0,
}
SIZE, COUNT = 89, 5
RAGGED = {1: [0, 30], 2: [0, 9, 30], 3: [0, 4, 17, 30], 4: [0, 3, 7, 18, 30]}
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"base": ADAM, "lr": 0.02},
}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    widths = [5, 6, 5, 3]
    layers = [p for d in itertools.pairwise(widths) for p in (nn.Linear(*d), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def curvature(model: nn.Module, rank: int, world_size: int) -> Callable[[], tuple[Tensor, int]]:
    """Of this rank's part of the curvature batch."""
    a, b = RAGGED[world_size][rank : rank + 2]
    x, y = CURVED
    return lambda: (cross_entropy(model(x[a:b]), y[a:b]), b - a)


def shards(batches: Sequence[Batch], rank: int, world_size: int) -> list[Batch]:
    return [shard(batch, rank, world_size) for batch in batches]


def dho2(model: nn.Module, rank: int, world_size: int, **options: Any) -> DHO2:
    closure = curvature(model, rank, world_size)
    return DHO2(model, **{"lr": 0.1, "curvature_closure": closure, **OPTIONS, **options})


def train(rank: int, world_size: int, options: dict[str, Any], wrap: bool = False) -> list[Tensor]:
    model: nn.Module = network()
    if wrap:
        model = DistributedDataParallel(model)
    optimizer = dho2(model, rank, world_size, **options)
    return go(model, optimizer, shards(BATCHES[:STEPS], rank, world_size))


def train_each(
    rank: int, world_size: int, choices: Sequence[tuple[dict[str, Any], bool]]
) -> list[list[Tensor]]:
    return [train(rank, world_size, options, wrap) for options, wrap in choices]


def alone(**options: Any) -> list[Tensor]:
    return train(0, 1, options)


FEW = {"largest": 1, "smallest": 1, "momentum": 0.9, "lanczos_tol": 1e-3}
NONE = {"largest": 0, "smallest": 0}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_and_columns_give_what_one_process_gives(world: World, world_size: int) -> None:
    """On every rank, bit for bit; averaging by the optimizer or by DDP; fewer pairs than ranks."""
    ways = [*itertools.product(LAYOUTS, (False, True))]
    choices = [
        ({**options, "layout": layout}, wrap)
        for options in (*KINDS.values(), FEW)
        for layout, wrap in (ways if options is not FEW else ways[::2])
    ]
    results = world.run(train_each, world_size, choices)
    expected = [alone(**options) for options in (*KINDS.values(), FEW)]
    for i, (options, wrap) in enumerate(choices):
        found = agreed([each[i] for each in results])
        assert_same_trajectory(found, expected[i // 4], rtol=1e-9, hint=(options, wrap))
    for options, trajectory in zip(KINDS.values(), expected, strict=False):
        assert same(alone(**options, layout="column"), trajectory)
        assert not torch.allclose(alone(**options, **NONE)[-1], trajectory[-1])


# Parameters that not all ranks, or not all steps, train.


class Forked(nn.Module):
    """Two heads, of which each batch goes through one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = network()
        self.heads = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x).tanh())  # type: ignore[no-any-return]


def train_forked(rank: int, world_size: int, options: dict[str, Any], wrap: bool) -> list[Tensor]:
    """Two ranks, or one that does what both do; the third head is never used."""
    torch.manual_seed(1)
    model = Forked()
    net = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
    heads = range(2) if world_size == 1 else [rank]

    def loss(batch: Batch, net: nn.Module) -> Tensor:
        parts = [shard(batch, head, 2) for head in heads]
        losses = [cross_entropy(net(x, h), y) for h, (x, y) in zip(heads, parts, strict=True)]
        return torch.stack(losses).mean()

    optimizer = dho2(
        net, 0, 1, **options,
        curvature_closure=lambda: loss(CURVED, model),
    )  # fmt: skip
    trajectory = []
    for batch in BATCHES[:8]:
        optimizer.zero_grad()
        loss(batch, net).backward()
        optimizer.step()
        trajectory.append(vector(model))
    assert all((p.grad is None) == ("heads.2" in name) for name, p in model.named_parameters())
    return trajectory


def train_forked_each(rank: int, world_size: int) -> list[list[Tensor]]:
    return [
        train_forked(rank, world_size, {**KINDS[kind], "layout": layout}, wrap)
        for kind in ("momentum", "Adam")
        for layout in LAYOUTS
        for wrap in (False, True)[:world_size]
    ]


def test_layers_that_some_ranks_do_not_use_train_all_the_same(world: World) -> None:
    results = world.run(train_forked_each, 2)
    expected = train_forked_each(0, 1)
    for i in range(8):
        assert_same_trajectory(agreed([each[i] for each in results]), expected[i // 2], rtol=1e-8)


def train_frozen(rank: int, world_size: int) -> list[list[Tensor]]:
    """The middle layer is frozen, and thawed as a group is added."""
    found = []
    for kind, layout in itertools.product(("momentum", "Adam"), LAYOUTS):
        model = network()
        params = [p for name, p in model.named_parameters() if name != "4.bias"]
        closure = curvature(model, rank, world_size)
        options = {**OPTIONS, "lr": 0.1, "warmup_steps": 1, "curvature_interval": 3}
        options = {**options, **KINDS[kind], "layout": layout}
        optimizer = DHO2(params, model=model, curvature_closure=closure, **options)
        batches, middle = shards(BATCHES, rank, world_size), model.get_submodule("2")
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always", SecondOrderWarning)
            trajectory = go(model, optimizer, batches[:4])
            middle.requires_grad_(False)
            optimizer.zero_grad()
            trajectory += go(model, optimizer, batches[4:8])
            middle.requires_grad_(True)
            optimizer.add_param_group({"params": [model.get_submodule("4").bias], "lr": 0.03})
            trajectory += go(model, optimizer, batches[8:])
        assert sum("eigenpairs are dropped" in str(w.message) for w in messages) == 2
        optimizer.consolidate(to=None)
        whole = optimizer.state_dict()["state"]
        key = "exp_avg" if kind == "Adam" else "momentum_buffer"
        found.append([*trajectory, *[whole[i]["base"][key].flatten() for i in range(6)]])
    return found


def test_what_is_frozen_and_thawed_keeps_its_state_on_many_processes(world: World) -> None:
    expected = train_frozen(0, 1)
    results = world.run(train_frozen, 3)
    for i in range(4):
        found = agreed([each[i] for each in results])
        assert_same_trajectory(found, expected[i], rtol=1e-8, hint=i)


# Curvature closures that fail on one rank.


def fail_on_one(rank: int, world_size: int, how: str, layout: str) -> list[Any]:
    """At a first and at a later refresh."""
    model = network()
    optimizer = dho2(model, rank, world_size, momentum=0.9, layout=layout, hvp="auto")
    good, asked = optimizer.curvature_closure, 0
    assert callable(good)

    def at_the_third_product() -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise KeyError("gone")
        return good()

    def not_finite() -> Any:
        return good()[0] * math.nan

    def raising() -> Any:
        raise KeyError("gone")

    bad: Any = {
        "missing": None, "raising": raising, "NaN": not_finite,
        "in the middle": [at_the_third_product, good],
    }[how]  # fmt: skip
    trajectory, found = [], []
    for step, (x, y) in enumerate(shards(BATCHES[:8], rank, world_size)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if step in (2, 6):
            optimizer.curvature_closure = bad if rank == 1 else good
            before, gradients = vector(model), [p.grad.clone() for p in model.parameters()]
            asked = 0
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always", SecondOrderWarning)
                try:
                    optimizer.step()
                except (CurvatureError, KeyError) as error:
                    found.append(f"{type(error).__name__}: {error}")
                    assert torch.equal(vector(model), before)
                    for p, gradient in zip(model.parameters(), gradients, strict=True):
                        assert torch.equal(p.grad, gradient)
                    optimizer.curvature_closure = good
                    optimizer.step()
                else:
                    found += [str(w.message) for w in messages]
        else:
            optimizer.step()
        trajectory.append(vector(model))
    return [found, trajectory, optimizer.curvature.failures]


def fail_each(rank: int, world_size: int) -> list[Any]:
    return [fail_on_one(rank, world_size, how, layout) for how, layout in FAILING]


FAILING = list(itertools.product(("missing", "raising", "in the middle", "NaN"), LAYOUTS))


def test_a_closure_that_fails_on_one_rank_fails_on_all_and_training_goes_on(world: World) -> None:
    results = world.run(fail_each, 3, timeout=30)
    expected = alone(momentum=0.9)[:8]
    base = alone(momentum=0.9, largest=0, smallest=0)[:8]
    for i, (how, _) in enumerate(FAILING):
        messages, trajectories, failures = zip(*[each[i] for each in results], strict=True)
        if how == "NaN":
            assert_same_trajectory(agreed(trajectories), base)
            assert failures == (2, 2, 2)
            assert messages[0] == messages[1] == messages[2]
            assert "not finite: no eigenpairs yet" in messages[0][0]
            continue
        assert_same_trajectory(agreed(trajectories), expected, rtol=1e-9, hint=how)
        assert failures == (0, 0, 0)
        for first, second, third in zip(*messages, strict=True):
            assert first == third
            assert "failed on rank 1" in first
            assert ("there is no curvature closure" if how == "missing" else "gone") in second
        assert len(messages[0]) == 2


# What each keeps, and what it sends.


def sent(rank: int, world_size: int, layout: str, wrap: bool) -> list[Counter[str]]:
    """Elements that leave this rank in each step, an all-reduce counted P times over."""
    model: nn.Module = network()
    if wrap:
        model = DistributedDataParallel(model)
    optimizer = dho2(model, rank, world_size, momentum=0.9, layout=layout)
    elements: Counter[str] = Counter()
    all_reduce, all_to_all = dist.all_reduce, dist.all_to_all_single

    def reducing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        elements["all_reduce"] += 2 * (world_size - 1) * tensor.numel()
        return all_reduce(tensor, *args, **kwargs)

    def sending(
        output: Tensor, tensor: Tensor, got: Sequence[int], gone: Sequence[int], **kwargs: Any
    ) -> Any:
        elements["all_to_all_single"] += sum(n for to, n in enumerate(gone) if to != rank)
        return all_to_all(output, tensor, got, gone, **kwargs)

    found = []
    for batch in shards(BATCHES[:6], rank, world_size):
        elements.clear()
        wrapped = {"all_reduce": reducing, "all_to_all_single": sending}
        with replaced(dist, wrapped), counted() as counts:
            take(model, optimizer, batch)
        found.append(elements | (counts - Counter(dict.fromkeys(wrapped, 10**9))))
    return found


def sent_each(rank: int, world_size: int) -> list[list[Counter[str]]]:
    return [sent(rank, world_size, layout, wrap) for layout in LAYOUTS for wrap in (False, True)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_sends_what_it_must(world: World, world_size: int) -> None:
    """Rows: one all-reduce of n, in halves, 2r, and a flag for each of the six parameters."""
    results = world.run(sent_each, world_size)

    def volume(choice: int, step: int) -> float:
        each = [rank[choice][step] for rank in results]
        assert step == 2 or all(set(e) <= {"all_reduce", "all_to_all_single"} for e in each)
        return sum(e["all_reduce"] / world_size + e["all_to_all_single"] for e in each)

    once = 2 * (world_size - 1)  # elements that all ranks send in an all-reduce of one
    flags = world_size * (world_size - 1) * 6
    for step in (3, 5):
        assert volume(0, step) == once * (SIZE + 2 * COUNT) + flags
        assert volume(1, step) == once * (SIZE / 2 + 2 * COUNT)  # DDP has averaged
        assert volume(2, step) == once * (3 * SIZE + 6) <= once * 4 * SIZE
        assert volume(3, step) == once * 2 * SIZE
    assert volume(0, 1) == once * SIZE + flags, "in warm-up"
    assert volume(2, 2) > 4 * volume(2, 3), "a refresh would be seen"


def possessions(rank: int, world_size: int, layout: str) -> tuple[Any, ...]:
    """Shapes of V̂ and of the Lanczos basis, their dtypes, and elements of the base's state."""
    model = network().float()
    x, y = CURVED[0].float(), CURVED[1]
    optimizer = dho2(model, rank, world_size, base=ADAM, layout=layout)
    optimizer.curvature_closure = lambda: cross_entropy(model(x), y)
    found, run = [], spectrum.tridiagonalise

    def observed(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        found.append(result.basis)
        return result

    with replaced(spectrum, {"tridiagonalise": observed}):
        for batch in shards(BATCHES[:4], rank, world_size):
            take(model, optimizer, (batch[0].float(), batch[1]))
    V = optimizer._subspace.basis.vectors  # type: ignore[union-attr]
    state = sum(
        parts["base"]["exp_avg"].numel() for parts in optimizer.state.values() if parts.get("base")
    )
    assert optimizer.summary().total_bytes == 4 * V.numel()
    assert V.dtype == found[0].dtype == torch.float32
    return tuple(V.shape), tuple(found[0].shape), state


def possessions_each(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    return [possessions(rank, world_size, layout) for layout in LAYOUTS]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_process_keeps_its_share(world: World, world_size: int) -> None:
    """n·r/P of V̂, n·m/P of the Lanczos basis, in float32; n/P of the base's state in rows."""
    results = world.run(possessions_each, world_size)
    rows, columns = zip(*results, strict=True)
    shares = {SIZE // world_size, math.ceil(SIZE / world_size)}
    pairs = {COUNT // world_size, math.ceil(COUNT / world_size)}
    for (r, n), (m, basis_rows), state in rows:
        assert (r, m) == (COUNT, 10)
        assert n == basis_rows == state
        assert n in shares
    for (r, n), (m, basis_rows), state in columns:
        assert (n, m, state) == (SIZE, 10, SIZE)
        assert r in pairs
        assert basis_rows in shares
    assert sum(n for (_, n), _, _ in rows) == SIZE
    assert sum(basis_rows for _, (_, basis_rows), _ in columns) == SIZE
    assert sum(r for (r, _), _, _ in columns) == COUNT


# Checkpoints.

SAVED = [("momentum", 8), ("Adam", 5)]
MORE = [("SGD", 8), ("momentum", 4), ("momentum", 2)]  # nothing carried; in warm-up
AFTER = 3  # steps, one of which refreshes


def save(rank: int, world_size: int) -> list[bytes]:
    """On rank 0 a checkpoint for each layout and each of `SAVED`."""
    found = []
    for layout, (kind, at) in itertools.product(LAYOUTS, SAVED):
        model = network()
        optimizer = dho2(model, rank, world_size, layout=layout, **KINDS[kind])
        batches = shards(BATCHES, rank, world_size)
        go(model, optimizer, batches[:at])
        optimizer.consolidate(to=0)
        if rank == 0:
            buffer = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
            found.append(buffer.getvalue())
        go(model, optimizer, batches[at : at + 1])
    return found


def resume(rank: int, world_size: int, data: Sequence[bytes]) -> list[list[Tensor]]:
    """In rows, then in columns."""
    found = []
    for i, layout in itertools.product(range(len(data)), LAYOUTS):
        kind, at = SAVED[i % len(SAVED)]
        state = torch.load(io.BytesIO(data[i]))
        model = network(seed=5)
        optimizer = dho2(model, rank, world_size, layout=layout, **KINDS[kind])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        found.append(go(model, optimizer, shards(BATCHES[at : at + AFTER], rank, world_size)))
    return found


def test_checkpoints_of_any_number_of_processes_go_on_on_any_other(world: World) -> None:
    expected = {kind: alone(**KINDS[kind]) for kind in KINDS}
    data = [blob for before in (1, 2, 4) for blob in world.run(save, before)[0]]
    assert len(data) == 3 * 2 * len(SAVED)
    for after in (1, 2, 4):
        results = world.run(resume, after, data)
        for i in range(2 * len(data)):
            kind, at = SAVED[i // 2 % len(SAVED)]
            found = agreed([each[i] for each in results])
            assert_same_trajectory(
                found, expected[kind][at : at + AFTER], rtol=1e-8, hint=(after, i, kind)
            )


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def save_dcp(rank: int, world_size: int, path: str) -> None:
    for layout, (kind, at) in itertools.product(LAYOUTS, SAVED + MORE):
        model = network()
        optimizer = dho2(model, rank, world_size, layout=layout, **KINDS[kind])
        go(model, optimizer, shards(BATCHES[:at], rank, world_size))
        optimizer.consolidate(to=None)
        dcp.save(parts(model, optimizer), checkpoint_id=f"{path}/{layout}{kind}{at}")


def load_dcp(rank: int, world_size: int, path: str) -> list[list[Tensor]]:
    found = []
    for layout, (kind, at), ours in itertools.product(LAYOUTS, SAVED + MORE, LAYOUTS):
        model = network(seed=5)
        optimizer = dho2(model, rank, world_size, layout=ours, **KINDS[kind])
        state = parts(model, optimizer)
        where = f"{path}/{layout}{kind}{at}"
        dcp.load(state, checkpoint_id=where, no_dist=world_size == 1)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        found.append(go(model, optimizer, shards(BATCHES[at : at + AFTER], rank, world_size)))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_are_written_and_read_by_all(world: World, tmp_path: Path) -> None:
    expected = {kind: alone(**KINDS[kind]) for kind in KINDS}
    world.run(save_dcp, 2, str(tmp_path))
    for after in (1, 3):
        results = world.run(load_dcp, after, str(tmp_path))
        for i in range(4 * len(SAVED + MORE)):
            kind, at = (SAVED + MORE)[i // 2 % len(SAVED + MORE)]
            found = agreed([each[i] for each in results])
            assert_same_trajectory(
                found, expected[kind][at : at + AFTER], rtol=1e-8, hint=(after, i, kind)
            )


# What is refused.


def refusals(rank: int, world_size: int) -> list[str]:
    found = []

    def refused(function: Callable[[], Any]) -> None:
        try:
            function()
        except (ValueError, SecondOrderError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")

    for layout in LAYOUTS:
        model = network()
        optimizer = dho2(model, rank, world_size, layout=layout, momentum=0.9)
        batches = shards(BATCHES, rank, world_size)
        go(model, optimizer, batches[:4])
        refused(optimizer.state_dict)
        refused(lambda optimizer=optimizer: optimizer.consolidate(to=2))  # type: ignore[misc]
        optimizer.consolidate(to=1)
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always", SecondOrderWarning)
            optimizer.state_dict()
        found.append(str([str(w.message) for w in messages]))
        take(model, optimizer, batches[4])
        refused(optimizer.state_dict)  # what was collected is of the step before
    refused(lambda: dho2(network(), rank, world_size, base=torch.optim.Adafactor))
    scaler = torch.amp.GradScaler("cpu")
    refused(lambda: dho2(network(), rank, world_size, grad_scaler=scaler))
    return found


def test_what_would_go_wrong_is_refused_with_the_remedy(world: World) -> None:
    for rank, found in enumerate(world.run(refusals, 2)):
        for first, to, partial, again in (found[:4], found[4:8]):
            assert first == again
            assert first.startswith("SecondOrderError")
            assert "consolidate(to=0) on every process" in first
            assert "ranks 0 to 1" in to
            assert ("consolidate(to=1) collected it elsewhere" in partial) == (rank == 0)
        assert "Adafactor" in found[8]
        assert "layout='column'" in found[8]
        assert "GradScaler" in found[9]
        assert "DistributedDataParallel" in found[9]


def test_a_base_that_needs_whole_tensors_works_in_columns(world: World) -> None:
    options = {"base": torch.optim.Adafactor, "lr": 0.02, "layout": "column"}
    results = world.run(train, 2, options)
    assert_same_trajectory(agreed(results), alone(**options), rtol=1e-8)
