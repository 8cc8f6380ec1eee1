"""The digits that scikit-learn carries, and three small networks for them.

1,797 images of 8×8 pixels, 17 grey levels, 10 classes: real data, no download. The demos, the
training script and the benchmarks all use these functions, so that their figures can be compared.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

PIXELS = 64
CLASSES = 10


class Digits(NamedTuple):
    """Images as rows of 64 standardized pixels (float32), labels 0..9 (int64)."""

    train_images: Tensor  # (1437, 64)
    train_labels: Tensor  # (1437,)
    test_images: Tensor  # (360, 64)
    test_labels: Tensor  # (360,)


def load_split() -> Digits:
    """The fixed split into 1,437 training and 360 test images.

    The images are standardized by the mean and the deviation of all training pixels.
    """
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = (
        torch.from_numpy(part)
        for part in train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    )
    mean = train_images.mean()
    deviation = train_images.std(correction=0)
    return Digits(
        ((train_images - mean) / deviation).float(),
        train_labels.long(),
        ((test_images - mean) / deviation).float(),
        test_labels.long(),
    )


def mlp() -> nn.Sequential:
    """64-128-64-10 with ReLU; takes (N, 64)."""
    return nn.Sequential(
        nn.Linear(PIXELS, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def conv_net() -> nn.Sequential:
    """Two convolutions and two linear layers; takes (N, 64), like the MLP."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def autoencoder_images() -> Tensor:
    """All 1,797 images with pixels in 0..1, shape (1797, 64)."""
    images, _ = load_digits(return_X_y=True)
    return torch.from_numpy(images / 16).float()


def autoencoder() -> nn.Sequential:
    """64-128-64-32-8-32-64-128-64 with tanh; its outputs are logits of the pixels."""
    widths = [PIXELS, 128, 64, 32, 8, 32, 64, 128, PIXELS]
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def autoencoder_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Cross-entropy of the pixels, summed over the pixels and averaged over the images."""
    total = nn.functional.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    return total / len(images)


def batches(
    examples: int, batch_size: int, *, seed: int, rank: int = 0, world_size: int = 1
) -> Iterator[Tensor]:
    """Yield the indices of this rank's part of each global batch, without end.

    Each epoch is shuffled. The global batches are the same for every world size, so you can compare
    runs on one and on many processes. Incomplete batches at the end of an epoch are dropped.

    Args:
        examples: number of examples to draw from.
        batch_size: size of the global batch; each rank gets ``batch_size / world_size``.
        seed: seed of the order.
        rank: which part of the global batch this process takes.
        world_size: number of parts.

    Raises:
        ValueError: the global batch cannot be cut into equal parts, or there are too few examples.
    """
    if batch_size % world_size:
        raise ValueError(
            f"a global batch of {batch_size} does not divide into {world_size} equal parts;"
            f" use a multiple of {world_size}"
        )
    if examples < batch_size:
        raise ValueError(
            f"{examples} examples do not fill one batch; use a batch_size of at most {examples}"
        )
    part = batch_size // world_size
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(examples, generator=generator)
        for start in range(0, examples - batch_size + 1, batch_size):
            yield order[start + rank * part : start + (rank + 1) * part]
