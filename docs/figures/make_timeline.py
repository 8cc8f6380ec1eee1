r"""Draw who does what when in a real run of MRDHO2, a worker and an accelerator.

    OMP_NUM_THREADS=1 PYTHONPATH=examples torchrun --standalone --nproc-per-node=2 \
        docs/figures/make_timeline.py

Bars are ranges of ``torch.profiler``, on the wall clock: those of the package, and one around each
step of the loop. Arrows are messages, from when they are posted to when they have been fetched.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, record_function

from digits import batches, load_split, mlp
from second_order import MRDHO2
from second_order.distributed import mailbox

HERE = Path(__file__).parent
BATCH = 512
WARM_UP, SHOWN = 2, 3  # epochs

STEP = "step"
# Okabe and Ito's colours; later bars lie on top of earlier ones.
COLOURS = {
    STEP: "#56B4E9",
    "second_order.lanczos": "#E69F00",
    "second_order.final_update": "#009E73",
    "second_order.judge": "#CC79A7",
    "second_order.wait": "#ffffff",
}
LABELS = {
    STEP: "a training step",
    "second_order.lanczos": "eigenpairs by Lanczos",
    "second_order.final_update": "final update",
    "second_order.judge": "loss without and with the update",
    "second_order.wait": "waiting for the accelerator",
}

Span = tuple[str, float, float]  # what, from, to; seconds on the wall clock
Mark = tuple[str, float]  # a message's name, and when


class Recorder:
    """Notes when messages are posted and fetched in this process."""

    def __init__(self) -> None:
        self.posted: list[Mark] = []
        self.fetched: list[Mark] = []
        post, fetch = mailbox.Mailbox.post, mailbox._Line.fetch

        def noted_post(me: Any, name: str, *args: Any, **note: Any) -> None:
            self.posted.append((name, time.time()))
            post(me, name, *args, **note)

        def noted_fetch(store: Any, name: str) -> Any:
            message = fetch(store, name)
            self.fetched.append((name, time.time()))
            return message

        mailbox.Mailbox.post = noted_post  # type: ignore[method-assign]
        mailbox._Line.fetch = noted_fetch  # type: ignore[method-assign]


def spans_of(profiler: profile) -> list[Span]:
    """The ranges that have a colour, by wall clock."""
    events = profiler.events()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    start = results.trace_start_ns() / 1e9
    return [
        (e.name, start + e.time_range.start / 1e6, start + e.time_range.end / 1e6)
        for e in events or []
        if e.name in COLOURS
    ]


def run(arguments: argparse.Namespace) -> tuple[str, list[Span], list[Mark], list[Mark]]:
    """Train; what this process has done and when."""
    recorder = Recorder()
    torch.manual_seed(0)
    data, model = load_split(), mlp()

    def loss_of(indices: Tensor) -> Tensor:
        return cross_entropy(model(data.train_images[indices]), data.train_labels[indices])

    optimizer = MRDHO2(
        model, lr=0.1, momentum=0.9, epoch_steps=arguments.epoch_steps, largest=arguments.largest
    )
    group = optimizer.worker_group
    with profile(activities=[ProfilerActivity.CPU]) as profiler, optimizer:
        if optimizer.role == "accelerator":
            optimizer.serve([torch.arange(arguments.curvature)], loss_of)
        else:
            parts = batches(
                len(data.train_images),
                BATCH,
                seed=0,
                rank=dist.get_rank(group),
                world_size=dist.get_world_size(group),
            )
            for _ in range((WARM_UP + SHOWN) * arguments.epoch_steps):
                with record_function(STEP):
                    optimizer.zero_grad()
                    loss_of(next(parts)).backward()
                    optimizer.step()
    return optimizer.role, spans_of(profiler), recorder.posted, recorder.fetched


def draw(
    records: Sequence[tuple[str, list[Span], list[Mark], list[Mark]]], epoch_steps: int
) -> Figure:
    """A row a process, time to the right in milliseconds."""
    figure = Figure(figsize=(8.2, 0.62 * len(records) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    steps = sorted(span[1:] for span in records[0][1] if span[0] == STEP)
    origin = steps[WARM_UP * epoch_steps][0]
    end = steps[-1][1]
    heights = {rank: float(len(records) - 1 - rank) for rank in range(len(records))}
    for rank, (_, spans, _, _) in enumerate(records):
        for name, colour in COLOURS.items():
            bars = [
                ((start - origin) * 1e3, (stop - start) * 1e3)
                for what, start, stop in spans
                if what == name and stop > origin and start < end
            ]
            edge = "#666666" if name == "second_order.wait" else "#ffffff"
            axes.broken_barh(
                bars,
                (heights[rank] - 0.27, 0.54),
                facecolors=colour,
                edgecolor=edge,
                linewidth=0.5,
                zorder=2 + list(COLOURS).index(name) / 10,
            )
    print(f"{SHOWN} epochs in {1e3 * (end - origin):.0f} ms")  # noqa: T201
    arrows(axes, records, heights, origin, end)
    axes.set_yticks(list(heights.values()), [f"rank {r}\n{records[r][0]}" for r in heights])
    axes.set_ylim(-0.5, len(records) - 0.5)
    axes.set_xlim(-0.01 * (end - origin) * 1e3, 1.01 * (end - origin) * 1e3)
    axes.set_xlabel("milliseconds")
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for epoch in range(SHOWN):
        start = (steps[(WARM_UP + epoch) * epoch_steps][0] - origin) * 1e3
        axes.axvline(start, color="#999999", linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
        axes.text(start, len(records) - 0.5, f" epoch {WARM_UP + epoch}", va="bottom", fontsize=8)
    handles = [
        Patch(facecolor=COLOURS[name], edgecolor="#666666", linewidth=0.5, label=label)
        for name, label in LABELS.items()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False)
    return figure


def arrows(
    axes: Axes,
    records: Sequence[tuple[str, list[Span], list[Mark], list[Mark]]],
    heights: dict[int, float],
    origin: float,
    end: float,
) -> None:
    """Messages: dark the points and eigenpairs, light those of the verdict."""
    sent = {name: (r, when) for r, record in enumerate(records) for name, when in record[2]}
    for to, record in enumerate(records):
        for name, there in record[3]:
            source, here = sent[name]
            if here < origin or there > end:
                continue
            rise = 0.27 if heights[source] < heights[to] else -0.27
            axes.add_patch(
                FancyArrowPatch(
                    ((here - origin) * 1e3, heights[source] + rise),
                    ((there - origin) * 1e3, heights[to] - rise),
                    arrowstyle="-|>",
                    mutation_scale=7,
                    shrinkA=0,
                    shrinkB=0,
                    linewidth=1.0,
                    color="#000000" if name.startswith(("point", "pairs")) else "#CC79A7",
                    zorder=4,
                )
            )


def main() -> None:
    """Run, and draw on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epoch-steps", type=int, default=40)
    parser.add_argument("--curvature", type=int, default=256, help="images of the accelerator")
    parser.add_argument("--largest", type=int, default=10)
    parser.add_argument("--output", type=Path, default=HERE / "timeline.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = run(arguments)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    if dist.get_rank() == 0:
        mpl.rcParams.update({"font.size": 9, "legend.fontsize": 8})
        buffer = io.BytesIO()
        draw(everybody, arguments.epoch_steps).savefig(buffer, dpi=160, facecolor="#ffffff")
        Image.open(buffer).convert("RGB").quantize(128).save(arguments.output, optimize=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
