"""`python -m second_order profile`: the stage picture of a script that knows nothing of it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

import second_order
from second_order.__main__ import main
from second_order.profiling import Recorder

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


def test_the_time_of_a_step_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is waited for at each stage, and no more once all steps are measured."""
    waits: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: waits.append(recorder.taken))
    model = torch.nn.Linear(4, 2)
    optimizer = second_order.KAISA(model, lr=0.1, factor_update_steps=1, inv_update_steps=1)
    recorder, spans = Recorder(1, 2), []
    with recorder.watching():
        for _ in range(4):
            time.sleep(0.01)
            model(torch.ones(3, 4)).sum().backward()
            before = time.perf_counter()
            optimizer.step()
            spans.append((before, time.perf_counter()))
    assert (recorder.optimizer, recorder.taken) == (optimizer, 4)
    assert len(recorder.steps) == 2
    assert set(waits) == {1, 2}
    for step, last, this in zip(recorder.steps, spans, spans[1:], strict=False):
        assert step["elsewhere"] >= 10.0
        assert {"statistics", "solve", "precondition", "base", "backward"} <= set(step)
        assert all(ms > 0 for ms in step.values())
        least, most = this[0] - last[1], this[1] - last[0]  # from within a step to within the next
        assert 1000 * least - 0.5 <= sum(step.values()) <= 1000 * most + 0.5
    means = recorder.means()
    assert list(means)[:3] == ["elsewhere", "backward", "statistics"]
    assert sum(means.values()) == pytest.approx(sum(map(sum, map(dict.values, recorder.steps))) / 2)


def test_a_script_gets_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, argv = tmp_path / "out" / "picture", list(sys.argv)
    words = ["profile", "--skip", "2", "--steps", "3", "--output", str(output)]
    assert main([*words, str(written(tmp_path)), "8", "0"]) == 0
    assert sys.argv == argv
    found = json.loads(output.with_suffix(".json").read_text())
    assert (found["optimizer"], found["rank"], found["skipped"]) == ("KAISA", 0, 2)
    assert len(found["steps"]) == 3
    assert {"statistics", "precondition", "backward"} <= set(found["mean_milliseconds"])
    assert found["papers"]["statistics"] == "FactorComp"
    said = capsys.readouterr().out
    assert "KAISA: mean of 3 steps" in said
    assert "InverseComp" in said
    backward = torch.autograd.backward
    assert backward.__name__ == "backward", "the script's patches are gone"


def test_each_rank_writes_and_the_first_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's exit status is passed on."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = written(tmp_path)
    words = ["profile", "--skip", "1", "--steps", "9", "--output", str(tmp_path / "p")]
    assert main([*words, str(script), "4", "3"]) == 3
    found = json.loads((tmp_path / "p-rank0.json").read_text())
    assert len(found["steps"]) == 3, "it ended before nine"
    assert "KAISA: mean of 3 steps" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    monkeypatch.chdir(tmp_path)
    assert main([*words, "-m", script.stem, "4", "0"]) == 0
    assert (tmp_path / "p-rank1.json").exists()
    assert capsys.readouterr().out == "", "one rank prints"


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = str(written(tmp_path, made="torch.optim.SGD(model.parameters(), lr=0.05)"))
    assert main(["profile", "--output", str(tmp_path / "p"), plain, "9", "0"]) == 1
    assert "a second-order optimizer of the script took 0 steps" in capsys.readouterr().err
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
