"""Machines and networks measured: seconds of the package's own functions, by size.

Each size is run a few times, and the fastest run counts, so that other work on the machine is not
taken for the machine's. What a layer costs besides its matrices is taken from two small trainings,
of few layers and of many.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from second_order.contract.averaging import start_average
from second_order.contract.training import Training
from second_order.distributed.collectives import World
from second_order.kfac.curvature import KFAC
from second_order.kfac.options import KFACOptions, own_cores
from second_order.kfac.plan import System, distkfac_plan
from second_order.kronecker.decompositions import Problem
from second_order.kronecker.layers import gram
from second_order.kronecker.solvers import SOLVERS
from second_order.kronecker.triangles import pack_upper_triangular, unpack_upper_triangular
from second_order.options import PEAK_LR, follow_learning_rates
from second_order.planning.interconnect import Interconnect, Level
from second_order.planning.machine import Curve, Machine, Overhead, Surface
from second_order.stages import Meter

__all__ = [
    "DEFAULT_NETWORKS",
    "Clock",
    "calibrate",
    "measure_machine",
    "measure_network",
    "quick_machine",
]

Clock = Callable[[], float]

SIZES = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ROWS = (32, 512, 8192)
FEW, MANY, WIDTH = 2, 10, 8  # layers of the small trainings, and their size

DEFAULT_NETWORKS = {
    "cpu": Interconnect.flat(1e-4, 1e9),
    "cuda": Interconnect.of_nodes(8, (1e-5, 1e11), (2e-5, 2.5e10)),
}
"""Where there is no process group to measure: gloo over a fast link, and eight devices a node on
NVLink with 200 Gbit/s for each between nodes. Round numbers, not those of a machine."""


def calibrate(
    device: torch.device | str = "cpu",
    group: Any = None,
    *,
    seconds: float = 10.0,
    sizes: Sequence[int] = (),
    clock: Clock = time.perf_counter,
) -> tuple[Machine, Interconnect]:
    """Measure this machine, and the network if a process group is initialised.

    With a process group it is a collective: every rank calls it, and all of them get what the first
    one has measured.

    Args:
        device: The device to measure.
        group: The process group to measure; None for the default one, if there is one.
        seconds: About how long the machine may be measured, 60 at most; sizes that would take
            longer are left to extrapolation.
        sizes: Sizes of factors that are measured besides the usual ones.
        clock: Returns the time in seconds. ``time.process_time`` leaves out what others do on a
            CPU.

    Raises:
        ValueError: For seconds outside 0 to 60, or a device without a calibration.
    """
    if not 0 < seconds <= 60:
        raise ValueError(f"seconds={seconds} is outside 0 to 60; 10 is the default")
    device = torch.device(device)
    world = World(group)
    machine: Machine | None = None
    error = ""
    # All at the same time, as they train: ranks of a machine share its cores and its memory.
    world.all_gather_object(None)
    world.all_gather_object(None)
    try:
        machine = measure_machine(device, seconds=seconds, sizes=sizes, clock=clock)
    except Exception as raised:  # the others wait for an answer
        if world.size == 1:
            raise
        error = f"{type(raised).__name__}: {raised}"
    machine, error = world.all_gather_object((machine, error))[0]
    if machine is None:
        raise ValueError(f"rank 0 could not measure {device}: {error}")
    if world.size == 1:
        return machine, DEFAULT_NETWORKS[machine.device]
    return machine, measure_network(world, device)


# ------------------------------------------------------------------------------------- the machine


def measure_machine(
    device: torch.device,
    *,
    seconds: float = 10.0,
    sizes: Sequence[int] = (),
    clock: Clock = time.perf_counter,
    name: str = "",
) -> Machine:
    """Measure a device and this process's Python.

    Args:
        device: The device, on the CPU or one that ``torch.accelerator`` knows.
        seconds: About how long the measurement may take.
        sizes: Sizes of factors that are measured besides the usual ones.
        clock: Returns the time in seconds.
        name: A name for the machine; "" for one from its device.

    Raises:
        ValueError: For a device without storage or without a synchronisation.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device} cannot be measured; use 'cpu' or 'cuda'")
    timer = _Timer(device, clock, seconds / 5)
    random = torch.Generator().manual_seed(0)

    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    def product(n: int) -> Callable[[], Any]:
        left, right = filled(n, n), filled(n, n)
        return lambda: left @ right

    def second_moment(rows: int) -> Callable[[int], Callable[[], Any]]:
        def of(n: int) -> Callable[[], Any]:
            x = filled(1, rows, n)
            return lambda: gram(x, True, True)

        return of

    def decomposition(solver: str) -> Callable[[int], Callable[[], Any]]:
        def of(n: int) -> Callable[[], Any]:
            x = filled(2 * n, n)
            packed = pack_upper_triangular((x.mT @ x / n).unsqueeze(0))
            added = torch.full((1,), 0.1, device=device)

            def build() -> Tensor:
                return unpack_upper_triangular(packed, n)

            problem = Problem(1, n, torch.float32, device, build, added)
            return lambda: SOLVERS[solver].decompose([problem], torch.float32, True)

        return of

    usual = sorted({*SIZES, *(n for n in sizes if SIZES[0] <= n <= SIZES[-1])})
    products = timer.curve(product, SIZES)
    surface = Surface(
        tuple((rows, timer.curve(second_moment(rows), SIZES[:7], 2.0)) for rows in ROWS)
    )
    eigh, inverse = (timer.curve(decomposition(s), usual) for s in ("eigen", "inverse"))
    small, large, other = filled(8), filled(2**23), filled(2**23)
    launch = timer(lambda: small.mul_(1.0))
    bandwidth = 3 * large.nbytes / timer(lambda: large.add_(other))
    copies = 2 * large.nbytes / timer(lambda: torch.cat([large, other]))
    machine = Machine(
        name or _name_of(device),
        device.type,
        products,
        eigh,
        inverse,
        bandwidth,
        launch,
        memory=_memory_of(device),
        gram=surface,
        copies=copies,
        spare_cores=_spare_cores(device),
    )
    return _with_overheads(machine, device, clock)


