"""Train a residual network on CIFAR-10, or on generated images if there is no CIFAR-10.

    python resnet.py
    python resnet.py --data cifar-10-batches-bin --depth 3 --width 16 --steps 2000
    torchrun --standalone --nproc-per-node=2 resnet.py --optimizer sgd

``--data`` is the unpacked folder of CIFAR-10's binary version
(cs.toronto.edu/~kriz/cifar.html). Without it the script draws images of ten classes:
noisy, shifted copies of ten random patterns.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad, relu
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from second_order import KAISA

# Images (N, 3, 32, 32) as float32, and labels (N,) as int64.
Images = tuple[Tensor, Tensor]

CIFAR10_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
CIFAR10_STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
CIFAR10_RECORD = 1 + 3 * 32 * 32  # bytes: a label and the red, green and blue pixels


# --------------------------------------------------------------------------------- data


def read_cifar10(folder: Path, *, train: bool) -> Images:
    """Read CIFAR-10's binary files: 50,000 training images or 10,000 test images.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is incomplete.
    """
    names = ["test_batch.bin"]
    if train:
        names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    records = []
    for name in names:
        content = bytearray((folder / name).read_bytes())
        if not content or len(content) % CIFAR10_RECORD:
            raise ValueError(
                f"{folder / name} has {len(content)} bytes, which is not a multiple of "
                f"{CIFAR10_RECORD}; unpack the binary version of CIFAR-10 again"
            )
        numbers = torch.frombuffer(content, dtype=torch.uint8)
        records.append(numbers.view(-1, CIFAR10_RECORD))
    data = torch.cat(records)
    images = data[:, 1:].view(-1, 3, 32, 32).float() / 255
    return (images - CIFAR10_MEAN) / CIFAR10_STD, data[:, 0].long()


def generate_images(count: int, seed: int) -> Images:
    """Draw images of ten classes: shifted, noisy copies of the class's pattern."""
    patterns = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    patterns = interpolate(patterns, size=(32, 32), mode="bilinear")
    generator = torch.Generator().manual_seed(1 + seed)
    labels = torch.randint(10, (count,), generator=generator)
    shifts = torch.randint(-6, 7, (count, 2), generator=generator)
    copies = []
    for label, shift in zip(labels.tolist(), shifts.tolist(), strict=True):
        copies.append(patterns[label].roll(shift, dims=(1, 2)))
    images = torch.stack(copies)
    return images + 1.5 * torch.randn(images.shape, generator=generator), labels


def augment(images: Tensor) -> Tensor:
    """Mirror half of the images, and shift the batch by up to four pixels."""
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    images = torch.where(mirrored.to(images.device), images.flip(-1), images)
    top, left = torch.randint(9, (2,)).tolist()
    return pad(images, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]


# -------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Two convolutions, added to the block's input or to a projection of it."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.skip = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return relu(y + self.skip(x))


def make_resnet(width: int, depth: int) -> nn.Sequential:
    """Make three stages of ``depth`` blocks. Width 16 and depth 3 make ResNet-20."""
    layers = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    width_in = width
    for stage in range(3):
        stage_width = width * 2**stage
        for i in range(depth):
            stride = 2 if stage > 0 and i == 0 else 1
            layers.append(Block(width_in, stage_width, stride))
            width_in = stage_width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 10)]
    return nn.Sequential(*layers)


# ----------------------------------------------------------------------------- training


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Make the optimizer. Weights decay; biases and the gains of batch norm do not."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 5e-4},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    return KAISA(groups, lr=lr, momentum=0.9)


@torch.no_grad()
def accuracy(model: nn.Module, data: Images, device: torch.device) -> float:
    model.eval()
    correct = 0
    for images, labels in zip(data[0].split(500), data[1].split(500), strict=True):
        predictions = model(images.to(device)).argmax(dim=1)
        correct += int((predictions == labels.to(device)).sum())
    model.train()
    return correct / len(data[0])


def train(
    args: argparse.Namespace, rank: int, world_size: int, device: torch.device
) -> None:
    # Data.
    if args.data:
        train_images, train_labels = read_cifar10(args.data, train=True)
        test_set = read_cifar10(args.data, train=False)
    else:
        train_images, train_labels = generate_images(4000, seed=0)
        test_set = generate_images(1000, seed=1)

    # Model, optimizer and schedule.
    torch.manual_seed(0)
    model = make_resnet(args.width, args.depth).to(device)
    wrapped: nn.Module = model
    if world_size > 1:
        wrapped = DistributedDataParallel(model)
    optimizer = make_optimizer(args.optimizer, wrapped, args.lr)
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps)

    # Every process draws its own images.
    count = args.batch_size // world_size
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        indices = torch.randint(len(train_images), (count,), generator=generator)
        images = augment(train_images[indices].to(device))
        labels = train_labels[indices].to(device)
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step % 50 == 0 or step == args.steps):
            test_accuracy = accuracy(model, test_set, device)
            print(f"step {step:4}  loss {loss:.4f}  test accuracy {test_accuracy:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a residual network on CIFAR-10."
    )
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10's binary version")
    parser.add_argument("--optimizer", choices=["kaisa", "sgd"], default="kaisa")
    parser.add_argument(
        "--lr", type=float, default=0.1, help="the peak of the schedule"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="of all processes together"
    )
    parser.add_argument(
        "--width", type=int, default=8, help="channels of the first stage"
    )
    parser.add_argument("--depth", type=int, default=1, help="blocks in each stage")
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
