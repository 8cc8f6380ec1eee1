"""The example of ranks with different jobs, as it is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import roles
from second_order import SecondOrderWarning

if TYPE_CHECKING:
    from conftest import TorchRunner

SCRIPT = Path(roles.__file__)


@pytest.mark.parametrize(("processes", "loop"), [(2, ()), (3, ("--usual-loop",))])
def test_workers_train_and_accelerators_help(
    torchrun: TorchRunner, processes: int, loop: tuple[str, ...]
) -> None:
    run = torchrun(SCRIPT, processes, "--epochs", 2, *loop)
    assert run.wait(120.0) == 0, run.output
    assert trained_well(run.output), run.output
    assert "epoch 1: loss" in run.output
    assert "alone" not in run.output, "the accelerator was there to the end"
    assert ("eigenpairs of 2 epochs" in run.output) == (processes == 2)


def test_one_process_does_as_dho2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["roles.py", "--epochs", "2"])
    with pytest.warns(SecondOrderWarning, match="as DHO2 does"):
        roles.main()
    assert trained_well(capsys.readouterr().out)


def trained_well(output: str) -> bool:
    accuracy = re.search(r"test accuracy ([0-9.]+)%", output)
    return accuracy is not None and float(accuracy[1]) > 80
