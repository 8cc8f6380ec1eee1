"""The split of the ranks into workers and helpers, once all agree on their options.

:func:`split_into_roles` links the two kinds of ranks and makes a process group for each
kind. Then the optimizer on a worker trains with the workers only.
"""

from __future__ import annotations

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


def split_into_roles(
    training: Training, roles: Roles, timeout: float
) -> list[HelperLink]:
    """Restrict training to the ranks of this rank's role, and link workers to helpers.

    Collective.

    From now on, passes with gradients raise if DistributedDataParallel wraps the model
    over workers and helpers. If the model was wrapped before the optimizer was made,
    the optimizer has refused it; but some frameworks wrap it later.

    Returns:
        On a worker a link to each helper, on a helper one link to worker 0.
    """
    world = training.world
    links = connect_helpers(world, roles, timeout, training)
    training.restrict_to(roles.role_world(world, timeout))

    if training.owns_params:
        global_ranks = world.global_ranks
        workers = [global_ranks[rank] for rank in roles.workers]
        helpers = [global_ranks[rank] for rank in roles.helpers]
        option = f"{role_option(roles.helper_role)}={len(helpers)}"
        hook = partial(_refuse_ddp_with_helpers, workers, helpers, option)
        training.add_forward_pre_hook(hook)
    return links


def _refuse_ddp_with_helpers(
    workers: Sequence[int],
    helpers: Sequence[int],
    option: str,
    module: nn.Module,
    _: Any,
) -> None:
    """A forward pre-hook that raises if DDP averages over workers and helpers."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    ddp = active_ddp()
    if ddp is None:
        return

    # Does its group have ranks of both roles?
    ranks = dist.get_process_group_ranks(ddp.process_group)
    mixed_in = sorted(set(ranks).intersection(helpers))
    if mixed_in and set(ranks).intersection(workers):
        raise ValueError(
            f"the model is wrapped in DistributedDataParallel over ranks {ranks}, but {option} "
            f"makes helpers of ranks {mixed_in}: their gradients would be averaged into those of "
            f"the workers. Use DistributedDataParallel(model, "
            f"process_group=optimizer.worker_group). If a framework wraps the model itself, train "
            f"without helpers, or use another optimizer"
        )
