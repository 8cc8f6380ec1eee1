"""Kronecker statistics of a captured pair, for each kind of layer.

A layer computes s = W a, where a is the input, with a 1 appended if the layer has a
bias. A pair is an input x and the gradient d of the loss with respect to the output.
From pairs come

    A    the mean of a aᵀ over the rows that take part in a pass
    G    N Σ d dᵀ if the loss is a mean over N terms, Σ d dᵀ / N if it is their sum

A *row* is one vector of a pair. For an input of shape ``(batch, positions, in)``, a
Linear has batch x positions rows. An *example* is what A counts: a row, or with
"reduce" all positions of one entry of the batch. A *term* is what the loss counts.
Their number N is known only at the end of a pass, so this file computes Σ d dᵀ.

A ``LayerKind`` has the rules of one kind of layer: the sizes of its factors, the sums
of a pair, the weight gradient of a pair, and the rows that a pair consists of.
``KINDS`` maps classes of modules to their kinds. This file has ``Linear`` and
``Embedding``. Convolutions are in :mod:`second_order.kronecker.convolutions`, all other
kinds in :mod:`second_order.kronecker.kinds`.

All factors have a leading dimension of groups, which is 1 except for grouped layers. A
solver therefore sees the same shapes for every layer: A is ``(groups, in, in)``, G is
``(groups, out, out)`` and the gradient is ``(groups, out, in)``. An embedding is a
Linear on one-hot rows. Its A is diagonal and is stored as ``(groups, in)``.

Padded tokens do not take part in a pass, because inputs without a loss would dilute A.
In G they need no mask, because their gradients are zero.
:mod:`second_order.kronecker.rows` decides for all layers of a pass which rows take
part. Pairs come here in float32 or wider.

Sources: Martens & Grosse 2015 (Linear), Eschenhagen et al. 2023 ("expand", "reduce").
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
    """Sizes of a layer's factors, with flags for special layers.

    A is ``(groups, in, in)``, and G is ``(groups, out, out)``.

    Attributes:
        groups: Number of groups. Most layers have one, a grouped convolution several.
        in_dim: Columns of the gradient as a matrix, the homogeneous coordinate
            included: a Linear with a bias has in + 1.
        out_dim: Rows of the gradient as a matrix.
        diagonal_a: A is diagonal, and stored as ``(groups, in)``, as for an embedding.
        locations: Size of the factor L of a doubly factored layer, a wide Linear behind
            a flattened feature map. Its A has the size in / locations. 0 for all other
            layers.
        exact: G is the exact curvature, and A is 1, as for the gain of a LayerNorm.
        transposed: The weight has the inputs first: ``(groups * in, out)``.
        gradient_factored: A and G are the second moments of the columns and of the rows
            of weight gradients, as in Shampoo, and A is divided by its trace. A tied
            embedding is an example.
        routed: Each group has its own examples, and its A is a mean over them. The
            experts of a mixture are an example.
    """

    groups: int
    in_dim: int
    out_dim: int
    diagonal_a: bool = False
    locations: int = 0
    exact: bool = False
    transposed: bool = False
    gradient_factored: bool = False
    routed: bool = False

    @cached_property
    def dims(self) -> dict[str, int]:
        """The size n of each factor, by factor name."""
        if self.locations:
            return {
                "A": self.in_dim // self.locations,
                "G": self.out_dim,
                "L": self.locations,
            }
        return {"A": self.in_dim, "G": self.out_dim}

    @cached_property
    def factor_names(self) -> str:
        """The names of the factors, one letter each: "AG" or "AGL"."""
        return "".join(self.dims)

    @cached_property
    def diagonals(self) -> str:
        """The names of the factors that are stored as diagonals: "A" or ""."""
        return "A" if self.diagonal_a else ""

    @cached_property
    def gradient_factors(self) -> str:
        """The names of the factors that are computed from gradients: "G" or "AG"."""
        return "AG" if self.gradient_factored else "G"

    @cached_property
    def elements(self) -> int:
        """Number of elements of all factors of a group, as full matrices."""
        return sum(n**2 for n in self.dims.values())

    @cached_property
    def record_size(self) -> int:
        """How many numbers statistics have per group next to the factors.

        These are the factors' mean eigenvalues, and the examples of a routed group.
        """
        return len(self.dims) + self.routed

    @cached_property
    def record_parts(self) -> tuple[int, ...]:
        """Lengths of the parts of a record, the numbers that belong to a layer's sums.

        A record has the number of rows that A sums over, then for each factor the mean
        eigenvalue of each group, and for routed layers the number of rows of each group.
        """
        return 1, *[self.groups] * self.record_size

    @cached_property
    def gradient_shape(self) -> tuple[int, int, int]:
        """Shape of the gradient as one matrix per group."""
        return self.groups, self.out_dim, self.in_dim

    def matrix_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors as full matrices, or as diagonals."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, n in self.dims.items():
            if name in self.diagonals:
                shapes[name] = (self.groups, n)
            else:
                shapes[name] = (self.groups, n, n)
        return shapes

    def stored_shape(self, factor_name: str) -> tuple[int, ...]:
        """Shape of a factor as it is stored: a diagonal, or a packed upper triangle."""
        n = self.dims[factor_name]
        if factor_name in self.diagonals:
            return self.groups, n
        return self.groups, packed_length(n)


# ------------------------------------------------------------------ rows that take part


@dataclass(frozen=True)
class RowMask:
    """The rows of a captured pair that take part.

    Attributes:
        mask: ``(rows,)``, True for a row that takes part. None if all are known to.
        count: Number of rows that take part. On a device it is a scalar tensor, which
            the host does not read.
    """

    mask: Tensor | None
    count: int | Tensor

    def apply(self, rows: Tensor) -> Tensor:
        """Set the rows of ``(rows, ...)`` that do not take part to zero.

        A non-finite row that does not take part becomes NaN, because ∞ · 0 is NaN. The
        weight gradient has the same NaN, from d = 0.
        """
        if self.mask is None:
            return rows
        return rows * self.mask.view(-1, *[1] * (rows.dim() - 1))

    def to_examples(self, num_examples: int) -> RowMask:
        """Group the rows into equal examples, which take part if any row does."""
        if self.mask is None or num_examples == 0:
            return full_row_mask(num_examples)
        return to_row_mask(self.mask.view(num_examples, -1).any(1))


def full_row_mask(num_rows: int) -> RowMask:
    """A mask of rows that all take part."""
    return RowMask(None, num_rows)


def nonzero_row_mask(d: Tensor) -> RowMask:
    """A mask of the rows of ``(rows, ...)`` that have a nonzero entry."""
    return to_row_mask(d.flatten(1).any(1))


def to_row_mask(mask: Tensor) -> RowMask:
    """Count the rows of a mask, ``(rows,)``. On the CPU, drop an all-True mask."""
    if mask.device.type != "cpu":
        return RowMask(mask, mask.sum())
    count = int(mask.count_nonzero())
    if count == len(mask):
        return RowMask(None, count)
    return RowMask(mask, count)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """A number of examples as a divisor: 1 in place of 0."""
    if isinstance(count, Tensor):
        return count.clamp_min(1)
    return max(count, 1)


# --------------------------------------------------------------- sums of outer products


class PairStatistics(NamedTuple):
    """Sums over one captured pair.

    A and L divided by ``num_examples`` are this pair's estimates of them. G needs the
    number of loss terms, which is known only at the end of the pass.

    Attributes:
        factors: Sums by factor name, ``(groups, n, n)``, or ``(groups, n)`` of a
            diagonal.
        num_examples: Number of examples. On a device it is a scalar tensor, which the
            host does not read.
        examples_per_group: Number of examples of each group, ``(groups,)``, if a layer
            routes its examples to its groups.
    """

    factors: dict[str, Tensor]
    num_examples: int | Tensor
    examples_per_group: Tensor | None = None


class PairOptions(NamedTuple):
    """How to compute the statistics of a pair.

    Attributes:
        has_bias: A includes the homogeneous coordinate.
        approximation: How to treat dimensions that share the weight (Eschenhagen et al.
            2023).
        row_mask: The rows that A is a sum over.
    """

    has_bias: bool
    approximation: Approximation
    row_mask: RowMask


CPU_STRIP = 128
"""Rows of the upper triangle that the CPU computes by one product."""

TRANSPOSED_ROWS = 64
"""Rows that one transposed copy writes. With more, each element is a cache miss."""


def gram(
    x: Tensor, homogeneous: bool = False, ones: int | Tensor | None = None
) -> Tensor:
    """Sum the outer products of the rows of ``x``, ``(groups, rows, dim)``.

    Args:
        x: The rows.
        homogeneous: Append a 1 to every row, without a copy of the rows.
        ones: Number of rows that get a 1, if the other rows are zero. None: all rows.

    Returns:
        A tensor ``(groups, n, n)``, where n is dim, or dim + 1 if ``homogeneous``.
    """
    groups, rows, dim = x.shape
    total = dim + int(homogeneous)
    if ones is None:
        ones = rows

    # Compute the upper triangle only, in bands of 128 rows. For 576 and 1152
    # dimensions, one core takes 0.65 of the time of the full product. A GPU would run
    # many small kernels instead.
    strip = CPU_STRIP if x.device.type == "cpu" else dim
    if dim <= strip:
        matrix = torch.bmm(x.mT, x)  # `@` would add views
        if homogeneous:
            matrix = append_ones(matrix, x.sum(1), ones)
        return matrix

    # The upper triangle, and the square blocks on the diagonal.
    matrix = x.new_empty(groups, total, total)
    for start in range(0, dim, strip):
        stop = min(start + strip, dim)
        band = matrix[:, start:stop, start:dim]
        torch.bmm(x[..., start:stop].mT, x[..., start:], out=band)
    if homogeneous:
        matrix[:, :dim, dim] = x.sum(1)
        matrix[:, dim, dim] = ones

    # The lower triangle. The squares on the diagonal are complete already, so it does
    # not matter that the copied blocks leave them out: TRANSPOSED_ROWS divides
    # CPU_STRIP.
    for start in range(0, total, TRANSPOSED_ROWS):
        stop = start + TRANSPOSED_ROWS
        matrix[:, stop:, start:stop] = matrix[:, start:stop, stop:].mT
    if homogeneous:  # no band has filled this row in the last square
        matrix[:, dim, :dim] = matrix[:, :dim, dim]
    return matrix


def append_ones(matrix: Tensor, row_sum: Tensor, ones: int | Tensor) -> Tensor:
    """Extend a sum of outer products as if a 1 had been appended to the rows.

    Args:
        matrix: The sum of the outer products, ``(groups, dim, dim)``.
        row_sum: The sum of the rows, ``(groups, dim)``.
        ones: Number of rows.
    """
    groups, dim = row_sum.shape
    extended = matrix.new_empty(groups, dim + 1, dim + 1)
    extended[:, :dim, :dim] = matrix
    extended[:, :dim, dim] = row_sum
    extended[:, dim, :dim] = row_sum
    extended[:, dim, dim] = ones
    return extended


def sum_outer_products(x: Tensor, d: Tensor) -> Tensor:
    """Sum d xᵀ over all rows of a pair: the weight gradient ``(out, in)``."""
    return d.reshape(-1, d.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


# ------------------------------------------------------------------------ rows of pairs

# Families of rows. Layers that see the same rows share a mask. Rows of equal shapes are
# the same rows only if they are of one family. Rows of an attention are
# (batch, positions), whichever of the two comes first in its inputs.
ROUTED = "routed"
ATTENTION = "attention"


class PairRows(NamedTuple):
    """The rows of a captured pair.

    Attributes:
        family: "", or one of the families above.
        shape: Leading dimensions of the pair, whose product is the number of rows.
        d: The gradient of the output.
        examples: Each row is a whole example, as in a convolution. All take part then.
    """

    family: str
    shape: tuple[int, ...]
    d: Tensor
    examples: bool = False

    @property
    def gradient(self) -> Tensor:
        """The gradient as a matrix, ``(rows, out)``."""
        num_rows = math.prod(self.shape)
        return self.d.reshape(num_rows, self.d.numel() // max(num_rows, 1))


def pair_rows(leading: Sequence[int], d: Tensor, family: str = "") -> PairRows:
    """Return the rows of gradients with some leading dimensions."""
    # A gradient (B, 1, ...) has the examples of (B, ...).
    while len(leading) > 1 and leading[-1] == 1:
        leading = leading[:-1]
    return PairRows(family, tuple(leading) or (1,), d)


def image_rows(d: Tensor, batched: bool = True) -> PairRows:
    """The rows of gradients ``(N, channels, ...)``: one row per example."""
    if not batched:
        d = d.unsqueeze(0)
    return PairRows("", (len(d),), d, examples=True)


class LinearRows(NamedTuple):
    """The rows of a Linear's pair: x is ``(rows, in)``, d is ``(rows, out)``."""

    x: Tensor
    d: Tensor
    row_mask: RowMask


