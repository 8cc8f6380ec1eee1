"""The workloads of the speed benchmark: models and one batch of random data for each.

Four run on any machine, and two need CUDA. The models are as large as networks that people train,
so each part of a step takes a realistic share of the time. The data is random, because only its
shape matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

__all__ = ["WORKLOADS", "Batch", "ResNet", "Transformer", "Workload", "mlp"]

Batch: TypeAlias = tuple[Tensor, Tensor]

SEED = 0


@dataclass(frozen=True)
class Workload:
    """A model and the batch that it is timed on.

    Attributes:
        name: Name on the command line.
        build: Makes the model on the CPU.
        inputs: Shape of a batch.
        classes: Number of classes.
        device: "cpu" or "cuda".
        autocast: Whether the forward pass runs under autocast to bfloat16.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int = 10
    device: str = "cpu"
    autocast: bool = False

    @property
    def available(self) -> bool:
        """Whether this machine has the device."""
        return self.device == "cpu" or torch.cuda.is_available()

    def model(self) -> nn.Module:
        """Build the model, with the same parameters every time and in training mode."""
        torch.manual_seed(SEED)
        return self.build().to(self.device)

    def batch(self, rank: int = 0) -> Batch:
        """Inputs and targets, which differ between ranks."""
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        x = torch.randn(self.inputs, generator=generator)
        y = torch.randint(self.classes, (self.inputs[0],), generator=generator)
        return x.to(self.device), y.to(self.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the model on a batch."""
        x, y = batch
        context: AbstractContextManager[object] = nullcontext()
        if self.autocast:
            context = torch.autocast(self.device, torch.bfloat16)
        with context:
            loss: Tensor = cross_entropy(model(x), y)
        return loss


def mlp() -> nn.Module:
    """An MLP of widths 512, 1024, 1024, 512 and 10."""
    return nn.Sequential(
        nn.Linear(512, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class _Block(nn.Module):
    """A residual block: convolutions, and a projection if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)
        projection: list[nn.Module] = []
        if inputs != outputs or stride != 1:
            projection = _convolution(inputs, outputs, 1, stride)
        self.shortcut = nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def basic_block(inputs: int, width: int, stride: int) -> _Block:
    """A residual block of two 3x3 convolutions."""
    first = _convolution(inputs, width, 3, stride)
    second = _convolution(width, width, 3)
    return _Block(inputs, width, stride, *first, nn.ReLU(), *second)


def bottleneck(inputs: int, width: int, stride: int) -> _Block:
    """A residual block of 1x1, strided 3x3, and 1x1 convolutions to four times the width."""
    narrow = _convolution(inputs, width, 1)
    spatial = _convolution(width, width, 3, stride)
    wide = _convolution(width, 4 * width, 1)
    return _Block(inputs, 4 * width, stride, *narrow, nn.ReLU(), *spatial, nn.ReLU(), *wide)


class ResNet(nn.Module):
    """A stem, stages of residual blocks, the mean over positions, and a Linear layer."""

    def __init__(
        self,
        widths: Sequence[int],
        depths: Sequence[int],
        block: Callable[[int, int, int], _Block] = basic_block,
        expansion: int = 1,
        stem: Sequence[nn.Module] = (),
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*(stem or [*_convolution(3, widths[0], 3), nn.ReLU()]))
        blocks = []
        channels = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(channels, width, stride))
                channels = width * expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def resnet50() -> ResNet:
    """ResNet-50 for images of 224 x 224."""
    stem = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    return ResNet((64, 128, 256, 512), (3, 4, 6, 3), bottleneck, 4, stem, classes=1000)


class _Attention(nn.Module):
    """Self-attention with one Linear layer each for queries, keys, values and outputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v)
        result: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return result


class _TransformerBlock(nn.Module):
    """A pre-norm block: attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), _Attention(width, heads))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.feed_forward(x)
        return result


class Transformer(nn.Module):
    """Blocks over embedded tokens, the mean over tokens, and a Linear layer."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, classes: int = 10) -> None:
        super().__init__()
        blocks = [_TransformerBlock(width, heads, hidden) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


_ALL = (
    Workload("resnet20", partial(ResNet, (16, 32, 64), (3, 3, 3)), (64, 3, 32, 32)),
    Workload("mlp", mlp, (128, 512)),
    Workload("transformer", partial(Transformer, 2, 512, 8, 1024), (8, 64, 512)),
    Workload("resnet-wide", partial(ResNet, (64, 128, 256), (2, 2, 2)), (32, 3, 32, 32)),
    Workload("resnet50", resnet50, (64, 3, 224, 224), classes=1000, device="cuda"),
    Workload(
        "transformer-768",
        partial(Transformer, 12, 768, 12, 3072),
        (16, 256, 768),
        device="cuda",
        autocast=True,
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
