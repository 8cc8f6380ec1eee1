"""Errors in plain words for processes that cannot be reached: backends name sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from second_order.errors import SecondOrderError

__all__ = ["explained"]

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
