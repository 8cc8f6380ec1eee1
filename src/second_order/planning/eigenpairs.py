"""The work of DHO2's and MRDHO2's ranks at a step, and its seconds.

Messages of a step and kept memory are those of training, rank by rank. A refresh takes as many
products as it may at most; counted are their two messages and the sums of their coefficients, not
the words of a few bytes by which ranks agree on its result. MRDHO2's messages between workers and
accelerators go by the host, from one process to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from second_order.distributed.roles import assign_roles
from second_order.fosi.options import PRESETS, EpochOptions, FOSIOptions
from second_order.fosi.pieces import FlatLayout
from second_order.fosi.sharded_base import works_by_element
from second_order.lanczos.vector_space import row_bounds
from second_order.options import AUTO, check_choice, picked, value_at
from second_order.planning.counts import Share, alike_of, compared
from second_order.planning.interconnect import Interconnect
from second_order.planning.machine import Machine
from second_order.planning.messages import (
    Piece,
    all_reduced,
    buckets_of,
    copied,
    sum_of_parts,
    summed,
)
from second_order.planning.network import Network, Parameter, base_state_bytes
from second_order.planning.times import (
    PASSES,
    RankCost,
    StepTimes,
    base_step_seconds,
    exchange_seconds,
)
from second_order.planning.work import Among, Compute, Held, RankWork, Transfer, merged

__all__ = [
    "GRAPH",
    "PAIRED",
    "PRODUCT",
    "PairCase",
    "PlannedPairs",
    "dho2",
    "mrdho2",
    "names_of",
    "pair_costs",
]

PRODUCT = 2.0  # of forward and backward: a Hessian-vector product; 1.4 to 2.8 as measured
GRAPH = 3  # of the activations: the graph of a gradient, which is kept for a refresh's products
SPLIT, CORRECT = 6, 8  # reads and writes of vectors, besides those of the eigenvectors
AGREED = 4 * torch.float32.itemsize  # bytes of the verdicts at the end of an epoch


@dataclass(frozen=True)
class PlannedPairs:
    """A system with eigenpairs and its options, before there is an optimizer.

    Attributes:
        name: The optimizer's class.
        options: The options of its step.
        base: Class of the base.
    """

    name: str
    options: FOSIOptions
    base: type[torch.optim.Optimizer] = torch.optim.SGD

    @property
    def helpers(self) -> int:
        """Number of ranks that compute eigenpairs while the others train."""
        return self.options.accelerators if isinstance(self.options, EpochOptions) else 0

    def network(self, model: nn.Module, **base_kwargs: Any) -> Network:
        """The parameters of a model, which are one vector here.

        Args:
            model: The model; on the meta device, too.
            **base_kwargs: Arguments of the base, for the bytes of its state.
        """
        params = [p for p in model.parameters() if p.requires_grad]
        state = base_state_bytes(self.base, params, **base_kwargs)
        return Network((), tuple(Parameter(p.numel(), p.dtype) for p in params), state)


def dho2(
    *, base: type[torch.optim.Optimizer] = torch.optim.SGD, preset: str = "general", **given: Any
) -> PlannedPairs:
    """Describe DHO2 with its keywords.

    Raises:
        TypeError: For an unknown keyword, or a value of the wrong type.
        ValueError: For a value outside its bounds, or a layout that the base does not suit.
    """
    check_choice("preset", preset, tuple(PRESETS))
    options = _options(FOSIOptions, given, PRESETS[preset])
    if options.layout == "row" and not works_by_element(base):
        raise ValueError(
            f"layout='row' steps parts of parameters, and {base.__name__} needs whole ones; use "
            f"layout='column'"
        )
    return PlannedPairs("DHO2", options, base)


def mrdho2(*, base: type[torch.optim.Optimizer] = torch.optim.SGD, **given: Any) -> PlannedPairs:
    """Describe MRDHO2 with its keywords.

    Raises:
        TypeError: For an unknown keyword, or a value of the wrong type.
        ValueError: For a value outside its bounds.
    """
    options = _options(EpochOptions, given, {**PRESETS["general"], "layout": "column"})
    return PlannedPairs("MRDHO2", replace(options, curvature_interval=options.epoch_steps), base)


PAIRED: dict[str, Callable[..., PlannedPairs]] = {"DHO2": dho2, "MRDHO2": mrdho2}
"""By the optimizer's name, the function that describes it."""

