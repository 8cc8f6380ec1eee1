"""The command that users start: everything else runs in forks, without torch's agent."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

from second_order import KAISA

dist.init_process_group()
torch.manual_seed(dist.get_rank())
model = nn.Linear(4, 3)
optimizer = KAISA(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    optimizer.step()
lines = [None, None]
dist.all_gather_object(lines, [p.tolist() for p in model.parameters()])
if dist.get_rank() == 0:
    print("equal" if lines[0] == lines[1] else lines)
dist.destroy_process_group()
"""


def test_torchrun_trains_on_two_processes_and_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "equal"
