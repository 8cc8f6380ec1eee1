"""Whether ``torch.distributed.checkpoint`` is calling.

It asks an optimizer for its state as anybody does, by ``state_dict()`` without arguments, wants
each rank's part, and gathers the rest itself; anybody else who gets a part would lose what other
ranks keep. torch has no other sign of who asks, so that the callers' frames are looked at.
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

    It is not where the caller has asked for the full state on one rank.
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
