"""Further kinds of layers, the way to the kind of any module, and layers of users' own classes.

| kind                      | weight            | A                       | G                    |
|---------------------------|-------------------|-------------------------|----------------------|
| transposed linear         | (in, out)         | inputs                  | gradients            |
| transposed convolution    | (in, out, kernel) | channels of the input   | patches of gradients |
| attention's in-projection | (3 E, E)          | inputs of q, of k, of v | gradients of each    |
| scaled embedding          | (entries, width)  | entries, a diagonal     | width                |
| tied embedding and output | (entries, width)  | entries, a diagonal     | width                |

Of a weight that is an embedding's and an output layer's, a token has a gradient in either use: e gᵀ
where it is looked up, e its one-hot row, and d hᵀ where it is predicted. Their second moment has
two partial traces, Σ ‖g‖² e + Σ ‖h‖² d² of the entries, a diagonal, and Σ g gᵀ + Σ ‖d‖² h hᵀ of the
width. The block is the product of the two over the trace that both have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import second_order.kronecker.convolutions  # noqa: F401 - whose kinds come before a user's
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
"""Other packages' classes, by their full names."""

ASSUMED_LINEAR = Linear(assumed=True)
"""A Linear's subclass with a forward of its own; its first statistics show whether it is one."""


# --------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Attention(LayerKind):
    """The in-projection of an attention: a group each for queries, keys and values."""

    weight: str = "in_proj_weight"
    bias: str = "in_proj_bias"
    family: str = ATTENTION

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        width = cast(nn.MultiheadAttention, module).embed_dim
        return FactorShape(3, width + int(bias), width)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        if _is_packed(x, d):
            x, d, live = linear_rows(x, d, options)
            a = gram(x.unsqueeze(0), options.has_bias, live.count)
            g = gram(d.unflatten(1, (3, -1)).transpose(0, 1))
            return PairStatistics({"A": a.repeat(3, 1, 1), "G": g}, live.count)
        masks = None if options.row_mask.mask is None else options.row_mask.mask.view(3, -1)
        rows = d[0, ..., 0].numel()
        each: list[PairStatistics] = []
        for third in range(3):
            live = full_row_mask(rows) if masks is None else to_row_mask(masks[third])
            each.append(
                LINEAR.statistics(module, x[third], d[third], replace(options, row_mask=live))
            )
        # The examples are the queries, which have loss terms; A is a mean over each third's own
        # rows.
        counts = [at_least_one(pair.num_examples) for pair in each]
        more = [counts[0] / count for count in counts]
        a = torch.cat([pair.factors["A"] * by for pair, by in zip(each, more, strict=True)])
        g = torch.cat([pair.factors["G"] for pair in each])
        return PairStatistics({"A": a, "G": g}, each[0].num_examples)

    def weight_gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        if _is_packed(x, d):
            return sum_outer_products(x, d)
        return torch.cat([sum_outer_products(part, of) for part, of in zip(x, d, strict=True)])


def _is_packed(x: Tensor, d: Tensor) -> bool:
    """Whether queries, keys and values have one input.

    Pairs are then ``(batch, positions, E)`` and ``(batch, positions, 3 E)``, else ``(3, batch,
    positions, E)`` both.
    """
    return d.shape[-1] > x.shape[-1]


# ---------------------------------------------------------------------------- tied output layers


@dataclass(frozen=True)
class TiedOutput(Linear):
    """A Linear whose weight is an embedding's, too."""

    separate_bias_reason = "tied to an embedding"
    multiplies_rows = False

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        return TIED_EMBEDDING.shape(module, bias)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        x, d, live = linear_rows(x, d, options)
        squares = d.square()
        entries = x.square().sum(1) @ squares
        weighted = x * squares.sum(1, keepdim=True).sqrt()
        factors = {"A": entries.unsqueeze(0), "G": gram(weighted.unsqueeze(0))}
        return PairStatistics(factors, live.count)


TIED_EMBEDDING = Embedding(tied=True)
TIED_USES: dict[LayerKind | None, LayerKind] = {
    EMBEDDING: TIED_EMBEDDING,
    LINEAR: TiedOutput(),
    ASSUMED_LINEAR: TiedOutput(),
}

KINDS[nn.MultiheadAttention] = Attention()
KINDS[NonDynamicallyQuantizableLinear] = Linear(family=ATTENTION)


