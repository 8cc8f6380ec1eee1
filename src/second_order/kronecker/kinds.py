"""The layer kind of any module, the remaining kinds of layers, and users' own layers.

``match(module)`` returns the kind of a module, or the reason why it has none. It looks up the
module's class in ``KINDS``, then in ``OTHER_PACKAGES``. ``register_layer`` adds a user's class to
these tables. The kinds of this file are

| kind                      | weight            | A                       | G                      |
|---------------------------|-------------------|-------------------------|------------------------|
| transposed linear         | (in, out)         | inputs                  | gradients              |
| attention's in-projection | (3 E, E)          | inputs of q, of k, of v | gradients of q, k, v   |
| tied embedding and output | (entries, width)  | entries, a diagonal     | width                  |

If an embedding and an output layer share a weight, a token has a gradient in both uses: e gᵀ where
it is looked up, with its one-hot row e, and d hᵀ where it is predicted from h. Their second moment
has two partial traces: Σ ‖g‖² e + Σ ‖h‖² d² over the entries, of which only the diagonal is stored,
and Σ g gᵀ + Σ ‖d‖² h hᵀ over the width. The block is the product of the two, divided by the trace
that both have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import second_order.kronecker.convolutions  # noqa: F401 - registers the kinds of convolutions
from second_order.kronecker.exact import GAINS, Gain
from second_order.kronecker.experts import is_router
from second_order.kronecker.layers import (
    ATTENTION,
    EMBEDDING,
    KINDS,
    LINEAR,
    Embedding,
    FactorShape,
    LayerKind,
    Linear,
    PairOptions,
    PairStatistics,
    Rows,
    at_least_one,
    full_row_mask,
    gram,
    linear_rows,
    registered_class,
    sum_outer_products,
    to_row_mask,
)

__all__ = ["match", "register_layer", "tied_kinds"]

OTHER_PACKAGES: dict[str, LayerKind] = {
    "transformers.pytorch_utils.Conv1D": Linear(transposed=True),
    "torch_geometric.nn.dense.linear.Linear": LINEAR,
}
"""Classes of other packages by full name, so that these packages need not be imported."""

ASSUMED_LINEAR = Linear(assumed=True)
"""A subclass of Linear with its own forward. Its first statistics verify that it is a Linear."""


# --------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Attention(LayerKind):
    """The in-projection of an attention, with a group each for queries, keys and values.

    If q, k and v have the same input, its pairs are *packed*: x is ``(batch, positions, E)`` and d
    is ``(batch, positions, 3 E)``. Otherwise both are ``(3, batch, positions, E)``.
    """

    weight: str = "in_proj_weight"
    bias: str = "in_proj_bias"
    family: str = ATTENTION

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        width = cast(nn.MultiheadAttention, module).embed_dim
        return FactorShape(groups=3, in_dim=width + int(bias), out_dim=width)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        if _is_packed(x, d):
            x, d, row_mask = linear_rows(x, d, options)
            a = gram(x.unsqueeze(0), options.has_bias, row_mask.count)
            g = gram(d.unflatten(1, (3, -1)).transpose(0, 1))
            return PairStatistics({"A": a.repeat(3, 1, 1), "G": g}, row_mask.count)

        # The statistics of q, k and v, each as a Linear.
        num_rows = d[0, ..., 0].numel()
        row_masks = [full_row_mask(num_rows)] * 3
        if options.row_mask.mask is not None:
            row_masks = [to_row_mask(mask) for mask in options.row_mask.mask.view(3, -1)]
        qkv: list[PairStatistics] = []
        for x_part, d_part, row_mask in zip(x, d, row_masks, strict=True):
            part_options = replace(options, row_mask=row_mask)
            qkv.append(LINEAR.statistics(module, x_part, d_part, part_options))

        # The examples are those of the queries, which have the loss terms. The A of q, k and v are
        # means over their own rows, so scale the sums to the number of queries.
        counts = [at_least_one(part.num_examples) for part in qkv]
        a_sums = []
        for part, count in zip(qkv, counts, strict=True):
            a_sums.append(part.factors["A"] * (counts[0] / count))
        g_sums = [part.factors["G"] for part in qkv]
        factors = {"A": torch.cat(a_sums), "G": torch.cat(g_sums)}
        return PairStatistics(factors, qkv[0].num_examples)

    def weight_gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        if _is_packed(x, d):
            return sum_outer_products(x, d)
        qkv = [sum_outer_products(x_part, d_part) for x_part, d_part in zip(x, d, strict=True)]
        return torch.cat(qkv)


def _is_packed(x: Tensor, d: Tensor) -> bool:
    """Whether a pair of an attention is packed: d then has the width 3 E."""
    return d.shape[-1] > x.shape[-1]


# ---------------------------------------------------------------------------- tied output layers


@dataclass(frozen=True)
class TiedOutput(Linear):
    """An output layer whose weight is also that of an embedding."""

    separate_bias_reason = "tied to an embedding"
    multiplies_rows = False

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        return TIED_EMBEDDING.shape(module, bias)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        x, d, row_mask = linear_rows(x, d, options)
        squares = d.square()
        a = x.square().sum(1) @ squares
        weighted = x * squares.sum(1, keepdim=True).sqrt()
        factors = {"A": a.unsqueeze(0), "G": gram(weighted.unsqueeze(0))}
        return PairStatistics(factors, row_mask.count)


TIED_EMBEDDING = Embedding(tied=True)
TIED_OUTPUT = TiedOutput()
TIED_KINDS: dict[LayerKind | None, LayerKind] = {
    EMBEDDING: TIED_EMBEDDING,
    LINEAR: TIED_OUTPUT,
    ASSUMED_LINEAR: TIED_OUTPUT,
}
"""The kind of a module with a tied weight, by its kind without one."""

KINDS[nn.MultiheadAttention] = Attention()
KINDS[NonDynamicallyQuantizableLinear] = Linear(family=ATTENTION)


# --------------------------------------------------------------------------- the kind of a module


def tied_kinds(kinds: Mapping[nn.Module, LayerKind | None]) -> dict[nn.Module, LayerKind]:
    """The tied kinds of modules that use one weight as an embedding and as an output layer."""
    modules_of: dict[Tensor, list[nn.Module]] = {}
    for module in kinds:
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None:
            modules_of.setdefault(weight, []).append(module)

    tied: dict[nn.Module, LayerKind] = {}
    for modules in modules_of.values():
        uses = {module: TIED_KINDS.get(kinds[module]) for module in modules}
        if set(uses.values()) == {TIED_EMBEDDING, TIED_OUTPUT}:
            for module, kind in uses.items():
                tied[module] = cast(LayerKind, kind)
    return tied


class Match(NamedTuple):
    """The kind of a module, or the reason why it has none."""

    kind: LayerKind | None
    reason: str | None = None


def match(module: nn.Module) -> Match:
    """Find the kind of a module by its class, if the module has the forward of that class.

    A router of fused experts, or a subclass of Linear with its own forward, is assumed to be a
    Linear. Its first statistics verify this (:mod:`second_order.kronecker.verification`).
    """
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return Match(None, "torch.jit has compiled it and runs no hooks; train the plain module")
    if is_router(module):
        return Match(ASSUMED_LINEAR)

    # The kind of the class, or of the first base class that has one.
    cls = registered_class(module)
    kind = _match_other_packages(module) if cls is None else KINDS[cls]
    if kind is None:
        return Match(None, f"{name} has no Kronecker factors")

    # An embedding may scale its output, and a Linear may turn out to be one.
    has_scale = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    if cls is not None and type(module).forward is not cls.forward and not has_scale:
        if cls is not nn.Linear or _has_layers(module):
            return Match(None, f"{name} overrides {cls.__name__}.forward")
        kind = ASSUMED_LINEAR

    reason = _reason_without_factors(module, module._parameters.get(kind.weight))
    if reason is not None:
        return Match(None, reason)
    return Match(kind)


def _match_other_packages(module: nn.Module) -> LayerKind | None:
    """The kind of a class of another package; None if the class is unknown."""
    for cls in type(module).__mro__:
        kind = OTHER_PACKAGES.get(f"{cls.__module__}.{cls.__qualname__}")
        if kind is not None:
            return kind
    return None


def _has_layers(module: nn.Module) -> bool:
    """Whether any submodule has parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def _reason_without_factors(module: nn.Module, weight: Tensor | None) -> str | None:
    """Why a module has no factors though its class has a kind; None if it has factors."""
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight is not initialized yet; run one forward before you create the optimizer"
    if getattr(module, "sparse", False):
        return "its gradient is sparse"
    if getattr(module, "scale_grad_by_freq", False):
        return "its gradient is scaled by the frequency of its entries"
    if weight is not None and weight.numel() == 0:
        return f"its weight is empty: {tuple(weight.shape)}"
    if weight is not None:
        return None
    if isinstance(module, nn.MultiheadAttention):
        return "its queries, keys and values have weights of their own"
    return "its weight is computed (parametrization, weight norm or pruning)"