def quick_machine(device: torch.device, clock: Clock = time.perf_counter) -> Machine:
    """Measure matrix products and copies of a device, in a fraction of a second.

    Decompositions are taken to go at the rate of products, with 9 n^3 operations for eigenvectors
    and n^3 for an inverse, at a third of it: good enough to compare how the same ones are spread.

    Args:
        device: The device.
        clock: Returns the time in seconds.
    """
    timer = _Timer(device, clock, 0.1)

    def product(n: int) -> Callable[[], Any]:
        left = torch.ones(n, n, device=device)
        return lambda: left @ left

    products = timer.curve(product, (32, 128, 512))
    slower = {factor: [(n, factor * s) for n, s in products.points] for factor in (1.5, 13.5)}
    x = torch.ones(2**20, device=device)
    return Machine(
        _name_of(device),
        "cpu" if device.type == "cpu" else "cuda",
        products,
        Curve(tuple(slower[13.5])),
        Curve(tuple(slower[1.5])),
        2 * x.nbytes / timer(lambda: x.add_(1.0)),
        timer(lambda: x[:8].add_(1.0)),
        copies=2 * x.nbytes / timer(lambda: torch.cat([x, x])),
    )


class _Timer:
    """Seconds of functions: the fastest of a few runs, after one that does not count."""

    def __init__(self, device: torch.device, clock: Clock, seconds: float) -> None:
        self._device, self._clock, self._seconds = device, clock, seconds

    def __call__(self, function: Callable[[], Any], least: float = 0.02) -> float:
        self._run(function, 1)
        times: list[float] = []
        # A clock that ticks in milliseconds sees nothing of one small function.
        repeats = max(1, min(100, int(1e-3 / max(self._run(function, 1), 1e-6))))
        while sum(times) * repeats < least or len(times) < 3:
            times.append(self._run(function, repeats) / repeats)
            if times[-1] > self._seconds / 3:
                break
        return max(min(times), 1e-9)

    def _run(self, function: Callable[[], Any], repeats: int) -> float:
        start = self._clock()
        for _ in range(repeats):
            function()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock() - start

    def curve(
        self, make: Callable[[int], Callable[[], Any]], sizes: Sequence[int], power: float = 3.0
    ) -> Curve:
        """Seconds by size, up to the sizes that would take too long."""
        points: list[tuple[float, float]] = []
        spent = 0.0
        for n in sizes:
            coming = 4 * points[-1][1] * (n / points[-1][0]) ** power if points else 0.0
            if spent + coming > self._seconds:
                break
            seconds = self(make(n))
            spent += max(4 * seconds, 0.02)
            # Smaller matrices are never the slower ones, except by chance.
            points.append((float(n), max(seconds, points[-1][1] if points else 0.0)))
        return Curve(tuple(points), power)


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


def _spare_cores(device: torch.device) -> int:
    """This process's cores that neither its kernels nor, beside a device, its Python keep busy."""
    return max(own_cores() - (torch.get_num_threads() if device.type == "cpu" else 1), 0)


