"""Draw the loss at the end against the learning rate, from the run that `make rates` stored.

    PYTHONPATH=src:benchmarks:benchmarks/progress python docs/figures/make_rates.py

A line is the mean over the seeds, and a dot is one seed. The thick part of a line has
the rates whose mean loss is at most 5 % above the optimizer's lowest one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from rates import MIDDLE, mean_losses, near_best
from reporting import FIGURE_WIDTH, OPTIMIZER_COLORS, STYLE, save
from tasks import Run, final_loss, restore_run

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "benchmarks" / "results" / "rates.json"

NAMES = {"AdamW": "AdamW", "Muon": "Muon", "KAISA, AdamW": "KAISA over AdamW"}
LABELS_AT = {
    "AdamW": (0.0095, 2.16),
    "Muon": (0.068, 1.58),
    "KAISA, AdamW": (0.00052, 1.57),
}


def draw(axes: Axes, runs: Sequence[Run], optimizer: str) -> None:
    """One optimizer: its line, the part near its best rate, its seeds, and its name."""
    color = OPTIMIZER_COLORS[optimizer.split(",", maxsplit=1)[0]]
    losses = mean_losses(runs, optimizer)
    own = [run for run in runs if run.job.optimizer == optimizer]
    near = near_best(losses)
    axes.plot(list(losses), list(losses.values()), color=color, linewidth=1.2)
    near_losses = [losses[lr] for lr in near]
    axes.plot(
        near, near_losses, "o-", color=color, linewidth=4, markersize=9, alpha=0.5
    )
    axes.plot(
        [run.job.lr for run in own], [final_loss(run) for run in own], ".", color=color
    )
    seconds = statistics.median(run.seconds[-1] for run in own)
    x, y = LABELS_AT[optimizer]
    axes.text(
        x, y, f"{NAMES[optimizer]}\n{seconds:.1f} s per run", color=color, va="center"
    )


def figure_of(record: dict[str, Any]) -> Figure:
    """One panel."""
    runs = [restore_run(run) for run in record["runs"]]
    figure = Figure(figsize=(FIGURE_WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    for optimizer in MIDDLE:
        draw(axes, runs, optimizer)
    axes.set_xscale("log")
    axes.set_xticks([0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("held-out loss at the end")
    axes.set_title(
        "Thick: at most 5 % above the lowest loss of the optimizer", loc="left"
    )
    return figure


def main() -> None:
    """Draw the stored run."""
    record = json.loads(RECORD.read_text("utf-8"))
    with mpl.rc_context(STYLE):
        save(figure_of(record), HERE / "loss_by_rate.png")


if __name__ == "__main__":
    main()
