"""Log the metrics of KAISA while it trains, to TensorBoard and as a table.

    pip install tensorboard
    python log_metrics.py
    tensorboard --logdir runs

Without TensorBoard the script prints the table alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from second_order import KAISA

SHOWN = (
    "step_scale",
    "damping/max",
    "drift/cosine",
    "age/inverses",
)


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


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def make_writer(folder: str) -> Any:
    """Return a SummaryWriter, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError:
        return None
    return SummaryWriter(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Log the metrics of KAISA.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20, help="steps between two rows")
    parser.add_argument("--logdir", default="runs/digits")
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels, _, _ = load_data()
    model = make_model()
    writer = make_writer(args.logdir)
    if writer is None:
        print(
            "TensorBoard is not installed: pip install tensorboard to log to",
            args.logdir,
        )
    print("step   loss ", *(f"{name:>14}" for name in SHOWN), sep="")
    with KAISA(model, lr=0.1, momentum=0.9, inv_update_steps=10) as optimizer:
        for step in range(args.steps):
            batch = torch.randint(len(images), (128,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            if step % args.every:
                continue
            # This synchronizes with the device, so do not call it every step.
            metrics = optimizer.metrics()
            if writer is not None:
                writer.add_scalar("loss", float(loss.detach()), step)
                for name, value in metrics.items():
                    writer.add_scalar(f"second_order/{name}", value, step)
            columns = "".join(f"{metrics[name]:14.4g}" for name in SHOWN)
            print(f"{step:4}  {loss.detach():5.3f} {columns}")
    if writer is not None:
        writer.close()
        print("curves:", args.logdir)


if __name__ == "__main__":
    main()
