"""Draw the stored runs of the language model: held-out loss against steps and against seconds.

    python benchmarks/progress/plot_language.py benchmarks/results/language.json \\
        --out docs/figures/language.png

A line is the mean over the reported seeds, a band their standard deviation. The dashed line is
AdamW's last loss, and a dot where another optimizer has reached it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reporting import BLACK, GREEN, PURPLE, RED, SKY, save

COLOURS = {
    "AdamW": BLACK,
    "Muon": SKY,
    "SOAP": GREEN,
    "KAISA, defaults": RED,
    "KAISA, twice AdamW's rate": PURPLE,
}
# of the losses that are shown
LOWEST = 1.25
HIGHEST = 2.4
EVERY = 10  # steps between two judgements


def mean_and_deviation(runs: Sequence[dict[str, Any]], key: str) -> tuple[Any, Any]:
    """Over runs, at each judgement."""
    values = np.array([run[key] for run in runs])
    return values.mean(0), values.std(0, ddof=1)


def draw(axes: Axes, record: dict[str, Any], against: str) -> None:
    """One panel."""
    runs = {n: [r for r in record["runs"] if r["name"] == n] for n in COLOURS}
    goal = float(mean_and_deviation(runs["AdamW"], "losses")[0][-1])
    axes.axhline(goal, color=COLOURS["AdamW"], linewidth=0.8, linestyle="--")
    for name, colour in COLOURS.items():
        loss, deviation = mean_and_deviation(runs[name], "losses")
        seconds, _ = mean_and_deviation(runs[name], "seconds")
        x = np.arange(1, len(loss) + 1) * EVERY if against == "steps" else seconds
        axes.fill_between(x, loss - deviation, loss + deviation, color=colour, alpha=0.15, lw=0)
        axes.plot(x, loss, color=colour, linewidth=1.6, label=name)
        if (loss <= goal).any():
            reached = int(np.argmax(loss <= goal))
            axes.plot(x[reached], loss[reached], "o", color=colour, markersize=5)
    axes.set_ylim(LOWEST, HIGHEST)
    axes.set_xlim(left=0)
    axes.set_xlabel("step" if against == "steps" else "processor seconds")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw what a file has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text("utf-8"))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw(left, record, "steps")
    draw(right, record, "seconds")
    left.set_ylabel("held-out loss, nats a character")
    right.legend(frameon=False)
    save(figure, arguments.out)


if __name__ == "__main__":
    main()
