"""The layer kind of any module, the remaining kinds of layers, and users' own layers.

``match(module)`` returns the kind of a module, or the reason why it has none. It looks
up the module's class in ``KINDS`` and in ``OTHER_PACKAGES``. ``register_layer`` adds a
user's class to ``KINDS``, or to ``GAINS`` if it multiplies its input by a vector. The
kinds of this file are

| kind                   | weight           | A                 | G                    |
|------------------------|------------------|-------------------|----------------------|
| transposed linear      | (in, out)        | inputs            | gradients            |
| in-projection          | (3 E, E)         | inputs of q, k, v | gradients of q, k, v |
| tied embedding, output | (entries, width) | entries, diagonal | width                |

If an embedding and an output layer share a weight, ``(entries, width)``, a token adds
to its gradient twice. Where the token is looked up, with its one-hot row e, it adds
e gᵀ: g is the gradient of the row that was looked up. Where it is predicted from the
hidden state h, it adds d hᵀ: d is the gradient of its logits. The block consists of the
second moments of these matrices:

    A    Σ ‖g‖² e + Σ ‖h‖² d²        of their columns; only the diagonal is stored
    G    Σ g gᵀ + Σ ‖d‖² h hᵀ        of their rows

Both have the same trace. The block is A ⊗ G divided by this trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    RowsFunction,
    at_least_one,
    full_row_mask,
    gram,
    linear_rows,
    sum_outer_products,
    to_row_mask,
)

__all__ = ["match", "register_layer", "tied_kinds"]

OTHER_PACKAGES: dict[str, LayerKind] = {
    "transformers.pytorch_utils.Conv1D": Linear(transposed=True),
    "torch_geometric.nn.dense.linear.Linear": LINEAR,
}
"""Classes of other packages by full name, so that we need not import them."""

ASSUMED_LINEAR = Linear(assumed=True)
"""A subclass of Linear with its own forward, or a router of experts.

Its first statistics verify that it computes a Linear.
"""


# ---------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Attention(LayerKind):
    """The in-projection of an attention, with one group each for q, k and v.

    If q, k and v have the same input, its pairs are *packed*: x is
    ``(batch, positions, E)`` and d is ``(batch, positions, 3 E)``. Otherwise both are
    ``(3, batch, positions, E)``.
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
        num_rows = d.shape[1:-1].numel()  # of each of the three
        row_masks = [full_row_mask(num_rows)] * 3
        if options.row_mask.mask is not None:
            masks = options.row_mask.mask.view(3, -1)
            row_masks = [to_row_mask(mask) for mask in masks]
        qkv: list[PairStatistics] = []
        for x_part, d_part, row_mask in zip(x, d, row_masks, strict=True):
            part_options = options._replace(row_mask=row_mask)
            qkv.append(LINEAR.statistics(module, x_part, d_part, part_options))

        # The masks of q, k and v may have different numbers of rows n. Each A is a mean
        # over its own rows, but all three sums will be divided by one number. Take that
        # of the queries, to which the loss terms belong, and scale the others:
        # A_k / n_k = (A_k n_q / n_k) / n_q.
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
        qkv: list[Tensor] = []
        for x_part, d_part in zip(x, d, strict=True):
            qkv.append(sum_outer_products(x_part, d_part))
        return torch.cat(qkv)


def _is_packed(x: Tensor, d: Tensor) -> bool:
    """Whether a pair of an attention is packed: d then has the width 3 E."""
    return d.shape[-1] > x.shape[-1]


KINDS[nn.MultiheadAttention] = Attention()
KINDS[NonDynamicallyQuantizableLinear] = Linear(family=ATTENTION)  # out-projection


# ------------------------------------------------------------------- tied output layers


@dataclass(frozen=True)
class TiedOutput(Linear):
    """An output layer whose weight is also that of an embedding.

    Its factors are named as those of the embedding: A is that of the entries, which
    come from the gradients d. G is that of the width, from the inputs x (h above).
    """

    separate_bias_reason = "tied to an embedding"
    multiplies_rows = False

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        return TIED_EMBEDDING.shape(module, bias)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        x, d, row_mask = linear_rows(x, d, options)
        squares = d.square()
        a = x.square().sum(1) @ squares  # Σ ‖x‖² d²
        weighted = x * squares.sum(1, keepdim=True).sqrt()  # ‖d‖ x
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


# ----------------------------------------------------------------- the kind of a module


def tied_kinds(
    kinds: Mapping[nn.Module, LayerKind | None],
) -> dict[nn.Module, LayerKind]:
    """The tied kinds of modules that share the weight of an embedding and an output."""
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
    """Find the kind of a module by its class, if it has the forward of that class.

    A router of fused experts, or a subclass of Linear with its own forward, is assumed
    to be a Linear. Its first statistics verify this
    (:mod:`second_order.kronecker.verification`).
    """
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return Match(
            None, "torch.jit has compiled it and runs no hooks; train the plain module"
        )
    # A registered class comes first: it may have the attributes of a router.
    registered = _find_kind(module)
    if registered is None:
        if is_router(module):
            return Match(ASSUMED_LINEAR)
        return Match(None, f"{name} has no Kronecker factors")
    cls, kind = registered

    # With its own forward, a Linear without layers of its own is assumed to be a Linear
    # all the same, and an embedding may scale its output. Nothing else may override the
    # forward.
    if type(module).forward is not cls.forward:
        is_embedding = isinstance(module, nn.Embedding)
        scales_output = is_embedding and hasattr(module, "embed_scale")
        if cls is nn.Linear and not _has_layers(module):
            kind = ASSUMED_LINEAR
        elif not scales_output:
            return Match(None, f"{name} overrides {cls.__name__}.forward")

    reason = _reason_without_factors(module, module._parameters.get(kind.weight))
    if reason is not None:
        return Match(None, reason)
    return Match(kind)


