"""Process groups like a given one, and one error for every way to lose contact with other ranks."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from second_order.errors import SecondOrderError

__all__ = [
    "control_group",
    "explained",
    "group_like",
    "shared_group_like",
    "timeout_of",
    "wait_for_gloo_at_exit",
]

# One set of groups serves all optimizers: an NCCL group costs hundreds of megabytes.
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)

CONTROL = ("control",)
EXIT_SECONDS = 0.1


@cache
def wait_for_gloo_at_exit() -> None:
    """Give gloo's threads a moment to release tensors when the script has ended.

    A gloo thread releases the tensors of a collective after the collective has returned, and needs
    the GIL to do so. If the interpreter is already finalizing, torch aborts the process:
    "terminate called without an active exception". FSDP2's collectives use such threads as well.
    """
    atexit.register(time.sleep, EXIT_SECONDS)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's collectives, or None if it is unknown."""
    # "cpu:gloo,cuda:nccl"
    devices = [part.partition(":")[0] for part in str(dist.get_backend_config(group)).split(",")]
    # Torch has no public way to read a timeout: each device's backend stores its own.
    with contextlib.suppress(AttributeError, RuntimeError):
        return min(group._get_backend(torch.device(d)).options._timeout for d in devices)
    return None


def group_like(
    group: dist.ProcessGroup,
    members: Sequence[int],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Make a group of some global ranks. Only these ranks call this.

    Backend and timeout are those of ``group`` unless they are given.
    """
    return dist.new_group(
        list(members),
        timeout=timeout_of(group) if timeout is None else timeout,
        backend=backend or dist.get_backend_config(group),
        use_local_synchronization=True,
    )


def shared_group_like(
    group: dist.ProcessGroup, members: tuple[int, ...], timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """The group of some global ranks, made by the first call and reused by later ones."""
    made = _shared.setdefault(group, {})
    key = (members, timeout)
    if key not in made:
        made[key] = group_like(group, members, timeout=timeout)
    return made[key]


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The gloo group of the same ranks for control messages; the first call is a collective."""
    made = _shared.setdefault(group, {})
    if CONTROL not in made:
        wait_for_gloo_at_exit()
        _make_equally_many_groups(group)
        made[CONTROL] = group_like(group, dist.get_process_group_ranks(group), backend="gloo")
    return made[CONTROL]


def _make_equally_many_groups(group: dist.ProcessGroup) -> None:
    """Make unused groups until every rank is in the same number of groups; a collective.

    Torch derives the name of a group that only its members make from the number of groups that a
    rank is in. If the user made groups of some ranks, these numbers differ, and ``new_group`` would
    wait for a group of another name until the timeout.
    """
    here = len(dist.distributed_c10d._world.pg_names)
    counts = [here] * dist.get_world_size(group)
    dist.all_gather_object(counts, here, group=group)
    for _ in range(max(counts) - here):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


# Gloo and NCCL raise plain RuntimeErrors for some failures of connections.
BACKENDS = "gloo", "nccl", "pair closure"


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn a backend's errors into SecondOrderErrors that name the likely cause.

    Raises:
        SecondOrderError: Instead of the backend's own error.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error).strip().split("\n", maxsplit=1)[0]
        of_backend = dist.is_available() and isinstance(error, dist.DistError)
        of_backend = of_backend or any(word in message.lower() for word in BACKENDS)
        if not of_backend or isinstance(error, SecondOrderError):
            raise
        raise SecondOrderError(
            f"Lost contact with the other ranks: one of them exited, raised, or exceeded the "
            f"process-group timeout. See their logs. ({message})"
        ) from error
