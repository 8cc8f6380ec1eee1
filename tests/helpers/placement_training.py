"""What KAISA, its `reduce` exchange and DPKFAC share: work that is placed on some of the processes.

A placement says how an optimizer is made and what part of a batch each rank has. KAISA's ranks have
shards, and DPKFAC's the same batch each, with which it is K-FAC on one process as well:

results = world.run(train_each_placed, 4, DPKFAC_OWNER, [Training(case, batches, options)])
assert_same_trajectory(agreed([first for first, in results]), train(0, 1, case, batches, options))
"""

from __future__ import annotations

import io
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from models import ZOO
from optimizer_cases import noted, take
from ranks import OPTIONS, counted, go, shard
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from second_order import DPKFAC, KAISA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from models import Case
    from reference import Batch

MLP = ZOO["mlp"]
LONG = MLP.batches(7, n=12)
BOUNDARY = 3  # after so many steps a checkpoint is written, and inverses are due
# Layers, or parameters, that are frozen in a step of `network([5, 6, 6, 6, 3])`.
FROZEN: dict[int, Sequence[str]] = {
    2: ["0."],
    3: ["0.", "4.", "6.bias"],
    4: ["0.", "4.", "6.bias"],
    5: ["4."],
    6: ["2.weight"],
}
SINGLE = {"factor_dtype": torch.float32}


@dataclass(frozen=True)
class Placement:
    """How an optimizer is made.

    Attributes:
        whole: every rank has the whole batch, not a shard of it.
        spread: each factor is on one rank, so a checkpoint requires consolidate().
    """

    name: str
    System: Any
    options: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    spread: bool = False

    def __str__(self) -> str:
        return self.name

    def make(self, params_or_model: Any, **options: Any) -> Any:
        return self.System(params_or_model, **{**OPTIONS, **self.options, **options})

    def part(self, batch: Batch, rank: int, world_size: int) -> Batch:
        """What a rank has of a batch."""
        return batch if self.whole else shard(batch, rank, world_size)

    def fewest(self, world_size: int) -> dict[str, Any]:
        """Options with which a layer's inverse is on few ranks: half of them, if they are even."""
        if self.System is DPKFAC:
            return {}
        even = world_size % 2 == 0
        return {"grad_worker_fraction": 0.5 if even else 1 / world_size if self.spread else 1.0}


KAISA_ALL_REDUCE = Placement("KAISA", KAISA)
KAISA_REDUCE = Placement(
    "reduce", KAISA, {"factor_exchange": "reduce", "colocate_factors": False}, spread=True
)
DPKFAC_OWNER = Placement("DPKFAC", DPKFAC, whole=True, spread=True)
DPKFAC_ALL_REDUCE = Placement(
    "DPKFAC all_reduce", DPKFAC, {"gradient_exchange": "all_reduce"}, whole=True, spread=True
)
PLACEMENTS = (KAISA_ALL_REDUCE, KAISA_REDUCE, DPKFAC_OWNER)


def network(widths: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        part
        for d_in, d_out in itertools.pairwise(widths)
        for part in (nn.Linear(d_in, d_out), nn.Tanh())
    ]
    return nn.Sequential(*layers[:-1]).double()


class Forked(nn.Module):
    """A trunk, a branch that may be left out, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 6)
        self.branch = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.head(torch.tanh(self.branch(x)) if branch else x)


def falling(step: int) -> float:
    return 0.3 * 0.5**step


def growing(step: int) -> int:
    return 1 + step // 2


# Training.


def follow_placed(
    rank: int,
    world_size: int,
    placement: Placement,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    batches: Sequence[Batch],
) -> list[Tensor]:
    """The parameters after each step on this rank's parts of the batches."""
    parts = [placement.part(batch, rank, world_size) for batch in batches]
    return go(model, optimizer, case, parts)


@dataclass(frozen=True)
class Training:
    """A model, its batches, and the options of its optimizer."""

    case: Case
    batches: Sequence[Batch]
    options: dict[str, Any]


def train_each_placed(
    rank: int, world_size: int, placement: Placement, trainings: Sequence[Training]
) -> list[list[Tensor]]:
    """The trajectories of several training runs, one after the other."""
    trajectories = []
    for each in trainings:
        model = each.case.model()
        optimizer = placement.make(model, **each.options)
        trajectories.append(
            follow_placed(rank, world_size, placement, model, optimizer, each.case, each.batches)
        )
    return trajectories


