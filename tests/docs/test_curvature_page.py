"""The script of the page on curvature prints what the page shows. The other blocks continue it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from page_scripts import ROOT, python_blocks, run_script, scripts
from pool import Forks
from torch import nn

from second_order import measure

PAGE = "docs/how-to/curvature.md"
CHANGES = re.compile(r"^without image +\d+, a \d: predicted (\S+), true (\S+)$", re.M)
SECONDS = re.compile(r"pass\(es\), [\d.]+ s;")


def changes(text: str) -> list[tuple[float, float]]:
    return [(float(predicted), float(true)) for predicted, true in CHANGES.findall(text)]


def without_numbers(text: str) -> str:
    text = CHANGES.sub(lambda match: match[0].partition(": predicted")[0], text)
    return SECONDS.sub("pass(es);", text)


def test_the_script_prints_what_the_page_shows(tmp_path: Path, forks: Forks) -> None:
    """The true changes may differ by a tenth, because their training runs differ by rounding."""
    pytest.importorskip("safetensors")
    ((_, expected),) = scripts(PAGE)
    output = run_script("\n".join(python_blocks(PAGE)), tmp_path, forks)
    assert without_numbers(output).startswith(without_numbers(expected))
    for found, shown in zip(changes(output), changes(expected), strict=True):
        assert found == pytest.approx(shown, rel=0.1)

    text = " ".join((ROOT / PAGE).read_text("utf-8").split())
    assert "For these six images, the predicted changes have the right sign" in text
    assert "they are 1.3 to 2 times too large" in text
    assert len(changes(output)) == 6
    for predicted, true in changes(output):
        assert 1.25 < predicted / true < 2.15


def test_copies_of_a_batch_get_other_labels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4))
    batches = [torch.randn(6, 5)]
    once = measure(model, batches, factors="kfac", progress=False)["0"]
    twice = measure(model, batches * 2, factors="kfac", progress=False)["0"]
    assert torch.allclose(once.A, twice.A)
    assert not torch.allclose(once.G, twice.G, rtol=0.01)
