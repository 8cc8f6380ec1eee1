"""`python -m second_order profile`: the stage picture of a script that knows nothing of it."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from second_order import profiling
from second_order.__main__ import main
from second_order.profiling import Span, picture_of, read, table_of

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import nn
from second_order import {System}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
optimizer = {made}
x, y = torch.randn(12, 6), torch.randint(3, (12,))
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
assert __name__ == "__main__"
sys.exit(int(sys.argv[2]))
"""


KAISA = "KAISA(model, lr=0.05, factor_update_steps=1, inv_update_steps=1)"


def written(path: Path, System: str = "KAISA", made: str = KAISA) -> Path:
    script = path / "train.py"
    script.write_text(SCRIPT.format(System=System, made=made), "utf-8")
    return script


def test_the_time_between_marks_is_shared_out() -> None:
    spans = [
        Span("statistics", 1, 10, 30),
        Span("exchange", 1, 12, 16),
        Span("capture", 2, 4, 6),  # of autograd's thread, while ...
        Span("backward", 1, 2, 9),
        Span("base", 1, 40, 45),
        Span("base", 1, -5, -1),  # before the first mark
        Span("base", 1, 100, 120),
        Span("capture", 1, 104, 106),
        Span("base", 1, 200, 201),  # after the last
    ]
    picture = picture_of(spans, [(0, 1), (100, 1), (200, 1)])
    first, second = picture.host
    assert first == {
        "statistics": 16 + 2,
        "statistics_exchange": 4,
        "backward": 5,
        "elsewhere": 68,
        "base": 5,
    }
    assert sum(first.values()) == sum(second.values()) == 100
    assert second == {"base": 18, "statistics": 2, "elsewhere": 80}
    assert picture.accounts[:2] == ["elsewhere", "backward"]
    assert picture.mean(picture.host)["base"] == 11.5
    assert picture.device == []


def event(name: str, start: float, end: float, *, device: str = "CPU", busy: float = 0.0) -> Any:
    """As a profile has them, in microseconds."""
    return SimpleNamespace(
        name=name,
        thread=1,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        device_time_total=busy,
        is_user_annotation=device == "CUDA" and "step" in name,
    )


def test_work_of_a_device_that_no_stage_has_launched_is_that_of_the_passes() -> None:
    events = [
        event(profiling.MARK, 0, 1),
        event("second_order.backward", 1000, 3000, busy=111.0),
        event("second_order.base", 5000, 6000, busy=2000.0),
        event("second_order.base", 5000, 7000, device="CUDA"),
        event("Optimizer.step#SGD.step", 5000, 7000, device="CUDA"),
        event("gemm", 2000, 4000, device="CUDA"),
        event("add_", 6000, 8000, device="CUDA"),
        event("gemm", 12000, 13000, device="CUDA"),
        event(profiling.MARK, 10000, 10001),
        event("aten::add", 100, 200),
    ]
    picture = picture_of(*read(events))
    assert picture.device == [{"base": 2.0, "elsewhere": 2.0}]
    assert "device ms" in table_of(picture)


def test_a_script_gets_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, argv = tmp_path / "out" / "picture", list(sys.argv)
    words = ["profile", "--skip", "2", "--steps", "3", "--output", str(output), "--trace"]
    assert main([*words, str(written(tmp_path)), "8", "0"]) == 0
    assert sys.argv == argv
    found = json.loads(output.with_suffix(".json").read_text())
    assert (found["optimizer"], found["rank"], found["skipped"]) == ("KAISA", 0, 2)
    assert len(found["steps"]) == 3
    for step in found["steps"]:
        assert {"statistics", "precondition", "base", "backward", "elsewhere"} <= set(step)
        assert all(ms > 0 for name, ms in step.items() if "exchange" not in name)
        assert sum(step.values()) < 1000
    assert found["papers"]["statistics"] == "FactorComp"
    said = capsys.readouterr().out
    assert "KAISA: mean of 3 steps" in said
    assert "InverseComp" in said
    assert output.with_suffix(".png").stat().st_size > 5000
    assert json.loads((tmp_path / "out" / "picture.trace.json").read_text())["traceEvents"]
    backward = torch.autograd.backward
    assert backward.__name__ == "backward", "the script's patches are gone"


def test_a_figure_needs_matplotlib_and_nothing_else_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a plain optimizer has a picture as well; the script's exit status is passed on."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = written(tmp_path, made="torch.optim.SGD(model.parameters(), lr=0.05)")
    words = ["profile", "--skip", "1", "--steps", "9", "--output", str(tmp_path / "p")]
    assert main([*words, str(script), "4", "3"]) == 3
    found = json.loads((tmp_path / "p-rank0.json").read_text())
    assert len(found["steps"]) == 3, "it ended before nine"
    assert set(found["steps"][0]) == {"backward", "elsewhere"}
    assert "no figure: matplotlib is not there" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    monkeypatch.chdir(tmp_path)
    assert main([*words, "-m", script.stem, "4", "0"]) == 0
    assert (tmp_path / "p-rank1.json").exists()
    assert capsys.readouterr().out == "", "one rank prints"
    assert not (tmp_path / "p.png").exists()


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(written(tmp_path))
    assert main(["profile", "--output", str(tmp_path / "p"), script, "4", "0"]) == 1
    assert "took 4 steps, and the first 5 are not measured" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["profile", "--steps", "0", script])
    assert "'0' is not a number of steps, 1 or more" in capsys.readouterr().err
    words = ["profile", "--skip", "1", "--output", str(tmp_path / "p")]
    with pytest.raises(ValueError, match="invalid literal"):
        main([*words, script, "4", "a word"])
    assert (tmp_path / "p.json").exists(), "an error of the script does not take the picture along"
