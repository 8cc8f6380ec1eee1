"""The example of ranks with different jobs, as it is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ranks import script

import roles

if TYPE_CHECKING:
    from conftest import Launcher
    from pool import World

SCRIPT = Path(roles.__file__)


def test_an_accelerator_computes_the_eigenpairs_of_a_worker(launch: Launcher) -> None:
    """In processes of their own, which end."""
    run = launch(SCRIPT, 2, "--epochs", 2)
    assert run.wait() == [0, 0], run.output(0) + run.output(1)
    assert_helped(run.output(0) + run.output(1))
    assert "eigenpairs of 2 epochs" in run.output(1)


def test_a_stats_worker_computes_the_statistics_of_a_worker(world: World) -> None:
    output = "".join(world.run(script, 2, "roles", "--optimizer", "distkfac", "--epochs", 2))
    assert_helped(output)
    assert re.search(r"rank 1: statistics of [1-9][0-9]* batches", output), output


@pytest.mark.parametrize("optimizer", ["mrdho2", "distkfac"])
def test_the_usual_loop_trains_with_helpers(world: World, optimizer: str) -> None:
    arguments = ("--optimizer", optimizer, "--epochs", 2, "--usual-loop")
    output = "".join(world.run(script, 3, "roles", *arguments))
    assert_helped(output)
    assert "rank" not in output, "nobody has served"


def assert_helped(output: str) -> None:
    assert trained_well(output), output
    assert "epoch 1: loss" in output
    assert "alone" not in output, "the helper was there to the end"


def trained_well(output: str) -> bool:
    accuracy = re.search(r"test accuracy ([0-9.]+)%", output)
    return accuracy is not None and float(accuracy[1]) > 80
