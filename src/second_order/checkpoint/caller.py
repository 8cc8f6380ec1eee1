"""Find the caller on the stack, where torch does not pass it as an argument."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["caller", "is_checkpointing"]


def caller(module: str = "", function: str = "") -> FrameType | None:
    """Return the nearest frame of a module with this prefix, or of a function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if (module and name.startswith(module)) or frame.f_code.co_name == function:
            return frame
        frame = frame.f_back
    return None


def is_checkpointing(part: bool = False) -> bool:
    """Return whether torch.distributed.checkpoint (DCP) is the caller.

    DCP calls ``state_dict()`` without arguments, as other callers do. It then gathers
    the parts of the ranks itself, unless the user has set ``full_state_dict``.

    Args:
        part: True to return False if the user has set ``full_state_dict``.
    """
    frame = caller("torch.distributed.checkpoint")
    if frame is None:
        return False
    wants_full_state = getattr(frame.f_locals.get("info"), "full_state_dict", False)
    return not (part and wants_full_state)
