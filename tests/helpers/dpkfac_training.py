"""What the tests of DPKFAC share: the optimizer, trained on the same batch or on shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ranks import OPTIONS, agreed, go, shard
from torch import Tensor

from second_order import DPKFAC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from models import Case
    from reference import Batch


def dpkfac(params_or_model: Any, **options: Any) -> DPKFAC:
    return DPKFAC(params_or_model, **{**OPTIONS, **options})


def train_equally(
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


def train_separately(
    rank: int,
    world_size: int,
    case: Case,
    batches: Sequence[Batch],
    choices: Sequence[dict[str, Any]],
) -> list[list[Tensor]]:
    """A shard of the batches on each rank."""
    shards = [shard(batch, rank, world_size) for batch in batches]
    return train_equally(rank, world_size, case, shards, choices)


def by_choice(results: Sequence[Sequence[Sequence[Tensor]]]) -> list[Sequence[Tensor]]:
    """The trajectory of each choice, which all ranks have, bit for bit."""
    return [agreed(parallel) for parallel in zip(*results, strict=True)]
