"""What an optimizer says of itself while it trains: to TensorBoard if it is there, and as a table.

    python examples/log_statistics.py
    tensorboard --logdir runs

TensorBoard is no dependency: pip install tensorboard. Without it the table is all there is.
"""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

import torch
from torch import nn

from digits import batches, load_split, mlp
from second_order import KAISA

SHOWN = (
    "step_length",
    "damping/max",
    "drift/cosine",
    "age/inverses",
)


def writer_for(folder: str) -> Any:
    """A SummaryWriter, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError:
        return None
    return SummaryWriter(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20, help="steps between two readings")
    parser.add_argument("--logdir", default="runs/digits")
    args = parser.parse_args()
    torch.manual_seed(0)
    data, model = load_split(), mlp()
    writer = writer_for(args.logdir)
    if writer is None:
        print("no TensorBoard here: pip install tensorboard writes curves to", args.logdir)
    print("step   loss ", *(f"{name:>14}" for name in SHOWN), sep="")
    with KAISA(model, lr=0.1, momentum=0.9, inv_update_steps=10) as optimizer:
        order = batches(len(data.train_images), 128, seed=0)
        for step, index in enumerate(islice(order, args.steps)):
            optimizer.zero_grad()
            logits = model(data.train_images[index])
            loss = nn.functional.cross_entropy(logits, data.train_labels[index])
            loss.backward()
            optimizer.step()
            if step % args.every:
                continue
            found = optimizer.statistics()  # waits for the device: not at every step on CUDA
            if writer is not None:
                writer.add_scalar("loss", float(loss.detach()), step)
                for name, value in found.items():
                    writer.add_scalar(f"second_order/{name}", value, step)
            numbers = "".join(f"{found[name]:14.4g}" for name in SHOWN)
            print(f"{step:4}  {loss.detach():5.3f} {numbers}")
    if writer is not None:
        writer.close()
        print("curves:", args.logdir)


if __name__ == "__main__":
    main()
