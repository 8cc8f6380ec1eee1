"""What a step sends and what it leaves in memory, process by process, in a world of many.

    python benchmarks/speed/scaling.py             ResNet-50 on 64 processes, a minute or two
    python benchmarks/speed/scaling.py --processes 16 --skip-check

Nothing is sent. Volumes follow from the optimizers' own assignments; then, unless --skip-check, a
few of the processes are simulated: each builds its optimizer in a world of that size, with torch's
fake process group, and takes one step with a refresh, whose bytes and state must be those computed.
Beside them stand the formulas of the DP-KFAC paper (Zhang et al. 2023, Table 2). All in float32, at
a step that refreshes everything. MEM-OPT is with factor_exchange="reduce".

Two measures of traffic. "handed over" is what a process passes to torch.distributed. "moved" is
what has to leave it: an all-reduce of n elements counts 2 (P - 1) / P n, a ring's, and messages to
named processes count once each. Summed over processes, "moved" is what the paper counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from instruments import sent_bytes
from second_order import DPKFAC, KAISA, SecondOrderWarning
from second_order.distributed.assignment import (
    Grid,
    LayerDims,
    OwnerAssignment,
    assign_layers,
    assign_owners,
)
from second_order.kronecker.solvers import SOLVERS, SolverName
from second_order.kronecker.triangles import packed_length
from workloads import resnet50

FLOAT = 4
MB, MILLION = 1e6, 1e6
KINDS = ("factors", "inverses", "averaging", "gradients")
KIND_NAMES = ("factors", "inverses", "plain gradients", "preconditioned")
ALLOWANCE = 1.05

# ------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Network:
    """What volumes follow from: layers with factors, and parameters that are in none.

    Attributes:
        layers: Sizes of their factors.
        others: Elements of every other parameter.
        biases: How many of the layers have one.
    """

    layers: Sequence[LayerDims]
    others: Sequence[int]
    biases: int

    @property
    def gradient_sizes(self) -> list[int]:
        """Elements of each layer's gradient."""
        return [layer.groups * layer.in_dim * layer.out_dim for layer in self.layers]

    @property
    def factor_sizes(self) -> list[int]:
        """A² + G² of each layer, as the paper counts."""
        return [layer.groups * (layer.in_dim**2 + layer.out_dim**2) for layer in self.layers]

    @property
    def tensors(self) -> int:
        """Number of parameters, each weight and each bias for itself."""
        return len(self.layers) + self.biases + len(self.others)


