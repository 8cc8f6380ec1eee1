"""The options of DistKFAC that no other system has."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from second_order.kfac.options import AUTO, PerStep
from second_order.options import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_timeout,
    check_whole,
)

__all__ = [
    "FORGETFUL",
    "DecayingClip",
    "DoublyFactored",
    "check_distkfac_options",
    "checked_doubly_factored",
    "checked_staleness",
    "half_the_cores",
    "own_cores",
]

FORGETFUL = PerStep(0.95)
"""What ``factor_decay=None`` means: some twenty steps are remembered."""

DoublyFactored: TypeAlias = Mapping[str, tuple[int, int]] | Literal["auto"] | None


@dataclass(frozen=True)
class DecayingClip:
    """The paper's bound on a step's squared Fisher norm, c₀ ζᵏ (Ba et al. 2017, section 5).

    Attributes:
        start: c₀, the bound at the first step.
        decay: ζ, the factor by which the bound shrinks every ``every`` steps.
        every: Number of steps between two decays; the paper takes half an epoch.

    Raises:
        TypeError: For a value that is no number.
        ValueError: For a value outside its bounds.
    """

    start: float = 0.01
    decay: float = 0.96
    every: int = 100

    def __post_init__(self) -> None:
        check_number("start", self.start, low=0.0, open_low=True, open_high=True, remedy="0.01")
        check_number("decay", self.decay, low=0.0, open_low=True, high=1.0, remedy="0.96")
        check_count("every", self.every, "steps")

    def __call__(self, step: int) -> float:
        """The bound κ at a step."""
        return max(self.start * self.decay ** (step // self.every), sys.float_info.min)


def own_cores() -> int:
    """This process's share of the cores."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes = int(local) if local.isdigit() and int(local) > 0 else 1
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return cores // processes


def half_the_cores() -> int:
    """Number of threads that leave half of this process's share of the cores to others; 1 to 4."""
    return min(max(own_cores() // 2, 1), 4)


def check_distkfac_options(keywords: Mapping[str, Any]) -> None:
    """Raise unless the keywords that only DistKFAC has make sense."""
    check_whole("stats_workers", keywords["stats_workers"], 0, "0 for none")
    if keywords["stats_workers"] and keywords["factor_update_steps"] == AUTO:
        raise ValueError(
            f"factor_update_steps='auto' measures statistics of the training passes, and with "
            f"stats_workers={keywords['stats_workers']} other processes take them all the time; "
            f"give a number, 20 perhaps, for when they are gone"
        )
    check_timeout("helper_timeout", keywords["helper_timeout"])
    check_choice("inverse_device", keywords["inverse_device"], ("cpu", "cuda"))
    check_choice("conv_factors", keywords["conv_factors"], ("kfc", "cheap"))
    if keywords["inverse_threads"] is not None:
        check_count("inverse_threads", keywords["inverse_threads"], "threads")


def checked_staleness(
    async_inverse: bool, max_staleness: int | None, deterministic: bool, stats_workers: int
) -> int | None:
    """Check ``max_staleness`` and return it; 0 for the synchronous algorithm.

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
    if check_flag("deterministic", deterministic) and max_staleness is None:
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
    """Check ``doubly_factored`` and return it, a mapping or "auto".

    Raises:
        ValueError: If it is neither.
    """
    if chosen is None:
        return {}
    if isinstance(chosen, str) and chosen == "auto":
        return "auto"
    named: dict[Any, Any] = dict(chosen) if isinstance(chosen, Mapping) else {0: None}
    if not all(isinstance(name, str) and _is_pair(pair) for name, pair in named.items()):
        raise ValueError(
            f"doubly_factored={chosen!r} is not 'auto', None, or a dict of layer names and "
            f"(locations, channels), both whole numbers"
        )
    return {name: (pair[0], pair[1]) for name, pair in named.items()}


def _is_pair(value: Any) -> bool:
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
