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

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

import second_order.kronecker.convolutions  # noqa: F401 - whose kinds come before a user's
from second_order.kronecker.exact import GAINS, NORMALISATIONS, Gain
from second_order.kronecker.layers import (
    KINDS,
    FactorShape,
    Form,
    Key,
    LayerKind,
    PairStatistics,
    at_least_one,
    embedding_fits,
    embedding_gradient,
    embedding_statistics,
    gram,
    key_of,
    linear_fits,
    linear_gradient,
    linear_statistics,
    live_rows,
    reduced,
    rows_of_embedding,
    unsupported_reason,
)

__all__ = ["found_kind", "register_layer", "ties_of"]

TIED_EMBEDDING, TIED_OUTPUT = "tied embedding", "tied output"
TRANSPOSED, SCALED = "transposed linear", "scaled embedding"
TRANSPOSED_CLASSES = ("transformers.pytorch_utils.Conv1D",)
"""Classes of Linears whose weight is (in, out), by their full names."""

Rows: TypeAlias = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
Factor: TypeAlias = Callable[[nn.Module, Tensor], Tensor]


# --------------------------------------------------------------------------------------- attention


def _thirds_of_weight(module: nn.Module, bias: bool) -> FactorShape:
    width = cast(int, module.embed_dim)
    return FactorShape(3, width + int(bias), width)


