"""What the tests of sharded models share: a small model, its shards by FSDP2, and its training.

Its layers have seven, two and one rows: three ranks have uneven shards, and empty ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from ranks import OPTIONS, agreed, shard
from reference import half_squared_error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from second_order import DPKFAC, KAISA, DistKFAC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reference import Batch

MOMENTUM: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01}
ADAM: dict[str, Any] = {"base": torch.optim.Adam, "lr": 0.01, "weight_decay": 0.01}
AT_ONCE: dict[str, Any] = {"async_inverse": False}  # of DistKFAC
GRADIENT: dict[str, Any] = {"grafting": "gradient"}  # and the step scale follows
Choice = tuple[Any, dict[str, Any]]
CHOICES: list[Choice] = [
    (KAISA, MOMENTUM),
    (KAISA, {**ADAM, **GRADIENT, "relative_damping": True, "inv_update_steps": 2}),
    (KAISA, {**MOMENTUM, "fisher": "gaussian"}),
    (DPKFAC, MOMENTUM),
    (DPKFAC, {**ADAM, "gradient_exchange": "all_reduce", **GRADIENT}),
    (DistKFAC, {**MOMENTUM, **AT_ONCE}),
]


class Narrow(nn.Module):
    """A convolution, a norm, an embedding, and Linears of seven, two and one outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.norm = nn.LayerNorm(8)
        self.tokens = nn.Embedding(5, 8)
        self.middle = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 2, bias=False))
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kinds = x[:, 0, 0, 0].abs().mul(3).long().clamp(max=4)
        h = self.norm(torch.tanh(self.conv(x)).flatten(1)) + self.tokens(kinds)
        return self.head(torch.tanh(self.middle(h)))


def narrow() -> Narrow:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Narrow().double()


def batches(count: int, examples: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [(draw(examples, 1, 3, 3), draw(examples, 1)) for _ in range(count)]


def fsdp(model: Any, how: str = "blocks", **options: Any) -> Any:
    """Shard a model: the root alone, its middle and the root, or each layer and the root."""
    if how == "blocks":
        fully_shard(model.middle, **options)
    elif how == "layers":
        layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Embedding)]
        for module in layers:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def mesh_of(replicas: int, shards: int) -> Any:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def whole(model: nn.Module) -> Tensor:
    """A copy of all parameters in one vector; a collective where they are sharded."""
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def go_on(model: Any, optimizer: Any, data: Sequence[Batch]) -> list[Tensor]:
    """The parameters after each step."""
    trajectory = []
    for x, y in data:
        optimizer.zero_grad()
        half_squared_error(model(x), y).backward()
        optimizer.step()
        trajectory.append(whole(model))
    return trajectory


def shares(rank: int, world_size: int, count: int = 3) -> list[Batch]:
    """A rank's share of each batch."""
    return [shard(batch, rank, world_size) for batch in batches(count)]


def train_sharded(
    rank: int,
    world_size: int,
    choices: Sequence[Choice],
    how: str = "blocks",
    *,
    before: bool = False,
    replicas: int = 0,
    compiles: bool = False,
) -> list[list[Tensor]]:
    """A trajectory for each choice: under FSDP2, under DDP ("ddp"), or plain ("").

    Args:
        how: As `fsdp` shards.
        before: The optimizer is made before the model is sharded.
        replicas: Rows of a mesh of which the columns have shards.
        compiles: The middle is compiled before the model is sharded, and the model after it.
    """
    trajectories = []
    options = {"mesh": mesh_of(replicas, world_size // replicas)} if replicas else {}
    for System, chosen in choices:
        model = narrow()
        trained: nn.Module = model
        if compiles:
            model.middle.compile(backend="eager")
        sharded = how not in ("", "ddp")
        if how == "ddp":
            trained = DistributedDataParallel(model)
        elif sharded and not before:
            fsdp(model, how, **options)
        with System(trained, **{**OPTIONS, **chosen}) as optimizer:
            if sharded and before:
                fsdp(model, how, **options)
            if compiles:
                model.compile(backend="eager")
            trajectories.append(go_on(trained, optimizer, shares(rank, world_size)))
    return trajectories


def accumulated(rank: int, world_size: int, how: str, synchronised: bool = True) -> list[Tensor]:
    """The parameters after each step of two micro-batches."""
    model = narrow()
    trained: Any = DistributedDataParallel(model) if how == "ddp" else fsdp(model, how)
    optimizer = KAISA(trained, **{**OPTIONS, **MOMENTUM})
    trajectory = []
    for first, second in zip(*[iter(shares(rank, world_size, 6))] * 2, strict=True):
        optimizer.zero_grad()
        for x, y in (first, second):
            last = synchronised or x is second[0]
            if how != "ddp":
                trained.set_requires_gradient_sync(last)
            with trained.no_sync() if how == "ddp" and not last else nullcontext():
                (half_squared_error(trained(x), y) / 2).backward()
        optimizer.step()
        trajectory.append(whole(trained))
    return trajectory


def by_choice(results: Any) -> list[Sequence[Tensor]]:
    """The trajectory of each choice, which all ranks have, bit for bit."""
    return [agreed(parallel) for parallel in zip(*results, strict=True)]
