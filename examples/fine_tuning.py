"""Fine-tuning: a new head on a frozen body, by DHO2 over Adam, or by Adam alone.

python examples/fine_tuning.py
python examples/fine_tuning.py --head two-layer --optimizer adam
torchrun --standalone --nproc-per-node=2 examples/fine_tuning.py

A convolutional body learns the digits 0 to 4, on the spot. Then it is frozen, and a head learns all
ten. Every batch has new noise, so the body's features cannot be computed once and kept: each
gradient runs the whole body. A Hessian product runs the head alone, for the graph begins there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from digits import batches, load_split
from processes import processes, spread
from second_order import DHO2

__all__ = [
    "BODY_STEPS",
    "HEADS",
    "HEAD_ON_FROZEN_BODY",
    "fine_tuned",
    "judged",
    "known_body",
    "noisy",
]

KNOWN = 5  # classes that the body learns
BODY_STEPS = 200
FEATURES = 256
NOISE = 0.1  # standard deviation; that of the pixels is 1
HEADS = ("linear", "two-layer")
# A product costs a small share of a gradient, so there are many pairs, and the steps are long.
HEAD_ON_FROZEN_BODY: dict[str, Any] = {
    "largest": 70,
    "lanczos_iterations": 100,
    "warmup_steps": 0,
    "newton_scale": 0.5,
    "subspace_momentum": 0.0,
}


def body() -> nn.Sequential:
    """Four convolutions; from (N, 64) to (N, 256)."""
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


def head(kind: str) -> nn.Sequential:
    """One linear layer, or two with 32 units between them; from 256 features to ten classes."""
    if kind == "linear":
        return nn.Sequential(nn.Linear(FEATURES, 10))
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 10))


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images with new noise in each pixel."""
    return images + NOISE * torch.randn(images.shape, generator=generator)


@cache
def known_body(steps: int = BODY_STEPS) -> nn.Sequential:
    """The body, trained on the digits 0 to 4, frozen; the same in each process."""
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(1000)
        net = nn.Sequential(body(), nn.Linear(FEATURES, KNOWN))
        generator = torch.Generator().manual_seed(1000)
        data = load_split()
        known = data.train_labels < KNOWN
        images, labels = data.train_images[known], data.train_labels[known]
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _, indices in zip(range(steps), batches(len(images), 64, seed=1000), strict=False):
            optimizer.zero_grad()
            cross_entropy(net(noisy(images[indices], generator)), labels[indices]).backward()
            optimizer.step()
    frozen = net[0]
    assert isinstance(frozen, nn.Sequential)
    return frozen.requires_grad_(False)


def fine_tuned(kind: str, body_steps: int = BODY_STEPS) -> nn.Sequential:
    """The frozen body, and a new head, from torch's random numbers."""
    return nn.Sequential(known_body(body_steps), head(kind))


@torch.no_grad()
def judged(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    logits = net(images)
    right = (logits.argmax(dim=1) == labels).float().mean()
    return float(cross_entropy(logits, labels)), float(right)


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    data = load_split()
    images, labels = data.train_images, data.train_labels
    torch.manual_seed(0)
    net = fine_tuned(args.head, args.body_steps)
    model = spread(net, world_size)
    noise = torch.Generator().manual_seed(rank)

    def loss_of(network: nn.Module, indices: Tensor) -> Tensor:
        return cross_entropy(network(noisy(images[indices], noise)), labels[indices])

    def parts(size: int, seed: int) -> Iterator[Tensor]:
        return batches(len(images), size, seed=seed, rank=rank, world_size=world_size)

    optimizer: torch.optim.Optimizer
    if args.optimizer == "dho2":
        optimizer = DHO2(model, lr=args.lr, base=torch.optim.Adam, **HEAD_ON_FROZEN_BODY)
        curved = parts(2 * args.batch_size, seed=1)
        optimizer.curvature_closure = lambda: loss_of(net, next(curved))
    else:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=args.lr)

    seconds = 0.0
    for step, indices in zip(range(1, args.steps + 1), parts(args.batch_size, 0), strict=False):
        start = time.process_time()
        optimizer.zero_grad()
        loss_of(model, indices).backward()
        optimizer.step()
        seconds += time.process_time() - start
        if rank == 0 and (step % 25 == 0 or step == args.steps):
            loss, _ = judged(net, images, labels)
            _, accuracy = judged(net, data.test_images, data.test_labels)
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
    parser.add_argument("--batch-size", type=int, default=256, help="of all processes together")
    args = parser.parse_args()
    with processes() as (rank, world_size):
        train(args, rank, world_size)


if __name__ == "__main__":
    main()
