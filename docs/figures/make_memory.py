"""Draw the optimizer state per parameter that `make memory` stored.

    PYTHONPATH=benchmarks python docs/figures/make_memory.py

The light part of a bar has tensors of a parameter's shape, such as momentum. The dark
part has the square matrices of second-order optimizers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reporting import FIGURE_WIDTH, OPTIMIZER_COLORS, STYLE, save

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "benchmarks" / "results" / "memory.json"

TITLES = {
    "language": "language model",
    "resnet50": "ResNet-50",
    "transformer-768": "transformer",
}
LIGHT = 0.35  # opacity of the part without matrices
GREY = "#767676"

Row = dict[str, Any]


def per_parameter(row: Row, *parts: str) -> float:
    """Bytes of some parts of the state, per parameter."""
    total: float = sum(row[part] for part in parts)
    return total / row["parameters"]


def draw(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar for each optimizer, from the top."""
    for place, row in enumerate(rows):
        color = OPTIMIZER_COLORS.get(row["optimizer"].split(maxsplit=1)[0], GREY)
        elementwise = per_parameter(row, "elementwise")
        matrices = per_parameter(row, "factors", "inverses")
        axes.barh(place, elementwise, color=color, alpha=LIGHT, height=0.75)
        axes.barh(place, matrices, left=elementwise, color=color, height=0.75)
        total = elementwise + matrices
        axes.text(total, place, f" {total:.0f}", ha="left", va="center")


def figure_of(record: dict[str, Any]) -> Figure:
    """A panel for each model."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(FIGURE_WIDTH, 3.4), layout="constrained")
        panels = figure.subplots(1, len(TITLES), sharex=True, sharey=True)
        for axes, (model, title) in zip(panels, TITLES.items(), strict=True):
            rows = [row for row in record["rows"] if row["model"] == model]
            draw(axes, rows)
            axes.set_title(
                f"{title}\n{rows[0]['parameters'] / 1e6:.1f} M parameters", loc="left"
            )
            axes.set_yticks(range(len(rows)), [row["optimizer"] for row in rows])
            axes.tick_params(axis="y", length=0)
            axes.spines["bottom"].set_visible(False)
            axes.set_xticks([])
        panels[0].invert_yaxis()
        panels[0].set_xlim(0, 75)
        figure.legend(
            [Patch(color=GREY, alpha=LIGHT), Patch(color=GREY)],
            ["momentum and second moment", "matrices"],
            loc="outside lower center",
            ncols=2,
            frameon=False,
        )
        figure.suptitle(
            "Bytes of optimizer state per parameter",
            x=0.01,
            ha="left",
            fontsize=mpl.rcParams["axes.titlesize"],
        )
    return figure


def main() -> None:
    """Draw the stored run."""
    record = json.loads(RECORD.read_text("utf-8"))
    with mpl.rc_context(STYLE):
        save(figure_of(record), HERE / "memory.png")


if __name__ == "__main__":
    main()
