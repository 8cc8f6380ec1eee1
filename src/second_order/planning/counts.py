"""The work of each rank at a step, counted from the plan that training carries out.

    case = Case(network, planned, ranks=4096, examples=32)
    case.work(7, refresh=True)             one rank
    case.everybody(refresh=True)           all of them, equal ones once

Messages are those of tensors as NCCL takes them; gloo, for one, sends bfloat16 as float32. Not
counted are messages outside of steps (construction, checkpoints, moved factors), those of stats
workers, FSDP2's shards, and work that is linear in the sizes of inputs, gradients and factors. Of
statistics every layer's own are counted, also where layers fed by one tensor share one A. A solve
on threads is counted at the step that submits it, and its result as if it landed there; until it
lands, every step has one more message, on the verdicts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from second_order.distributed.collectives import BUCKET_BYTES
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import LayerPlan, gradient_owners
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.solvers import SOLVERS
from second_order.planning.network import Layer, Network
from second_order.planning.systems import Planned
from second_order.planning.work import Among, Compute, Held, RankWork, Transfer, merged

__all__ = ["Case", "Share"]

WORD = 8  # bytes of the word by which ranks compare what they are about to do
FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class Share:
    """Ranks that do the same.

    Attributes:
        ranks: Their number.
        work: The work of one of them, whose rank is the lowest.
    """

    ranks: int
    work: RankWork


class Case:
    """A network trained by a system on a number of ranks: what each does at a step, and keeps.

    Args:
        network: The layers and parameters.
        planned: The system with its options.
        ranks: Number of ranks.
        examples: Examples in a rank's batch, for the work of statistics; 0 leaves that out.

    Attributes:
        plan: Which rank does what, as training has it.

    Raises:
        ValueError: If the system cannot have so many ranks, or the rows of a layer's statistics
            are not known.
    """

    def __init__(
        self, network: Network, planned: Planned, ranks: int, *, examples: int = 0
    ) -> None:
        if ranks < 1:
            raise ValueError(f"ranks={ranks} is less than 1; give the number of processes")
        if examples < 0:
            raise ValueError(f"examples={examples} is less than 0; give a rank's batch size")
        unknown = [x.name for x in network.layers if x.hooked and x.rows is None]
        if examples and unknown:
            raise ValueError(
                f"examples={examples}, and nobody knows how many rows of statistics an example "
                f"gives to layer {unknown[0]!r}; make the network with example=, or use examples=0"
            )
        self.network, self.planned, self.ranks, self.examples = network, planned, ranks, examples
        self.options = planned.options
        self.plan = planned.planner([layer.dims for layer in network.layers], ranks)
        grid = self.plan.grid
        self._world = Among("world", ranks)
        self._row = Among("row", grid.columns)
        self._column = Among("column", grid.rows, grid.columns)

    # --------------------------------------------------------------------------- ranks and shares

    def work(self, rank: int, *, statistics: bool = False, refresh: bool = False) -> RankWork:
        """What a rank does at a step.

        Args:
            rank: The rank.
            statistics: Whether statistics are due.
            refresh: Whether a refresh of the inverses is due.

        Raises:
            ValueError: For a rank that there is not.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank={rank} is not one of 0 to {self.ranks - 1}")
        computes = [*self._preconditions(rank)]
        if statistics:
            computes = [*self._takes_statistics(rank), *computes]
        if refresh:
            computes = [*computes, *self._solves(rank)]
        transfers: list[Transfer] = []
        if self.ranks > 1:
            transfers += [self._compared, *self._averaging(rank)]
            transfers += self._statistics_travel(rank) if statistics else []
            transfers += self._solutions_travel(rank) if refresh else []
            transfers += self._results_travel(rank)
        held = self._held(rank, statistics)
        return RankWork(rank, merged(computes), tuple(transfers), held)

    def everybody(self, *, statistics: bool = False, refresh: bool = False) -> list[Share]:
        """What all ranks do at a step, those that do the same together; the busiest are not first.

        Args:
            statistics: Whether statistics are due.
            refresh: Whether a refresh of the inverses is due.
        """
        return [
            Share(count, self.work(rank, statistics=statistics, refresh=refresh))
            for rank, count in self._classes.items()
        ]

    def alike(self, rank: int) -> int:
        """The lowest rank that does the same as a rank."""
        if rank in self._busy:
            return rank
        row = self.plan.grid.row_of(rank)
        return self._idle_in.get(row, self._idle)

    @cached_property
    def _classes(self) -> dict[int, int]:
        """The number of ranks that do the same as some rank, by that rank."""
        found = dict.fromkeys(sorted(self._busy), 1)
        columns, busy = self.plan.grid.columns, Counter(map(self.plan.grid.row_of, self._busy))
        for row, rank in self._idle_in.items():
            found[rank] = columns - busy[row]
        left = self.ranks - sum(found.values())
        return found | ({self._idle: left} if left else {})

    @cached_property
    def _busy(self) -> set[int]:
        """The ranks that decompose, keep or own something, or take statistics of some layers."""
        ranks = set(self._solved_by) | set(self._kept_by) | set(self._taken_by)
        return ranks | set(self._owned)

    @cached_property
    def _idle_in(self) -> dict[int, int]:
        """By row that preconditions layers, its lowest rank that does nothing else."""
        grid, found = self.plan.grid, {}
        for row in sorted(self._by_row):
            ranks = range(row * grid.columns, (row + 1) * grid.columns)
            idle = next((rank for rank in ranks if rank not in self._busy), None)
            if idle is not None:
                found[row] = idle
        return found

    @cached_property
    def _idle(self) -> int:
        """The lowest rank that does nothing for any layer; -1 if there is none."""
        rows = (row for row in range(self.plan.grid.rows) if row not in self._by_row)
        columns = self.plan.grid.columns
        ranks = (rank for row in rows for rank in range(row * columns, (row + 1) * columns))
        return next((rank for rank in ranks if rank not in self._busy), -1)

    # ------------------------------------------------------------------------- who has which layer

    @cached_property
    def _layers(self) -> list[tuple[Layer, LayerPlan]]:
        return list(zip(self.network.layers, self.plan.layers, strict=True))

    @cached_property
    def _by_row(self) -> dict[int, list[Layer]]:
        """The layers that each row of the grid preconditions."""
        found: defaultdict[int, list[Layer]] = defaultdict(list)
        for layer, plan in self._layers:
            found[self.plan.grid.row_of(plan.workers[0])].append(layer)
        return dict(found)

    @cached_property
    def _solved_by(self) -> dict[int, list[tuple[Layer, str]]]:
        """The factors that each rank decomposes."""
        found: defaultdict[int, list[tuple[Layer, str]]] = defaultdict(list)
        for layer, plan in self._layers:
            for letter in layer.shape.letters:
                found[plan.solver(letter)].append((layer, letter))
        return dict(found)

    @cached_property
    def _kept_by(self) -> dict[int, list[tuple[Layer, str]]]:
        """The factors that each rank keeps alone."""
        found: defaultdict[int, list[tuple[Layer, str]]] = defaultdict(list)
        for layer, plan in self._layers:
            for letter in layer.shape.letters:
                keeper = plan.keeper(letter)
                if keeper is not None:
                    found[keeper].append((layer, letter))
        return dict(found)

    @cached_property
    def _kept_by_all(self) -> list[tuple[Layer, str]]:
        """The factors that every rank keeps."""
        layers = [layer for layer, plan in self._layers if plan.keepers is None]
        return [(layer, letter) for layer in layers for letter in layer.shape.letters]

    def _kept(self, rank: int) -> list[tuple[Layer, str]]:
        return [*self._kept_by_all, *self._kept_by.get(rank, [])]

    @cached_property
    def _taken_by(self) -> dict[int, list[Layer]]:
        """The layers whose statistics one rank alone takes."""
        found: defaultdict[int, list[Layer]] = defaultdict(list)
        for layer, plan in self._layers:
            if plan.source is not None:
                found[plan.source].append(layer)
        return dict(found)

    @cached_property
    def _taken_by_all(self) -> list[Layer]:
        return [layer for layer, plan in self._layers if plan.source is None]

    def _taken(self, rank: int) -> list[Layer]:
        return [*self._taken_by_all, *self._taken_by.get(rank, [])]

    @cached_property
    def _owners(self) -> list[int]:
        """The owner of each parameter's gradient, where they have any."""
        if self.planned.owners is None:
            return []
        owner_of: dict[int, int] = {}
        for layer, plan in self._layers:
            owner_of |= dict.fromkeys(layer.params, plan.workers[0])
        params = self.network.params
        owners = [owner_of.get(i) for i in range(len(params))]
        return gradient_owners([p.elements for p in params], owners, self.ranks)

    @cached_property
    def _owned(self) -> Counter[int]:
        """Bytes of the gradients that each owner sends back to all."""
        found: Counter[int] = Counter()
        for i in self._returned:
            found[self._owners[i]] += self.network.params[i].nbytes
        return found

    @cached_property
    def _returned(self) -> list[int]:
        """The parameters whose gradients owners send back, in the order of sending."""
        if self.planned.owners is None:
            return []
        if self.planned.averages and self.planned.owners == "owner":
            return list(range(len(self.network.params)))
        return [i for layer in self.network.layers for i in layer.params]

    # ---------------------------------------------------------------------------------- messages

    @property
    def _compared(self) -> Transfer:
        moved = WORD * (self.ranks - 1)
        handed = WORD * self.ranks
        return Transfer(
            "compare", "all_to_all", self._world, handed, moved, moved, 2 * handed, 1, host=True
        )

    def _averaging(self, rank: int) -> Iterator[Transfer]:
        """The plain gradients, and one number a parameter: who has a gradient."""
        if not self.planned.averages or not self.network.params:
            return
        params = self.network.params
        sizes = [(p.dtype, p.nbytes) for p in params]
        present = FLOAT * len(params)
        messages = _messages([*sizes, (torch.float32, present)])
        total = sum(n for _, n in sizes)
        if self.planned.owners == "owner":
            mine = self._owned[rank]
            yield self._summed("average_gradients", total, present, mine, messages)
        else:
            yield self._all_reduced("average_gradients", total + present, messages)

    def _all_reduced(
        self, stage: str, nbytes: int, messages: int, *, host: bool = False
    ) -> Transfer:
        moved = 2 * (self.ranks - 1) / self.ranks * nbytes
        return Transfer(
            stage, "all_reduce", self._world, nbytes, moved, moved, nbytes, messages, host
        )

    def _summed(
        self, stage: str, for_owners: int, for_all: int, mine: int, messages: int
    ) -> Transfer:
        """Sums of which each rank gets its own, and everybody those for all."""
        handed = for_owners + self.ranks * for_all
        arrives = self.ranks * (mine + for_all)
        return Transfer(
            stage,
            "all_to_all",
            self._world,
            handed,
            handed - mine - for_all,
            arrives - mine - for_all,
            handed + arrives,
            messages,
        )

    def _statistics_travel(self, rank: int) -> Iterator[Transfer]:
        layers = self._taken_by_all
        tensors = self._statistics_sent
        if tensors:
            heads = sum(_head_bytes(layer, self.options) for layer in layers if layer.hooked)
            factors = sum(n for _, n in tensors) - heads
            messages = _messages(tensors)
            if any(plan.keepers is not None for layer, plan in self._layers if layer.hooked):
                kept = self._kept_by.get(rank, [])
                mine = sum(_stored_bytes(*item, self.options) for item in kept if item[0].hooked)
                shared = [x for x in self._kept_by_all if x[0].hooked]
                for_all = heads + sum(_stored_bytes(*item, self.options) for item in shared)
                alone = factors - (for_all - heads)
                yield self._summed("statistics_exchange", alone, for_all, mine, messages)
            else:
                yield self._all_reduced("statistics_exchange", heads + factors, messages)
        if self.planned.owners is not None and not all(x.hooked for x in self.network.layers):
            yield self._all_reduced("statistics", FLOAT, 1)  # the number of examples

    @cached_property
    def _statistics_sent(self) -> list[tuple[torch.dtype, int]]:
        """Dtype and bytes of each sum over all ranks, in the order of sending."""
        options, found = self.options, []
        for layer in self._taken_by_all:
            if layer.hooked:
                found.append((_wide(options), _head_bytes(layer, options)))
                sizes = [_stored_bytes(layer, k, options) for k in layer.shape.letters]
                found += [(options.factor_dtype, size) for size in sizes]
        return found

    def _solutions_travel(self, rank: int) -> Iterator[Transfer]:
        if not self.network.layers:
            return
        verdicts = FLOAT * len(self.network.layers)
        yield self._all_reduced("solve_exchange", verdicts, 1, host=True)
        row = self._by_row.get(self.plan.grid.row_of(rank), [])
        others = self._row.size - 1
        if not row or not others:
            return
        mine = sum(self._decomposed_bytes(*item) for item in self._solved_by.get(rank, []))
        total = sum(self._decomposed_bytes(x, k) for x in row for k in x.shape.letters)
        sent, received = mine * others, total - mine
        yield Transfer(
            "solve_exchange", "all_to_all", self._row, sent, sent, received, sent + received, 1
        )

    def _decomposed_bytes(self, layer: Layer, letter: str) -> int:
        """Bytes of a factor's decomposition as it travels."""
        numbers = 0
        if self.planned.background and letter == "A":
            numbers = 2 if self.options.preconditioner_scale == "gradient" else 1  # and γ
        elements = numbers + sum(map(math.prod, _kept_shapes(layer.shape, letter, self.options)))
        return elements * self.options.inv_dtype.itemsize

    def _results_travel(self, rank: int) -> Iterator[Transfer]:
        if self.planned.owners is not None:
            yield from self._given_back(rank)
            return
        others = self._column.size - 1
        if not others:
            return
        here = self.plan.grid.row_of(rank)
        for dtype in dict.fromkeys(layer.work_dtype for layer in self.network.layers):
            total, mine = self._result_bytes(dtype), self._result_bytes(dtype, here)
            sent, received = mine * others, total - mine
            yield Transfer(
                "precondition_exchange",
                "all_to_all",
                self._column,
                sent,
                sent,
                received,
                sent + received,
                1,
            )

    def _result_bytes(self, dtype: torch.dtype, row: int | None = None) -> int:
        """Bytes of preconditioned gradients of a dtype, those of a row's layers or of all."""
        layers = self.network.layers if row is None else self._by_row.get(row, [])
        alike = [layer for layer in layers if layer.work_dtype == dtype]
        return sum(math.prod(layer.shape.gradient_size) * dtype.itemsize for layer in alike)

    def _given_back(self, rank: int) -> Iterator[Transfer]:
        """Gradients from their owners to all, with each rank's part of the clip's sum."""
        wide = torch.promote_types(self.options.inv_dtype, torch.float32)
        part = 0 if self.options.kl_clip is None else wide.itemsize
        sizes = [
            (self.network.params[i].dtype, self.network.params[i].nbytes) for i in self._returned
        ]
        sizes += [(wide, part)] * (self.ranks if part else 0)
        if not sizes:
            return
        mine = self._owned[rank] + part
        total = self._owned.total() + part * self.ranks
        sent, received = mine * (self.ranks - 1), total - mine
        yield Transfer(
            "precondition_exchange",
            "all_to_all",
            self._world,
            sent,
            sent,
            received,
            sent + received,
            _messages(sizes),
        )

    # ------------------------------------------------------------------------------------- memory

    def _held(self, rank: int, statistics: bool) -> tuple[Held, ...]:
        options, network = self.options, self.network
        weights = sum(p.nbytes for p in network.params)
        kept = sum(_stored_bytes(*item, options) for item in self._kept(rank))
        row = self._by_row.get(self.plan.grid.row_of(rank), [])
        held = [
            Held("parameters", weights),
            Held("gradients", weights),
            Held("base", network.base_bytes),
            Held("factors", kept),
            # The number of examples, the averages' weight, and the traces.
            Held(
                "heads",
                sum(_head_bytes(x, options) + _wide(options).itemsize for x in network.layers),
            ),
            Held("inverses", sum(_inverse_bytes(x.shape, options) for x in row)),
        ]
        if statistics:
            taken = [layer for layer in self._taken(rank) if layer.hooked]
            widened = replace(options, factor_dtype=_wide(options))
            sums = [_stored_bytes(x, k, widened) for x in taken for k in x.shape.letters]
            held.append(Held("statistics", sum(sums)))
        return tuple(held)

    # --------------------------------------------------------------------------------------- work

    def _takes_statistics(self, rank: int) -> Iterator[Compute]:
        dtype = _wide(self.options)
        kept = {(layer.name, letter) for layer, letter in self._kept(rank)}
        for layer in self._taken(rank):
            shape = layer.shape
            for letter in shape.letters:
                if shape.is_diagonal(letter):
                    continue
                n = shape.dim(letter)
                if layer.hooked:
                    rows = round(self.examples * (layer.rows or 0.0))
                    n -= layer.homogeneous and letter == "A"  # a sum of rows, no product
                    if rows:
                        yield Compute("statistics", "gram", (rows, n), shape.groups, dtype)
                elif (layer.name, letter) in kept:
                    rows = shape.dim("A" if letter == "G" else "G")
                    yield Compute("statistics", "gram", (rows, n), shape.groups, dtype)

    def _solves(self, rank: int) -> Iterator[Compute]:
        options, dtype = self.options, self.options.solve_dtype
        for layer, letter in self._solved_by.get(rank, []):
            shape, n = layer.shape, layer.shape.dim(letter)
            if shape.is_diagonal(letter):
                continue
            if options.solver == "inverse":
                yield Compute("solve", "cholesky_inverse", (n,), shape.groups, dtype)
            elif options.eigen_refresh == "warm":  # from the last refresh's eigenvectors
                yield Compute("solve", "qr", (n,), shape.groups, dtype)
                yield Compute("solve", "matmul", (n, n, n), 3 * shape.groups, dtype)
            else:
                yield Compute("solve", "eigh", (n,), shape.groups, dtype)

    def _preconditions(self, rank: int) -> Iterator[Compute]:
        dtype = self.options.inv_dtype
        times = 2 if self.options.solver == "eigen" else 1  # there and back
        for layer in self._by_row.get(self.plan.grid.row_of(rank), []):
            for sizes, count in _products(layer.shape):
                yield Compute("precondition", "matmul", sizes, times * count, dtype)


