"""Output of all benchmarks: tables on the console, records as JSON, figures as PNG."""

from __future__ import annotations

import io
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.table import Table

# The palette of Okabe and Ito, which is safe for people with any kind of color vision.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
RED = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#bbbbbb"

# One color per optimizer, the same in all figures. All are dark enough for text on white.
OPTIMIZER_COLORS = {
    "SGD": "#767676",
    "Adam": BLACK,
    "AdamW": BLACK,
    "Muon": BLUE,
    "SOAP": GREEN,
    "KAISA": RED,
    "DPKFAC": "#882255",
    "DistKFAC": "#332288",
    "DHO2": "#AA4499",
    "MRDHO2": "#7A7A00",
}

# A page's column is about this wide, so text has its nominal size there.
FIGURE_WIDTH = 7.2  # inches
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "legend.fontsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def machine() -> dict[str, Any]:
    """The date, and the hardware and software that figures depend on."""
    # Linux has the processor's full name.
    cpu = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        lines = cpu_info.read_text().splitlines()
        names = [line for line in lines if line.startswith("model name")]
        if names:
            cpu = names[0].partition(":")[2].strip()

    gpu = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()

    return {
        "date": date.today().isoformat(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[1]:.1f} processes on average in the last five minutes",
        "gpu": gpu,
    }


def store(path: Path | None, indent: int | None = 1, **parts: Any) -> None:
    """Write parts of a record as JSON, with the machine. Do nothing if the path is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(), **parts}
        path.write_text(json.dumps(record, indent=indent) + "\n", "utf-8")


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str] | None], left: int = 1
) -> Table:
    """A table whose first ``left`` columns are aligned left. A row of None is a separator."""
    result = Table(title=title)
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i < left else "right")
    for row in rows:
        if row is None:
            result.add_section()
        else:
            result.add_row(*row)
    return result


def show(*outputs: Table | str) -> None:
    """Print tables and lines, 140 columns wide if the output is not a terminal."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    for output in outputs:
        console.print(output)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file for the documentation."""
    buffer = io.BytesIO()
    with mpl.rc_context({"hatch.linewidth": 0.7}):
        # The background is white, so that dark pages show the figure correctly.
        figure.savefig(buffer, dpi=160, facecolor="#ffffff")
    # With a palette, the file has a third of the size.
    Image.open(buffer).convert("RGB").quantize(128).save(path, optimize=True)
