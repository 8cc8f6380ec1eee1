"""The exceptions and warnings this package raises."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CurvatureError",
    "DecompositionError",
    "RankMismatchError",
    "SecondOrderError",
    "SecondOrderWarning",
]


class SecondOrderError(RuntimeError):
    """Base class of the errors that a run can meet, as opposed to wrong arguments."""


class CheckpointError(SecondOrderError, ValueError):
    """A checkpoint's file is cut short, damaged, or of something else; the error names it.

    Or an entry of its state does not fit, or is wrong; nothing has been loaded then.
    """


class DecompositionError(SecondOrderError):
    """A layer's factors could not be decomposed at three refreshes in a row.

    Raised on every rank at the same step.
    """


class CurvatureError(SecondOrderError):
    """The loss of a curvature batch could not be evaluated, or not differentiated twice.

    Raised on every rank, with the rank that failed.
    """


class RankMismatchError(SecondOrderError):
    """The ranks of a process group have different models or options, or do different things.

    Raised on every rank before anything has changed: at construction, and at the first step of
    which one of them knows otherwise than the others, or to which one does not come.
    """


class SecondOrderWarning(UserWarning):
    """Something was left to the base optimizer, dropped, or computed by a fallback."""
