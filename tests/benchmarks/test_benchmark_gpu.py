"""The command for a GPU runs through without one: each part finds something and none fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("src", "examples", "benchmarks", "benchmarks/speed")


def test_every_part_of_the_command_runs_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, gpu.__file__, "--tiny", "--json", tmp_path / "gpu.json"]
    paths = os.pathsep.join(str(ROOT / path) for path in PATHS)
    run = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert run.returncode == 0, record
    assert all(part in record and part in run.stdout for part in gpu.PARTS)
    assert record["nccl"]["KAISA inverse"] < 1e-6
    for model in ("transformer", "gpt", "resnet"):
        assert record["steps"][model]["KAISA eigen"]["full"] > 0
        assert record["waits"][model]["DHO2, pretended"]["plain"]["launches"] > 0


def test_a_part_that_fails_or_hangs_ends_and_is_told(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(gpu.LIMITS, "nccl", 0.1)
    found = gpu.measured("nccl", tiny=True)
    assert found["exit"] != 0
    assert found["failed"]
