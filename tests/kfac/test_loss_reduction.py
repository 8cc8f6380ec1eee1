"""With `loss_reduction="step_mean"`, set or detected, each loss is divided by the step's terms.

A step then does not depend on how its batch is split."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import fsdp_training
import pytest
import torch
from combinations import fractional_product
from models import ZOO
from optimizer_cases import (
    KRONECKER,
    assert_same_factors,
    each_kronecker,
    factors,
    hook_count,
    make,
    noted,
)
from ranks import agreed, assert_same_trajectory, vector
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from second_order import KAISA, DistKFAC, RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pool import World
    from reference import Batch

MLP = ZOO["mlp"]
N = 40
STEPS = 4
BATCHES = MLP.batches(STEPS, n=N)
SIZES = (4, 36)
SGD = {"kl_clip": 1e-3, "momentum": 0.9}  # a clip that binds
ADAM = {"base": torch.optim.Adam, "lr": 0.01}
CUTS = (((4, 2), (30, 4)), ((1, 9), (28, 2)))  # by step, of the two ranks: sizes of micro-batches


def pieces(batch: Batch, sizes: Sequence[int]) -> Iterable[Batch]:
    return zip(*(part.split(sizes) for part in batch), strict=True)


def cut(model: nn.Module, batch: Batch, sizes: Sequence[int] = SIZES, case: Any = MLP) -> None:
    """Backward passes of pieces of a batch, each loss divided by the terms of all."""
    for x, y in pieces(batch, sizes):
        (case.loss(model(x), y) * (len(x) / len(batch[0]))).backward()


def trained(System: Any, sizes: Sequence[int] | None, case: Any = MLP, **options: Any) -> Any:
    """The parameters after each step, and the optimizer; of whole batches without sizes."""
    model = case.model()
    optimizer = make(System, model, **options)
    trajectory = []
    for batch in BATCHES if case is MLP else case.batches(STEPS, n=6):
        optimizer.zero_grad()
        cut(model, batch, sizes or [len(batch[0])], case)
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory, optimizer


def off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The distance of the ends, relative to the movement."""
    start = vector(MLP.model())
    return float((found[-1] - expected[-1]).norm() / (expected[-1] - start).norm())


@pytest.mark.parametrize(
    ("System", "base", "sizes"),
    fractional_product(KRONECKER, [SGD, ADAM], [SIZES, (1, 30, 9), (20, 20)], part=3),
)
def test_any_split_into_micro_batches_trains_like_the_whole_batch(
    System: Any, base: Any, sizes: Any
) -> None:
    whole, before = trained(System, None, loss_reduction="mean", **base)
    found, optimizer = trained(System, sizes, loss_reduction="step_mean", **base)
    assert off(found, whole) < 1e-10
    assert_same_factors(factors(optimizer), factors(before))
    if base is SGD:
        clip = optimizer.metrics()["clip"]
        assert clip < 1
        assert clip == pytest.approx(before.metrics()["clip"])


@pytest.mark.parametrize(
    "name",
    ["conv_grouped", "shared_linear", "shared_conv", "attention", "tied", "language_model", "lora"],
)
def test_loss_reduction_works_for_every_kind_of_layer(name: str) -> None:
    """Includes layers used twice in a pass, and layers with two gradient factors."""
    case = ZOO[name]
    whole, before = trained(KAISA, None, case, **ADAM)
    found, optimizer = trained(KAISA, (1, 5), case, loss_reduction="step_mean", **ADAM)
    assert_same_factors(factors(optimizer), factors(before), rtol=1e-9)
    assert_same_trajectory(found, whole)


def share_of(batch: Batch, step: int, rank: int, world_size: int) -> list[Batch]:
    """A rank's micro-batches, of a step whose batch has 40 rows."""
    sizes = CUTS[step % 2]
    parts = list(pieces(batch, [n for each in sizes for n in each]))
    return parts if world_size == 1 else parts[2 * rank : 2 * rank + 2]


def divided(
    rank: int, world_size: int, System: Any, options: dict[str, Any], how: str = "plain"
) -> list[Tensor]:
    """The parameters after each step on this rank's micro-batches."""
    model: nn.Module = MLP.model()
    outer = DistributedDataParallel(model) if how == "DDP" else model
    if how == "FSDP2":
        fully_shard(model)
    optimizer = make(System, outer, loss_reduction="step_mean", **options)
    trajectory = []
    for step, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        for x, y in share_of(batch, step, rank, world_size):
            (world_size * MLP.loss(outer(x), y) * (len(x) / N)).backward()
        optimizer.step()
        trajectory.append(fsdp_training.whole(model))
    return trajectory


@pytest.mark.parametrize("System", [KAISA, DistKFAC])
@pytest.mark.parametrize("how", ["plain", "DDP", "FSDP2"])
def test_unequal_micro_batches_train_like_the_whole_batch(
    world: World, System: Any, how: str
) -> None:
    ranks = world.run(divided, 2, System, SGD, how)
    whole, _ = trained(System, None, **SGD)
    assert_same_trajectory(agreed(ranks), whole)