USUAL: dict[str, Any] = {
    "smallest": 0,
    "curvature_interval": AUTO,
    "overhead": 0.2,
    "lr_scale_clip": None,
    "lr_scale_guard": True,
    "lanczos_tol": 1e-2,
    "lanczos_dtype": None,
    "eigenvalue_floor": 1e-2,
    "warm_start": True,
    "trust_region": True,
    "hvp": "auto",
    "curvature": "hessian",
    "layout": "row",
    "seed": 0,
    "accelerators": 1,
    "epoch_steps": 100,
    "final_update": "guarded",
    "helper_timeout": 60.0,
}
"""The defaults that no preset sets."""


OF_STEPS = {"curvature_interval", "overhead", "lr_scale_guard", "subspace_momentum", "warm_start"}
OF_STEPS |= {"trust_region", "layout"}
"""DHO2's keywords that MRDHO2 has not: its accelerators have no steps of their own."""


def names_of(system: str) -> set[str]:
    """The keywords of a system that decide its step."""
    if system == "DHO2":
        return {"preset", *(field.name for field in fields(FOSIOptions))}
    return {field.name for field in fields(EpochOptions)} - OF_STEPS


def _options(kind: type[Any], given: Mapping[str, Any], usual: Mapping[str, Any]) -> Any:
    known = names_of("DHO2" if kind is FOSIOptions else "MRDHO2") - {"preset"}
    unknown = given.keys() - known
    if unknown:
        raise TypeError(f"unknown options {sorted(unknown)}; known are {sorted(known)}")
    return picked(kind, {**USUAL, **usual, **given})


