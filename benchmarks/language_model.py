"""The language model of the benchmarks: a causal transformer on the standard library's source.

Every machine that has Python has this text, so nothing is downloaded. Every tenth file is held out.
"""

from __future__ import annotations

import string
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

__all__ = ["SIZES", "VOCABULARY", "Size", "Transformer", "batches", "held_out", "next_loss", "text"]

VOCABULARY = len(string.printable) + 1
NO_PACKAGES = "test", "site-packages", "idlelib"
HELD_OUT = 10  # one file in so many
WINDOWS = 64  # of the held-out text, on which a model is judged


@dataclass(frozen=True)
class Size:
    """A model and how it is trained.

    Attributes:
        layers: Number of blocks.
        width: Width of the residual stream.
        heads: Number of attention heads.
        context: Characters per window.
        batch: Windows per step.
        steps: Number of training steps, with the warm-up.
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
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

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
