"""KAISA's checkpoints: wherever it resumes, the same trajectory.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import take
from models import ZOO
from ranks import agreed, assert_same_trajectory, follow, kaisa, train
from torch import Tensor

if TYPE_CHECKING:
    from conftest import Launcher
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
# Checkpoints: invariant 28.

INTERVALS = {"inv_update_steps": 3, "factor_update_steps": 1}
LONG = MLP.batches(7, n=12)
BOUNDARY = 3  # where the inverses are refreshed anyhow


def load_and_train(
    rank: int,
    world_size: int,
    data: bytes,
    options: dict[str, Any],
    steps: int = BOUNDARY,
    *,
    wasted: int = 0,
) -> list[Tensor]:
    """`wasted`: steps before the checkpoint is loaded, which it makes undone."""
    saved = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = kaisa(model, **options)
    follow(rank, world_size, model, optimizer, MLP, LONG[-1:] * wasted)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return follow(rank, world_size, model, optimizer, MLP, LONG[steps:])


def labels_by_rank(rank: int, world_size: int) -> Any:
    """The same example on every rank; only the drawn labels differ."""
    model = MLP.model()
    optimizer = kaisa(model, fisher="sampled")
    staged = []
    for _ in range(6):
        model(MLP.batch(1)[0]).sum().backward()
        block = optimizer._curvature.layers.blocks[-1]
        staged.append(block.staged.sums().factors["G"].clone())
        block.staged.clear()
    return torch.stack(staged)


def test_ranks_draw_labels_of_their_own(world: World) -> None:
    first, second = world.run(labels_by_rank, 2)
    assert not torch.equal(first, second)


# Killed and resumed.

UNTIL_KILLED = """
    import os, sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from contract import take
    from models import ZOO
    from ranks import kaisa, shard

    path = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = ZOO["mlp"]
    model = case.model(seed=rank)
    optimizer = kaisa(model, momentum=0.9, inv_update_steps=3, grad_worker_fraction=0.0)
    for step, batch in enumerate(case.batches(7, n=12)):
        if step % 3 == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
        if step == 5:
            print("two steps after the checkpoint", flush=True)
            time.sleep(600)
        take(model, optimizer, shard(batch, rank, world_size), case.loss)
"""


def test_killed_and_resumed_with_another_world_size(
    world: World, launch: Launcher, tmp_path: Path
) -> None:
    """Slow (two processes): kill -9 in the midst of training, as a scheduler of restarts sees it.

    Two ranks die at step 5; three others go on from the checkpoint of step 3.
    """
    path = tmp_path / "checkpoint"
    run = launch(UNTIL_KILLED, 2, path)
    for rank in range(2):
        run.wait_for("two steps after the checkpoint", rank)
    for rank in range(2):
        run.kill(rank)
    options = {"momentum": 0.9, "inv_update_steps": 3}
    placed_anew = {**options, "grad_worker_fraction": 1 / 3}
    parallel = world.run(load_and_train, 3, path.read_bytes(), placed_anew, steps=3)
    assert_same_trajectory(agreed(parallel), train(0, 1, MLP, LONG, options)[3:])


def test_a_checkpoint_without_mean_eigenvalues_gets_those_of_its_factors() -> None:
    """As those of the first version are; a relative damping is made of them."""
    model = MLP.model()
    donor = kaisa(model, relative_damping=True)
    take(model, donor, MLP.batch(6))
    saved = copy.deepcopy(donor.state_dict())
    for entry in saved["state"].values():
        entry["curvature"].pop("mean_eigenvalues", None)
    loaded = kaisa(model, relative_damping=True)
    loaded.load_state_dict(saved)
    for mine, its in zip(
        loaded._curvature.layers.blocks, donor._curvature.layers.blocks, strict=True
    ):
        torch.testing.assert_close(mine.factors.means, its.factors.means)
