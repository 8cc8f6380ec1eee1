"""Train a new head on a frozen body, with DHO2 over Adam or with Adam alone.

    python fine_tuning.py
    python fine_tuning.py --head two-layer --optimizer adam
    torchrun --standalone --nproc-per-node=2 fine_tuning.py

First a convolutional body learns the digits 0 to 4. Then it is frozen, and a new head
learns all ten digits. Every batch has new noise, so the features cannot be computed
once and stored: each gradient runs the body. A Hessian-vector product runs the head
alone, because the graph starts there. That makes Newton steps cheap.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2

__all__ = [
    "BODY_STEPS",
    "HEADS",
    "HEAD_ON_FROZEN_BODY",
    "add_noise",
    "evaluate",
    "make_model",
    "trained_body",
]

BODY_CLASSES = 5  # the body learns the digits 0 to 4
BODY_STEPS = 200
FEATURES = 256
NOISE = 0.1  # standard deviation; pixels have a standard deviation of 1
HEADS = ("linear", "two-layer")
# We take many eigenpairs: a product costs a small share of a gradient.
HEAD_ON_FROZEN_BODY: dict[str, Any] = {
    "num_largest": 70,
    "lanczos_iterations": 100,
    "warmup_steps": 0,
    "newton_scale": 0.5,
    "subspace_momentum": 0.0,
}


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits: training images and labels, test images and labels.

    The images, (N, 64), are standardized by the mean and standard deviation of the
    training pixels.
    """
    images, labels = load_digits(return_X_y=True)
    arrays = train_test_split(
        images, labels, test_size=360, random_state=0, stratify=labels
    )
    x_train, x_test, y_train, y_test = (torch.from_numpy(array) for array in arrays)
    mean = x_train.mean()
    std = x_train.std(correction=0)
    x_train = ((x_train - mean) / std).float()
    x_test = ((x_test - mean) / std).float()
    return x_train, y_train, x_test, y_test


def shuffled_batches(
    count: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
) -> Iterator[Tensor]:
    """Yield this rank's part of each batch of indices, in a new order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    share = batch_size // world_size
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch_size + 1, batch_size):
            yield order[start + rank * share : start + (rank + 1) * share]


def make_body() -> nn.Sequential:
    """Make four convolutions, from (N, 64) to (N, 256)."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )


def make_head(kind: str) -> nn.Sequential:
    """Make one linear layer, or two, from 256 features to ten classes."""
    if kind == "linear":
        return nn.Sequential(nn.Linear(FEATURES, 10))
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 10))


def add_noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images with new noise in each pixel."""
    return images + NOISE * torch.randn(images.shape, generator=generator)


@cache
def trained_body(steps: int = BODY_STEPS) -> nn.Sequential:
    """Return the frozen body, trained on the digits 0 to 4.

    It is the same in each process.
    """
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(1000)
        net = nn.Sequential(make_body(), nn.Linear(FEATURES, BODY_CLASSES))
        generator = torch.Generator().manual_seed(1000)
        x_train, y_train, _, _ = load_data()
        chosen = y_train < BODY_CLASSES
        images = x_train[chosen]
        labels = y_train[chosen]
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        batches = shuffled_batches(len(images), 64, seed=1000)
        for _ in range(steps):
            indices = next(batches)
            optimizer.zero_grad()
            logits = net(add_noise(images[indices], generator))
            cross_entropy(logits, labels[indices]).backward()
            optimizer.step()
    body = net[0]
    assert isinstance(body, nn.Sequential)
    return body.requires_grad_(False)


def make_model(head: str, body_steps: int = BODY_STEPS) -> nn.Sequential:
    """Return the frozen body with a new head."""
    return nn.Sequential(trained_body(body_steps), make_head(head))


@torch.no_grad()
def evaluate(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the loss and the accuracy."""
    logits = net(images)
    accuracy = (logits.argmax(dim=1) == labels).float().mean()
    return float(cross_entropy(logits, labels)), float(accuracy)


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    images, labels, test_images, test_labels = load_data()
    torch.manual_seed(0)
    net = make_model(args.head, args.body_steps)
    model: nn.Module = net
    if world_size > 1:
        model = DistributedDataParallel(net)
    noise = torch.Generator().manual_seed(rank)

    def loss_of(network: nn.Module, indices: Tensor) -> Tensor:
        logits = network(add_noise(images[indices], noise))
        return cross_entropy(logits, labels[indices])

    def draw(batch_size: int, seed: int) -> Iterator[Tensor]:
        return shuffled_batches(len(images), batch_size, seed, rank, world_size)

    optimizer: torch.optim.Optimizer
    if args.optimizer == "dho2":
        optimizer = DHO2(
            model, lr=args.lr, base=torch.optim.Adam, **HEAD_ON_FROZEN_BODY
        )
        curvature_batches = draw(2 * args.batch_size, seed=1)
        optimizer.curvature_closure = lambda: loss_of(net, next(curvature_batches))
    else:
        head_params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(head_params, lr=args.lr)

    seconds = 0.0
    batches = draw(args.batch_size, seed=0)
    for step in range(1, args.steps + 1):
        indices = next(batches)
        start = time.process_time()
        optimizer.zero_grad()
        loss_of(model, indices).backward()
        optimizer.step()
        seconds += time.process_time() - start
        if rank == 0 and (step % 25 == 0 or step == args.steps):
            loss, _ = evaluate(net, images, labels)
            _, accuracy = evaluate(net, test_images, test_labels)
            print(
                f"step {step:4}  {seconds:5.2f} s  training loss {loss:.4f}  "
                f"test accuracy {accuracy:.1%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a new head on a frozen body.")
    parser.add_argument("--optimizer", choices=["dho2", "adam"], default="dho2")
    parser.add_argument("--head", choices=HEADS, default="linear")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--body-steps", type=int, default=BODY_STEPS)
    parser.add_argument(
        "--batch-size", type=int, default=256, help="of all processes together"
    )
    args = parser.parse_args()
    rank = 0
    world_size = 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group()
        rank = dist.get_rank()
        world_size = dist.get_world_size()

    # DistributedDataParallel, local to `train`, must not outlive the process group.
    train(args, rank, world_size)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
