"""Fused experts: modules with the weights of all their experts in two 3-D parameters.

    is_experts, is_router   recognize the modules by the attributes of transformers
    Routed                  the input of a call: tokens, and the experts of each token
    Routed.pairs            rows of both products' inputs and gradients, by expert
    ExpertsKind             the layer kind of one of the weights: a group per expert

Such a module is called with hidden states ``(tokens, in)``, and with the experts of
each token and their weights, both ``(tokens, k)``, as transformers'
``use_experts_implementation`` defines it. The weight gradient of expert e is d xᵀ for
an example that is routed to e, and 0 for all others. The Fisher block of e is therefore

    F_e = (1 / N) Σ over the examples of e of (x xᵀ) ⊗ (d dᵀ)  ≈  A_e ⊗ G_e
    A_e = (1 / N_e) Σ x xᵀ,    G_e = (1 / N) Σ d dᵀ

where N is the number of examples of the loss, and N_e that of the examples routed to e.
A is a mean over the tokens of the expert. G is a mean over all tokens, because an
expert with fewer tokens has a smaller curvature. A step without a token for e leaves
A_e as it is, and adds zeros to G_e.

The rows are recomputed from the module's input and the gradient of its output. They
therefore do not depend on the implementation that the model runs, or on what a
checkpoint saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.layers import (
    KINDS,
    ROUTED,
    FactorShape,
    LayerKind,
    PairOptions,
    PairStatistics,
    gram,
)

__all__ = ["EXPERTS", "Routed", "is_experts", "is_router"]

EXPERTS_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed")
"""Attributes that transformers sets on a module of fused experts."""

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Whether a module has fused experts, in the form that transformers defines."""
    if "down_proj" not in module._parameters:
        return False
    down = module._parameters["down_proj"]
    if down is None or down.dim() != 3:
        return False
    return all(hasattr(module, name) for name in EXPERTS_ATTRIBUTES)


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router of fused experts, in the form of transformers.

    A class that has a kind is not a router, even if it has a router's attributes.
    """
    if not KINDS.keys().isdisjoint(type(module).__mro__):
        return False
    weight = module._parameters.get("weight")
    sizes = (getattr(module, "num_experts", None), getattr(module, "hidden_dim", None))
    return weight is not None and tuple(weight.shape) == sizes


class ExpertRows(NamedTuple):
    """Inputs of the two products, or gradients of their outputs, sorted by expert.

    Attributes:
        by_weight: The rows by the weight's name, ``(rows, in)`` or ``(rows, out)``.
        tokens: The index of each row's token, ``(rows,)``.
        counts: Number of rows of each expert.
    """

    by_weight: Mapping[str, Tensor]
    tokens: Tensor
    counts: list[int]


class RoutedProducts(NamedTuple):
    """A forward pass through the experts up to the input of the second product.

    Attributes:
        inputs: The inputs of both products.
        first_output: The outputs of the first product, ``(rows, out)``.
        weights: The weight of each row in the module's output, ``(rows, 1)``.
    """

    inputs: ExpertRows
    first_output: Tensor
    weights: Tensor


@dataclass
class Routed:
    """The input of a call of fused experts.

    Attributes:
        hidden: Hidden states, ``(tokens, in)``.
        index: The experts of each token, ``(tokens, k)``. Experts on other ranks have
            numbers that are out of range here.
        weights: The weights of these experts, ``(tokens, k)``.
    """

    hidden: Tensor
    index: Tensor
    weights: Tensor
    _pairs: tuple[ExpertRows, ExpertRows] | None = field(default=None, repr=False)

    @classmethod
    def from_call(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Routed | None:
        """Read the input from the arguments of a call. None if they have another form.

        The hidden states come first. The experts are integers and the weights are
        floats, in whichever order.
        """
        values = (*args, *kwargs.values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) != 3:
            return None
        hidden = tensors[0]
        index, weights = sorted(tensors[1:], key=Tensor.is_floating_point)
        if index.is_floating_point() or not weights.is_floating_point():
            return None
        if index.shape != weights.shape or len(hidden) != len(index):
            return None
        return cls(hidden, index, weights)

    def save(
        self, save: Callable[[Tensor], Callable[[], Tensor]]
    ) -> Callable[[], Routed]:
        """Save each tensor with ``save``, and return a function that reads them."""
        read_hidden = save(self.hidden)
        read_index = save(self.index)
        read_weights = save(self.weights)
        return lambda: Routed(read_hidden(), read_index(), read_weights())

    def products(self, module: nn.Module, mask: Tensor | None = None) -> RoutedProducts:
        """Compute the inputs of both products, without a backward pass.

        Args:
            module: The experts.
            mask: The tokens to include, ``(tokens,)``. None: all of them.
        """
        first, second = (name for name in WEIGHTS if name in module._parameters)
        weight = cast(Tensor, module._parameters[first])
        experts = len(weight)

        # Each (token, expert) that counts is a row. Sort the rows by expert.
        is_local = (self.index >= 0) & (self.index < experts)
        if mask is not None:
            is_local = is_local & mask.unsqueeze(1)
        token, slot = is_local.nonzero(as_tuple=True)
        expert, order = self.index[token, slot].sort(stable=True)
        token = token[order]
        slot = slot[order]
        counts = expert.bincount(minlength=experts).tolist()

        x = self.hidden[token].to(weight.dtype)
        first_output = _multiply(module, first, x, counts)
        by_weight = {first: x, second: _activate(module, first_output)}
        weights = self.weights[token, slot].unsqueeze(1)
        inputs = ExpertRows(by_weight, token, counts)
        return RoutedProducts(inputs, first_output, weights)

    def pairs(
        self, module: nn.Module, d: Tensor, mask: Tensor | None = None
    ) -> tuple[ExpertRows, ExpertRows]:
        """Compute the inputs of both products, and the gradients of their outputs.

        The result is cached, because both weights need it.

        Args:
            module: The experts.
            d: The gradient of the module's output, ``(tokens, in)``.
            mask: The tokens to include, ``(tokens,)``. None: all of them.
        """
        if self._pairs is not None:
            return self._pairs
        inputs, first_output, weights = self.products(module, mask)
        first, second = inputs.by_weight
        counts = inputs.counts

        # Backward through the weighted sum, the norm, the second product and the
        # activation.
        second_d = (d[inputs.tokens] * weights).to(inputs.by_weight[first].dtype)
        if getattr(module, "has_post_expert_norm", False):
            second_output = _multiply(module, second, inputs.by_weight[second], counts)
            norm = cast(Any, module).post_expert_norm
            second_d = _backpropagate(norm, second_output, second_d)
        activation_d = _multiply(module, second, second_d, counts, backwards=True)
        first_d = _backpropagate(partial(_activate, module), first_output, activation_d)

        d_by_weight = {first: first_d, second: second_d}
        gradients = ExpertRows(d_by_weight, inputs.tokens, counts)
        self._pairs = inputs, gradients
        return self._pairs


def _activate(module: Any, first_output: Tensor) -> Tensor:
    """Compute the input of the second product from the output of the first."""
    if module.has_gate:
        return cast(Tensor, module._apply_gate(first_output))
    return cast(Tensor, module.act_fn(first_output))


def _multiply(
    module: Any, name: str, x: Tensor, counts: list[int], backwards: bool = False
) -> Tensor:
    """Multiply rows by their experts' weights, and add the biases.

    ``backwards``: multiply gradients of outputs by the transposed weights.
    """
    weight = getattr(module, name).detach()
    if module.is_transposed == backwards:
        weight = weight.mT
    by_expert = zip(x.split(counts), weight, strict=True)
    outputs = [rows @ expert_weight for rows, expert_weight in by_expert]
    if module.has_bias and not backwards:
        bias = getattr(module, f"{name}_bias").detach()
        for output, expert_bias in zip(outputs, bias, strict=True):
            output.add_(expert_bias)
    return torch.cat(outputs)


def _backpropagate(
    function: Callable[[Tensor], Tensor], x: Tensor, d: Tensor
) -> Tensor:
    """Compute the gradient of a function's input from the gradient of its output."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x, d)
    return gradient


