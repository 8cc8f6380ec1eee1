"""Train a small U-Net to take noise out of two photographs that scikit-learn carries.

python examples/unet.py
torchrun --standalone --nproc-per-node=2 examples/unet.py --optimizer adam

It trains on one photograph and is judged on the other, which it has never seen.
"""

import argparse
import math

import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss, relu

from processes import processes, spread
from second_order import KAISA

NOISE = 0.2  # standard deviation, of pixels in 0..1


class Double(nn.Module):
    """Two convolutions that keep the size."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.second(relu(self.first(x))))


class UNet(nn.Module):
    """Down to a quarter of the size and up again, with what was seen on the way down.

    It predicts the noise, which is taken off the image.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = Double(3, width)
        self.down1, self.down2 = Double(width, 2 * width), Double(2 * width, 4 * width)
        self.up1, self.up2 = Double(6 * width, 2 * width), Double(3 * width, width)
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        whole = self.enter(images)
        half = self.down1(nn.functional.max_pool2d(whole, 2))
        quarter = self.down2(nn.functional.max_pool2d(half, 2))
        half = self.up1(torch.cat([half, interpolate(quarter, scale_factor=2.0)], 1))
        whole = self.up2(torch.cat([whole, interpolate(half, scale_factor=2.0)], 1))
        result: Tensor = images - self.leave(whole)
        return result


def photograph(name: str) -> Tensor:
    """(3, 427, 640), in 0..1."""
    pixels = torch.from_numpy(load_sample_image(name).copy())
    return pixels.permute(2, 0, 1).float() / 255


def crops(image: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor:
    """(count, 3, size, size), from places drawn at random."""
    _, height, width = image.shape
    tops = torch.randint(height - size + 1, (count,), generator=generator).tolist()
    lefts = torch.randint(width - size + 1, (count,), generator=generator).tolist()
    return torch.stack(
        [image[:, t : t + size, s : s + size] for t, s in zip(tops, lefts, strict=True)]
    )


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + NOISE * torch.randn(images.shape, generator=generator)


def decibels(images: Tensor, clean: Tensor) -> float:
    """The peak signal-to-noise ratio: higher is better."""
    return -10 * math.log10(float(mse_loss(images, clean)))


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    net = UNet(args.width)
    model = spread(net, world_size)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "kaisa":
        optimizer = KAISA(model, lr=args.lr, base=torch.optim.Adam)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    seen, unseen = photograph("china.jpg"), photograph("flower.jpg")
    judge = torch.Generator().manual_seed(1)
    clean = crops(unseen, 16, 64, judge)
    spoiled = noisy(clean, judge)
    generator = torch.Generator().manual_seed(2 + rank)
    if rank == 0:
        print(f"noisy images: {decibels(spoiled, clean):.2f} dB")
    for step in range(1, args.steps + 1):
        images = crops(seen, args.batch_size // world_size, args.size, generator)
        optimizer.zero_grad()
        loss = mse_loss(model(noisy(images, generator)), images)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 50 == 0 or step == args.steps):
            with torch.no_grad():
                reached = decibels(net(spoiled), clean)
            print(f"step {step:4}  loss {loss:.5f}  unseen images {reached:.2f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small U-Net to take noise away.")
    parser.add_argument("--optimizer", choices=["kaisa", "adam"], default="kaisa")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="of all processes together")
    parser.add_argument("--size", type=int, default=32, help="of a crop, a multiple of 4")
    parser.add_argument("--width", type=int, default=8)
    args = parser.parse_args()

    with processes() as (rank, world_size):
        train(args, rank, world_size)


if __name__ == "__main__":
    main()
