"""What a step sends and what it leaves in memory, process by process, in a world of many.

    python benchmarks/speed/scaling.py             ResNet-50 on 64 processes, a minute or two
    python benchmarks/speed/scaling.py --processes 16 --skip-check

Nothing is sent. Volumes are those of `second_order.planning`; then, unless --skip-check, a few of
the processes are simulated: each builds its optimizer in a world of that size, with torch's fake
process group, and takes one step with a refresh, whose bytes and state must be those computed.
Beside them stand the formulas of the DP-KFAC paper (Zhang et al. 2023, Table 2). All in float32, at
a step that refreshes everything. MEM-OPT is with factor_exchange="reduce".

Two measures of traffic. "handed over" is what a process passes to torch.distributed. "moved" is
what has to leave it: an all-reduce of n elements counts 2 (P - 1) / P n, a ring's, and messages to
named processes count once each. Summed over processes, "moved" is what the paper counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from second_order.distributed.assignment import OwnerAssignment, assign_owners
from second_order.kronecker.solvers import SOLVERS, SolverName
from second_order.planning.counts import Case
from second_order.planning.network import Network
from second_order.planning.systems import Planned, dpkfac, kaisa
from workloads import resnet50

FLOAT = 4
MB, MILLION = 1e6, 1e6
KINDS = ("factors", "inverses", "averaging", "gradients")
STAGES = ("statistics_exchange", "solve_exchange", "average_gradients", "precondition_exchange")
KIND_NAMES = ("factors", "inverses", "plain gradients", "preconditioned")
ALLOWANCE = 1.05

# ------------------------------------------------------------------------------------ the volumes


def network_of(model: nn.Module) -> Network:
    """The layers of a network, as all systems here find them."""
    return kaisa().network(model)


def factor_sizes(network: Network) -> list[int]:
    """A² + G² of each layer, as the paper counts."""
    return [replace(network, layers=(layer,)).factor_elements for layer in network.layers]


@dataclass(frozen=True)
class Sent:
    """Bytes of one kind that each process hands over, and that leave it, in a step."""

    handed: list[float]
    moved: list[float]


@dataclass(frozen=True)
class Volumes:
    """What one system sends at a step with a refresh, and keeps; bytes, a list over processes.

    Attributes:
        name: The system, as the tables have it.
        sent: By kind, one of KINDS.
        factors: Of running averages.
        inverses: Of inverses, as they are applied.
        layers: Number of layers with factors.
    """

    name: str
    sent: dict[str, Sent]
    factors: list[int]
    inverses: list[int]
    layers: int


@dataclass(frozen=True)
class System:
    """An optimizer with its options, and its description before it is made."""

    name: str
    optimizer: Callable[..., Any]
    describe: Callable[..., Planned]
    options: dict[str, Any]

    def volumes(self, network: Network, processes: int, solver: SolverName) -> Volumes:
        """What every process sends and keeps."""
        case = Case(network, self.describe(solver=solver, **self.options), processes)
        shares = case.everybody(statistics=True, refresh=True)
        known = {share.work.rank: share.work for share in shares}
        works = [known[case.alike(rank)] for rank in range(processes)]
        sent = {
            kind: Sent([w.handed(stage) for w in works], [w.moved(stage) for w in works])
            for kind, stage in zip(KINDS, STAGES, strict=True)
        }
        factors = [work.nbytes("factors") for work in works]
        inverses = [work.nbytes("inverses") for work in works]
        return Volumes(self.name, sent, factors, inverses, len(network.layers))


def s_sgd(network: Network, processes: int) -> Volumes:
    """Plain data parallel SGD."""
    nothing = [0] * processes
    sent = dict.fromkeys(KINDS, Sent([0.0] * processes, [0.0] * processes))
    nbytes = FLOAT * network.gradient_elements
    moved = 2 * (processes - 1) / processes * nbytes
    sent["averaging"] = Sent([nbytes] * processes, [moved] * processes)
    return Volumes("S-SGD", sent, nothing, nothing, 0)


SYSTEMS = (
    System("KAISA COMM-OPT", KAISA, kaisa, {"grad_worker_fraction": 1.0}),
    System(
        "KAISA MEM-OPT",
        KAISA,
        kaisa,
        {"grad_worker_fraction": 0.0, "factor_exchange": "reduce"},
    ),
    System("DPKFAC, round_robin", DPKFAC, dpkfac, {"assignment": "round_robin"}),
    System("DPKFAC, balanced", DPKFAC, dpkfac, {"assignment": "balanced"}),
    System("DPKFAC, all_reduce", DPKFAC, dpkfac, {"gradient_exchange": "all_reduce"}),
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
    """An all-to-all in which the others send what this process sends to itself, or else ones.

    Alike parts are addends; unlike ones are sums that others have made of their shares.
    """
    parts, mine = output.split(received), message.split(sent)[dist.get_rank(group)]
    alike = all(part.shape == mine.shape for part in parts)
    for part in parts:
        if alike or part is parts[dist.get_rank(group)]:
            part.copy_(mine)
        else:
            part.fill_(1)  # of a sum's head, a number of examples
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
        # What others add is pretended: factors may be indefinite without much damping.
        settings = {"lr": 0.01, "damping": 1e12, "solver": solver, **system.options}
        optimizer = system.optimizer(model, **settings)
        cross_entropy(model(batch[0]), batch[1]).backward()
        with sent_bytes() as sent:
            optimizer.step()
        summary = optimizer.summary()
        optimizer.close()
    state = {"kept factors": summary.factor_bytes, "kept inverses": summary.inverse_bytes}
    return {**{kind: sent[kind] for kind in KINDS}, "other": sent["other"], **state}


def computed(volumes: Volumes, rank: int) -> dict[str, int]:
    """What `simulated` should give."""
    sent = {kind: int(volumes.sent[kind].handed[rank]) for kind in KINDS}
    state = {"kept factors": volumes.factors[rank], "kept inverses": volumes.inverses[rank]}
    # What a refresh has changed is counted with the inverses: in float64 three numbers for each
    # layer, and five for all.
    told = 8 * (3 * volumes.layers + 5)
    return {**sent, "inverses": sent["inverses"] - told, "other": told, **state}


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
    return sum(volumes.sent[kind].moved) / FLOAT


def handed_table(rows: Sequence[Volumes], processes: int) -> Table:
    """Megabytes handed over by a process."""
    result = Table(
        title=f"MB handed to torch.distributed by each of {processes} processes: mean (most)"
    )
    result.add_column("system")
    for name in KIND_NAMES:
        result.add_column(name, justify="right")
    for row in rows:
        cells = [mean_and_most(row.sent[k].handed, MB) for k in KINDS]
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
            f"{max(each) / FLOAT * processes / reference:.2f}",
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
        cells = [mean_and_most(n, MB) for n in (row.factors, row.inverses, both)]
        result.add_row(row.name, *cells)
    result.add_section()
    elements = network.factor_elements
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
    factors = network.factor_elements
    gradients = network.gradient_elements
    p = processes - 1
    return {
        "S-SGD": [0, 0, 2 * p * gradients, 0],
        "MPD-KFAC": [2 * p * factors, 0, 2 * p * gradients, p * gradients],
        "DP-KFAC": [0, 0, 2 * p * gradients, p * gradients],
    }


def fullest(network: Network, processes: int, assignment: OwnerAssignment) -> int:
    """A² + G² summed over the layers of the process that has the most."""
    owners = assign_owners([layer.dims for layer in network.layers], processes, assignment)
    held = [0] * processes
    for size, owner in zip(factor_sizes(network), owners, strict=True):
        held[owner] += size
    return max(held)


def least_possible(network: Network, processes: int) -> float:
    """No assignment has a fullest process that holds less."""
    return max(network.factor_elements / processes, *factor_sizes(network))


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
            f"{network.factor_elements / processes / MILLION:.1f}",
            f"{max(factor_sizes(network)) / MILLION:.1f}",
            *(f"{n / MILLION:.1f} (+{100 * (n / bound - 1):.1f} %)" for n in found),
        )
    return result


def record_of(rows: Sequence[Volumes], network: Network, processes: int) -> dict[str, Any]:
    """All of it, as JSON wants it."""
    return {
        "processes": processes,
        "gradient_elements": network.gradient_elements,
        "factor_elements": network.factor_elements,
        "largest_layer": max(factor_sizes(network)),
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
    rows = [s_sgd(network, processes)]
    rows += [system.volumes(network, processes, options.solver) for system in SYSTEMS]
    gradients = network.gradient_elements
    console.print(
        f"ResNet-50: {len(network.layers)} layers with factors, N_g {gradients / MILLION:.1f} M, "
        f"N_f {network.factor_elements / MILLION:.1f} M elements; solver {options.solver}"
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
