"""A machine and the links between ranks, as a plan sees them: seconds by size.

Every number can be measured (:mod:`second_order.planning.calibration`) or given. A collective over
several levels is done level by level: sums come together inside of each node first, then between
nodes, each rank with its share of the data, and back. With g parties, n bytes, latency a and b
bytes a second, on one level:

all_reduce   ring 2 (g - 1) (a + n / (g b))                or tree 2 ceil(log2 g) (a + n / b)
broadcast    tree ceil(log2 g) (a + n / b)
             or ring (ceil(log2 g) + g - 1) a + 2 (g - 1) / g n / b   (scatter, then all-gather)
all_gather   ring (g - 1) (a + n / b), n a rank's part     between nodes first
all_to_all   a + gap (messages - 1), and what a rank sends or receives, whichever is more

(Thakur, Rabenseifner & Gropp 2005; the gap between two messages of a rank is LogP's, Culler et al.
1993). Of two ways the faster one counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Any

__all__ = ["Curve", "Interconnect", "Level", "Machine"]


@dataclass(frozen=True)
class Curve:
    """Seconds by size, between measured points on straight lines in logarithms of both.

    Below the smallest size it is constant, above the largest it grows with the third power.

    Attributes:
        points: Pairs of a size and the seconds it takes, by rising size; seconds do not fall.

    Raises:
        ValueError: For no points, numbers that are not above 0, or seconds that fall.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple(sorted((float(n), float(s)) for n, s in self.points))
        object.__setattr__(self, "points", points)
        if not points:
            raise ValueError("a curve without points; give seconds for one size at least")
        for n, seconds in points:
            _positive(**{"a size": n, f"seconds at size {n:g}": seconds})
        for (small, less), (large, more) in pairwise(points):
            if small == large or more < less:
                raise ValueError(
                    f"size {large:g} takes {more:g} s, and size {small:g} takes {less:g} s; give "
                    f"each size once, and seconds that do not fall as sizes rise"
                )

    @classmethod
    def of(cls, seconds: Mapping[Any, float]) -> Curve:
        """Make a curve of seconds by size; sizes may be numbers in text, as in JSON."""
        return cls(tuple((float(n), float(s)) for n, s in seconds.items()))

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

    Raises:
        ValueError: For numbers that are not above 0.
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
        """Make a machine from numbers.

        Args:
            flops: Floating point operations a second of a matrix product in float32, two for each
                multiplication; a number, or by size n of the product.
            eigh: Seconds of an eigendecomposition by size n.
            inverse: Seconds of a Cholesky factorisation and inverse by size n.
            bandwidth: As the attribute, like those that follow.
            launch: Seconds that an operation takes at least.
            python: Seconds of Python around each operation.
            name: A name, for tables.
            device: "cpu" or "cuda".
            memory: Bytes of memory.
            spare_cores: CPU cores that training leaves idle.
        """
        rates = flops if isinstance(flops, Mapping) else {1024: flops}
        _positive(**{f"flops at size {n}": rate for n, rate in rates.items()})
        seconds = {float(n): 2 * float(n) ** 3 / float(rate) for n, rate in rates.items()}
        smallest = min(seconds)
        # Down to what a launch takes, at the rate of the smallest size that is given.
        floor = smallest * (launch / seconds[smallest]) ** (1 / 3)
        if floor < smallest:
            seconds[floor] = launch
        curves = Curve.of(seconds), Curve.of(eigh), Curve.of(inverse)
        return cls(name, device, *curves, bandwidth, launch, python, memory, spare_cores)

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
        """Make a machine from what :meth:`as_json` gave, or from the numbers of :meth:`given`.

        Raises:
            ValueError: For entries that are missing or unknown.
        """
        given = dict(found)
        try:
            if "flops" in given:
                return cls.given(**given)
            for name in ("products", "eigh", "inverse"):
                given[name] = Curve.of(given[name])
            return cls(**given)
        except (TypeError, KeyError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise ValueError(
                f"a machine's numbers: {error}; give flops, eigh, inverse and bandwidth, or what "
                f"as_json() of a calibrated machine gave: {names}"
            ) from None


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
        given = {k: v for k, v in vars(self).items() if v is not None}
        _positive(**given)


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
        if not self.levels or self.levels[-1].ranks is not None:
            raise ValueError("the last level of a network holds all ranks; give it ranks=None")
        for inner, outer in pairwise((1, *(level.ranks for level in self.levels[:-1]))):
            if not inner or not outer or outer % inner:
                raise ValueError(
                    f"a level of {outer} ranks after one of {inner}; give whole multiples, and "
                    f"None for the last alone"
                )

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

    def parties(self, ranks: Sequence[int]) -> tuple[tuple[Level, int], ...]:
        """The levels, and the number of parties that meet there: ranks of a node, nodes, and so on.

        Where nodes have unequally many of the ranks, that of the fullest counts.
        """
        return _parties(self.levels, tuple(ranks))

    def all_reduce(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds to sum n bytes over ranks, for all of them."""
        seconds, share = 0.0, float(nbytes)
        for level, g in self.parties(ranks):
            if g > 1:
                ring = 2 * (g - 1) * (level.latency + share / g / level.bandwidth)
                tree = 2 * _rounds(g) * (level.latency + share / level.bandwidth)
                seconds += min(ring, tree)
                share /= g
        return seconds

    def broadcast(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds to send n bytes from one rank to the others."""
        seconds = 0.0
        for level, g in self.parties(ranks):
            if g > 1:
                tree = _rounds(g) * (level.latency + nbytes / level.bandwidth)
                ring = (_rounds(g) + g - 1) * level.latency
                ring += 2 * (g - 1) / g * nbytes / level.bandwidth
                seconds += min(ring, tree)
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

        Args:
            sent: Bytes that the busiest rank sends to the others in all.
            received: Bytes that it receives.
            ranks: The ranks; peers on each level get an equal share.
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
        """Make a network from what :meth:`as_json` gave.

        Raises:
            ValueError: For entries that are missing or unknown.
        """
        try:
            levels = tuple(Level(**level) for level in found["levels"])
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"a network's numbers: {error}; give levels, a list of latency, bandwidth and "
                f"ranks, the innermost first"
            ) from None
        return cls(levels, bool(found.get("measured", False)))


def _positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ValueError(f"{name}={value!r} is not a number above 0")


def _rounds(parties: int) -> int:
    return math.ceil(math.log2(parties))


@lru_cache(maxsize=512)
def _parties(levels: tuple[Level, ...], ranks: tuple[int, ...]) -> tuple[tuple[Level, int], ...]:
    found, units = [], set(ranks)
    for level in levels[:-1]:
        # A node is known by its first rank.
        nodes = Counter(unit - unit % (level.ranks or 1) for unit in units)
        found.append((level, max(nodes.values())))
        units = set(nodes)
    return (*found, (levels[-1], len(units)))
