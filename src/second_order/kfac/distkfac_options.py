"""The options of DistKFAC that no other system has."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from second_order.kfac.options import PerStep
from second_order.options import (
    check_count,
    check_flag,
    check_keywords,
    check_number,
    check_timeout,
    check_whole,
    keyword,
    one_of,
)

__all__ = [
    "FORGETFUL",
    "DecayingClip",
    "DistKFACOptions",
    "DoublyFactored",
    "checked_doubly_factored",
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


@dataclass(frozen=True)
class DistKFACOptions:
    """The keywords that DistKFAC alone has.

    Attributes:
        stats_workers: How many ranks compute statistics instead of training. If all of them are
            gone, the others take statistics from their own passes again.
        helper_timeout: Seconds without a sign of life after which a stats worker is given up.
        inverse_threads: Threads of this process that solve; None for half the cores that it has for
            itself, at least 1 and at most 4.
        inverse_device: Device of the solves: "cpu", or "cuda" on a stream of their own.
        async_inverse: False waits for every solve, as ``max_staleness=0`` does.
        max_staleness: Steps after which a solve is waited for; None: never, but by drift at the
            step before the layer's next solve. 0 is the synchronous algorithm.
        deterministic: Put inverses to use exactly ``max_staleness`` steps, by drift at most the
            layer's interval less one, after the snapshot that they are solved from, be they ready
            sooner or not: runs can be repeated bit for bit.
        conv_factors: "kfc", or "cheap": the inputs of a convolution are averaged over locations,
            and its gradients summed, before they are squared (Ba et al. 2017, appendix A).
        doubly_factored: (locations, channels) of the inputs of wide Linears that are fed by a
            flattened feature map, by the layers' names. Three small factors take the place of A and
            G (Ba et al. 2017, section 4). "auto": layers with more than ``max_factor_dim`` inputs,
            with the channels of the convolution before them. None: no layer.
    """

    stats_workers: int = keyword(0, partial(check_whole, low=0, remedy="0 for none"))
    helper_timeout: float = keyword(60.0, check_timeout)
    inverse_threads: int | None = keyword(None, partial(check_count, meaning="threads"), None)
    inverse_device: str = keyword("cpu", one_of("cpu", "cuda"))
    async_inverse: bool = keyword(True, check_flag)
    max_staleness: int | None = keyword(
        None, partial(check_whole, low=0, remedy="None for no bound"), None
    )
    deterministic: bool = keyword(False, check_flag)
    conv_factors: str = keyword("kfc", one_of("kfc", "cheap"))
    doubly_factored: DoublyFactored = keyword("auto")

    def __post_init__(self) -> None:
        check_keywords(self)
        if not self.async_inverse and self.max_staleness:
            raise ValueError(
                f"async_inverse=False waits for every solve, so that max_staleness="
                f"{self.max_staleness} has no meaning; leave it out"
            )
        if self.deterministic and self.async_inverse and self.max_staleness is None:
            raise ValueError(
                "deterministic=True puts inverses to use after exactly max_staleness steps; give "
                "max_staleness, 10 perhaps"
            )
        if self.deterministic and self.async_inverse and self.stats_workers:
            raise ValueError(
                f"deterministic=True cannot be had with stats_workers={self.stats_workers}: when "
                f"their statistics arrive depends on the machine; use stats_workers=0"
            )

    @property
    def staleness(self) -> int | None:
        """Steps after which a solve is waited for; 0 for the synchronous algorithm."""
        return self.max_staleness if self.async_inverse else 0


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