# ------------------------------------------------------------------------- users' own classes


def register_layer(
    kind: type[nn.Module],
    *,
    rows: Rows | None = None,
    gain: Callable[[nn.Module, Tensor], Tensor] | None = None,
    transposed: bool = False,
    weight: str = "weight",
    bias: str | None = "bias",
) -> None:
    """Register a class of modules, so that KAISA, DPKFAC and DistKFAC can precondition it.

    A class is either a product or a gain.

    - A *product* computes ``W x + b`` for each row x, so that the weight gradient is the sum of
      d xᵀ over the rows. It gets Kronecker factors, as a Linear does.
    - A *gain* computes ``gain * factor(x) + b``, where the gain has the shape of the last
      dimensions of the output. It gets an exact block if you set ``precondition_norms=True``.

    Register the class on every process, before you create the optimizer. Subclasses are included if
    they keep its ``forward``. A later call replaces an earlier one. You cannot replace the rules of
    torch's own layers.

    Args:
        kind: The class.
        rows: A function ``rows(module, input, output_gradient)`` that returns x ``(..., in)`` and d
            ``(..., out)`` with the same leading dimensions, the first of which counts examples.
            None: x is the input, and d is the gradient.
        gain: A function ``gain(module, input)`` that returns the tensor that the gain multiplies,
            in the shape of the output. None: the class is a product.
        transposed: Whether the weight is stored as ``(in, out)``.
        weight: Name of the weight, which has two dimensions, or of the gain.
        bias: Name of the bias. None: the class has no bias.

    Raises:
        TypeError: If ``kind`` is not a class of modules.
        ValueError: If the class is registered both as a product and as a gain, or if it is a class
            of torch that has a rule.

    Example:
        >>> register_layer(MyLinear, weight="kernel", transposed=True)
        >>> register_layer(LayerScale, gain=lambda module, x: x, weight="gamma", bias=None)
    """
    value: Any = kind  # the annotation does not bind the caller
    is_module_class = isinstance(value, type) and issubclass(value, nn.Module)
    if not is_module_class or value is nn.Module:
        raise TypeError(
            f"register_layer: {kind!r} is not a class of modules; pass the class itself"
        )
    has_rule = kind in KINDS or GAINS.get(kind) is not None
    if has_rule and kind.__module__.startswith("torch."):
        raise ValueError(
            f"register_layer: torch's {kind.__name__} has a rule, which every optimizer of this "
            f"process uses; register a class of your own, with a forward of its own"
        )
    if gain is not None and (rows is not None or transposed):
        raise ValueError(
            "register_layer: gain= is for a layer that multiplies its input by a vector, rows= and "
            "transposed= for one that multiplies it by a matrix; give one or the other"
        )

    KINDS.pop(kind, None)
    GAINS.pop(kind, None)
    if gain is not None:
        GAINS[kind] = Gain(gain, weight, bias, same_shape=False)
        return
    KINDS[kind] = Linear(weight, bias or "", transposed=transposed, rows=rows)
