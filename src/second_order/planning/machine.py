"""A machine as a plan sees it: seconds by size, bytes a second, and what each layer costs besides.

Every number can be measured (:mod:`second_order.planning.calibration`) or given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["STAGES", "Curve", "Machine", "Overhead", "Surface", "positive"]

STAGES = ("statistics", "solve", "precondition", "exchange")
"""The stages of a step that have an overhead a layer."""


@dataclass(frozen=True)
class Curve:
    """Seconds by size, between measured points on straight lines in logarithms of both.

    Below the smallest size it is constant: a smaller matrix saves no call. Above the largest it
    goes on by a power.

    Attributes:
        points: Pairs of a size and the seconds it takes, by rising size; seconds do not fall.
        power: The power of the size that seconds grow by above the largest.

    Raises:
        ValueError: For no points, numbers that are not above 0, or seconds that fall.
    """

    points: tuple[tuple[float, float], ...]
    power: float = 3.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(sorted((n, s) for n, s in self.points)))
        if not self.points:
            raise ValueError("a curve without points; give seconds for one size at least")
        for n, seconds in self.points:
            positive("size", n)
            positive(f"seconds at size {n:g}", seconds)
        for (small, less), (large, more) in zip(self.points, self.points[1:], strict=False):
            if small == large:
                raise ValueError(f"size {small:g} is given twice; give one number of seconds")
            if more < less:
                raise ValueError(
                    f"size {large:g} takes {more:g} s, and the smaller size {small:g} takes "
                    f"{less:g} s; seconds may not fall as sizes rise"
                )

    @classmethod
    def of(cls, seconds: Mapping[Any, float], power: float = 3.0) -> Curve:
        """Make a curve of seconds by size; sizes may be numbers in text, as in JSON."""
        return cls(tuple((float(n), float(s)) for n, s in seconds.items()), power)

    def at(self, size: float) -> float:
        """Seconds at a size."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            beyond: float = last[1] * (size / last[0]) ** self.power
            return beyond
        right = next(i for i, (n, _) in enumerate(self.points) if n >= size)
        (n0, s0), (n1, s1) = self.points[right - 1], self.points[right]
        share = math.log(size / n0) / math.log(n1 / n0)
        found: float = s0 * (s1 / s0) ** share
        return found

    def as_json(self) -> dict[str, Any]:
        """The curve as primitives."""
        return {"seconds": {repr(n): s for n, s in self.points}, "power": self.power}


@dataclass(frozen=True)
class Surface:
    """Seconds by two sizes: a curve for each of some numbers of rows.

    Between two curves on straight lines in logarithms; below the first as the first, above the last
    in proportion to the rows.

    Attributes:
        curves: Pairs of a number of rows and the curve by the other size, by rising rows.

    Raises:
        ValueError: For no curves, or rows that are not above 0 or given twice.
    """

    curves: tuple[tuple[float, Curve], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "curves", tuple(sorted(self.curves, key=lambda pair: pair[0])))
        rows = [r for r, _ in self.curves]
        if not rows or len(set(rows)) < len(rows):
            raise ValueError(f"curves for rows {rows}; give one at least, and each once")
        for r in rows:
            positive("rows", r)

    def at(self, rows: float, size: float) -> float:
        """Seconds at a number of rows and a size."""
        (first, low), (last, high) = self.curves[0], self.curves[-1]
        if rows <= first:
            return low.at(size)
        if rows >= last:
            return high.at(size) * rows / last
        right = next(i for i, (r, _) in enumerate(self.curves) if r >= rows)
        (r0, c0), (r1, c1) = self.curves[right - 1], self.curves[right]
        share = math.log(rows / r0) / math.log(r1 / r0)
        less = c0.at(size)
        found: float = less * (max(c1.at(size), less) / less) ** share
        return found

    def as_json(self) -> list[dict[str, Any]]:
        """The surface as primitives."""
        return [{"rows": r, **curve.as_json()} for r, curve in self.curves]


