"""The script of the quickstart prints what the page shows, also on CIFAR-10 and with DDP."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
from page_scripts import ROOT, blocks, run_script, scripts
from pool import Forks

PAGE = "docs/start/quickstart.md"
TEXT = " ".join((ROOT / PAGE).read_text("utf-8").split())
INTERVALS = re.compile(r"refreshes by drift, .*")

((SCRIPT, _),) = scripts(PAGE)
EPOCHS = "for epoch in range(EPOCHS)"
FIVE_EPOCHS = SCRIPT.replace(EPOCHS, "for epoch in range(5)")  # the page states their loss
ONE_EPOCH = SCRIPT.replace(EPOCHS, "for epoch in range(1)")
(SUMMARY,) = (code for language, code in blocks(PAGE) if language == "text")
(DIFF,) = (code for language, code in blocks(PAGE) if language == "diff")


def apply_diff(script: str, diff: str) -> str:
    """Replace the old lines of each hunk by its new lines."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def test_the_script_prints_the_summary_and_the_loss_of_the_page(
    tmp_path: Path, forks: Forks
) -> None:
    """The page can show other refresh intervals, which depend on rounding."""
    assert SCRIPT.count(EPOCHS) == 1
    output = run_script(FIVE_EPOCHS, tmp_path, forks)
    summary = output[: output.index("epoch 1:")]
    assert INTERVALS.sub("", summary) == INTERVALS.sub("", SUMMARY)

    losses = [float(loss) for loss in re.findall(r"loss (\S+),", output)]
    (bound,) = re.findall(r"the loss is below (\S+) after five epochs", TEXT)
    assert losses[4] < float(bound) < losses[0]


def test_the_table_explains_each_column_of_the_summary() -> None:
    (header,) = [line for line in SUMMARY.splitlines() if line.startswith("name ")]
    rows = re.findall(r"^\| ([\w, ]+) \| [A-Z\"]", (ROOT / PAGE).read_text("utf-8"), re.M)
    assert ", ".join(rows).split(", ") == header.split()


def test_the_script_reads_the_batches_of_cifar10(tmp_path: Path, forks: Forks) -> None:
    generator = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = generator.integers(256, size=(32, 3 * 32 * 32), dtype=np.uint8)
        batch = {b"data": images, b"labels": generator.integers(10, size=32).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    printed = run_script(ONE_EPOCH, tmp_path, forks, [folder.name])
    assert "step 2\n" in printed  # 160 images, 64 in a batch
    assert "epoch 1: loss" in printed


def test_with_ddp_the_script_prints_the_same_summary_once(tmp_path: Path, forks: Forks) -> None:
    command = "torchrun --standalone --nproc-per-node=2 train.py"
    script = apply_diff(ONE_EPOCH, DIFF).replace("python train.py", command)
    title, share, *rest = run_script(script, tmp_path, forks).splitlines()
    shown_title, shown_share, *_ = SUMMARY.splitlines()
    assert title == shown_title.replace("1 process", "2 processes")
    assert share == shown_share
    assert sum(line.startswith("epoch 1:") for line in rest) == 1
