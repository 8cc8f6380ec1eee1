"""DPKFAC: owners that know their own batches alone, and processes that stay together all the same.

With the same batch on every rank it is KAISA on one process, which is what most tests measure by.
Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract import EXACT, factors, hook_count, take
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO
from ranks import (
    OPTIONS,
    agreed,
    assert_same_trajectory,
    by_reference,
    counted,
    go,
    kaisa,
    replaced,
    shard,
    train,
    vector,
)
from reference import cross_entropy, empirical_factors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from second_order import DPKFAC, KAISA, DecompositionError, SecondOrderError, SecondOrderWarning
from second_order.distributed.assignment import assign_owners
from second_order.kfac.plan import dims_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from models import Case
    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP, CONV = ZOO["mlp"], ZOO["conv_grouped"]
LAYERS = ("0", "2", "4")
BATCHES = MLP.batches(7, n=12)
ALL_REDUCE = {"gradient_exchange": "all_reduce"}
ALONE = {"assignment", "gradient_exchange"}  # options that say where, not what
BASES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"base": torch.optim.Adam, "lr": 0.01},
}


def dpkfac(params_or_model: Any, **options: Any) -> DPKFAC:
    return DPKFAC(params_or_model, **{**OPTIONS, **options})


def train_alike(
    rank: int,
    world_size: int,
    case: Case,
    batches: Sequence[Batch],
    choices: Sequence[dict[str, Any]],
) -> list[list[Tensor]]:
    """The same batches on every rank, with each of several choices of options."""
    trajectories = []
    for options in choices:
        model = case.model()
        trajectories.append(go(model, dpkfac(model, **options), case, batches))
    return trajectories


def train_apart(
    rank: int,
    world_size: int,
    case: Case,
    batches: Sequence[Batch],
    choices: Sequence[dict[str, Any]],
) -> list[list[Tensor]]:
    """A shard of the batches on each rank."""
    shards = [shard(batch, rank, world_size) for batch in batches]
    return train_alike(rank, world_size, case, shards, choices)


def by_choice(results: Sequence[Sequence[Sequence[Tensor]]]) -> list[Sequence[Tensor]]:
    """The trajectory of each choice, which all ranks have, bit for bit."""
    return [agreed(parallel) for parallel in zip(*results, strict=True)]


def alone(case: Case, batches: Sequence[Batch], options: dict[str, Any]) -> list[Tensor]:
    """KAISA's trajectory on one process."""
    shared = {name: value for name, value in options.items() if name not in ALONE}
    return train(0, 1, case, batches, shared)


