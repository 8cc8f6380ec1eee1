"""What is won by statistics that leave while backward runs, over a network that is slowed down.

    torchrun --standalone --nproc-per-node=2 benchmarks/speed/pipelined.py

Layers and solves take given times, as an accelerator would: the process sleeps. So does the network
(:mod:`slow_network`). What is left is the schedule: who waits for whom. The processor's own work,
statistics of a small network among it, comes on top, alike for both exchanges, which take turns,
a step each. Both have the same preconditioned gradients, which is checked.

    step      a whole step, ms
    network   the time for which a process's link is at work, ms
    waited    the time for which the process waits for it, ms; the rest of it is hidden
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from instruments import store_rows
from second_order import KAISA
from second_order.kfac import pipelined as pipeline
from second_order.kronecker.solvers import SOLVERS
from slow_network import SlowNetwork

LAYERS, WIDTH, BATCH = 16, 128, 16
FORWARD, BACKWARD, SOLVE = 5e-3, 1e-2, 1e-2  # seconds a layer
LATENCY = 1e-3
BUCKET_BYTES = 2**17  # two layers, as the real bound has two of width 360
# Seconds of the statistics' exchange over those of the backward passes, by label.
NETWORKS = {"fast": 0.25, "even": 1.0, "slow": 2.0}
KINDS = {"statistics": 10**6, "statistics and a refresh": 1}
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
EXCHANGES = "all_reduce", "pipelined"


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(BACKWARD)
        return gradient


class Timed(nn.Linear):
    """A layer that takes its time."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(_Pause.apply(x))  # type: ignore[no-untyped-call]
        return out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [m for _ in range(LAYERS - 1) for m in (Timed(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*blocks, Timed(WIDTH, WIDTH))


def statistics_bytes() -> int:
    return 4 * LAYERS * ((WIDTH + 1) * (WIDTH + 2) + WIDTH * (WIDTH + 1)) // 2


def measure(label: str, kind: str, dtype: str, steps: int) -> dict[str, Any]:
    """The medians of a case on this rank; those of the slower rank count."""
    bandwidth = statistics_bytes() / (NETWORKS[label] * LAYERS * BACKWARD)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = torch.randint(WIDTH, (BATCH,), generator=generator)
    runs = {}
    for exchange in EXCHANGES:
        model = network()
        optimizer = KAISA(
            model,
            lr=0.0,  # the same passes for both at every step, however they round
            kl_clip=None,
            factor_exchange=exchange,
            exchange_dtype=DTYPES[dtype],
            factor_update_steps=1,
            inv_update_steps=KINDS[kind],
        )
        runs[exchange] = model, optimizer
    decompose = SOLVERS["inverse"].decompose

    def slowly(problems: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(SOLVE / 2 * len(problems))  # two factors a layer
        return decompose(problems, *args, **kwargs)

    times: dict[str, list[tuple[float, ...]]] = {exchange: [] for exchange in EXCHANGES}
    with ExitStack() as stack:
        slow = stack.enter_context(SlowNetwork(LATENCY, bandwidth))
        stack.enter_context(patch.object(SOLVERS["inverse"], "decompose", slowly))
        stack.enter_context(patch.object(pipeline, "FUSED_BYTES", BUCKET_BYTES))
        for step in range(steps + 3):
            for exchange in EXCHANGES if step % 2 else EXCHANGES[::-1]:
                model, optimizer = runs[exchange]
                dist.barrier()
                slow.read()
                start = time.perf_counter()
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                if step >= 3:  # the first show the order, and the number of pairs
                    times[exchange].append((time.perf_counter() - start, *slow.read()))
    one, other = (
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        for model, _ in runs.values()
    )
    apart = float((one - other).norm() / one.norm())
    assert apart < 0.01, f"the exchanges have given other preconditioned gradients: {apart}"
    row: dict[str, Any] = {"network": label, "kind": kind, "dtype": dtype, "bandwidth": bandwidth}
    row["apart"] = apart
    for exchange, found in times.items():
        middle = torch.tensor([statistics.median(each) for each in zip(*found, strict=True)])
        dist.all_reduce(middle, dist.ReduceOp.MAX)
        names = "step", "network", "waited"
        row[exchange] = dict(zip(names, (1000 * middle).tolist(), strict=True))
    pairs = zip(*times.values(), strict=True)
    row["ratio"] = statistics.median(other[0] / one[0] for one, other in pairs)
    for _, optimizer in runs.values():
        optimizer.close()
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="Milliseconds a step: all_reduce, and pipelined")
    for header in ("network", "step with", "in", "step", "network", "waited", "ratio"):
        result.add_column(header)
    for row in rows:
        cells = [
            " / ".join(f"{row[exchange][name]:.0f}" for exchange in EXCHANGES)
            for name in ("step", "network", "waited")
        ]
        result.add_row(row["network"], row["kind"], row["dtype"], *cells, f"{row['ratio']:.2f}")
    return result


def main() -> None:
    """Measure, print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [
        measure(label, kind, dtype, arguments.steps)
        for kind in KINDS
        for dtype in DTYPES
        for label in arguments.networks
    ]
    if dist.get_rank() == 0:
        Console(width=140).print(table(rows))
        if arguments.json:
            asked = {"layers": LAYERS, "width": WIDTH, "steps": arguments.steps}
            asked |= {"forward": FORWARD, "backward": BACKWARD, "solve": SOLVE, "latency": LATENCY}
            store_rows(arguments.json, rows, asked, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
