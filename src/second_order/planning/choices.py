"""Settings with their costs, the one that is recommended, and both as tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from second_order.planning.interconnect import Interconnect
from second_order.planning.machine import Machine
from second_order.planning.observation import Observation
from second_order.planning.times import RankCost

__all__ = ["SIMILAR", "Choice", "Plan", "bytes_of", "recommended", "said_bytes"]


SIMILAR = 0.03
"""Settings whose steps differ by less than this share count as equally fast: the model of time is
no better than that."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Choice:
    """A setting, and what it costs.

    Attributes:
        system: The optimizer's class.
        setting: The setting in words.
        keywords: The keywords that have the optimizer do this.
        intervals: Steps between statistics and between refreshes, for eigenpairs both times the
            steps from one refresh to the next; where the keywords say "auto",
            those that a budget would choose by these costs.
        world_size: Number of ranks.
        stages: Seconds a step by stage, those of statistics and refreshes shared out over their
            intervals.
        seconds: Seconds a step.
        memory: Bytes at the peak on the fullest rank.
        held: Bytes by what they are for, on that rank.
        sent: Bytes a step that leave the busiest rank.
        operations: Floating point operations a step of second order on the busiest rank.
        hidden: Seconds a step of solves on threads, beside training.
        shared: Seconds a step of solves on threads that have no cores of their own: training gives
            them its time, and they are among ``seconds``.
        fits: Whether the memory allowed is enough.
        largest_batch: Examples to a rank's batch for which it would still be; None without a limit.
        ranks: The costs of each rank at a step with statistics and a refresh.
    """

    system: str
    setting: str
    keywords: Mapping[str, Any]
    intervals: tuple[int, int]
    world_size: int
    stages: Mapping[str, float]
    seconds: float
    memory: int
    held: Mapping[str, int]
    sent: float
    operations: float
    hidden: float = 0.0
    fits: bool = True
    largest_batch: int | None = None
    ranks: tuple[RankCost, ...] = field(default=(), repr=False, compare=False)
    shared: float = 0.0

    @property
    def name(self) -> str:
        """The system, the setting and the solver in words."""
        words = " ".join(filter(None, [self.system, self.setting]))
        return ", ".join(filter(None, [words, self.keywords.get("solver")]))

    def as_json(self, every_rank: bool = False) -> dict[str, Any]:
        """The choice as primitives.

        Args:
            every_rank: Whether to add the costs of each rank.
        """
        names = ("system", "setting", "world_size", "seconds", "memory", "sent", "operations")
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in (*names, "hidden", "shared", "fits", "largest_batch")
        }
        found["keywords"] = {k: _primitive(v) for k, v in self.keywords.items()}
        found["intervals"] = list(self.intervals)
        found |= {"stages": dict(self.stages), "held": dict(self.held)}
        if every_rank:
            found["ranks"] = [_rank_json(cost) for cost in self.ranks]
        return found


