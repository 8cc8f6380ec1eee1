"""The data, networks and batches that the demo, the training script and the benchmarks share."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import train_digits
from digits import (
    batches,
    load_split,
)

if TYPE_CHECKING:
    from conftest import Launcher


def test_images_are_standardised_by_the_training_images() -> None:
    data = load_split()
    assert data.train_images.shape == (1437, 64)
    assert data.test_images.shape == (360, 64)
    assert float(data.train_images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train_images.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert data.test_images.isfinite().all()


@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_of_all_ranks_are_the_global_batch(world_size: int) -> None:
    whole = list(islice(batches(100, 16, seed=5), 13))
    parts = [
        list(islice(batches(100, 16, seed=5, rank=rank, world_size=world_size), 13))
        for rank in range(world_size)
    ]
    for step, batch in enumerate(whole):
        assert torch.equal(batch, torch.cat([part[step] for part in parts]))


def test_the_training_script_ends(launch: Launcher) -> None:
    """A model in DistributedDataParallel that outlived its group would hang one run of three."""
    run = launch(Path(train_digits.__file__), 2, "--optimizer", "sgd", "--steps", 20)
    assert run.wait(90) == [0, 0], run.output(0)
    assert "test accuracy" in run.output(0)
