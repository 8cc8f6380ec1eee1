"""Draw what refreshes change during a training run, and how the intervals adapt.

    PYTHONPATH=examples:benchmarks:benchmarks/progress python docs/figures/make_drift.py

A transformer of benchmarks/progress/unseen.py, with KAISA over AdamW. All settings but
the learning rate are the defaults. This takes most of a minute.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from reporting import BLUE, FIGURE_WIDTH, RED, STYLE, save
from second_order.kfac.schedule import ADAPTIVE, MAX_INTERVAL
from tasks import TASKS, Job, build

HERE = Path(__file__).parent
JOB = Job("unseen transformer", "KAISA, AdamW", 0.0045, 0)
STEPS = 200

GREY = "#666666"


@dataclass
class Drifts:
    """What refreshes changed.

    Attributes:
        layers: Number of layers.
        refreshed: Number of layers refreshed at each step.
        at: Steps with a refresh after which cosines are known.
        cosines: The cosines of the layers' last refreshes, for each of these steps.
        intervals: The refresh interval of each layer, for each of these steps.
    """

    layers: int = 0
    refreshed: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    cosines: list[list[float]] = field(default_factory=list)
    intervals: list[list[int]] = field(default_factory=list)


def train() -> Drifts:
    """Train for the steps of the figure."""
    task = TASKS[JOB.task]()
    found = Drifts()
    torch.manual_seed(JOB.seed)
    model = task.make()
    optimizer: Any = build(JOB, model)
    curvature = optimizer._curvature
    for step, batch in zip(range(STEPS), task.batches(JOB.seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = JOB.lr * JOB.share_of_rate(step)
        optimizer.zero_grad()
        task.loss_of(model, batch).backward()
        optimizer.step()
        states = curvature.inverses.states.values()
        found.refreshed.append([each.installed_at for each in states].count(step))
        layer_drifts = curvature.drift.states.values()
        cosines = [
            drift.cosine for drift in layer_drifts if math.isfinite(drift.cosine)
        ]
        if found.refreshed[-1] and cosines:
            found.at.append(step)
            found.cosines.append(cosines)
            found.intervals.append(
                list(map(curvature.drift.interval, curvature.drift.states))
            )
    found.layers = len(curvature.plan)
    return found


def held(
    of: Callable[[Sequence[float]], float], rows: Sequence[Sequence[float]]
) -> list[float]:
    """A number of each row, the last one once more: it holds to the end."""
    numbers = list(map(of, rows))
    return [*numbers, numbers[-1]]


def drawn(found: Drifts) -> Figure:
    """Two panels, one above the other."""
    figure = Figure(figsize=(FIGURE_WIDTH, 4.6), layout="constrained")
    at = [*found.at, STEPS]
    cosine, interval = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    middle = {"color": BLUE, "linewidth": 1.5, "drawstyle": "steps-post"}
    worst = {"color": RED, "linewidth": 1.0, "drawstyle": "steps-post"}

    cosine.axhspan(ADAPTIVE.double_above, 1.0, color="#e9f4fb", lw=0)
    cosine.axhspan(-1.0, ADAPTIVE.halve_below, color="#fdf1e7", lw=0)
    cosine.plot(at, held(statistics.median, found.cosines), **middle)
    cosine.plot(at, held(min, found.cosines), **worst)
    lowest = min(map(min, found.cosines))
    cosine.set_ylim(min(lowest - 0.05, 0.5), 1.005)
    cosine.set_title(
        "Refreshes change the preconditioned gradient less and less", loc="left"
    )
    cosine.set_ylabel("cosine between old\nand new gradient")
    cosine.text(
        0.995,
        0.04,
        f"below {ADAPTIVE.halve_below:g} (orange): the layer's interval is halved\n"
        f"above {ADAPTIVE.double_above:g} (blue): it is doubled",
        transform=cosine.transAxes,
        ha="right",
        va="bottom",
    )

    interval.plot(at, held(statistics.median, found.intervals), **middle)
    interval.plot(at, held(min, found.intervals), **worst)
    interval.set_yscale("log", base=2)
    interval.set_ylim(0.4, 1.3 * MAX_INTERVAL)
    powers = [2**i for i in range(MAX_INTERVAL.bit_length())]
    interval.set_yticks(powers, list(map(str, powers)))
    interval.minorticks_off()
    interval.set_title(
        "So inverses are refreshed less often (ticks: refreshes)", loc="left"
    )
    interval.set_ylabel("refresh interval (steps)")
    interval.set_xlabel("training step")
    for step, count in enumerate(found.refreshed):
        if count:
            height = 0.12 * count / found.layers
            interval.axvline(step, 0, height, color=GREY, linewidth=0.8)
    refreshes = sum(map(bool, found.refreshed))
    print(  # noqa: T201
        f"{refreshes} of {STEPS} steps have a refresh, each of "
        f"{found.layers} layers {sum(found.refreshed) / found.layers:.1f}"
    )

    handles = cosine.get_lines()
    cosine.legend(
        handles,
        ("median layer", "layer that changes most"),
        frameon=False,
        ncols=2,
        loc="lower right",
        bbox_to_anchor=(1.0, 0.2),
    )
    for axes in (cosine, interval):
        axes.set_xlim(0, STEPS)
    return figure


def main() -> None:
    """Train and draw."""
    torch.set_num_threads(1)
    mpl.rcParams.update(STYLE)
    save(drawn(train()), HERE / "drift.png")


if __name__ == "__main__":
    main()
