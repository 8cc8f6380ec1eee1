"""The command for a GPU runs through without one: each part finds something and none fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from separate_process import run

import gpu

if TYPE_CHECKING:
    from pathlib import Path


def test_every_part_of_the_command_runs_on_the_cpu(tmp_path: Path) -> None:
    result = run(gpu.__file__, "--tiny", "--json", tmp_path / "gpu.json")
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert all(part in record and part in result for part in gpu.PARTS)
    assert record["nccl"]["KAISA inverse"] < 1e-6
    for model in ("transformer", "gpt", "resnet"):
        assert record["steps"][model]["KAISA eigen"]["full"] > 0
    assert record["waits"]["transformer"]["DHO2"]["plain"]["launches"] > 0


def test_a_part_that_fails_or_hangs_ends_and_is_reported(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(gpu.LIMITS, "nccl", 0.1)
    result = gpu.run_part("nccl", tiny=True)
    assert result["exit"] != 0
    assert result["failed"]
