"""Wherever work is placed: the trajectory of one process, also of what freezes and of copies.

For KAISA, its `reduce` exchange and DPKFAC alike; DPKFAC's ranks have the same batch each."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from combinations import fractional_product
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO
from placement_training import (
    DPKFAC_ALL_REDUCE,
    DPKFAC_OWNER,
    FROZEN,
    KAISA_ALL_REDUCE,
    KAISA_REDUCE,
    LONG,
    PLACEMENTS,
    Placement,
    Training,
    count_factors,
    falling,
    follow_placed,
    growing,
    network,
    train_each_placed,
    train_thawing,
)
from ranks import agreed, assert_same_trajectory, by_reference, go, kaisa, shard, train
from torch import Tensor

from second_order import DPKFAC, KAISA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
CONV = ZOO["conv_grouped"]
SHORT = LONG[:5]  # at intervals of 3 there is a second refresh, and a step after it
each_placement = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


HALVES = Placement("KAISA", KAISA, {"grad_worker_fraction": 0.5})
SPREAD = Placement("reduce", KAISA, {**KAISA_REDUCE.options, "grad_worker_fraction": 0.5})


# One model with each kind of layer.
KINDS = ["conv1d", "conv3d", "conv_depthwise", "embedding", "language_model", "lora", "norms"]
KINDS += ["sequence_mlp", "shared_conv", "shared_linear", "tied", "transformer", "unused"]


def kinds_of(placement: Placement) -> list[Training]:
    return [
        Training(
            ZOO[name],
            ZOO[name].batches(3, n=8),
            {
                "kfac_approx": ZOO[name].shared or "expand",
                "relative_damping": placement is not HALVES,
            },
        )
        for name in KINDS
    ]


@pytest.mark.parametrize(
    ("placement", "world_size"),
    [(HALVES, 4), (SPREAD, 4), (DPKFAC_OWNER, 3)],
    ids=str,
)
def test_every_layer_kind_gives_the_trajectory_of_one_process(
    world: World, placement: Placement, world_size: int
) -> None:
    trainings = kinds_of(placement)
    results = world.run(train_each_placed, world_size, placement, trainings)
    for each, parallel in zip(trainings, zip(*results, strict=True), strict=True):
        expected = train(0, 1, each.case, each.batches, each.options)
        assert_same_trajectory(agreed(parallel), expected, hint=each.case)


def every_third(step: int) -> int:
    return 3


def falling_clip(step: int) -> float:
    return 1e-3 * 0.5**step


def later_more(step: int) -> float:
    return 0.5 + 0.1 * min(step, 4)


VARIATIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"base": torch.optim.Adam, "lr": 0.01},
    "no clip": {"kl_clip": None},
    "clip as callable": {"kl_clip": falling_clip},
    "intervals": {"factor_update_steps": 2, "inv_update_steps": 3},
    "intervals as callables": {"factor_update_steps": growing, "inv_update_steps": every_third},
    "damping as callable": {"damping": falling},
    "relative damping as callable": {"damping": falling, "relative_damping": True},
    "scale of the gradient": {"grafting": "gradient", "step_scale": False},
    "scale of the gradient, inverse": {
        "grafting": "gradient",
        "step_scale": False,
        "solver": "inverse",
    },
    "decay as callable": {"factor_decay": later_more},
    "some layers": {"skip_layers": ["2"]},
    "no layer": {"skip_layers": ["*"]},
    "tensor lr": {"lr": torch.tensor(0.05, dtype=torch.float64)},
}


PLACED: list[tuple[Placement, int, dict[str, Any]]] = [
    (KAISA_ALL_REDUCE, 4, {"grad_worker_fraction": 0.5}),
    (KAISA_REDUCE, 3, {"colocate_factors": True}),
    (DPKFAC_OWNER, 3, {}),
    (DPKFAC_ALL_REDUCE, 3, {}),
]


@pytest.mark.parametrize("number", range(len(PLACED)), ids=lambda i: str(PLACED[i][0]))
def test_every_option_gives_the_trajectory_of_one_process(world: World, number: int) -> None:
    """Each option in one exchange of KAISA and in one of DPKFAC."""
    placement, world_size, how = PLACED[number]
    variations = [
        options for (options,) in fractional_product([*VARIATIONS.values()], part=2, first=number)
    ]
    trainings = [Training(MLP, SHORT, {**options, **how}) for options in variations]
    results = world.run(train_each_placed, world_size, placement, trainings)
    for options, parallel in zip(variations, zip(*results, strict=True), strict=True):
        expected = by_reference(MLP, SHORT, options)
        assert_same_trajectory(agreed(parallel), expected, hint=options)


def train_widths(
    rank: int,
    world_size: int,
    placement: Placement,
    widths: Sequence[int],
    batches: Sequence[Batch],
    options: dict[str, Any],
) -> tuple[list[Tensor], list[Tensor]]:
    """With a placement's parts of the batches, and with a shard of them on each rank."""
    model = network([5, *widths, 3])
    optimizer = placement.make(model, **options)
    found = follow_placed(rank, world_size, placement, model, optimizer, MLP, batches)
    model = network([5, *widths, 3])
    shards = [shard(batch, rank, world_size) for batch in batches]
    return found, go(model, placement.make(model, **options), MLP, shards)


