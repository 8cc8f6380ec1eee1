"""The script of the page on curvature prints what the page shows. The other blocks continue it."""

from __future__ import annotations

import re

import pytest
import torch
from page_scripts import ROOT, blocks, python_blocks, run_script, scripts
from torch import nn

from second_order import measure

PAGE = "docs/how-to/curvature.md"
CHANGES = re.compile(r"^without image +\d+, a \d: predicted (\S+), true (\S+)$", re.M)
SECONDS = re.compile(r"pass\(es\), [\d.]+ s;")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints, when the page's other blocks follow it."""
    pytest.importorskip("safetensors")
    code = "\n".join(python_blocks(PAGE))
    return run_script(code, tmp_path_factory.mktemp("curvature"))


def changes(text: str) -> list[tuple[float, float]]:
    return [(float(predicted), float(true)) for predicted, true in CHANGES.findall(text)]


def test_the_script_prints_what_the_page_shows(output: str) -> None:
    """Up to a tenth of the true changes, whose trainings differ from one machine to another."""
    ((_, expected),) = scripts(PAGE)

    def without_numbers(text: str) -> str:
        text = CHANGES.sub(lambda match: match[0].partition(": predicted")[0], text)
        return SECONDS.sub("pass(es);", text)

    assert without_numbers(output).startswith(without_numbers(expected))
    for found, shown in zip(changes(output), changes(expected), strict=True):
        assert found == pytest.approx(shown, rel=0.1)


def test_predictions_have_the_right_sign_and_are_too_large(output: str) -> None:
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


def test_the_page_has_one_complete_script() -> None:
    assert len(scripts(PAGE)) == 1
    assert {language for language, _ in blocks(PAGE)} == {"python", "text"}
