"""Draw the stored grids: DPKFAC by processes and batch, and damping by interval.

    python benchmarks/progress/plot_grids.py benchmarks/results/grids.json --out grids.png

Medians of the seeds; where most runs never arrive, the limit of 200 steps is drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

Row = dict[str, Any]
# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COLOURS = {"SGD": "#000000", "KAISA": "#D55E00", 2: "#56B4E9", 4: "#0072B2", 8: "#CC79A7"}
DAMPINGS = {0.1: "#56B4E9", 0.5: "#0072B2", 2.0: "#D55E00", 8.0: "#000000"}
MOST = 200  # steps of a run


def median(rows: Sequence[Row]) -> float:
    """Steps to the target; the limit where most never arrive."""
    return statistics.median(MOST if row["steps"] is None else row["steps"] for row in rows)


def line(axes: Axes, rows: Sequence[Row], key: str, **style: Any) -> None:
    """Medians against an entry."""
    places = sorted({row[key] for row in rows})
    axes.plot(places, [median([r for r in rows if r[key] == x]) for x in places], **style)


def batches(axes: Axes, rows: Sequence[Row]) -> None:
    """Steps by the global batch."""
    for name in ("SGD", "KAISA"):
        mine = [row for row in rows if row["optimizer"] == name]
        line(axes, mine, "global batch", color=COLOURS[name], marker="o", label=name)
    for count in (2, 4, 8):
        mine = [r for r in rows if r["optimizer"] == "DPKFAC" and r["processes"] == count]
        label = f"DPKFAC, {count} processes"
        line(axes, mine, "global batch", color=COLOURS[count], marker="s", ls="--", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(8, 512)
    for axis, least in ((axes.xaxis, 16), (axes.yaxis, 8)):
        axis.set_ticks([least * 2**i for i in range(6)])
        axis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("images in a step, over all processes")
    axes.legend(frameon=False, fontsize=8)


def dampings(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Steps by the interval, a line for each damping."""
    for gamma, colour in DAMPINGS.items():
        mine = [r for r in rows if (r["optimizer"], r["damping"]) == (name, gamma)]
        line(axes, mine, "interval", color=colour, marker="o", label=f"damping {gamma:g}")
    axes.set_xscale("log")
    axes.set_xticks((1, 10, 50, 100))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, MOST)
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("steps between refreshes")


def main() -> None:
    """Draw what a file has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text("utf-8"))
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    batches(left, record["processes"])
    left.set_ylabel("steps to a loss of 0.05")
    dampings(middle, record["damping"], "KAISA")
    dampings(right, record["damping"], "DPKFAC")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.out, dpi=150)


if __name__ == "__main__":
    main()
