"""What the tests of DHO2 share: a network, its batches, and an optimizer that finds exact pairs.

model = CASE.model()
trajectory = go(model, dho2(model, momentum=0.9), BATCHES)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from models import ZOO
from reference import cross_entropy
from torch import Tensor, nn

from second_order import DHO2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reference import Batch

CASE = ZOO["mlp"]
BATCHES = CASE.batches(12, n=12)
CURVED = CASE.batch(30, seed=99)
SGD, ADAM = torch.optim.SGD, torch.optim.Adam
# Every pair to rounding, at steps 2, 6 and 10.
OPTIONS: dict[str, Any] = {
    "largest": 4,
    "smallest": 1,
    "warmup_steps": 2,
    "curvature_interval": 4,
    "lanczos_iterations": 111,
    "lanczos_tol": 1e-12,
}


def closure_of(model: nn.Module, batch: Batch = CURVED) -> Callable[[], Tensor]:
    return lambda: cross_entropy(model(batch[0]), batch[1])


def dho2(model: nn.Module, params: Any = None, **options: Any) -> DHO2:
    options = {"lr": 0.1, "curvature_closure": closure_of(model), **OPTIONS, **options}
    return DHO2(model if params is None else params, **options)


def take(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def go(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> list[Tensor]:
    """The parameters after each step."""
    trajectory = []
    for batch in batches:
        take(model, optimizer, batch)
        trajectory.append(vector(model))
    return trajectory


def vector(model: nn.Module) -> Tensor:
    """A copy of all parameters, of any memory format."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def alike(a: Any, b: Any) -> bool:
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b
