"""The script of the quickstart prints what the page shows, also on CIFAR-10 and with DDP."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_code_blocks import COMMAND, ROOT, blocks

PAGE = "docs/start/quickstart.md"
INTERVALS = re.compile(r"refreshes by drift, .*")


def block(language: str, number: int = 0) -> str:
    """A code block of the page, by its language and its place among those of that language."""
    return [code for name, code in blocks(PAGE) if name == language][number]


SCRIPT = block("python")
ONE_EPOCH = SCRIPT.replace("for epoch in range(EPOCHS)", "for epoch in range(1)")


def apply_diff(script: str, diff: str) -> str:
    """Replace the old lines of each hunk by its new lines."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def run(script: str, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """The output of a script."""
    (folder / "train.py").write_text(script, "utf-8")
    finished = subprocess.run(
        [sys.executable, *launcher, "train.py", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    assert COMMAND.match(SCRIPT)
    return run(SCRIPT, tmp_path_factory.mktemp("quickstart"))


def test_the_summary_is_what_the_script_prints(output: str) -> None:
    """The page can show other refresh intervals, which depend on rounding."""
    printed = output[: output.index("epoch 1:")]
    assert INTERVALS.sub("", printed) == INTERVALS.sub("", block("text"))


def test_the_loss_falls_as_the_page_says(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", output)]
    text = " ".join((ROOT / PAGE).read_text("utf-8").split())
    (bound,) = re.findall(r"the loss is below (\S+) after five epochs", text)
    assert losses[4] < float(bound) < losses[0]


def test_the_table_explains_each_column_of_the_summary() -> None:
    (header,) = [line for line in block("text").splitlines() if line.startswith("name ")]
    rows = re.findall(r"^\| ([\w, ]+) \| [A-Z\"]", (ROOT / PAGE).read_text("utf-8"), re.M)
    assert ", ".join(rows).split(", ") == header.split()


def test_it_reads_the_batches_of_cifar10(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = generator.integers(256, size=(32, 3 * 32 * 32), dtype=np.uint8)
        batch = {b"data": images, b"labels": generator.integers(10, size=32).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    printed = run(ONE_EPOCH, tmp_path, folder.name)
    assert "step 2\n" in printed  # 160 images, 64 in a batch
    assert "epoch 1: loss" in printed


def test_with_ddp_it_prints_the_same_summary_once(output: str, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    printed = run(apply_diff(ONE_EPOCH, block("diff")), tmp_path, launcher=launcher)
    title, share, *_ = output.splitlines()
    assert printed.splitlines()[0] == title.replace("1 process", "2 processes")
    assert printed.splitlines()[1] == share
    assert printed.count("epoch 1:") == 1
