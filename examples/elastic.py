"""Train on, whichever processes are lost: checkpoints, restarts, more processes or fewer.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic.py --folder run
    torchrun --standalone --nproc-per-node=3 examples/elastic.py --folder run --steps 400

The script begins at the newest checkpoint that is whole. Kill a process, and torchrun starts all of
them again from there; ``--die-at 35`` does it for you. Start it again with another number of
processes, and it goes on with those: a step takes the same batch, cut into as many shares as there
are processes. torchrun does so by itself with ``--nnodes=1:3``, as nodes come and go.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from digits import Digits, load_split, mlp
from processes import processes
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
BATCH = 60  # of all processes together, in equal shares for 1 to 6
EVERY = 10  # steps from one refresh to the next, and from one checkpoint to the next
KEPT = 3  # checkpoints: should the newest be spoilt, there is an older one


class Batches:
    """Noisy images in random order, the same for any number of processes, which share each batch.

    One generator draws for all of them, and its state goes into checkpoints.
    """

    def __init__(self, data: Digits, seed: int) -> None:
        self._images, self._labels = data.train_images.double(), data.train_labels
        self._generator = torch.Generator().manual_seed(seed)
        self._order, self._next = torch.empty(0, dtype=torch.int64), 0

    def draw(self, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        if BATCH % world_size:
            raise ValueError(f"a batch of {BATCH} has no {world_size} equal shares; use 1 to 6")
        if self._next + BATCH > len(self._order):
            self._order, self._next = self._permuted(), 0
        chosen = self._order[self._next : self._next + BATCH]
        self._next += BATCH
        images = self._images[chosen]
        noise = torch.randn(images.shape, generator=self._generator, dtype=images.dtype)
        share = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        return (images + 0.1 * noise)[share], self._labels[chosen][share]

    def _permuted(self) -> Tensor:
        return torch.randperm(len(self._images), generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self._generator.get_state(),
            "order": self._order,
            "next": self._next,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._order, self._next = state["order"], state["next"]


def make_optimizer(name: str, model: nn.Module) -> SecondOrderOptimizer:
    exact: dict[str, Any] = {"factor_dtype": torch.float64}
    exact |= {"factor_update_steps": EVERY, "inv_update_steps": EVERY}
    common: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "debug": 2 * EVERY}
    if name == "kaisa":
        return KAISA(model, **common, **exact)
    if name == "dpkfac":
        return DPKFAC(model, **common, **exact)
    if name == "distkfac":
        return DistKFAC(model, **common, **exact, max_staleness=0)  # no inverse is under way
    if name == "dho2":
        return DHO2(model, **common, curvature_interval=EVERY)
    return MRDHO2(model, **common, accelerators=0, epoch_steps=EVERY)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints, the newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)


def is_whole(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        print(f"left out: {error}", flush=True)
        return False
    return True


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; the first process looks, and tells the others."""
    found: list[Path | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = [next(filter(is_whole, checkpoints(folder)), None)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def save(folder: Path, step: int, parts: dict[str, Any]) -> None:
    state = {name: part.state_dict() for name, part in parts.items()}
    save_checkpoint({"step": step, "rng": torch.get_rng_state(), **state}, name_of(folder, step))
    for path in [*checkpoints(folder)[KEPT:], *folder.glob(".*.partial")]:
        path.unlink()  # partial: what a process wrote that was killed


def name_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}.pt"


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(args.seed)
    data, model = load_split(), mlp().double()
    batches, optimizer = Batches(data, args.seed), make_optimizer(args.optimizer, model)
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
        print(f"from step {start} on, {world_size} processes", flush=True)

    for step in range(start, args.steps):
        if step == args.die_at and rank == world_size - 1 and first_life():
            os.kill(os.getpid(), signal.SIGKILL)
        images, labels = batches.draw(rank, world_size)
        if isinstance(optimizer, DHO2 | MRDHO2):
            optimizer.curvature_closure = lambda x=images, y=labels: cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0 or step + 1 == args.steps:
            optimizer.consolidate(to=0)  # every process: some keep what others have not
            if rank == 0:
                save(args.folder, step + 1, parts)
                print(f"step {step + 1}: loss {loss.item():.4f}, saved", flush=True)
    if rank == 0:
        with torch.no_grad():
            right = model(data.test_images.double()).argmax(1) == data.test_labels
        print(f"test accuracy {right.double().mean():.1%}", flush=True)


def first_life() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="kaisa")
    parser.add_argument("--folder", type=Path, default=Path("elastic"), help="of checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--die-at", type=int, help="step before which the last process is killed")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with processes() as (rank, world_size):
        train(args, rank, world_size)


if __name__ == "__main__":
    main()
