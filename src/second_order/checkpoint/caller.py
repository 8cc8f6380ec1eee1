"""Who has called: torch tells an optimizer neither its checkpoints nor its frameworks."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["caller", "is_checkpointing"]


def caller(module: str = "", function: str = "") -> FrameType | None:
    """The nearest frame above of a module whose name begins so, or of a function of a name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        where, code = frame.f_globals.get("__name__", ""), frame.f_code
        if (module and where.startswith(module)) or code.co_name == function:
            return frame
        frame = frame.f_back
    return None


def is_checkpointing(part: bool = False) -> bool:
    """Whether torch.distributed.checkpoint is calling; ``part``: for what is this rank's alone.

    Like any other caller, it calls state_dict() without arguments; but it wants each rank's part,
    and gathers the rest itself, unless the full state on one rank has been asked for. torch has no
    other sign of the caller than the stack.
    """
    frame = caller("torch.distributed.checkpoint")
    full = frame is not None and getattr(frame.f_locals.get("info"), "full_state_dict", False)
    return frame is not None and not (part and full)
