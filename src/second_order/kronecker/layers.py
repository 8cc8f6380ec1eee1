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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.storage import pack_upper_triangular, packed_length

__all__ = [
    "CONVOLUTIONS",
    "KINDS",
    "FactorShape",
    "Layout",
    "PairStatistics",
    "gram",
    "layout_of",
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
    marginal: bool = False  # G is of gradients' rows and A of their columns; A has the trace 1
    routed: bool = False  # each group has examples of its own, over which A is a mean

    @cached_property
    def dims(self) -> dict[str, int]:
        """The sizes n of the factors, by name."""
        if self.locations:
            return {"A": self.in_dim // self.locations, "G": self.out_dim, "L": self.locations}
        return {"A": self.in_dim, "G": self.out_dim}

    @cached_property
    def letters(self) -> str:
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
    def numbers(self) -> int:
        """Numbers of a group in a record of sums."""
        return len(self.dims) + self.routed

    @cached_property
    def gradient_size(self) -> tuple[int, int, int]:
        """The shape of the gradient as a matrix for each group."""
        return self.groups, self.out_dim, self.in_dim

    def stored_shape(self, letter: str, triangular: bool = True) -> tuple[int, ...]:
        """Shape of a factor as it is stored."""
        dim = self.dims[letter]
        if letter in self.diagonals:
            return self.groups, dim
        return (self.groups, *((packed_length(dim),) if triangular else (dim, dim)))


@dataclass(frozen=True)
class LiveRows:
    """The rows of a captured pair that count."""

    mask: Tensor | None  # (rows,), True where a row counts; None if all are known to count
    count: int | Tensor  # of these; on a device a scalar tensor, which the host does not read

    def pick(self, rows: Tensor) -> Tensor:
        """Those among ``(rows, ...)`` that count; on a device all rows, the others being zero.

        One that does not count and is not finite becomes NaN, as it does in the weight's gradient.
        """
        if self.mask is None:
            return rows
        if _answers_at_once(rows.device) and bool(rows[~self.mask].isfinite().all()):
            return rows[self.mask]
        return rows * self.mask.view(-1, *[1] * (rows.dim() - 1))

    def third(self, which: int) -> LiveRows:
        """Those of queries, keys or values, where the rows are of all three in turn."""
        if self.mask is None:
            assert isinstance(self.count, int)
            return LiveRows(None, self.count // 3)
        return rows_in(self.mask.view(3, -1)[which])

    def parts(self, number: int) -> LiveRows:
        """The examples that have a row that counts, where each of so many has equally many rows."""
        if self.mask is None or number == 0:
            return LiveRows(None, number)
        mask = self.mask.view(number, -1).any(1)
        return LiveRows(mask, _count(mask))


def live_rows(d: Tensor) -> LiveRows:
    """The rows of ``(rows, ...)`` that have an entry other than zero."""
    return rows_in(d.flatten(1).any(1))


def all_rows(number: int) -> LiveRows:
    """So many rows, all of which count."""
    return LiveRows(None, number)


def rows_in(mask: Tensor) -> LiveRows:
    """The rows of a mask, ``(rows,)``; on the CPU None takes the place of one that has them all."""
    count = _count(mask)
    everything = not isinstance(count, Tensor) and count == len(mask)
    return LiveRows(None if everything else mask, count)


def _count(mask: Tensor) -> int | Tensor:
    return int(mask.sum()) if _answers_at_once(mask.device) else mask.sum()


def _answers_at_once(device: torch.device) -> bool:
    """Whether values on a device can be read without waiting, as on the CPU."""
    return device.type == "cpu"


@dataclass(frozen=True)
class PairStatistics:
    """Sums over one captured pair.

    A, divided by ``examples``, is this pair's estimate of A, and so with L. G is divided by the
    terms of the loss, which only the whole pass shows.
    """

    factors: dict[str, Tensor]  # the sums by letter, (groups, n, n), triangles, or diagonals
    examples: int | Tensor  # on a device a scalar tensor, which the host does not read
    routed: Tensor | None = None  # examples of each group, if these have their own, (groups,)


@dataclass(frozen=True)
class Form:
    """How the statistics of a pair are formed."""

    bias: bool  # the homogeneous coordinate belongs to A
    approximation: Approximation  # of dimensions that share the weight (Eschenhagen et al. 2023)
    triangular: bool = False  # symmetric sums are upper triangles
    rows: LiveRows | None = None  # that A is a sum over; None for those with a gradient

    def live(self, d: Tensor) -> LiveRows:
        """The rows of gradients ``(rows, ...)`` that A is a sum over."""
        return live_rows(d) if self.rows is None else self.rows


CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


# --------------------------------------------------------------------------- sums of outer products


def gram(
    x: Tensor, homogeneous: bool, triangular: bool, ones: int | Tensor | None = None
) -> Tensor:
    """Sum of the outer products of the rows of ``x``, ``(groups, rows, dim)``.

    ``homogeneous`` appends a 1 to every row, without a copy of the rows; or to so many ``ones``, if
    the others are zero. Of shape ``(groups, n, n)``, or those as triangles.
    """
    groups, rows, dim = x.shape
    # On one core, 128 rows of the upper triangle at a time are wide enough to be as fast as the
    # whole product: 576 and 1152 dimensions took 0.65 of the time. A GPU would see many small
    # kernels instead.
    strip = 128 if x.device.type == "cpu" else dim
    if dim <= strip:
        matrix = torch.bmm(x.mT, x)  # `@` without the views that it takes around it
    else:
        matrix = x.new_empty(groups, dim, dim)
        for start in range(0, dim, strip):
            stop = min(start + strip, dim)
            band = torch.bmm(x[..., start:stop].mT, x[..., start:])
            matrix[:, start:stop, start:] = band
            matrix[:, stop:, start:stop] = band[..., stop - start :].mT
    if homogeneous:
        matrix = with_ones(matrix, x.sum(1), rows if ones is None else ones)
    return pack_upper_triangular(matrix) if triangular else matrix


def with_ones(matrix: Tensor, column: Tensor, ones: int | Tensor) -> Tensor:
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


# ------------------------------------------------------------------------------------------ Linears


def linear_statistics(module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
    """Statistics of a Linear's pair, ``(..., in)`` and ``(..., out)``."""
    x, d, live = form_rows(x, d, form)
    g = gram(d.unsqueeze(0), False, form.triangular)
    a = gram(live.pick(x).unsqueeze(0), form.bias, form.triangular, live.count)
    return PairStatistics({"A": a, "G": g}, live.count)


def form_rows(x: Tensor, d: Tensor, form: Form) -> tuple[Tensor, Tensor, LiveRows]:
    """The rows of a Linear's pair, ``(rows, in)`` and ``(rows, out)``, and those that count.

    With "reduce" a row is an example's mean input and the sum of its gradients.
    """
    if form.approximation == "reduce" and x.dim() > 2:
        live = form.live(d.reshape(-1, d.shape[-1]))
        return *reduced(x.flatten(1, -2), d.flatten(1, -2), live), live.parts(len(d))
    x, d = x.reshape(d.numel() // d.shape[-1], x.shape[-1]), d.reshape(-1, d.shape[-1])
    return x, d, form.live(d)


def reduced(x: Tensor, d: Tensor, live: LiveRows) -> tuple[Tensor, Tensor]:
    """Means of inputs ``(N, T, in)`` over positions that count, and sums of ``(N, T, out)``."""
    if live.mask is None:
        return x.mean(1), d.sum(1)
    mask = live.mask.view(-1, d.shape[1], 1)
    return (x * mask).sum(1) / mask.sum(1).clamp_min(1), d.sum(1)


def linear_gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    """The sum of d xᵀ over all rows of a pair, ``(out, in)``."""
    return d.reshape(-1, d.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def linear_fits(module: nn.Module, x: Tensor, d: Tensor, transposed: bool = False) -> bool:
    """Whether a pair has the sizes of a Linear's weight, and as many rows of x as of d."""
    out_dim, in_dim = cast(Tensor, module.weight).shape[:: -1 if transposed else 1]
    sizes = (d.shape[-1], x.shape[-1]) == (out_dim, in_dim)
    dense = x.layout is torch.strided and x.is_floating_point()
    return sizes and dense and d.numel() * in_dim == x.numel() * out_dim


def _rows_of_weight(module: nn.Module, bias: bool) -> FactorShape:
    weight, groups = cast(Tensor, module.weight), cast(int, getattr(module, "groups", 1))
    return FactorShape(groups, weight.shape[1:].numel() + int(bias), weight.shape[0] // groups)


# -------------------------------------------------------------------------------- kinds of layers


Key: TypeAlias = type[nn.Module] | str
"""The name of a kind of layer: its class, or a word for what it computes."""


@dataclass(frozen=True)
class LayerKind:
    """The rules for one kind of layer."""

    statistics: Callable[[nn.Module, Tensor, Tensor, Form], PairStatistics]  # of a pair (x, d)
    shape: Callable[[nn.Module, bool], FactorShape] = _rows_of_weight
    weight: str = "weight"
    bias: str = "bias"
    with_bias: bool = True  # the bias is the homogeneous coordinate of A
    # A pair's part of the weight's gradient, and whether its sizes can be the layer's.
    gradient: Callable[[nn.Module, Tensor, Tensor], Tensor] = linear_gradient
    fits: Callable[[nn.Module, Tensor, Tensor], bool] = lambda module, x, d: True
    # The rows of a pair where they are not its tensors' first dimensions.
    rows: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


KINDS: dict[Key, LayerKind] = {}
"""All kinds of layers, those of users among them."""

KINDS[nn.Linear] = KINDS["linear"] = LayerKind(linear_statistics, fits=linear_fits)


# --------------------------------------------------------------------------------------- embeddings


def _scaled(module: nn.Module, d: Tensor) -> Tensor:
    """Gradients with respect to an embedding's entries; a subclass may multiply these by a number.

    As the embeddings of BART, Gemma and their kin do.
    """
    own = type(module).forward is not nn.Embedding.forward
    return d * cast(float, module.embed_scale) if own else d


def embedding_statistics(
    module: nn.Module, x: Tensor, d: Tensor, form: Form, tied: bool = False
) -> PairStatistics:
    """Statistics of an embedding's pair, ``(...)`` and ``(..., width)``.

    ``tied`` to an output layer, A has ‖d‖² at a token in the place of a 1.
    """
    # The second moment of a mean of one-hot rows is not diagonal. So with "reduce", where the loss
    # has a term per example, the tokens are treated as the locations of a convolution are.
    embedding, d = cast(nn.Embedding, module), _scaled(module, d)
    tokens, rows = x.reshape(-1), d.reshape(-1, d.shape[-1])
    live, padding = form.live(rows), embedding.padding_idx
    if tied:
        rows = rows if padding is None else rows * (tokens != padding).unsqueeze(1)
        ones = rows.square().sum(1)
    else:
        ones = torch.ones(tokens.shape, dtype=d.dtype, device=d.device)
        if live.mask is not None:
            ones.masked_fill_(~live.mask, 0.0)
        if padding is not None:
            ones.masked_fill_(tokens == padding, 0.0)
    entries = torch.zeros(embedding.num_embeddings, dtype=d.dtype, device=d.device)
    entries.scatter_add_(0, tokens.long(), ones)
    g = gram(rows.unsqueeze(0), False, form.triangular)
    factors = {"A": entries.unsqueeze(0), "G": g}
    if form.approximation == "expand" or x.dim() < 2:
        return PairStatistics(factors, live.count)
    examples = live.parts(len(d)).count
    if not tied:
        g.mul_(examples / at_least_one(live.count))
    return PairStatistics(factors, examples)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """A number of examples to divide by."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def embedding_gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    """The sum of d at the entries looked up, ``(entries, width)``."""
    embedding, rows = cast(nn.Embedding, module), _scaled(module, d).flatten(0, -2)
    found = rows.new_zeros(embedding.weight.shape).index_add_(0, x.reshape(-1), rows)
    if embedding.padding_idx is not None:
        found[embedding.padding_idx] = 0.0
    return found


def rows_of_embedding(module: nn.Module, bias: bool, tied: bool = False) -> FactorShape:
    """Sizes of an embedding's factors."""
    entries, width = cast(Tensor, module.weight).shape
    return FactorShape(1, entries, width, diagonal_a=True, transposed=True, marginal=tied)


def embedding_fits(module: nn.Module, x: Tensor, d: Tensor) -> bool:
    """Whether a pair has a row for each index."""
    width = cast(Tensor, module.weight).shape[1]
    return not x.is_floating_point() and d.shape == (*x.shape, width)


KINDS[nn.Embedding] = LayerKind(
    embedding_statistics, rows_of_embedding, gradient=embedding_gradient, fits=embedding_fits
)


# ---------------------------------------------------------------------------------------- any layer


def key_of(module: nn.Module) -> Key | None:
    """The key of a module's kind by its class, or the nearest class that it is made from."""
    return next((kind for kind in type(module).__mro__ if kind in KINDS), None)


# ------------------------------------------------------------------- gradients as matrices


class Layout(NamedTuple):
    """How a matrix ``(groups, out, in)`` is made of the gradients of a layer's parameters."""

    axis: int  # along which they are joined
    views: tuple[tuple[int, ...], ...]  # the shape of each; without groups if there is but one
    flipped: bool = False  # the last two dimensions change places thereafter


def layout_of(shape: FactorShape, sizes: Iterable[int]) -> Layout:
    """The layout of a layer whose parameters have so many elements, the weight first."""
    groups, out = shape.groups, shape.out_dim
    head = (groups,) if groups > 1 else ()
    if shape.exact:  # all in one column, or each entry in a group of its own
        return Layout(0, tuple((n, 1, 1) if head else (n, 1) for n in sizes))
    columns = [n // (groups * out) for n in sizes]
    if shape.transposed:
        return Layout(len(head), tuple((*head, n, out) for n in columns), True)
    return Layout(len(head) + 1, tuple((*head, out, n) for n in columns))
