"""The example of restarts: a killed process, a damaged checkpoint, another number of processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from separate_process import run

import elastic
import elastic_soak
from digits import load_split
from second_order import load_checkpoint

if TYPE_CHECKING:
    from pool import Forks

OTHERS = [name for name in elastic.OPTIMIZERS if name != "kaisa"]


def start(size: int, folder: Path, steps: int, *options: object) -> list[int | None]:
    """Train on processes of their own; their exit codes."""
    arguments = ["--folder", str(folder), "--steps", str(steps), *map(str, options)]
    processes = elastic_soak.ranks(size, arguments, folder.with_suffix(".log"))
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def drive(root: Path) -> None:
    """Runs all scripts of these tests as forks of one process that has imported torch."""
    codes = start(2, root / "killed", 40, "--die-at", 35)
    assert codes[1] == -9, (root / "killed.log").read_text()
    assert codes[0] not in (0, -9), "the other one ends by itself"
    newest = elastic.path_of(root / "killed", 30)
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert start(3, root / "killed", 40) == [0, 0, 0]
    assert start(1, root / "alone", 40) == [0]
    assert start(1, root / "other", 40, "--seed", 1) == [0]
    for name in OTHERS:
        option = "--optimizer", name
        assert start(2, root / f"{name} resumed", 10, *option) == [0, 0]
        assert start(1, root / f"{name} resumed", 20, *option) == [0]
        assert start(1, root / f"{name} alone", 20, *option) == [0]


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs, which are forks of a separate process, because pytest has threads."""
    root = tmp_path_factory.mktemp("elastic")
    run(forks, __file__, root)
    return root


def weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(elastic.path_of(folder, steps))["model"])


def test_a_killed_run_resumes_on_more_processes_from_its_newest_valid_checkpoint(
    trained: Path,
) -> None:
    """And ends where it would have, up to rounding."""
    output = (trained / "killed.log").read_text()
    assert "SecondOrderError" in output
    assert f"skipped: {elastic.path_of(trained / 'killed', 30)} cannot be loaded" in output
    assert "starting at step 20 on 3 processes" in output
    found, alone, other = (weights(trained / name, 40) for name in ("killed", "alone", "other"))
    assert elastic_soak.distance(found, alone) < 1e-10
    assert elastic_soak.distance(other, alone) > 1e-2
    names = [path.name for path in elastic.checkpoints(trained / "killed")]
    assert names == ["step-00000040.pt", "step-00000030.pt", "step-00000020.pt"]


@pytest.mark.parametrize("name", OTHERS)
def test_each_optimizer_resumes_on_fewer_processes(trained: Path, name: str) -> None:
    """DPKFAC's factors are of its share of the batch, and so not those of another number."""
    found, alone = (weights(trained / f"{name} {which}", 20) for which in ("resumed", "alone"))
    assert (elastic_soak.distance(found, alone) < 1e-9) is (name != "dpkfac")


def test_processes_share_the_same_batches() -> None:
    data = load_split()
    images = data.train_images
    labels = data.train_labels
    whole = elastic.Batches(images, labels, 0)
    parts = [elastic.Batches(images, labels, 0) for _ in range(3)]
    for _ in range(30):
        images, labels = whole.draw(0, 1)
        shares = [part.draw(rank, 3) for rank, part in enumerate(parts)]
        assert torch.equal(images, torch.cat([x for x, _ in shares]))
        assert torch.equal(labels, torch.cat([y for _, y in shares]))
    with pytest.raises(ValueError, match="a batch of 60 cannot be divided among 7 processes"):
        whole.draw(0, 7)


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
