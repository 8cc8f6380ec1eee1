"""Draw the stored runs of the language model: held-out loss against steps and against seconds.

    python benchmarks/progress/plot_language.py benchmarks/results/language.json \\
        --out docs/figures/language.png

A line is the mean over the reported seeds, and a band is their standard deviation. The dashed line
is AdamW's last loss, and a dot is where an optimizer reaches it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reporting import FIGURE_WIDTH, OPTIMIZER_COLORS, STYLE, save

DASHES = {
    "AdamW": "-",
    "Muon": "-",
    "SOAP": "-",
    "KAISA, defaults": "-",
    "KAISA, twice AdamW's rate": (0, (4, 1.5)),
}
# The range of the losses in the figure.
LOWEST = 1.29
HIGHEST = 2.2
EVERY = 10  # steps between two evaluations
FONT_SIZE = 12  # readable on a phone also
LINE_HEIGHT = 0.072  # of a label, in nats


def mean_and_deviation(runs: Sequence[dict[str, Any]], key: str) -> tuple[Any, Any]:
    """Mean and standard deviation over runs, at each evaluation."""
    values = np.array([run[key] for run in runs])
    return values.mean(0), values.std(0, ddof=1)


def spread(heights: Sequence[float], least: float) -> list[float]:
    """Move ascending heights up until each is at least so far above the one before it."""
    result: list[float] = []
    for height in heights:
        if result:
            height = max(height, result[-1] + least)  # noqa: PLW2901
        result.append(height)
    return result


def draw(axes: Axes, record: dict[str, Any], against: str) -> None:
    """Draw the losses against "steps" or "seconds"."""
    runs = {n: [r for r in record["runs"] if r["name"] == n] for n in DASHES}
    goal = float(mean_and_deviation(runs["AdamW"], "losses")[0][-1])
    axes.axhline(goal, color=OPTIMIZER_COLORS["AdamW"], linewidth=0.9, linestyle=":")
    ends = []
    for name, dashes in DASHES.items():
        color = OPTIMIZER_COLORS[name.partition(",")[0]]
        loss, deviation = mean_and_deviation(runs[name], "losses")
        seconds, _ = mean_and_deviation(runs[name], "seconds")
        x = np.arange(1, len(loss) + 1) * EVERY if against == "steps" else seconds
        axes.fill_between(x, loss - deviation, loss + deviation, color=color, alpha=0.15, lw=0)
        axes.plot(x, loss, color=color, linewidth=1.8, linestyle=dashes)
        if (loss <= goal).any():
            reached = int(np.argmax(loss <= goal))
            axes.plot(x[reached], loss[reached], "o", color=color, markersize=6)
        label = name
        if name.startswith("KAISA"):
            label = f"KAISA, lr {runs[name][0]['job']['lr']:g}"
        ends.append((float(loss[-1]), float(x[-1]), label, color))

    # Label the lines to the right of the longest, with the last losses.
    ends.sort()
    right = 1.03 * max(x for _, x, _, _ in ends)
    heights = spread([loss - 0.02 for loss, _, _, _ in ends], LINE_HEIGHT)
    for height, (loss, x, label, color) in zip(heights, ends, strict=True):
        axes.plot([x, right], [loss, height], color=color, linewidth=0.6, clip_on=False)
        axes.text(1.01 * right, height, f"{label}: {loss:.2f}", color=color, va="center")
    axes.set_ylim(LOWEST, HIGHEST)
    axes.set_xlim(0, right)
    axes.set_ylabel("held-out loss\n(nats per character)")


def draw_record(record: dict[str, Any]) -> Figure:
    """Both panels. The titles say when KAISA at AdamW's rate reaches AdamW's last loss."""
    figures = record["figures"]
    kaisa = figures["KAISA, defaults"]
    figure = Figure(figsize=(FIGURE_WIDTH, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    draw(upper, record, "steps")
    upper.set_xlabel("training step")
    upper.set_title(
        f"KAISA reaches AdamW's last loss in {kaisa['share of steps']:.0%} of the steps", loc="left"
    )
    draw(lower, record, "seconds")
    lower.set_xlabel("CPU time (s)")
    lower.set_title(
        f"and in {kaisa['share of seconds']:.0%} of the time "
        f"(Muon: {figures['Muon']['share of seconds']:.0%})",
        loc="left",
    )
    return figure


def main() -> None:
    """Draw the runs of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text("utf-8"))
    with mpl.rc_context({**STYLE, "font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE}):
        save(draw_record(record), arguments.out)


if __name__ == "__main__":
    main()
