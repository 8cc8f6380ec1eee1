"""Fashion-MNIST and CIFAR-10 as tasks: a small ResNet with batch norm, and a small ViT.

Fashion-MNIST (Xiao et al. 2017) is read from the folder in FASHION_MNIST, or from the folder of
Debian's package `dataset-fashion-mnist`. The "binary version" of CIFAR-10 (Krizhevsky 2009) is read
from the folder in CIFAR10. Nothing is downloaded.

Curves show the loss on 2,000 training images. The result of a run is its final loss on all test
images. The accuracy on them is also measured. "fashion resnet, short" only has the curve, on 1,000
images.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from task import Task
from unseen import Attention, Block, FeedForward

__all__ = ["IMAGES", "MissingDataError", "cifar10", "fashion_mnist"]

PACKAGE = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10
CURVE_IMAGES = 2_000  # training images, on which the curves are measured
SHORT_CURVE_IMAGES = 1_000
EVALUATION_BATCH = 1_000
KEYWORDS = {"SGD": {"weight_decay": 5e-4}, "AdamW": {"weight_decay": 0.05}}
KEYWORDS["Muon"] = KEYWORDS["SOAP"] = KEYWORDS["AdamW"]


class MissingDataError(FileNotFoundError):
    """The files of a data set are missing."""


@dataclass(frozen=True)
class Images:
    """Standardized images ``(N, channels, height, width)``, and labels 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def standardize(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Images:
    """Standardize both sets by the mean and deviation of each channel of the training images."""
    train_images, train_labels = train
    test_images, test_labels = test
    deviation, mean = torch.std_mean(train_images.float(), (0, 2, 3), keepdim=True)
    return Images(
        (train_images.float() - mean) / deviation,
        train_labels.long(),
        (test_images.float() - mean) / deviation,
        test_labels.long(),
    )


def read_idx(path: Path) -> Tensor:
    """The bytes of an idx file, which may be gzipped, in the shape that its header gives."""
    gzipped = path.with_name(path.name + ".gz")
    is_gzipped = gzipped.exists()
    content = gzipped.read_bytes() if is_gzipped else path.read_bytes()
    if is_gzipped:
        content = gzip.decompress(content)
    kind = content[2]
    dimensions = content[3]
    if content[:2] != b"\0\0" or kind != 8:
        raise ValueError(f"{path} is not an idx file of bytes: it begins with {content[:4]!r}")
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    return torch.frombuffer(bytearray(content[4 + 4 * dimensions :]), dtype=torch.uint8).view(shape)


@cache
def fashion_mnist() -> Images:
    """60,000 and 10,000 images of clothes, one channel of 28 x 28 pixels.

    Raises:
        MissingDataError: If the files are not there.
    """
    folder = Path(os.environ.get("FASHION_MNIST", PACKAGE))
    if not any(folder.glob("train-images-idx3-ubyte*")):
        raise MissingDataError(
            f"{folder} has no train-images-idx3-ubyte, gzipped or not: install Debian's package "
            f"dataset-fashion-mnist, or set FASHION_MNIST to a folder with the four idx files"
        )
    train, test = (
        (
            read_idx(folder / f"{part}-images-idx3-ubyte").unsqueeze(1),
            read_idx(folder / f"{part}-labels-idx1-ubyte"),
        )
        for part in ("train", "t10k")
    )
    return standardize(train, test)


@cache
def cifar10() -> Images:
    """50,000 and 10,000 photographs, three channels of 32 x 32 pixels.

    Raises:
        MissingDataError: If the files are not there.
    """
    named = os.environ.get("CIFAR10")
    folder = Path(named or "cifar-10-batches-bin")
    if not (folder / "test_batch.bin").exists():
        raise MissingDataError(
            f"{folder} has no test_batch.bin: unpack cifar-10-binary.tar.gz, and set CIFAR10 to "
            f"the path of its folder cifar-10-batches-bin"
        )

    def read(*names: str) -> tuple[Tensor, Tensor]:
        content = bytearray(b"".join((folder / name).read_bytes() for name in names))
        rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]

    return standardize(read(*(f"data_batch_{i}.bin" for i in range(1, 6))), read("test_batch.bin"))


# -------------------------------------------------------------------------------------- the models


class Residual(nn.Module):
    """Two convolutions, each with batch norm, added to their input."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip: nn.Module = nn.Identity()
        if width_in != width or stride > 1:
            matched = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.skip = nn.Sequential(matched, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Of ``(N, width_in, height, width)``."""
        return torch.relu(self.skip(x) + self.branch(x))


def resnet(channels: int) -> nn.Module:
    """ResNet-8: a convolution with stride 2, blocks of 16, 32 and 64 channels, and a head."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, 2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


class ViT(nn.Module):
    """Two blocks of width 72 on 16 patches, averaged over the patches before the head."""

    def __init__(self, channels: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, 72, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(16, 72) * 0.02)
        self.blocks = nn.ModuleList(
            Block(72, Attention(72, False), FeedForward(72), nn.LayerNorm) for _ in range(2)
        )
        self.norm = nn.LayerNorm(72)
        self.head = nn.Linear(72, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images ``(N, channels, height, width)``."""
        x = self.patches(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x).mean(1))
        return result


# --------------------------------------------------------------------------------------- the tasks


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """The mean loss and the accuracy."""
    outputs = torch.cat([model(batch) for batch in images.split(EVALUATION_BATCH)])
    accuracy = (outputs.argmax(1) == labels).float().mean()
    return cross_entropy(outputs, labels).item(), accuracy.item()


def classification(
    load: Callable[[], Images], make: Callable[[], nn.Module], steps: int, warmup: int | None
) -> Task:
    """Classify images, in batches of 128."""
    data = load()
    curve_images = data.train_images[:CURVE_IMAGES]
    curve_labels = data.train_labels[:CURVE_IMAGES]

    def batches(seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from torch.randperm(len(data.train_labels), generator=generator).split(128)

    def at_end(model: nn.Module) -> dict[str, float]:
        loss, accuracy = evaluate(model, data.test_images, data.test_labels)
        return {"loss": loss, "accuracy": accuracy}

    return Task(
        make,
        batches,
        lambda model, i: cross_entropy(model(data.train_images[i]), data.train_labels[i]),
        lambda model: evaluate(model, curve_images, curve_labels)[0],
        steps,
        20,
        warmup,
        KEYWORDS,
        at_end,
    )


def short() -> Task:
    """The ResNet on Fashion-MNIST for 150 steps at a constant rate, for benchmarks of many runs."""
    data = fashion_mnist()
    curve_images = data.train_images[:SHORT_CURVE_IMAGES]
    curve_labels = data.train_labels[:SHORT_CURVE_IMAGES]
    return replace(
        classification(fashion_mnist, lambda: resnet(1), 150, None),
        judge=lambda model: evaluate(model, curve_images, curve_labels)[0],
        every=10,
        at_end=None,
    )


IMAGES: dict[str, Callable[[], Task]] = {
    "fashion resnet": lambda: classification(fashion_mnist, lambda: resnet(1), 900, 45),
    "fashion resnet, constant rate": lambda: classification(
        fashion_mnist, lambda: resnet(1), 600, None
    ),
    "fashion resnet, short": short,
    "fashion vit": lambda: classification(fashion_mnist, lambda: ViT(1, 7), 600, 30),
    "cifar resnet": lambda: classification(cifar10, lambda: resnet(3), 1_500, 75),
}