# ---------------------------------------------------------------------- kinds of layers


@dataclass(frozen=True)
class ExpertsKind(LayerKind):
    """One of the two weights of fused experts. Each expert is a group."""

    family: str = ROUTED

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        is_transposed = bool(module.is_transposed)
        experts, out_dim, in_dim = getattr(module, self.weight).shape
        if is_transposed:
            out_dim, in_dim = in_dim, out_dim
        return FactorShape(
            groups=experts,
            in_dim=in_dim + int(bias),
            out_dim=out_dim,
            transposed=is_transposed,
            routed=True,
        )

    def statistics(
        self, module: nn.Module, x: Any, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        inputs, gradients = x.pairs(module, d, options.row_mask.mask)
        # One after the other, so that copies in the dtype of d do not add up.
        a = [
            gram(rows.unsqueeze(0), options.has_bias)
            for rows in self._by_expert(inputs, d)
        ]
        g = [gram(rows.unsqueeze(0)) for rows in self._by_expert(gradients, d)]
        counts = torch.tensor(inputs.counts, dtype=d.dtype, device=d.device)
        return PairStatistics(
            factors={"A": torch.cat(a), "G": torch.cat(g)},
            num_examples=options.row_mask.count,
            examples_per_group=counts,
        )

    def weight_gradient(self, module: nn.Module, x: Any, d: Tensor) -> Tensor:
        uncached = replace(x, _pairs=None)  # the cached rows may be those of a mask
        inputs, gradients = uncached.pairs(module, d)
        x_by_expert = self._by_expert(inputs, d)
        d_by_expert = self._by_expert(gradients, d)
        products = [d.mT @ x for x, d in zip(x_by_expert, d_by_expert, strict=True)]
        gradient = torch.stack(products)
        return gradient.mT if module.is_transposed else gradient

    def fits_pair(self, module: nn.Module, x: Any, d: Tensor) -> bool:
        return isinstance(x, Routed) and d.shape == x.hidden.shape

    def _by_expert(self, rows: ExpertRows, d: Tensor) -> Sequence[Tensor]:
        """The rows of each expert, in the dtype of d."""
        all_rows = rows.by_weight[self.weight].to(d.dtype)
        by_expert: Sequence[Tensor] = all_rows.split(rows.counts)
        return by_expert


EXPERTS = {name: ExpertsKind(name, f"{name}_bias") for name in WEIGHTS}
"""The kinds of fused experts' weights, by name."""