def _attention_statistics(module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
    if d.shape[-1] > x.shape[-1]:  # one input: (batch, positions, E) and (batch, positions, 3 E)
        if form.approximation == "reduce":
            x, d = reduced(x, d)
        x, d = x.flatten(0, -2), d.flatten(0, -2)
        live = live_rows(d)
        a = gram(live.pick(x).unsqueeze(0), form.bias, form.triangular, live.count)
        g = gram(live.pick(d).unflatten(1, (3, -1)).transpose(0, 1), False, form.triangular)
        a = a.expand(3, *a.shape[1:]).clone()
        return PairStatistics({"A": a, "G": g}, live.count, len(d))
    each = [
        linear_statistics(module, part, of, replace(form, known=None))
        for part, of in zip(x, d, strict=True)
    ]
    # The examples are the queries, which have loss terms; A is a mean over each third's own rows.
    counts = [at_least_one(pair.examples) for pair in each]
    more = [counts[0] / count for count in counts]
    a = torch.cat([pair.factors["A"] * by for pair, by in zip(each, more, strict=True)])
    g = torch.cat([pair.factors["G"] for pair in each])
    return PairStatistics({"A": a, "G": g}, each[0].examples, each[0].rows)


def _attention_gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    if d.shape[-1] > x.shape[-1]:
        return linear_gradient(module, x, d)
    return torch.cat([linear_gradient(module, part, of) for part, of in zip(x, d, strict=True)])


# -------------------------------------------------------------------------------------- embeddings


def _scale_of(module: nn.Module) -> Tensor | float:
    """The number that an embedding's subclass multiplies entries by, 1 for an embedding itself."""
    return cast("Tensor | float", getattr(module, "embed_scale", 1.0))


def _scaled_embedding_gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    return embedding_gradient(module, x, d * _scale_of(module))


def _entries_by_width(module: nn.Module, bias: bool) -> FactorShape:
    entries, width = cast(Tensor, module.weight).shape
    return FactorShape(1, entries, width, diagonal_a=True, marginal=True)


def _tied_embedding_statistics(
    module: nn.Module, x: Tensor, d: Tensor, form: Form
) -> PairStatistics:
    embedding, d = cast(nn.Embedding, module), d * _scale_of(module)
    tokens, rows = x.reshape(-1), d.reshape(-1, d.shape[-1])
    live = live_rows(rows)
    if embedding.padding_idx is not None:
        rows = rows * (tokens != embedding.padding_idx).unsqueeze(1)
    entries = torch.zeros(embedding.num_embeddings, dtype=d.dtype, device=d.device)
    entries.scatter_add_(0, tokens.long(), rows.square().sum(1))
    factors = {"A": entries.unsqueeze(0), "G": gram(rows.unsqueeze(0), False, form.triangular)}
    if form.approximation == "expand" or x.dim() < 2:
        return PairStatistics(factors, live.count, len(rows))
    return PairStatistics(factors, live_rows(d.flatten(1)).count, len(d))


def _tied_output_statistics(module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
    if form.approximation == "reduce" and x.dim() > 2:
        x, d = reduced(x.flatten(1, -2), d.flatten(1, -2))
    x, d = x.reshape(-1, x.shape[-1]), d.reshape(-1, d.shape[-1])
    live = live_rows(d)
    x, squares = live.pick(x), live.pick(d).square()
    entries = x.square().sum(1) @ squares
    weighted = x * squares.sum(1, keepdim=True).sqrt()
    factors = {"A": entries.unsqueeze(0), "G": gram(weighted.unsqueeze(0), False, form.triangular)}
    return PairStatistics(factors, live.count, len(d))


KINDS[TRANSPOSED] = LayerKind(
    linear_statistics,
    lambda module, bias: _sizes("weight", True, module, bias),
    gradient=lambda module, x, d: linear_gradient(module, d, x),
    fits=partial(linear_fits, transposed=True),
)
KINDS[nn.MultiheadAttention] = LayerKind(
    _attention_statistics,
    _thirds_of_weight,
    "in_proj_weight",
    "in_proj_bias",
    gradient=_attention_gradient,
    fits=lambda module, x, d: True,  # put together from its own products
)
KINDS[SCALED] = LayerKind(
    lambda module, x, d, form: embedding_statistics(module, x, d * _scale_of(module), form),
    rows_of_embedding,
    gradient=_scaled_embedding_gradient,
    fits=embedding_fits,
)
KINDS[TIED_EMBEDDING] = LayerKind(
    _tied_embedding_statistics,
    _entries_by_width,
    with_bias=False,
    gradient=_scaled_embedding_gradient,
    fits=embedding_fits,
)
KINDS[TIED_OUTPUT] = LayerKind(_tied_output_statistics, _entries_by_width, with_bias=False)


# ------------------------------------------------------------------------------------ what is what


def ties_of(model: nn.Module) -> dict[nn.Module, Key]:
    """The modules that use one weight both as an embedding and as an output layer, and how."""
    uses: dict[Key | None, Key] = dict.fromkeys((nn.Embedding, SCALED), TIED_EMBEDDING)
    uses |= dict.fromkeys((nn.Linear, "linear"), TIED_OUTPUT)
    sharing: dict[int, dict[nn.Module, Key | None]] = {}
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None:
            sharing.setdefault(id(weight), {})[module] = uses.get(found_kind(module)[0])
    both = {TIED_EMBEDDING, TIED_OUTPUT}
    tied = [how for how in sharing.values() if set(how.values()) == both]
    return {module: cast(Key, key) for how in tied for module, key in how.items()}


def found_kind(module: nn.Module) -> tuple[Key | None, str | None]:
    """The key of a module's kind, or why it has none.

    A module of a class that is not known, whose weight is a matrix of its ``in_features`` and
    ``out_features``, is taken for a Linear until its first statistics, which show whether it is
    one: see :mod:`second_order.kronecker.explained`.
    """
    reason = unsupported_reason(module)
    if reason is None:
        return key_of(module), None
    if (
        isinstance(module, nn.MultiheadAttention)
        and module._parameters.get("in_proj_weight") is None
    ):
        return None, "its queries, keys and values have weights of their own"
    return (key, None) if (key := _supposed_kind(module)) else (None, reason)


def _supposed_kind(module: nn.Module) -> Key | None:
    """The kind that a module of an unknown class, or with a forward of its own, may be of."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if (
        not isinstance(weight, nn.Parameter)
        or isinstance(weight, nn.parameter.UninitializedParameter)
        or weight.dim() != 2
        or min(weight.shape) < 2
        or not weight.is_floating_point()
        or (bias is not None and bias.dim() != 1)
        or getattr(module, "sparse", False)
        or any(True for child in module.children() for _ in child.parameters())
    ):
        return None
    if isinstance(module, nn.Embedding):
        return SCALED if hasattr(module, "embed_scale") else None
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    if any(name in TRANSPOSED_CLASSES for name in names):
        return TRANSPOSED
    sizes = [getattr(module, name, None) for name in ("out_features", "in_features")]
    if list(weight.shape) == sizes:
        return "linear"
    return TRANSPOSED if list(weight.shape) == sizes[::-1] else None


# ------------------------------------------------------------------------- users' own classes


def register_layer(
    kind: type[nn.Module],
    *,
    rows: Rows | None = None,
    gain: Factor | None = None,
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
    exact block, where the optimizer has ``exact_blocks=True``.

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
    ruled = kind in KINDS or issubclass(kind, NORMALISATIONS)
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
    if gain is not None:
        KINDS.pop(kind, None)
        GAINS[kind] = Gain(gain, weight, bias)
        return

    def rows_of(module: nn.Module, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return (x, d) if rows is None else rows(module, x, d)

    def gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        x, d = rows_of(module, x, d)
        return linear_gradient(module, *((d, x) if transposed else (x, d)))

    GAINS.pop(kind, None)
    KINDS[kind] = LayerKind(
        lambda module, x, d, form: linear_statistics(
            module, *rows_of(module, x, d), replace(form, known=None)
        ),
        partial(_sizes, weight, transposed),
        weight,
        "" if bias is None else bias,
        gradient=gradient,
        fits=lambda module, x, d: True,  # who tells of rows has told of their sizes
    )


def _sizes(weight: str, transposed: bool, module: nn.Module, bias: bool) -> FactorShape:
    size = cast(Tensor, getattr(module, weight)).shape
    out_dim, in_dim = (size[1], size[0]) if transposed else (size[0], size[1:].numel())
    return FactorShape(1, in_dim + int(bias), out_dim, transposed=transposed)