@each_placement
@settings(max_examples=6)
@given(data=st.data(), world_size=st.integers(1, 4), per_rank=st.integers(1, 3))
def test_any_network_on_any_grid_gives_the_trajectory_of_one_process(
    world: World, placement: Placement, data: st.DataObject, world_size: int, per_rank: int
) -> None:
    """Also with fewer layers than ranks: some store and solve nothing, some send nothing."""
    widths = data.draw(st.lists(st.integers(1, 6), max_size=5), "widths")
    options: dict[str, Any] = {
        "damping": data.draw(st.floats(1e-2, 10.0)),
        "factor_update_steps": data.draw(st.integers(1, 2)),
        "inv_update_steps": data.draw(st.integers(1, 3)),
        "relative_damping": data.draw(st.booleans()),
        "solver": data.draw(st.sampled_from(["eigen", "inverse"])),
    }
    if placement.System is DPKFAC:
        where = {
            "assignment": data.draw(st.sampled_from(["balanced", "round_robin"])),
            "gradient_exchange": data.draw(st.sampled_from(["owner", "all_reduce"])),
        }
    else:
        where = {
            "colocate_factors": data.draw(st.booleans()),
            "grad_worker_fraction": data.draw(st.sampled_from(divisors(world_size))) / world_size,
        }
    batches = MLP.batches(3, n=world_size * per_rank)
    model = network([5, *widths, 3])
    expected = go(model, kaisa(model, **options), MLP, batches)
    results = world.run(train_widths, world_size, placement, widths, batches, {**options, **where})
    assert_same_trajectory(agreed([found for found, _ in results]), expected)
    agreed([separate for _, separate in results])


EVERYWHERE = {"factor_exchange": "all_reduce"}


def spread_at(colocate: bool, world_size: int, workers: int) -> tuple[int, Placement]:
    """The `reduce` exchange on a grid."""
    how = {"factor_exchange": "reduce", "colocate_factors": colocate}
    shares = {"grad_worker_fraction": workers / world_size}
    return world_size, Placement(f"reduce {colocate}", KAISA, {**how, **shares}, spread=True)


THAWING = [
    *[
        (
            4,
            Placement(
                f"KAISA {n} {c}", KAISA, {"grad_worker_fraction": n / 4, "colocate_factors": c}
            ),
        )
        for n, c in ((1, True), (2, False), (4, True))
    ],
    *[spread_at(c, *grid) for c, grid in ((True, (2, 1)), (False, (3, 3)), (False, (4, 2)))],
    *[(P, DPKFAC_OWNER) for P in (1, 3)],
    (4, DPKFAC_ALL_REDUCE),
]


