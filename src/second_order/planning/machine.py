"""A machine and the links between ranks, as a plan sees them: seconds by size.

Every number can be measured (:mod:`second_order.planning.calibration`) or given. A collective over
several levels is done level by level: sums come together inside of each node first, then between
nodes, each rank with its share of the data, and back. With g parties, n bytes, latency a and b
bytes a second, on one level:

all_reduce   ring 2 (g - 1) (a + n / (g b))                or tree 2 ceil(log2 g) (a + n / b)
all_gather   ring (g - 1) (a + n / b), n a rank's part     between nodes first
all_to_all   a + gap (messages - 1), and what a rank sends or receives, whichever is more

(Thakur, Rabenseifner & Gropp 2005; the gap between two messages of a rank is LogP's, Culler et al.
1993). Of two ways the faster one counts. A broadcast counts as an all_reduce.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

__all__ = ["Curve", "Interconnect", "Level", "Machine"]


def _positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ValueError(f"{name}={value!r} is not a number above 0")


@dataclass(frozen=True)
class Curve:
    """Seconds by size: constant below the smallest size, growing with n³ above the largest.

    Attributes:
        points: Pairs of a size and the seconds it takes, which do not fall as sizes rise; between
            them lie straight lines in logarithms of both. Sizes may be numbers in text, as in JSON.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple(sorted((float(n), float(s)) for n, s in self.points))
        object.__setattr__(self, "points", points)
        rising = all(n < m and s <= t for (n, s), (m, t) in pairwise(points))
        if not points or not rising or not all(0 < x < inf for point in points for x in point):
            raise ValueError(
                f"seconds by size {dict(points)}: give one size at least, each once, numbers above "
                f"0, and seconds that do not fall as sizes rise"
            )

    def at(self, size: float) -> float:
        """Seconds at a size."""
        (first, least), (last, most) = self.points[0], self.points[-1]
        if size <= first:
            return least
        if size >= last:
            return float(most * (size / last) ** 3)
        (n0, s0), (n1, s1) = next(p for p in pairwise(self.points) if p[1][0] >= size)
        return float(s0 * (s1 / s0) ** (math.log(size / n0) / math.log(n1 / n0)))