class PairCase:
    """Parameters trained along eigenvectors on a number of ranks: what each does, and keeps.

    Args:
        network: The parameters.
        planned: The system with its options.
        ranks: Number of ranks, MRDHO2's accelerators among them.
        base_kwargs: Arguments of the base, for its state where each rank has a part of it.
        products: Hessian-vector products of a refresh; None for as many as the options allow.

    Attributes:
        workers: Number of ranks that train.
        size: Number n of parameters.
        pairs: Number r of eigenpairs.
        products: Number m of products of a refresh.

    Raises:
        ValueError: If no rank would be left to train.
    """

    def __init__(
        self,
        network: Network,
        planned: PlannedPairs,
        ranks: int,
        *,
        base_kwargs: Mapping[str, Any] | None = None,
        products: int | None = None,
    ) -> None:
        self.network, self.planned, self.ranks = network, planned, ranks
        self.options, self._base_kwargs = planned.options, dict(base_kwargs or {})
        roles = assign_roles(ranks, planned.helpers, "accelerator")
        self.workers = len(roles.workers)
        rows = self.options.layout == "row"  # of one rank: all of them
        params = [torch.empty(p.elements, dtype=p.dtype, device="meta") for p in network.params]
        self._layout = FlatLayout([params], self.workers if rows else 1)
        self.size, self._rows = self._layout.size, rows
        self.pairs = min(self.options.wanted, self.size)
        self._dtype = self.options.lanczos_dtype or self._layout.dtype
        warm = self.options.warm_start and not self._helped
        most = self.options.most_products(self.size, warm=warm)
        self.products = most if products is None else products
        self._team = Among("world", self.workers)

    @property
    def _helped(self) -> bool:
        """Whether some ranks compute eigenpairs for the others."""
        return self.workers < self.ranks

    @property
    def _within(self) -> bool:
        """Whether each step goes along eigenvectors."""
        return not self._helped or getattr(self.options, "within", False)

    @property
    def intervals_said(self) -> dict[str, Any]:
        """The keywords that decide when eigenpairs are renewed."""
        if isinstance(self.options, EpochOptions):
            names = "accelerators", "epoch_steps"
            return {name: getattr(self.options, name) for name in names}
        return {"curvature_interval": self.options.curvature_interval}

    def interval(self, times: StepTimes) -> int:
        """Steps from one refresh to the next; by the budget where the options say so."""
        every = self.options.curvature_interval
        if every != AUTO:
            return int(value_at(every, 0))
        _, refresh, alone = times.costs
        return max(1, math.ceil(refresh / (self.options.overhead * alone)))

    # --------------------------------------------------------------------------- ranks and shares

    def work(self, rank: int, *, refresh: bool = False) -> RankWork:
        """What a rank does at a step; an accelerator, for an epoch.

        Args:
            rank: The rank.
            refresh: Whether eigenpairs are due, or an epoch ends.
        """
        if rank >= self.workers:
            lanczos = self._lanczos(rank - self.workers, self.ranks - self.workers)
            return RankWork(rank, self._products(rank), tuple(lanczos), self._held(rank))
        transfers = self._step(rank) if self.workers > 1 else []
        if refresh:
            transfers += self._epoch(rank) if self._helped else self._lanczos(rank, self.workers)
        n, mine = self._sizes(rank)
        each = [Compute(stage, "matmul", (mine, n, 1), 2, self._dtype) for stage in STEP]
        stages = tuple(merged(c.stage, [c]) for c in each) if self._within else ()
        if refresh and not self._helped:
            stages += self._products(rank)
        return RankWork(rank, stages, tuple(transfers), self._held(rank))

    def everybody(self, *, refresh: bool = False) -> list[Share]:
        """What all ranks do at a step, those that do the same together."""
        return [
            Share(self._alike.count(rank), self.work(rank, refresh=refresh))
            for rank in dict.fromkeys(self._alike)
        ]

    @cached_property
    def _alike(self) -> list[int]:
        """By rank, the lowest rank that does the same."""
        found = torch.zeros(4, self.ranks, dtype=torch.int64)
        teams = [(0, self.workers), (self.workers, self.ranks - self.workers)]
        kinds = [found]
        for number, (start, count) in enumerate(teams):
            for rank in range(start, start + count):
                rows = self._rows_of(rank) if self.computes(rank) else 0
                found[:, rank] = torch.tensor([number, *self._sizes(rank), rows])
            if number == self._helped and count > 1:  # those that compute eigenpairs
                for pieces in self._product_pieces(count):
                    parts = torch.zeros(5, self.ranks, dtype=torch.int64)
                    parts[:, start : start + count] = sum_of_parts(buckets_of(pieces, count))
                    kinds.append(parts)
        if self._helped:
            found[0, 0] = -1  # which speaks for all workers
        if self._rows and self.workers > 1:
            for pieces in (self._gradients, self._values):
                kinds += [sum_of_parts(buckets_of(pieces, self.workers))]
            counts = torch.bincount(torch.tensor([p.rank for p in self._layout.pieces]))
            kinds.append(torch.cat([counts, counts.new_zeros(self.ranks - len(counts))])[None])
        return alike_of(kinds)

    def _sizes(self, rank: int) -> tuple[int, int]:
        """Elements of the vectors here, and how many of the eigenvectors are."""
        if rank >= self.workers:
            return self._rows_of(rank), self.pairs
        if self._rows:
            bounds = self._layout.bounds
            return bounds[rank + 1] - bounds[rank], self.pairs
        cuts = self._cuts
        return self.size, cuts[rank + 1] - cuts[rank]

    # ---------------------------------------------------------------------------------- messages

    @cached_property
    def _gradients(self) -> list[Piece]:
        """What is summed before a step: gradients, and one number a parameter: who has one."""
        present = (torch.float32, len(self.network.params), None)
        if not self._rows:
            return [*((p.dtype, p.elements, None) for p in self.network.params), present]
        pieces = self._layout.pieces
        return [*((piece.param.dtype, piece.size, piece.rank) for piece in pieces), present]

    @cached_property
    def _values(self) -> list[Piece]:
        """Rows of the parameters, which their ranks send to all after a step."""
        return [(piece.param.dtype, piece.size, piece.rank) for piece in self._layout.pieces]

    def _product_pieces(self, count: int) -> tuple[list[Piece], list[Piece]]:
        """What a product gathers, and what it sums, among so many ranks."""
        sizes = [stop - start for start, stop in pairwise(row_bounds(self.size, count))]
        rows: list[Piece] = [(self._dtype, size, rank) for rank, size in enumerate(sizes)]
        return rows, [*rows, (self._dtype, 1, None)]  # and the number of examples

    def _step(self, rank: int) -> list[Transfer]:
        team = self._team
        found = [compared(team)]
        if self._rows:
            buckets = buckets_of(self._gradients, self.workers)
            found += summed("average_gradients", team, rank, buckets)
        else:
            found.append(self._to_all("average_gradients", self._gradients))
        if not self._within:
            return found
        size = self.pairs if self._rows else self.size
        terms = 3 * (self.options.trust_region and not self._rows)
        one: Piece = (self._dtype, size, None)
        found.append(self._to_all("split", [one, *([(self._dtype, terms, None)] * bool(terms))]))
        found.append(self._to_all("newton", [one]))
        if self._rows:
            found += copied("exchange", team, rank, buckets_of(self._values, self.workers))
        return found

    def _to_all(self, stage: str, pieces: Sequence[Piece]) -> Transfer:
        buckets = buckets_of(pieces, self.workers)
        nbytes = sum(bucket.total * bucket.itemsize for bucket in buckets)
        return all_reduced(stage, self._team, nbytes, len(buckets))

    def _lanczos(self, rank: int, count: int) -> list[Transfer]:
        """A refresh: products and their coefficients; from rows to columns, if it is to be."""
        if count == 1:
            return []
        among, m = Among("world", count), self.products
        gathered, reduced = (buckets_of(pieces, count) for pieces in self._product_pieces(count))
        each = [*copied("lanczos", among, rank, gathered), *summed("lanczos", among, rank, reduced)]
        wide = torch.float64.itemsize
        found = [_repeated(transfer, m) for transfer in each]
        found.append(all_reduced("lanczos", among, wide * (m * m + 2 * m), 2 * m))
        if not self._rows and not self._helped:
            n, mine = row_bounds(self.size, count), self._sizes(rank)[1]
            rows, item = n[rank + 1] - n[rank], self._dtype.itemsize
            sent, comes = self.pairs * rows * item, mine * self.size * item
            stays = mine * rows * item
            moved = sent - stays, comes - stays
            found.append(Transfer("lanczos", "all_to_all", among, sent, *moved, sent + comes, 1))
        return found

    def _epoch(self, rank: int) -> list[Transfer]:
        """The end of an epoch: the final update, and messages to and from the accelerators."""
        item, options = self._dtype.itemsize, self.options
        found = []
        sums = 0 if self._within else self.size * item
        if self.workers > 1:
            found.append(all_reduced("final_update", self._team, sums + AGREED, 5))
        asked = isinstance(options, EpochOptions) and options.final_update == "guarded"
        sent = (1 + 2 * asked) * self.size * item if rank == 0 else 0  # c, and both ends
        comes = self._sizes(rank)[1] * self.size * item
        two, messages = Among("world", 2, self.workers), 1 + 2 * asked
        moved = float(sent), float(comes)
        found.append(
            Transfer("pairs", "all_to_all", two, sent, *moved, sent + comes, messages, host=True)
        )
        return found

    # -------------------------------------------------------------------------- work and memory

    def _products(self, rank: int) -> tuple[Any, ...]:
        """The recurrence of a refresh: each new vector twice against all before, and V̂ = D U."""
        m, here = self.products, self._rows_of(rank)
        pieces = [
            Compute("lanczos", "matmul", (m, here, m), 2, self._dtype),
            Compute("lanczos", "matmul", (self.pairs, m, here), 1, self._dtype),
        ]
        return (merged("lanczos", pieces),)

    def _rows_of(self, rank: int) -> int:
        """Elements of the vectors of a refresh on a rank that computes eigenpairs."""
        bounds, first = self._bounds, self.workers if self._helped else 0
        return bounds[rank - first + 1] - bounds[rank - first]

    @cached_property
    def _bounds(self) -> list[int]:
        """Where the rows of each rank that computes eigenpairs begin, and n."""
        return row_bounds(self.size, self.ranks - self.workers if self._helped else self.ranks)

    @cached_property
    def _cuts(self) -> list[int]:
        """Where the eigenvectors of each worker begin, and r."""
        return row_bounds(self.pairs, self.workers)

    def stepped(self, rank: int) -> float:
        """The share of the parameters that a rank's base steps."""
        return self._sizes(rank)[0] / self.size if self._rows else 1.0

    def computes(self, rank: int) -> bool:
        """Whether a rank computes eigenpairs."""
        return rank >= self.workers or not self._helped

    def basis_bytes(self, rank: int) -> int:
        """Bytes that a refresh takes on a rank, besides the graph: D, and whole vectors."""
        if self._helped and rank < self.workers:
            return self._sizes(rank)[1] * self.size * self._dtype.itemsize  # vectors that come
        return (self.products * self._rows_of(rank) + 2 * self.size) * self._dtype.itemsize

    def _held(self, rank: int) -> tuple[Held, ...]:
        weights = sum(p.nbytes for p in self.network.params)
        if rank >= self.workers:
            return (Held("parameters", weights),)
        held = [Held("parameters", weights), Held("gradients", weights)]
        held.append(Held("base", self._base_bytes(rank)))
        n, mine = self._sizes(rank)
        item = self._dtype.itemsize
        if self._within:
            held += [Held("eigenvectors", mine * n * item), Held("step", n * item)]
        if self._helped:
            start, total = self.size * self._layout.dtype.itemsize, self.size * item
            held.append(Held("epoch", start + total * (not self._within)))
        return tuple(held)

    def _base_bytes(self, rank: int) -> int:
        if not self._rows or self.workers == 1:
            return self.network.base_bytes
        pieces = [
            torch.empty(piece.size, dtype=piece.param.dtype, device="meta")
            for piece in self._layout.of(rank)
        ]
        if not pieces:  # as with more ranks than parameters
            return 0
        return base_state_bytes(self.planned.base, pieces, **self._base_kwargs)


