"""Draw time and memory against the number of ranks, as `second_order.plan` predicts them.

    PYTHONPATH=benchmarks:benchmarks/speed python docs/figures/make_planning.py

The machine and the links are given round numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from reporting import save
from second_order import Interconnect, Machine, Plan, plan
from second_order.planning.plan import Choice
from workloads import WORKLOADS

HERE = Path(__file__).parent
SIZES = tuple(4**k for k in range(7))
# A GPU with 20 TFLOP/s for large products, and 20 microseconds and
# 10 Gbit/s between ranks.
MACHINE = Machine(
    "a GPU with round numbers",
    matmul={64: 1e-5, 512: 2e-5, 2048: 1e-3},
    eigh={64: 1e-3, 512: 2e-2, 2048: 3e-1},
    inverse={64: 2e-4, 512: 1e-3, 2048: 1e-2},
)
LINKS = Interconnect(latency=2e-5, bandwidth=1.25e9)
# Okabe and Ito's colours, which all people can distinguish.
SYSTEMS: dict[str, tuple[str, str, Callable[[Choice], bool]]] = {
    "KAISA, COMM-OPT": ("#0072B2", "o", lambda c: c.setting.mode == "COMM-OPT"),
    "KAISA, MEM-OPT, reduce": (
        "#56B4E9",
        "v",
        lambda c: c.setting.mode == "MEM-OPT, reduce",
    ),
    "KAISA, the best fraction": ("#009E73", "s", lambda c: c.setting.system == "KAISA"),
    "DPKFAC": ("#D55E00", "^", lambda c: c.setting.system == "DPKFAC"),
    "DistKFAC": ("#CC79A7", "D", lambda c: c.setting.system == "DistKFAC"),
}


# Some lines coincide. The first ones are wider, so that you see all of them.
WIDTHS = (4.0, 3.2, 2.4, 1.6, 0.8)


def fastest(plan: Plan, is_shown: Callable[[Choice], bool]) -> Choice | None:
    """The fastest of the shown settings with the "inverse" solver."""
    found = (c for c in plan.choices if c.setting.solver == "inverse" and is_shown(c))
    return next(found, None)


def draw(plans: list[Plan], path: Path) -> None:
    """Draw milliseconds per step, and megabytes of factors and inverses."""
    mpl.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = [each.world_size for each in plans]
    left.plot(
        sizes, [1e3 * p.base for p in plans], "--", color="black", label="SGD alone"
    )
    for width, (name, (colour, marker, is_shown)) in zip(
        WIDTHS, SYSTEMS.items(), strict=True
    ):
        found = [(p.world_size, fastest(p, is_shown)) for p in plans]
        points = [(n, c) for n, c in found if c is not None]
        words = {
            "color": colour,
            "marker": marker,
            "markersize": 2 + width,
            "label": name,
        }
        words |= {"linewidth": width}
        at = [n for n, _ in points]
        left.plot(at, [1e3 * c.seconds for _, c in points], **words)
        megabytes = [c.costs.curvature_bytes / 1e6 for _, c in points]
        right.plot(at, megabytes, **words)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axes.set_xlabel("ranks, each with its batch")
        axes.grid(alpha=0.3)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.set_ylabel("milliseconds per step")
    left.set_title("time: statistics every 10 steps, inverses every 100", fontsize=9)
    right.set_ylabel("megabytes on the rank with the most")
    right.set_title("factors and inverses", fontsize=9)
    left.legend(fontsize=7, loc="lower right")
    save(figure, path)


def main() -> None:
    """Plan for all numbers of ranks, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "planning.png")
    chosen = parser.parse_args()
    workload = WORKLOADS["transformer"]
    plans = [
        plan(
            workload.model(),
            workload.batch()[0],
            size,
            machine=MACHINE,
            network=LINKS,
            factor_update_steps=10,
            inv_update_steps=100,
        )
        for size in SIZES
    ]
    for each in plans:
        sys.stdout.write(f"{each.summary(6)}\n\n")
    draw(plans, chosen.out)


if __name__ == "__main__":
    main()
