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
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

import second_order.kronecker.convolutions  # noqa: F401 - whose kinds come before a user's
from second_order.kronecker.exact import GAINS, NORMALISATIONS, Gain
from second_order.kronecker.experts import ROUTER_SIZES
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
    form_rows,
    gram,
    key_of,
    linear_fits,
    linear_gradient,
    linear_statistics,
    rows_of_embedding,
)

__all__ = ["found_kind", "register_layer", "ties_of"]

TIED_EMBEDDING, TIED_OUTPUT = "tied embedding", "tied output"
TRANSPOSED = "transposed linear"
LIKE_LINEARS: dict[str, Key] = {"transformers.pytorch_utils.Conv1D": TRANSPOSED}
"""Other packages' classes of Linears, by their full names."""

SIZE_NAMES = (
    ("out_features", "in_features"),  # torch.nn.Linear
    ("out_channels", "in_channels"),  # torch_geometric.nn.Linear
    ROUTER_SIZES,  # transformers' routers of experts
)
"""Names of the sizes of a weight, (out, in)."""


# --------------------------------------------------------------------------------------- attention


def _attention_statistics(module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
    if d.shape[-1] > x.shape[-1]:  # one input: (batch, positions, E) and (batch, positions, 3 E)
        x, d, live = form_rows(x, d, form)
        a = gram(live.pick(x).unsqueeze(0), form.bias, form.triangular, live.count)
        g = gram(d.unflatten(1, (3, -1)).transpose(0, 1), False, form.triangular)
        a = a.expand(3, *a.shape[1:]).clone()
        return PairStatistics({"A": a, "G": g}, live.count)
    each: list[PairStatistics] = []
    for third, (part, of) in enumerate(zip(x, d, strict=True)):
        own = None if form.rows is None else form.rows.third(third)
        each.append(linear_statistics(module, part, of, replace(form, rows=own)))
    # The examples are the queries, which have loss terms; A is a mean over each third's own rows.
    counts = [at_least_one(pair.examples) for pair in each]
    more = [counts[0] / count for count in counts]
    a = torch.cat([pair.factors["A"] * by for pair, by in zip(each, more, strict=True)])
    g = torch.cat([pair.factors["G"] for pair in each])
    return PairStatistics({"A": a, "G": g}, each[0].examples)


def _attention_gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    if d.shape[-1] > x.shape[-1]:
        return linear_gradient(module, x, d)
    return torch.cat([linear_gradient(module, part, of) for part, of in zip(x, d, strict=True)])


# ---------------------------------------------------------------------------- tied output layers


def _tied_output_statistics(module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
    x, d, live = form_rows(x, d, form)
    squares = d.square()
    entries = x.square().sum(1) @ squares
    weighted = x * squares.sum(1, keepdim=True).sqrt()
    factors = {"A": entries.unsqueeze(0), "G": gram(weighted.unsqueeze(0), False, form.triangular)}
    return PairStatistics(factors, live.count)


def _sizes(module: nn.Module, bias: bool, *, weight: str, transposed: bool) -> FactorShape:
    size = cast(Tensor, getattr(module, weight)).shape
    out_dim, in_dim = (size[1], size[0]) if transposed else (size[0], size[1:].numel())
    return FactorShape(1, in_dim + int(bias), out_dim, transposed=transposed)


KINDS[TRANSPOSED] = LayerKind(
    linear_statistics,
    partial(_sizes, weight="weight", transposed=True),
    gradient=lambda module, x, d: linear_gradient(module, d, x),
    fits=partial(linear_fits, transposed=True),
)
KINDS[nn.MultiheadAttention] = LayerKind(
    _attention_statistics,
    lambda module, bias: FactorShape(3, module.embed_dim + int(bias), module.embed_dim),  # type: ignore[operator, arg-type]
    "in_proj_weight",
    "in_proj_bias",
    gradient=_attention_gradient,
)
KINDS[TIED_EMBEDDING] = LayerKind(
    partial(embedding_statistics, tied=True),
    partial(rows_of_embedding, tied=True),
    with_bias=False,
    gradient=embedding_gradient,
    fits=embedding_fits,
)
KINDS[TIED_OUTPUT] = LayerKind(
    _tied_output_statistics,
    partial(rows_of_embedding, tied=True),
    with_bias=False,
    fits=linear_fits,
)


# ------------------------------------------------------------------------------------ what is what


def ties_of(kinds: Mapping[nn.Module, Key | None]) -> dict[nn.Module, Key]:
    """The modules that use one weight both as an embedding and as an output layer, and how."""
    uses: dict[Key | None, Key] = {nn.Embedding: TIED_EMBEDDING}
    uses |= dict.fromkeys((nn.Linear, "linear"), TIED_OUTPUT)
    sharing: dict[int, dict[nn.Module, Key | None]] = {}
    for module, key in kinds.items():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None:
            sharing.setdefault(id(weight), {})[module] = uses.get(key)
    tied = [how for how in sharing.values() if set(how.values()) == {TIED_EMBEDDING, TIED_OUTPUT}]
    return {module: cast(Key, key) for how in tied for module, key in how.items()}


def found_kind(module: nn.Module) -> tuple[Key | None, str | None]:
    """The key of a module's kind, or why it has none.

    The kind of its class, if it has the class's forward. Else that of a Linear, if the class is in
    :data:`LIKE_LINEARS` or the weight has the sizes that the module names (:data:`SIZE_NAMES`). Its
    first statistics then show whether it is one: see :mod:`second_order.kronecker.explanation`.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return None, "torch.jit has compiled it and runs no hooks; train the plain module"
    key, name = key_of(module), type(module).__name__
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    if isinstance(key, type) and (scaled or type(module).forward is key.forward):
        reason = _why_unusable(module, module._parameters.get(KINDS[key].weight))
        return (key, None) if reason is None else (None, reason)
    like = None if isinstance(module, nn.Embedding) else _like_linear(module)
    if like is not None:
        return like, None
    if isinstance(key, type):
        return None, f"{name} overrides {key.__name__}.forward"
    return None, f"{name} has no Kronecker factors here"


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


def _like_linear(module: nn.Module) -> Key | None:
    """The kind of Linear that a module of another class looks like."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or isinstance(weight, nn.parameter.UninitializedParameter):
        return None
    matrix = weight.dim() == 2 and min(weight.shape) > 1 and weight.is_floating_point()
    if not matrix or (bias is not None and bias.dim() != 1):
        return None
    if any(True for child in module.children() for _ in child.parameters()):
        return None
    for base in type(module).__mro__:
        like = LIKE_LINEARS.get(f"{base.__module__}.{base.__qualname__}")
        if like is not None:
            return like
    for out_name, in_name in SIZE_NAMES:
        sizes = (getattr(module, out_name, None), getattr(module, in_name, None))
        if weight.shape == sizes:
            return "linear"
        if weight.shape == sizes[::-1]:
            return TRANSPOSED
    return None


# ------------------------------------------------------------------------- users' own classes


def register_layer(
    kind: type[nn.Module],
    *,
    rows: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
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
    KINDS.pop(kind, None)
    GAINS.pop(kind, None)
    if gain is not None:
        GAINS[kind] = Gain(gain, weight, bias)
        return
    rows_of: Any = (lambda module, x, d: (x, d)) if rows is None else rows

    def gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        x, d = rows_of(module, x, d)
        return linear_gradient(module, *((d, x) if transposed else (x, d)))

    def statistics(module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
        x, d = rows_of(module, x, d)
        return linear_statistics(module, x, d, form)

    KINDS[kind] = LayerKind(
        statistics,
        partial(_sizes, weight=weight, transposed=transposed),
        weight,
        "" if bias is None else bias,
        gradient=gradient,
        rows=rows_of,
    )
