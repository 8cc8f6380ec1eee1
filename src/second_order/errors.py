"""The exceptions and warnings of this package."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

__all__ = [
    "CheckpointError",
    "CurvatureError",
    "DecompositionError",
    "RankMismatchError",
    "SecondOrderError",
    "SecondOrderWarning",
    "warn",
]

# A warning shows the line of the first caller outside of these folders.
INTERNAL_FOLDERS = tuple(
    f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)
)


class SecondOrderError(RuntimeError):
    """The base class of errors at run time.

    Wrong arguments raise ValueError or TypeError.
    """


class CheckpointError(SecondOrderError, ValueError):
    """A checkpoint is truncated or damaged, or one of its entries does not fit.

    The message names the file or the entry. Nothing was loaded.
    """


class DecompositionError(SecondOrderError):
    """The decomposition of a layer's factors failed.

    An optimizer raises this on every rank if a layer fails at three refreshes in a row.
    """


class CurvatureError(SecondOrderError):
    """The closure is missing, or its loss is not valid, finite or twice differentiable.

    If the closure raises an exception on one rank, that rank raises it. The other ranks
    raise this error, which names the rank.
    """


class RankMismatchError(SecondOrderError):
    """The ranks of a process group are out of sync: models, options or calls differ.

    The constructor, every step and other collective calls check this before they change
    anything. Every rank that reaches the check raises the error.
    """


class SecondOrderWarning(UserWarning):
    """A layer falls back to the base, data is ignored, or a fallback is used."""


def warn(message: str) -> None:
    """Show a SecondOrderWarning at the first line outside of this package and torch.

    If a hook runs in a thread of autograd, its stack has no such line. The warning then
    points at the package's own line.
    """
    stacklevel = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(INTERNAL_FOLDERS):
        frame = frame.f_back
        stacklevel += 1
    if frame is None:
        stacklevel = 2  # the caller of this function
    warnings.warn(message, SecondOrderWarning, stacklevel=stacklevel)
