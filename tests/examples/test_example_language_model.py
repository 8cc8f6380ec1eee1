"""The language model example, on one process and sharded over two."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from framework_training import launched
from ranks import script

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def under_torchrun(rank: int, world_size: int, *arguments: Any) -> str:
    with launched(rank, world_size):
        return script(rank, world_size, *arguments)


def losses(printed: str) -> list[float]:
    """The held-out losses."""
    return [float(found) for found in re.findall(r"held out ([\d.]+)", printed)]


def test_the_language_model_trains_sharded_as_it_does_under_ddp(world: World) -> None:
    """A uniform guess has a loss of 4.6."""
    arguments = ("--steps", 5, "--lr", 0.005)
    (sharded, nothing) = world.run(under_torchrun, 2, "train_language_model", "--fsdp", *arguments)
    (under_ddp, _) = world.run(under_torchrun, 2, "train_language_model", *arguments)
    assert nothing == ""
    (loss,) = losses(sharded)
    assert loss == pytest.approx(losses(under_ddp)[0], abs=2e-2)
    assert loss < 4.5
