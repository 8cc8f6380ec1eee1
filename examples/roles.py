"""Give some ranks another job: workers train, and helpers compute curvature for them.

    torchrun --standalone --nproc-per-node=2 roles.py
    torchrun --standalone --nproc-per-node=2 roles.py --optimizer distkfac
    torchrun --standalone --nproc-per-node=3 roles.py --helpers 1 --usual-loop

Every rank runs this script and makes the same optimizer. A helper then calls
``serve()``, which returns when the workers are done. MRDHO2's helpers compute
eigenpairs once an epoch; DistKFAC's helpers compute statistics all the time. With
--usual-loop all ranks run the training loop, and a helper works inside ``step()``.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from second_order import MRDHO2, DistKFAC

BATCH = 64
CURVATURE_BATCH = torch.arange(256)  # the images whose Hessian has the eigenpairs


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


def shuffled_batches(
    count: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
) -> Iterator[Tensor]:
    """Yield this rank's part of each batch of indices, in a new order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    share = batch_size // world_size
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch_size + 1, batch_size):
            yield order[start + rank * share : start + (rank + 1) * share]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Workers train; helpers compute curvature."
    )
    parser.add_argument("--optimizer", choices=("mrdho2", "distkfac"), default="mrdho2")
    parser.add_argument("--helpers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--final-update", choices=("guarded", "paper"))
    parser.add_argument("--usual-loop", action="store_true", help="no serve()")
    return parser.parse_args()


def make_optimizer(
    args: argparse.Namespace,
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    steps: int,
) -> MRDHO2 | DistKFAC:
    if args.optimizer == "distkfac":
        return DistKFAC(model, lr=args.lr, momentum=0.9, stats_workers=args.helpers)
    return MRDHO2(
        model,
        lr=args.lr,
        momentum=0.9,
        helper_ranks=args.helpers,
        epoch_steps=steps,
        final_update=args.final_update or "guarded",
        # Helpers call it in the usual loop; workers call it in a run without helpers.
        curvature_closure=lambda: loss_of(CURVATURE_BATCH),
    )


def status(optimizer: MRDHO2 | DistKFAC) -> str:
    """Return a line about the curvature at the end of an epoch."""
    if isinstance(optimizer, DistKFAC):
        return f"inverses at most {max(optimizer.staleness.values())} steps old"
    if not optimizer.epochs:
        return "no helpers"
    report = optimizer.epochs[-1]
    outcome = report.reason
    if report.applied:
        outcome = "final update"
    return f"waited {report.waited:.3f} s, {outcome}"


def main() -> None:
    args = parse_arguments()
    dist.init_process_group()
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load_data()
    model = make_model()
    epoch_steps = len(images) // BATCH

    def loss_of(indices: Tensor) -> Tensor:
        return cross_entropy(model(images[indices]), labels[indices])

    optimizer = make_optimizer(args, model, loss_of, epoch_steps)
    is_helper = optimizer.role != "worker"
    group = optimizer.worker_group  # on a helper: the group of all helpers
    batches = shuffled_batches(
        len(images),
        BATCH,
        seed=int(is_helper),
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
    )
    # When a rank leaves this block, even by an exception, it notifies the others.
    with optimizer:
        if is_helper and not args.usual_loop:
            if optimizer.role == "accelerator":
                epochs = optimizer.serve([CURVATURE_BATCH], loss_of)
                print(f"rank {dist.get_rank()}: eigenpairs of {epochs} epochs")
            else:
                count = optimizer.serve(batches, loss_of)
                print(f"rank {dist.get_rank()}: statistics of {count} batches")
        else:
            start = time.perf_counter()
            for step in range(1, args.epochs * epoch_steps + 1):
                optimizer.zero_grad()
                loss = loss_of(next(batches))
                loss.backward()
                optimizer.step()
                if step % epoch_steps == 0 and dist.get_rank() == 0:
                    epoch = step // epoch_steps
                    print(f"epoch {epoch}: loss {loss.item():.4f}, {status(optimizer)}")
            if dist.get_rank() == 0:
                with torch.no_grad():
                    predictions = model(test_images).argmax(1)
                accuracy = (predictions == test_labels).float().mean()
                seconds = time.perf_counter() - start
                print(f"test accuracy {accuracy:.1%} after {seconds:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
