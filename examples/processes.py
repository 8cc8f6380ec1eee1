"""What the examples do to run on one process, or on those that torchrun has started."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["processes", "spread"]


@contextmanager
def processes() -> Iterator[tuple[int, int]]:
    """This process's rank, and how many there are; they form a group meanwhile."""
    if "RANK" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        # A DistributedDataParallel that outlives its group may hang when it goes at last: make it
        # in a function, which ends before.
        gc.collect()
        dist.destroy_process_group()


def spread(model: nn.Module, world_size: int) -> nn.Module:
    """The model in DistributedDataParallel, where there are several processes."""
    return DistributedDataParallel(model) if world_size > 1 else model