@pytest.mark.parametrize("exchange", ["reduce", "pipelined"])
def test_unequal_micro_batches_work_with_every_factor_exchange(world: World, exchange: str) -> None:
    ranks = world.run(divided, 2, KAISA, {**SGD, "factor_exchange": exchange})
    whole, _ = trained(KAISA, None, **SGD)
    assert_same_trajectory(agreed(ranks), whole)


class LossOutside(nn.Module):
    """Takes the number, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP.model()

    def forward(self, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
        number = kwargs.get("num_items_in_batch", len(y))
        return functional.cross_entropy(self.inner(x), y, reduction="sum") / number


def warnings_of(System: Any, sizes: Sequence[int], **options: Any) -> tuple[Any, list[str]]:
    """The optimizer after some steps, and what it has warned of."""
    model = LossOutside()
    optimizer = make(System, model, **options)
    with noted() as warned:
        for batch in BATCHES:
            optimizer.zero_grad()
            with torch.no_grad():
                model(*batch)
            for x, y in pieces(batch, sizes):
                model(x, y, num_items_in_batch=torch.tensor(N)).backward()
            optimizer.step()
    return optimizer, warned


@each_kronecker
def test_a_model_that_receives_num_items_in_batch_is_detected(System: Any) -> None:
    whole, _ = trained(System, None, **SGD)
    optimizer, messages = warnings_of(System, SIZES, **SGD)
    found = vector(optimizer._training.model)
    assert off([found], whole) < 1e-10
    (line,) = messages
    assert "2 backward passes in a step: the model was given num_items_in_batch" in line
    assert "loss_reduction='pass_mean'" in line


def test_only_a_training_pass_detects_the_reduction() -> None:
    model = LossOutside()
    optimizer = make(KAISA, model)
    with torch.no_grad():
        model(*BATCHES[0], num_items_in_batch=N)
    assert optimizer._curvature.layers.losses.current() == "mean"
    model(*BATCHES[0], num_items_in_batch=N)
    assert optimizer._curvature.layers.losses.current() == "step_mean"


def test_the_detection_hook_is_removed_with_the_optimizer() -> None:
    model = LossOutside()
    optimizer = make(KAISA, model)
    with optimizer.hooks_removed():
        assert hook_count(model) == 0
    assert hook_count(model) == 4
    optimizer.close()
    assert hook_count(model) == 0
    optimizer = make(KAISA, model)
    del optimizer
    gc.collect()
    assert hook_count(model) == 0


def differently(rank: int, world_size: int, step: int) -> str:
    """The model gets the number on one rank only, at the first step or at the second."""
    model = LossOutside()
    optimizer = make(KAISA, model)
    for batch in BATCHES[:step]:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    more = {"num_items_in_batch": N} if rank == 0 else {}
    model(*BATCHES[step], **more).backward()
    with pytest.raises(RankMismatchError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("step", [0, 1])
def test_ranks_with_different_reductions_raise(world: World, step: int) -> None:
    for messages in world.run(differently, 2, step):
        assert "step_mean" in messages


def train_with_items(
    rank: int, world_size: int, System: Any, idle: Sequence[int]
) -> tuple[list[Tensor], str]:
    """Some ranks have no batch at the first step; the whole batch has N rows."""
    model = LossOutside()
    optimizer = make(System, model, **SGD)
    trajectory = []
    for step, batch in enumerate(BATCHES):
        working = [r for r in range(world_size) if step > 0 or r not in idle]
        optimizer.zero_grad()
        if rank in working:
            n = N // len(working)
            start = n * working.index(rank)
            x, y = (part[start : start + n] for part in batch)
            (world_size * model(x, y, num_items_in_batch=N)).backward()
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory, optimizer._curvature.layers.losses.current()


@pytest.mark.parametrize("System", [KAISA, DistKFAC])
@pytest.mark.parametrize("idle", [[0], [1]])
def test_a_rank_without_a_batch_adopts_the_reduction(
    world: World, System: Any, idle: list[int]
) -> None:
    ranks = world.run(train_with_items, 2, System, idle)
    assert [reduction for _, reduction in ranks] == ["step_mean"] * 2
    whole, _ = train_with_items(0, 1, System, [])
    found = agreed([trajectory for trajectory, _ in ranks])
    assert_same_trajectory(found[:1], whole[:1])


def test_a_complete_state_loads_into_a_fresh_optimizer() -> None:
    """The state has no entry that depends on whether the model has received the number."""
    complete = StateDictOptions(full_state_dict=True)
    optimizer, _ = warnings_of(KAISA, SIZES, **SGD)
    model = optimizer.training.model
    state = get_optimizer_state_dict(model, optimizer, options=complete)
    fresh = LossOutside()
    resumed = make(KAISA, fresh, **SGD)
    set_optimizer_state_dict(fresh, resumed, state, options=complete)
    assert resumed.training.steps == STEPS


def test_a_graph_can_checkpoint_the_whole_model() -> None:
    """In a graph, the forward of a checkpoint must not change attributes of a hook."""
    model = LossOutside()
    optimizer = make(KAISA, model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: Tensor, y: Tensor) -> Any:
        return checkpoint(model, x, y, use_reentrant=False)

    loss(*BATCHES[0]).backward()
    optimizer.step()
    assert optimizer.metrics()["layers/solved"] == 3
