"""What bfloat16 on the way between processes saves, and what error it makes.

    export PYTHONPATH=examples
    torchrun --standalone --nproc-per-node=2 benchmarks/speed/exchange_dtype.py

KAISA trains on digits with everything in float32. Further optimizers, whose learning rate is zero,
see the same passes and send in bfloat16:

    sums      with one gradient worker a layer, where sums of statistics alone travel
    both      with two, where decompositions do as well
    at once   both, from the first step, where the first statistics are exact otherwise

All keep running averages of their own, so that errors add up as in a training. Compared are the
preconditioned gradients P of each layer before any clip, ‖P̂ - P‖ / ‖P‖, at the first refresh from
rounded sums, and forty steps later; with "at once" at the first step alone. Statistics and
inverses come at each of the first steps, and then every ten.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import digits
from language_model import Block
from second_order import KAISA
from second_order.kfac import curvature as kfac

STEPS, BATCH = 61, 128
EXACT = kfac.EXACT  # first steps whose statistics travel unrounded
DAMPINGS = 0.5, 0.05  # the default under SGD, and a tenth of it


class Rows(nn.Module):
    """A transformer whose tokens are the rows of an image; takes (N, 64)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.places = nn.Parameter(0.1 * torch.randn(8, width))
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.head = nn.Linear(width, digits.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.rows(images.view(-1, 8, 8)) + self.places
        result: Tensor = self.head(self.blocks(x).mean(1))
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": digits.mlp,
    "conv": digits.conv_net,
    "transformer": Rows,
}
ACCOUNTS = {"sums": "bytes/statistics_exchange", "decompositions": "bytes/solve_exchange"}


def read(optimizer: KAISA, clipped: bool) -> dict[str, Tensor]:
    """P of each layer that is preconditioned, without the clip, by the parameter's name."""
    scale = optimizer.statistics()["clip"] if clipped else 1.0
    curvature: Any = optimizer._curvature  # the layers, whose names the summary has
    return {
        f"{block.name}": torch.cat([p.grad.flatten() for p in block.params]) / scale
        for block in curvature.plan
        if block.solved
    }


def every(step: int) -> int:
    """Steps between statistics, and between refreshes."""
    return 1 if step < EXACT else 10


def measure(name: str, solver: str, damping: float) -> list[dict[str, Any]]:
    """The rows of a case: sums alone in bfloat16, and everything."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, data = MODELS[name](), digits.load_split()
    options: dict[str, Any] = {"solver": solver, "damping": damping}
    options |= dict.fromkeys(("factor_update_steps", "inv_update_steps"), every)
    narrow: dict[str, Any] = {"exchange_dtype": torch.bfloat16, "kl_clip": None, "lr": 0.0}
    exact = KAISA(model, lr=0.05, momentum=0.9, **options)
    shadows = {
        "sums": KAISA(model, grad_worker_fraction=0, **options, **narrow),
        "both": KAISA(model, **options, **narrow),
        "at once": KAISA(model, **options, **narrow),
    }
    first = {"sums": EXACT, "both": EXACT, "at once": 0}
    errors: dict[str, list[list[float]]] = {kind: [] for kind in shadows}
    numbers: dict[str, list[dict[str, float]]] = {kind: [] for kind in ("exact", *shadows)}
    order = digits.batches(len(data.train_labels), BATCH, seed=0, rank=rank, world_size=ranks)
    for indices in islice(order, STEPS):
        exact.zero_grad()
        loss = cross_entropy(model(data.train_images[indices]), data.train_labels[indices])
        loss.backward()
        params = [p for p in model.parameters() if p.grad is not None]
        gradients = [p.grad.clone() for p in params if p.grad is not None]
        found = {}
        for kind, optimizer in (*shadows.items(), ("exact", exact)):
            for p, gradient in zip(params, gradients, strict=True):
                assert p.grad is not None
                p.grad.copy_(gradient)
            with patch.object(kfac, "EXACT", 0 if kind == "at once" else EXACT):
                optimizer.step()
            found[kind] = read(optimizer, clipped=kind == "exact")
            numbers[kind].append(optimizer.statistics())
        for kind, of_kind in errors.items():
            pairs = [(found[kind][layer], p) for layer, p in found["exact"].items()]
            of_kind.append([float((mine - p).norm() / p.norm()) for mine, p in pairs])
    rows = []
    for kind, of_kind in errors.items():
        row: dict[str, Any] = {"model": name, "solver": solver, "damping": damping, "kind": kind}
        compared = {"first": of_kind[first[kind]], "last": of_kind[-1]}
        if kind == "at once":  # later its averages are as those of "both"
            del compared["last"]
        for when, each in compared.items():
            row[when] = {"median": statistics.median(each), "worst": max(each)}
        row["failed"] = sum(n["failed"] for n in numbers[kind][-1:])
        row["bytes"] = {
            what: [numbers[of][-1][account] for of in ("exact", kind)]
            for what, account in ACCOUNTS.items()
        }
        rows.append(row)
    row["loss"] = float(loss)
    for optimizer in (exact, *shadows.values()):
        optimizer.close()
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="Relative error of P in a layer, median / worst; kilobytes sent by rank 0")
    headers = ("model", "solver", "damping", "in bfloat16", "first", "last", "sums kB")
    for header in (*headers, "decompositions kB"):
        result.add_column(header)
    for row in rows:
        errors = [row.get(when) for when in ("first", "last")]
        shown = ["{median:.4f} / {worst:.4f}".format(**each) if each else "" for each in errors]
        sent = ["{:.1f} to {:.1f}".format(*(n / 1e3 for n in row["bytes"][k])) for k in ACCOUNTS]
        if row["kind"] == "sums":
            sent[1] = ""  # with one worker none travel
        result.add_row(
            row["model"], row["solver"], f"{row['damping']:g}", row["kind"], *shown, *sent
        )
    return result


def main() -> None:
    """Measure, print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [
        row
        for name in arguments.models
        for solver in ("inverse", "eigen")
        for damping in DAMPINGS
        for row in measure(name, solver, damping)
    ]
    if dist.get_rank() == 0:
        Console(width=150).print(table(rows))
        if arguments.json:
            machine = f"{platform.machine()}, torch {torch.__version__}"
            record = {"machine": machine, "date": date.today().isoformat(), "steps": STEPS}
            arguments.json.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