def _primitive(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _rank_json(cost: RankCost) -> dict[str, Any]:
    work = cost.work
    stages = dict.fromkeys((*(s.stage for s in work.stages), *(t.stage for t in work.transfers)))
    return {
        "rank": work.rank,
        "ranks_alike": cost.ranks,
        "seconds": dict(cost.times.due),
        "hidden_seconds": cost.times.hidden,
        "operations": {stage: work.operations(stage) for stage in stages},
        "bytes_handed_over": {stage: work.handed(stage) for stage in stages},
        "bytes_moved": {stage: work.moved(stage) for stage in stages},
        "memory": {held.what: held.nbytes for held in work.held},
    }


@dataclass(frozen=True)
class Plan:
    """The settings for a number of ranks, and the one that is recommended.

    Attributes:
        world_size: Number of ranks.
        choices: The settings, the fastest first.
        recommended: The setting to take; None where none fits into memory.
        reason: Why, in words.
        base: Seconds a step of the base alone, with its mean of gradients.
        observation: What the model's passes take.
        machine: The machine of every rank.
        network: The links between the ranks.
        memory: Bytes that a rank may use; None for no limit.
        others: The plans for the other numbers of ranks that were asked for together.
    """

    world_size: int
    choices: tuple[Choice, ...]
    recommended: Choice | None
    reason: str
    base: float
    observation: Observation
    machine: Machine
    network: Interconnect
    memory: int | None = None
    others: tuple[Plan, ...] = field(default=(), repr=False)

    def summary(self, rows: int | None = 12) -> str:
        """The settings as a table, and the recommendation.

        Args:
            rows: Number of rows at most; None for all.
        """
        table = [HEADER, *map(self._row, self.choices[:rows])]
        left = len(self.choices) - len(table) + 1
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        known = "measured" if self.network.measured else "not measured"
        title = f"{ranks} of {self.machine.name}; network {known}; "
        title += f"the base alone takes {1000 * self.base:.3g} ms a step"
        lines = [title, *_aligned(table), *([f"and {left} slower settings"] if left else [])]
        return "\n".join([*lines, self.reason])

    def _row(self, choice: Choice) -> tuple[str, ...]:
        stages = choice.stages
        messages = sum(s for k, s in stages.items() if k in MESSAGES)
        words = choice.keywords
        note = "recommended" if choice is self.recommended else ""
        return (
            choice.system,
            choice.setting,
            words.get("solver", ""),
            "/".join(map(str, choice.intervals)),
            f"{1000 * choice.seconds:,.3g}",
            f"{choice.seconds / self.base - 1:+.0%}" if self.base else "",
            *(f"{1000 * sum(stages.get(k, 0.0) for k in of):,.3g}" for of in COLUMNS),
            f"{1000 * messages:,.3g}",
            said_bytes(choice.memory),
            said_bytes(choice.sent),
            note if choice.fits else "does not fit",
        )

    def as_json(self) -> dict[str, Any]:
        """The plan as primitives; the recommended setting with the costs of each rank."""
        best = self.recommended
        return {
            "world_size": self.world_size,
            "memory": self.memory,
            "base_seconds": self.base,
            "examples": self.observation.examples,
            "activations": self.observation.activations,
            "operations": self.observation.operations,
            "passes_measured": self.observation.seconds is not None,
            "recommended": None if best is None else best.as_json(every_rank=True),
            "reason": self.reason,
            "choices": [choice.as_json() for choice in self.choices],
            "machine": self.machine.as_json(),
            "network": self.network.as_json(),
        }

    def to_json(self, indent: int | None = 1) -> str:
        """The plan as JSON."""
        return json.dumps(self.as_json(), indent=indent)

    def __str__(self) -> str:
        return self.summary()


HEADER = (
    *("system", "setting", "solver", "intervals", "ms a step", "over base", "statistics"),
    *("solve", "precondition", "messages", "peak memory", "sent", ""),
)

COLUMNS = (("statistics",), ("solve", "lanczos"), ("precondition", "split", "newton"))
"""The stages of three columns."""

MESSAGES = (
    "compare",
    "average_gradients",
    "statistics_exchange",
    "solve_exchange",
    "precondition_exchange",
    "split_exchange",
    "newton_exchange",
    "exchange",
    "lanczos_exchange",
    "final_update",
    "pairs",
)


def recommended(choices: Sequence[Choice], memory: int | None) -> tuple[Choice | None, str]:
    """The fastest setting that fits, and why; of similar ones the one with the least memory.

    Args:
        choices: Settings at equal intervals, the fastest first.
        memory: Bytes that a rank may use; None for no limit.
    """
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        least = min(choices, key=lambda choice: choice.memory)
        assert memory is not None
        return None, (
            f"none of {len(choices)} settings fits into {said_bytes(memory)}: {least.name} takes "
            f"the least, {said_bytes(least.memory)}; a smaller batch, skip_layers=[...] or "
            f"FSDP2 would make room"
        )
    # Solves on threads that have no core are no faster than those at once, and come later.
    fitting = [choice for choice in fitting if not choice.shared] or fitting
    fastest = fitting[0]
    similar = [c for c in fitting if c.seconds <= (1 + SIMILAR) * fastest.seconds]
    best = min(similar, key=lambda choice: (choice.memory, choice.seconds))
    said = f"recommended: {best.name}: {1000 * best.seconds:.3g} ms a step"
    if best is fastest:
        said += f", the fastest of {len([c for c in choices if not c.shared] or choices)} settings"
    else:
        said += (
            f", within {SIMILAR:.0%} of the fastest, {fastest.name}, and "
            f"{said_bytes(fastest.memory - best.memory)} less memory"
        )
    unfit = [choice for choice in choices if not choice.fits]
    if unfit:
        assert memory is not None
        quicker = [c for c in unfit if c.seconds < best.seconds]
        said += f"; {len(unfit)} do not fit into {said_bytes(memory)}"
        said += f", {len(quicker)} of them faster" if quicker else ""
    if best.system == "DPKFAC" and best.world_size > 1:
        said += "; its factors are of their owner's batches alone"
    if best.system == "MRDHO2":
        said += "; its accelerators do not train, and the step is of fewer examples"
    elif best.hidden:
        said += "; its solves need cores of their own beside training"
    if any(choice.shared for choice in choices):
        said += (
            "; no core is left to DistKFAC's threads (spare_cores of the machine): its solves take "
            "training's time, and are counted in full"
        )
    return best, said


def bytes_of(size: int | str) -> int:
    """A number of bytes from a number, or a text like "80GB" or "512 MiB".

    Raises:
        ValueError: For anything else, or less than one byte.
    """
    text = str(size).strip()
    digits = text.rstrip("BbKkMmGgTtIi ")
    unit = text[len(digits) :].strip().upper()
    try:
        found = int(float(digits) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        found = 0
    if found < 1:
        raise ValueError(f"memory={size!r} is not a number of bytes; write 80GB or 512MiB")
    return found


def said_bytes(size: float) -> str:
    """A number of bytes for tables."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, strict=True)
        left = [
            c.ljust(w) if i < 4 or i == len(row) - 1 else c.rjust(w)
            for i, (c, w) in enumerate(cells)
        ]
        lines.append("  ".join(left).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
