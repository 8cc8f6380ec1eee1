"""A machine and the links between ranks, as a plan sees them: seconds by size, measured or given.

A collective over several levels is done level by level: sums come together inside of each node
first, then between nodes, each rank with its share of the data, and back. With g parties, n bytes,
latency a and b bytes a second, on one level:

all_reduce   ring 2 (g - 1) (a + n / (g b))                or tree 2 ceil(log2 g) (a + n / b)
all_gather   ring (g - 1) (a + n / b), n a rank's part     between nodes first
all_to_all   a + gap (messages - 1), and what a rank sends or receives, whichever is more

(Thakur, Rabenseifner & Gropp 2005; the gap between two messages of a rank is LogP's, Culler et al.
1993). Of two ways the faster one counts. A broadcast counts as an all_reduce.

What KAISA's ``grad_worker_fraction="auto"`` chooses between differs in four stages alone: solves,
their exchange, preconditioning and its exchange. No batch is there yet that a step could be
recorded with: they are estimated from the plan.
"""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from second_order.contract.training import Training
from second_order.distributed.world import World
from second_order.kfac.group_options import excluded_params
from second_order.kfac.plan import Planner, block_rules, dims_of
from second_order.kfac.solve_async import own_cores
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import Problem
from second_order.kronecker.model_blocks import find_blocks
from second_order.kronecker.solvers import SOLVERS
from second_order.kronecker.triangles import pack_upper_triangular
from second_order.optimizers.config import KFACOptions
from second_order.options import value_at

__all__ = [
    "DEFAULT_NETWORKS",
    "SIMILAR",
    "AutoFraction",
    "Curve",
    "Interconnect",
    "Level",
    "Machine",
    "calibrate",
    "measure_machine",
    "measure_network",
    "workers_of",
]


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


SIZES = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096)

DEFAULT_NETWORKS = {
    "cpu": Interconnect.flat(1e-4, 1e9),
    "cuda": Interconnect.of_nodes(8, (1e-5, 1e11), (2e-5, 2.5e10)),
}
"""Where there is no process group to measure: gloo over a fast link, and eight devices a node on
NVLink with 200 Gbit/s for each between nodes. Round numbers, not those of a machine."""

SIMILAR = 0.03
"""Settings whose steps differ by less than this share count as equally fast: the model of time is
no better than that."""

USUAL = 10
"""Steps between refreshes where a budget is to choose them, later."""


def calibrate(
    device: torch.device | str = "cpu", group: Any = None, *, seconds: float = 10.0
) -> tuple[Machine, Interconnect]:
    """Measure this machine, and the network if a process group is initialised.

    With a process group it is a collective: every rank calls it, and all of them get what the first
    one has measured.

    Args:
        device: The device to measure.
        group: The process group to measure; None for the default one, if there is one.
        seconds: About how long the machine may be measured, 60 at most; sizes that would take
            longer are left to extrapolation.

    Raises:
        ValueError: For seconds outside 0 to 60, or a device without a calibration.
    """
    if not 0 < seconds <= 60:
        raise ValueError(f"seconds={seconds} is outside 0 to 60; 10 is the default")
    device, world = torch.device(device), World(group)
    # All at the same time, as they train: ranks of a machine share its cores and its memory.
    world.all_gather_object(None)
    machine: Machine = world.all_gather_object(measure_machine(device, seconds=seconds))[0]
    if world.size == 1:
        return machine, DEFAULT_NETWORKS[machine.device]
    return machine, measure_network(world, device)


