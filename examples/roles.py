"""Ranks with different jobs in one script: workers train, helpers compute curvature for them.

    torchrun --standalone --nproc-per-node=2 examples/roles.py
    torchrun --standalone --nproc-per-node=2 examples/roles.py --optimizer distkfac
    torchrun --standalone --nproc-per-node=3 examples/roles.py --helpers 1 --usual-loop

Every rank runs the same script and makes the same optimizer. What differs is what follows: a helper
calls ``serve()`` and returns from it when the workers are done. Helpers of MRDHO2 compute
eigenpairs, once an epoch; those of DistKFAC statistics, all the time. With --usual-loop all ranks
run the training loop instead, and a helper does its work inside ``step()``.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from digits import batches, load_split, mlp
from second_order import MRDHO2, DistKFAC

BATCH = 64
SOME = torch.arange(256)  # images that eigenpairs are of


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=("mrdho2", "distkfac"), default="mrdho2")
    parser.add_argument("--helpers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--final-update", choices=("guarded", "paper"))
    parser.add_argument("--usual-loop", action="store_true", help="no serve(): step() everywhere")
    return parser.parse_args()


def make_optimizer(
    args: argparse.Namespace, model: nn.Module, loss_of: Callable[[Tensor], Tensor], steps: int
) -> MRDHO2 | DistKFAC:
    if args.optimizer == "distkfac":
        return DistKFAC(model, lr=args.lr, momentum=0.9, stats_workers=args.helpers)
    return MRDHO2(
        model,
        lr=args.lr,
        momentum=0.9,
        accelerators=args.helpers,
        epoch_steps=steps,
        final_update=args.final_update or "guarded",
        # For accelerators in the usual loop; and for all, if there are no accelerators.
        curvature_closure=lambda: loss_of(SOME),
    )


def news(optimizer: MRDHO2 | DistKFAC) -> str:
    """What there is to say of the curvature at the end of an epoch."""
    if isinstance(optimizer, DistKFAC):
        return f"inverses at most {max(optimizer.staleness.values())} steps old"
    if not optimizer.epochs:
        return "nobody helps"
    report = optimizer.epochs[-1]
    done = "final update" if report.applied else report.reason
    return f"waited {report.waited:.3f} s, {done}"


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, model = load_split(), mlp()
    epoch_steps = len(data.train_images) // BATCH

    def loss_of(indices: Tensor) -> Tensor:
        return cross_entropy(model(data.train_images[indices]), data.train_labels[indices])

    optimizer = make_optimizer(args, model, loss_of, epoch_steps)
    helps = optimizer.role != "worker"
    group = optimizer.worker_group  # on a helper, that of the helpers
    mine = batches(
        len(data.train_images),
        BATCH,
        seed=int(helps),
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
    )
    # However the loop ends, leaving this block tells the other side that it has.
    with optimizer:
        if helps and not args.usual_loop:
            if optimizer.role == "accelerator":
                done = f"eigenpairs of {optimizer.serve([SOME], loss_of)} epochs"
            else:
                done = f"statistics of {optimizer.serve(mine, loss_of)} batches"
            print(f"rank {dist.get_rank()}: {done}")
        else:
            start = time.perf_counter()
            for step, indices in zip(range(1, args.epochs * epoch_steps + 1), mine, strict=False):
                optimizer.zero_grad()
                loss = loss_of(indices)
                loss.backward()
                optimizer.step()
                if step % epoch_steps == 0 and dist.get_rank() == 0:
                    epoch = step // epoch_steps
                    print(f"epoch {epoch}: loss {loss.item():.4f}, {news(optimizer)}")
            if dist.get_rank() == 0:
                with torch.no_grad():
                    right = model(data.test_images).argmax(1) == data.test_labels
                seconds = time.perf_counter() - start
                print(f"test accuracy {right.float().mean():.1%} after {seconds:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
