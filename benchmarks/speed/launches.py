"""Kernel launches, synchronizations and uploads per step, counted on a fake device.

    make launches

Each optimizer trains a transformer of 4 blocks (27 layers) and one of 16 blocks (99 layers), over
AdamW unless the name says otherwise. There are four kinds of steps:

    quiet        no refresh is due
    statistics   updates the statistics
    refresh      updates the statistics and the inverses
    first        the first steps, which also set up the optimizer and verify the statistics

For each kind, the table has the step with the largest counts. A launch from Python takes 5 to 15 µs
of host time. The column "ms" assumes 10 µs, which bounds a small model's step from below on any
GPU. The script measures no times, so its figures don't depend on the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import reporting
from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, SecondOrderWarning

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "helpers"))
from fake_device import NAME, pretend_device  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: E402

__all__ = ["Muon", "count_operations", "pretend_device"]

MICROSECONDS = 10  # assumed host time per launch
STATISTICS_INTERVAL = 2
REFRESH_INTERVAL = 4
STEPS = 7
KINDS = ("quiet", "statistics", "refresh", "first")


def kind(step: int) -> str:
    """Kind of a step."""
    # The first two updates of the statistics are verified.
    if step <= STATISTICS_INTERVAL:
        return "first"
    if step % REFRESH_INTERVAL == 0:
        return "refresh"
    if step % STATISTICS_INTERVAL == 0:
        return "statistics"
    return "quiet"


# ---------------------------------------------------------------------- the model, the optimizers


class Block(nn.Module):
    """Attention and two Linear layers, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        y = self.norms[0](x)
        q, k, v = (layer(y).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        update: Tensor = self.down(gelu(self.up(self.norms[1](x))))
        return x + update


class Transformer(nn.Module):
    """An embedding, blocks of 6 layers, and 2 further Linear layers."""

    def __init__(self, blocks: int, width: int = 32, tokens: int = 50) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.first = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.first(self.tokens(tokens))))
        return logits


ADAMW: dict[str, Any] = {"lr": 1e-3, "base": torch.optim.AdamW, "foreach": True}
SGD: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "foreach": True}
INTERVALS: dict[str, Any] = {
    "factor_update_steps": STATISTICS_INTERVAL,
    "inv_update_steps": REFRESH_INTERVAL,
}
PAIRS: dict[str, Any] = {"warmup_steps": 0, "num_largest": 4, "lanczos_iterations": 12}


class Muon:
    """torch's Muon for the hidden matrices, and AdamW for all other parameters."""

    def __init__(self, model: nn.Module, hidden: Iterable[nn.Module]) -> None:
        matrices = []
        for module in hidden:
            matrices += [p for p in module.parameters() if p.dim() == 2]
        matrix_set = set(matrices)
        other_params = [p for p in model.parameters() if p not in matrix_set]
        adamw = torch.optim.AdamW(other_params, lr=1e-3, foreach=True)
        self.optimizers = [torch.optim.Muon(matrices, lr=1e-3), adamw]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


SYSTEMS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), **SGD),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    "Muon": lambda model: Muon(model, model.blocks),
    "KAISA inverse": partial(KAISA, **ADAMW, **INTERVALS),
    "KAISA inverse, SGD": partial(KAISA, **SGD, **INTERVALS),
    "KAISA eigen": partial(KAISA, **ADAMW, **INTERVALS, solver="eigen"),
    "DPKFAC inverse": partial(DPKFAC, **ADAMW, **INTERVALS),
    "DistKFAC inverse": partial(DistKFAC, **ADAMW, **INTERVALS, async_inverse=False),
    "DHO2": partial(DHO2, **ADAMW, **PAIRS, curvature_interval=REFRESH_INTERVAL),
    "MRDHO2": partial(MRDHO2, **ADAMW, **PAIRS, epoch_steps=REFRESH_INTERVAL),
}

# ---------------------------------------------------------------------------------------- counting


def count_operations(
    make: Callable[[Any], Any], blocks: int, width: int = 32, steps: int = STEPS
) -> dict[str, dict[str, int]]:
    """Count the device's operations in each kind of step, and return the largest counts."""
    largest_counts: dict[str, dict[str, int]] = {}
    torch.manual_seed(0)
    with pretend_device() as device:
        model = Transformer(blocks, width).to(NAME)
        tokens = torch.randint(50, (8, 16)).to(NAME)
        targets = tokens.roll(-1, 1).flatten()

        def loss() -> Tensor:
            return cross_entropy(model(tokens).flatten(0, 1), targets)

        optimizer = make(model)
        if isinstance(optimizer, DHO2 | MRDHO2):
            optimizer.curvature_closure = loss

        for step in range(steps):
            # Launches of the passes and of the step are counted separately.
            optimizer.zero_grad()
            device.clear()
            loss().backward()
            passes = device.kernels.total()
            optimizer.step()
            counts = {
                "passes": passes,
                "step": device.kernels.total() - passes,
                "waits": device.syncs.total(),
                "uploads": device.uploads.total(),
                "beside": device.on_threads.total(),
            }

            largest = largest_counts.setdefault(kind(step), counts)
            for name, count in counts.items():
                largest[name] = max(largest[name], count)

        if hasattr(optimizer, "close"):
            optimizer.close()
    return largest_counts


def count_in_new_process(name: str, blocks: int, width: int = 32) -> dict[str, dict[str, int]]:
    """Count a system's operations in a new process, where its first step is the first of all."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_count_system, (name, blocks, width))


def _count_system(name: str, blocks: int, width: int) -> dict[str, dict[str, int]]:
    return count_operations(SYSTEMS[name], blocks, width)


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """Cells of a table row: the counts of each kind of step, then the milliseconds."""
    counts = []
    for row in rows:
        parts = [f"{row['passes']:,} + {row['step']:,}"]
        if row["waits"]:
            parts.append(f"{row['waits']} syncs")
        if row["uploads"]:
            parts.append(f"{row['uploads']} uploads")
        counts.append(", ".join(parts))
    milliseconds = " / ".join(f"{row['milliseconds']:.1f}" for row in rows)
    return [*counts, milliseconds]


def main() -> None:
    """Count for each system and number of blocks, print the table, and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="narrow models of one and two blocks")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="write the record to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SecondOrderWarning)
    sizes = (4, 16)
    width = 32
    if arguments.tiny:
        sizes = (1, 2)
        width = 8

    record: list[dict[str, Any]] = []
    table_rows = []
    for name in arguments.systems:
        for blocks in sizes:
            counts = count_in_new_process(name, blocks, width)
            rows = []
            for step_kind in KINDS:
                row = {"system": name, "blocks": blocks, "kind": step_kind, **counts[step_kind]}
                total = counts[step_kind]["passes"] + counts[step_kind]["step"]
                rows.append({**row, "milliseconds": MICROSECONDS * total / 1000})
            record += rows
            table_rows.append([name, str(blocks), *cells(rows)])

    reporting.store(arguments.json, tiny=arguments.tiny, microseconds=MICROSECONDS, rows=record)
    title = f"launches in the passes + in step(); their milliseconds at {MICROSECONDS} µs each"
    reporting.show(reporting.table(title, ("system", "blocks", *KINDS, "ms"), table_rows))


if __name__ == "__main__":
    main()
