"""Whether ``torch.distributed.checkpoint`` is calling.

Like any other caller, it calls ``state_dict()`` without arguments; but it wants each rank's part,
and gathers the rest itself, where another caller would lose the state of other ranks. torch has no
other sign of the caller, so that the frames of the stack are looked at.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["is_checkpointing", "is_sharded_checkpoint"]


def is_checkpointing() -> bool:
    """Whether torch.distributed.checkpoint is calling."""
    return _checkpointing() is not None


def is_sharded_checkpoint() -> bool:
    """Whether ``state_dict`` is being asked by torch.distributed.checkpoint for this rank's part.

    False where the full state on one rank has been asked for.
    """
    frame = _checkpointing()
    return frame is not None and not getattr(frame.f_locals.get("info"), "full_state_dict", False)


def _checkpointing() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            return frame
        frame = frame.f_back
    return None
