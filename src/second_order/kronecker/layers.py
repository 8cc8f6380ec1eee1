"""Kronecker statistics from (input, gradient of the output), for each type of module.

A layer computes s = W a, with a the input and, where the layer has a bias, a 1 appended. All
factors carry a leading dimension of groups (1 except for grouped convolutions), so that every
layer is the same to the solvers: A is ``(groups, in, in)``, G is ``(groups, out, out)`` and the
gradient is ``(groups, out, in)``. An embedding is the Linear on one-hot rows: its A is diagonal,
kept as ``(groups, in)``.

A is a mean over the rows that take part in a pass. Padded tokens do not: they would thin A by
inputs that teach nothing. Which rows take part is decided for all layers of a pass together, in
:mod:`second_order.kronecker.rows`.

Sources: Martens & Grosse 2015 (Linear), Eschenhagen et al. 2023 (expand and reduce). Convolutions
are in :mod:`second_order.kronecker.convolutions`, others in :mod:`second_order.kronecker.kinds`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.storage import packed_length

__all__ = [
    "CONVOLUTIONS",
    "KINDS",
    "FactorShape",
    "Layout",
    "PairStatistics",
    "gram",
    "matrix_layout",
]

Approximation: TypeAlias = Literal["expand", "reduce"]


@dataclass(frozen=True)
class FactorShape:
    """Sizes of a layer's factors: A is ``groups x in x in``, G is ``groups x out x out``."""

    groups: int
    in_dim: int
    out_dim: int
    diagonal_a: bool = False  # A is kept as groups x in
    locations: int = 0  # if doubly factored, with A of in / locations channels, and L of locations
    exact: bool = False  # G is the whole curvature, and A is 1
    transposed: bool = False  # the weight is (groups in, out)
    gradient_factored: bool = (
        False  # G is of gradients' rows and A of their columns; A has the trace 1
    )
    routed: bool = False  # each group has examples of its own, over which A is a mean

    @cached_property
    def dims(self) -> dict[str, int]:
        """The sizes n of the factors, by name."""
        if self.locations:
            return {"A": self.in_dim // self.locations, "G": self.out_dim, "L": self.locations}
        return {"A": self.in_dim, "G": self.out_dim}

    @cached_property
    def factor_names(self) -> str:
        """The names of the factors."""
        return "".join(self.dims)

    @cached_property
    def diagonals(self) -> str:
        """The names of the factors that are kept as diagonals."""
        return "A" if self.diagonal_a else ""

    @cached_property
    def elements(self) -> int:
        """Elements of all factors of a group."""
        return sum(n**2 for n in self.dims.values())

    @cached_property
    def record_size(self) -> int:
        """Numbers of a group in a record of sums."""
        return len(self.dims) + self.routed

    @cached_property
    def gradient_shape(self) -> tuple[int, int, int]:
        """The shape of the gradient as a matrix for each group."""
        return self.groups, self.out_dim, self.in_dim

    def matrix_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors as matrices, or diagonals."""
        sizes: dict[str, tuple[int, ...]] = {}
        for letter, dim in self.dims.items():
            sizes[letter] = (
                (self.groups, dim) if letter in self.diagonals else (self.groups, dim, dim)
            )
        return sizes

    def stored_shape(self, letter: str) -> tuple[int, ...]:
        """Shape of a factor as it is stored: diagonals, or triangles."""
        dim = self.dims[letter]
        return self.groups, dim if letter in self.diagonals else packed_length(dim)


@dataclass(frozen=True)
class RowMask:
    """The rows of a captured pair that count."""

    mask: Tensor | None  # (rows,), True where a row counts; None if all are known to count
    count: int | Tensor  # of these; on a device a scalar tensor, which the host does not read

    def apply(self, rows: Tensor) -> Tensor:
        """Those among ``(rows, ...)`` that count; the others are zero.

        One that does not count and is not finite becomes NaN, as it does in the weight's gradient.
        """
        return rows if self.mask is None else rows * self.mask.view(-1, *[1] * (rows.dim() - 1))

    def to_examples(self, number: int) -> RowMask:
        """The examples that have a row that counts, where each of so many has equally many rows."""
        if self.mask is None or number == 0:
            return full_row_mask(number)
        return to_row_mask(self.mask.view(number, -1).any(1))


def nonzero_row_mask(d: Tensor) -> RowMask:
    """The rows of ``(rows, ...)`` that have an entry other than zero."""
    return to_row_mask(d.flatten(1).any(1))


def full_row_mask(number: int) -> RowMask:
    """So many rows, all of which count."""
    return RowMask(None, number)


def to_row_mask(mask: Tensor) -> RowMask:
    """The rows of a mask, ``(rows,)``; on the CPU None takes the place of one that has them all."""
    if mask.device.type != "cpu":
        return RowMask(mask, mask.sum())
    count = int(mask.sum())
    return RowMask(None if count == len(mask) else mask, count)


@dataclass(frozen=True)
class PairStatistics:
    """Sums over one captured pair.

    A, divided by ``examples``, is this pair's estimate of A, and so with L. G is divided by the
    terms of the loss, which only the whole pass shows.
    """

    factors: dict[str, Tensor]  # the sums by letter, (groups, n, n), or diagonals (groups, n)
    num_examples: int | Tensor  # on a device a scalar tensor, which the host does not read
    examples_per_group: Tensor | None = (
        None  # examples of each group, if these have their own, (groups,)
    )


@dataclass(frozen=True)
class PairOptions:
    """How the statistics of a pair are formed."""

    has_bias: bool  # the homogeneous coordinate belongs to A
    approximation: Approximation  # of dimensions that share the weight (Eschenhagen et al. 2023)
    row_mask: RowMask  # that A is a sum over


CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


# --------------------------------------------------------------------------- sums of outer products


def gram(x: Tensor, homogeneous: bool = False, ones: int | Tensor | None = None) -> Tensor:
    """Sum of the outer products of the rows of ``x``, ``(groups, rows, dim)``.

    ``homogeneous`` appends a 1 to every row, without a copy of the rows; or to so many ``ones``, if
    the others are zero. Of shape ``(groups, n, n)``.
    """
    groups, rows, dim = x.shape
    total = dim + int(homogeneous)
    # On one core, 128 rows of the upper triangle at a time are wide enough to be as fast as the
    # whole product: 576 and 1152 dimensions took 0.65 of the time. A GPU would see many small
    # kernels instead.
    strip = 128 if x.device.type == "cpu" else dim
    if dim <= strip:
        matrix = torch.bmm(x.mT, x)  # `@` without the views that it takes around it
        if homogeneous:
            matrix = append_ones(matrix, x.sum(1), rows if ones is None else ones)
        return matrix
    matrix = x.new_empty(groups, total, total)
    for start in range(0, dim, strip):
        stop = min(start + strip, dim)
        band = matrix[:, start:stop, start:dim]
        torch.bmm(x[..., start:stop].mT, x[..., start:], out=band)
    if homogeneous:
        matrix[:, :dim, dim] = x.sum(1)
        matrix[:, dim, dim] = rows if ones is None else ones
    # The lower triangle. A transposed copy of more rows misses the cache at every element.
    for start in range(0, total, 64):
        stop = start + 64
        matrix[:, stop:, start:stop] = matrix[:, start:stop, stop:].mT
    if homogeneous:
        matrix[:, dim, :dim] = matrix[:, :dim, dim]
    return matrix


def append_ones(matrix: Tensor, column: Tensor, ones: int | Tensor) -> Tensor:
    """The sum of outer products of rows, from that without the 1 that each is to have appended.

    ``column``, ``(groups, dim)``, is the sum of the rows, and ``ones`` their number.
    """
    groups, dim = column.shape
    whole = matrix.new_empty(groups, dim + 1, dim + 1)
    whole[:, :dim, :dim] = matrix
    whole[:, :dim, dim] = column
    whole[:, dim, :dim] = column
    whole[:, dim, dim] = ones
    return whole


def at_least_one(count: int | Tensor) -> int | Tensor:
    """A number of examples to divide by."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


# ------------------------------------------------------------------------------------ rows of pairs


ROUTED = "routed"
ATTENTION = "attention"
"""Families of rows: an attention's are ``(batch, positions)`` however its inputs lie."""


class PairRows(NamedTuple):
    """The rows of a captured pair."""

    family: str
    shape: tuple[int, ...]  # leading dimensions
    gradient: Tensor  # (rows, out)
    examples: bool = False  # known to be a batch's examples, whatever other layers see


def flatten_rows(leading: Sequence[int], d: Tensor, family: str = "") -> PairRows:
    """The rows of gradients with so many leading dimensions."""
    # (B, 1, ...) has the examples of (B, ...).
    while len(leading) > 1 and leading[-1] == 1:
        leading = leading[:-1]
    number = math.prod(leading)
    flat = d.reshape(number, d.numel() // max(number, 1))
    return PairRows(family, tuple(leading) or (1,), flat)


def image_rows(d: Tensor, batched: bool = True) -> PairRows:
    """The rows of gradients whose second dimension is that of channels: whole examples."""
    d = d if batched else d.unsqueeze(0)
    return PairRows("", (len(d),), d.flatten(1), examples=True)


def linear_rows(x: Tensor, d: Tensor, options: PairOptions) -> tuple[Tensor, Tensor, RowMask]:
    """The rows of a Linear's pair, ``(rows, in)`` and ``(rows, out)``, and those that count.

    Rows of x that do not count are zero. With "reduce" a row is an example's mean input and the sum
    of its gradients.
    """
    live = options.row_mask
    if options.approximation == "reduce" and x.dim() > 2:
        x, d = reduce_positions(x.flatten(1, -2), d.flatten(1, -2), live)
        live = live.to_examples(len(d))
    else:
        number = d.numel() // d.shape[-1]
        x = x.reshape(number, x.shape[-1])
        d = d.reshape(number, d.shape[-1])
    return live.apply(x), d, live


def reduce_positions(x: Tensor, d: Tensor, live: RowMask) -> tuple[Tensor, Tensor]:
    """Means of inputs ``(N, T, in)`` over positions that count, and sums of ``(N, T, out)``."""
    if live.mask is None:
        return x.mean(1), d.sum(1)
    mask = live.mask.view(-1, d.shape[1], 1)
    return (x * mask).sum(1) / mask.sum(1).clamp_min(1), d.sum(1)


def sum_outer_products(x: Tensor, d: Tensor) -> Tensor:
    """The sum of d xᵀ over all rows of a pair, ``(out, in)``."""
    return d.reshape(-1, d.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


# -------------------------------------------------------------------------------- kinds of layers


Rows: TypeAlias = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerKind(ABC):
    """The rules for one kind of layer.

    Attributes:
        weight: Name of the weight.
        bias: Name of the bias.
        family: Of its rows.
        rows: The rows of an input and of an output's gradient; None: they are as they are.
        separate_bias_reason: Why the bias is not the homogeneous coordinate of A; "" if it is.
        multiplies_rows: Whether it multiplies the rows of its input, as they are, by a matrix.
    """

    weight: str = "weight"
    bias: str = "bias"
    family: str = ""
    rows: Rows | None = None
    separate_bias_reason = ""
    multiplies_rows = False

    @abstractmethod
    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        """Sizes of the factors; ``bias``: A has the homogeneous coordinate."""

    @abstractmethod
    def statistics(
        self, module: nn.Module, x: Any, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Statistics of a pair, the input x and the gradient d of the output."""

    @abstractmethod
    def gradient(self, module: nn.Module, x: Any, d: Tensor) -> Tensor:
        """A pair's part of the gradient of the weight."""

    def fits(self, module: nn.Module, x: Any, d: Tensor) -> bool:
        """Whether a pair's sizes can be the layer's."""
        return True

    def gradient_rows(self, module: nn.Module, x: Any, d: Tensor) -> PairRows:
        """The rows of a pair."""
        return flatten_rows(d.shape[:-1], d, self.family)


@dataclass(frozen=True)
class Linear(LayerKind):
    """``W x`` of rows x.

    Attributes:
        transposed: Whether the weight is ``(in, out)``.
        assumed: Whether it is one is not known before the first statistics.
    """

    transposed: bool = False
    assumed: bool = False

    @property
    def multiplies_rows(self) -> bool:  # type: ignore[override]
        return self.rows is None

    def _rows(self, module: nn.Module, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return (x, d) if self.rows is None else self.rows(module, x, d)

    def _size(self, module: nn.Module) -> Sequence[int]:
        """The sizes of the weight, (out, in)."""
        size: Sequence[int] = getattr(module, self.weight).shape
        return size[::-1] if self.transposed else size

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        out_dim, in_dim = self._size(module)
        return FactorShape(1, in_dim + int(bias), out_dim, transposed=self.transposed)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        x, d, live = linear_rows(*self._rows(module, x, d), options)
        a = gram(x.unsqueeze(0), options.has_bias, live.count)
        return PairStatistics({"A": a, "G": gram(d.unsqueeze(0))}, live.count)

    def gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        x, d = self._rows(module, x, d)
        return sum_outer_products(d, x) if self.transposed else sum_outer_products(x, d)

    def fits(self, module: nn.Module, x: Any, d: Tensor) -> bool:
        """Whether a pair has the sizes of the weight, and as many rows of x as of d."""
        if self.rows is not None:
            return True
        out_dim, in_dim = self._size(module)
        sizes = (d.shape[-1], x.shape[-1]) == (out_dim, in_dim)
        dense = x.layout is torch.strided and x.is_floating_point()
        return sizes and dense and d.numel() * in_dim == x.numel() * out_dim

    def gradient_rows(self, module: nn.Module, x: Tensor, d: Tensor) -> PairRows:
        _, d = self._rows(module, x, d)
        return flatten_rows(d.shape[:-1], d, self.family)


def _scaled(module: nn.Module, d: Tensor) -> Tensor:
    """Gradients with respect to an embedding's entries; a subclass may multiply these by a number.

    As the embeddings of BART, Gemma and their kin do.
    """
    own = type(module).forward is not nn.Embedding.forward
    return d * cast(float, module.embed_scale) if own else d


@dataclass(frozen=True)
class Embedding(LayerKind):
    """Rows of the weight, by indices.

    ``tied`` to an output layer, A has ‖d‖² at a token in the place of a 1.
    """

    tied: bool = False

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        entries, width = cast(Tensor, module.weight).shape
        return FactorShape(
            1, entries, width, diagonal_a=True, transposed=True, gradient_factored=self.tied
        )

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        # The second moment of a mean of one-hot rows is not diagonal. So with "reduce", where the
        # loss has a term per example, the tokens are treated as the locations of a convolution are.
        embedding = cast(nn.Embedding, module)
        tokens = x.reshape(-1)
        rows = _scaled(module, d).reshape(-1, d.shape[-1])
        live = options.row_mask
        padding = embedding.padding_idx
        if self.tied:
            rows = rows if padding is None else rows * (tokens != padding).unsqueeze(1)
            ones = rows.square().sum(1)
        else:
            ones = live.apply(torch.ones(tokens.shape, dtype=d.dtype, device=d.device))
            if padding is not None:
                ones = ones * (tokens != padding)
        entries = torch.zeros(embedding.num_embeddings, dtype=d.dtype, device=d.device)
        entries.scatter_add_(0, tokens.long(), ones)
        g = gram(rows.unsqueeze(0))
        if options.approximation == "reduce" and x.dim() > 1:
            examples = live.to_examples(len(d)).count
            if not self.tied:
                g.mul_(examples / at_least_one(live.count))
        else:
            examples = live.count
        return PairStatistics({"A": entries.unsqueeze(0), "G": g}, examples)

    def gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        embedding = cast(nn.Embedding, module)
        rows = _scaled(module, d).flatten(0, -2)
        found = rows.new_zeros(embedding.weight.shape).index_add_(0, x.reshape(-1), rows)
        if embedding.padding_idx is not None:
            found[embedding.padding_idx] = 0.0
        return found

    def fits(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        width = cast(Tensor, module.weight).shape[1]
        return not x.is_floating_point() and d.shape == (*x.shape, width)


LINEAR = Linear()
EMBEDDING = Embedding()

KINDS: dict[type[nn.Module], LayerKind] = {nn.Linear: LINEAR, nn.Embedding: EMBEDDING}
"""The kinds of layers by their classes, those of users among them."""


def registered_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of a module, or the nearest one that it is made from, that has a kind."""
    return next((kind for kind in type(module).__mro__ if kind in KINDS), None)


# ------------------------------------------------------------------- gradients as matrices


class Layout(NamedTuple):
    """How a matrix ``(groups, out, in)`` is made of the gradients of a layer's parameters."""

    axis: int  # along which they are joined
    views: tuple[tuple[int, ...], ...]  # the shape of each; without groups if there is but one
    transposed: bool = False  # the last two dimensions change places thereafter


def matrix_layout(shape: FactorShape, sizes: Iterable[int]) -> Layout:
    """The layout of a layer whose parameters have so many elements, the weight first."""
    groups, out = shape.groups, shape.out_dim
    head = (groups,) if groups > 1 else ()
    if shape.exact:  # all in one column, or each entry in a group of its own
        return Layout(0, tuple((n, 1, 1) if head else (n, 1) for n in sizes))
    columns = [n // (groups * out) for n in sizes]
    if shape.transposed:
        return Layout(len(head), tuple((*head, n, out) for n in columns), True)
    return Layout(len(head) + 1, tuple((*head, out, n) for n in columns))
