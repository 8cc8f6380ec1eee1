"""Ranks with different jobs in one script: workers train, accelerators compute their curvature.

    torchrun --standalone --nproc-per-node=2 examples/roles.py
    torchrun --standalone --nproc-per-node=3 examples/roles.py --accelerators 1 --usual-loop

Every rank runs the same script and makes the same optimizer. What differs is what follows: an
accelerator calls ``serve()`` and returns from it when the workers are done. With --usual-loop all
ranks run the training loop instead, and an accelerator computes inside ``step()``.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from digits import batches, load_split, mlp
from second_order import MRDHO2

BATCH = 64
CURVATURE_BATCH = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerators", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--final-update", choices=("guarded", "paper", "additive"))
    parser.add_argument("--usual-loop", action="store_true", help="no serve(): step() everywhere")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, model = load_split(), mlp()
    epoch_steps = len(data.train_images) // BATCH

    def loss_of(indices: Tensor) -> Tensor:
        return cross_entropy(model(data.train_images[indices]), data.train_labels[indices])

    some = torch.arange(CURVATURE_BATCH)
    optimizer = MRDHO2(
        model,
        lr=args.lr,
        momentum=0.9,
        accelerators=args.accelerators,
        epoch_steps=epoch_steps,
        final_update=args.final_update or "guarded",
        # For accelerators in the usual loop; and for all, if there are no accelerators.
        curvature_closure=lambda: loss_of(some),
    )
    # However the loop ends, leaving this block tells the other side that it has.
    with optimizer:
        if optimizer.role == "accelerator" and not args.usual_loop:
            count = optimizer.serve([some], loss_of)
            print(f"rank {dist.get_rank()}: eigenpairs of {count} epochs")
        else:
            # An accelerator in the usual loop draws batches too, and makes no use of them.
            group = optimizer.worker_group  # on an accelerator, that of the accelerators
            part, parts = dist.get_rank(group), dist.get_world_size(group)
            start = time.perf_counter()
            for step, indices in zip(
                range(args.epochs * epoch_steps),
                batches(len(data.train_images), BATCH, seed=0, rank=part, world_size=parts),
                strict=False,
            ):
                optimizer.zero_grad()
                loss = loss_of(indices)
                loss.backward()
                optimizer.step()
                if optimizer.epochs and (step + 1) % epoch_steps == 0 and dist.get_rank() == 0:
                    report = optimizer.epochs[-1]
                    done = "final update" if report.applied else report.reason
                    print(
                        f"epoch {report.epoch}: loss {loss.item():.4f}, waited "
                        f"{report.waited:.3f} s, {done}"
                    )
            if optimizer.role == "worker" and dist.get_rank() == 0:
                with torch.no_grad():
                    right = model(data.test_images).argmax(1) == data.test_labels
                seconds = time.perf_counter() - start
                print(f"test accuracy {right.float().mean():.1%} after {seconds:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
