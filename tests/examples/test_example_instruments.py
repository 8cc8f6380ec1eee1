"""`log_metrics.py`: what it logs is true."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import log_metrics

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


class Writer:
    """In TensorBoard's place."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.scalars = dict[tuple[str, int], float]()
        made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def close(self) -> None:
        pass


made: list[Writer] = []


def test_metrics_are_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in: Any = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    words = ["log_metrics.py", "--steps", "5", "--every", "2", "--logdir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    log_metrics.main()
    (writer,) = made
    assert writer.folder == str(tmp_path)
    assert writer.scalars["second_order/step", 4] == 5
    assert 0 < writer.scalars["second_order/clip", 4] <= 1
    assert "pip install" not in capsys.readouterr().out
