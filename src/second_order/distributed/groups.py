"""Process groups like a given one, of some of its ranks; and the errors of those that are lost."""

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
    "explained",
    "group_like",
    "shared_group_like",
    "timeout_of",
    "wait_for_gloo_at_exit",
]

# One set of groups serves all optimizers: an NCCL group costs hundreds of megabytes.
_shared: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[Any, ...], dist.ProcessGroup | None]
] = weakref.WeakKeyDictionary()


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
    """The timeout of a group's collectives; None, for the default, if it is not known."""
    # "cpu:gloo,cuda:nccl"
    devices = [part.partition(":")[0] for part in str(dist.get_backend_config(group)).split(",")]
    # Torch has no other way to ask: a timeout is kept by each device's backend.
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
    """Make a group of some global ranks; only these take part.

    Backend and timeout are those of ``group`` unless they are given.
    """
    return dist.new_group(
        list(members),
        timeout=timeout_of(group) if timeout is None else timeout,
        backend=backend or dist.get_backend_config(group),
        use_local_synchronization=True,
    )


def shared_group_like(
    group: dist.ProcessGroup,
    members: tuple[int, ...],
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup | None:
    """The group that :func:`group_like` makes, made on first demand and kept for the next."""
    made, key = _shared.setdefault(group, {}), (members, backend, timeout)
    if key not in made:
        made[key] = group_like(group, members, backend=backend, timeout=timeout)
    return made[key]


# Gloo and NCCL raise plain RuntimeErrors for some failures of connections.
BACKENDS = "gloo", "nccl", "pair closure"


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn a backend's errors into SecondOrderErrors that name the likely cause.

    Raises:
        SecondOrderError: In the place of the backend's own error.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).strip().split("\n", maxsplit=1)[0]
        of_backend = dist.is_available() and isinstance(error, dist.DistError)
        of_backend = of_backend or any(word in said.lower() for word in BACKENDS)
        if not of_backend or isinstance(error, SecondOrderError):
            raise
        raise SecondOrderError(
            f"this process does not hear from the others any more: one of them has ended, has "
            f"raised an error of its own, or was silent for longer than the process group's "
            f"timeout; the others' output tells more ({said})"
        ) from error