def network_of(model: nn.Module) -> Network:
    """The layers of a network of Conv2d and Linear, in the order in which it names them."""
    modules = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    layers = []
    for module in modules:
        groups = module.groups if isinstance(module, nn.Conv2d) else 1
        in_dim = module.weight[0].numel() + (module.bias is not None)
        layers.append(LayerDims(groups, in_dim, len(module.weight) // groups))
    known = {id(p) for module in modules for p in module.parameters()}
    others = [p.numel() for p in model.parameters() if id(p) not in known]
    biases = sum(module.bias is not None for module in modules)
    return Network(layers, others, biases)


# ------------------------------------------------------------------------------------ the volumes


@dataclass(frozen=True)
class Sent:
    """Elements of one kind that each process hands over, and that leave it, in a step."""

    handed: list[float]
    moved: list[float]


@dataclass(frozen=True)
class Volumes:
    """What one system sends at a step with a refresh, and keeps; elements, a list over processes.

    Attributes:
        name: The system, as the tables have it.
        sent: By kind, one of KINDS.
        factors: Of running averages.
        inverses: Of inverses, as they are applied.
    """

    name: str
    sent: dict[str, Sent]
    factors: list[int]
    inverses: list[int]


@dataclass(frozen=True)
class System:
    """An optimizer with its options, and its volumes as they should be."""

    name: str
    optimizer: Callable[..., Any]
    options: dict[str, Any]
    volumes: Callable[[Network, int, SolverName], Volumes]


def all_reduced(elements: int, processes: int) -> Sent:
    """A sum that everybody gets."""
    moved = 2 * (processes - 1) / processes * elements
    return Sent([elements] * processes, [moved] * processes)


def summed_for_owners(owned: Sequence[int], for_all: int) -> Sent:
    """Sums of which each process gets its own; ``for_all`` elements go to everybody."""
    handed = sum(owned) + len(owned) * for_all
    return Sent([handed] * len(owned), [handed - own - for_all for own in owned])


def given_to_all(owned: Sequence[int]) -> Sent:
    """Each process sends what it has to every other one."""
    sent: list[float] = [(len(owned) - 1) * own for own in owned]
    return Sent(sent, sent)


def by_owner(sizes: Sequence[int], owners: Sequence[int], processes: int) -> list[int]:
    """What each process has of items with these sizes and owners."""
    owned = [0] * processes
    for size, owner in zip(sizes, owners, strict=True):
        owned[owner] += size
    return owned


def kept_factors(layers: Sequence[LayerDims]) -> list[int]:
    """Elements of each layer's running averages: two triangles."""
    return [x.groups * (packed_length(x.in_dim) + packed_length(x.out_dim)) for x in layers]


def decompositions(layers: Sequence[LayerDims], solver: SolverName) -> list[int]:
    """Elements of each layer's two decompositions, as they travel."""

    def elements(groups: int, dim: int) -> int:
        shapes = SOLVERS[solver].kept_shapes(groups, dim, False, True)
        return sum(math.prod(shape) for shape in shapes)

    return [elements(x.groups, x.in_dim) + elements(x.groups, x.out_dim) for x in layers]


def kept_inverses(network: Network, solver: SolverName) -> list[int]:
    """Elements of each layer's inverse, as it is kept."""
    if solver == "inverse":
        return decompositions(network.layers, solver)
    pairs = zip(network.factor_sizes, network.gradient_sizes, strict=True)
    return [factors + gradient for factors, gradient in pairs]


def heads(network: Network) -> int:
    """Scalars that travel with the statistics: examples, and mean eigenvalues."""
    return sum(1 + 2 * layer.groups for layer in network.layers)


def s_sgd(network: Network, processes: int, solver: SolverName) -> Volumes:
    """Plain data parallel SGD."""
    nothing = all_reduced(0, processes)
    sent = dict.fromkeys(KINDS, nothing)
    elements = sum(network.gradient_sizes) + sum(network.others)
    sent["averaging"] = all_reduced(elements, processes)
    return Volumes("S-SGD", sent, [0] * processes, [0] * processes)


def averaged_everywhere(network: Network, processes: int) -> Sent:
    """The optimizer's own average; with it, one number a parameter: who has a gradient."""
    elements = sum(network.gradient_sizes) + sum(network.others)
    return all_reduced(elements + network.tensors, processes)


def kaisa_comm_opt(network: Network, processes: int, solver: SolverName) -> Volumes:
    """Everything everywhere; decompositions travel."""
    given = assign_layers(network.layers, Grid(1, processes))
    owners = [each.a_solver for each in given]
    factors, inverses = kept_factors(network.layers), kept_inverses(network, solver)
    results = given_to_all(by_owner(decompositions(network.layers, solver), owners, processes))
    agreement = all_reduced(len(network.layers), processes)  # on which layers failed
    sent = {
        "factors": all_reduced(sum(factors) + heads(network), processes),
        "inverses": added(results, agreement),
        "averaging": averaged_everywhere(network, processes),
        "gradients": all_reduced(0, processes),
    }
    return Volumes("KAISA COMM-OPT", sent, [sum(factors)] * processes, [sum(inverses)] * processes)


def kaisa_mem_opt(network: Network, processes: int, solver: SolverName) -> Volumes:
    """Each layer's curvature on one process; statistics and gradients travel."""
    owners = [each.row for each in assign_layers(network.layers, Grid(processes, 1))]
    factors = by_owner(kept_factors(network.layers), owners, processes)
    inverses = by_owner(kept_inverses(network, solver), owners, processes)
    sent = {
        "factors": summed_for_owners(factors, heads(network)),
        "inverses": all_reduced(len(network.layers), processes),
        "averaging": averaged_everywhere(network, processes),
        "gradients": given_to_all(by_owner(network.gradient_sizes, owners, processes)),
    }
    return Volumes("KAISA MEM-OPT", sent, factors, inverses)


def dpkfac(
    name: str, assignment: OwnerAssignment, exchange: str
) -> Callable[[Network, int, SolverName], Volumes]:
    """Each layer's curvature on one process; gradients travel, and nothing else."""

    def volumes(network: Network, processes: int, solver: SolverName) -> Volumes:
        owners = assign_owners(network.layers, processes, assignment)
        preconditioned = by_owner(network.gradient_sizes, owners, processes)
        if exchange == "owner":
            for size in sorted(network.others, reverse=True):  # to where the least is to be sent
                preconditioned[preconditioned.index(min(preconditioned))] += size
            averaging = summed_for_owners(preconditioned, network.tensors)
        else:
            averaging = averaged_everywhere(network, processes)
        sent = {
            "factors": all_reduced(0, processes),
            "inverses": all_reduced(len(network.layers), processes),
            "averaging": averaging,
            "gradients": given_to_all([n + 1 for n in preconditioned]),  # and a part of the clip's
        }
        factors = by_owner(kept_factors(network.layers), owners, processes)
        inverses = by_owner(kept_inverses(network, solver), owners, processes)
        return Volumes(name, sent, factors, inverses)

    return volumes


def added(first: Sent, second: Sent) -> Sent:
    """Both together."""
    return Sent(
        [a + b for a, b in zip(first.handed, second.handed, strict=True)],
        [a + b for a, b in zip(first.moved, second.moved, strict=True)],
    )


def _dpkfac_system(name: str, assignment: OwnerAssignment, exchange: str) -> System:
    options = {"assignment": assignment, "gradient_exchange": exchange}
    return System(name, DPKFAC, options, dpkfac(name, assignment, exchange))


SYSTEMS = (
    System("KAISA COMM-OPT", KAISA, {"grad_worker_fraction": 1.0}, kaisa_comm_opt),
    System(
        "KAISA MEM-OPT",
        KAISA,
        {"grad_worker_fraction": 0.0, "factor_exchange": "reduce"},
        kaisa_mem_opt,
    ),
    _dpkfac_system("DPKFAC, round_robin", "round_robin", "owner"),
    _dpkfac_system("DPKFAC, balanced", "balanced", "owner"),
    _dpkfac_system("DPKFAC, all_reduce", "balanced", "all_reduce"),
)

# ---------------------------------------------------------------------------------- the simulation


class _Done:
    """What there is to wait for where nothing travels."""

    def wait(self) -> None:
        """Return at once."""


def _from_all_alike(
    output: Tensor,
    message: Tensor,
    received: list[int],
    sent: list[int],
    group: dist.ProcessGroup | None = None,
    **_: Any,
) -> _Done:
    """An all-to-all in which the others send what this process sends to itself, or else zeros."""
    parts, mine = output.split(received), message.split(sent)[dist.get_rank(group)]
    for part in parts:
        if part.shape == mine.shape:
            part.copy_(mine)
        else:
            part.zero_()
    return _Done()


@contextmanager
def one_of(processes: int, rank: int) -> Iterator[None]:
    """Be one process of a world whose other processes are pretended.

    Torch's fake group leaves what an all-to-all should have filled as it was.
    """
    dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
    try:
        with patch.object(dist, "all_to_all_single", _from_all_alike):
            yield
    finally:
        dist.destroy_process_group()


def simulated(
    system: System,
    build: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    processes: int,
    rank: int,
    solver: SolverName,
) -> dict[str, int]:
    """Bytes that one process hands over at its first step, by kind, and its state after it."""
    torch.manual_seed(0)
    model = build()
    with one_of(processes, rank), warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = system.optimizer(model, lr=0.01, solver=solver, **system.options)
        cross_entropy(model(batch[0]), batch[1]).backward()
        with sent_bytes() as sent:
            optimizer.step()
        summary = optimizer.summary()
        optimizer.close()
    state = {"kept factors": summary.factor_bytes, "kept inverses": summary.inverse_bytes}
    return {**{kind: sent[kind] for kind in KINDS}, "other": sent["other"], **state}


def computed(volumes: Volumes, rank: int) -> dict[str, int]:
    """What `simulated` should give."""
    sent = {kind: int(FLOAT * volumes.sent[kind].handed[rank]) for kind in KINDS}
    state = {
        "kept factors": FLOAT * volumes.factors[rank],
        "kept inverses": FLOAT * volumes.inverses[rank],
    }
    return {**sent, "other": 0, **state}


def check(
    system: System,
    volumes: Volumes,
    build: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    rank: int,
    solver: SolverName,
) -> None:
    """Simulate a process, and compare.

    Raises:
        RuntimeError: If it sends or keeps something else than computed.
    """
    found = simulated(system, build, batch, len(volumes.factors), rank, solver)
    expected = computed(volumes, rank)
    if found != expected:
        raise RuntimeError(f"{system.name}, rank {rank}: computed {expected}, found {found}")


def ranks_to_check(volumes: Volumes) -> list[int]:
    """The process that holds most, and the one that holds least."""
    held = [sum(pair) for pair in zip(volumes.factors, volumes.inverses, strict=True)]
    return sorted({held.index(max(held)), held.index(min(held))})


# -------------------------------------------------------------------------------------- the tables


def mean_and_most(values: Sequence[float], unit: float) -> str:
    """The mean over processes, and the most, in parentheses where it is more."""
    mean, most = sum(values) / len(values) / unit, max(values) / unit
    return f"{mean:,.1f}" if most < mean * 1.001 + 0.05 else f"{mean:,.1f} ({most:,.1f})"


def total(volumes: Volumes, kind: str) -> float:
    """Elements moved by all processes together."""
    return sum(volumes.sent[kind].moved)


def handed_table(rows: Sequence[Volumes], processes: int) -> Table:
    """Megabytes handed over by a process."""
    result = Table(
        title=f"MB handed to torch.distributed by each of {processes} processes: mean (most)"
    )
    result.add_column("system")
    for name in KIND_NAMES:
        result.add_column(name, justify="right")
    for row in rows:
        cells = [mean_and_most([FLOAT * n for n in row.sent[k].handed], MB) for k in KINDS]
        result.add_row(row.name, *cells)
    return result


def moved_table(rows: Sequence[Volumes], network: Network, processes: int) -> Table:
    """Millions of elements moved by all processes, and the paper's counts of the same."""
    result = Table(
        title=f"Millions of elements that leave {processes} processes, all and the busiest"
    )
    result.add_column("system")
    for name in (*KIND_NAMES, "sum", "ratio", "busiest"):
        result.add_column(name, justify="right")
    reference = sum(total(rows[0], kind) for kind in KINDS)
    for row in rows:
        counts = [total(row, kind) for kind in KINDS]
        each = [sum(parts) for parts in zip(*(row.sent[k].moved for k in KINDS), strict=True)]
        result.add_row(
            row.name,
            *(f"{count / MILLION:,.0f}" for count in (*counts, sum(counts))),
            f"{sum(counts) / reference:.2f}",
            f"{max(each) * processes / reference:.2f}",
        )
    result.add_section()
    for name, counts in paper_traffic(network, processes).items():
        result.add_row(
            f"{name} (paper)",
            *(f"{count / MILLION:,.0f}" for count in (*counts, sum(counts))),
            f"{sum(counts) / reference:.2f}",
        )
    result.caption = (
        "paper: plain gradients 2 (P - 1) N_g; factors 2 (P - 1) N_f or 0; "
        "preconditioned (P - 1) N_g"
    )
    return result


def memory_table(rows: Sequence[Volumes], network: Network, processes: int) -> Table:
    """Megabytes kept by a process, and the paper's counts of the same."""
    result = Table(title=f"MB kept by each of {processes} processes: mean (most)")
    for name in ("system", "factors", "inverses", "both"):
        result.add_column(name, justify="left" if name == "system" else "right")
    for row in rows[1:]:
        both = [sum(pair) for pair in zip(row.factors, row.inverses, strict=True)]
        cells = [
            mean_and_most([FLOAT * n for n in v], MB) for v in (row.factors, row.inverses, both)
        ]
        result.add_row(row.name, *cells)
    result.add_section()
    elements = sum(network.factor_sizes)
    for name, kept in (("MPD-KFAC", elements), ("DP-KFAC", elements / processes)):
        megabytes = FLOAT * kept / MB
        cells = [f"{n:,.1f}" for n in (megabytes, megabytes, 2 * megabytes)]
        result.add_row(f"{name} (paper)", *cells)
    result.caption = (
        "paper: 2 (N_g + N_f) and, on average, 2 (N_g + N_f / P), here without the 2 N_g of "
        "gradients; whole matrices where ours are triangles"
    )
    return result


def paper_traffic(network: Network, processes: int) -> dict[str, list[float]]:
    """Table 2 of Zhang et al. 2023, in elements, in the order of KINDS."""
    factors = sum(network.factor_sizes)
    gradients = sum(network.gradient_sizes) + sum(network.others)
    p = processes - 1
    return {
        "S-SGD": [0, 0, 2 * p * gradients, 0],
        "MPD-KFAC": [2 * p * factors, 0, 2 * p * gradients, p * gradients],
        "DP-KFAC": [0, 0, 2 * p * gradients, p * gradients],
    }


def fullest(network: Network, processes: int, assignment: OwnerAssignment) -> int:
    """A² + G² summed over the layers of the process that has the most."""
    owners = assign_owners(network.layers, processes, assignment)
    return max(by_owner(network.factor_sizes, owners, processes))


def least_possible(network: Network, processes: int) -> float:
    """No assignment has a fullest process that holds less."""
    return max(sum(network.factor_sizes) / processes, *network.factor_sizes)


def balance_table(network: Network, worlds: Sequence[int]) -> Table:
    """How full the fullest process is, against the least possible, for several worlds."""
    result = Table(
        title="Millions of elements A² + G² on DPKFAC's fullest process, and its excess over "
        "the larger of N_f / P and the largest layer"
    )
    for name in ("processes", "N_f / P", "largest layer", "round_robin", "balanced"):
        result.add_column(name, justify="right")
    for processes in worlds:
        bound = least_possible(network, processes)
        names: tuple[OwnerAssignment, ...] = ("round_robin", "balanced")
        found = [fullest(network, processes, name) for name in names]
        result.add_row(
            str(processes),
            f"{sum(network.factor_sizes) / processes / MILLION:.1f}",
            f"{max(network.factor_sizes) / MILLION:.1f}",
            *(f"{n / MILLION:.1f} (+{100 * (n / bound - 1):.1f} %)" for n in found),
        )
    return result


def record_of(rows: Sequence[Volumes], network: Network, processes: int) -> dict[str, Any]:
    """All of it, as JSON wants it."""
    return {
        "processes": processes,
        "gradient_elements": sum(network.gradient_sizes) + sum(network.others),
        "factor_elements": sum(network.factor_sizes),
        "largest_layer": max(network.factor_sizes),
        "systems": [asdict(row) for row in rows],
        "paper": paper_traffic(network, processes),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute, check on a few processes, print the tables, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--solver", choices=SOLVERS, default="inverse")
    parser.add_argument("--skip-check", action="store_true", help="compute only")
    parser.add_argument("--json", type=Path, help="write all volumes here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120)
    with torch.device("meta"):
        network = network_of(resnet50())
    processes = options.processes
    rows = [s_sgd(network, processes, options.solver)]
    rows += [system.volumes(network, processes, options.solver) for system in SYSTEMS]
    gradients = sum(network.gradient_sizes) + sum(network.others)
    console.print(
        f"ResNet-50: {len(network.layers)} layers with factors, N_g {gradients / MILLION:.1f} M, "
        f"N_f {sum(network.factor_sizes) / MILLION:.1f} M elements; solver {options.solver}"
    )
    console.print(handed_table(rows, processes))
    console.print(moved_table(rows, network, processes))
    console.print(memory_table(rows, network, processes))
    console.print(balance_table(network, sorted({2, 4, 8, 16, 32, processes})))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = record_of(rows, network, processes)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if not options.skip_check:
        # What is sent and kept does not depend on the size of the images.
        batch = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
        work = [
            (system, row, rank)
            for system, row in zip(SYSTEMS, rows[1:], strict=True)
            for rank in ranks_to_check(row)
        ]
        for system, row, rank in tqdm(work, desc="simulated processes", leave=False):
            check(system, row, resnet50, batch, rank, options.solver)
        console.print(f"{len(work)} processes simulated: bytes sent and kept are those computed")


if __name__ == "__main__":
    main()
