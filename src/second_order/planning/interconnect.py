"""The links between ranks as a plan sees them: levels, and collectives by formula.

A collective over several levels is done level by level, as NCCL and MPI do: sums come together
inside of each node first, then between nodes, each rank with its share of the data, and back. With
g parties, n bytes, latency a and b bytes a second, on one level:

all_reduce   ring 2 (g - 1) (a + n / (g b))                or tree 2 ceil(log2 g) (a + n / b)
broadcast,   tree ceil(log2 g) (a + n / b)
reduce       or ring (ceil(log2 g) + g - 1) a + 2 (g - 1) / g n / b   (scatter, then all-gather)
all_gather   ring (g - 1) (a + n / b), n a rank's part     between nodes first
all_to_all   a + g_m (messages - 1), and what a rank sends or receives, whichever is more

(Thakur, Rabenseifner & Gropp 2005; the gap g_m between two messages of a rank is LogP's, Culler et
al. 1993). Of two ways the faster one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from second_order.planning.machine import positive

__all__ = ["Interconnect", "Level"]


@dataclass(frozen=True)
class Level:
    """The links of one level: inside a node, or between nodes.

    Attributes:
        latency: Seconds from one rank to another, whatever the size.
        bandwidth: Bytes a second of one rank while all the others use theirs.
        ranks: Number of ranks that are together on this level; None for all.
        gap: Seconds between two messages of one rank to different others; None for the latency,
            as if each waited for the one before.

    Raises:
        ValueError: For numbers out of range.
    """

    latency: float
    bandwidth: float
    ranks: int | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        positive("latency", self.latency)
        if self.gap is not None:
            positive("gap", self.gap)
        positive("bandwidth", self.bandwidth)
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"ranks={self.ranks!r} of a level; give a whole number, 1 or more")


@dataclass(frozen=True)
class Interconnect:
    """The levels of a network, the innermost first; ranks are numbered node by node.

    Attributes:
        levels: Each holds more ranks than the one before, a whole number of times; the last holds
            all of them.
        measured: Whether the numbers were measured, for tables.

    Raises:
        ValueError: For no level, or sizes that do not nest.
    """

    levels: tuple[Level, ...]
    measured: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        if not self.levels:
            raise ValueError("a network without levels; give one at least")
        if self.levels[-1].ranks is not None:
            raise ValueError("the last level of a network holds all ranks; give it ranks=None")
        before = 1
        for level in self.levels[:-1]:
            if level.ranks is None or level.ranks % before:
                raise ValueError(
                    f"a level of {level.ranks} ranks after one of {before}; give whole multiples, "
                    f"and None for the last alone"
                )
            before = level.ranks

    @classmethod
    def flat(cls, latency: float, bandwidth: float) -> Interconnect:
        """Make a network in which all ranks are equally far from each other."""
        return cls((Level(latency, bandwidth),))

    @classmethod
    def of_nodes(
        cls, ranks: int, inside: tuple[float, float], between: tuple[float, float]
    ) -> Interconnect:
        """Make a network of nodes.

        Args:
            ranks: Ranks of each node.
            inside: Latency in seconds and bandwidth in bytes a second of a rank inside of a node.
            between: The same between nodes.
        """
        return cls((Level(*inside, ranks), Level(*between)))

    # ---------------------------------------------------------------------------- the collectives

    def parties(self, ranks: Sequence[int]) -> list[int]:
        """By level, the number of parties that meet there: ranks of a node, nodes, and so on.

        Where nodes have unequally many of the ranks, that of the fullest counts.
        """
        known = ranks if isinstance(ranks, range) else tuple(ranks)
        return list(_parties(tuple(level.ranks for level in self.levels), known))

    def all_reduce(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds to sum n bytes over ranks, for all of them."""
        seconds, share = 0.0, float(nbytes)
        for level, g in zip(self.levels, self.parties(ranks), strict=True):
            if g > 1:
                ring = 2 * (g - 1) * (level.latency + share / g / level.bandwidth)
                tree = 2 * _rounds(g) * (level.latency + share / level.bandwidth)
                seconds += min(ring, tree)
                share /= g
        return seconds

    def broadcast(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds to send n bytes from one rank to the others."""
        seconds = 0.0
        for level, g in zip(self.levels, self.parties(ranks), strict=True):
            if g > 1:
                tree = _rounds(g) * (level.latency + nbytes / level.bandwidth)
                ring = (_rounds(g) + g - 1) * level.latency
                ring += 2 * (g - 1) / g * nbytes / level.bandwidth
                seconds += min(ring, tree)
        return seconds

    def reduce(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds to sum n bytes over ranks, for one of them: a broadcast in reverse."""
        return self.broadcast(nbytes, ranks)

    def all_gather(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds to give all ranks a part of n bytes from each: between nodes first."""
        seconds, part = 0.0, float(nbytes)
        parties = self.parties(ranks)
        for level, g in zip(reversed(self.levels), reversed(parties), strict=True):
            seconds += (g - 1) * (level.latency + part / level.bandwidth)
            part *= g
        return seconds

    def all_to_all(self, sent: float, received: float, ranks: Sequence[int]) -> float:
        """Seconds of an exchange of unlike parts between all pairs of ranks.

        Args:
            sent: Bytes that the busiest rank sends to the others in all.
            received: Bytes that it receives.
            ranks: The ranks; peers on each level get an equal share.
        """
        others = len(ranks if isinstance(ranks, range) else set(ranks)) - 1
        if others < 1:
            return 0.0
        seconds, nearer = 0.0, 1
        for level, g in zip(self.levels, self.parties(ranks), strict=True):
            peers = min(nearer * g, others + 1) - nearer
            if peers:
                gap = level.latency if level.gap is None else level.gap
                seconds += level.latency + (peers - 1) * gap
                seconds += max(sent, received) * peers / others / level.bandwidth
            nearer += peers
        return seconds

    def timed(self, verb: str) -> Callable[..., float]:
        """The formula of a collective by its name.

        Raises:
            ValueError: For a name that has none.
        """
        verbs: dict[str, Callable[..., float]] = {
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
            "reduce": self.reduce,
            "all_gather": self.all_gather,
            "all_to_all": self.all_to_all,
        }
        if verb not in verbs:
            raise ValueError(f"no formula for {verb!r}; there are {', '.join(verbs)}")
        return verbs[verb]

    # -------------------------------------------------------------------------------------- JSON

    def as_json(self) -> dict[str, Any]:
        """The network as primitives."""
        return {"measured": self.measured, "levels": [dict(vars(level)) for level in self.levels]}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Interconnect:
        """Make a network from what :meth:`as_json` gave.

        Raises:
            ValueError: For entries that are missing or unknown.
        """
        if "levels" not in found:
            raise ValueError(
                "a network without levels; give a list of latency, bandwidth and ranks, the "
                "innermost first"
            )
        try:
            levels = tuple(Level(**level) for level in found["levels"])
        except TypeError as error:
            raise ValueError(f"a level of a network: {error}") from None
        return cls(levels, bool(found.get("measured", False)))


def _rounds(parties: int) -> int:
    return math.ceil(math.log2(parties))


@lru_cache(maxsize=512)
def _parties(together: tuple[int | None, ...], ranks: Sequence[int]) -> tuple[int, ...]:
    """The parties of each level, by the number of ranks that are together on it."""
    found, units = [], list(dict.fromkeys(ranks))
    for size in together:
        if size is None:
            found.append(len(units))
            break
        members: dict[int, int] = {}
        for unit in units:
            # A unit of the level below is known by its first rank's place.
            members[unit // size] = members.get(unit // size, 0) + 1
        found.append(max(members.values(), default=0))
        units = [place * size for place in members]
    return tuple(found)