def linear_rows(x: Tensor, d: Tensor, options: PairOptions) -> LinearRows:
    """Reshape a Linear's pair into rows.

    Rows of x that do not take part are set to zero. Those of d are zero already. With
    "reduce", a row has the mean input and the summed gradients of one example.
    """
    row_mask = options.row_mask
    if options.approximation == "reduce" and x.dim() > 2:
        x, d = reduce_positions(x.flatten(1, -2), d.flatten(1, -2), row_mask)
        row_mask = row_mask.to_examples(len(d))
    else:
        num_rows = d.numel() // d.shape[-1]
        x = x.reshape(num_rows, x.shape[-1])
        d = d.reshape(num_rows, d.shape[-1])
    return LinearRows(row_mask.apply(x), d, row_mask)


def reduce_positions(x: Tensor, d: Tensor, row_mask: RowMask) -> tuple[Tensor, Tensor]:
    """Average ``(N, T, in)`` over positions that take part; sum ``(N, T, out)``."""
    if row_mask.mask is None:
        return x.mean(1), d.sum(1)
    mask = row_mask.mask.view(-1, d.shape[1], 1)
    return (x * mask).sum(1) / mask.sum(1).clamp_min(1), d.sum(1)


# ---------------------------------------------------------------------- kinds of layers