def collectives_of_steps(
    rank: int,
    world_size: int,
    placement: Placement,
    layers: int,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> list[int]:
    """Of a step that refreshes all, one that takes statistics, and one that does neither."""
    model = network([5, *[4] * (layers - 1), 3]).to(dtype)
    intervals = {"factor_update_steps": 2, "inv_update_steps": 4}
    optimizer = placement.make(model, **SINGLE, **intervals, **options)
    each = []
    for batch in MLP.batches(5, n=8, dtype=dtype):
        with counted() as counts:
            take(model, optimizer, shard(batch, rank, world_size))
        each.append(counts.total())
    assert each[1] == each[3]
    return [each[4], each[2], each[1]]


def train_thawing(
    rank: int,
    world_size: int,
    placement: Placement,
    frozen: dict[int, Sequence[str]],
    batches: Sequence[Batch],
    options: dict[str, Any],
) -> tuple[list[Tensor], list[list[Any]]]:
    """`frozen`: by step, the names of the frozen layers, or of the parameters."""
    model = network([5, 6, 6, 6, 3])
    optimizer = placement.make(list(model.parameters()), model=model, **options)
    trajectory = []
    keepers = []
    for step, batch in enumerate(batches):
        for name, p in model.named_parameters():
            p.requires_grad_(not any(name.startswith(n) for n in frozen.get(step, ())))
        trajectory += follow_placed(rank, world_size, placement, model, optimizer, MLP, [batch])
        if placement.System is DPKFAC:
            keepers.append([row.computed_by for row in optimizer.summary().rows])
            continue
        known = optimizer._curvature.all_plans
        keepers.append([known[block].inverse_ranks for block in optimizer._curvature.layers.blocks])
        for block, layer in optimizer._curvature.plan.items():
            held = tuple(block.stored(which) is not None for which in "AG")
            is_solver = tuple(solver == rank for solver in layer.inverse_ranks)
            assert held == (is_solver if placement.spread else (True, True))
    return trajectory, keepers


# Checkpoints.


def written(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def count_factors(saved: dict[str, Any]) -> Counter[str]:
    """How many layers have each of their factors."""
    parts = [entry["curvature"] for entry in saved["optimizer"]["state"].values()]
    return Counter(letter for part in parts for letter in "AG" if letter in part)


def saved(
    rank: int,
    world_size: int,
    placement: Placement,
    options: dict[str, Any],
    steps: int = BOUNDARY,
    to: int | None = 0,
) -> bytes:
    """A checkpoint after some steps; empty where it would have a part of the factors alone."""
    model = MLP.model()
    optimizer = placement.make(model, **options)
    follow_placed(rank, world_size, placement, model, optimizer, MLP, LONG[:steps])
    if placement.spread:
        optimizer.consolidate(to=to)
        if to not in (rank, None):
            return b""
    with counted() as counts:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert not counts, "whoever asks for it alone would wait for the others"
    return written(state)


def loaded(placement: Placement, data: bytes, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A model of other parameters and its optimizer, which have taken a checkpoint over."""
    state = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = placement.make(model, **options)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


def resumed(
    rank: int,
    world_size: int,
    placement: Placement,
    data: bytes,
    options: dict[str, Any],
    steps: int = BOUNDARY,
) -> tuple[list[Tensor], list[str]]:
    """The parameters after each further step, and warnings."""
    with noted() as messages:
        model, optimizer = loaded(placement, data, options)
        rest = LONG[steps:]
        trajectory = follow_placed(rank, world_size, placement, model, optimizer, MLP, rest)
    return trajectory, messages


def sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, how: StateDictOptions
) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=how),
    }


def save_dcp(
    rank: int, world_size: int, placement: Placement, path: str, flat: bool, options: dict[str, Any]
) -> None:
    """By torch.distributed.checkpoint."""
    model = MLP.model()
    optimizer = placement.make(model, **options)
    follow_placed(rank, world_size, placement, model, optimizer, MLP, LONG[:BOUNDARY])
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    dcp.save(sharded(model, optimizer, how), checkpoint_id=path, no_dist=world_size == 1)


def loaded_dcp(
    world_size: int, placement: Placement, path: str, flat: bool, options: dict[str, Any]
) -> tuple[nn.Module, Any]:
    model = MLP.model(seed=5)
    optimizer = placement.make(model, **options)
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = sharded(model, optimizer, how)
    dcp.load(state, checkpoint_id=path, no_dist=world_size == 1)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=how)
    return model, optimizer


def load_each_dcp(
    rank: int,
    world_size: int,
    placements: Sequence[Placement],
    path: str,
    flat: bool,
    options: dict[str, Any],
) -> list[list[Tensor]]:
    """The trajectories of several placements from there, each on as few ranks as it can be."""
    found = []
    for each in placements:
        choice = {**options, **each.fewest(world_size)}
        model, optimizer = loaded_dcp(world_size, each, path, flat, choice)
        rest = LONG[BOUNDARY:]
        found.append(follow_placed(rank, world_size, each, model, optimizer, MLP, rest))
    return found
