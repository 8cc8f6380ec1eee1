"""The division of the ranks into workers and helpers, once all of them agree on their options."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from second_order.distributed.fsdp import active_ddp
from second_order.distributed.helper_link import HelperLink, connect_helpers
from second_order.distributed.roles import Roles, role_option
from second_order.training.context import Training

__all__ = ["split_into_roles"]


def split_into_roles(training: Training, roles: Roles, timeout: float) -> list[HelperLink]:
    """Train with the ranks of this one's role only, linked to the others; a collective.

    Passes with gradients raise from now on in a DistributedDataParallel over workers and helpers. A
    model that is wrapped before its optimizer is made is refused then; frameworks wrap it later.
    """
    world = training.world
    links = connect_helpers(world, roles, timeout, training)
    training.restrict_to(roles.role_world(world, timeout))
    if training.owns_params:
        places = world.global_ranks
        workers = [places[rank] for rank in roles.workers]
        helpers = [places[rank] for rank in roles.helpers]
        option = f"{role_option(roles.helper_role)}={len(helpers)}"
        hook = partial(_look_who_runs, workers, helpers, option)
        handle = training.model.register_forward_pre_hook(hook)
        training.close_callbacks.append(handle.remove)
        weakref.finalize(training, handle.remove).atexit = False
    return links


def _look_who_runs(
    workers: Sequence[int], helpers: Sequence[int], option: str, module: nn.Module, _: Any
) -> None:
    ddp = None if torch.compiler.is_compiling() else active_ddp()
    if ddp is None or not torch.is_grad_enabled():
        return
    ranks = dist.get_process_group_ranks(ddp.process_group)
    mixed_in = sorted(set(ranks).intersection(helpers))
    if mixed_in and set(ranks).intersection(workers):
        raise ValueError(
            f"the model has been wrapped in DistributedDataParallel over ranks {ranks}, of which "
            f"{mixed_in} help the others ({option}): their gradients would be averaged into those "
            f"of the workers. Wrap it with DistributedDataParallel(model, "
            f"process_group=optimizer.worker_group); under a framework that wraps models itself, "
            f"leave helpers out, or take another optimizer"
        )
