"""Machines and networks measured, and the share of gradient workers that is fastest on them.

Each size is run a few times, and the fastest run counts, so that other work on the machine is not
taken for the machine's. What KAISA's ``grad_worker_fraction="auto"`` chooses between differs in
four stages alone: solves, their exchange, preconditioning and its exchange. No batch is there yet
that a step could be recorded with: they are estimated from the plan.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.world import World
from second_order.kfac.options import KFACOptions, own_cores
from second_order.kfac.plan import Planner, dims_of
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import Problem
from second_order.kronecker.model_blocks import find_blocks
from second_order.kronecker.solvers import SOLVERS
from second_order.kronecker.triangles import pack_upper_triangular, unpack_upper_triangular
from second_order.options import AUTO, value_at
from second_order.planning.machine import Curve, Interconnect, Level, Machine
from second_order.planning.record import Simulation

__all__ = [
    "DEFAULT_NETWORKS",
    "SIMILAR",
    "AutoFraction",
    "calibrate",
    "measure_machine",
    "measure_network",
    "workers_of",
]

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

    def fastest(function: Callable[[], Any]) -> float:
        """Seconds of the fastest of a few runs, after one that does not count."""
        function()
        times: list[float] = []
        while sum(times) < min(0.02, allowed / 10) or (len(times) < 3 and sum(times) < allowed):
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
    small, large, other = filled(8), filled(2**23), filled(2**23)
    launch = fastest(lambda: small.mul_(1.0))
    bandwidth = 3 * large.nbytes / fastest(lambda: large.add_(other))
    # What the package does on next to nothing, by the number of its operations.
    nothing = decomposition("inverse", 8)
    curves = products, eigh, inverse
    with Simulation(Machine("", device.type, *curves, bandwidth, launch)) as counted:
        nothing()
    python = max(fastest(nothing) / counted.calls - launch, 0.0)
    memory, threads = None, torch.get_num_threads()
    # Cores that neither kernels nor, beside a device, Python keep busy.
    title, busy = f"{platform.machine()} CPU, {threads} of its cores", threads
    if device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
        title, busy = torch.cuda.get_device_name(device), 1
    spare = max(own_cores() - busy, 0)
    return Machine(title, device.type, *curves, bandwidth, launch, python, memory, spare)


def measure_network(world: World, device: torch.device) -> Interconnect:
    """Measure latency and bandwidth among all ranks, two at least; a collective.

    Two sums, of next to nothing and of 4 MB, and a word from each rank to each are put into the
    formulas. Ranks on other nodes are taken to be on one level with these.
    """
    small, large = (torch.ones(n, device=device) for n in (8, 2**20))
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
        sizes = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        how = options.factor_dtype, options.symmetry_aware, options.block_rules
        blocks, _ = find_blocks(model, sizes, options.skip_layers, {}, *how)
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
        every = options.inv_update_steps
        steps = USUAL if every in (None, AUTO) else max(int(value_at(every, 0)), 1)
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
                whole = eigen or not options.symmetry_aware
                inverses[solver] += 4 * shape.groups * (n * n if whole else n * (n + 1) // 2)
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