def measure_machine(
    device: torch.device, *, seconds: float = 10.0, sizes: Sequence[int] = SIZES
) -> Machine:
    """Measure a device and this process's Python; ``sizes`` are of products and decompositions."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device} cannot be measured; use 'cpu' or 'cuda'")
    allowed = seconds / 4
    random = torch.Generator().manual_seed(0)

    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").to(device)

    def product(n: int) -> Callable[[], Any]:
        left, right = filled(n, n), filled(n, n)
        return lambda: left @ right

    def decomposition(solver: str, n: int) -> Callable[[], Any]:
        # A symmetric random matrix has eigenvalues within 2 sqrt(n) of 0 for large n (Wigner): all
        # of these are above 0.
        x = filled(n, n).add_(torch.eye(n, dtype=torch.float32, device=device), alpha=4 * n**0.5)
        packed = pack_upper_triangular(((x + x.mT) / n**0.5).unsqueeze(0))
        added = torch.full((1,), 0.1, dtype=torch.float32, device=device)
        problem = Problem(1, n, torch.float32, device, packed, added)
        return lambda: SOLVERS[solver].decompose([problem], torch.float32).finish()

    def fastest(function: Callable[[], Any]) -> float:
        """Seconds of the fastest of a few runs, after one that does not count.

        Runs of 150 ms in all are enough: chance changes them less than the model of time errs.
        """
        function()
        times: list[float] = []
        while sum(times) < min(0.02, allowed / 10) or (len(times) < 3 and sum(times) < 0.15):
            times.append(_seconds(function, device))
        return max(min(times), 1e-9)

    def curve(make: Callable[[int], Callable[[], Any]]) -> Curve:
        """Seconds by size, up to the sizes that would take too long."""
        points: list[tuple[float, float]] = []
        spent = 0.0
        for n in sizes:
            coming = 4 * points[-1][1] * (n / points[-1][0]) ** 3 if points else 0.0
            if spent + coming > allowed:
                break
            taken = fastest(make(n))
            spent += 4 * taken
            # Smaller matrices are never the slower ones, except by chance.
            points.append((float(n), max(taken, points[-1][1] if points else 0.0)))
        return Curve(tuple(points))

    products = curve(product)
    eigh, inverse = (curve(partial(decomposition, solver)) for solver in ("eigen", "inverse"))
    small = filled(8)
    large = torch.ones(2**23, dtype=torch.float32, device=device)
    other = torch.ones(2**23, dtype=torch.float32, device=device)
    launch = fastest(lambda: small.mul_(1.0))
    bandwidth = 3 * large.nbytes / fastest(lambda: large.add_(other))
    # What the package does on next to nothing, by the number of its operations.
    nothing = decomposition("inverse", 8)
    with _Counted() as counted:
        nothing()
    python = max(fastest(nothing) / counted.calls - launch, 0.0)
    memory, threads = None, torch.get_num_threads()
    # Cores that neither kernels nor, beside a device, Python keep busy.
    title, busy = f"{platform.machine()} CPU, {threads} of its cores", threads
    if device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
        title, busy = torch.cuda.get_device_name(device), 1
    spare = max(own_cores() - busy, 0)
    rest = bandwidth, launch, python, memory, spare
    return Machine(title, device.type, products, eigh, inverse, *rest)


class _Counted(TorchDispatchMode):
    """Counts operations, but for views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += not func.is_view
        return func(*args, **(kwargs or {}))


