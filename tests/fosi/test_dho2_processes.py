"""DHO2 on many processes: rows and columns give what one process gives, each rank keeps its part.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dho2_training import (
    ADAM,
    BATCHES,
    BRIEF,
    COUNT,
    CURVED,
    KINDS,
    LAYOUTS,
    SIZE,
    alone,
    curvature,
    go,
    network,
    shards,
    spread,
    take,
    train_spread,
    vector,
)
from models import ZOO
from optimizer_cases import same
from ranks import agreed, assert_same_trajectory, counted, elements_sent, replaced, shard
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from second_order import DHO2, CurvatureError, SecondOrderWarning
from second_order.lanczos import lanczos

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World


def train_each(
    rank: int, world_size: int, choices: Sequence[tuple[dict[str, Any], bool]]
) -> list[list[Tensor]]:
    return [train_spread(rank, world_size, options, wrap, UNTIL) for options, wrap in choices]


UNTIL = 8  # steps: two after the second refresh
FEW = {"num_largest": 1, "num_smallest": 1, "momentum": 0.9, "lanczos_tol": 1e-3}
NONE = {"num_largest": 0, "num_smallest": 0}


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_layouts_equal_one_process(world: World, world_size: int) -> None:
    """On every rank, bit for bit; averaging by the optimizer or by DDP; fewer pairs than ranks."""
    each = [*KINDS.values(), FEW]
    choices = [({**options, "layout": layout}, False) for options in each for layout in LAYOUTS]
    choices += [({**KINDS["momentum"], "layout": layout}, True) for layout in LAYOUTS]
    results = world.run(train_each, world_size, choices)
    expected = [alone(**options)[:UNTIL] for options in [*each, KINDS["momentum"]]]
    for i, (options, wrap) in enumerate(choices):
        found = agreed([trajectories[i] for trajectories in results])
        assert_same_trajectory(found, expected[i // 2], rtol=1e-9, hint=(options, wrap))
    for options, trajectory in zip(KINDS.values(), expected, strict=False):
        assert same(alone(**options, layout="column")[:UNTIL], trajectory)
        assert not torch.allclose(alone(**options, **NONE)[UNTIL - 1], trajectory[-1])


def scheduled(rank: int, world_size: int, layout: str) -> tuple[list[Tensor], float]:
    """And the share of the last gradient that the eigenvectors span."""
    model = network()
    precise = {"lanczos_iterations": SIZE, "lanczos_tol": 1e-12}
    optimizer = spread(model, rank, world_size, momentum=0.9, layout=layout, **precise)
    schedule = LambdaLR(optimizer, lambda step: 0.7**step)
    found = []
    for batch in shards(BATCHES[:6], rank, world_size):
        found += go(model, optimizer, [batch])
        schedule.step()
    return found, optimizer.curvature.gradient_share


@pytest.mark.parametrize("layout", LAYOUTS)
def test_learning_rate_schedules_reach_the_base_in_every_layout(world: World, layout: str) -> None:
    (expected, share) = scheduled(0, 1, layout)
    results = world.run(scheduled, 2, layout)
    assert_same_trajectory(agreed([found for found, _ in results]), expected, rtol=1e-6)
    assert [share for _, share in results] == pytest.approx([share] * 2, rel=1e-5)
    assert 0.0 < share < 1.0


def transpose_gradient(p: Tensor) -> None:
    """Give a gradient other strides than its parameter, whose elements stay the same."""
    assert p.grad is not None
    p.grad = p.grad.transpose(0, -1).contiguous().transpose(0, -1)


def images(rank: int, world_size: int, channels_last: bool) -> list[Tensor]:
    """The parameters after each step. Where they are contiguous, their gradients are not."""
    case = ZOO["conv"]
    model = case.model()
    curved = shard(case.batch(12, seed=9), rank, world_size)
    form = torch.channels_last if channels_last else torch.contiguous_format
    model.to(memory_format=form)
    if not channels_last:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(transpose_gradient)
    optimizer = DHO2(
        model,
        lr=0.05,
        momentum=0.9,
        num_largest=3,
        warmup_steps=1,
        curvature_interval=2,
        lanczos_iterations=60,
        lanczos_tol=1e-10,
        curvature_closure=lambda: cross_entropy(model(curved[0]), curved[1]),
    )
    batches = [shard(batch, rank, world_size) for batch in case.batches(5, 12)]
    return go(model, optimizer, [(x.to(memory_format=form), y) for x, y in batches])


def test_memory_formats_change_nothing_on_many_processes(world: World) -> None:
    """Two ranks cut no parameter, and three ranks cut two of them."""
    expected = images(0, 1, False)
    for ranks, channels_last in ((2, True), (3, False)):
        found = agreed(world.run(images, ranks, channels_last))
        assert_same_trajectory(found, expected, rtol=1e-6)


# Parameters that not all ranks, or not all steps, train.


def train_frozen(rank: int, world_size: int) -> list[list[Tensor]]:
    """The middle layer is frozen, and thawed as a group is added."""
    found = []
    for kind, layout in itertools.product(("momentum", "Adam"), LAYOUTS):
        model = network()
        params = [p for name, p in model.named_parameters() if name != "4.bias"]
        closure = curvature(model, rank, world_size)
        options = {**BRIEF, "lr": 0.1, "warmup_steps": 1, "curvature_interval": 3}
        options = {**options, **KINDS[kind], "layout": layout}
        optimizer = DHO2(params, model=model, curvature_closure=closure, **options)
        batches = shards(BATCHES, rank, world_size)
        middle = model.get_submodule("2")
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


def test_unfrozen_parameters_keep_their_state_on_many_processes(world: World) -> None:
    expected = train_frozen(0, 1)
    results = world.run(train_frozen, 3)
    for i in range(4):
        found = agreed([each[i] for each in results])
        assert_same_trajectory(found, expected[i], rtol=1e-8, hint=i)


# Curvature closures that fail on one rank.


def without_elements(rank: int, world_size: int) -> list[str]:
    """The entries of the base's state of a parameter without elements, after a reload."""
    model = network()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=torch.float64)))
    optimizer = spread(model, rank, world_size, layout="row", base=torch.optim.Adagrad)
    go(model, optimizer, shards(BATCHES[:2], rank, world_size))
    optimizer.consolidate(to=None)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    go(model, optimizer, shards(BATCHES[2:3], rank, world_size))
    return list(state["state"][len(state["state"]) - 1]["base"])


