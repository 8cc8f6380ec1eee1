"""Where all benchmarks write: tables on the console, records as JSON, figures as PNG."""

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

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
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
    """What figures depend on."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [s for s in information.read_text().splitlines() if s.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "date": date.today().isoformat(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[1]:.1f} processes on average in the last five minutes",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def store(path: Path | None, indent: int | None = 1, **parts: Any) -> None:
    """Write parts of a record as JSON, with the machine; nothing where no file is wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **parts}, indent=indent) + "\n", "utf-8")


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str] | None], left: int = 1
) -> Table:
    """A table whose first columns are words and whose others are numbers; None parts its rows."""
    result = Table(title=title)
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i < left else "right")
    for row in rows:
        if row is None:
            result.add_section()
        else:
            result.add_row(*row)
    return result


def show(*shown: Table | str) -> None:
    """Print tables and lines, wide enough where nobody looks at a terminal."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    for each in shown:
        console.print(each)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the pages show it."""
    buffer = io.BytesIO()
    with mpl.rc_context({"hatch.linewidth": 0.7}):
        # A white panel of its own, so that it can be read on a dark page too.
        figure.savefig(buffer, dpi=160, facecolor="#ffffff")
    # A palette is a third of the bytes.
    Image.open(buffer).convert("RGB").quantize(128).save(path, optimize=True)
