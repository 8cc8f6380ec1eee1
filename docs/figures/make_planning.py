"""Draw time and memory against the number of ranks, as `second_order.plan` predicts them.

    PYTHONPATH=benchmarks:benchmarks/speed python docs/figures/make_planning.py

The machine at hand is measured, and the passes of a transformer of two blocks of
width 512 on it; the links are given numbers. Nothing is sent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from reporting import save
from second_order.planning.machine import Interconnect, Level
from second_order.planning.plan import Choice, Plan, plan
from workloads import WORKLOADS

HERE = Path(__file__).parent
SIZES = tuple(4**k for k in range(7))
# Eight ranks a node; 20 and 40 microseconds; 5 GB/s inside and 10 Gbit/s between nodes.
LINKS = Interconnect((Level(2e-5, 5e9, 8, gap=2e-6), Level(4e-5, 1.25e9, gap=4e-6)))
# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
SYSTEMS: dict[str, tuple[str, str, Callable[[Choice], bool]]] = {
    "KAISA, COMM-OPT": ("#0072B2", "o", lambda c: c.setting == "COMM-OPT"),
    "KAISA, MEM-OPT, reduce": ("#56B4E9", "v", lambda c: c.setting == "MEM-OPT, reduce"),
    "KAISA, the best fraction": ("#009E73", "s", lambda c: c.system == "KAISA"),
    "DPKFAC": ("#D55E00", "^", lambda c: c.system == "DPKFAC"),
    "DistKFAC": ("#CC79A7", "D", lambda c: c.system == "DistKFAC"),
}


# Lines that may lie on one another: wider below, so that all are seen.
WIDTHS = (4.0, 3.2, 2.4, 1.6, 0.8)


def draw(plans: list[Plan], path: Path) -> None:
    """Draw milliseconds a step, and megabytes of factors and inverses."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = [each.world_size for each in plans]
    left.plot(sizes, [1e3 * p.base for p in plans], "--", color="black", label="SGD alone")
    for width, (name, (colour, marker, wanted)) in zip(WIDTHS, SYSTEMS.items(), strict=True):
        found = [(p.world_size, next((c for c in p.choices if wanted(c)), None)) for p in plans]
        points = [(n, c) for n, c in found if c is not None]
        words = {"color": colour, "marker": marker, "markersize": 2 + width, "label": name}
        words |= {"linewidth": width}
        at = [n for n, _ in points]
        left.plot(at, [1e3 * c.seconds for _, c in points], **words)
        kept = [c.kept / 1e6 for _, c in points]
        right.plot(at, kept, **words)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axes.set_xlabel("ranks, each with its batch")
        axes.grid(alpha=0.3)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.set_ylabel("milliseconds a step")
    left.set_title("time: statistics every 10 steps, inverses every 100", fontsize=9)
    right.set_ylabel("megabytes on the fullest rank")
    right.set_title("kept by optimizer and gradients", fontsize=9)
    left.legend(fontsize=7, loc="lower right")
    save(figure, path)


def main() -> None:
    """Measure, plan for all numbers of ranks, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "planning.png")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measurement")
    chosen = parser.parse_args()
    workload = WORKLOADS["transformer"]
    first = plan(
        workload.model(),
        workload.batch()[0],
        SIZES,
        network=LINKS,
        solvers=["inverse"],
        intervals=[(10, 100)],
        seconds=chosen.seconds,
    )
    plans = [first, *first.others]
    for each in plans:
        sys.stdout.write(f"{each.summary(6)}\n\n")
    draw(plans, chosen.out)


if __name__ == "__main__":
    main()