@dataclass(frozen=True)
class Machine:
    """What one rank's device and its Python can do, in float32.

    Attributes:
        name: A name, for tables.
        device: "cpu" or "cuda": kernels and Python take turns on the one, and overlap on the other.
        products: Seconds of an n x n by n x n matrix product, by n.
        eigh: Seconds of one sound symmetric eigendecomposition, by n.
        inverse: Seconds of one sound Cholesky inverse, by n.
        bandwidth: Bytes that operations on large tensors read and write in a second.
        launch: Seconds of an operation on next to nothing.
        python: Seconds of Python around each operation.
        memory: Bytes of the device's memory, None where it is not known.
        spare_cores: CPU cores of a rank that training leaves idle, for solves on threads; None
            where nobody knows: none on a CPU, enough beside a device.
    """

    name: str
    device: str
    products: Curve
    eigh: Curve
    inverse: Curve
    bandwidth: float
    launch: float
    python: float = 0.0
    memory: int | None = None
    spare_cores: int | None = None

    def __post_init__(self) -> None:
        _positive(bandwidth=self.bandwidth, launch=self.launch)
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} of a machine; use 'cpu' or 'cuda'")

    @classmethod
    def given(
        cls,
        flops: float | Mapping[Any, float],
        *,
        eigh: Mapping[Any, float],
        inverse: Mapping[Any, float],
        bandwidth: float,
        launch: float = 5e-6,
        python: float = 2e-5,
        name: str = "given",
        device: str = "cuda",
        memory: int | None = None,
        spare_cores: int | None = None,
    ) -> Machine:
        """Make a machine from its attributes, given as numbers.

        ``flops`` are floating point operations a second of a matrix product in float32, two for
        each multiplication: a number, or by size n of the product. ``eigh`` and ``inverse`` are
        seconds by size n.
        """
        rates = flops if isinstance(flops, Mapping) else {1024: flops}
        _positive(**{f"flops at size {n}": rate for n, rate in rates.items()})
        seconds = {float(n): 2 * float(n) ** 3 / float(rate) for n, rate in rates.items()}
        smallest = min(seconds)
        # Down to what a launch takes, at the rate of the smallest size that is given.
        floor = smallest * (launch / seconds[smallest]) ** (1 / 3)
        if floor < smallest:
            seconds[floor] = launch
        products, solved, inverted = (Curve(tuple(by.items())) for by in (seconds, eigh, inverse))
        rest = bandwidth, launch, python, memory, spare_cores
        return cls(name, device, products, solved, inverted, *rest)

    def dense(self, flops: float) -> float:
        """Seconds of a product with so many floating point operations, as of a cube."""
        return self.products.at((flops / 2) ** (1 / 3))

    def decomposition(self, solver: str, n: float) -> float:
        """Seconds to decompose one factor of size n, by the name of the solver."""
        return (self.eigh if solver == "eigen" else self.inverse).at(n)

    @property
    def solves_beside(self) -> bool:
        """Whether solves on threads have cores of their own beside training."""
        return self.device != "cpu" if self.spare_cores is None else self.spare_cores > 0

    def as_json(self) -> dict[str, Any]:
        """The machine as primitives."""
        return {
            name: {repr(n): s for n, s in value.points} if isinstance(value, Curve) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Machine:
        """Make a machine from what :meth:`as_json` gave, or from the numbers of :meth:`given`."""
        if "flops" in found:
            return cls.given(**found)
        curves = {n: Curve(tuple(v.items())) for n, v in found.items() if isinstance(v, Mapping)}
        return cls(**{**found, **curves})


@dataclass(frozen=True)
class Level:
    """The links of one level: inside a node, or between nodes.

    Attributes:
        latency: Seconds from one rank to another, whatever the size.
        bandwidth: Bytes a second of one rank while all the others use theirs.
        ranks: Number of ranks that are together on this level; None for all.
        gap: Seconds between two messages of one rank to different others; None for the latency,
            as if each waited for the one before.
    """

    latency: float
    bandwidth: float
    ranks: int | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        _positive(**{k: v for k, v in vars(self).items() if v is not None})


@dataclass(frozen=True)
class Interconnect:
    """The levels of a network, the innermost first; ranks are numbered node by node.

    Attributes:
        levels: Each holds more ranks than the one before, a whole number of times; the last holds
            all of them.
        measured: Whether the numbers were measured, for tables.
    """

    levels: tuple[Level, ...]
    measured: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        sizes = [level.ranks for level in self.levels]
        inner = [1, *(ranks or 0 for ranks in sizes[:-1])]
        if not sizes or sizes[-1] or any(not m or m % n for n, m in pairwise(inner)):
            raise ValueError(
                f"levels of {sizes} ranks: give whole multiples of the level before, and None for "
                f"the last alone, which holds all ranks"
            )

    @classmethod
    def flat(cls, latency: float, bandwidth: float) -> Interconnect:
        """Make a network in which all ranks are equally far from each other."""
        return cls((Level(latency, bandwidth),))

    @classmethod
    def of_nodes(
        cls, ranks: int, inside: tuple[float, float], between: tuple[float, float]
    ) -> Interconnect:
        """Make a network of nodes of so many ranks.

        ``inside`` a node and ``between`` nodes are latency in seconds and bytes a second of a rank.
        """
        return cls((Level(*inside, ranks), Level(*between)))

    def parties(self, ranks: Sequence[int]) -> list[tuple[Level, int]]:
        """The levels, and the number of parties that meet there: ranks of a node, nodes, and so on.

        Where nodes have unequally many of the ranks, that of the fullest counts.
        """
        found, units = [], set(ranks)
        for level in self.levels[:-1]:
            # A node is known by its first rank.
            nodes = Counter(unit - unit % (level.ranks or 1) for unit in units)
            found.append((level, max(nodes.values())))
            units = set(nodes)
        return [*found, (self.levels[-1], len(units))]

    def all_reduce(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds to sum n bytes over ranks, for all of them."""
        seconds, share = 0.0, float(nbytes)
        for level, g in self.parties(ranks):
            if g > 1:
                ring = 2 * (g - 1) * (level.latency + share / g / level.bandwidth)
                tree = 2 * (g - 1).bit_length() * (level.latency + share / level.bandwidth)
                seconds += min(ring, tree)
                share /= g
        return seconds

    def all_gather(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds to give all ranks a part of n bytes from each: between nodes first."""
        seconds, part = 0.0, float(nbytes)
        for level, g in reversed(self.parties(ranks)):
            seconds += (g - 1) * (level.latency + part / level.bandwidth)
            part *= g
        return seconds

    def all_to_all(self, sent: float, received: float, ranks: Sequence[int]) -> float:
        """Seconds of an exchange of unlike parts between all pairs of ranks.

        The busiest rank sends and receives so many bytes; peers on each level get an equal share.
        """
        others, seconds, nearer = len(ranks) - 1, 0.0, 1
        for level, g in self.parties(ranks):
            peers = min(nearer * g, others + 1) - nearer
            if peers:
                gap = level.latency if level.gap is None else level.gap
                seconds += level.latency + (peers - 1) * gap
                seconds += max(sent, received) * peers / others / level.bandwidth
            nearer += peers
        return seconds

    def as_json(self) -> dict[str, Any]:
        """The network as primitives."""
        return {"measured": self.measured, "levels": [dict(vars(level)) for level in self.levels]}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Interconnect:
        """Make a network from what :meth:`as_json` gave."""
        levels = tuple(Level(**level) for level in found.get("levels", ()))
        return cls(levels, bool(found.get("measured", False)))
