"""DistributedDataParallel around workers and helpers, refused at the first pass that trains.

A model that is wrapped before its optimizer is made is refused then. Frameworks wrap it afterwards,
over all ranks, and a helper's gradients would be averaged into those of the workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from second_order.contract.training import Training
from second_order.distributed.collectives import World
from second_order.distributed.roles import Roles, option_of
from second_order.sharded import ddp_under_way

__all__ = ["FirstPass", "refuse_ddp_over_helpers"]

H = TypeVar("H", bound="FirstPass")


def refuse_ddp_over_helpers(training: Training, roles: Roles, everybody: World) -> None:
    """Make the model's first pass with gradients raise, if it is in a DDP over helpers' ranks.

    The hook on the model goes by itself with the first such pass, which a helper need not have, or
    with the training.

    Args:
        training: The training, which keeps the hook.
        roles: The ranks of each role.
        everybody: The world of all these ranks.
    """
    places, role = everybody.global_ranks, roles.helper_role
    workers, helpers = (
        frozenset(places[r] for r in ranks) for ranks in (roles.workers, roles.helpers)
    )
    hook = FirstPass(workers, helpers, f"role {role!r} ({option_of(role)}={len(helpers)})")
    hook.handle = training.model.register_forward_pre_hook(hook)
    training.first_pass = hook
    weakref.finalize(training, hook.remove).atexit = False


class FirstPass:
    """A hook that looks once who runs the model; copies, pickled ones too, never look.

    Attributes:
        handle: Takes the hook off the model; None once it is off.
    """

    def __init__(
        self,
        workers: frozenset[int] = frozenset(),
        helpers: frozenset[int] = frozenset(),
        said: str = "",
    ) -> None:
        self._workers, self._helpers, self._said = workers, helpers, said
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Raise ValueError if helpers' gradients would be averaged in; of no use afterwards."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        ddp = ddp_under_way()
        if ddp is not None:
            self._check(dist.get_process_group_ranks(ddp.process_group))
        self.remove()

    def remove(self) -> None:
        """Look no more."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    @contextmanager
    def aside(self, model: nn.Module) -> Iterator[None]:
        """Be off the model meanwhile, and on it again afterwards if it was."""
        waits = self.handle is not None
        self.remove()
        try:
            yield
        finally:
            if waits:
                self.handle = model.register_forward_pre_hook(self)

    def _check(self, ranks: list[int]) -> None:
        helpers = sorted(self._helpers.intersection(ranks))
        if helpers and self._workers.intersection(ranks):
            raise ValueError(
                f"the model has been wrapped in DistributedDataParallel over ranks {ranks}, of "
                f"which {helpers} have {self._said}: their gradients would be averaged into those "
                f"of the workers. Wrap it with DistributedDataParallel(model, "
                f"process_group=optimizer.worker_group); under a framework that wraps models "
                f"itself, leave helpers out, or take another optimizer"
            )

    def __deepcopy__(self: H, _: Any) -> H:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()
