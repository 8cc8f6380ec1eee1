"""Further small tasks. Some default settings were chosen on seeds that are not reported.

All tasks but diabetes are evaluated on held-out data. The floor of the damping, the bounds of the
step scale and the thresholds of drift were chosen on the seeds that tune the other optimizers
(`tuned_rivals.TUNED_ON`).

transformer   causal, 3 layers of width 96, on characters of the standard library's inner packages
llama         3 layers of width 96 with RMSNorm, SwiGLU, rotary positions, on pieces of C++ headers
lstm          embedding, two LSTM layers and a head, on the same characters as the transformer
vit           2 blocks of width 48 on patches of 2 × 2 pixels of the digits
friedman      regression of Friedman's first function, by a network with two hidden layers
diabetes      regression on scikit-learn's diabetes data, judged on the rows that it is trained on
interactions  regression with interactions of skewed inputs, and with unused inputs
head          a linear head on a body that was trained on five of ten digits, and is frozen

`NEW` has tasks that were written after the default settings had been chosen. No setting was chosen
on any of their seeds.

torch source  2 layers of width 96 as in llama, on characters of the source of `torch.nn`
"""

from __future__ import annotations

import string
import sysconfig
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_diabetes, make_friedman1
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    mse_loss,
    scaled_dot_product_attention,
    silu,
)

import digits
from task import LANGUAGE_KEYWORDS, Task

__all__ = ["NEW", "UNSEEN", "Attention", "Block", "FeedForward", "regression"]

WINDOWS = 64  # of the held-out text, on which a model is judged
HELD_OUT = 10  # a file in so many
MERGED = 512  # pieces of a word, bytes among them
HEADER_BYTES = 2**20

# --------------------------------------------------------------------------------------- the texts


def files_of(folder: Path, pattern: str, held_out: bool) -> bytes:
    """The text of a folder's files, or of those that are held out."""
    left_out = {"test", "tests", "site-packages", "idlelib"}
    files = sorted(
        p for p in folder.glob(pattern) if not left_out & set(p.relative_to(folder).parts)
    )
    chosen = [p for i, p in enumerate(files) if (i % HELD_OUT == 0) is held_out]
    return b"\n".join(p.read_bytes() for p in chosen)


def numbered(read: bytes) -> Tensor:
    """The number of each character, with one number for all that are not printable ASCII."""
    table = torch.full((256,), len(string.printable))
    for number, character in enumerate(string.printable):
        table[ord(character)] = number
    return table[torch.frombuffer(bytearray(read), dtype=torch.uint8).long()]


@cache
def characters(held_out: bool) -> Tensor:
    """Numbers of the characters of the standard library's packages in packages."""
    return numbered(files_of(Path(sysconfig.get_path("stdlib")), "*/*/*.py", held_out))


@cache
def torch_characters(held_out: bool) -> Tensor:
    """Numbers of the characters of the modules in `torch.nn`."""
    return numbered(files_of(Path(torch.nn.__file__).parent, "**/*.py", held_out))


@cache
def pieces(held_out: bool) -> Tensor:
    """Numbers of the pieces, by byte-pair encoding, of the C++ headers that torch carries."""
    # Here, so that the other tasks need no tokenizers.
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415

    folder = Path(torch.__file__).parent / "include" / "ATen"
    text = {part: files_of(folder, "*.h", part)[:HEADER_BYTES].decode() for part in (False, True)}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=MERGED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text[False]], trainer)
    return torch.tensor(tokenizer.encode(text[held_out]).ids)


