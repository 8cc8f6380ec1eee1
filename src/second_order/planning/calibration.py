"""Machines and networks measured: seconds of the package's own functions, by size.

Each size is run a few times, and the fastest run counts, so that other work on the machine is not
taken for the machine's.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.distributed.world import World
from second_order.kfac.options import own_cores
from second_order.kronecker.decompositions import Problem
from second_order.kronecker.solvers import SOLVERS
from second_order.kronecker.triangles import pack_upper_triangular, unpack_upper_triangular
from second_order.planning.machine import Curve, Interconnect, Level, Machine
from second_order.planning.record import Simulation

__all__ = ["DEFAULT_NETWORKS", "calibrate", "measure_machine", "measure_network"]

SIZES = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096)

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
    device = torch.device(device)
    world = World(group)
    # All at the same time, as they train: ranks of a machine share its cores and its memory.
    world.all_gather_object(None)
    try:
        machine, error = measure_machine(device, seconds=seconds), ""
    except Exception as raised:  # the others wait for an answer
        if world.size == 1:
            raise
        machine, error = None, f"{type(raised).__name__}: {raised}"
    machine, error = world.all_gather_object((machine, error))[0]
    if machine is None:
        raise ValueError(f"rank 0 could not measure {device}: {error}")
    if world.size == 1:
        return machine, DEFAULT_NETWORKS[machine.device]
    return machine, measure_network(world, device)


def measure_machine(
    device: torch.device,
    *,
    seconds: float = 10.0,
    sizes: Sequence[int] = SIZES,
) -> Machine:
    """Measure a device and this process's Python.

    Args:
        device: The device.
        seconds: About how long the measurement may take.
        sizes: The sizes of products and decompositions.

    Raises:
        ValueError: For a device other than a CPU or CUDA's.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device} cannot be measured; use 'cpu' or 'cuda'")
    timer = _Timer(device, seconds / 4)
    random = torch.Generator().manual_seed(0)

    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    def product(n: int) -> Callable[[], Any]:
        left, right = filled(n, n), filled(n, n)
        return lambda: left @ right

    def decomposition(solver: str, n: int) -> Callable[[], Any]:
        x = filled(2 * n, n)
        packed = pack_upper_triangular((x.mT @ x / n).unsqueeze(0))
        added = torch.full((1,), 0.1, device=device)
        build = partial(unpack_upper_triangular, packed, n)
        problem = Problem(1, n, torch.float32, device, build, added)
        return lambda: SOLVERS[solver].decompose([problem], torch.float32, True)

    products = timer.curve(product, sizes)
    eigh, inverse = (
        timer.curve(partial(decomposition, solver), sizes) for solver in ("eigen", "inverse")
    )
    small, large, other = filled(8), filled(2**23), filled(2**23)
    launch = timer(lambda: small.mul_(1.0))
    # What the package does on next to nothing, by the number of its operations.
    name, nothing = "cpu" if device.type == "cpu" else "cuda", decomposition("inverse", 8)
    bare = Machine(name, name, products, eigh, inverse, 1e12, launch)
    with Simulation(bare) as simulation:
        nothing()
    python = max(timer(nothing) / simulation.calls - launch, 0.0)
    memory = None
    title = f"{platform.machine()} CPU, {torch.get_num_threads()} of its cores"
    if device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
        title = torch.cuda.get_device_name(device)
    # Cores that neither kernels nor, beside a device, Python keep busy.
    busy = torch.get_num_threads() if device.type == "cpu" else 1
    return Machine(
        title,
        name,
        products,
        eigh,
        inverse,
        bandwidth=3 * large.nbytes / timer(lambda: large.add_(other)),
        launch=launch,
        python=python,
        memory=memory,
        spare_cores=max(own_cores() - busy, 0),
    )


class _Timer:
    """Seconds of functions: the fastest of a few runs, after one that does not count."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def __call__(self, function: Callable[[], Any]) -> float:
        function()
        times: list[float] = []
        while sum(times) < min(0.02, self._seconds / 10) or len(times) < 3:
            times.append(_seconds(function, self._device))
            if sum(times) > self._seconds:
                break
        return max(min(times), 1e-9)

    def curve(self, make: Callable[[int], Callable[[], Any]], sizes: Sequence[int]) -> Curve:
        """Seconds by size, up to the sizes that would take too long."""
        points: list[tuple[float, float]] = []
        spent = 0.0
        for n in sizes:
            coming = 4 * points[-1][1] * (n / points[-1][0]) ** 3 if points else 0.0
            if spent + coming > self._seconds:
                break
            seconds = self(make(n))
            spent += 4 * seconds
            # Smaller matrices are never the slower ones, except by chance.
            points.append((float(n), max(seconds, points[-1][1] if points else 0.0)))
        return Curve(tuple(points))


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
    little, much, exchange = (
        max(world.all_gather_object(_usual_seconds(world, call, device))) for call in calls
    )
    ranks = world.size
    # The faster of ring and tree is the tree for a sum of nothing, the ring for one of much.
    latency = little / min(2 * (ranks - 1), 2 * (ranks - 1).bit_length())
    rest = max(much - 2 * (ranks - 1) * latency, much / 10)
    gap = (exchange - latency) / (ranks - 2) if ranks > 2 else latency
    gap = max(gap, latency / 100)  # noise gives no negative one
    bandwidth = 2 * (ranks - 1) / ranks * large.nbytes / rest
    return Interconnect((Level(latency, bandwidth, gap=gap),), measured=True)


def _usual_seconds(world: World, call: Callable[[], Any], device: torch.device) -> float:
    """The median of some calls, all of which all ranks begin together."""
    times = []
    for _ in range(7):
        world.on_cpu().same(0)
        times.append(_seconds(call, device))
    return sorted(times)[len(times) // 2]


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start