def caught(messages: Sequence[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in messages if issubclass(w.category, SecondOrderWarning)]


def falling(step: int) -> float:
    return 0.3 * 0.5**step


def falling_clip(step: int) -> float:
    return 1e-3 * 0.5**step


def growing(step: int) -> int:
    return 1 + step // 2


# With the same batch everywhere: KAISA.


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_with_the_same_batch_on_every_rank_it_is_kaisa(world: World, world_size: int) -> None:
    """Either solver, either assignment, either exchange, and damping relative or not."""
    batches = CONV.batches(2, n=6)
    keys = "solver", "relative_damping", "assignment", "gradient_exchange"
    values = itertools.product(
        ("eigen", "inverse"), (True, False), ("balanced", "round_robin"), ("owner", "all_reduce")
    )
    choices = [dict(zip(keys, each, strict=True)) for each in values]
    found = by_choice(world.run(train_alike, world_size, CONV, batches, choices))
    expected = [alone(CONV, batches, choice) for choice in choices[::4]]
    for i, (choice, trajectory) in enumerate(zip(choices, found, strict=True)):
        assert_same_trajectory(trajectory, expected[i // 4], hint=choice)


@pytest.mark.parametrize(
    "name",
    [
        "conv1d",
        "conv_depthwise",
        "embedding",
        "language_model",
        "lora",
        "norms",
        "shared_conv",
        "shared_linear",
        "tied",
        "transformer",
        "unused",
    ],
)
def test_every_kind_of_layer_goes_as_with_kaisa(world: World, name: str) -> None:
    case = ZOO[name]
    batches = case.batches(3, n=6)
    approximation = {"kfac_approx": case.shared} if case.shared else {}
    choices = [{**approximation, "relative_damping": True, **each} for each in ({}, ALL_REDUCE)]
    for found in by_choice(world.run(train_alike, 3, case, batches, choices)):
        assert_same_trajectory(found, alone(case, batches, choices[0]))


VARIATIONS: dict[str, dict[str, Any]] = {
    "SGD": BASES["SGD"],
    "Adam": BASES["Adam"],
    "intervals": {"factor_update_steps": 2, "inv_update_steps": 3},
    "intervals as callables": {"factor_update_steps": growing, "inv_update_steps": 2},
    "damping as callable": {"damping": falling, "relative_damping": True},
    "decay as callable": {"factor_decay": falling},
    "refresh warm-up": {"inv_update_steps": 3, "refresh_warmup_steps": 2},
    "no clip": {"kl_clip": None},
    "clip as callable": {"kl_clip": falling_clip},
    "tensor lr": {"lr": torch.tensor(0.05, dtype=torch.float64)},
    "squares": {"symmetry_aware": False},
    "warm": {"eigen_refresh": "warm", "relative_damping": True, "damping": 1.0},
    "some layers": {"skip_layers": ["2"]},
    "one layer": {"skip_layers": ["2", "4"]},
    "no layer": {"skip_layers": ["*"]},
    "no layer and no clip": {"skip_layers": ["*"], "kl_clip": None},
}


def test_every_option_goes_as_with_kaisa(world: World) -> None:
    choices = [{**each, **how} for each in VARIATIONS.values() for how in ({}, ALL_REDUCE)]
    found = by_choice(world.run(train_alike, 3, MLP, BATCHES[:5], choices))
    expected = {name: by_reference(MLP, BATCHES[:5], each) for name, each in VARIATIONS.items()}
    # A step of orthogonal iteration is no decomposition: the reference knows none.
    expected["warm"] = alone(MLP, BATCHES[:5], VARIATIONS["warm"])
    names = [name for name in VARIATIONS for _ in range(2)]
    for name, trajectory in zip(names, found, strict=True):
        assert_same_trajectory(trajectory, expected[name], hint=name)
    lasting = {name: trajectory[-1] for name, trajectory in expected.items()}
    alike = {"tensor lr", "squares", "no layer and no clip"}
    for a, b in itertools.combinations(set(lasting) - alike, 2):
        assert not torch.allclose(lasting[a], lasting[b], rtol=1e-9), f"{a} is {b}"


def network(widths: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        part
        for d_in, d_out in itertools.pairwise(widths)
        for part in (nn.Linear(d_in, d_out), nn.Tanh())
    ]
    return nn.Sequential(*layers[:-1]).double()


def train_widths(
    rank: int,
    world_size: int,
    widths: Sequence[int],
    batches: Sequence[Batch],
    options: dict[str, Any],
) -> tuple[list[Tensor], list[Tensor]]:
    """With the same batches on every rank, and with a part of them on each."""
    model = network([5, *widths, 3])
    alike = go(model, dpkfac(model, **options), MLP, batches)
    model = network([5, *widths, 3])
    shards = [shard(batch, rank, world_size) for batch in batches]
    return alike, go(model, dpkfac(model, **options), MLP, shards)


@settings(max_examples=12)
@given(data=st.data(), world_size=st.integers(1, 4), per_rank=st.integers(1, 3))
def test_any_network_on_any_number_of_processes(
    world: World, data: st.DataObject, world_size: int, per_rank: int
) -> None:
    """Fewer layers than ranks, too: some own nothing."""
    widths = data.draw(st.lists(st.integers(1, 6), max_size=5), "widths")
    options: dict[str, Any] = {
        "damping": data.draw(st.floats(1e-2, 10.0)),
        "factor_update_steps": data.draw(st.integers(1, 2)),
        "inv_update_steps": data.draw(st.integers(1, 3)),
        "relative_damping": data.draw(st.booleans()),
        "solver": data.draw(st.sampled_from(["eigen", "inverse"])),
        "symmetry_aware": data.draw(st.booleans()),
    }
    where = {
        "assignment": data.draw(st.sampled_from(["balanced", "round_robin"])),
        "gradient_exchange": data.draw(st.sampled_from(["owner", "all_reduce"])),
    }
    batches = MLP.batches(3, n=world_size * per_rank)
    results = world.run(train_widths, world_size, widths, batches, {**options, **where})
    model = network([5, *widths, 3])
    expected = go(model, kaisa(model, **options), MLP, batches)
    assert_same_trajectory(agreed([alike for alike, _ in results]), expected)
    agreed([apart for _, apart in results])


# With a batch of its own on each rank.


def own_factors(
    rank: int, world_size: int, case: Case, batches: Sequence[Batch], options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The parameters before each step, and the factors that this rank keeps at the end."""
    model = case.model()
    optimizer = dpkfac(model, **options)
    start = [vector(model)]
    shards = [shard(batch, rank, world_size) for batch in batches]
    trajectory = start + go(model, optimizer, case, shards)
    for block in optimizer._curvature.layers.blocks:
        assert block.factors is not None
        assert (block.factors.a is None) == (block.factors.g is None)
        if block.factors.a is None:
            block.factors = None
    return trajectory, factors(optimizer)


def averages(
    case: Case, trajectory: Sequence[Tensor], batches: Sequence[Batch], name: str, decay: float
) -> list[Tensor]:
    """Running averages of one layer along a trajectory, by the book."""
    model = case.model()
    weight, found = 0.0, []
    for parameters, (x, y) in zip(trajectory, batches, strict=False):
        nn.utils.vector_to_parameters(parameters, model.parameters())
        new = empirical_factors(model, x, y, case.loss, name)
        weight = decay * weight + 1.0
        found = [a + (b - a) / weight for a, b in zip(found or new, new, strict=True)]
    return found


def close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-8, atol=1e-11) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("assignment", ["balanced", "round_robin"])
@pytest.mark.parametrize("case", [MLP, CONV], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_layers_factors_are_those_of_its_owners_batches(
    world: World, world_size: int, case: Case, assignment: str
) -> None:
    """Not another rank's, nor everybody's; and one rank has them."""
    batches = case.batches(3, n=12)
    options = {"assignment": assignment, "factor_decay": 0.5}
    results = world.run(own_factors, world_size, case, batches, options)
    trajectory = agreed([trajectory for trajectory, _ in results])
    names = [name for _, kept in results for name in kept]
    blocks = dpkfac(case.model())._curvature.layers.blocks
    assert sorted(names) == sorted(block.name for block in blocks)
    owners = assign_owners(list(map(dims_of, blocks)), world_size, assignment)  # type: ignore[arg-type]
    for block, owner in zip(blocks, owners, strict=True):
        found = results[owner][1][block.name]
        for rank in range(world_size):
            mine = [shard(batch, rank, world_size) for batch in batches]
            same = close(found, averages(case, trajectory, mine, block.name, 0.5))
            assert same == (rank == owner)
        assert not close(found, averages(case, trajectory, batches, block.name, 0.5))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("base", BASES)
def test_both_exchanges_give_one_trajectory(world: World, world_size: int, base: str) -> None:
    """On every rank the same, bit for bit; and it is not that of KAISA."""
    choices = [
        {**BASES[base], **how, "assignment": assignment, "inv_update_steps": 2}
        for how in ({}, ALL_REDUCE)
        for assignment in ("balanced", "round_robin")
    ]
    results = world.run(train_apart, world_size, MLP, BATCHES, choices)
    balanced, round_robin, reduced, reduced_round_robin = by_choice(results)
    assert_same_trajectory(balanced, reduced, rtol=1e-9)
    assert_same_trajectory(round_robin, reduced_round_robin, rtol=1e-9)
    expected = alone(MLP, BATCHES, choices[0])[-1]
    assert not torch.allclose(balanced[-1], expected, rtol=1e-4)


def clip_and_gradients(
    rank: int, world_size: int, options: dict[str, Any]
) -> tuple[float, list[Tensor]]:
    """Σ lr² |P·∇| after the clip, from gradients that a copy without it sees."""
    batch = shard(BATCHES[0], rank, world_size)
    found = []
    for clip in (options["kl_clip"], None):
        model = MLP.model()
        optimizer = dpkfac(model, **{**options, "kl_clip": clip}, damping=0.01)
        take(model, optimizer, batch)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    clipped, free = found
    return float((clipped / free).mean()), [clipped, free]


@pytest.mark.parametrize("exchange", ["owner", "all_reduce"])
def test_all_layers_of_all_owners_are_clipped_by_one_coefficient(
    world: World, exchange: str
) -> None:
    """ν² Σ lr² |P·∇| = κ, by the mean gradients and everybody's P."""
    options = {"kl_clip": 1e-5, "gradient_exchange": exchange}
    results = world.run(clip_and_gradients, 3, options)
    agreed([gradients for _, gradients in results])
    coefficient, (clipped, free) = results[0]
    torch.testing.assert_close(clipped, coefficient * free, rtol=1e-10, atol=0.0)
    model = MLP.model()
    x, y = BATCHES[0]
    cross_entropy(model(x), y).backward()
    mean = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    spans = [p.numel() for p in model.parameters()]
    parts = zip(free.split(spans), mean.split(spans), strict=True)
    dots = torch.stack([torch.dot(p, g) for p, g in parts]).view(-1, 2).sum(1)  # weight and bias
    change = float(OPTIONS["lr"] ** 2 * dots.abs().sum())
    assert coefficient == pytest.approx((1e-5 / change) ** 0.5, rel=1e-9)
    assert coefficient < 0.5, "the clip is at work"


def train_spoiled(
    rank: int, world_size: int, layer: int, bad: float, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """In the second step a gradient has a bad value on rank 1; parameters, without that layer."""
    model = MLP.model()
    optimizer = dpkfac(model, **options)
    others, spoiled = [], []
    for step, batch in enumerate(BATCHES[:4]):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if step == 1 and rank == 1:
            model.get_submodule(str(layer)).weight.grad.view(-1)[0] = bad  # type: ignore[operator]
        optimizer.step()
        parts = dict(model.named_parameters())
        mine = [p.flatten() for n, p in parts.items() if n.startswith(f"{layer}.")]
        rest = [p.flatten() for n, p in parts.items() if not n.startswith(f"{layer}.")]
        spoiled.append(torch.cat(mine).detach().clone())
        others.append(torch.cat(rest).detach().clone())
        if step == 1:
            break
    return others, spoiled


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", [0, 4])
def test_one_gradient_that_is_not_finite_spoils_no_other_layer(
    world: World, layer: int, bad: float
) -> None:
    """The layer itself is lost, as with any optimizer; the clip leaves it out of its sum."""
    for how in ({}, ALL_REDUCE):
        results = world.run(train_spoiled, 3, layer, bad, {"kl_clip": 1e-6, **how})
        before, after = agreed([others for others, _ in results])
        assert after.isfinite().all()
        assert not torch.equal(before, after)
        assert all(not spoiled[1].isfinite().all() for _, spoiled in results)


def train_options(
    rank: int, world_size: int, options: dict[str, Any], dtype: torch.dtype
) -> list[Tensor]:
    model = MLP.model(dtype)
    batches = MLP.batches(7, n=12, dtype=dtype)
    return go(model, dpkfac(model, **options), MLP, [shard(b, rank, world_size) for b in batches])


SINGLE = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
BF16 = {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16}
ROUGH: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "sampled": ({"fisher": "sampled"}, torch.float64),
    "warm": ({"eigen_refresh": "warm"}, torch.float64),
    "bfloat16 factors": (BF16, torch.float32),
    "bfloat16 weights": (SINGLE, torch.bfloat16),
    "bfloat16 all over": (BF16, torch.bfloat16),
    "float32": (SINGLE, torch.float32),
}


@pytest.mark.parametrize("exchange", ["owner", "all_reduce"])
@pytest.mark.parametrize(("options", "dtype"), ROUGH.values(), ids=ROUGH)
def test_low_precision_and_chance_keep_the_ranks_together(
    world: World, options: dict[str, Any], dtype: torch.dtype, exchange: str
) -> None:
    choice = {**options, "relative_damping": True, "damping": 1.0, "gradient_exchange": exchange}
    found = agreed(world.run(train_options, 3, choice, dtype))
    assert found[-1].isfinite().all()
    assert not torch.equal(found[0], found[-1])
    if "fisher" not in options:
        exactly = {**choice, **EXACT, "eigen_refresh": "full"}
        exact = world.run(train_options, 3, exactly, torch.float64)[0]
        moved = (exact[-1] - vector(MLP.model())).norm()
        assert (found[-1].double() - exact[-1]).norm() < 0.25 * moved


def sampled_factors(rank: int, world_size: int) -> dict[str, Any]:
    """Of one step on the same batch everywhere; those that this rank keeps."""
    model = MLP.model()
    optimizer = dpkfac(model, fisher="sampled")
    take(model, optimizer, BATCHES[0])
    for block in optimizer._curvature.layers.blocks:
        if block.factors is not None and block.factors.a is None:
            block.factors = None
    return factors(optimizer)


def test_an_owner_draws_labels_of_its_own(world: World) -> None:
    """A sees no labels: it is that of the batch; G differs with the rank that draws."""
    results = world.run(sampled_factors, 3)
    one = world.run(sampled_factors, 1)[0]
    assert [sorted(kept) for kept in results] != [sorted(results[0])] * 3
    for rank, kept in enumerate(results):
        for name, (A, G) in kept.items():
            torch.testing.assert_close(A, one[name][0], rtol=1e-10, atol=1e-12)
            assert torch.allclose(G, one[name][1]) == (rank == 0)


# Usage.


def train_used(rank: int, world_size: int, how: str) -> list[Tensor]:
    """Micro-batches, closures and schedulers."""
    model = MLP.model()
    optimizer = dpkfac(model, accumulation_steps=2 if how == "micro-batches" else 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    trajectory = []
    for batch in BATCHES:
        x, y = shard(batch, rank, world_size)
        calls = 0

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        if how == "closure":
            assert isinstance(optimizer.step(closure), Tensor)
            assert calls == 1
        elif how == "micro-batches":
            optimizer.zero_grad()
            for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
                (cross_entropy(model(part_x), part_y) / 2).backward()
            optimizer.step()
        else:
            closure()
            optimizer.step()
        scheduler.step()
        trajectory.append(vector(model))
    return trajectory


def test_micro_batches_and_closures_change_nothing(world: World) -> None:
    plain = agreed(world.run(train_used, 3, "plain"))
    assert_same_trajectory(agreed(world.run(train_used, 3, "micro-batches")), plain)
    assert_same_trajectory(agreed(world.run(train_used, 3, "closure")), plain, rtol=0)
    unscheduled = by_choice(world.run(train_apart, 3, MLP, BATCHES, [{}]))[0]
    assert torch.equal(plain[1], unscheduled[1])
    assert not torch.allclose(plain[2], unscheduled[2], rtol=1e-9)


def train_wrapped(
    rank: int, world_size: int, as_view: bool, options: dict[str, Any]
) -> list[Tensor]:
    model = MLP.model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    optimizer = dpkfac(wrapped, **options)
    trajectory = []
    for batch in BATCHES:
        take(wrapped, optimizer, shard(batch, rank, world_size))
        trajectory.append(vector(model))
    return trajectory


def train_by_hand(rank: int, world_size: int, average: bool) -> list[Tensor]:
    model = MLP.model()
    optimizer = dpkfac(model, gradient_averaging=False, **BASES["SGD"])
    trajectory = []
    for batch in BATCHES:
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        for p in model.parameters():
            assert p.grad is not None
            if average:
                dist.all_reduce(p.grad)
                p.grad /= world_size
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_that_others_average_give_the_same_trajectory(
    world: World, world_size: int
) -> None:
    """DistributedDataParallel, or the user; an average of equal gradients does no harm either."""
    options = BASES["SGD"]
    expected = by_choice(world.run(train_apart, world_size, MLP, BATCHES, [options]))[0]
    for as_view, averaging in itertools.product((True, False), ("auto", True, False)):
        choice = {**options, "gradient_averaging": averaging}
        found = agreed(world.run(train_wrapped, world_size, as_view, choice))
        assert_same_trajectory(found, expected, hint=choice)
    assert_same_trajectory(agreed(world.run(train_by_hand, world_size, True)), expected)
    found = world.run(train_by_hand, world_size, False)[0]
    assert not torch.allclose(found[-1], expected[-1], rtol=1e-4)


# DistributedDataParallel with the owner hook.


def train_hooked(
    rank: int, world_size: int, how: dict[str, Any], options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], Counter[str]]:
    """Parameters, the gradients as backward has left them, and collectives of the last step."""
    model = MLP.model()
    wrapped = DistributedDataParallel(model, **how)
    optimizer = dpkfac(wrapped, **options)
    optimizer.register_owner_hook(wrapped)
    trajectory, gradients = [], []
    for batch in BATCHES:
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        with counted() as counts:
            cross_entropy(wrapped(x), y).backward()
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            gradients.append(torch.cat(parts))
            optimizer.step()
        trajectory.append(vector(model))
    return trajectory, gradients, +counts


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_owner_hook_sends_gradients_as_step_would(world: World, world_size: int) -> None:
    """During backward, in as many buckets as there are; and not a second time."""
    plain = {**BASES["SGD"], "inv_update_steps": 2}
    for options in (plain, {**plain, "assignment": "round_robin", "kl_clip": None}):
        expected = by_choice(world.run(train_apart, world_size, MLP, BATCHES, [options]))[0]
        for how in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}):
            results = world.run(train_hooked, world_size, how, options)
            found = agreed([trajectory for trajectory, _, _ in results])
            assert_same_trajectory(found, expected, hint=how)
            if world_size > 1:
                assert not torch.equal(results[0][1][0], results[1][1][0]), "sums are everywhere"
            for _, _, counts in results:
                many = "bucket_cap_mb" in how
                assert (counts["all_to_all_single"] > 3) == (many and world_size > 1)
                if not many:
                    assert counts.total() == (4 if world_size > 1 else 0), "with a refresh"


def frozen_for_a_step(rank: int, world_size: int, hooked: bool) -> list[Tensor]:
    """A layer freezes between the backward pass and the step: others own what is left."""
    model = MLP.model()
    wrapped = DistributedDataParallel(model)
    optimizer = dpkfac(wrapped if hooked else model, inv_update_steps=2, assignment="round_robin")
    if hooked:
        optimizer.register_owner_hook(wrapped)
    trajectory = []
    for step, batch in enumerate(BATCHES[:4]):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy((wrapped if hooked else model)(x), y).backward()
        if step == 1:
            model[0].requires_grad_(False)
            model[0].zero_grad()
        optimizer.step()
        model[0].requires_grad_(True)
        trajectory.append(vector(model))
    return trajectory


def test_owners_that_move_after_the_backward_pass_get_the_hooks_means(world: World) -> None:
    expected = agreed(world.run(frozen_for_a_step, 2, False))
    assert_same_trajectory(agreed(world.run(frozen_for_a_step, 2, True)), expected)


def hook_refusals(rank: int, world_size: int) -> list[str]:
    model, scaler = MLP.model(), torch.amp.GradScaler("cpu")
    wrapped, other = DistributedDataParallel(model), DistributedDataParallel(MLP.model())
    tries: list[tuple[dict[str, Any], Any]] = [
        ({}, model),
        ({}, other),
        ({"grad_scaler": scaler}, wrapped),
        (ALL_REDUCE, wrapped),
    ]
    messages = []
    for options, given_model in tries:
        with pytest.raises((TypeError, ValueError)) as error:
            dpkfac(wrapped, **options).register_owner_hook(given_model)
        messages.append(f"{error.type.__name__}: {error.value}")
    return messages


def test_the_owner_hook_is_refused_where_it_would_do_harm(world: World) -> None:
    starts = [
        "TypeError: Sequential is not a DistributedDataParallel model",
        "ValueError: the DistributedDataParallel model wraps another model",
        "ValueError: with the owner hook a GradScaler",
        "ValueError: gradient_exchange='all_reduce' averages gradients everywhere",
    ]
    for messages in world.run(hook_refusals, 2):
        for message, start in zip(messages, starts, strict=True):
            assert message.startswith(start)


# What is sent.


def sent(
    rank: int, world_size: int, System: Any, options: dict[str, Any]
) -> list[tuple[Counter[str], Counter[str]]]:
    """For each of five steps: elements that leave this rank, by collective; and their number.

    An all-reduce sends 2 (P - 1) / P of its buffer, which is counted P times over here.
    """
    model = network(WIDE).float()
    optimizer = System(model, **{**OPTIONS, **SINGLE, **options})
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
    x = torch.randn(4, WIDE[0], generator=torch.Generator().manual_seed(rank))
    for _ in range(5):
        elements.clear()
        wrapped = {"all_reduce": reducing, "all_to_all_single": sending}
        with replaced(dist, wrapped), counted() as counts:
            take(model, optimizer, (x, torch.zeros(4, dtype=torch.int64)))
        found.append((Counter(elements), +counts))
    return found


def volume(results: Sequence[Sequence[tuple[Counter[str], Counter[str]]]], step: int) -> float:
    """Elements that all ranks send."""
    each = [elements for elements, _ in (rank[step] for rank in results)]
    return sum(e["all_reduce"] / len(each) + e["all_to_all_single"] for e in each)


WIDE = [128, 256, 256, 10]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("exchange", "cost"), [("owner", 1.0), ("all_reduce", 1.5)])
def test_no_factor_is_sent_and_gradients_cost_what_they_must(
    world: World, world_size: int, exchange: str, cost: float
) -> None:
    """A step with statistics sends what one without does; a refresh, a number for each layer."""
    count = sum(p.numel() for p in network(WIDE).parameters())
    assert count >= 100_000
    averaging = 2 * (world_size - 1) * count
    intervals = {"factor_update_steps": 2, "inv_update_steps": 4}
    options = {"gradient_exchange": exchange, **intervals}
    results = world.run(sent, world_size, DPKFAC, options)
    refresh, neither, statistics = (volume(results, step) for step in (4, 1, 2))
    assert statistics == neither == volume(results, 3)
    assert refresh == neither + 2 * (world_size - 1) * 3
    for each in (refresh, neither):
        assert cost * averaging <= each <= (cost + 0.02) * averaging
    for _, counts in itertools.chain(*results):
        assert set(counts) <= {"all_reduce", "all_to_all_single"}, "nothing uncounted is sent"
    control = world.run(sent, world_size, KAISA, intervals)
    assert volume(control, 2) > 1.5 * volume(control, 1), "factors would be seen"


def collectives_of_steps(
    rank: int, world_size: int, layers: int, dtype: torch.dtype, options: dict[str, Any]
) -> list[int]:
    """Of a step that refreshes all, one that takes statistics, and one that does neither."""
    model = network([5, *[4] * (layers - 1), 3]).to(dtype)
    options = {**SINGLE, **options, "factor_update_steps": 2, "inv_update_steps": 4}
    optimizer = dpkfac(model, **options)
    each = []
    for batch in MLP.batches(5, n=8, dtype=dtype):
        with counted() as counts:
            take(model, optimizer, shard(batch, rank, world_size))
        each.append(counts.total())
    assert each[1] == each[3]
    return [each[4], each[2], each[1]]


@pytest.mark.parametrize("exchange", ["owner", "all_reduce"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_handful_of_collectives_however_many_layers(
    world: World, world_size: int, exchange: str
) -> None:
    """A word; gradients to owners; which solves failed; gradients to all.

    One each for another dtype.
    """
    options = {"gradient_exchange": exchange}
    for dtype, more in ((torch.float32, 0), (torch.bfloat16, 2)):
        few = world.run(collectives_of_steps, world_size, 3, dtype, options)
        many = world.run(collectives_of_steps, world_size, 12, dtype, options)
        assert few == many == [[4 + more, 3 + more, 3 + more]] * world_size
        assert max(few[0]) <= 6


def without_a_refresh(rank: int, world_size: int) -> int:
    """With the word before it; what DistributedDataParallel sends is not called by name."""
    model = DistributedDataParallel(MLP.model())
    optimizer = dpkfac(model, inv_update_steps=2)
    take(model, optimizer, shard(BATCHES[0], rank, world_size))
    with counted() as counts:
        take(model, optimizer, shard(BATCHES[1], rank, world_size))
    return counts.total()


def test_under_ddp_only_what_is_preconditioned_is_sent(world: World) -> None:
    assert world.run(without_a_refresh, 2) == [2, 2]
    assert world.run(without_a_refresh, 1) == [0]


def owners_beside_a_norm(rank: int, world_size: int) -> list[int]:
    """One large layer for rank 0, two small ones for rank 1, and a norm that is nobody's."""
    norm = nn.LayerNorm(30, bias=False)
    model = nn.Sequential(nn.Linear(9, 10), norm, nn.Linear(2, 3), nn.Linear(2, 3))
    optimizer = dpkfac(model)
    params = optimizer._training.averaged_params()
    _, ranks = optimizer._curvature.route(params, params)
    owners = dict(zip(params, ranks, strict=True))
    return [owners[layer.weight] for layer in model]


def test_parameters_of_no_layer_go_where_the_least_is_to_be_sent(world: World) -> None:
    assert world.run(owners_beside_a_norm, 2) == [[0, 1, 1, 1]] * 2


# What each rank has and says.


def possessions(
    rank: int, world_size: int, options: dict[str, Any]
) -> tuple[dict[str, tuple[str, int, int]], dict[str, int], int]:
    """Of each layer: the line of the summary, the hooks, and, held by inverses, the bytes."""
    model = network([40, 20, 3, 3, 3])
    optimizer = dpkfac(model, **options)
    batch = torch.randn(4, 40, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    for _ in range(2):
        take(model, optimizer, batch)
    rows = {
        row.name: (row.computed_by, row.factor_bytes, row.inverse_bytes)
        for row in optimizer.summary().rows
    }
    hooks = {name: hook_count(model.get_submodule(name)) for name in rows}
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for block in optimizer._curvature.layers.blocks
        if block.inverse is not None
        for part in vars(block.inverse).values()
    }
    return rows, hooks, sum(storages.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("assignment", ["balanced", "round_robin"])
def test_only_an_owner_has_a_layers_factors_inverse_and_hooks(
    world: World, world_size: int, assignment: str
) -> None:
    """And every rank's summary says who it is."""
    everything, _, _ = possessions(0, 1, {})
    results = world.run(possessions, world_size, {"assignment": assignment})
    for index, (name, (_, factor_bytes, inverse_bytes)) in enumerate(everything.items()):
        (owner,) = {rows[name][0] for rows, _, _ in results}
        if assignment == "round_robin":
            assert owner == f"owner {index % world_size}"
        for rank, (rows, hooks, _) in enumerate(results):
            mine = owner == f"owner {rank}"
            assert rows[name][1:] == ((factor_bytes, inverse_bytes) if mine else (0, 0))
            assert hooks[name] == int(mine)
    for rows, _, held in results:
        assert held <= 1.1 * sum(inverse for _, _, inverse in rows.values())
    names = {rows["0"][0] for rows, _, _ in results}
    assert len({owner for rows, _, _ in results for owner, _, _ in rows.values()}) == world_size
    assert len(names) == 1


def hooks_of_the_model(rank: int, world_size: int) -> list[int]:
    """With sampled labels: of the root, while this rank has layers and after they have gone."""
    model = nn.Sequential(nn.Linear(5, 3).double())
    optimizer = dpkfac(model, fisher="sampled")
    counts = [hook_count(model)]
    follow_up = [BATCHES[0]] * 2
    go(model, optimizer, MLP, follow_up)
    counts.append(hook_count(model))
    optimizer.close()
    return [*counts, hook_count(model)]


def test_a_rank_without_layers_hooks_nothing(world: World) -> None:
    """More processes than layers; those with a layer draw labels, from the root's output."""
    assert world.run(hooks_of_the_model, 3) == [[3, 3, 0], [0, 0, 0], [0, 0, 0]]


# Layers that come and go.


def train_thawing(
    rank: int,
    world_size: int,
    frozen: dict[int, Sequence[str]],
    batches: Sequence[Batch],
    System: Any,
    options: dict[str, Any],
) -> tuple[list[Tensor], list[list[str]]]:
    """`frozen`: by step, the names of the frozen layers, or of the parameters."""
    model = network([5, 6, 6, 6, 3])
    optimizer = System(list(model.parameters()), model=model, **{**OPTIONS, **options})
    trajectory, owners = [], []
    for step, batch in enumerate(batches):
        for name, p in model.named_parameters():
            p.requires_grad_(not any(name.startswith(n) for n in frozen.get(step, ())))
        trajectory += go(model, optimizer, MLP, [batch])
        owners.append([row.computed_by for row in optimizer.summary().rows])
    return trajectory, owners


FROZEN = {
    2: ["0."],
    3: ["0.", "4.", "6.bias"],
    4: ["0.", "4.", "6.bias"],
    5: ["4."],
    6: ["2.weight"],
}


@pytest.mark.parametrize("exchange", ["owner", "all_reduce"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_layers_that_are_frozen_and_thawed_take_their_factors_along(
    world: World, world_size: int, exchange: str
) -> None:
    """Between two takings of statistics it makes no difference who owns what."""
    options = {"factor_update_steps": 4, "factor_decay": 0.7, "solver": "inverse"}
    frozen = {step: [n for n in FROZEN[step] if "bias" not in n] for step in FROZEN}
    batches = [*BATCHES, *BATCHES[:3]]
    choice = {**options, "gradient_exchange": exchange}
    results = world.run(train_thawing, world_size, frozen, batches, DPKFAC, choice)
    found = agreed([trajectory for trajectory, _ in results])
    owners = results[0][1]
    assert all(each == owners for _, each in results)
    assert world_size == 1 or any(a != b for a, b in itertools.pairwise(owners)), "nothing moved"
    expected, _ = train_thawing(0, 1, frozen, batches, KAISA, options)
    assert_same_trajectory(found, expected)
    assert not torch.allclose(expected[2], train_thawing(0, 1, {}, batches, KAISA, options)[0][2])


@pytest.mark.parametrize("first", [[], ["0.", "2."], ["0.", "2.", "4."]], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_frozen_and_thawed_at_any_time_leave_the_ranks_together(
    world: World, world_size: int, first: list[str]
) -> None:
    """Biases too, which give a layer other factors; and layers frozen from the start."""
    frozen = {0: first, 1: first, **FROZEN}
    for how in ({}, ALL_REDUCE):
        options = {"inv_update_steps": 2, **how}
        results = world.run(train_thawing, world_size, frozen, BATCHES, DPKFAC, options, timeout=20)
        found = agreed([trajectory for trajectory, _ in results])
        assert all(parameters.isfinite().all() for parameters in found)
        for before, after in itertools.pairwise(found):
            assert not torch.equal(before, after)


class Forked(nn.Module):
    """The second of three layers may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.head(torch.tanh(self.branch(x)) if branch else x)


def train_forked(
    rank: int, world_size: int, uses: Sequence[set[int]], wrap: bool, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor | None], list[tuple[bool, str]]]:
    """`uses`: for each step, the ranks that take the branch. Parameters, gradients before."""
    torch.manual_seed(0)
    model = Forked().double()
    called = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
    optimizer = dpkfac(called, kl_clip=None, **options)
    trajectory, gradients, solved = [vector(model)], [], []
    for batch, users in zip(BATCHES, uses, strict=False):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(called(x, rank in users), y).backward()
        before = model.branch.weight.grad
        gradients.append(None if before is None else before.clone())
        optimizer.step()
        trajectory.append(vector(model))
        (block,) = (b for b in optimizer._curvature.layers.blocks if b.name == "branch")
        solved.append((block.solved, optimizer._curvature.plan[block].said))
        if not users and not wrap:
            assert model.branch.weight.grad is None
    return trajectory, gradients, solved


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "DDP"])
@pytest.mark.parametrize("exchange", ["owner", "all_reduce"])
def test_a_layer_that_its_owner_does_not_see_runs_on_its_gradient(
    world: World, exchange: str, wrap: bool
) -> None:
    """Until it does; used by nobody, its gradient is None, and it stays as it is."""
    uses: list[set[int]] = [set(), {1}, {1, 2}, {0, 1, 2}, {2}, set()]
    options = {"gradient_exchange": exchange}
    results = world.run(train_forked, 3, uses, wrap, options)
    found = agreed([trajectory for trajectory, _, _ in results])
    branch = slice(36, 36 + 36)  # the trunk has 5 x 6 + 6; the branch's weight has 6 x 6
    steps = [b[branch] - a[branch] for a, b in itertools.pairwise(found)]
    assert not steps[0].any()
    if not wrap:
        assert not steps[5].any()
    for step in range(1, 5):
        before = [gradients[step] for _, gradients, _ in results]
        shares = [torch.zeros(6, 6, dtype=torch.float64) if g is None else g for g in before]
        plain = -OPTIONS["lr"] * torch.stack(shares).mean(0).flatten()
        assert plain.any()
        owner_knows = step >= 3
        for _, _, solved in results:
            assert solved[step] == (owner_knows, "owner 0")
        assert torch.allclose(steps[step], plain, rtol=1e-9) == (not owner_knows)


def train_unused(rank: int, world_size: int) -> tuple[bool, bool, list[str], list[str]]:
    """Of a layer that is never called; statuses, and warnings."""
    case = ZOO["unused"]
    model = case.model()
    optimizer = dpkfac(model, weight_decay=0.1)
    before = model.get_parameter("unused.weight").clone()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        for batch in case.batches(3, n=12):
            take(model, optimizer, shard(batch, rank, world_size))
    after = model.get_parameter("unused.weight")
    statuses = [row.status for row in optimizer.summary().rows]
    return after.grad is None, torch.equal(before, after), statuses, caught(messages)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_gradient_that_is_none_everywhere_stays_none(world: World, world_size: int) -> None:
    """As it would for the base alone: no weight decay either. All know; its owner says so."""
    results = world.run(train_unused, world_size)
    for stays_none, stays, statuses, messages in results:
        assert stays_none
        assert stays
        assert statuses == ["preconditioned", "base", "preconditioned"]
        assert all("no statistics arrived for 'unused'" in message for message in messages)
    assert any(messages for _, _, _, messages in results)


def train_uncaptured(rank: int, world_size: int) -> tuple[list[Tensor], list[str]]:
    """Hooks have gone, as with a model that was compiled before."""
    model = MLP.model()
    optimizer = dpkfac(model)
    optimizer._curvature.layers.capture.detach()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        return go(model, optimizer, MLP, BATCHES[:3]), caught(messages)


@pytest.mark.parametrize("world_size", [1, 3])
def test_without_any_statistics_it_is_the_base_and_every_rank_says_so(
    world: World, world_size: int
) -> None:
    results = world.run(train_uncaptured, world_size)
    model = MLP.model()
    base = torch.optim.SGD(model.parameters(), lr=OPTIONS["lr"])
    found = agreed([trajectory for trajectory, _ in results])
    assert_same_trajectory(found, go(model, base, MLP, BATCHES[:3]))
    for _, messages in results:
        (message,) = (m for m in messages if "no layer gave statistics" in m)
        assert "make the optimizer before torch.compile's first run" in message


def train_idle(rank: int, world_size: int, idle: int, options: dict[str, Any]) -> list[Tensor]:
    """From step 1 on, one rank has no data, and takes its steps all the same."""
    model = MLP.model()
    optimizer = dpkfac(model, factor_update_steps=10, **options)
    trajectory = []
    for step, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        if rank != idle or step == 0:
            # Two of three ranks: the mean over three is to be the mean over the two.
            scale = 1.0 if step == 0 else 1.5
            (cross_entropy(model(batch[0]), batch[1]) * scale).backward()
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


@pytest.mark.parametrize("idle", [0, 2])
def test_a_rank_without_data_takes_part(world: World, idle: int) -> None:
    """With what it owns; the others' gradients come to it."""
    expected = train(0, 1, MLP, BATCHES, {"factor_update_steps": 10})
    for how in ({}, ALL_REDUCE):
        assert_same_trajectory(agreed(world.run(train_idle, 3, idle, how)), expected)


def add_group(rank: int, world_size: int, System: Any) -> list[Tensor]:
    """The last layer joins after two steps."""
    model = MLP.model()
    first = [p for name, p in model.named_parameters() if not name.startswith("4")]
    optimizer = System(first, model=model, **OPTIONS)
    trajectory = go(model, optimizer, MLP, BATCHES[:2])
    optimizer.add_param_group({"params": list(model.get_submodule("4").parameters())})
    return trajectory + go(model, optimizer, MLP, BATCHES[2:])


def test_a_group_that_is_added_finds_an_owner(world: World) -> None:
    for world_size in (1, 2, 3):
        agreed(world.run(add_group, world_size, DPKFAC))
    assert_same_trajectory(world.run(add_group, 1, DPKFAC)[0], add_group(0, 1, KAISA))


def train_in_groups(rank: int, world_size: int, members: list[list[int]]) -> list[Tensor]:
    """Each group on its own, all at the same time; the data differ by group."""
    groups = [dist.new_group(ranks) for ranks in members]
    index = next(i for i, ranks in enumerate(members) if rank in ranks)
    case = [MLP, CONV][index]
    model = case.model()
    optimizer = dpkfac(model, process_group=groups[index])
    return go(model, optimizer, case, case.batches(3, n=6))


def test_a_group_trains_by_itself(world: World) -> None:
    members = [[0, 2], [1, 3]]
    results = world.run(train_in_groups, 4, members)
    for case, ranks in zip((MLP, CONV), members, strict=True):
        expected = alone(case, case.batches(3, n=6), {})
        assert_same_trajectory(agreed([results[rank] for rank in ranks]), expected)


def train_copy(rank: int, world_size: int, how: str) -> tuple[list[Tensor], list[Tensor]]:
    """A copy after two steps; both go on."""
    model = MLP.model()
    optimizer = dpkfac(model, momentum=0.9, inv_update_steps=2)
    go(model, optimizer, MLP, BATCHES[:2])
    if how == "deepcopy":
        twin, copied = copy.deepcopy((model, optimizer))
    else:
        twin, copied = pickle.loads(pickle.dumps((model, optimizer)))
    return go(twin, copied, MLP, BATCHES[2:]), go(model, optimizer, MLP, BATCHES[2:])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_model_and_optimizer_go_on(world: World, how: str) -> None:
    expected = train(0, 1, MLP, BATCHES, {"momentum": 0.9, "inv_update_steps": 2})[2:]
    for world_size in (2, 4):
        results = world.run(train_copy, world_size, how)
        assert_same_trajectory(agreed([original for _, original in results]), expected)
        assert_same_trajectory(agreed([copied for copied, _ in results]), expected)


# Decompositions that fail.


def train_failing(
    rank: int, world_size: int, until: int, limit: int, options: dict[str, Any]
) -> tuple[list[Tensor], list[int], list[str], str]:
    """From step 2 on and before `until`, rank 1 can decompose nothing; an error ends it."""
    model = MLP.model()
    optimizer = dpkfac(model, inv_update_steps=2, max_consecutive_failures=limit, **options)

    def fails(matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise torch.linalg.LinAlgError("failed to converge")

    trajectory, failed = [], []
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        for step, batch in enumerate(BATCHES):
            spoils = rank == 1 and 2 <= step < until
            with replaced(torch.linalg, {"eigh": fails, "cholesky_ex": fails} if spoils else {}):
                try:
                    trajectory += go(model, optimizer, MLP, [shard(batch, rank, world_size)])
                except DecompositionError as error:
                    return trajectory, failed, caught(messages), str(error)
            failed.append(optimizer.summary().failed)
    return trajectory, failed, caught(messages), ""


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_an_owner_that_fails_once_leaves_its_old_inverses(world: World, solver: str) -> None:
    """As all ranks know; at the next refresh all is well again."""
    results = world.run(train_failing, 3, 4, 3, {"solver": solver})
    agreed([trajectory for trajectory, _, _, _ in results])
    for _, failed, messages, error in results:
        assert failed == [0, 0, 1, 1, 0, 0, 0]
        assert not error
        (message,) = messages
        assert "could not be decomposed at step 2" in message
        assert "its last inverse is kept" in message
    sound = world.run(train_failing, 3, 0, 3, {"solver": solver})
    assert not torch.allclose(results[0][0][2], sound[0][0][2], rtol=1e-9)


@pytest.mark.parametrize("exchange", ["owner", "all_reduce"])
@pytest.mark.parametrize("limit", [1, 2])
def test_too_many_failures_of_one_owner_are_an_error_on_every_rank(
    world: World, limit: int, exchange: str
) -> None:
    """At the same step, with the same parameters until then."""
    options = {"gradient_exchange": exchange}
    results = world.run(train_failing, 3, 100, limit, options, timeout=20)
    found = agreed([trajectory for trajectory, _, _, _ in results])
    assert len(found) == 2 * limit
    for _, _, _, error in results:
        assert error == results[0][3]
        assert f"could not be decomposed {limit} refreshes in a row" in error


# Checkpoints.

INTERVALS = {"inv_update_steps": 3}


def refused(rank: int, world_size: int) -> tuple[list[Tensor], list[str]]:
    """Rank 0 alone asks for its state after every step, first without the others' factors."""
    model = MLP.model()
    optimizer = dpkfac(model)
    trajectory, messages = [], []
    for batch in BATCHES[:3]:
        trajectory += go(model, optimizer, MLP, [batch])
        if rank == 0:
            with pytest.raises(SecondOrderError) as error:
                optimizer.state_dict()
            messages.append(str(error.value))
        optimizer.consolidate(to=0)
        if rank == 0:
            optimizer.state_dict()
    return trajectory, messages


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_checkpoint_without_the_factors_of_others_is_refused(
    world: World, world_size: int
) -> None:
    """Whoever asks alone waits for nobody; and asking has changed nothing."""
    results = world.run(refused, world_size, timeout=20)
    found = agreed([trajectory for trajectory, _ in results])
    assert_same_trajectory(found, train(0, 1, MLP, BATCHES[:3]))
    assert len(results[0][1]) == 3
    for message in results[0][1]:
        assert "DPKFAC.state_dict() would lack" in message
        assert "consolidate(to=0) on every process" in message


def saved(
    rank: int, world_size: int, System: Any, options: dict[str, Any], apart: bool = False
) -> bytes:
    """After three steps, by rank 0."""
    model = MLP.model()
    optimizer = System(model, **{**OPTIONS, **options})
    batches = [shard(b, rank, world_size) if apart else b for b in BATCHES[:3]]
    go(model, optimizer, MLP, batches)
    optimizer.consolidate(to=0)
    if rank != 0:
        return b""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return buffer.getvalue()


def resume(
    rank: int, world_size: int, data: bytes, System: Any, options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any], list[str], list[list[str]]]:
    """Parameters, factors kept here after loading, warnings, and layers without inverse."""
    state = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = System(model, **{**OPTIONS, **options})
    model.load_state_dict(state["model"])
    trajectory, unsolved = [], []
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state["optimizer"])
        kept = {
            block.name: block.factors.matrices(torch.float64)
            for block in optimizer._curvature.layers.blocks
            if block.factors is not None and block.factors.a is not None
        }
        for batch in BATCHES[3:]:
            trajectory += go(model, optimizer, MLP, [batch])
            unsolved.append(
                [block.name for block in optimizer._curvature.layers.blocks if not block.solved]
            )
    return trajectory, kept, caught(messages), unsolved


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_a_checkpoint_continues_on_any_number_of_processes(
    world: World, before: int, base: str
) -> None:
    """With the same batch on every rank the trajectory is one; in KAISA too."""
    options = {**INTERVALS, **BASES[base], "solver": "inverse"}
    expected = train(0, 1, MLP, BATCHES, options)[3:]
    data = world.run(saved, before, DPKFAC, options)[0]
    for after, System in itertools.product((1, 2, 3, 4), (DPKFAC, KAISA)):
        results = world.run(resume, after, data, System, options)
        found = agreed([trajectory for trajectory, _, _, _ in results])
        assert_same_trajectory(found, expected, hint=f"on {after} with {System.__name__}")
        assert not any(messages for _, _, messages, _ in results)


@pytest.mark.parametrize("spread", [{}, {"factor_exchange": "reduce", "grad_worker_fraction": 0.5}])
def test_a_checkpoint_of_kaisa_continues(world: World, spread: dict[str, Any]) -> None:
    expected = train(0, 1, MLP, BATCHES, INTERVALS)[3:]
    data = world.run(saved, 2, KAISA, {**INTERVALS, **spread})[0]
    keys = [
        set(entry["curvature"])
        for each in (data, world.run(saved, 2, DPKFAC, INTERVALS)[0])
        for entry in torch.load(io.BytesIO(each))["optimizer"]["state"].values()
    ]
    assert keys[: len(keys) // 2] == keys[len(keys) // 2 :]
    for after in (1, 2, 3):
        results = world.run(resume, after, data, DPKFAC, INTERVALS)
        assert_same_trajectory(agreed([trajectory for trajectory, *_ in results]), expected)


@pytest.mark.parametrize("assignment", ["balanced", "round_robin"])
def test_every_factor_arrives_at_its_new_owner(world: World, assignment: str) -> None:
    """From batches that differ by rank: bit for bit, each on one rank."""
    data = world.run(saved, 4, DPKFAC, INTERVALS, apart=True)[0]
    whole = resume(0, 1, data, DPKFAC, {})[1]
    assert sorted(whole) == list(LAYERS)
    for after in (2, 3, 4):
        results = world.run(resume, after, data, DPKFAC, {"assignment": assignment})
        agreed([trajectory for trajectory, *_ in results])
        names = [name for _, kept, _, _ in results for name in kept]
        assert sorted(names) == list(LAYERS)
        for _, kept, _, _ in results:
            for name, pair in kept.items():
                assert all(torch.equal(a, b) for a, b in zip(pair, whole[name], strict=True))


def damaged(data: bytes, layer: str, *parts: str) -> bytes:
    state = torch.load(io.BytesIO(data))
    curvature = state["optimizer"]["state"][int(layer)]["curvature"]
    for part in parts:
        del curvature[part]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


EVERYTHING = "A", "G", "average_weight", "mean_eigenvalues"


@pytest.mark.parametrize("parts", [("A",), ("A", "G"), EVERYTHING], ids=str)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_what_an_owner_took_to_its_grave_is_built_anew(
    world: World, after: int, parts: tuple[str, ...]
) -> None:
    """A warning on every rank names the layer; until it has statistics it has its base gradient."""
    data = damaged(world.run(saved, 4, DPKFAC, {})[0], "2", *parts)
    results = world.run(resume, after, data, DPKFAC, {"kl_clip": None}, timeout=20)
    found = agreed([trajectory for trajectory, *_ in results])
    for _, _, messages, unsolved in results:
        (message,) = messages
        assert "a factor of layer '2' is lost" in message
        assert unsolved == [["2"], [], [], []]
    expected = resume(0, 1, data, KAISA, {"kl_clip": None, "skip_layers": ["2"]})[0]
    assert_same_trajectory(found[:1], expected[:1])
    assert not torch.allclose(found[1], expected[1], rtol=1e-6)


def save_dcp(rank: int, world_size: int, path: str, options: dict[str, Any]) -> None:
    model = MLP.model()
    optimizer = dpkfac(model, **options)
    go(model, optimizer, MLP, BATCHES[:3])
    dcp.save(sharded(model, optimizer), checkpoint_id=path)


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def load_dcp(
    rank: int, world_size: int, path: str, System: Any, options: dict[str, Any], then: str = ""
) -> tuple[list[Tensor], Counter[str]]:
    """`then`: what is done before the next step."""
    model = MLP.model(seed=5)
    optimizer = System(model, **{**OPTIONS, **options})
    state = sharded(model, optimizer)
    dcp.load(state, checkpoint_id=path, no_dist=world_size == 1)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    letters: Counter[str] = Counter()
    if then == "consolidate":
        optimizer.consolidate(to=0)
        parts = optimizer.state_dict()["state"].values() if rank == 0 else ()
        letters = Counter(w for part in parts for w in "AG" if w in part["curvature"])
    if then == "freeze":
        for name in ("0", "4"):
            model.get_submodule(name).requires_grad_(False)
    return go(model, optimizer, MLP, BATCHES[3:]), letters


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("before", [2, 4])
def test_distributed_checkpoint_needs_no_consolidation(
    world: World, tmp_path: Path, before: int
) -> None:
    """Each rank writes and reads its own layers' factors; KAISA reads them too."""
    options = {**INTERVALS, "momentum": 0.9}
    expected = train(0, 1, MLP, BATCHES, options)[3:]
    world.run(save_dcp, before, str(tmp_path), options)
    for after, System in ((1, DPKFAC), (2, DPKFAC), (3, DPKFAC), (4, DPKFAC), (2, KAISA)):
        results = world.run(load_dcp, after, str(tmp_path), System, options)
        found = agreed([trajectory for trajectory, _ in results])
        assert_same_trajectory(found, expected, hint=f"on {after} with {System.__name__}")


@pytest.mark.parametrize("then", ["consolidate", "freeze"])
def test_after_a_distributed_load_the_ranks_move_and_collect_together(
    world: World, tmp_path: Path, then: str
) -> None:
    """Before new statistics, when each has heard of its own layers alone."""
    options = {"inv_update_steps": 4, "factor_update_steps": 4}
    world.run(save_dcp, 2, str(tmp_path), options)
    one, _ = world.run(load_dcp, 1, str(tmp_path), DPKFAC, options, then)[0]
    for after in (2, 3):
        results = world.run(load_dcp, after, str(tmp_path), DPKFAC, options, then, timeout=20)
        found = agreed([trajectory for trajectory, _ in results])
        assert_same_trajectory(found, one, hint=f"on {after}")
        if then == "consolidate":
            assert results[0][1] == {"A": 3, "G": 3}
