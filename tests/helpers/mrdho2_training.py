"""What the tests of MRDHO2 share: a network, training by role, and a dense reference.

report = world.run(train, 3, {"helper_ranks": 1, "final_update": "paper"})
assert_same_trajectory(agreed([w["trajectory"] for w in report[:2]]), reference("paper"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from models import ZOO
from optimizer_cases import noted
from ranks import shard, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.func import functional_call

from second_order import MRDHO2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reference import Batch

CASE = ZOO["mlp"]
STEPS = 12
EPOCH = 4
BATCHES = CASE.batches(STEPS, n=12)
CURVED = CASE.batches(5, n=9)  # of the accelerators; one for each epoch
PATIENCE = 30.0
# Every pair to rounding.
OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "epoch_steps": EPOCH,
    "final_update": "paper",
    "newton_scale": 0.1,
    "num_largest": 3,
    "num_smallest": 1,
    "lanczos_iterations": 111,
    "lanczos_tol": 1e-12,
    "helper_timeout": PATIENCE,
}


def mrdho2(model: nn.Module, params: Any = None, **options: Any) -> MRDHO2:
    return MRDHO2(model if params is None else params, **{**OPTIONS, **options})


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def gradient(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, pieces: Sequence[int] = (0, 1)
) -> None:
    """Of this rank's shard of a batch: (which, of how many)."""
    optimizer.zero_grad()
    loss_of(model, shard(batch, *pieces)).backward()


def worker(
    model: nn.Module,
    optimizer: Any,
    rank: int,
    workers: int,
    batches: Sequence[Batch] = BATCHES,
    before: Callable[[int], None] = lambda step: None,
    wrapped: nn.Module | None = None,
) -> list[Tensor]:
    """The parameters after each step on one's shards of the batches."""
    trajectory = []
    for step, batch in enumerate(batches):
        before(step)
        gradient(model if wrapped is None else wrapped, optimizer, batch, (rank, workers))
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


def train(rank: int, world_size: int, options: dict[str, Any], **details: Any) -> dict[str, Any]:
    """One rank of a run, by its role; accelerators serve with a batch an epoch."""
    model = CASE.model()
    with noted() as warned:
        optimizer = mrdho2(model, **options)
        result: dict[str, Any] = {"role": optimizer.role, "warned": warned}
        with optimizer:
            if optimizer.role == "accelerator":
                result["served"] = optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
            else:
                alone = world_size == 1 or options.get("num_largest") == 0
                workers = world_size - (0 if alone else options.get("helper_ranks", 1))
                result["trajectory"] = worker(model, optimizer, rank, workers, **details)
                result["epochs"] = list(optimizer.epochs)
                result["curvature"] = optimizer.curvature
    return result


def base_alone(
    base: Any = torch.optim.SGD,
    workers: int = 1,
    steps: int = STEPS,
    model: nn.Module | None = None,
    **kwargs: Any,
) -> list[Tensor]:
    """The base on the mean of the workers' gradients, added in the order of ranks."""
    model = CASE.model() if model is None else model
    params = list(model.parameters())
    optimizer = base(params, **{"lr": 0.1, **kwargs})
    trajectory = []
    for batch in BATCHES[:steps]:
        shares = []
        for j in range(workers):
            gradient(model, optimizer, batch, (j, workers))
            shares.append([p.grad / workers for p in params])
        for p, *addends in zip(params, *shares, strict=True):
            p.grad = torch.stack(addends).sum(0)
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


def loss_at(w: Tensor, batch: Batch) -> Tensor:
    model = CASE.model()
    sizes = [p.numel() for p in model.parameters()]
    parts = zip(model.named_parameters(), w.split(sizes), strict=True)
    values = {name: piece.view(p.shape) for (name, p), piece in parts}
    return cross_entropy(functional_call(model, values, (batch[0],)), batch[1])


def write(model: nn.Module, w: Tensor) -> None:
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(w, model.parameters())


def reference(
    kind: str,
    base: Any = torch.optim.SGD,
    batches: Sequence[Batch] = BATCHES,
    num_largest: int = 3,
    num_smallest: int = 1,
    alpha: float = 0.1,
    decay: float = 1.0,
    curved: Sequence[Batch] = CURVED,
    with_update: Callable[[int], bool] = lambda epoch: True,
    fall: float = 0.5,
    first: int = 0,
    **kwargs: Any,
) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """Section 8 with dense Hessians: the trajectory, and each epoch's losses without and with.

    Learning rates and α are multiplied by `decay` after each epoch. "guarded" requires the share
    `fall` of the predicted decrease. The base trains alone before step `first`.
    """
    model = CASE.model()
    optimizer = base(model.parameters(), **{"lr": 0.1, **kwargs})
    trajectory = []
    losses = []
    gradients = []
    for step, batch in enumerate(batches):
        epoch, place = divmod(step - first, EPOCH)
        if place == 0 and epoch >= 0:
            c = vector(model)
            gradients = []
            here = curved[epoch % len(curved)]
            H = torch.autograd.functional.hessian(lambda w, b=here: loss_at(w, b), c)
            u, Q = torch.linalg.eigh(H)
            picked = [*range(len(u) - num_largest, len(u)), *range(num_smallest)]
            u = u[picked].abs()
            V = Q[:, picked]
        gradient(model, optimizer, batch)
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        optimizer.step()
        if place == EPOCH - 1 and epoch >= 0:
            end = vector(model)
            total = torch.stack(gradients).sum(0)
            after = end - V @ (alpha / u * (V.T @ total) + V.T @ (end - c))
            pair = loss_at(end, here).item(), loss_at(after, here).item()
            losses.append(pair)
            if with_update(epoch) and (kind != "guarded" or pair[1] <= (1 - fall) * pair[0]):
                write(model, after)
            alpha *= decay
            for group in optimizer.param_groups:
                group["lr"] *= decay
        trajectory.append(vector(model))
    return trajectory, losses
