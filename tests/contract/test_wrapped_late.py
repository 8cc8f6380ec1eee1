"""Helpers' gradients never reach the workers through a DDP that spans both."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stacks import BATCHES, CASE, loss_of, optimizer_of
from torch.nn.parallel import DistributedDataParallel

from second_order import MRDHO2, DistKFAC

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
HELPED = {MRDHO2: {"accelerators": 1}, DistKFAC: {"stats_workers": 1}}
each_with_helpers = pytest.mark.parametrize("System", list(HELPED))


def passes(rank: int, world_size: int, System: Any) -> float:
    """What a DDP over all ranks meets, one over its kind alone, copies, and a closed one."""
    model = CASE.model()
    optimizer = optimizer_of(System, model, gradient_averaging=False, **HELPED[System])
    own = DistributedDataParallel(model, process_group=optimizer.worker_group)
    whole = DistributedDataParallel(model)
    assert pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with torch.no_grad():  # a look at the model before training decides nothing
        whole(BATCHES[0][0])
    with pytest.raises(ValueError, match=r"over ranks \[0, 1, 2\], of which \[2\] help"):
        loss_of(whole, BATCHES[0])
    loss_of(own, BATCHES[0])
    optimizer.close()
    return float(loss_of(whole, BATCHES[0]))


@each_with_helpers
def test_a_ddp_over_helpers_is_refused_at_the_first_pass_that_trains(
    world: World, System: Any
) -> None:
    assert min(world.run(passes, 3, System)) > 0


def dropped(rank: int, world_size: int, System: Any) -> list[int]:
    """The hooks on the model with an optimizer, and after several that nobody has any more."""
    model = CASE.model()

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    found = []
    for _ in range(3):
        optimizer = optimizer_of(System, model, gradient_averaging=False, **HELPED[System])
        found.append(hooks())
        del optimizer
        gc.collect()
    return [found[0], found[-1], hooks()]


@each_with_helpers
def test_hooks_go_with_an_optimizer_that_nobody_has(world: World, System: Any) -> None:
    """On helpers too, where no pass may ever train."""
    for first, last, left in world.run(dropped, 2, System):
        assert (last, left) == (first, 0)
