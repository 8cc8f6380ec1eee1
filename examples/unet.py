"""Train a small U-Net to remove noise from photographs.

    python unet.py
    torchrun --standalone --nproc-per-node=2 unet.py --optimizer adam

scikit-learn has two photographs. The U-Net trains on one and is tested on the other.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss, relu
from torch.nn.parallel import DistributedDataParallel

from second_order import KAISA

NOISE = 0.2  # standard deviation; pixels are between 0 and 1


class DoubleConv(nn.Module):
    """Two convolutions that keep the image size."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.second(relu(self.first(x))))


class UNet(nn.Module):
    """A U-Net of two levels. It predicts the noise, and subtracts it from the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = DoubleConv(3, width)
        self.down1 = DoubleConv(width, 2 * width)
        self.down2 = DoubleConv(2 * width, 4 * width)
        self.up1 = DoubleConv(6 * width, 2 * width)
        self.up2 = DoubleConv(3 * width, width)
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        full = self.enter(images)
        half = self.down1(nn.functional.max_pool2d(full, 2))
        quarter = self.down2(nn.functional.max_pool2d(half, 2))
        half = self.up1(torch.cat([half, interpolate(quarter, scale_factor=2.0)], 1))
        full = self.up2(torch.cat([full, interpolate(half, scale_factor=2.0)], 1))
        result: Tensor = images - self.leave(full)
        return result


def photograph(name: str) -> Tensor:
    """Return a photograph of shape (3, 427, 640), with pixels between 0 and 1."""
    pixels = torch.from_numpy(load_sample_image(name).copy())
    return pixels.permute(2, 0, 1).float() / 255


def random_crops(
    image: Tensor, count: int, size: int, generator: torch.Generator
) -> Tensor:
    """Cut random squares out of an image; returns (count, 3, size, size)."""
    _, height, width = image.shape
    tops = torch.randint(height - size + 1, (count,), generator=generator).tolist()
    lefts = torch.randint(width - size + 1, (count,), generator=generator).tolist()
    crops = [
        image[:, top : top + size, left : left + size]
        for top, left in zip(tops, lefts, strict=True)
    ]
    return torch.stack(crops)


def add_noise(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + NOISE * torch.randn(images.shape, generator=generator)


def decibels(images: Tensor, clean: Tensor) -> float:
    """Return the peak signal-to-noise ratio in decibels. Higher is better."""
    return -10 * math.log10(float(mse_loss(images, clean)))


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    net = UNet(args.width)
    model: nn.Module = net
    if world_size > 1:
        model = DistributedDataParallel(net)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "kaisa":
        optimizer = KAISA(model.parameters(), lr=args.lr, base=torch.optim.Adam)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    # Noisy crops of the second photograph are the test set.
    test_generator = torch.Generator().manual_seed(1)
    clean = random_crops(photograph("flower.jpg"), 16, 64, test_generator)
    noisy = add_noise(clean, test_generator)

    train_image = photograph("china.jpg")
    count = args.batch_size // world_size
    generator = torch.Generator().manual_seed(2 + rank)
    if rank == 0:
        print(f"noisy images: {decibels(noisy, clean):.2f} dB")
    for step in range(1, args.steps + 1):
        images = random_crops(train_image, count, args.size, generator)
        optimizer.zero_grad()
        loss = mse_loss(model(add_noise(images, generator)), images)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 50 == 0 or step == args.steps):
            with torch.no_grad():
                ratio = decibels(net(noisy), clean)
            print(f"step {step:4}  loss {loss:.5f}  test images {ratio:.2f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small U-Net to remove noise.")
    parser.add_argument("--optimizer", choices=["kaisa", "adam"], default="kaisa")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--batch-size", type=int, default=16, help="of all processes together"
    )
    parser.add_argument(
        "--size", type=int, default=32, help="of a crop, a multiple of 4"
    )
    parser.add_argument("--width", type=int, default=8)
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
