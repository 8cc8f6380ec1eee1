"""Further kinds of layers, and the way to the kind of any module.

| kind                      | weight            | A                       | G                    |
|---------------------------|-------------------|-------------------------|----------------------|
| transposed linear         | (in, out)         | inputs                  | gradients            |
| transposed convolution    | (in, out, kernel) | channels of the input   | patches of gradients |
| attention's in-projection | (3 E, E)          | inputs of q, of k, of v | gradients of each    |
| scaled embedding          | (entries, width)  | entries, a diagonal     | width                |
| tied embedding and output | (entries, width)  | entries, a diagonal     | width                |

A transposed convolution multiplies each location of its input by the weight and adds the products
to a patch of its output. So it is a Linear whose output is that patch, at each location of the
input; its bias, which is added at locations of the output, is apart.

Of a weight that is an embedding's and an output layer's, a token has a gradient in either use: e gᵀ
where it is looked up, e its one-hot row, and d hᵀ where it is predicted. Their second moment has
two partial traces, Σ ‖g‖² e + Σ ‖h‖² d² of the entries, a diagonal, and Σ g gᵀ + Σ ‖d‖² h hᵀ of the
width. The block is the product of the two over the trace that both have.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from second_order.kronecker.examples import live_rows
from second_order.kronecker.layers import (
    KINDS,
    FactorShape,
    Form,
    Key,
    LayerKind,
    PairStatistics,
    at_least_one,
    conv_fits,
    conv_gradient,
    embedding_fits,
    embedding_gradient,
    embedding_statistics,
    gram,
    key_of,
    linear_fits,
    linear_gradient,
    linear_statistics,
    live_images,
    reduced,
    rows_of_embedding,
    unsupported_reason,
)
from second_order.kronecker.patches import extract_patches

__all__ = ["found_kind", "ties_of"]

TIED_EMBEDDING, TIED_OUTPUT = "tied embedding", "tied output"
TRANSPOSED, SCALED = "transposed linear", "scaled embedding"


TRANSPOSED_CLASSES = ("transformers.pytorch_utils.Conv1D",)
"""Classes of Linears whose weight is (in, out), by their full names."""


def _transposed_gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    return linear_gradient(module, d, x)


def _columns_of_weight(module: nn.Module, bias: bool) -> FactorShape:
    weight = cast(Tensor, module.weight)
    return FactorShape(1, weight.shape[0] + int(bias), weight.shape[1], transposed=True)


# ------------------------------------------------------------------------- transposed convolutions


def _patches_of_output(module: nn.Module, bias: bool) -> FactorShape:
    weight, groups = cast(Tensor, module.weight), cast(int, module.groups)
    return FactorShape(groups, weight.shape[0] // groups, weight.shape[1:].numel(), transposed=True)


def _transposed_conv_statistics(
    module: nn.Module, x: Tensor, d: Tensor, form: Form
) -> PairStatistics:
    conv = cast(nn.Conv2d, module)
    dims = len(conv.kernel_size)
    x, d, live, rows = live_images(x, d, dims)
    patches = extract_patches(d, conv)  # (N, groups, out / groups, *kernel, *locations)
    for i, size in enumerate(x.shape[2:]):  # output padding can make room for more
        patches = patches.narrow(3 + dims + i, 0, size)
    d = patches.flatten(3 + dims).flatten(2, 2 + dims)  # (N, groups, out, T)
    x = x.flatten(2).unflatten(1, (conv.groups, -1))  # (N, groups, in, T)
    locations = x.shape[-1]
    if form.approximation == "reduce":
        parts = [t.transpose(0, 1) for t in (x.mean(-1), d.sum(-1))]
        a, g = (gram(part, False, form.triangular) for part in parts)
        return PairStatistics({"A": a, "G": g}, live.count, rows)
    a, g = (gram(t.permute(1, 0, 3, 2).flatten(1, 2), False, form.triangular) for t in (x, d))
    return PairStatistics({"A": a, "G": g.div_(locations)}, live.count, rows)


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


def _scaled_embedding_statistics(
    module: nn.Module, x: Tensor, d: Tensor, form: Form
) -> PairStatistics:
    d = d * _scale_of(module)
    return embedding_statistics(module, x, d, form)


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


def ties_of(model: nn.Module) -> dict[nn.Module, Key]:
    """The modules that use one weight both as an embedding and as an output layer, and how."""
    sharing: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        uninitialised = isinstance(weight, nn.parameter.UninitializedParameter)
        if weight is not None and not uninitialised and weight.dim() == 2:
            sharing.setdefault(id(weight), []).append(module)
    found: dict[nn.Module, Key] = {}
    for modules in sharing.values():
        if len(modules) < 2:
            continue
        keys = [found_kind(module)[0] for module in modules]
        kinds = dict.fromkeys((nn.Embedding, SCALED), TIED_EMBEDDING)
        kinds |= dict.fromkeys((nn.Linear, "linear"), TIED_OUTPUT)
        if len(set(keys)) > 1 and all(key in kinds for key in keys):
            both = [kinds[key] for key in keys if key is not None]
            found |= dict(zip(modules, both, strict=True)) if len(set(both)) > 1 else {}
    return found


# --------------------------------------------------------------------------------- what is what


KINDS[TRANSPOSED] = LayerKind(
    linear_statistics,
    _columns_of_weight,
    gradient=_transposed_gradient,
    fits=partial(linear_fits, transposed=True),
)
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    KINDS[_transposed] = LayerKind(
        _transposed_conv_statistics,
        _patches_of_output,
        with_bias=False,
        gradient=conv_gradient,
        fits=conv_fits,
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
    _scaled_embedding_statistics,
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
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    if tuple(weight.shape) == sizes:
        return "linear"
    return TRANSPOSED if tuple(weight.shape) == sizes[::-1] else None
