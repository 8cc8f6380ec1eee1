"""Draw where the time of a step goes, from the record of the speed benchmark.

    python benchmarks/speed/plot_speed.py benchmarks/results/speed.json --out docs/figures/speed.png

One bar for each network, solver and placement: the shares of the stages of a step that computes
statistics and refreshes all inverses. The number next to a bar is the time of that step, as a
multiple of SGD's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reporting import BLACK, BLUE, FIGURE_WIDTH, GREEN, GREY, ORANGE, SKY, STYLE, save

STAGE_COLORS = {
    "forward, backward": GREY,
    "statistics": SKY,
    "inverses": BLUE,
    "preconditioning": ORANGE,
    "communication": GREEN,
    "base optimizer": BLACK,
}
# What the ranges of the profiler belong to. Those of older records are among them.
STAGE_OF_RANGE = {
    "capture": "statistics",
    "statistics": "statistics",
    "solve": "inverses",
    "wait": "inverses",
    "precondition": "preconditioning",
    "clip": "preconditioning",
    "average_gradients": "communication",
    "base": "base optimizer",
}
SMALLEST_LABEL = 0.055  # share of a step that has room for its percentage

Row = dict[str, Any]


def label(row: Row) -> str:
    """The name of a bar."""
    if row["processes"] == 1:
        return f"1 process, {row['solver']}"
    return f"{row['placement']}, {row['solver']}"


def shares(row: Row) -> dict[str, float]:
    """The share of each stage in a step that refreshes everything.

    The profiler slows the step down, but hardly changes the shares.
    """
    ranges = dict(row["stages"]["host"])
    whole = ranges.pop("step")
    found = dict.fromkeys(STAGE_COLORS, 0.0)
    for name, time in ranges.items():
        stage = "communication" if name.endswith("exchange") else STAGE_OF_RANGE.get(name)
        # Other ranges stay in what is not in any range.
        if stage is not None:
            found[stage] += time / whole
    found["forward, backward"] = 1.0 - sum(found.values())
    return found


def draw(axes: Axes, rows: list[Row]) -> None:
    """The bars of one network."""
    for y, row in enumerate(rows):
        left = 0.0
        for stage, share in shares(row).items():
            axes.barh(y, share, 0.78, left, color=STAGE_COLORS[stage], linewidth=0)
            if share >= SMALLEST_LABEL:
                ink = "#ffffff" if stage in ("inverses", "communication") else BLACK
                middle = left + share / 2
                axes.text(middle, y, f"{share:.0%}", color=ink, ha="center", va="center")
            left += share
        axes.text(1.01, y, f"{row['every_step']:.1f} ×", ha="left", va="center")
    axes.set_yticks(range(len(rows)), [label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(rows[0]["workload"], loc="left", weight="bold", pad=3)


def figure_of(record: dict[str, Any]) -> Figure:
    """The whole figure."""
    networks: dict[str, list[Row]] = {}
    for row in record["rows"]:
        networks.setdefault(row["workload"], []).append(row)
    for rows in networks.values():
        rows.sort(key=lambda row: (row["processes"], row["placement"], row["solver"] == "eigen"))
    heights = [len(rows) for rows in networks.values()]
    height = 0.24 * sum(heights) + 0.34 * len(heights) + 1.0
    figure = Figure(figsize=(FIGURE_WIDTH, height), layout="constrained")
    panels = figure.subplots(len(networks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, rows in zip(panels, networks.values(), strict=True):
        draw(axes, rows)
    figure.suptitle(
        "Shares of a step that refreshes everything, and its time (× SGD's step)",
        fontsize=mpl.rcParams["axes.titlesize"],
    )
    figure.legend(
        handles=[Patch(color=color, label=stage) for stage, color in STAGE_COLORS.items()],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    return figure


def main() -> None:
    """Draw a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with mpl.rc_context(STYLE):
        figure = figure_of(json.loads(arguments.record.read_text("utf-8")))
        save(figure, arguments.out)


if __name__ == "__main__":
    main()
