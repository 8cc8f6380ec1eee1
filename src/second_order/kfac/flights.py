"""A layer's solve under way, and what the ranks say of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from torch import Tensor

from second_order.kronecker.decompositions import Decomposition
from second_order.kronecker.solvers import Damping

__all__ = ["Flight", "Solved", "Verdict"]

Solved: TypeAlias = dict[str, Decomposition]
"""A layer's decompositions, by the factors' letters; without those that failed."""


class Verdict(IntEnum):
    """A rank's verdict on a layer that is to be solved; the greatest of all ranks' counts.

    The layer's solvers know whether there are statistics; any rank may know whether pairs without
    an example have ever been captured.
    """

    FLYING = 0  # not solved yet, or not by this rank
    SILENT = 1  # no pair of statistics has ever come
    UNSEEN = 2  # pairs have come, but none with an example
    SOUND = 3
    SPARED = 4  # not to be solved: its trace has hardly moved
    SETTLED = 5  # nor to be watched from now on
    FAILED = 6
    LOST = 7  # a factor is missing where it should be kept
    UNEXPLAINED = 8  # its pairs do not explain its gradient
    RAISED = 9  # an exception on a thread


@dataclass(eq=False)
class Flight:
    """A layer's solve under way.

    Attributes:
        step: The step at which the factors were taken.
        damping: γ at that step, on ranks that know it.
        scale: What the inverse is multiplied by, on these ranks; None for nothing.
        verdict: The verdict, as far as it is known without a thread.
        solved: The decompositions that this rank has computed.
    """

    step: int
    damping: Damping | None = None
    scale: Tensor | None = None
    verdict: Verdict = Verdict.FLYING
    solved: Solved = field(default_factory=dict)
