"""The example of restarts: a killed process, a spoilt checkpoint, another number of processes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from ranks import script

import elastic
import elastic_soak
from digits import load_split
from second_order import load_checkpoint

if TYPE_CHECKING:
    from pool import World


def started(rank: int, world_size: int, *arguments: object) -> str:
    """The script on a rank of the pool, as torchrun would start it."""
    with patch.dict(os.environ, {"RANK": str(rank)}):
        return script(rank, world_size, "elastic", *arguments)


def killed_at(step: int, log: Path, *arguments: str) -> tuple[list[int | None], str]:
    """The exit codes and the output of two processes, of which one is killed before a step."""
    context = multiprocessing.get_context("forkserver")  # the pool's, which has imported torch
    given = [*arguments, "--die-at", str(step)]
    processes = [
        context.Process(target=elastic_soak.run, args=(place, rank, given, log))
        for place in [elastic_soak.place_of(2)]
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200.0)
        process.kill()
        process.join()
    return [process.exitcode for process in processes], log.read_text()


def weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(elastic.name_of(folder, steps))["model"])


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[k] - b[k]).abs().max() / b[k].abs().max()) for k in a)


def test_it_goes_on_with_more_processes_from_the_newest_whole_checkpoint(
    world: World, tmp_path: Path
) -> None:
    """Slow: processes of their own, one of which is killed. It ends where it would have."""
    killed, alone, other = (tmp_path / name for name in ("killed", "alone", "other"))
    steps = ("--steps", 40)
    codes, said = killed_at(35, tmp_path / "log", "--folder", str(killed), "--steps", "40")
    assert codes[1] == -9
    assert codes[0] not in (0, -9), "the other one has ended by itself"
    assert "SecondOrderError" in said
    newest = elastic.name_of(killed, 30)
    newest.write_bytes(newest.read_bytes()[:-1000])

    output, *_ = world.run(started, 3, "--folder", killed, *steps)
    assert f"left out: {newest} is cut short" in output
    assert "from step 20 on, 3 processes" in output
    world.run(started, 1, "--folder", alone, *steps)
    world.run(started, 1, "--folder", other, *steps, "--seed", 1)
    undisturbed = weights(alone, 40)
    assert apart(weights(killed, 40), undisturbed) < 1e-10
    assert apart(weights(other, 40), undisturbed) > 1e-2
    names = [path.name for path in elastic.checkpoints(killed)]
    assert names == ["step-00000040.pt", "step-00000030.pt", "step-00000020.pt"]


@pytest.mark.parametrize("optimizer", elastic.OPTIMIZERS)
def test_each_optimizer_resumes_on_fewer_processes(
    world: World, tmp_path: Path, optimizer: str
) -> None:
    """DPKFAC's factors are of its share of the batch, and so not those of another number."""
    resumed, alone = tmp_path / "resumed", tmp_path / "alone"
    arguments = ("--optimizer", optimizer, "--folder")
    world.run(started, 2, *arguments, resumed, "--steps", 10)
    world.run(started, 1, *arguments, resumed, "--steps", 20)
    world.run(started, 1, *arguments, alone, "--steps", 20)
    difference = apart(weights(resumed, 20), weights(alone, 20))
    assert (difference < 1e-9) is (optimizer != "dpkfac")


def test_processes_share_the_same_batches() -> None:
    data = load_split()
    whole, saved = elastic.Batches(data, 0), elastic.Batches(data, 0)
    parts = [elastic.Batches(data, 0) for _ in range(3)]
    for i in range(30):
        images, labels = whole.draw(0, 1)
        shares = [part.draw(rank, 3) for rank, part in enumerate(parts)]
        assert torch.equal(images, torch.cat([x for x, _ in shares]))
        assert torch.equal(labels, torch.cat([y for _, y in shares]))
        if i == 10:
            saved.load_state_dict(parts[1].state_dict())
    for _ in range(19):
        images, _ = saved.draw(0, 1)
    assert torch.equal(images, torch.cat([x for x, _ in shares]))
    with pytest.raises(ValueError, match="a batch of 60 has no 7 equal shares"):
        whole.draw(0, 7)
