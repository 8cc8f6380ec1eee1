"""DHO2 and MRDHO2 load complete states on a device. The pretended one exists once in a process."""

from __future__ import annotations

import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from fake_device import NAME, pretend_device
from separate_process import found_by
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy

from second_order import DHO2, MRDHO2

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import Forks

SYSTEMS: dict[Any, dict[str, Any]] = {DHO2: {"curvature_interval": 2}, MRDHO2: {"epoch_steps": 2}}
STEPS = 3


def made(System: Any) -> tuple[nn.Module, Callable[[], Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(NAME)
    x = torch.randn(16, 4).to(NAME)
    y = torch.randint(3, (16,)).to(NAME)

    def loss() -> Tensor:
        return cross_entropy(model(x), y)

    options = {"num_largest": 3, "curvature_closure": loss, **SYSTEMS[System]}
    return model, loss, System(model, lr=0.1, momentum=0.9, **options)


def loaded_steps(System: Any) -> int:
    """The steps of a fresh optimizer that has loaded the complete state of another."""
    complete = StateDictOptions(full_state_dict=True)
    model, loss, optimizer = made(System)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=complete)
    model, loss, optimizer = made(System)
    set_optimizer_state_dict(model, optimizer, state, options=complete)
    assert optimizer._curvature.subspace is not None
    return int(optimizer.training.steps)


def test_a_fresh_optimizer_loads_a_complete_state(forks: Forks) -> None:
    """torch then requires that all tensors of the fresh one are on one device."""
    assert found_by(forks, __file__) == [STEPS] * len(SYSTEMS)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with pretend_device():
        sys.stdout.write(json.dumps([loaded_steps(System) for System in SYSTEMS]))
