"""Train a small convolutional network on scikit-learn's digits, with KAISA or SGD.

    python train_digits.py
    python train_digits.py --optimizer sgd
    torchrun --standalone --nproc-per-node=2 train_digits.py

The script is PyTorch's usual training loop. Only the line that makes the optimizer
differs.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from second_order import DHO2, DPKFAC, KAISA


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set (1,437 images of 1 x 8 x 8) and the test set (360)."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(labels)
    train, test = train_test_split(
        range(len(images)), test_size=360, random_state=0, stratify=labels
    )
    train_set = TensorDataset(images[train], labels[train])
    test_set = TensorDataset(images[test], labels[test])
    return train_set, test_set


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_optimizer(
    name: str, model: nn.Module, lr: float, curvature_batch: tuple[Tensor, ...]
) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == "kaisa":
        return KAISA(model.parameters(), lr=lr, momentum=0.9)
    if name == "dpkfac":
        return DPKFAC(model.parameters(), lr=lr, momentum=0.9)

    # DHO2 computes eigenvectors of the Hessian of this loss, every 50 steps.
    images, labels = curvature_batch
    return DHO2(
        model.parameters(),
        lr=lr,
        momentum=0.9,
        curvature_interval=50,
        curvature_closure=lambda: cross_entropy(model(images), labels),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    predictions = model(images).argmax(dim=1)
    model.train()
    return float((predictions == labels).float().mean())


def train(
    args: argparse.Namespace, rank: int, world_size: int, device: torch.device
) -> None:
    # Data and model. Every process draws its own part of each shuffled epoch.
    torch.manual_seed(0)
    train_set, test_set = load_data()
    test_images, test_labels = (tensor.to(device) for tensor in test_set.tensors)
    model = make_model().to(device)
    wrapped = model
    if world_size > 1:
        wrapped = DistributedDataParallel(model)
    sampler: DistributedSampler[Any] = DistributedSampler(
        train_set, world_size, rank, drop_last=True
    )
    loader = DataLoader(
        train_set, args.batch_size // world_size, sampler=sampler, drop_last=True
    )

    # The optimizer.
    part = slice(rank, 256, world_size)
    curvature_batch = tuple(tensor[part].to(device) for tensor in train_set.tensors)
    optimizer = make_optimizer(args.optimizer, model, args.lr, curvature_batch)

    step = 0
    epoch = 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(wrapped(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and step % 20 == 0:
                test_accuracy = accuracy(model, test_images, test_labels)
                print(
                    f"step {step:3}  loss {loss:.4f}  test accuracy {test_accuracy:.1%}"
                )
            if step == args.steps:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on the digits.")
    parser.add_argument(
        "--optimizer", choices=["sgd", "kaisa", "dpkfac", "dho2"], default="kaisa"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="of all processes together"
    )
    args = parser.parse_args()

    rank = 0
    world_size = 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:  # started by torchrun
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        rank = dist.get_rank()
        world_size = dist.get_world_size()

    # DistributedDataParallel, local to `train`, must not outlive the process group.
    train(args, rank, world_size, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