def windows(source: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Windows ``(count, length + 1)`` at random positions."""
    starts = torch.randint(len(source) - length - 1, (count, 1), generator=generator)
    return source[starts + torch.arange(length + 1)]


def next_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each window's tokens after the first."""
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def language_modeling(
    make: Callable[[], nn.Module],
    source: Callable[[bool], Tensor],
    length: int,
    batch: int,
    steps: int,
    warmup: int,
) -> Task:
    """A language model on windows of a text."""
    held_out = windows(source(True), length, WINDOWS, torch.Generator().manual_seed(2**20))

    def batches(seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(source(False), length, batch, generator)

    return Task(
        make=make,
        batches=batches,
        loss_of=next_loss,
        judge=lambda model: next_loss(model, held_out).item(),
        steps=steps,
        every=10,
        warmup=warmup,
        keywords=LANGUAGE_KEYWORDS,
    )


# -------------------------------------------------------------------------------------- the models


def small_init(model: nn.Module) -> nn.Module:
    """Initialize matrices with a standard deviation of 0.02, and biases with zeros."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    return model


class Attention(nn.Module):
    """Heads of 24 dimensions, with four separate projections.

    Args:
        width: Width of the residual stream.
        causal: Whether a position only attends to those before it.
        rotary: Whether queries and keys have rotary position embeddings.
    """

    def __init__(self, width: int, causal: bool, rotary: bool = False) -> None:
        super().__init__()
        self.heads = width // 24
        self.causal = causal
        self.rotary = rotary
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, positions, width)`` to the same shape."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if self.rotary:
            q = rotate(q)
            k = rotate(k)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return result


def rotate(x: Tensor) -> Tensor:
    """Rotate pairs of dimensions by angles that grow with the position (Su et al. 2021)."""
    positions = torch.arange(x.shape[-2])
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000 ** (-torch.arange(half) / half)
    a = x[..., :half]
    b = x[..., half:]
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Gated(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., width)`` to the same shape."""
        result: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return result


class FeedForward(nn.Sequential):
    """Two layers with GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm and added to its input."""

    def __init__(self, width: int, attention: nn.Module, forward: nn.Module, norm: Any) -> None:
        super().__init__()
        self.norm1 = norm(width)
        self.norm2 = norm(width)
        self.attention = attention
        self.feed = forward

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, positions, width)`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.feed(self.norm2(x))
        return result


class Transformer(nn.Module):
    """Predicts the next token at each position.

    Args:
        vocabulary: Number of tokens.
        length: Length of a window, for learned position embeddings. 0 for none.
        blocks: The blocks.
        norm: The norm before the head.
        width: Width of the residual stream.
    """

    def __init__(
        self, vocabulary: int, length: int, blocks: list[nn.Module], norm: Any, width: int
    ) -> None:
        super().__init__()
        self.pieces = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width) if length else None
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, positions, vocabulary)`` of the next tokens."""
        x = self.pieces(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def transformer() -> nn.Module:
    """Three layers of width 96 that learn positions."""
    blocks: list[nn.Module] = [
        Block(96, Attention(96, True), FeedForward(96), nn.LayerNorm) for _ in range(3)
    ]
    return small_init(Transformer(len(string.printable) + 1, 48, blocks, nn.LayerNorm, 96))


def llama(vocabulary: int, layers: int, width: int) -> nn.Module:
    """Layers as in Llama: RMSNorm, rotary positions and SwiGLU."""
    hidden = 8 * width // 3
    blocks: list[nn.Module] = [
        Block(width, Attention(width, True, rotary=True), Gated(width, hidden), nn.RMSNorm)
        for _ in range(layers)
    ]
    return small_init(Transformer(vocabulary, 0, blocks, nn.RMSNorm, width))


class Recurrent(nn.Module):
    """Embedding, two LSTM layers, head."""

    def __init__(self) -> None:
        super().__init__()
        vocabulary = len(string.printable) + 1
        self.pieces = nn.Embedding(vocabulary, 64)
        self.blocks = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the pieces after those of windows."""
        result: Tensor = self.head(self.blocks(self.pieces(tokens))[0])
        return result


class ViT(nn.Module):
    """Two blocks of width 48 on 16 patches of the digits, and the mean of the places."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 48, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(16, 48) * 0.02)
        self.blocks = nn.ModuleList(
            Block(48, Attention(48, False), FeedForward(48), nn.LayerNorm) for _ in range(2)
        )
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, digits.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images ``(N, 64)``."""
        x = self.patches(images.view(-1, 1, 8, 8)).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x).mean(1))
        return result


# --------------------------------------------------------------------------------------- the tasks


def vit() -> Task:
    """Digits by patches."""
    data = digits.load_split()
    return Task(
        ViT,
        lambda seed: digits.batches(len(data.train_images), 64, seed=seed),
        lambda model, i: cross_entropy(model(data.train_images[i]), data.train_labels[i]),
        lambda model: cross_entropy(model(data.test_images), data.test_labels).item(),
        300,
        10,
        15,
    )


def regression(table: tuple[Any, Any], steps: int, held_out: float) -> Task:
    """Regression on standardized columns. Evaluated on held-out rows, or on all if none are."""
    x, y = (torch.as_tensor(part, dtype=torch.float32).view(len(part), -1) for part in table)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    evaluation_rows = order
    training_rows = order
    count = int(held_out * len(x))
    if count:
        evaluation_rows = order[:count]
        training_rows = order[count:]
    x, y = ((part - part[training_rows].mean(0)) / part[training_rows].std(0) for part in (x, y))
    width = x.shape[1]

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    return Task(
        make=make,
        batches=lambda seed: digits.batches(len(training_rows), 64, seed=seed),
        loss_of=lambda model, i: mse_loss(model(x[training_rows[i]]), y[training_rows[i]]),
        judge=lambda model: mse_loss(model(x[evaluation_rows]), y[evaluation_rows]).item(),
        steps=steps,
        every=10,
    )


def friedman() -> Task:
    """Friedman's first function of ten features, with noise: a 25th of the variance."""
    return regression(make_friedman1(10_000, 10, noise=1.0, random_state=0), 400, 0.2)


def diabetes() -> Task:
    """The progression of diabetes from ten measurements. All 442 rows are used for training."""
    return regression(load_diabetes(return_X_y=True, scaled=False), 150, 0.0)


def interactions() -> Task:
    """Products and thresholds of eight skewed inputs of different scales. Eight are unused."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(12_000, 16, generator=generator)
    x[:, :4] = x[:, :4].exp()
    x[:, 4:8] = x[:, 4:8].square() * x[:, 4:8].sign()
    a, b, c, d, e, f, g, h = x[:, :8].unbind(1)
    y = a.log() * e.tanh() + 0.5 * (b * f).tanh() + (c - 1).relu().sqrt() - (d.log() * g).cos()
    y = y + 0.7 * (h > 0) * e.tanh() + 0.1 * torch.randn(len(y), generator=generator)
    return regression((x, y), 1_000, 0.2)


@cache
def body() -> nn.Module:
    """Two frozen layers that were trained on the digits 0 to 4."""
    data = digits.load_split()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        model = nn.Sequential(layers, nn.Linear(128, 5))
        known = (data.train_labels < 5).nonzero().flatten()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for step, i in zip(range(100), digits.batches(len(known), 64, seed=0), strict=False):
            del step
            optimizer.zero_grad()
            cross_entropy(
                model(data.train_images[known[i]]), data.train_labels[known[i]]
            ).backward()
            optimizer.step()
    return layers.requires_grad_(False)


def head() -> Task:
    """Classify all ten digits with a linear head on the frozen body."""
    data = digits.load_split()
    return Task(
        lambda: nn.Sequential(deepcopy(body()), nn.Linear(128, digits.CLASSES)),
        lambda seed: digits.batches(len(data.train_images), 64, seed=seed),
        lambda model, i: cross_entropy(model(data.train_images[i]), data.train_labels[i]),
        lambda model: cross_entropy(model(data.test_images), data.test_labels).item(),
        150,
        5,
    )


UNSEEN: dict[str, Callable[[], Task]] = {
    name: cache(make)
    for name, make in {
        "unseen transformer": lambda: language_modeling(transformer, characters, 48, 40, 400, 40),
        "unseen llama": lambda: language_modeling(
            partial(llama, MERGED, 3, 96), pieces, 48, 12, 200, 20
        ),
        "unseen lstm": lambda: language_modeling(Recurrent, characters, 48, 32, 150, 15),
        "unseen vit": vit,
        "unseen friedman": friedman,
        "unseen diabetes": diabetes,
        "unseen interactions": interactions,
        "unseen head": head,
    }.items()
}

NEW: dict[str, Callable[[], Task]] = {
    "torch source": cache(
        lambda: language_modeling(
            make=partial(llama, vocabulary=len(string.printable) + 1, layers=2, width=96),
            source=torch_characters,
            length=48,
            batch=16,
            steps=300,
            warmup=30,
        )
    ),
}
