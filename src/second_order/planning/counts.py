"""The work of each rank at a step, counted from the plan that training carries out.

    case = Case(network, planned, ranks=4096, examples=32)
    case.work(7, refresh=True)             one rank
    case.everybody(refresh=True)           all of them, equal ones once

Messages are those of tensors as NCCL takes them; gloo, for one, sends bfloat16 as float32, and sums
small messages of many ranks in rounds. Not counted are messages outside of steps (construction,
checkpoints, moved factors), those of stats workers, FSDP2's shards, and work that is linear in the
sizes of inputs, gradients and factors. Of statistics every layer's own are counted, also where
layers fed by one tensor share one A. A solve on threads is counted at the step that submits it, and
its result as if it landed there; until it lands, every step has one more message, on the verdicts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import torch
from torch import Tensor

from second_order.distributed.shares import goes_in_rounds, rounds_among
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import LayerPlan, gradient_owners
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.solvers import SOLVERS
from second_order.planning.messages import (
    Bucket,
    Piece,
    all_reduced,
    buckets_of,
    copied,
    sum_of_parts,
    summed,
)
from second_order.planning.network import Layer, Network
from second_order.planning.systems import Planned
from second_order.planning.work import Among, Compute, Held, RankWork, StageWork, Transfer, merged

__all__ = ["Case", "Share", "alike_of", "compared"]

WORDS = 16  # bytes of the words by which ranks compare what they are about to do
FLOAT = torch.float32.itemsize
TOLD, TOLD_BY_LAYER = 5, 3  # numbers that ranks add up after a refresh; the latter by drift


@dataclass(frozen=True)
class Share:
    """Ranks that do the same.

    Attributes:
        ranks: Their number.
        work: The work of one of them, whose rank is the lowest.
    """

    ranks: int
    work: RankWork


def compared(among: Among) -> Transfer:
    """The words by which ranks compare what they are about to do."""
    return agreed("compare", among, WORDS)


def agreed(stage: str, among: Among, nbytes: int) -> Transfer:
    """All ranks' numbers in one, by their greatest or sum; gloo has rounds among many ranks."""
    rounds = rounds_among(among.size) if goes_in_rounds(among.size, nbytes) else 1
    return all_reduced(stage, among, nbytes * rounds, 1, host=True)


