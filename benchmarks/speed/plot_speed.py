"""Draw the record of the speed benchmark.

    python benchmarks/speed/plot_speed.py benchmarks/results/speed.json --out docs/figures/speed.png

Above: the time of a step as a multiple of SGD's, with the floor as a line across the bars of one
process. Below: where the time of a step goes that refreshes everything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from floor import floor_ratios
from reporting import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, save

PLACEMENT_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
STAGE_COLOURS = {
    "training": GREY,
    "capture": SKY,
    "statistics": BLUE,
    "solve": RED,
    "precondition": ORANGE,
    "clip": YELLOW,
    "exchange": PURPLE,
    "average_gradients": BLACK,
    "base": GREEN,
}
FLOOR = "floor, one process"
SPARE_COLOURS = ("#882255", "#44AA99", "#999933", "#332288", "#661100")

Row = dict[str, Any]


def label(row: Row) -> str:
    """A variant as the legend names it."""
    many = f", {row['processes']} processes" if row["processes"] > 1 else ""
    return f"{row['placement']}{many}, {row['solver']}"


def workloads(record: dict[str, Any]) -> list[str]:
    """In the order of the record."""
    return list(dict.fromkeys(row["workload"] for row in record["rows"]))


def variants(record: dict[str, Any]) -> list[str]:
    """In the order of the record."""
    return list(dict.fromkeys(row["variant"] for row in record["rows"]))


# ----------------------------------------------------------------------------------- the ratios


def draw_ratios(axes: Axes, record: dict[str, Any], key: str, which: int) -> None:
    """A group of bars for each workload, a bar for each variant, the floors across them."""
    names = workloads(record)
    kinds = variants(record)
    placements = list(dict.fromkeys(row["placement"] for row in record["rows"]))
    width = 0.84 / len(kinds)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    drawn = set()
    for row in record["rows"]:
        place = kinds.index(row["variant"]) - (len(kinds) - 1) / 2
        x = names.index(row["workload"]) + place * width
        colour = PLACEMENT_COLOURS[placements.index(row["placement"]) % len(PLACEMENT_COLOURS)]
        eigen = row["solver"] == "eigen"
        axes.bar(
            x,
            row[key],
            width * 0.92,
            color=colour if eigen else "#ffffff",
            edgecolor=colour,
            hatch=None if eigen else "/////",
            linewidth=0.8,
            label=None if row["variant"] in drawn else label(row),
        )
        drawn.add(row["variant"])
        if row["processes"] == 1:
            times = record["floors"][row["workload"]]
            sgd = row["milliseconds"]["sgd"]
            floor = floor_ratios(times, row["solver"], sgd)[which]
            ends = (x - width / 2, x + width / 2)
            mark = None if FLOOR in drawn else FLOOR
            axes.plot(ends, (floor, floor), color="#ffffff", linewidth=4, solid_capstyle="butt")
            axes.plot(
                ends, (floor, floor), color=BLACK, linewidth=2, solid_capstyle="butt", label=mark
            )
            drawn.add(FLOOR)
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.9)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# ----------------------------------------------------------------------------------- the stages


def stages(row: Row) -> dict[str, float]:
    """A full step by stage, in multiples of SGD's step; "training" is what is in no range."""
    found = dict(row["stages"]["host"])
    whole = found.pop("step")
    # The profiler slows the step down; what it says about shares holds.
    scale = row["every_step"] / whole
    shares = {name: time * scale for name, time in found.items()}
    return {"training": row["every_step"] - sum(shares.values()), **shares}


def stage_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each stage, those unheard of included."""
    unknown = [name for name in names if name not in STAGE_COLOURS]
    spare = {name: SPARE_COLOURS[i % len(SPARE_COLOURS)] for i, name in enumerate(unknown)}
    return {name: STAGE_COLOURS.get(name) or spare[name] for name in names}


def draw_stages(
    axes: Axes, rows: Sequence[Row], kinds: Sequence[str], colours: dict[str, str]
) -> None:
    """One workload: a stacked bar for each variant."""
    for row in rows:
        bottom = 0.0
        parts = stages(row)
        for name, colour in colours.items():
            height = parts.get(name, 0.0)
            x = kinds.index(row["variant"])
            axes.bar(x, height, 0.8, bottom, color=colour, linewidth=0)
            bottom += height
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(len(kinds)), kinds, rotation=90)
    axes.tick_params(axis="x", length=0)
    axes.set_title(rows[0]["workload"], fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def ordered_stages(record: dict[str, Any]) -> list[str]:
    """All stages of the record that take any time to speak of, from the bottom of a bar upwards."""
    found: dict[str, float] = dict.fromkeys(STAGE_COLOURS, 0.0)
    for row in record["rows"]:
        for name, height in stages(row).items():
            share = height / row["every_step"]
            found[name] = max(found.get(name, 0.0), share)
    return [name for name, share in found.items() if share > 0.002]


# ------------------------------------------------------------------------------------ the figure


def figure_of(record: dict[str, Any]) -> Figure:
    """The whole figure."""
    names = workloads(record)
    kinds = variants(record)
    figure = Figure(figsize=(max(8.2, 1.7 * len(names)), 7.2), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.05))
    upper = figure.add_subfigure(grid[0])
    lower = figure.add_subfigure(grid[1])
    left, right = upper.subplots(1, 2)
    draw_ratios(left, record, "every_step", 0)
    left.set_title("statistics and inverses every step", fontsize="medium")
    left.set_ylabel("step time, SGD = 1")
    draw_ratios(right, record, "every_10_and_100", 1)
    right.set_title("statistics every 10, inverses every 100 steps", fontsize="medium")
    handles, labels = left.get_legend_handles_labels()
    floors_last = sorted(zip(labels, handles, strict=True), key=lambda pair: pair[0] == FLOOR)
    labels, handles = zip(*floors_last, strict=True)
    upper.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    colours = stage_colours(ordered_stages(record))
    panels = lower.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        rows = [row for row in record["rows"] if row["workload"] == name]
        draw_stages(axes, rows, kinds, colours)
    panels[0].set_ylabel("step that refreshes all, SGD = 1")
    swatches = [Patch(color=colour) for colour in colours.values()]
    shown = [
        "forward, backward, all else" if name == "training" else name.replace("_", " ")
        for name in colours
    ]
    lower.legend(swatches, shown, loc="outside lower center", ncols=5, frameon=False)
    machine = record["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, one thread per process"
    figure.suptitle(f"{where}, torch {machine['torch']}", fontsize="small", color="#666666")
    return figure


def main() -> None:
    """Draw a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with mpl.rc_context({"font.size": 8.5}):
        figure = figure_of(json.loads(arguments.record.read_text()))
        save(figure, arguments.out)


if __name__ == "__main__":
    main()
