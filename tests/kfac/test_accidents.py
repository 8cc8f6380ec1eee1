"""What a K-FAC optimizer is like after an exception in a step, after close(), and in copies."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import KRONECKER, each_kronecker, make, take
from models import ZOO
from ranks import replaced

from second_order import DistKFAC
from second_order.kronecker.solvers import SOLVERS

if TYPE_CHECKING:
    from pool import World

MLP = ZOO["mlp"]
BATCHES = MLP.batches(9)
EACH_SECOND = {"inv_update_steps": 2, "factor_update_steps": 1}


def broken(*args: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


@each_kronecker
def test_a_step_that_runs_out_of_memory_strands_no_layer(System: Any) -> None:
    """What was being put to use is solved again at the next step."""
    model = MLP.model()
    options = {"max_staleness": 0} if System is DistKFAC else {}
    optimizer = make(System, model, **EACH_SECOND, **options)
    take(model, optimizer, BATCHES[0])
    kind = type(SOLVERS[optimizer._curvature._options.solver])
    optimizer.load_state_dict(optimizer.state_dict())  # a refresh is due out of turn
    with replaced(kind, {"combine": broken}), pytest.raises(torch.OutOfMemoryError):
        take(model, optimizer, BATCHES[1])
    take(model, optimizer, BATCHES[2])
    assert all(block.solved for block in optimizer._curvature.layers.blocks)
    assert not optimizer._curvature.solves.under_way


@each_kronecker
def test_nothing_is_kept_after_close(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    blocks = [weakref.ref(block) for block in optimizer._curvature.layers.blocks]
    optimizer.close()
    gc.collect()
    assert not any(block() for block in blocks)
    take(model, optimizer, BATCHES[1])


@pytest.mark.parametrize("name", ["kl_clip", "damping"])
@pytest.mark.parametrize("System", KRONECKER)
def test_callables_are_asked_once_a_step(System: Any, name: str) -> None:
    asked: list[int] = []

    def value(step: int) -> float:
        asked.append(step)
        return 1.0

    model = MLP.model()
    optimizer = make(System, model, **{**EACH_SECOND, "inv_update_steps": 1, name: value})
    for batch in BATCHES[:4]:
        take(model, optimizer, batch)
    assert asked == [0, 1, 2, 3]


def moves_at_once(rank: int, world_size: int) -> list[bool]:
    from second_order import DPKFAC

    model = MLP.model()
    options: dict[str, Any] = {**EACH_SECOND, "inv_update_steps": 100, "factor_update_steps": 100}
    optimizer = make(DPKFAC, model, assignment="round_robin", **options)
    model[0].requires_grad_(False)
    for batch in BATCHES[:4]:
        take(model, optimizer, batch)
    return [block.solved for block in optimizer._curvature.layers.active]


def test_owners_that_move_before_the_first_step_solve_at_the_second(world: World) -> None:
    """They have had no statistics of the first one's passes."""
    assert world.run(moves_at_once, 2) == [[True, True]] * 2