RowsFunction: TypeAlias = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of a module, its input and its output's gradient that returns x and d."""

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True)
class LayerKind(ABC):
    """The rules for one kind of layer.

    Attributes:
        weight: Name of the weight.
        bias: Name of the bias.
        family: Family of the rows of its pairs.
        rows: Computes x and d from the input and the gradient of the output. None: x is
            the input, and d is the gradient.
        separate_bias_reason: Why the bias is not the homogeneous coordinate of A. "" if
            it is.
        multiplies_rows: Whether the layer multiplies the rows of its input by a matrix,
            and does nothing else. Pairs of such layers are added up in batches.
    """

    weight: str = "weight"
    bias: str = "bias"
    family: str = ""
    rows: RowsFunction | None = None
    separate_bias_reason = ""
    multiplies_rows = False

    @abstractmethod
    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        """Sizes of the factors. ``bias``: A includes the homogeneous coordinate."""

    @abstractmethod
    def statistics(
        self, module: nn.Module, x: Any, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Compute the sums of a pair: the input x, and the gradient d of the output."""

    @abstractmethod
    def weight_gradient(self, module: nn.Module, x: Any, d: Tensor) -> Tensor:
        """Compute a pair's contribution to the gradient of the weight."""

    def fits_pair(self, module: nn.Module, x: Any, d: Tensor) -> bool:
        """Whether the shapes of a pair agree with the layer."""
        return True

    def gradient_rows(self, module: nn.Module, x: Any, d: Tensor) -> PairRows:
        """The rows of a pair."""
        return pair_rows(d.shape[:-1], d, self.family)


@dataclass(frozen=True)
class Linear(LayerKind):
    """A layer that multiplies rows x by its weight.

    Attributes:
        transposed: The weight is stored as ``(in, out)``.
        assumed: The layer is assumed to be a Linear. Its first statistics verify it.
    """

    transposed: bool = False
    assumed: bool = False

    @cached_property
    def multiplies_rows(self) -> bool:  # type: ignore[override]
        return self.rows is None

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        out_dim, in_dim = self._weight_shape(module)
        return FactorShape(1, in_dim + int(bias), out_dim, transposed=self.transposed)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        if self.rows is not None:
            x, d = self.rows(module, x, d)
        x, d, row_mask = linear_rows(x, d, options)
        a = gram(x.unsqueeze(0), options.has_bias, row_mask.count)
        g = gram(d.unsqueeze(0))
        return PairStatistics({"A": a, "G": g}, row_mask.count)

    def weight_gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        if self.rows is not None:
            x, d = self.rows(module, x, d)
        if self.transposed:
            return sum_outer_products(d, x)
        return sum_outer_products(x, d)

    def fits_pair(self, module: nn.Module, x: Any, d: Tensor) -> bool:
        """Whether x and d have the sizes of the weight, and equally many rows."""
        if self.rows is not None:
            return True
        out_dim, in_dim = self._weight_shape(module)
        same_sizes = d.shape[-1] == out_dim and x.shape[-1] == in_dim
        is_dense = x.layout is torch.strided and x.is_floating_point()
        return same_sizes and is_dense and d.numel() * in_dim == x.numel() * out_dim

    def gradient_rows(self, module: nn.Module, x: Any, d: Tensor) -> PairRows:
        if self.rows is not None:
            _, d = self.rows(module, x, d)
        return pair_rows(d.shape[:-1], d, self.family)

    def _weight_shape(self, module: nn.Module) -> Sequence[int]:
        """Shape of the weight as ``(out, in)``."""
        shape: Sequence[int] = getattr(module, self.weight).shape
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True)
class Embedding(LayerKind):
    """A table of rows, which are looked up by index.

    If its weight is ``tied`` to an output layer, a token adds ‖d‖² to A instead of 1.
    """

    tied: bool = False

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        entries, width = cast(Tensor, module.weight).shape
        return FactorShape(
            groups=1,
            in_dim=entries,
            out_dim=width,
            diagonal_a=True,
            transposed=True,
            gradient_factored=self.tied,
        )

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        embedding = cast(nn.Embedding, module)
        tokens = x.reshape(-1)
        d_rows = _row_gradient(module, d).reshape(-1, d.shape[-1])
        row_mask = options.row_mask
        padding = embedding.padding_idx

        # What each token adds to the diagonal of A: 1, or ‖d‖² with a tied weight. The
        # padding token adds nothing, because its row is not trained. It is like a row
        # of a Linear whose input is zero, which counts in G. With a tied weight, A and
        # G must keep equal traces, so it counts in neither.
        if self.tied:
            if padding is not None:
                d_rows = d_rows * (tokens != padding).unsqueeze(1)
            added = d_rows.square().sum(1)
        else:
            ones = torch.ones(tokens.shape, dtype=d.dtype, device=d.device)
            added = row_mask.apply(ones)
            if padding is not None:
                added = added * (tokens != padding)
        a = torch.zeros(embedding.num_embeddings, dtype=d.dtype, device=d.device)
        a.scatter_add_(0, tokens.long(), added)
        g = gram(d_rows.unsqueeze(0))

        # With "reduce", the loss has one term per example. The second moment of an
        # example's mean of one-hot rows would not be diagonal. So treat its tokens as a
        # convolution treats its locations: A is a sum over them, and G a mean. For 2
        # examples of 3 tokens, the sum of G over 6 tokens is multiplied by 2 / 6. Not
        # with a tied weight, because of the traces.
        num_examples = row_mask.count
        if options.approximation == "reduce" and x.dim() > 1:
            num_examples = row_mask.to_examples(len(d)).count
            if not self.tied:
                g.mul_(num_examples / at_least_one(row_mask.count))
        return PairStatistics({"A": a.unsqueeze(0), "G": g}, num_examples)

    def weight_gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        embedding = cast(nn.Embedding, module)
        d_rows = _row_gradient(module, d).flatten(0, -2)
        gradient = d_rows.new_zeros(embedding.weight.shape)
        gradient.index_add_(0, x.reshape(-1), d_rows)
        if embedding.padding_idx is not None:
            gradient[embedding.padding_idx] = 0.0
        return gradient

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        width = cast(Tensor, module.weight).shape[1]
        return not x.is_floating_point() and d.shape == (*x.shape, width)