def alike_of(kinds: Sequence[Tensor]) -> list[int]:
    """By rank, the lowest rank with the same numbers, of ``(numbers, ranks)`` tensors."""
    _, kind = torch.unique(torch.cat(list(kinds)), dim=1, return_inverse=True)
    ranks = torch.arange(len(kind))
    lowest = torch.full_like(ranks, len(kind)).scatter_reduce(0, kind, ranks, "amin")
    found: list[int] = lowest[kind].tolist()
    return found


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
        row = self.plan.grid.row_of(rank)
        stages = [self._preconditions[row]] if row in self._preconditions else []
        stages = [*([self._takes_statistics(rank)] if statistics else []), *stages]
        stages += [merged("solve", self._solves(rank))] if refresh else []
        transfers: list[Transfer] = []
        if self.ranks > 1:
            transfers += [compared(self._world), *self._averaging(rank)]
            transfers += self._statistics_travel(rank) if statistics else []
            transfers += self._solutions_travel(rank) if refresh else []
            transfers += self._results_travel(rank)
        held = self._held(rank, statistics)
        return RankWork(rank, tuple(stages), tuple(transfers), held)

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
        return self._alike[rank]

    @cached_property
    def _classes(self) -> dict[int, int]:
        """The number of ranks that do the same as some rank, by that rank."""
        return dict(Counter(self._alike))

    @cached_property
    def _alike(self) -> list[int]:
        """By rank, the lowest rank that does the same: for all of them at once."""
        grid, ranks = self.plan.grid, torch.arange(self.ranks)
        rows, columns = ranks // grid.columns, ranks % grid.columns
        busy = [*self._solved_by, *self._kept_by, *self._taken_by]
        own = _numbered({rank: self._own(rank) for rank in busy}, self.ranks)
        alike = _numbered({row: self._of_row(row) for row in self._by_row}, grid.rows)
        kinds = [own.unsqueeze(0), alike[rows].unsqueeze(0)]
        kinds += [sum_of_parts(each) for each in self._buckets_of_world if each]
        if self._results:
            kinds.append(sum_of_parts(self._results)[:, rows])
        in_rows = torch.zeros(5, grid.rows, grid.columns, dtype=torch.int64)
        for row, buckets in self._decompositions.items():
            if any(bucket.by_shares for bucket in buckets):  # else a rank's own layers tell
                in_rows[:, row] = sum_of_parts(buckets)
        kinds.append(in_rows[:, rows, columns])
        return alike_of(kinds)

    def _own(self, rank: int) -> Hashable:
        """What a rank decomposes, keeps and takes alone; sizes alone tell, but of statistics."""
        solved, kept = self._solved_by.get(rank, []), self._kept_by.get(rank, [])
        return (
            self.solving(rank),
            tuple((layer.shape, letter) for layer, letter in solved),
            tuple((layer.shape, letter, layer.hooked) for layer, letter in kept),
            tuple(layer.name for layer in self._taken_by.get(rank, [])),
        )

    def _of_row(self, row: int) -> Hashable:
        """What the ranks of a row do alike."""
        return (
            tuple(layer.shape for layer in self._by_row[row]),
            tuple((b.by_sum, b.by_shares) for b in self._decompositions.get(row, [])),
        )

    # ------------------------------------------------------------------------- who has which layer

    @cached_property
    def _layers(self) -> list[tuple[Layer, LayerPlan]]:
        return list(zip(self.network.layers, self.plan.layers, strict=True))

    @cached_property
    def _by_row(self) -> dict[int, list[Layer]]:
        """The layers that each row of the grid preconditions; rows without any are not there."""
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

    def taken(self, rank: int) -> list[Layer]:
        """The layers whose statistics a rank takes: its own, or all; not to be changed."""
        return self._taken_by.get(rank, self._taken_by_all)

    def preconditioned(self, rank: int) -> list[Layer]:
        """The layers whose gradients a rank preconditions; not to be changed."""
        return self._by_row.get(self.plan.grid.row_of(rank), [])

    def solving(self, rank: int) -> int:
        """The number of layers of which a rank decomposes a factor."""
        return len({layer.name for layer, _ in self._solved_by.get(rank, [])})

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
    def _returned(self) -> list[int]:
        """The parameters whose gradients owners send back, in the order of sending."""
        if self.planned.owners is None:
            return []
        if self.planned.averages and self.planned.owners == "owner":
            return list(range(len(self.network.params)))
        return [i for layer in self.network.layers for i in layer.params]

    # ---------------------------------------------------------------------------------- messages

    def _averaging(self, rank: int) -> list[Transfer]:
        """The plain gradients, and one number a parameter: who has a gradient."""
        if not self.planned.averages or not self.network.params:
            return []
        if self.planned.owners == "owner":
            return summed("average_gradients", self._world, rank, self._averaged)
        nbytes = sum(bucket.total * bucket.itemsize for bucket in self._averaged)
        return [all_reduced("average_gradients", self._world, nbytes, len(self._averaged))]

    @cached_property
    def _averaged(self) -> list[Bucket]:
        params = self.network.params
        owners = self._owners if self.planned.owners == "owner" else [None] * len(params)
        pieces: list[Piece] = [
            (p.dtype, p.elements, owner) for p, owner in zip(params, owners, strict=True)
        ]
        return buckets_of([*pieces, (torch.float32, len(params), None)], self.ranks)

    def _statistics_travel(self, rank: int) -> list[Transfer]:
        found, buckets = [], self._statistics
        if any(bucket.sizes for bucket in buckets):
            found = summed("statistics_exchange", self._world, rank, buckets)
        elif buckets:
            nbytes = sum(bucket.total * bucket.itemsize for bucket in buckets)
            found = [all_reduced("statistics_exchange", self._world, nbytes, len(buckets))]
        if self.planned.owners is not None and not all(x.hooked for x in self.network.layers):
            found.append(all_reduced("statistics", self._world, FLOAT, 1))  # number of examples
        return found

    @cached_property
    def _statistics(self) -> list[Bucket]:
        """Sums over all ranks; those of layers whose statistics one rank takes do not travel."""
        options, pieces = self.options, list[Piece]()
        for layer, plan in self._layers:
            if plan.source is None and layer.hooked:
                pieces.append((_wide(options), _head_elements(layer.shape), None))
                for letter in layer.shape.letters:
                    elements = _stored_elements(layer.shape, letter, options)
                    pieces.append((options.factor_dtype, elements, plan.keeper(letter)))
        return buckets_of(pieces, self.ranks)

    def _solutions_travel(self, rank: int) -> list[Transfer]:
        if not self.network.layers:
            return []
        told = [agreed("solve_exchange", self._world, self._told)] if self._told else []
        grid, verdicts = self.plan.grid, FLOAT * len(self.network.layers)
        buckets = self._decompositions.get(grid.row_of(rank), [])
        return [
            agreed("solve_exchange", self._world, verdicts),
            *told,
            *copied("solve_exchange", self._row, grid.column_of(rank), buckets),
        ]

    @property
    def _told(self) -> int:
        """Bytes by which γ, intervals and the length of steps follow what a refresh tells."""
        options = self.options
        if not (options.by_drift or options.follows_steps or options.damping_floor):
            return 0
        by_layer = len(self.network.layers) if options.by_drift else 0
        return torch.float64.itemsize * (TOLD + TOLD_BY_LAYER * by_layer)

    @cached_property
    def _decompositions(self) -> dict[int, list[Bucket]]:
        """By row of the grid, what its solvers send to all ranks of the row, in one message."""
        grid, itemsize = self.plan.grid, self.options.inv_dtype.itemsize
        if grid.columns == 1:
            return {}
        sizes: dict[int, Counter[int]] = {row: Counter() for row in self._by_row}
        for layer, plan in self._layers:
            for letter in layer.shape.letters:
                solver = plan.solver(letter)
                of_row = sizes[grid.row_of(plan.workers[0])]
                of_row[grid.column_of(solver)] += self._decomposed_elements(layer, letter)
        return {row: [Bucket(of, 0, itemsize, grid.columns)] for row, of in sizes.items()}

    def _decomposed_elements(self, layer: Layer, letter: str) -> int:
        """Elements of a factor's decomposition as it travels."""
        numbers = 0
        if self.planned.background and letter == "A":
            numbers = 2 if self.options.preconditioner_scale == "gradient" else 1  # and γ
        return numbers + sum(map(math.prod, _kept_shapes(layer.shape, letter, self.options)))

    def _results_travel(self, rank: int) -> list[Transfer]:
        if self.planned.owners is not None:
            return copied("precondition_exchange", self._world, rank, self._given_back)
        row = self.plan.grid.row_of(rank)
        return copied("precondition_exchange", self._column, row, self._results)

    @cached_property
    def _results(self) -> list[Bucket]:
        """Preconditioned gradients by row of the grid: in each column, one message a dtype."""
        grid = self.plan.grid
        if grid.rows == 1 or self.planned.owners is not None:
            return []
        sizes: dict[torch.dtype, Counter[int]] = {}
        for layer, plan in self._layers:
            row = grid.row_of(plan.workers[0])
            of_dtype = sizes.setdefault(layer.work_dtype, Counter())
            of_dtype[row] += math.prod(layer.shape.gradient_size)
        return [Bucket(of, 0, dtype.itemsize, grid.rows) for dtype, of in sizes.items()]

    @cached_property
    def _given_back(self) -> list[Bucket]:
        """Gradients from their owners to all, with each rank's part of the clip's sum."""
        params = [(self.network.params[i], self._owners[i]) for i in self._returned]
        pieces: list[Piece] = [(p.dtype, p.elements, owner) for p, owner in params]
        if self.options.kl_clip is not None:
            wide = torch.promote_types(self.options.inv_dtype, torch.float32)
            pieces += [(wide, 1, rank) for rank in range(self.ranks)]
        return buckets_of(pieces, self.ranks)

    @property
    def _buckets_of_world(self) -> list[list[Bucket]]:
        """By exchange, the buckets of which each rank wants or has a part of its own."""
        averaged = self._averaged if self.planned.owners == "owner" else []
        given = [] if self.planned.owners is None else self._given_back
        kept = self._statistics if any(b.sizes for b in self._statistics) else []
        return [averaged, given, kept]

    # ------------------------------------------------------------------------------------- memory

    def _held(self, rank: int, statistics: bool) -> tuple[Held, ...]:
        row = self.plan.grid.row_of(rank)
        kept = sum(_stored_bytes(*item, self.options) for item in self._kept_by.get(rank, []))
        held = [
            *self._held_by_all,
            Held("factors", self._bytes_kept_by_all + kept),
            Held("heads", self._head_bytes),
            Held("inverses", self._inverses.get(row, 0)),
        ]
        if statistics:
            own = self._sums_of(self._taken_by.get(rank, []))
            held.append(Held("statistics", self._sums_of_all + own))
        return tuple(held)

    @cached_property
    def _held_by_all(self) -> tuple[Held, ...]:
        weights = sum(p.nbytes for p in self.network.params)
        base = Held("base", self.network.base_bytes)
        return Held("parameters", weights), Held("gradients", weights), base

    @cached_property
    def _bytes_kept_by_all(self) -> int:
        return sum(_stored_bytes(*item, self.options) for item in self._kept_by_all)

    @cached_property
    def _head_bytes(self) -> int:
        """Bytes of the number of examples, the averages' weight, and the traces."""
        heads = sum(1 + _head_elements(layer.shape) for layer in self.network.layers)
        return heads * _wide(self.options).itemsize

    @cached_property
    def _inverses(self) -> dict[int, int]:
        """By row, the bytes of its layers' inverses."""
        options = self.options
        made_so = options.solver, options.inv_dtype, options.symmetry_aware
        return {
            row: sum(_inverse_bytes(layer.shape, *made_so) for layer in layers)
            for row, layers in self._by_row.items()
        }

    @cached_property
    def _sums_of_all(self) -> int:
        return self._sums_of(self._taken_by_all)

    def _sums_of(self, layers: Iterable[Layer]) -> int:
        """Bytes of the sums of a step's statistics."""
        shapes = [layer.shape for layer in layers if layer.hooked]
        elements = sum(_stored_elements(x, k, self.options) for x in shapes for k in x.letters)
        return elements * _wide(self.options).itemsize

    # --------------------------------------------------------------------------------------- work

    def _takes_statistics(self, rank: int) -> StageWork:
        passes = [self._grams(x) for x in self._taken_by.get(rank, []) if x.hooked]
        kept = [item for item in self._kept_by.get(rank, []) if not item[0].hooked]
        own = [*chain(*passes), *chain(*(self._gradient_grams(*item) for item in kept))]
        common = self._statistics_of_all
        return merged("statistics", [*common.computes, *own]) if own else common

    @cached_property
    def _statistics_of_all(self) -> StageWork:
        """The statistics that every rank takes."""
        passes = [self._grams(layer) for layer in self._taken_by_all if layer.hooked]
        kept = [self._gradient_grams(*item) for item in self._kept_by_all if not item[0].hooked]
        return merged("statistics", chain(*passes, *kept))

    def _grams(self, layer: Layer) -> Iterator[Compute]:
        """Statistics of a layer's passes."""
        shape, rows = layer.shape, round(self.examples * (layer.rows or 0.0))
        for letter in shape.letters:
            if rows and not shape.is_diagonal(letter):
                n = shape.dim(letter)
                n -= layer.homogeneous and letter == "A"  # a sum of rows, no product
                yield Compute("statistics", "gram", (rows, n), shape.groups, _wide(self.options))

    def _gradient_grams(self, layer: Layer, letter: str) -> Iterator[Compute]:
        """A factor of a layer's mean gradient, which is computed by those that keep it."""
        shape = layer.shape
        if not shape.is_diagonal(letter):
            sizes = shape.dim("A" if letter == "G" else "G"), shape.dim(letter)
            yield Compute("statistics", "gram", sizes, shape.groups, _wide(self.options))

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

    @cached_property
    def _preconditions(self) -> dict[int, StageWork]:
        """By row of the grid, the products of its ranks."""
        dtype = self.options.inv_dtype
        times = 2 if self.options.solver == "eigen" else 1  # there and back
        return {
            row: merged(
                "precondition",
                (
                    Compute("precondition", "matmul", sizes, times * count, dtype)
                    for layer in layers
                    for sizes, count in _products(layer.shape)
                ),
            )
            for row, layers in self._by_row.items()
        }


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


