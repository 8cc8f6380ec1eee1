"""`log_statistics.py` and `influence.py`: what they print is true."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

import influence
import log_statistics
from digits import load_split
from influence import Data, correlation

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


class Writer:
    """In TensorBoard's place."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars = folder, dict[tuple[str, int], float]()
        made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def close(self) -> None:
        pass


made: list[Writer] = []


def test_statistics_are_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in: Any = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    words = ["log_statistics.py", "--steps", "5", "--every", "2", "--logdir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    log_statistics.main()
    (writer,) = made
    assert writer.folder == str(tmp_path)
    assert writer.scalars["second_order/step", 4] == 5
    assert 0 < writer.scalars["second_order/clip", 4] <= 1
    assert "pip install" not in capsys.readouterr().out


def test_influence_foretells_what_retraining_without_an_example_does() -> None:
    """And better than gradients without curvature do."""
    digits = load_split()
    train_data = Data(digits.train_images[:150].double(), digits.train_labels[:150])
    images = torch.tensor([3, 42])
    test_data = Data(digits.test_images[images].double(), digits.test_labels[images])
    found = influence.influence(train_data, test_data, hidden=0, decay=1e-2, steps=15, points=10)
    assert found.predicted.shape == found.true.shape == (2, len(found.points))
    assert 8 <= len(found.points) <= 10
    for predicted, exact, plain, true in zip(*found[1:5], strict=True):
        assert correlation(exact, true) > 0.95
        assert correlation(predicted, true) > 0.7
        assert correlation(predicted, true) > correlation(plain, true)
    own = train_data.labels[found.scores.argmax(1)]
    assert torch.equal(own, test_data.labels), "the most helpful image is of the same digit"
