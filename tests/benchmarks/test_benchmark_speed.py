"""The speed benchmark: its models, its meters, its arithmetic, and what it writes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import unfold

import floor
import instruments
import measure
import plot_speed
import reporting
import speed
from variants import VARIANTS
from workloads import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World


def tiny_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


TINY = Workload("tiny", tiny_net, (5, 2, 8, 8))

# -------------------------------------------------------------------------------------- the floor


def test_the_floor_times_every_stage() -> None:
    times = floor.measure_floor(TINY, repeats=1)
    assert all(time > 0 for time in times.values())
    assert times["statistics"] <= (times["patches"] + times["g"]) * (1 + 1e-9)
    for solver in ("eigen", "inverse"):
        every_step, amortized = floor.floor_ratios(times, solver, times["sgd"])
        assert every_step > amortized > 1


def test_the_floor_is_made_of_the_right_matrices() -> None:
    conv, strided, linear = floor.capture_layers(TINY)
    assert [layer.autocorrelates for layer in (conv, strided, linear)] == [True, False, False]
    patches = unfold(conv.x, 3, padding=1).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(floor.a_by_one_product(conv), patches.T @ patches)
    rows = strided.x[:, :, ::2, ::2].permute(0, 2, 3, 1).flatten(0, 2)
    torch.testing.assert_close(floor.a_by_one_product(strided), rows.T @ rows)
    core = nn.functional.pad(conv.x, (1, 1, 1, 1))[:, :, 2:-2, 2:-2].transpose(0, 1).flatten(1)
    offsets = floor.a_by_offsets(conv)
    assert offsets.shape == (2, 2, 5, 5)
    torch.testing.assert_close(offsets[:, :, 2, 2], core @ core.T)
    assert [tuple(m.shape) for m in floor.factors(conv)] == [(19, 19), (4, 4)]
    assert [tuple(m.shape) for m in floor.factors(linear)] == [(65, 65), (10, 10)]


def test_ratios_weigh_the_stages_by_how_often_they_run() -> None:
    times = {"statistics": 20.0, "eigh": 100.0, "precondition_eigen": 5.0}
    assert floor.floor_ratios(times, "eigen", 10.0) == (13.5, 1.8)
    assert measure.amortized({"full": 100.0, "statistics": 10.0, "plain": 1.0}) == 2.8


# ------------------------------------------------------------------------------------- the meters


def test_a_range_counts_without_the_ranges_within_it() -> None:
    def event(name: str, start: int, end: int, thread: int = 1, device: str = "CPU") -> Any:
        return SimpleNamespace(
            name=name,
            thread=thread,
            time_range=SimpleNamespace(start=start, end=end),
            device_time_total=0,
            device_type=SimpleNamespace(name=device),
        )

    events = [
        event("second_order.exchange", 3000, 5000),
        event("second_order.solve", 1000, 9000),
        event("second_order.exchange", 6000, 7000),
        event("second_order.clip", 6500, 6700),
        event("second_order.capture", 2000, 4000, thread=2),
        event("second_order.solve", 9000, 10000),
        event("second_order.solve", 0, 99000, device="CUDA"),
        event("aten::mm", 1500, 1600),
    ]
    assert instruments.stage_milliseconds(instruments.spans_of(events)) == pytest.approx(
        {"solve": 6.0, "exchange": 2.8, "clip": 0.2, "capture": 2.0}
    )


def test_a_worker_measures_all_there_is_to_a_variant() -> None:
    result = measure.measure_steps(TINY, VARIANTS["eigen"], repeats=1)
    assert set(result["milliseconds"]) == {"sgd", *measure.KINDS}
    assert result["every_step"] > 0
    assert result["every_10_and_100"] > 0
    assert result["sent"] == {}
    assert result["factor_bytes"] > 0
    assert result["inverse_bytes"] > 0
    stages = result["stages"]["host"]
    assert stages.keys() >= {"step", "statistics", "solve", "precondition"}
    assert sum(stages.values()) <= 2 * stages["step"]


def measured_by_ranks(rank: int, world_size: int, variant: str) -> dict[str, Any]:
    return measure.measure_steps(TINY, VARIANTS[variant], repeats=1)


@pytest.mark.parametrize("variant", ["comm-opt-inverse", "mem-opt-inverse", "dpkfac-inverse"])
def test_bytes_sent_by_category(world: World, variant: str) -> None:
    result = world.run(measured_by_ranks, 2, variant)[0]
    sent = result["sent"]
    alone = variant == "dpkfac-inverse"
    # Triangles, and a handful of scalars.
    triangles = 4 * sum(n * (n + 1) // 2 for n in (19, 4, 4, 4, 65, 10))
    for kind in measure.KINDS:
        assert (sent[kind]["gradients"] > 0) == (variant != "comm-opt-inverse")
        assert sent[kind]["other"] < 100  # the word that ranks compare
        least = triangles if kind != "plain" and not alone else 0
        assert least <= sent[kind]["factors"] <= least + 100
    assert (sent["full"]["inverses"] > 1000) == (variant == "comm-opt-inverse")
    assert result["milliseconds"]["ddp"] > 0


# ------------------------------------------------------------------------------------ the results


def record() -> dict[str, Any]:
    floors = {"sgd": 10.0, "statistics": 20.0, "eigh": 100.0, "precondition_eigen": 5.0}
    stages = {"step": 25.0, "capture": 6.0, "solve": 8.0, "news": 1.0}
    one = {
        "workload": "mlp",
        "variant": "eigen",
        "solver": "eigen",
        "placement": "one process",
        "processes": 1,
        "milliseconds": {"sgd": 10.0, "full": 200.0, "statistics": 40.0, "plain": 18.0},
        "every_step": 20.0,
        "every_10_and_100": 2.18,
        "sent": {},
        "stages": {"host": stages},
        "factor_bytes": 2_000_000,
        "inverse_bytes": 1_000_000,
        "memory": {"ratio": 1.25},
    }
    sent = {"factors": 3e6, "inverses": 1e6, "gradients": 0, "averaging": 9e6, "other": 0}
    two = {
        **one,
        "variant": "comm-opt-eigen",
        "placement": "COMM-OPT",
        "processes": 2,
        "sent": {"full": sent},
    }
    return {
        "machine": reporting.machine(),
        "repeats": 7,
        "floors": {"mlp": floors},
        "rows": [one, {**two, "workload": "mlp"}],
    }


def test_the_record_becomes_a_table_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(record=True, width=120, file=sys.stderr)
    console.print(speed.table(record()))
    lines = console.export_text().splitlines()
    (one,) = (line for line in lines if "one process" in line and "│" in line)
    cells = [cell.strip() for cell in one.strip("│").split("│")]
    assert cells == [
        *("mlp", "eigen", "one process", "10.0", "20.00 (13.50)", "2.18 (1.80)", "3.0", "1.25", "")
    ]
    source = tmp_path / "results" / "speed.json"
    target = tmp_path / "speed.png"
    reporting.store(source, **record())
    monkeypatch.setattr(sys, "argv", ["plot_speed.py", str(source), "--out", str(target)])
    plot_speed.main()
    assert target.read_bytes().startswith(b"\x89PNG")