def _numbered(kinds: dict[int, Hashable], count: int) -> Tensor:
    """By index, a number for each kind; 0 where there is none."""
    numbers: dict[Hashable, int] = {}
    found = torch.zeros(count, dtype=torch.int64)
    for index, kind in kinds.items():
        found[index] = numbers.setdefault(kind, len(numbers) + 1)
    return found


def _wide(options: KFACOptions) -> torch.dtype:
    """The dtype of sums and heads."""
    return torch.promote_types(options.factor_dtype, torch.float32)


def _head_elements(shape: FactorShape) -> int:
    """The number of examples, and the sums of mean eigenvalues."""
    return 1 + len(shape.letters) * shape.groups


def _stored_elements(shape: FactorShape, letter: str, options: KFACOptions) -> int:
    """Elements of a factor as it is kept and sent."""
    return math.prod(shape.stored_shape(letter, options.symmetry_aware))


def _stored_bytes(layer: Layer, letter: str, options: KFACOptions) -> int:
    """Bytes of a factor as it is kept."""
    return _stored_elements(layer.shape, letter, options) * options.factor_dtype.itemsize


def _kept_shapes(
    shape: FactorShape, letter: str, options: KFACOptions
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the parts of a factor's decomposition."""
    diagonal, packed = shape.is_diagonal(letter), options.symmetry_aware
    return SOLVERS[options.solver].kept_shapes(shape.groups, shape.dim(letter), diagonal, packed)


@lru_cache(maxsize=4096)
def _inverse_bytes(shape: FactorShape, solver: str, dtype: torch.dtype, packed: bool) -> int:
    """Bytes of a layer's inverse: the solver makes one of empty decompositions."""
    made = SOLVERS[solver]
    parts = {}
    for letter in shape.letters:
        sizes = made.kept_shapes(shape.groups, shape.dim(letter), shape.is_diagonal(letter), packed)
        parts[letter] = tuple(torch.empty(s, dtype=dtype, device="meta") for s in sizes)
    with torch.no_grad():
        inverse = made.combine(parts, 1.0)
    return sum(tensor.nbytes for tensor in inverse.tensors)
