"""Survive lost processes: save checkpoints, and continue on any number of processes.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 elastic.py --folder run
    torchrun --standalone --nproc-per-node=3 elastic.py --folder run --steps 400

The script starts from the newest valid checkpoint. If a process is killed, torchrun
starts all processes again, and they continue from there; ``--die-at 35`` kills one to
show it. You can also start the script again on another number of processes: a step
takes the same batch, divided among them. With ``--nnodes=1:3`` torchrun does this
itself when nodes join or leave.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from second_order import (
    DHO2,
    DPKFAC,
    KAISA,
    MRDHO2,
    CheckpointError,
    DistKFAC,
    SecondOrderOptimizer,
    load_checkpoint,
    save_checkpoint,
)

OPTIMIZERS = ("kaisa", "dpkfac", "distkfac", "dho2", "mrdho2")
BATCH = 60  # of all processes together; 1 to 6 processes get equal parts
INTERVAL = 10  # steps between refreshes, and between checkpoints
MAX_CHECKPOINTS = 3  # if the newest is damaged, an older one is used


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


class Batches:
    """Batches of noisy images in random order, equal for any number of processes.

    Every process draws the whole batch from the same generator and takes its own part.
    The state of the generator goes into checkpoints.
    """

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        self._images = images.double()
        self._labels = labels
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.int64)
        self._next = 0

    def draw(self, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the next batch."""
        if BATCH % world_size:
            raise ValueError(
                f"a batch of {BATCH} cannot be divided among {world_size} processes; "
                f"use 1 to 6 processes"
            )
        if self._next + BATCH > len(self._order):
            self._order = torch.randperm(len(self._images), generator=self._generator)
            self._next = 0
        chosen = self._order[self._next : self._next + BATCH]
        self._next += BATCH
        images = self._images[chosen]
        noise = torch.randn(images.shape, generator=self._generator, dtype=images.dtype)
        part = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        return (images + 0.1 * noise)[part], self._labels[chosen][part]

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self._generator.get_state(),
            "order": self._order,
            "next": self._next,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._order = state["order"]
        self._next = state["next"]


def make_optimizer(name: str, model: nn.Module) -> SecondOrderOptimizer:
    common: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "debug": 2 * INTERVAL}
    kfac: dict[str, Any] = {
        "factor_dtype": torch.float64,
        "factor_update_steps": INTERVAL,
        "inv_update_steps": INTERVAL,
    }
    if name == "kaisa":
        return KAISA(model, **common, **kfac)
    if name == "dpkfac":
        return DPKFAC(model, **common, **kfac)
    if name == "distkfac":
        return DistKFAC(model, **common, **kfac, max_staleness=0)
    if name == "dho2":
        return DHO2(model, **common, curvature_interval=INTERVAL)
    return MRDHO2(model, **common, helper_ranks=0, epoch_steps=INTERVAL)


def checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints, the newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)


def is_valid(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        print(f"skipped: {error}", flush=True)
        return False
    return True


def newest(folder: Path) -> Path | None:
    """Return the newest valid checkpoint. Rank 0 chooses it and broadcasts the path."""
    path: list[Path | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        path[0] = next(filter(is_valid, checkpoints(folder)), None)
    if dist.is_initialized():
        dist.broadcast_object_list(path)
    return path[0]


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}.pt"


def save(folder: Path, step: int, parts: dict[str, Any]) -> None:
    state: dict[str, Any] = {"step": step, "rng": torch.get_rng_state()}
    for name, part in parts.items():
        state[name] = part.state_dict()
    save_checkpoint(state, path_of(folder, step))
    # Remove old checkpoints, and incomplete files of killed processes.
    for path in [*checkpoints(folder)[MAX_CHECKPOINTS:], *folder.glob(".*.partial")]:
        path.unlink()


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(args.seed)
    x_train, y_train, x_test, y_test = load_data()
    model = make_model().double()
    batches = Batches(x_train, y_train, args.seed)
    optimizer = make_optimizer(args.optimizer, model)

    # Continue from the newest checkpoint.
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": batches}
    start = 0
    path = newest(args.folder)
    if path is not None:
        state = load_checkpoint(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        start = state["step"]
    if rank == 0:
        print(f"starting at step {start} on {world_size} processes", flush=True)

    for step in range(start, args.steps):
        if step == args.die_at and rank == world_size - 1 and not was_restarted():
            os.kill(os.getpid(), signal.SIGKILL)
        images, labels = batches.draw(rank, world_size)
        if isinstance(optimizer, DHO2 | MRDHO2):

            def curvature_loss(x: Tensor = images, y: Tensor = labels) -> Tensor:
                return cross_entropy(model(x), y)

            optimizer.curvature_closure = curvature_loss
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if (step + 1) % INTERVAL == 0 or step + 1 == args.steps:
            optimizer.consolidate(to=0)  # on every rank: collects the state on rank 0
            if rank == 0:
                save(args.folder, step + 1, parts)
                print(f"step {step + 1}: loss {loss.item():.4f}, saved", flush=True)
    if rank == 0:
        with torch.no_grad():
            predictions = model(x_test.double()).argmax(1)
        accuracy = (predictions == y_test).double().mean()
        print(f"test accuracy {accuracy:.1%}", flush=True)


def was_restarted() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def main() -> None:
    parser = argparse.ArgumentParser(description="Survive lost processes.")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="kaisa")
    parser.add_argument(
        "--folder", type=Path, default=Path("elastic"), help="where checkpoints are"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--die-at", type=int, help="kill the last process before this step"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rank = 0
    world_size = 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group()
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    train(args, rank, world_size)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
