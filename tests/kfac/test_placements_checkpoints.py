"""Checkpoints of work that is placed on some processes continue on any others.

For KAISA, its `reduce` exchange and DPKFAC alike; DPKFAC's ranks have the same batch each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from models import ZOO
from placement_training import (
    BOUNDARY,
    LONG,
    PLACEMENTS,
    Placement,
    load_each_dcp,
    resumed,
    save_dcp,
    saved,
)
from ranks import agreed, assert_same_trajectory, train

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pool import World
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
INTERVALS = {"inv_update_steps": 3, "factor_update_steps": 1}
BASES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01, "solver": "inverse"},
    "Adam": {"base": torch.optim.Adam, "lr": 0.01, "solver": "eigen"},
    "Adam, inverse": {"base": torch.optim.Adam, "lr": 0.01, "solver": "inverse"},
}
each_placement = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


def whose(placement: Placement) -> int:
    """The rank whose checkpoint is taken: any will do where factors are everywhere."""
    return 0 if placement.spread else -1


# The rank that reads, the checkpoint, and the options of the resumed run.
Resumption = tuple[Placement, bytes, dict[str, Any]]


def save_all(
    rank: int, world_size: int, placement: Placement, choices: Sequence[dict[str, Any]]
) -> list[bytes]:
    """`saved` with each of several choices of options, on as few ranks as it can be."""
    fewest = placement.fewest(world_size)
    return [saved(rank, world_size, placement, {**options, **fewest}) for options in choices]


def resume_all(
    rank: int, world_size: int, resumptions: Sequence[Resumption]
) -> list[tuple[list[Tensor], list[str]]]:
    """`resumed`, each on as few ranks as it can be."""
    return [
        resumed(rank, world_size, reader, data, {**options, **reader.fewest(world_size)})
        for reader, data, options in resumptions
    ]


def warnings_as_all_go_on(
    world: World, after: int, resumptions: Sequence[Resumption], hint: object = ""
) -> list[str]:
    """As one process that has not stopped; what they have warned of."""
    warned = []
    results = world.run(resume_all, after, resumptions)
    for (reader, _, options), ranks in zip(resumptions, zip(*results, strict=True), strict=True):
        expected = train(0, 1, MLP, LONG, options)[BOUNDARY:]
        found = agreed([trajectory for trajectory, _ in ranks])
        where = f"on {after} with {reader}, {options}, {hint}"
        assert_same_trajectory(found, expected, hint=where)
        warned += [message for _, messages in ranks for message in messages]
    return warned


@each_placement
@pytest.mark.parametrize("before", [1, 3])
def test_a_checkpoint_resumes_on_any_number_of_processes(
    world: World, before: int, placement: Placement
) -> None:
    """Wherever the work is placed then; each base with every two of numbers and placements."""
    choices = [{**INTERVALS, **each} for each in BASES.values()]
    data = world.run(save_all, before, placement, choices)[whose(placement)]
    checkpoints = list(zip(data, choices, strict=True))
    for after in (before % 4 + 1, (before + 1) % 4 + 1):
        chosen = fractional_product(PLACEMENTS, checkpoints, part=3, first=before + after)
        resumptions = [(reader, *checkpoint) for reader, checkpoint in chosen]
        assert warnings_as_all_go_on(world, after, resumptions) == []


@each_placement
@pytest.mark.parametrize(("before", "base", "flat"), [(2, "SGD", False), (4, "Adam", True)])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_need_no_consolidation(
    world: World, tmp_path: Path, before: int, base: str, flat: bool, placement: Placement
) -> None:
    """Each rank writes and reads its own factors; those of another placement read them too."""
    options = {**INTERVALS, **BASES[base]}
    expected = train(0, 1, MLP, LONG, options)[BOUNDARY:]
    path = str(tmp_path)
    world.run(save_dcp, before, placement, path, flat, {**options, **placement.fewest(before)})
    for (after,) in fractional_product((1, 2, 3, 4), part=2, first=before // 2):
        readers = PLACEMENTS if after == 2 else (placement,)
        results = world.run(load_each_dcp, after, readers, path, flat, options)
        for other, parallel in zip(readers, zip(*results, strict=True), strict=True):
            assert_same_trajectory(agreed(parallel), expected, hint=f"on {after} with {other}")
