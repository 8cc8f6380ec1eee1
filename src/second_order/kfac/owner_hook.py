"""DPKFAC's hook of DistributedDataParallel: gradients go to their owners during the passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.world import World
from second_order.kfac.precondition import share

__all__ = ["OwnerHook"]


class OwnerHook:
    """Sends each bucket of gradients to their owners as it becomes ready.

    Args:
        world: The ranks.
        owners: A bound method that gives the owner of each gradient; not kept alive.
        ddp: The wrapper of the model.
    """

    def __init__(
        self,
        world: World,
        owners: Callable[[], Mapping[Tensor, int]],
        ddp: DistributedDataParallel,
    ) -> None:
        self._world, self._owners = world, weakref.WeakMethod(owners)
        self._summed_to: dict[Tensor, int] = {}  # since the last step

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants true classes, or nothing
            return self._start(bucket)

        ddp.register_comm_hook(None, hook)

    def _start(self, bucket: Any) -> torch.futures.Future[Any]:
        """Let the means of a bucket come together on their owners."""
        owners = self._owners()
        if owners is None:
            raise RuntimeError("the DPKFAC optimizer of this model's owner hook is gone")
        known, gradients = owners(), bucket.gradients()
        torch._foreach_div_(gradients, float(self._world.size))
        to = {p: known.get(p, 0) for p in bucket.parameters()}  # 0: frozen since DDP was made
        self._summed_to |= to
        summed = self._world.reduce(gradients, list(to.values()), once=True)
        if self._world.size == 1:
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        return summed.future().then(lambda _: bucket.buffer())

    def share_moved(self, owners: Mapping[Tensor, int]) -> None:
        """Give all ranks the means that have come to ranks that own them no more."""
        summed, self._summed_to = self._summed_to, {}
        moved = [(p.grad, rank) for p, rank in summed.items() if owners.get(p, rank) != rank]
        share(self._world, [(grad, rank) for grad, rank in moved if grad is not None])
