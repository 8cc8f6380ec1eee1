"""The command for a GPU runs through without one: each part finds something and none fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import gpu

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_every_part_finds_something_on_the_cpu() -> None:
    """The part that needs a process of its own is in the next test."""
    found = {name: gpu.PARTS[name](True) for name in ("nccl", "steps", "precision")}
    assert found["nccl"]["KAISA inverse"] < 1e-6
    for model in ("transformer", "gpt", "resnet"):
        assert found["steps"][model]["KAISA eigen"]["full"] > 0
    assert found["precision"]["ieee"]["milliseconds"] > 0


def test_the_command_prints_and_stores_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "gpu.json"
    command = ["gpu.py", "--tiny", "--parts", "waits", "--json", str(stored)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the part's process
    gpu.main()
    record = json.loads(stored.read_text())
    assert "waits" in capsys.readouterr().out
    assert record["waits"]["exit"] == 0
    assert record["waits"]["transformer"]["DHO2"]["plain"]["launches"] > 0


def test_the_cuda_tests_that_the_command_runs_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def note(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout="10 passed")

    monkeypatch.setattr(subprocess, "run", note)
    assert gpu.PARTS["tests"](True) == {"exit": 0, "output": ["10 passed"]}
    assert (gpu.ROOT / commands[0][-1]).exists()


def test_a_part_that_fails_or_hangs_ends_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.LIMITS, "nccl", 0.1)
    result = gpu.run_part("nccl", tiny=True)
    assert result["exit"] != 0
    assert result["failed"]
