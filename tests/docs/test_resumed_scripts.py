"""Complete scripts that save and resume: a resumed run is the run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from page_scripts import assert_prints, run_script, scripts


@pytest.mark.timeout(900)  # torch.compile calls a C++ compiler, twice
def test_fsdp_and_compile(tmp_path: Path) -> None:
    ((code, printed),) = scripts("docs/how-to/fsdp-compile.md")
    whole = run_script(code, tmp_path)
    assert_prints(whole, printed)

    last = tmp_path / "checkpoints" / "step-000060"
    shutil.rmtree(last)
    resumed = run_script(code, tmp_path)
    assert resumed.splitlines() == whole.splitlines()[-1:]  # to all digits that are printed
    assert last.is_dir()


def test_trainer(tmp_path: Path) -> None:
    ((code, printed),) = scripts("docs/how-to/frameworks.md")
    output = run_script(code, tmp_path)
    assert_prints(output, printed)

    losses = re.findall(r"^step \d+: loss (\S+), resumed (\S+)$", output, re.M)
    assert len(losses) == 3
    for loss, resumed_loss in losses:
        assert resumed_loss == loss  # to all digits that are printed
