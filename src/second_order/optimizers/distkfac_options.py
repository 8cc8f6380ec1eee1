"""The options of DistKFAC that no other system has."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from second_order.optimizers.fosi_options import check_whole
from second_order.optimizers.options import check_flag

__all__ = [
    "DecayingClip",
    "DoublyFactored",
    "checked_doubly_factored",
    "checked_staleness",
    "half_the_cores",
]

DoublyFactored: TypeAlias = Mapping[str, tuple[int, int]] | Literal["auto"] | None


@dataclass(frozen=True)
class DecayingClip:
    """The paper's bound on a step's squared Fisher norm, c₀ ζᵏ (Ba et al. 2017, section 5).

    Attributes:
        start: c₀.
        decay: ζ, by which it shrinks every so many steps.
        every: How many; the paper takes half an epoch.
    """

    start: float = 0.01
    decay: float = 0.96
    every: int = 100

    def __call__(self, step: int) -> float:
        """κ at a step."""
        return max(self.start * self.decay ** (step // self.every), sys.float_info.min)


def half_the_cores() -> int:
    """Threads that leave half of this process's share of the cores to others; 1 to 4."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes = int(local) if local.isdigit() and int(local) > 0 else 1
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(max(cores // (2 * processes), 1), 4)


def checked_staleness(
    async_inverse: bool, max_staleness: int | None, deterministic: bool, stats_workers: int
) -> int | None:
    """``max_staleness``, 0 for the synchronous algorithm.

    Raises:
        ValueError: If the options contradict each other.
    """
    if max_staleness is not None:
        check_whole("max_staleness", max_staleness, 0, "None for no bound")
    if not check_flag("async_inverse", async_inverse):
        if max_staleness:
            raise ValueError(
                f"async_inverse=False waits for every solve, so that max_staleness="
                f"{max_staleness} has no meaning; leave it out"
            )
        return 0
    if deterministic and max_staleness is None:
        raise ValueError(
            "deterministic=True puts inverses to use after exactly max_staleness steps; give "
            "max_staleness, 10 perhaps"
        )
    if deterministic and stats_workers:
        raise ValueError(
            f"deterministic=True cannot be had with stats_workers={stats_workers}: when their "
            f"statistics arrive depends on the machine; use stats_workers=0"
        )
    return max_staleness


def checked_doubly_factored(chosen: Any) -> Mapping[str, tuple[int, int]] | str:
    """``doubly_factored``, a mapping or "auto".

    Raises:
        ValueError: If it is neither.
    """
    if chosen is None:
        return {}
    if chosen == "auto":
        return "auto"
    pairs = list(chosen.values()) if isinstance(chosen, Mapping) else [None]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"doubly_factored={chosen!r} is not 'auto', None, or a dict of layer names and "
            f"(locations, channels)"
        )
    return {name: (int(pair[0]), int(pair[1])) for name, pair in chosen.items()}
