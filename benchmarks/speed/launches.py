"""What a step asks of a GPU: launches, waits of the host and uploads, by the pretended device.

    make launches

A transformer of 4 blocks and of 16, 27 and 99 layers, each trained by every system over AdamW. Of
the steps most are quiet; some take statistics, some of these solve as well; the first ones also do
what is done once, and verify statistics. Of each kind the step that asks for most counts. Launches
from Python take the host some 5 to 15 µs each: the table has what they come to at 10, which a small
model's step takes at least, however fast the GPU is. Nothing here is timed, and one machine's
figures are another's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings
from collections import Counter
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
from fake_device import NAME, pretend_device  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["Muon", "counted", "pretend_device"]

MICROSECONDS = 10
# statistics, solves, and steps of a training
EVERY = 2
REFRESH = 4
STEPS = 7
KINDS = ("quiet", "statistics", "refresh", "first")


def kind(step: int) -> str:
    """What falls due at a step."""
    due = "refresh" if step % REFRESH == 0 else "quiet" if step % EVERY else "statistics"
    return due if step > EVERY else "first"  # two steps with statistics, which are verified


# ------------------------------------------------------------------------- the model, the systems


class Block(nn.Module):
    """Attention and two Linears, each behind a norm."""

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
        q, k, v = (part(y).view(split).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        more: Tensor = self.down(gelu(self.up(self.norms[1](x))))
        return x + more


class Transformer(nn.Module):
    """Tokens, blocks, and a Linear to the next token: 6 layers a block and 3 besides."""

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
DUE: dict[str, Any] = {"factor_update_steps": EVERY, "inv_update_steps": REFRESH}
PAIRS: dict[str, Any] = {"warmup_steps": 0, "num_largest": 4, "lanczos_iterations": 12}


class Muon:
    """torch's Muon on the hidden matrices, AdamW on the rest."""

    def __init__(self, model: nn.Module, hidden: Iterable[nn.Module]) -> None:
        matrices = [p for module in hidden for p in module.parameters() if p.dim() == 2]
        chosen = set(matrices)
        rest = [p for p in model.parameters() if p not in chosen]
        adamw = torch.optim.AdamW(rest, lr=1e-3, foreach=True)
        self.parts = [torch.optim.Muon(matrices, lr=1e-3), adamw]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


SYSTEMS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), **SGD),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    "Muon": lambda model: Muon(model, model.blocks),
    "KAISA inverse": partial(KAISA, **ADAMW, **DUE),
    "KAISA inverse, SGD": partial(KAISA, **SGD, **DUE),
    "KAISA eigen": partial(KAISA, **ADAMW, **DUE, solver="eigen"),
    "DPKFAC inverse": partial(DPKFAC, **ADAMW, **DUE),
    "DistKFAC inverse": partial(DistKFAC, **ADAMW, **DUE, async_inverse=False),
    "DHO2": partial(DHO2, **ADAMW, **PAIRS, curvature_interval=REFRESH),
    "MRDHO2": partial(MRDHO2, **ADAMW, **PAIRS, epoch_steps=REFRESH),
}

# ---------------------------------------------------------------------------------------- counting


def counted(
    make: Callable[[Any], Any], blocks: int, width: int = 32, steps: int = STEPS
) -> dict[str, dict[str, int]]:
    """What steps of each kind ask for, as many launches as the most of the kind."""
    found: dict[str, dict[str, int]] = {}
    torch.manual_seed(0)
    with pretend_device() as seen:
        model = Transformer(blocks, width).to(NAME)
        tokens = torch.randint(50, (8, 16)).to(NAME)
        targets = tokens.roll(-1, 1).flatten()

        def loss() -> Tensor:
            return cross_entropy(model(tokens).flatten(0, 1), targets)

        optimizer = make(model)
        if isinstance(optimizer, DHO2 | MRDHO2):
            optimizer.curvature_closure = loss
        for step in range(steps):
            optimizer.zero_grad()
            seen.clear()
            loss().backward()
            counters: list[Counter[str]] = [seen.kernels, seen.syncs, seen.uploads]
            passes = [each.total() for each in counters]
            optimizer.step()
            total, waits, uploads = (each.total() for each in counters)
            row = {
                "passes": passes[0],
                "step": total - passes[0],
                "waits": waits,
                "uploads": uploads,
                "beside": seen.beside.total(),
            }
            before = found.setdefault(kind(step), row)
            found[kind(step)] = {key: max(before[key], value) for key, value in row.items()}
        if hasattr(optimizer, "close"):
            optimizer.close()
    return found


def alone(name: str, blocks: int, width: int = 32) -> dict[str, dict[str, int]]:
    """The same of a system in a process of its own, whose first step is the first of all."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_alone, (name, blocks, width))


def _alone(name: str, blocks: int, width: int) -> dict[str, dict[str, int]]:
    return counted(SYSTEMS[name], blocks, width)


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """Launches in the passes and in the step, waits and uploads where there are any; the times."""
    told = []
    for row in rows:
        more = [f"{row[name]} {name}" for name in ("waits", "uploads") if row[name]]
        told.append(", ".join([f"{row['passes']:,} + {row['step']:,}", *more]))
    return [*told, " / ".join(f"{row['milliseconds']:.1f}" for row in rows)]


def main() -> None:
    """Count for each system and number of blocks, print the table, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="one block and two, narrow ones")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SecondOrderWarning)
    sizes, width = ((1, 2), 8) if arguments.tiny else ((4, 16), 32)
    record: list[dict[str, Any]] = []
    shown = []
    for name in arguments.systems:
        for blocks in sizes:
            found = alone(name, blocks, width)
            rows = []
            for each in KINDS:
                row = {"system": name, "blocks": blocks, "kind": each, **found[each]}
                total = found[each]["passes"] + found[each]["step"]
                rows.append({**row, "milliseconds": MICROSECONDS * total / 1000})
            record += rows
            shown.append([name, str(blocks), *cells(rows)])
    reporting.store(arguments.json, tiny=arguments.tiny, microseconds=MICROSECONDS, rows=record)
    title = f"launches in the passes + in step(); milliseconds of them at {MICROSECONDS} µs each"
    reporting.show(reporting.table(title, ("system", "blocks", *KINDS, "ms"), shown))


if __name__ == "__main__":
    main()
