"""What the tests of MRDHO2 in scripts share: scenes, each a worker's part and an accelerator's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from mrdho2_training import (
    BATCHES,
    CASE,
    CURVED,
    STEPS,
    gradient,
    loss_of,
    mrdho2,
    noted,
    reference,
    worker,
)
from ranks import agreed
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOMENTUM = {"momentum": 0.9, "lr": 0.05}


def links() -> int:
    return sum(t.name == "second_order link" for t in threading.enumerate())


def play(
    rank: int,
    world_size: int,
    scene: tuple[Callable[..., Any], Callable[..., Any]],
    *args: Any,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A scene on one rank: a worker's part of it or an accelerator's; what it warned of."""
    model = CASE.model()
    optimizer = mrdho2(model, **{"final_update": "paper", **MOMENTUM, **(options or {})})
    part = scene[optimizer.role == "accelerator"]
    with noted() as warned:
        found = part(model, optimizer, rank, *args)
    assert links() == 0, "no thread is left"
    dist.barrier()  # until then the store, which an accelerator has, is there
    reports = [(r.applied, r.reason) for r in optimizer.epochs]
    return {"found": found, "warned": warned, "reports": reports}


def until(optimizer: Any, steps: int) -> None:
    """The usual loop of an accelerator, which does not know that it is one."""
    model = optimizer._training.model
    for step in range(steps):
        gradient(model, optimizer, BATCHES[step])
        optimizer.step(curvature_closure=lambda: loss_of(model, CURVED[0]))


def worker_part(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    with optimizer:
        return worker(model, optimizer, rank, 2)


def serve(model: nn.Module, optimizer: Any, loss_fn: Any = None, batches: Any = CURVED) -> int:
    def plain(batch: Any) -> Tensor:
        return loss_of(model, batch)

    with optimizer:
        return optimizer.serve(batches, loss_fn or plain)


def trajectory_of(results: Sequence[dict[str, Any]]) -> Sequence[Tensor]:
    found = agreed([result["found"] for result in results[:2]])
    assert len(found) == STEPS, "no step is lost"
    return found


def expected_until(epochs: int, **options: Any) -> list[Tensor]:
    """So many epochs with final updates, then the base alone."""
    options = {"with_update": lambda epoch: epoch < epochs, **MOMENTUM, **options}
    return reference("paper", **options)[0]


def assert_one_warning(results: Sequence[dict[str, Any]], text: str) -> None:
    for result in results[:2]:
        (line,) = result["warned"]
        assert text in line
