"""Memory per process and bytes per step of a sharded model, beside the same model under DDP.

    export PYTHONPATH=examples:benchmarks/speed
    torchrun --standalone --nproc-per-node=2 benchmarks/speed/sharded.py

The model is the language model of the examples, 0.43 million parameters. Kept by a process, the
most of any: parameters, AdamW's two averages, factors and inverses. Sent by a process in a step
without statistics, the most of any: gradients to those that precondition them and results back, in
all-to-alls. What FSDP2 itself sends is not counted: 3 (P − 1)/P times the parameters, in a step of
any optimizer; nor what DDP sends, 2 (P − 1)/P times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from language_model import SIZES, Transformer, batches, next_loss
from second_order import DPKFAC, KAISA, DistKFAC, SecondOrderOptimizer
from second_order.sharded import local

SYSTEMS: list[tuple[str, type[Any], dict[str, Any]]] = [
    ("KAISA", KAISA, {}),
    ("KAISA, reduce", KAISA, {"factor_exchange": "reduce"}),
    ("DPKFAC", DPKFAC, {}),
    ("DistKFAC", DistKFAC, {"async_inverse": False}),
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


def measured(kind: type[SecondOrderOptimizer], options: dict[str, Any], *, sharded: bool) -> Any:
    """Bytes kept and sent by this process."""
    rank, processes, size = dist.get_rank(), dist.get_world_size(), SIZES["small"]
    torch.manual_seed(0)
    model: nn.Module = Transformer(size)
    if sharded:
        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    made: Any = kind
    chosen = {"factor_update_steps": INTERVAL, "inv_update_steps": INTERVAL, **options}
    optimizer = made(model, lr=1e-3, base=torch.optim.AdamW, refresh_warmup_steps=0, **chosen)
    total = 0
    for _, windows in zip(range(2), batches(size, seed=0), strict=False):
        optimizer.zero_grad()
        next_loss(model, windows[rank::processes]).backward()
        with bytes_sent(rank) as sent:
            optimizer.step()
        total = sent[0]
    rows = optimizer.summary().rows
    states = [state["base"] for state in optimizer.state.values()]
    averages = [local(state[key]).nbytes for state in states for key in ("exp_avg", "exp_avg_sq")]
    kept = {
        "parameters": sum(local(p).nbytes for p in model.parameters()),
        "base": sum(averages),
        "factors": sum(row.factor_bytes for row in rows),
        "inverses": sum(row.inverse_bytes for row in rows),
        "sent": total,
    }
    optimizer.close()
    everyone: list[Any] = [None] * processes
    dist.all_gather_object(everyone, kept)
    return {key: max(each[key] for each in everyone) for key in kept}


def main() -> None:
    """Measure every system, sharded and under DDP, and print a table in MiB."""
    dist.init_process_group("gloo")
    found = {
        f"{name}, {how}": measured(kind, options, sharded=how == "FSDP2")
        for name, kind, options in SYSTEMS
        for how in ("DDP", "FSDP2")
    }
    if dist.get_rank() == 0:
        columns = list(next(iter(found.values())))
        print(f"{dist.get_world_size()} processes, MiB of the one that has most")
        print("| | " + " | ".join(columns) + " |")
        for name, row in found.items():
            numbers = " | ".join(f"{row[key] / 2**20:.2f}" for key in columns)
            print(f"| {name} | {numbers} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
