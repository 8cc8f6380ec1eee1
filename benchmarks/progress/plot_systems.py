"""Draw the runs of ``systems.py``: training loss against steps and against seconds.

    python benchmarks/progress/plot_systems.py benchmarks/results/systems.json \\
        --out docs/figures/systems.png

Each column has one group of optimizers, next to SGD and Adam.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from reporting import FIGURE_WIDTH, OPTIMIZER_COLORS, STYLE, save

REFERENCES = ["SGD", "Adam"]
GROUPS = {
    "K-FAC": ["KAISA COMM-OPT", "KAISA MEM-OPT", "DPKFAC"],
    "asynchronous K-FAC": ["DistKFAC", "DistKFAC, stats"],
    "Hessian eigenvectors": ["DHO2", "DHO2 (Adam)", "MRDHO2"],
}
LABELS = {
    "DHO2": "DHO2 over SGD",
    "DHO2 (Adam)": "DHO2 over Adam",
    "MRDHO2": "MRDHO2 over SGD",
}
# Variants of an optimizer that has its color already.
DASHED = ["KAISA MEM-OPT", "DistKFAC, stats", "DHO2 (Adam)"]

TITLE = "Training loss on the digits, each at its best learning rate (next to its name)"

Run = Mapping[str, Any]


def color_of(name: str) -> str:
    """The color of the optimizer, without its variant."""
    return OPTIMIZER_COLORS[name.split(maxsplit=1)[0].rstrip(",")]


def draw(axes: Axes, runs: Sequence[Run], against: str) -> None:
    """The losses of some runs."""
    for run in runs:
        name = run["name"]
        axes.plot(
            run[against],
            run["losses"],
            color=color_of(name),
            linestyle=(0, (3, 1.5)) if name in DASHED else "-",
            linewidth=1.0 if name in REFERENCES else 1.6,
            label=f"{LABELS.get(name, name)}, {run['lr']:g}",
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)


def figure(runs: Sequence[Run]) -> Figure:
    """One column for each group of optimizers of which there is a run."""
    groups = {}
    for group, names in GROUPS.items():
        if any(run["name"] in names for run in runs):
            shown = [*REFERENCES, *names]
            members = [run for run in runs if run["name"] in shown]
            groups[group] = sorted(members, key=lambda run: shown.index(run["name"]))
    if not groups:
        groups["first-order optimizers"] = list(runs)

    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(FIGURE_WIDTH, 6.0), layout="constrained")
        panels = drawing.subplots(2, len(groups), sharey=True, sharex="row", squeeze=False)
        for (above, below), (group, members) in zip(panels.T, groups.items(), strict=True):
            draw(above, members, "steps")
            draw(below, members, "seconds")
            above.legend(
                title=group,
                alignment="left",
                loc="lower left",
                bbox_to_anchor=(0, 1.02),
                frameon=False,
                handlelength=1.6,
                labelcolor="linecolor",
                borderaxespad=0,
                borderpad=0,
            )
            above.set_xlabel("training step")
            below.set_xlabel("wall-clock time (s)")
        for panel in panels[:, -1]:
            panel.set_xlim(left=0)
        panels[0, 0].set_ylabel("training loss")
        panels[1, 0].set_ylabel("training loss")
        drawing.suptitle(TITLE, x=0.01, ha="left", fontsize=mpl.rcParams["axes.titlesize"])
    return drawing


def main() -> None:
    """Draw the runs of a file, at the chosen learning rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text("utf-8"))
    runs = [run for run in record["runs"] if run["chosen"]]
    save(figure(runs), arguments.out)


if __name__ == "__main__":
    main()
