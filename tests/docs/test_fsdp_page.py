"""The script of the page on FSDP2 and torch.compile prints what the page shows, and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from page_scripts import assert_prints, run_script, scripts
from pool import Forks


@pytest.mark.timeout(900)  # torch.compile calls a C++ compiler, twice
def test_a_resumed_run_prints_the_last_loss_of_the_whole_run(tmp_path: Path, forks: Forks) -> None:
    ((code, printed),) = scripts("docs/how-to/fsdp-compile.md")
    whole = run_script(code, tmp_path, forks)
    assert_prints(whole, printed)

    last = tmp_path / "checkpoints" / "step-000060"
    shutil.rmtree(last)
    resumed = run_script(code, tmp_path, forks)
    assert resumed.splitlines() == whole.splitlines()[-1:]  # to all digits that are printed
    assert last.is_dir()
