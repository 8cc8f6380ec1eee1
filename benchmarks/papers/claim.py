"""One claim of a paper next to our measurement, and how the page shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Row", "Scale", "markdown", "ratio"]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        tiny: Seconds instead of minutes, on tiny networks, to test that everything runs.
        seeds: Training runs per setting.
        epochs: Epochs of the runs that compare accuracies.
        steps: Largest number of steps of the runs that train to a target.
        repeats: Timed steps of each kind, after a warm-up.
        block: Steps of each optimizer before the next one's turn, where whole intervals are timed.
        epoch: Steps per epoch of the training runs with eigenpairs.
        interval: Steps per epoch of the timed iterations with eigenpairs; the paper's epoch on
            CIFAR-10, with batches of 256, has 195.
        ranks: Ranks of the plan.
    """

    tiny: bool = False
    seeds: int = 3
    epochs: int = 15
    steps: int = 300
    repeats: int = 7
    block: int = 20
    epoch: int = 22
    interval: int = 195
    ranks: int = 64


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        paper: The system whose paper makes the claim.
        claim: What the paper claims.
        source: Where in the paper.
        paper_value: The paper's value.
        our_value: Our value.
        how: How we measured it, for the stored run.
        agrees: Whether our value supports the claim.
        reason: Why it does not, or why the values differ; the page shows it if they disagree.
        values: The numbers behind ``our_value``.
    """

    paper: str
    claim: str
    source: str
    paper_value: str
    our_value: str
    how: str
    agrees: bool
    reason: str = ""
    values: Mapping[str, float | None] = field(default_factory=dict)


def ratio(value: float) -> str:
    """Format a ratio with three significant digits, as in "1.53 ×"."""
    return f"{value:.3g} ×" if math.isfinite(value) else "not reached"


def markdown(rows: Sequence[Row]) -> str:
    """The page's tables, one for each paper in the order of the rows."""
    lines: list[str] = []
    for paper in dict.fromkeys(row.paper for row in rows):
        lines += [f"## {paper}", ""]
        lines += ["| claim | paper | here | agrees |", "|---|---|---|---|"]
        for row in rows:
            if row.paper != paper:
                continue
            agreement = "✓" if row.agrees else f"**no**: {row.reason}"
            cells = (
                f"{row.claim} ({row.source})",
                row.paper_value,
                row.our_value,
                agreement,
            )
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)