def _memory_of(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


# ------------------------------------------------------------------------------------ the overheads


def _with_overheads(machine: Machine, device: torch.device, clock: Clock) -> Machine:
    """The machine with what each stage and each layer cost besides their matrices."""
    found: dict[str, Overhead] = {}
    for solver in ("inverse", "eigen"):
        few, many = (_stages_of(layers, solver, device, clock) for layers in (FEW, MANY))
        for stage in ("statistics", "solve", "precondition", "base"):
            slope = max(many[stage] - few[stage], 0.0) / (MANY - FEW)
            start = max(few[stage] - FEW * slope, 0.0)
            priced = 0.0
            if stage == "statistics":
                priced = 2 * machine.statistics(16, WIDTH)
            elif stage == "solve":
                priced = 2 * machine.decomposition(solver, WIDTH)
            elif stage == "precondition":
                priced = (4 if solver == "eigen" else 2) * machine.product(WIDTH, WIDTH, WIDTH)
            name = solver if stage == "solve" else stage
            each = 2 if stage == "base" else 1  # a weight and a bias
            found[name] = Overhead(start, max(slope - priced, 0.0) / each)
    found["exchange"] = Overhead(0.0, found["precondition"].layer / 2)
    return Machine(**{**vars(machine), "overheads": found})


def _stages_of(
    layers: int, solver: str, device: torch.device, clock: Clock, steps: int = 16
) -> dict[str, float]:
    """Seconds of each stage of a small training's step, the fastest of some."""
    torch_state = torch.get_rng_state()
    modules = [m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    torch.set_rng_state(torch_state)
    model = nn.Sequential(*modules).to(device)
    base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    base.param_groups[0][PEAK_LR] = 0.0
    meter = Meter(clock)
    training = Training(
        "calibration",
        model,
        True,
        False,
        World.alone(),
        False,
        None,
        base=base,
        base_name="SGD",
        meter=meter,
    )
    options = KFACOptions(
        damping=0.1,
        preconditioner_scale="newton",
        factor_decay=0.95,
        solver=solver,  # type: ignore[arg-type]
        factor_update_steps=1,
        inv_update_steps=1,
    )
    system = System(_alone, options.block_rules)
    curvature = KFAC(training, options, system)
    curvature.begin()
    x = torch.sin(torch.arange(16.0 * WIDTH, device=device)).view(16, WIDTH)
    fastest: dict[str, float] = {}
    try:
        for step in range(steps):
            base.zero_grad()
            with torch.enable_grad():
                model(x).square().mean().backward()
            with torch.no_grad():
                follow_learning_rates(base.param_groups)
                curvature.prepare()
                curvature.precondition(start_average(training, curvature.route))
                with meter.stage("base"):
                    base.step()
                curvature.correct()
            training.steps += 1
            curvature.watch()
            meter.lap()
            if step < 4:
                continue
            found = meter.read(curvature.accounts)
            for stage in ("statistics", "solve", "precondition", "base"):
                seconds = found[f"seconds/{stage}"] + found.get(f"seconds/{stage}_exchange", 0.0)
                fastest[stage] = min(fastest.get(stage, seconds), seconds)
    finally:
        curvature.close()
    return fastest


def _alone(layers: Any, ranks: int) -> Any:
    return distkfac_plan(layers, ranks, keeps_all=True)


# -------------------------------------------------------------------------------------- the network


def measure_network(world: World, device: torch.device) -> Interconnect:
    """Measure latency and bandwidth among all ranks; a collective.

    Two sums, of next to nothing and of 4 MB, and a word from each rank to each are put into the
    formulas. Ranks on other nodes are taken to be on one level with these.

    Args:
        world: The ranks, two at least.
        device: The device of the messages.
    """
    small, large = (torch.ones(n, device=device) for n in (8, 2**20))
    words = torch.ones(world.size, dtype=torch.int64, device=device)
    calls = [
        partial(dist.all_reduce, small, group=world.group),
        partial(dist.all_reduce, large, group=world.group),
        partial(dist.all_to_all_single, torch.empty_like(words), words, group=world.group),
    ]
    seconds = [_slowest(world, _usual_seconds(world, call, device)) for call in calls]
    return network_of(seconds[0], seconds[1], seconds[2], large.nbytes, world.size)


def network_of(
    small: float, large: float, exchange: float, nbytes: int, ranks: int
) -> Interconnect:
    """The flat network in which collectives take so many seconds.

    Args:
        small: Seconds of a sum of next to nothing.
        large: Seconds of a sum of ``nbytes``.
        exchange: Seconds of a word from each rank to each.
        nbytes: Bytes of the large sum.
        ranks: Number of ranks, two at least.
    """
    # The faster of ring and tree is the tree for a sum of nothing, the ring for one of much.
    rounds = min(2 * (ranks - 1), 2 * (ranks - 1).bit_length())
    latency = small / rounds
    rest = max(large - 2 * (ranks - 1) * latency, large / 10)
    gap = (exchange - latency) / (ranks - 2) if ranks > 2 else latency
    gap = max(gap, latency / 100)  # noise gives no negative one
    bandwidth = 2 * (ranks - 1) / ranks * nbytes / rest
    return Interconnect((Level(latency, bandwidth, gap=gap),), measured=True)


def _usual_seconds(world: World, call: Callable[[], Any], device: torch.device) -> float:
    """The median of some calls, all of which all ranks begin together."""
    times = []
    for _ in range(7):
        world.on_cpu().same([0])
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _slowest(world: World, seconds: float) -> float:
    return float(max(world.all_gather_object(seconds)))
