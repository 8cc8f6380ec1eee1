"""Train a small convolutional network on the digits, on one process or on several.

python examples/train_digits.py
torchrun --standalone --nproc-per-node=2 examples/train_digits.py --optimizer sgd
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from digits import batches, conv_net, load_split
from second_order import DHO2, DPKFAC, KAISA


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    net = conv_net()
    model: nn.Module = net
    if world_size > 1:
        model = DistributedDataParallel(model)

    data = load_split()
    loss_function = nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    elif args.optimizer == "dpkfac":
        optimizer = DPKFAC(model, lr=args.lr, momentum=0.9)
    elif args.optimizer == "dho2":
        share = slice(rank, 256, world_size)  # this process's part of a fixed batch of 256
        images, labels = data.train_images[share], data.train_labels[share]
        optimizer = DHO2(model, lr=args.lr, momentum=0.9, curvature_interval=50)
        optimizer.curvature_closure = lambda: loss_function(net(images), labels)
    else:
        optimizer = KAISA(model, lr=args.lr, momentum=0.9)

    parts = batches(
        len(data.train_images), args.batch_size, seed=0, rank=rank, world_size=world_size
    )
    for step, indices in zip(range(1, args.steps + 1), parts, strict=False):
        optimizer.zero_grad()
        loss = loss_function(model(data.train_images[indices]), data.train_labels[indices])
        loss.backward()
        optimizer.step()

        if rank == 0 and step % 20 == 0:
            net.eval()  # the network itself: a forward of DDP is everybody's
            with torch.no_grad():
                guesses = net(data.test_images).argmax(dim=1)
            net.train()
            accuracy = (guesses == data.test_labels).float().mean()
            print(f"step {step:3}  loss {loss:.4f}  test accuracy {accuracy:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on the digits.")
    parser.add_argument("--optimizer", choices=["sgd", "kaisa", "dpkfac", "dho2"], default="kaisa")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    args = parser.parse_args()

    rank, world_size = 0, 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()

    train(args, rank, world_size)  # a function: DistributedDataParallel must not outlive its group
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