def test_a_parameter_without_elements_can_be_saved_from_rows(world: World) -> None:
    assert world.run(without_elements, 2) == [["step", "sum"]] * 2


def fail_on_one(rank: int, world_size: int, how: str, layout: str) -> list[Any]:
    """At a first and at a later refresh."""
    model = network()
    optimizer = spread(model, rank, world_size, momentum=0.9, layout=layout, hvp="auto")
    good = optimizer.curvature_closure
    calls = 0
    assert callable(good)

    def at_the_third_product() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("gone")
        return good()

    def not_finite() -> Any:
        return good()[0] * math.nan

    def raising(*_: Any) -> Any:
        raise KeyError("gone")

    bad: Any = {
        "missing": None, "raising": raising, "NaN": not_finite,
        "in the middle": [at_the_third_product, good], "undecomposed": good,
    }[how]  # fmt: skip
    trajectory = []
    found = []
    for step, (x, y) in enumerate(shards(BATCHES[:8], rank, world_size)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if step in (2, 6):
            optimizer.curvature_closure = bad if rank == 1 else good
            before = vector(model)
            gradients = [p.grad.clone() for p in model.parameters()]
            calls = 0
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always", SecondOrderWarning)
                broken = {"eigh": raising} if how == "undecomposed" and rank == 0 else {}
                try:
                    with replaced(torch.linalg, broken):
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


FAILING = list(
    itertools.product(("missing", "raising", "in the middle", "NaN", "undecomposed"), LAYOUTS)
)


def test_a_closure_that_fails_on_one_rank_raises_on_all(world: World) -> None:
    results = world.run(fail_each, 3, timeout=30)
    expected = alone(momentum=0.9)[:8]
    base = alone(momentum=0.9, num_largest=0, num_smallest=0)[:8]
    for i, (how, _) in enumerate(FAILING):
        messages, trajectories, failures = zip(*[each[i] for each in results], strict=True)
        if how in ("NaN", "undecomposed"):
            assert_same_trajectory(agreed(trajectories), base)
            assert failures == (2, 2, 2)
            assert messages[0] == messages[1] == messages[2]
            assert "decomposed wrongly: there are no eigenpairs;" in messages[0][0]
            continue
        assert_same_trajectory(agreed(trajectories), expected, rtol=1e-9, hint=how)
        assert failures == (0, 0, 0)
        for first, second, third in zip(*messages, strict=True):
            assert first == third
            assert "failed on rank 1" in first
            assert ("there is no curvature closure" if how == "missing" else "gone") in second
        assert len(messages[0]) == 2


# The memory and the messages of each rank.


SENDING = ("all_reduce", "all_to_all_single", "reduce", "broadcast")


def sent(rank: int, world_size: int, layout: str, wrap: bool) -> list[Counter[str]]:
    """Elements that leave this rank in each step, an all-reduce counted P times over."""
    model: nn.Module = network()
    if wrap:
        model = DistributedDataParallel(model)
    optimizer = spread(model, rank, world_size, momentum=0.9, layout=layout)
    found = []
    for batch in shards(BATCHES[:6], rank, world_size):
        with elements_sent(rank, world_size) as elements, counted() as counts:
            take(model, optimizer, batch)
        known = dict.fromkeys(SENDING, 10**9)
        found.append(elements | (counts - Counter(known)))
    return found


def sent_each(rank: int, world_size: int) -> list[list[Counter[str]]]:
    return [sent(rank, world_size, layout, wrap) for layout in LAYOUTS for wrap in (False, True)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_sends_the_documented_bytes(world: World, world_size: int) -> None:
    """Rows: one all-reduce of n, in halves, 2r, and a flag for each of the six parameters.

    And two words in an all-reduce, that all are to take the same step.
    """
    results = world.run(sent_each, world_size)
    once = 2 * (world_size - 1)  # elements that all ranks send in an all-reduce of one

    def volume(choice: int, step: int) -> float:
        each = [rank[choice][step] for rank in results]
        assert step == 2 or all(set(e) <= {*SENDING} for e in each)
        sums = sum(e["all_reduce"] for e in each) / world_size
        words = 2 * once
        return sums + sum(e[verb] for e in each for verb in SENDING[1:]) - words

    flags = once * 6  # whether each of the six parameters has a gradient
    terms = 3  # of the trust region
    for step in (3, 5):
        assert volume(0, step) == once * (SIZE + 2 * COUNT) + flags
        assert volume(1, step) == once * (SIZE / 2 + 2 * COUNT)  # DDP has averaged
        assert volume(2, step) == once * (3 * SIZE + 6 + terms) <= once * 4 * SIZE
        assert volume(3, step) == once * (2 * SIZE + terms)
    assert volume(0, 1) == once * SIZE + flags, "in warm-up"
    assert volume(2, 2) > 4 * volume(2, 3), "a refresh would be seen"


def possessions(rank: int, world_size: int, layout: str) -> tuple[Any, ...]:
    """Shapes of V̂ and of the Lanczos basis, their dtypes, and elements of the base's state."""
    model = network().float()
    x = CURVED[0].float()
    y = CURVED[1]
    optimizer = spread(model, rank, world_size, base=ADAM, layout=layout)
    optimizer.curvature_closure = lambda: cross_entropy(model(x), y)
    found = []
    run = lanczos.tridiagonalize

    def observed(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        found.append(result.basis)
        return result

    with replaced(lanczos, {"tridiagonalize": observed}):
        for batch in shards(BATCHES[:4], rank, world_size):
            take(model, optimizer, (batch[0].float(), batch[1]))
    V = optimizer._curvature.subspace.basis.vectors  # type: ignore[union-attr]
    state = sum(
        parts["base"]["exp_avg"].numel() for parts in optimizer.state.values() if parts.get("base")
    )
    assert optimizer.summary().total_bytes == 4 * V.numel()
    assert V.dtype == found[0].dtype == torch.float32
    return tuple(V.shape), tuple(found[0].shape), state


def possessions_each(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    return [possessions(rank, world_size, layout) for layout in LAYOUTS]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_process_stores_its_share_of_the_eigenvectors(world: World, world_size: int) -> None:
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


# What is refused.


def transposed(rank: int, world_size: int, layout: str) -> str:
    """The error of a step on a parameter whose elements are not in order, and which is cut."""
    w = nn.Parameter(torch.ones(4, 3).t())
    optimizer = DHO2([w], lr=0.1, layout=layout)
    w.sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_parameters_in_another_memory_format_are_not_split(world: World) -> None:
    for message in world.run(transposed, 2, "row"):
        assert "shape (3, 4)" in message
        assert "use layout='column'" in message
    assert world.run(transposed, 2, "column") == ["", ""]


def test_bases_that_need_whole_tensors_use_the_column_layout(world: World) -> None:
    options = {"base": torch.optim.Adafactor, "lr": 0.02, "layout": "column"}
    results = world.run(train_spread, 2, options)
    assert_same_trajectory(agreed(results), alone(**options), rtol=1e-8)