@pytest.mark.parametrize(("world_size", "placement"), THAWING, ids=str)
def test_layers_that_are_unfrozen_have_their_factors_again(
    world: World, world_size: int, placement: Placement
) -> None:
    """Factors move to the ranks that decompose them now, and no statistics are lost."""
    options: dict[str, Any] = {"factor_update_steps": 2, "factor_decay": 0.7}
    frozen = FROZEN
    batches = [*LONG, *LONG[:3]]
    if placement.System is DPKFAC:
        options = {"factor_update_steps": 4, "factor_decay": 0.7, "solver": "inverse"}
        frozen = {step: [n for n in FROZEN[step] if "bias" not in n] for step in FROZEN}
    results = world.run(train_thawing, world_size, placement, frozen, batches, options)
    found = agreed([trajectory for trajectory, _ in results])
    keepers = results[0][1]
    assert all(each == keepers for _, each in results)
    if placement.spread and world_size > 1:
        assert any(a != b for a, b in itertools.pairwise(keepers)), "nothing has moved"
    expected, _ = train_thawing(0, 1, KAISA_ALL_REDUCE, frozen, batches, options)
    assert_same_trajectory(found, expected)
    if "factor_exchange" in placement.options:
        everywhere = Placement("KAISA", KAISA, {**placement.options, **EVERYWHERE})
        other = world.run(train_thawing, world_size, everywhere, frozen, batches, options)
        assert_same_trajectory(
            found, agreed([own_trajectory for own_trajectory, _ in other]), rtol=1e-10
        )
    never, _ = train_thawing(0, 1, KAISA_ALL_REDUCE, {}, batches, options)
    assert not torch.allclose(expected[2], never[2])


def train_in_groups(
    rank: int,
    world_size: int,
    placement: Placement,
    members: Sequence[Sequence[int]],
) -> tuple[list[Tensor], int] | None:
    """Each group on its own, all at the same time; the data differ by group.

    The second rank of each collects the factors, and their number is returned.
    """
    groups = [dist.new_group(list(ranks)) for ranks in members]
    for index, ranks in enumerate(members):
        if rank in ranks:
            case = [MLP, CONV][index]
            model = case.model()
            optimizer = placement.make(model, process_group=groups[index])
            place = list(ranks).index(rank), len(ranks)
            batches = case.batches(3, n=12)
            trajectory = follow_placed(*place, placement, model, optimizer, case, batches)
            if placement.spread:
                optimizer.consolidate(to=1)
            return trajectory, count_factors({"optimizer": optimizer.state_dict()}).total()
    return None


MEMORY_OPT = {"grad_worker_fraction": 0.0}


@pytest.mark.parametrize(
    ("members", "placement"),
    fractional_product(
        [[[1, 3]], [[1, 2, 3]], [[0, 2], [1, 3]], [[2, 3], [0, 1]]],
        [
            Placement("KAISA comm-opt", KAISA, {"grad_worker_fraction": 1.0}),
            Placement("KAISA mem-opt", KAISA, MEMORY_OPT),
            Placement("reduce", KAISA, {**KAISA_REDUCE.options, **MEMORY_OPT}, spread=True),
            DPKFAC_OWNER,
            DPKFAC_ALL_REDUCE,
        ],
        part=2,
    ),
    ids=str,
)
def test_a_process_group_trains_independently(
    world: World, placement: Placement, members: list[list[int]]
) -> None:
    """Its factors stay on its ranks."""
    results = world.run(train_in_groups, 4, placement, members)
    for case, ranks in zip((MLP, CONV), members, strict=False):
        expected = train(0, 1, case, case.batches(3, n=12))
        assert_same_trajectory(agreed([results[rank][0] for rank in ranks]), expected)
        for position, rank in enumerate(ranks):
            assert (results[rank][1] == 6) == (position == 1 or not placement.spread)
    outside = set(range(4)) - set(itertools.chain(*members))
    assert all(results[rank] is None for rank in outside)