STEP = ("split", "newton")
"""The stages of a step along eigenvectors."""


def _repeated(transfer: Transfer, times: int) -> Transfer:
    """A transfer so many times, one after the other: its buffers are there once."""
    names = ("handed", "moved", "received", "messages")
    return replace(transfer, **{name: times * getattr(transfer, name) for name in names})


def pair_costs(
    case: PairCase, machine: Machine, links: Interconnect, *, passes: float = 0.0
) -> list[RankCost]:
    """What each rank's step costs; ranks that do the same stand together.

    Args:
        case: The parameters, the system and the ranks.
        machine: The machine of every rank.
        links: The links between the ranks.
        passes: Seconds of forward and backward on a rank's batch; a curvature batch is as large.
    """
    shares = case.everybody(refresh=True)
    due = [_due(case, share.work, machine, links, passes) for share in shares]
    # Accelerators compute beside the workers, who wait for them at the end of an epoch.
    apart = [share.work.rank >= case.workers for share in shares]
    hidden = max((sum(d.values()) for d, a in zip(due, apart, strict=True) if a), default=0.0)
    return [
        RankCost(share.ranks, share.work, StepTimes({} if a else d, hidden))
        for share, d, a in zip(shares, due, apart, strict=True)
    ]


def _due(
    case: PairCase, work: RankWork, machine: Machine, links: Interconnect, passes: float
) -> dict[str, float]:
    found: dict[str, float] = {}
    trains = work.rank < case.workers
    if trains:
        params = case.network.params
        part, nbytes = case.stepped(work.rank), sum(p.nbytes for p in params)
        found[PASSES] = passes
        found["base"] = base_step_seconds(part * nbytes, math.ceil(part * len(params)), machine)
    for stage in work.stages:
        compute = stage.computes[0]
        read = 2 * math.prod(compute.sizes[:2]) * compute.dtype.itemsize  # two products with it
        if stage.stage in STEP:  # eigenvectors and vectors pass through memory
            vectors = SPLIT if stage.stage == "split" else CORRECT
            read += vectors * compute.sizes[1] * compute.dtype.itemsize
            found[stage.stage] = machine.touched(read) + machine.overhead("precondition").step
        else:  # each product reads all vectors before, four times
            # With as many pairs as vectors and rows, both pieces of the work are one.
            seconds = PRODUCT * passes * (case.products + 1) + machine.touched(case.products * read)
            found[stage.stage] = seconds + machine.product(*stage.computes[-1].sizes)
    for transfer in work.transfers:
        name = transfer.stage
        tensors = len(case.network.params) if name in ("average_gradients", "exchange") else 0
        if name in (*STEP, "lanczos"):
            name += "_exchange"
        seconds = exchange_seconds(transfer, machine, links, tensors=tensors)
        found[name] = found.get(name, 0.0) + seconds
    return found