class _RegisteredKind(NamedTuple):
    """A class that has a kind, and the kind."""

    cls: type[Any]
    kind: LayerKind


def _find_kind(module: nn.Module) -> _RegisteredKind | None:
    """Find the kind of a module's class, or of the first base class that has one."""
    for cls in type(module).__mro__:
        full_name = f"{cls.__module__}.{cls.__qualname__}"
        kind = KINDS.get(cls) or OTHER_PACKAGES.get(full_name)
        if kind is not None:
            return _RegisteredKind(cls, kind)
    return None


def _has_layers(module: nn.Module) -> bool:
    """Whether any submodule has parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def _reason_without_factors(module: nn.Module, weight: Tensor | None) -> str | None:
    """Why a module of a class with a kind has no factors; None if it has factors."""
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight is not initialized yet; run one forward before you create the optimizer"
    if getattr(module, "sparse", False):
        return "its gradient is sparse"
    if getattr(module, "scale_grad_by_freq", False):
        return "its gradient is scaled by the frequency of its entries"
    if weight is not None and weight.numel() == 0:
        return f"its weight is empty: {tuple(weight.shape)}"
    if weight is not None and weight.is_complex():
        return "its weight is complex"
    if weight is not None:
        return None
    if isinstance(module, nn.MultiheadAttention):
        return "its queries, keys and values have weights of their own"
    return "its weight is computed (parametrization, weight norm or pruning)"


# ------------------------------------------------------------------- users' own classes


def register_layer(
    kind: type[nn.Module],
    *,
    rows: RowsFunction | None = None,
    gain: Callable[[nn.Module, Tensor], Tensor] | None = None,
    transposed: bool = False,
    weight: str = "weight",
    bias: str | None = "bias",
) -> None:
    """Register a class of modules that KAISA, DPKFAC and DistKFAC can precondition.

    A class is either a product or a gain.

    - A *product* computes ``W x + b`` for each row x, so that the weight gradient is
      the sum of d xᵀ over the rows. It gets Kronecker factors, as a Linear does.
    - A *gain* computes ``gain * f(x) + b``, where the gain has the shape of the last
      dimensions of the output. It gets an exact block if you set
      ``precondition_norms=True``.

    Register the class on every process, before you create the optimizer. Subclasses are
    included if they keep its ``forward``. A later call replaces an earlier one. You
    cannot replace the rules of torch's own layers.

    Args:
        kind: The class.
        rows: A function ``rows(module, input, output_gradient)`` that returns x
            ``(..., in)`` and d ``(..., out)`` with the same leading dimensions, the
            first of which counts examples. None: x is the input, and d is the gradient.
        gain: A function ``gain(module, input)`` that returns f(x), the tensor that the
            gain multiplies, in the shape of the output. None: the class is a product.
        transposed: Whether the weight is stored as ``(in, out)``.
        weight: Name of the weight, which has two dimensions, or of the gain.
        bias: Name of the bias. None: the class has no bias.

    Raises:
        TypeError: If ``kind`` is not a class of modules, or if another argument has the
            wrong type.
        ValueError: If you pass ``gain`` together with ``rows`` or ``transposed``, or if
            the class is one of torch that has a rule.

    Example:
        >>> register_layer(MyLinear, weight="kernel", transposed=True)
        >>> register_layer(
        ...     LayerScale, gain=lambda module, x: x, weight="gamma", bias=None
        ... )
    """
    module_class: Any = kind  # the annotation does not bind the caller
    is_valid = isinstance(module_class, type) and issubclass(module_class, nn.Module)
    if not is_valid or module_class is nn.Module:
        raise TypeError(
            f"register_layer: {kind!r} is not a class of modules; pass the class itself"
        )

    # Callers may ignore the annotations.
    functions: dict[str, Any] = {"rows": rows, "gain": gain}
    for option, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"register_layer: {option}={function!r} is not a function")
    names: dict[str, Any] = {"weight": weight, "bias": bias or ""}
    for option, parameter in names.items():
        if not isinstance(parameter, str):
            raise TypeError(
                f"register_layer: {option}={parameter!r} is not the name of a parameter; "
                f"write {option}={option!r}"
            )

    # GAINS has None for torch's norms without a rule. You may register these.
    has_rule = module_class in KINDS or GAINS.get(module_class) is not None
    if has_rule and module_class.__module__.startswith("torch."):
        raise ValueError(
            f"register_layer: torch's {module_class.__name__} has a rule, which every optimizer of "
            f"this process uses; register a class of your own, with a forward of its own"
        )
    if gain is not None and (rows is not None or transposed):
        raise ValueError(
            "register_layer: gain= is for a layer that multiplies its input by a vector, rows= and "
            "transposed= for one that multiplies it by a matrix; give one or the other"
        )

    KINDS.pop(module_class, None)
    GAINS.pop(module_class, None)
    if gain is not None:
        # Its input may have another shape than its output.
        GAINS[module_class] = Gain(gain, weight, bias, same_shape=False)
        return
    KINDS[module_class] = Linear(weight, bias or "", transposed=transposed, rows=rows)