@dataclass(frozen=True)
class Overhead:
    """What a stage costs whatever the sizes: Python, small kernels, dictionaries.

    Attributes:
        step: Seconds of each step that has the stage.
        layer: Seconds besides for each layer that the rank works on.
    """

    step: float = 0.0
    layer: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What one rank's device and its Python can do, in float32.

    Attributes:
        name: A name, for tables.
        device: "cpu" or "cuda": kernels and Python take turns on the one, and overlap on the other.
        products: Seconds of an n x n by n x n matrix product, by n.
        eigh: Seconds of one sound symmetric eigendecomposition, by n.
        inverse: Seconds of one sound Cholesky inverse, by n.
        gram: Seconds of the statistics X^T X of a matrix X of rows x n, by rows and n; None for
            those of a product with as many operations.
        bandwidth: Bytes that operations in place on large tensors read and write in a second.
        copies: Bytes a second of copies into new memory, which a CPU has to find first; None for
            half the bandwidth.
        spare_cores: CPU cores of a rank that training leaves idle, for solves on threads; None
            where nobody knows: none on a CPU, enough beside a device.
        launch: Seconds of an operation on next to nothing.
        overheads: Overhead of each stage, by one of :data:`STAGES`, "inverse" and "eigen" for the
            solves of each solver, and "base" for a step of the base with its parameters as layers.
        memory: Bytes of the device's memory, None where it is not known.

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
    overheads: Mapping[str, Overhead] = field(default_factory=dict)
    memory: int | None = None
    gram: Surface | None = None
    copies: float | None = None
    spare_cores: int | None = None

    def __post_init__(self) -> None:
        positive("bandwidth", self.bandwidth)
        positive("launch", self.launch)
        if self.copies is not None:
            positive("copies", self.copies)
        if self.spare_cores is not None and self.spare_cores < 0:
            raise ValueError(f"spare_cores={self.spare_cores} is below 0; 0 where all are busy")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} of a machine; use 'cpu' or 'cuda'")
        for stage, overhead in self.overheads.items():
            if overhead.step < 0 or overhead.layer < 0:
                raise ValueError(f"overhead of {stage!r}: {overhead} is below 0")

    @classmethod
    def given(
        cls,
        flops: float | Mapping[Any, float],
        *,
        eigh: Mapping[Any, float],
        inverse: Mapping[Any, float],
        bandwidth: float,
        launch: float = 5e-6,
        layer: float = 2e-4,
        step: float = 1e-3,
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
            bandwidth: Bytes a second between the device and its memory.
            launch: Seconds that an operation takes at least.
            layer: Overhead of each stage for each layer, seconds.
            step: Overhead of each stage of a step, seconds.
            name: A name, for tables.
            device: "cpu" or "cuda".
            memory: Bytes of memory.
            spare_cores: CPU cores of a rank that training leaves idle, as the attribute.
        """
        positive("launch", launch)
        rates = flops if isinstance(flops, Mapping) else {1024: flops}
        seconds: dict[float, float] = {}
        for n, rate in sorted((float(n), float(r)) for n, r in rates.items()):
            positive(f"flops at size {n:g}", rate)
            seconds[n] = 2 * n**3 / rate
        smallest = min(seconds)
        # Down to what a launch takes, at the rate of the smallest size that is given.
        floor = smallest * (launch / seconds[smallest]) ** (1 / 3)
        if floor < smallest:
            seconds[floor] = launch
        overhead = Overhead(step, layer)
        return cls(
            name,
            device,
            Curve.of(seconds),
            Curve.of(eigh),
            Curve.of(inverse),
            bandwidth,
            launch,
            dict.fromkeys((*STAGES, "inverse", "eigen", "base"), overhead),
            memory,
            spare_cores=spare_cores,
        )

    # ----------------------------------------------------------------------------------- seconds

    def product(self, m: float, n: float, k: float) -> float:
        """Seconds of an m x k by k x n product: those of a cube with as many operations."""
        return self.products.at((m * n * k) ** (1 / 3))

    def statistics(self, rows: float, n: float) -> float:
        """Seconds of the statistics of a matrix of rows x n."""
        return self.product(n, n, rows) if self.gram is None else self.gram.at(rows, n)

    def touched(self, nbytes: float) -> float:
        """Seconds to read or write so many bytes in place."""
        return nbytes / self.bandwidth

    def copied(self, nbytes: float) -> float:
        """Seconds to copy so many bytes into new memory."""
        return nbytes / (self.copies or self.bandwidth / 2)

    def decomposition(self, solver: str, n: float) -> float:
        """Seconds to decompose one factor of size n, by the name of the solver.

        Raises:
            ValueError: For a solver other than "eigen" and "inverse".
        """
        if solver not in ("eigen", "inverse"):
            raise ValueError(f"solver={solver!r} is not one of eigen and inverse")
        return (self.eigh if solver == "eigen" else self.inverse).at(n)

    @property
    def solves_beside(self) -> bool:
        """Whether solves on threads have cores of their own beside training."""
        return self.device != "cpu" if self.spare_cores is None else self.spare_cores > 0

    def overhead(self, stage: str) -> Overhead:
        """The overhead of a stage; none where it is not known."""
        return self.overheads.get(stage, Overhead())

    # -------------------------------------------------------------------------------------- JSON

    def as_json(self) -> dict[str, Any]:
        """The machine as primitives."""
        curves = {name: getattr(self, name).as_json() for name in ("products", "eigh", "inverse")}
        rest = {
            name: getattr(self, name)
            for name in ("name", "device", "bandwidth", "copies", "launch", "memory", "spare_cores")
        }
        gram = {} if self.gram is None else {"gram": self.gram.as_json()}
        overheads = {"overheads": {k: asdict(v) for k, v in self.overheads.items()}}
        return {**rest, **curves, **gram, **overheads}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Machine:
        """Make a machine from what :meth:`as_json` gave, or from the numbers of :meth:`given`.

        Raises:
            ValueError: For entries that are missing or unknown.
        """
        if "flops" in found:
            return _called(cls.given, found, "flops", "eigh", "inverse", "bandwidth")
        wanted = ("name", "device", "products", "eigh", "inverse", "bandwidth", "launch")
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ValueError(
                f"a machine without {', '.join(missing)}; give flops, eigh, inverse and bandwidth, "
                f"or what as_json() of a calibrated machine gave"
            )
        curves: dict[str, Any] = {
            name: _curve(found[name]) for name in ("products", "eigh", "inverse")
        }
        gram = found.get("gram")
        surface = None if gram is None else Surface(tuple((c["rows"], _curve(c)) for c in gram))
        overheads = {k: Overhead(**v) for k, v in found.get("overheads", {}).items()}
        rest: dict[str, Any] = {k: found[k] for k in ("name", "device", "bandwidth", "launch")}
        rest |= {k: found.get(k) for k in ("memory", "copies", "spare_cores")}
        return cls(**rest, **curves, overheads=overheads, gram=surface)


def _curve(found: Mapping[str, Any]) -> Curve:
    return Curve.of(found["seconds"], found.get("power", 3.0))


def _called(make: Callable[..., Machine], found: Mapping[str, Any], *wanted: str) -> Machine:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"a machine without {', '.join(missing)}; give {', '.join(wanted)}")
    try:
        return make(**found)
    except TypeError as error:
        raise ValueError(f"a machine's numbers: {error}") from None


def positive(name: str, value: Any) -> None:
    """Raise ValueError unless a number is above 0 and finite."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} is not a number above 0")