def measure_network(world: World, device: torch.device) -> Interconnect:
    """Measure latency and bandwidth among all ranks, two at least; a collective.

    Two sums, of next to nothing and of 4 MB, and a word from each rank to each are put into the
    formulas. Ranks on other nodes are taken to be on one level with these.
    """
    small, large = (torch.ones(n, dtype=torch.float32, device=device) for n in (8, 2**20))
    words = torch.ones(world.size, dtype=torch.int64, device=device)

    def usual(call: Callable[[], Any]) -> float:
        """The median of some calls, all of which all ranks begin together, on the slowest rank."""
        times = []
        for _ in range(7):
            world.on_cpu().same(0)
            times.append(_seconds(call, device))
        return float(max(world.all_gather_object(sorted(times)[len(times) // 2])))

    ranks = world.size
    little, much = (usual(partial(dist.all_reduce, x, group=world.group)) for x in (small, large))
    swap = partial(dist.all_to_all_single, torch.empty_like(words), words, group=world.group)
    # The faster of ring and tree is the tree for a sum of nothing, the ring for one of much.
    latency = little / min(2 * (ranks - 1), 2 * (ranks - 1).bit_length())
    rest = max(much - 2 * (ranks - 1) * latency, much / 10)
    gap = (usual(swap) - latency) / (ranks - 2) if ranks > 2 else latency
    gap = max(gap, latency / 100)  # noise gives no negative one
    bandwidth = 2 * (ranks - 1) / ranks * large.nbytes / rest
    return Interconnect((Level(latency, bandwidth, gap=gap),), measured=True)


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def workers_of(world_size: int, most: int = 8) -> list[int]:
    """Numbers of gradient workers that are compared: divisors of the number of ranks.

    All of them if they are few; else the largest and the smallest, and some evenly between.
    """
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if len(divisors) <= most:
        return divisors[::-1]
    last = len(divisors) - 1
    return [divisors[round(k * last / (most - 1))] for k in range(most)][::-1]


@dataclass(frozen=True)
class AutoFraction:
    """Chooses the number of gradient workers of KAISA, and plans with it.

    Attributes:
        options: The options that all systems share.
        plan: KAISA's plan, but for its ``fraction``.
    """

    options: KFACOptions
    plan: Callable[..., Any]

    def planner(self, workers: int, ranks: int) -> Planner:
        """The planner with so many gradient workers for each layer."""
        return partial(self.plan, fraction=workers / ranks)

    def choose(self, training: Training) -> int:
        """Measure, and choose the number of gradient workers; all ranks choose the same."""
        world, model, options = training.world, training.model, self.options
        if world.size == 1:
            return 1
        machine = measure_machine(training.device, seconds=0.4, sizes=(8, 32, 128, 512))
        # Of pretended ranks there is nothing to measure, and nobody to ask.
        alone = world.backend == "fake"
        links = DEFAULT_NETWORKS[machine.device]
        if not alone:
            links = measure_network(world, training.device)
        sizes = {id(p): p.numel() for p in training.training_params()}
        how = options.factor_dtype, block_rules(options)
        excluded = excluded_params(training.groups)
        blocks, _ = find_blocks(model, sizes, options.skip_layers, {}, *how, excluded=excluded)
        workers = self.fastest(blocks, world.size, machine, links)
        return workers if alone else int(world.all_gather_object(workers)[0])

    def fastest(
        self, blocks: Sequence[KroneckerBlock], ranks: int, machine: Machine, links: Interconnect
    ) -> int:
        """The number of gradient workers whose stages take least; of similar ones the smallest."""
        seconds = {n: self._seconds(blocks, n, ranks, machine, links) for n in workers_of(ranks)}
        return min(n for n, s in seconds.items() if s <= (1 + SIMILAR) * min(seconds.values()))

    def _seconds(
        self,
        blocks: Sequence[KroneckerBlock],
        workers: int,
        ranks: int,
        machine: Machine,
        links: Interconnect,
    ) -> float:
        """Seconds a step of the four stages on the busiest rank, with so many gradient workers."""
        options, eigen = self.options, self.options.solver == "eigen"
        every = options.refresh_interval
        steps = USUAL if every is None else max(int(value_at(every, 0)), 1)
        plan = self.planner(workers, ranks)([dims_of(block) for block in blocks], ranks)
        # Seconds of solves and bytes of inverses by solver; of gradients by the row's first rank.
        solving, products = [0.0] * ranks, [0.0] * ranks
        inverses, results = [0] * ranks, [0] * ranks
        for block, layer in zip(blocks, plan.layers, strict=True):
            shape, first = block.shape, layer.workers[0]
            for letter in shape.letters:
                if letter in shape.diagonals:
                    continue
                n, solver = shape.dims[letter], layer.solver(letter)
                solving[solver] += shape.groups * machine.decomposition(options.solver, n)
                inverses[solver] += 4 * shape.groups * (n * n if eigen else n * (n + 1) // 2)
                # A gradient has as many elements as both sizes multiplied.
                flops = 2 * n * shape.groups * shape.dims["A"] * shape.dims["G"]
                products[first] += (2 if eigen else 1) * machine.dense(flops)
            results[first] += sum(4 * p.numel() for p in block.params)  # in float32
        rows, others = ranks // workers, workers - 1
        solved, found = max(solving), max(products)
        if others:
            sent, arriving = max(inverses) * others, sum(inverses) / rows
            solved += links.all_to_all(sent, max(arriving, sent / ranks), range(workers))
        if rows > 1:
            column, arriving = range(0, ranks, workers), sum(results) - min(results[::workers])
            found += links.all_to_all(max(results) * (rows - 1), arriving, column)
        return found + solved / steps
