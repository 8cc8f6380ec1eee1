"""The script of docs/how-to/tune.md trains what the page says, and its numbers are the defaults."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from aux_base_cases import trained_by
from ranks import replaced

from muon import Muon
from second_order import TraceRule
from second_order.kfac.schedule import MAX_INTERVAL, TIMED_REFRESHES
from second_order.kfac.step_scale import ADAPTIVE_BOUNDS
from second_order.optimizers.config import DAMPING

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "tune.md").read_text("utf-8")
TEXT = " ".join(PAGE.split())


def run_script() -> tuple[list[float], dict[str, Any]]:
    """Return the losses that the script prints, and its variables at the end."""
    script = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()) as output:
        exec(compile(script, "tune.md", "exec"), names)
    losses = re.findall(r"^step \d+: loss (\S+)$", output.getvalue(), re.MULTILINE)
    return [float(loss) for loss in losses], names


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_the_script_reaches_the_loss_of_the_page_with_two_bases() -> None:
    """With Muon in float32, because a processor may emulate bfloat16."""
    with replaced(torch.optim, {"Muon": Muon}):
        losses, names = run_script()
    (promised,) = re.findall(r"falls below (\S+) nats", TEXT)
    assert len(losses) == 4
    assert losses[-1] < float(promised)

    optimizer = names["optimizer"]
    by_muon = {name for name, base in trained_by(optimizer).items() if base == "Muon"}
    layers = ("qkv", "out", "up", "down")
    assert by_muon == {f"blocks.{i}.{layer}.weight" for i in (0, 1) for layer in layers}
    for name, parameter in names["model"].named_parameters():
        (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
        assert group["weight_decay"] == (0.1 if parameter.ndim == 2 else 0.0), name
        assert group["lr"] == pytest.approx(5e-4)  # the schedule changes the rates of both bases


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"The default is {DAMPING}." in TEXT
    assert f"every 1 to {MAX_INTERVAL} steps" in TEXT
    assert TIMED_REFRESHES == 5
    assert "times the first five refreshes" in TEXT
    assert TraceRule().upper == 0.1
    assert "changed by a tenth" in TEXT
    assert ADAPTIVE_BOUNDS.low_scheduled == 2
    assert "the step scale is 2" in TEXT