# ------------------------------------------------------------------------------------ what is what


def tied_kinds(kinds: Mapping[nn.Module, LayerKind | None]) -> dict[nn.Module, LayerKind]:
    """The modules that use one weight both as an embedding and as an output layer, and how."""
    sharing: dict[Tensor, list[nn.Module]] = {}
    for module in kinds:
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None:
            sharing.setdefault(weight, []).append(module)
    ties: dict[nn.Module, LayerKind] = {}
    for modules in sharing.values():
        uses = {module: TIED_USES.get(kinds[module]) for module in modules}
        if set(uses.values()) == {TIED_EMBEDDING, TIED_USES[LINEAR]}:
            ties |= {module: use for module, use in uses.items() if use is not None}
    return ties


class Match(NamedTuple):
    """The kind of a module, or why it has none."""

    kind: LayerKind | None
    reason: str | None = None


def match(module: nn.Module) -> Match:
    """The kind of a module's class, if the module has the class's forward.

    A Linear's subclass with a forward of its own, or a router of fused experts, is taken for a
    Linear. Its first statistics show whether it is one: see
    :mod:`second_order.kronecker.verification`.
    """
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return Match(None, "torch.jit has compiled it and runs no hooks; train the plain module")
    if is_router(module):
        return Match(ASSUMED_LINEAR)
    known = registered_class(module)
    kind = KINDS.get(known) if known is not None else _of_other_packages(module)
    if kind is None:
        return Match(None, f"{name} has no Kronecker factors here")
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    if known is not None and type(module).forward is not known.forward and not scaled:
        if known is not nn.Linear or _has_layers(module):
            return Match(None, f"{name} overrides {known.__name__}.forward")
        kind = ASSUMED_LINEAR
    reason = _why_unusable(module, module._parameters.get(kind.weight))
    return Match(kind) if reason is None else Match(None, reason)


def _of_other_packages(module: nn.Module) -> LayerKind | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__)
    return next((OTHER_PACKAGES[name] for name in names if name in OTHER_PACKAGES), None)


def _has_layers(module: nn.Module) -> bool:
    """Whether a module has parameters in other modules."""
    return any(True for child in module.children() for _ in child.parameters())


def _why_unusable(module: nn.Module, weight: Tensor | None) -> str | None:
    """Why a module of a known kind has no factors, if it has none."""
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight is not initialised yet: run one forward before making the optimizer"
    if getattr(module, "sparse", False):
        return "its gradient is sparse"
    if getattr(module, "scale_grad_by_freq", False):
        return "its gradient is scaled by how often entries are looked up"
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
    """Tell how a class of modules computes, so that KAISA, DPKFAC and DistKFAC precondition it.

    Subclasses are taken for it if they keep its ``forward``. A later call replaces an earlier one;
    torch's own layers that have a rule keep it. Register on every process, before the optimizer is
    made.

    A product: the output's rows are ``W x + b`` of rows x, so that the weight's gradient is the sum
    of d xᵀ over rows. It gets Kronecker factors, as a Linear has.

    A gain: the output is ``gain * factor(x) + b``, the gain along its last dimensions. It gets an
    exact block, where the optimizer has ``precondition_norms=True``.

    Args:
        kind: The class.
        rows: ``rows(module, input, output_gradient)`` gives x and d, ``(..., in)`` and
            ``(..., out)``, of the same leading dimensions; None: the input and the gradient as they
            are. The first leading dimension counts examples.
        gain: ``gain(module, input)`` gives what the gain multiplies, of the output's shape; None
            for a product.
        transposed: Whether the weight is stored ``(in, out)``.
        weight: Name of the weight, of two dimensions; or of the gain.
        bias: Name of the bias; None if the class has none.

    Raises:
        TypeError: If ``kind`` is no class of modules.
        ValueError: If the class is both a product and a gain, or one of torch's with a rule.
    """
    given: Any = kind
    if not (isinstance(given, type) and issubclass(given, nn.Module)) or given is nn.Module:
        raise TypeError(
            f"register_layer: {kind!r} is not a class of modules; pass the class itself"
        )
    ruled = kind in KINDS or GAINS.get(kind) is not None
    if ruled and kind.__module__.startswith("torch."):
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