def _row_gradient(module: nn.Module, d: Tensor) -> Tensor:
    """The gradient with respect to the rows that an embedding looks up.

    Embeddings of some language models, such as BART and Gemma, multiply these rows by
    ``embed_scale``. By the chain rule, so is the gradient.
    """
    if type(module).forward is nn.Embedding.forward:
        return d
    return d * cast(float, module.embed_scale)


LINEAR = Linear()
EMBEDDING = Embedding()

KINDS: dict[type[nn.Module], LayerKind] = {nn.Linear: LINEAR, nn.Embedding: EMBEDDING}
"""The kinds of layers by class, including the classes that users register."""


# ---------------------------------------------------------------- gradients as matrices


@dataclass(frozen=True)
class Layout:
    """How the gradients of a layer's parameters form a matrix ``(groups, out, in)``.

    Attributes:
        axis: The dimension along which the gradients are concatenated.
        views: The shape to which each gradient is reshaped. Its first dimension is 1,
            for the layer. With only one group, there is no dimension for the groups.
        sizes: The size of each gradient along the axis.
        has_groups: Whether the second dimension has the groups.
        transposed: Whether the last two dimensions are swapped after the concatenation.

    Examples:
        Linear(3, 5), weight and bias:       views (1, 5, 3), (1, 5, 1), axis 2
        the same with two groups:            views (1, 2, 5, 3), (1, 2, 5, 1), axis 3
        LayerNorm(8), whose G is 16 x 16:    views (1, 8, 1), (1, 8, 1), axis 1
        LayerNorm(8), whose G is diagonal:   views (1, 8, 1, 1), (1, 8, 1, 1), axis 1
    """

    axis: int
    views: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    has_groups: bool
    transposed: bool = False


def matrix_layout(shape: FactorShape, sizes: Iterable[int]) -> Layout:
    """The layout of parameters with these numbers of elements, the weight first."""
    has_groups = shape.groups > 1
    views: list[tuple[int, ...]] = []
    sizes_along_axis: list[int] = []

    # An exact block is one column. If only its diagonal is stored, each entry is a
    # group.
    if shape.exact:
        ones = (1, 1) if has_groups else (1,)
        for size in sizes:
            sizes_along_axis.append(size)
            views.append((1, size, *ones))
        return Layout(1, tuple(views), tuple(sizes_along_axis), has_groups)

    groups = (1, shape.groups) if has_groups else (1,)
    for size in sizes:
        n = size // (shape.groups * shape.out_dim)
        sizes_along_axis.append(n)
        matrix = (n, shape.out_dim) if shape.transposed else (shape.out_dim, n)
        views.append((*groups, *matrix))
    return Layout(
        axis=len(groups) + (not shape.transposed),
        views=tuple(views),
        sizes=tuple(sizes_along_axis),
        has_groups=has_groups,
        transposed=shape.transposed,
    )
