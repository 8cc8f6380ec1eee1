"""A machine and its network in the cost model: their speeds, given or measured.

Among g ranks, with latency a and bandwidth b, an all-gather or a reduce-scatter of n
bytes in all takes ``ceil(log2 g) a + n (g - 1) / (g b)`` seconds, by recursive doubling
or halving. An all-reduce is one after the other (Thakur, Rabenseifner & Gropp 2005).
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.utils.checks import check_choice

__all__ = [
    "ASSUMED_NETWORKS",
    "Interconnect",
    "Machine",
    "bytes_sent",
    "calibrate",
    "measure_ranks",
    "seconds_of",
]


@dataclass(frozen=True)
class Machine:
    """How fast one rank's device computes in float32.

    Attributes:
        name: A name for tables.
        matmul: Seconds of a product of two n x n matrices, by n.
        eigh: Seconds of the eigendecomposition of a symmetric n x n matrix, by n.
        inverse: Seconds of the Cholesky inverse of an n x n matrix, by n.
        memory: Bytes of the device's memory. None: unknown.
        device: "cuda" or "cpu". With a GPU, threads of the host compute DistKFAC's
            inverses while training continues. On a CPU, training itself uses the cores.

    Raises:
        ValueError: For another device, or a table without positive seconds.
    """

    name: str
    matmul: Mapping[int, float]
    eigh: Mapping[int, float]
    inverse: Mapping[int, float]
    memory: float | None = None
    device: str = "cuda"

    def __post_init__(self) -> None:
        check_choice("device", self.device, ASSUMED_NETWORKS)
        for name in ("matmul", "eigh", "inverse"):
            seconds = getattr(self, name)
            if not seconds or min(seconds.values()) <= 0.0:
                raise ValueError(
                    f"{name}={seconds} does not give positive seconds by size; use "
                    f"second_order.calibrate(), which measures them"
                )

    def product_seconds(self, flops: float) -> float:
        """Return the seconds of matrix products, if they are as fast as square ones."""
        return interpolate(self.matmul, (flops / 2) ** (1 / 3))

    def decomposition_seconds(self, solver: str, n: int) -> float:
        """Return the seconds to decompose one factor of size n with a solver."""
        if solver == "eigen":
            return interpolate(self.eigh, n)
        return interpolate(self.inverse, n)


def interpolate(seconds: Mapping[int, float], n: float) -> float:
    """Return the seconds at a size n, between sizes with known seconds.

    Between two sizes, the seconds are a power of n. Below the smallest size, they are
    constant, because the launch overhead dominates. Above the largest, they grow as n³.
    """
    sizes = sorted(seconds)
    if n <= sizes[0]:
        return seconds[sizes[0]]
    if n >= sizes[-1]:
        return float(seconds[sizes[-1]] * (n / sizes[-1]) ** 3)

    k = bisect(sizes, n)
    below = sizes[k - 1]
    above = sizes[k]
    power = math.log(seconds[above] / seconds[below]) / math.log(above / below)
    return float(seconds[below] * (n / below) ** power)


@dataclass(frozen=True)
class Interconnect:
    """The links between ranks, all equally far from each other.

    Attributes:
        latency: Seconds of a message of next to no bytes from one rank to another.
        bandwidth: Bytes per second that each rank can send while all ranks send.
        origin: "given", "measured" or "assumed", for tables.
    """

    latency: float
    bandwidth: float
    origin: str = "given"

    def gather_seconds(self, nbytes: float, ranks: int) -> float:
        """Seconds of an all-gather of n bytes in all, or of a reduce-scatter."""
        rounds = math.ceil(math.log2(ranks))
        return rounds * self.latency + bytes_sent(nbytes, ranks) / self.bandwidth


def bytes_sent(nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-gather or a reduce-scatter."""
    return nbytes * (ranks - 1) / ranks


ASSUMED_NETWORKS = {
    "cpu": Interconnect(1e-4, 1e9, "assumed"),
    "cuda": Interconnect(2e-5, 2.5e10, "assumed"),
}
"""Used if there is no process group to measure: gloo over a fast link, and 200 Gbit/s
per GPU. These are round numbers, not those of a machine."""

SIZES = (64, 256, 1024)
"""Sizes of the matrices that are measured."""

SMALL_MESSAGE = 8
LARGE_MESSAGE = 2**20
"""Elements of the two messages that are measured."""


def calibrate(
    device: torch.device | str = "cpu", group: Any = None
) -> tuple[Machine, Interconnect]:
    """Measure this machine for some seconds, and the network of a process group.

    If there is a process group, every rank must call this. All ranks get the first
    rank's machine and the slowest rank's messages. On one rank, the network is that of
    ``ASSUMED_NETWORKS``.

    Args:
        device: The device to measure, a CPU or a CUDA device.
        group: The process group to measure. None: the default group, if any.

    Raises:
        RuntimeError: If torch does not know the device.
        ValueError: For any other device.
    """
    return measure_ranks(torch.device(device), World(group))


def measure_ranks(device: torch.device, world: World) -> tuple[Machine, Interconnect]:
    """Measure the machine and the network of some ranks. Collective."""
    if device.type not in ASSUMED_NETWORKS:
        raise ValueError(f"device={device} cannot be measured; use 'cpu' or 'cuda'")

    # All ranks measure together, because ranks on one host share cores and memory.
    world.all_gather_object(None)
    machine: Machine = world.all_gather_object(_measured_machine(device))[0]
    if world.size == 1:
        return machine, ASSUMED_NETWORKS[device.type]
    return machine, _measured_network(world, device)


def _measured_machine(device: torch.device) -> Machine:
    # Time the operations on random matrices.
    matmul: dict[int, float] = {}
    eigh: dict[int, float] = {}
    inverse: dict[int, float] = {}
    generator = torch.Generator().manual_seed(0)
    for n in SIZES:
        x = torch.randn(n, n, generator=generator, dtype=torch.float32, device="cpu")
        x = x.to(device)
        factor = x @ x.mT / n + torch.eye(n, dtype=torch.float32, device=device)
        matmul[n] = seconds_of(partial(torch.matmul, x, x), device)
        eigh[n] = seconds_of(partial(torch.linalg.eigh, factor), device)
        inverse[n] = seconds_of(partial(_cholesky_inverse, factor), device)

    if device.type == "cpu":
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        return Machine(name, matmul, eigh, inverse, device="cpu")
    properties = torch.cuda.get_device_properties(device)
    return Machine(properties.name, matmul, eigh, inverse, properties.total_memory)


def _cholesky_inverse(factor: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(factor))


def _measured_network(world: World, device: torch.device) -> Interconnect:
    """Compute latency and bandwidth from the times of two all-reduces."""
    small = torch.ones(SMALL_MESSAGE, dtype=torch.float32, device=device)
    large = torch.ones(LARGE_MESSAGE, dtype=torch.float32, device=device)

    def slowest(tensor: Tensor) -> float:
        seconds = seconds_of(lambda: world.all_reduce([tensor]).wait(), device)
        return float(max(world.all_gather_object(seconds)))

    small_seconds = slowest(small)
    large_seconds = slowest(large)
    latency = small_seconds / 2 / math.ceil(math.log2(world.size))
    # Noise must not make the time of the bytes zero or negative.
    transfer = max(large_seconds - small_seconds, large_seconds / 10)
    bandwidth = 2 * bytes_sent(large.nbytes, world.size) / transfer
    return Interconnect(latency, bandwidth, "measured")


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """The median seconds of five calls, after one that warms up."""
    times: list[float] = []
    for _ in range(6):
        start = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