def _products(shape: FactorShape) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Sizes and number of the products of a gradient with a matrix for each factor."""
    groups, out, inputs = shape.gradient_size
    yield (out, out, inputs), groups
    if shape.locations:
        channels, locations = shape.dim("A"), shape.dim("L")
        yield (channels, channels, locations), out
        yield (channels, locations, locations), out
    elif not shape.diagonal_a:
        yield (out, inputs, inputs), groups


def _wide(options: KFACOptions) -> torch.dtype:
    """The dtype of sums and heads."""
    return torch.promote_types(options.factor_dtype, torch.float32)


def _head_bytes(layer: Layer, options: KFACOptions) -> int:
    """Bytes of the number of examples and the sums of mean eigenvalues."""
    shape = layer.shape
    return (1 + len(shape.letters) * shape.groups) * _wide(options).itemsize


def _stored_bytes(layer: Layer, letter: str, options: KFACOptions) -> int:
    """Bytes of a factor as it is kept and sent."""
    stored = layer.shape.stored_shape(letter, options.symmetry_aware)
    return math.prod(stored) * options.factor_dtype.itemsize


def _kept_shapes(
    shape: FactorShape, letter: str, options: KFACOptions
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the parts of a factor's decomposition."""
    diagonal, packed = shape.is_diagonal(letter), options.symmetry_aware
    return SOLVERS[options.solver].kept_shapes(shape.groups, shape.dim(letter), diagonal, packed)


@lru_cache(maxsize=4096)
def _inverse_bytes(shape: FactorShape, options: KFACOptions) -> int:
    """Bytes of a layer's inverse: the solver makes one of empty decompositions."""
    parts = {
        letter: tuple(
            torch.empty(size, dtype=options.inv_dtype, device="meta")
            for size in _kept_shapes(shape, letter, options)
        )
        for letter in shape.letters
    }
    with torch.no_grad():
        inverse = SOLVERS[options.solver].combine(parts, 1.0)
    return sum(tensor.nbytes for tensor in inverse.tensors)


def _messages(tensors: Iterable[tuple[torch.dtype, int]]) -> int:
    """The number of buckets that tensors of these dtypes and bytes fill."""
    filled: dict[torch.dtype, int] = {}
    buckets = 0
    for dtype, nbytes in tensors:
        if dtype not in filled or filled[dtype] + nbytes > BUCKET_BYTES:
            filled[dtype] = 0
            buckets += 1
        filled[dtype] += nbytes
    return buckets
