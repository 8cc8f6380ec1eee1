"""Looks for the caller on the stack, because torch does not pass this information."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["caller", "is_checkpointing"]


def caller(module: str = "", function: str = "") -> FrameType | None:
    """The nearest frame of a module whose name starts with ``module``, or of a ``function``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if (module and name.startswith(module)) or frame.f_code.co_name == function:
            return frame
        frame = frame.f_back
    return None


def is_checkpointing(part: bool = False) -> bool:
    """Whether torch.distributed.checkpoint is the caller.

    It calls ``state_dict()`` without arguments, as other callers do, and gathers the ranks' parts
    itself, unless the user has set ``full_state_dict``. Only the stack shows who the caller is.

    Args:
        part: Whether to return True only if it wants this rank's part.
    """
    frame = caller("torch.distributed.checkpoint")
    full = frame is not None and getattr(frame.f_locals.get("info"), "full_state_dict", False)
    return frame is not None and not (part and full)
