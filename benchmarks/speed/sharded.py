"""Memory per process and bytes per step of a sharded model, beside the same model under DDP.

    export PYTHONPATH=examples:benchmarks/speed
    torchrun --standalone --nproc-per-node=4 benchmarks/speed/sharded.py

The model is the language model of the examples, 0.43 million parameters. Kept by a process, the
most of any: parameters, AdamW's two averages, factors and inverses. Sent by a process in a step
without statistics, the most of any: gradients to those that precondition them and results back, in
all-to-alls. What FSDP2 itself sends is not counted: 3 (P − 1)/P times the parameters, in a step of
any optimizer; nor what DDP sends, 2 (P − 1)/P times.

Of DHO2 and MRDHO2: eigenvectors in the place of factors, and c and p, an epoch's first point and
its sum of gradients. MRDHO2's workers are whole, and the first sends the model once an epoch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from instruments import store_rows
from language_model import SIZES, Transformer, batches, next_loss
from measure import of_all
from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, SecondOrderOptimizer
from second_order.distributed.mailbox import Mailbox
from second_order.sharded import local

SYSTEMS: list[tuple[str, type[Any], dict[str, Any]]] = [
    ("KAISA", KAISA, {}),
    ("KAISA, reduce", KAISA, {"factor_exchange": "reduce"}),
    ("DPKFAC", DPKFAC, {}),
    ("DistKFAC", DistKFAC, {"async_inverse": False}),
]
PAIRS: list[tuple[str, type[Any], dict[str, Any]]] = [
    ("DHO2", DHO2, {"curvature_interval": 2}),
    ("MRDHO2", MRDHO2, {"epoch_steps": 3, "final_update": "paper"}),
    ("MRDHO2 within", MRDHO2, {"epoch_steps": 3, "final_update": "within"}),
]
INTERVAL = 10  # of statistics and inverses: the counted step has neither


@contextmanager
def bytes_sent(rank: int) -> Iterator[list[int]]:
    """The bytes that leave this process in all-to-alls, in a list of one."""
    total, function = [0], dist.all_to_all_single

    def counting(output: Any, tensor: Any, got: Any, gone: Any, **kwargs: Any) -> Any:
        total[0] += tensor.element_size() * sum(n for to, n in enumerate(gone) if to != rank)
        return function(output, tensor, got, gone, **kwargs)

    with patch.object(dist, "all_to_all_single", counting):
        yield total


@contextmanager
def bytes_posted() -> Iterator[list[int]]:
    """The bytes that leave this process in messages to helpers, in a list of one."""
    total, post = [0], Mailbox.post

    def counting(self: Mailbox, name: str, tensors: Sequence[Tensor], **note: Any) -> None:
        total[0] += sum(t.nbytes for t in tensors)
        post(self, name, tensors, **note)

    with patch.object(Mailbox, "post", counting):
        yield total


def shard(model: nn.Module, **options: Any) -> None:
    """Shard a transformer, a block at a time."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    fully_shard(model, **options)


def averages(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of AdamW's two averages here."""
    states = [state.get("base", {}) for state in optimizer.state.values()]
    kinds = ("exp_avg", "exp_avg_sq")
    return sum(local(state[key]).nbytes for state in states for key in kinds if key in state)


def most(kept: dict[str, int]) -> dict[str, int]:
    """The largest of all processes' numbers, by name."""
    everyone = of_all(kept)
    return {key: max(each[key] for each in everyone) for key in kept}


def of_eigenpairs(
    kind: type[SecondOrderOptimizer], options: dict[str, Any], *, sharded: bool
) -> dict[str, int]:
    """Bytes kept and sent by the worker that has most of them."""
    rank, size = dist.get_rank(), SIZES["small"]
    torch.manual_seed(0)
    model: nn.Module = Transformer(size)
    made: Any = kind
    loader = batches(size, seed=0)
    windows = next(iter(loader))
    common = {"largest": 4, "lanczos_iterations": 8, "hvp": "differences"}
    optimizer = made(
        model,
        lr=1e-3,
        base=torch.optim.AdamW,
        curvature_closure=lambda: next_loss(model, windows[:8]),
        **common,
        **options,
    )
    workers: Any = getattr(optimizer, "worker_group", dist.group.WORLD)
    if sharded:
        shard(model)
    kept = dict.fromkeys(("parameters", "base", "eigenvectors", "sums", "sent"), 0)
    with bytes_posted() as posted, optimizer:
        if getattr(optimizer, "role", "") == "accelerator":
            optimizer.serve([windows[:8]], partial(next_loss, model))
            return most(kept)
        for _ in range(5):
            optimizer.zero_grad()
            mine = slice(rank, None, dist.get_world_size(workers))
            next_loss(model, windows[mine]).backward()
            optimizer.step()
        curvature = optimizer._curvature
        epochs = getattr(curvature, "epochs", None)
        sums = [] if epochs is None else [epochs.start, epochs.total]
        subspace = curvature.subspace
        kept["parameters"] = sum(local(p).nbytes for p in model.parameters())
        kept["base"] = averages(optimizer)
        kept["eigenvectors"] = 0 if subspace is None else subspace.basis.vectors.nbytes
        kept["sums"] = sum(t.nbytes for t in sums if t is not None)
        kept["sent"] = posted[0] // 2 if epochs is not None else 0  # two epochs have begun
    return most(kept)


def measured(kind: type[SecondOrderOptimizer], options: dict[str, Any], *, sharded: bool) -> Any:
    """Bytes kept and sent by this process."""
    rank, processes, size = dist.get_rank(), dist.get_world_size(), SIZES["small"]
    torch.manual_seed(0)
    model: nn.Module = Transformer(size)
    if sharded:
        shard(model)
    else:
        model = DistributedDataParallel(model)
    made: Any = kind
    chosen = {"factor_update_steps": INTERVAL, "inv_update_steps": INTERVAL, **options}
    optimizer = made(model, lr=1e-3, base=torch.optim.AdamW, **chosen)
    total = 0
    for _, windows in zip(range(2), batches(size, seed=0), strict=False):
        optimizer.zero_grad()
        next_loss(model, windows[rank::processes]).backward()
        with bytes_sent(rank) as sent:
            optimizer.step()
        total = sent[0]
    rows = optimizer.summary().rows
    kept = {
        "parameters": sum(local(p).nbytes for p in model.parameters()),
        "base": averages(optimizer),
        "factors": sum(row.factor_bytes for row in rows),
        "inverses": sum(row.inverse_bytes for row in rows),
        "sent": total,
    }
    optimizer.close()
    return most(kept)


def main() -> None:
    """Measure every system, sharded and whole, and print two tables in MiB."""
    parser = argparse.ArgumentParser(description="What a process keeps and sends, sharded or not.")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    path = parser.parse_args().json
    dist.init_process_group("gloo")
    tables = [
        [
            {"system": name, "how": how, **of(kind, options, sharded=how == "FSDP2")}
            for name, kind, options in systems
            for how in ("DDP", "FSDP2")
            if how == "DDP" or kind is not MRDHO2  # whose helpers and workers hold whole models
        ]
        for systems, of in ((SYSTEMS, measured), (PAIRS, of_eigenpairs))
    ]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, MiB of the one that has most")
        for table in tables:
            columns = list(table[0])[2:]
            print("\n| | " + " | ".join(columns) + " |")
            for row in table:
                numbers = " | ".join(f"{row[key] / 2**20:.2f}" for key in columns)
                print(f"| {row['system']}, {row['how']} | {numbers} |")
        if path is not None:
            processes = {"processes": dist.get_world_size()}
            store_rows(path, [processes | row for table in tables for row in table])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
