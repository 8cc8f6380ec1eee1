"""A small causal transformer on the characters of the standard library's own source.

Every machine that has Python has the text. A file is held out in ten: what a model gains there it
has not read before.

    python examples/language_model.py
    torchrun --standalone --nproc-per-node=2 examples/language_model.py --fsdp

With several processes the model is in DistributedDataParallel, or with ``--fsdp`` sharded by FSDP2,
block by block.
"""

from __future__ import annotations

import argparse
import os
import string
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from second_order import KAISA

__all__ = ["SIZES", "VOCABULARY", "Size", "Transformer", "batches", "held_out", "next_loss", "text"]

VOCABULARY = len(string.printable) + 1
NO_PACKAGES = "test", "site-packages", "idlelib"
HELD_OUT = 10  # one file in so many
WINDOWS = 64  # of the held-out text, on which a model is judged


@dataclass(frozen=True)
class Size:
    """A model and how it is trained.

    Attributes:
        layers: Blocks of the transformer.
        width: Of the residual stream.
        heads: Of attention.
        context: Characters of a window.
        batch: Windows to a step.
        steps: Of the whole training, warm-up included.
        warmup: Steps in which the learning rate rises.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    warmup: int


SIZES = {
    "small": Size(2, 128, 4, 64, 32, 500, 50),
    "full": Size(4, 128, 4, 128, 32, 500, 50),
}


class Block(nn.Module):
    """Attention and a feed-forward network, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of ``(batch, context, width)``, the same."""
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return result


class Transformer(nn.Module):
    """Predicts each next character of windows of text."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        """Logits ``(batch, context, VOCABULARY)`` of the characters after those of windows."""
        places = torch.arange(windows.shape[1], device=windows.device)
        x = self.characters(windows) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


@cache
def text(held_out: bool) -> Tensor:
    """The characters' numbers, int64, of the files that are trained on, or of those held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    packages = [p for p in folder.glob("*/*.py") if p.parent.name not in NO_PACKAGES]
    files = sorted(folder.glob("*.py")) + sorted(packages)
    chosen = [p for i, p in enumerate(files) if (i % HELD_OUT == 0) is held_out]
    table = torch.full((256,), VOCABULARY - 1)
    for number, character in enumerate(string.printable):
        table[ord(character)] = number
    read = b"\n".join(p.read_bytes() for p in chosen)
    return table[torch.frombuffer(bytearray(read), dtype=torch.uint8).long()]


def _windows(source: Tensor, size: Size, count: int, generator: torch.Generator) -> Tensor:
    """``(count, context + 1)``, from places drawn at random."""
    starts = torch.randint(len(source) - size.context - 1, (count, 1), generator=generator)
    return source[starts + torch.arange(size.context + 1)]


def batches(size: Size, seed: int) -> Iterator[Tensor]:
    """Windows ``(batch, context + 1)`` of the text, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield _windows(text(held_out=False), size, size.batch, generator)


def held_out(size: Size) -> Tensor:
    """The windows on which every model of a size is judged: the same for all."""
    generator = torch.Generator().manual_seed(2**20)
    return _windows(text(held_out=True), size, WINDOWS, generator)


def next_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each window's characters after the first."""
    logits = model(windows[:, :-1])
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train(args: argparse.Namespace, rank: int, processes: int) -> None:
    """Train the small model by KAISA over AdamW, as one of some processes."""
    torch.manual_seed(0)
    size = SIZES["small"]
    model: nn.Module = Transformer(size)
    if args.fsdp:
        for block in model.children():
            for part in block if isinstance(block, nn.ModuleList) else []:
                fully_shard(part)
        fully_shard(model)
    elif processes > 1:
        model = DistributedDataParallel(model)
    # With "reduce" each factor is on one process alone, as a sharded model's parameters are.
    optimizer = KAISA(model, lr=args.lr, base=torch.optim.AdamW, factor_exchange="reduce")

    judged = held_out(size)[rank::processes]
    for step, windows in zip(range(args.steps), batches(size, seed=0), strict=False):
        optimizer.zero_grad()
        loss = next_loss(model, windows[rank::processes])
        loss.backward()
        optimizer.step()
        if step % 20 == 19 or step == args.steps - 1:
            with torch.no_grad():  # of a sharded model a forward is everybody's
                unseen = next_loss(model, judged)
            if rank == 0:
                print(f"step {step + 1:3}  loss {loss:.3f}  held out {unseen:.3f}")


def main(arguments: list[str] | None = None) -> None:
    """Train the small model by KAISA over AdamW, on one process or on those of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--fsdp", action="store_true", help="shard the model by FSDP2")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(arguments)
    started = not dist.is_initialized() and "RANK" in os.environ  # by torchrun
    if started:
        dist.init_process_group("gloo")
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    train(args, rank, processes)  # a function: DistributedDataParallel must not outlive its group
    if started:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
