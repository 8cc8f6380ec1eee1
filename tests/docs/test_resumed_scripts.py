"""Complete scripts that save and resume: a resumed run is the run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from page_scripts import assert_prints, run_script, scripts

LOSSES = re.compile(r"^step \d+: loss (\S+), resumed (\S+)$", re.M)


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

    losses = LOSSES.findall(output)
    assert len(losses) == 3
    for loss, resumed_loss in losses:
        assert resumed_loss == loss  # to all digits that are printed


def test_trainer_on_two_processes(tmp_path: Path) -> None:
    ((code, _),) = scripts("docs/how-to/frameworks.md")
    train = "    trainer.train(resume_from_checkpoint=checkpoint)\n"
    changes = {
        "python train.py": "torchrun --standalone --nproc-per-node=2 train.py",
        "max_steps=60": "max_steps=4",
        "save_steps=30": "save_steps=2",
        "logging_steps=10": "logging_steps=1",
        "checkpoint-30": "checkpoint-2",
        "(40, 50, 60)": "(3, 4)",
        train: f"{train}    print(type(trainer.model_wrapped))\n",
    }
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)

    output = run_script(code, tmp_path)
    assert output.count("DistributedDataParallel") == 4  # two runs of each process
    losses = LOSSES.findall(output)
    assert len(losses) == 4  # two steps of each process
    for loss, resumed_loss in losses:
        assert resumed_loss == loss


def test_save_and_resume(tmp_path: Path) -> None:
    ((code, shown),) = scripts("docs/how-to/checkpoints.md")
    printed = run_script(code, tmp_path)
    assert_prints(printed, shown)
    for line in (*printed.splitlines(), *shown.splitlines()):
        whole, resumed = re.findall(r"\d\.\d+", line)
        assert whole == resumed, line
