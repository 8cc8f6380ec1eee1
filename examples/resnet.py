"""Train a small residual network on CIFAR-10, or on the digits where there is no CIFAR.

python examples/resnet.py
python examples/resnet.py --cifar cifar-10-batches-bin --steps 2000 --batch-size 128
torchrun --standalone --nproc-per-node=2 examples/resnet.py --optimizer sgd

CIFAR-10 is not downloaded: --cifar names the unpacked folder of its binary version.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.optim.lr_scheduler import OneCycleLR

from digits import batches, load_split
from groups import decayed_groups
from image_files import Cifar10
from processes import processes, spread
from second_order import KAISA


class Block(nn.Module):
    """Two convolutions, added to their input, or to a projection of it."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        same = stride == 1 and width_in == width
        self.skip = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.skip(x))


def resnet(channels: int, width: int, depth: int) -> nn.Sequential:
    """Three stages of `depth` blocks; with width 16 and depth 3 it is ResNet-20."""
    widths = [width, width, 2 * width, 4 * width]
    blocks = [
        Block(widths[stage] if first else widths[stage + 1], widths[stage + 1], stride)
        for stage in range(3)
        for first in [True] + [False] * (depth - 1)
        for stride in [2 if first and stage > 0 else 1]
    ]
    stem = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)]
    return nn.Sequential(*stem, *blocks, *head)


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The digits, as CIFAR's images are handed out."""

    def __init__(self, *, train: bool) -> None:
        data = load_split()
        images = data.train_images if train else data.test_images
        self.images = images.unflatten(1, (1, 8, 8))
        self.labels = data.train_labels if train else data.test_labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def batch_of(data: Cifar10 | Digits, indices: list[int]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*(data[i] for i in indices), strict=True)
    return torch.stack(images), torch.tensor(labels)


@torch.no_grad()
def accuracy(net: nn.Module, data: Cifar10 | Digits) -> float:
    net.eval()
    right = 0
    for start in range(0, len(data), 500):
        images, labels = batch_of(data, list(range(start, min(start + 500, len(data)))))
        right += int((net(images).argmax(dim=1) == labels).sum())
    net.train()
    return right / len(data)


def train_on(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    train: Cifar10 | Digits = Cifar10(args.cifar, train=True) if args.cifar else Digits(train=True)
    test: Cifar10 | Digits = Cifar10(args.cifar, train=False) if args.cifar else Digits(train=False)
    net = resnet(train[0][0].shape[0], args.width, args.depth)
    model = spread(net, world_size)
    groups = decayed_groups(net, weight_decay=5e-4)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "kaisa":
        optimizer = KAISA(groups, lr=args.lr, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps)

    parts = batches(len(train), args.batch_size, seed=0, rank=rank, world_size=world_size)
    for step, indices in zip(range(1, args.steps + 1), parts, strict=False):
        images, labels = batch_of(train, indices.tolist())
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step % 50 == 0 or step == args.steps):
            print(f"step {step:4}  loss {loss:.4f}  test accuracy {accuracy(net, test):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small residual network.")
    parser.add_argument("--cifar", help="folder of CIFAR-10's binary version; else the digits")
    parser.add_argument("--optimizer", choices=["kaisa", "sgd"], default="kaisa")
    parser.add_argument("--lr", type=float, default=0.1, help="the highest of the schedule")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--depth", type=int, default=1, help="blocks of a stage")
    args = parser.parse_args()

    with processes() as (rank, world_size):
        train_on(args, rank, world_size)


if __name__ == "__main__":
    main()
