"""Fused experts: the weights of all experts of a layer in two parameters of three dimensions.

Such a module is called with hidden states, ``(tokens, in)``, the experts of each token and their
weights, both ``(tokens, k)``, as transformers' ``use_experts_implementation`` has it. Each of its
parameters is a grouped layer, an expert to a group. Of an example n routed to expert e, the
gradient of its block is d xᵀ; of all others it is 0. So the Fisher block of e is

    F_e = (1 / N) Σ over the examples of e of (x xᵀ) ⊗ (d dᵀ)  ≈  A_e ⊗ G_e
    A_e = (1 / N_e) Σ x xᵀ,    G_e = (1 / N) Σ d dᵀ

N are the examples of the loss, N_e those routed to e: A is a mean over the tokens of the expert, G
over all, as an expert has the smaller curvature the fewer tokens come to it. A step in which none
comes leaves A as it is, and counts as zeros in G.

What the products multiply is computed again from the module's input and the gradient of its output,
so that it does not matter which implementation the model runs, nor what a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from second_order.kronecker import autograd
from second_order.kronecker.layers import (
    ROUTED,
    FactorShape,
    LayerKind,
    PairOptions,
    PairStatistics,
    gram,
)

__all__ = ["EXPERTS", "Routed", "is_experts", "is_router"]

MARKS = ("has_gate", "has_bias", "is_transposed")
"""What transformers tells of a module of fused experts."""

ROUTER_SIZES = ("num_experts", "hidden_dim")
"""What it calls the sizes of a router's weight."""

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one of fused experts, as transformers has them."""
    down = getattr(module, "down_proj", None)
    three = isinstance(down, nn.Parameter) and down.dim() == 3
    return three and all(hasattr(module, mark) for mark in MARKS)


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router of fused experts, as transformers has them."""
    weight = module._parameters.get("weight")
    sizes = [getattr(module, name, None) for name in ROUTER_SIZES]
    return weight is not None and list(weight.shape) == sizes


class Rows(NamedTuple):
    """Rows of experts' inputs, or of gradients of their outputs, those of an expert together."""

    of: Mapping[str, Tensor]  # by parameter, (rows, in or out)
    tokens: Tensor  # of each row
    counts: list[int]  # rows of each expert


@dataclass
class Routed:
    """The input of a call of fused experts."""

    hidden: Tensor  # (tokens, in)
    index: Tensor  # (tokens, k): experts; one that is not here may have any other number
    weights: Tensor  # (tokens, k)
    _pairs: tuple[Rows, Rows] | None = field(default=None, repr=False)

    @classmethod
    def from_call(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Routed | None:
        """The input among the arguments of a call, hidden states first; None if it is another."""
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if len(given) != 3:
            return None
        hidden = given[0]
        index, weights = sorted(given[1:], key=Tensor.is_floating_point)
        numbers = weights.is_floating_point() and not index.is_floating_point()
        fits = numbers and index.shape == weights.shape and len(hidden) == len(index)
        return cls(hidden, index, weights) if fits else None

    def save_input(self) -> Callable[[], Routed]:
        """Keep the input as autograd keeps its own; what is returned reads it."""
        hidden, index, weights = map(autograd.save_input, (self.hidden, self.index, self.weights))
        return lambda: Routed(hidden(), index(), weights())

    def detach(self) -> Routed:
        """The input apart from autograd's graph."""
        return Routed(self.hidden.detach(), self.index.detach(), self.weights.detach())

    def rows(self, module: nn.Module, mask: Tensor | None = None) -> tuple[Rows, Tensor, Tensor]:
        """Inputs of both products, without a backward pass; of the tokens of a mask, or of all.

        Then the outputs of the first product, and the weights of rows, ``(rows, 1)``.
        """
        first, second = (name for name in WEIGHTS if name in module._parameters)
        experts = len(cast(Tensor, module._parameters[first]))
        here = (self.index >= 0) & (self.index < experts)
        if mask is not None:
            here = here & mask.unsqueeze(1)
        token, slot = here.nonzero(as_tuple=True)
        expert, order = self.index[token, slot].sort(stable=True)
        token, slot = token[order], slot[order]
        counts = expert.bincount(minlength=experts).tolist()
        x = self.hidden[token].to(cast(Tensor, module._parameters[first]).dtype)
        u = _product(module, first, x, counts)
        of = {first: x, second: _gated(module, u)}
        return Rows(of, token, counts), u, self.weights[token, slot].unsqueeze(1)

    def pairs(self, module: nn.Module, d: Tensor, mask: Tensor | None = None) -> tuple[Rows, Rows]:
        """Rows of inputs and of gradients, given that of the module's output, ``(tokens, in)``.

        Of the tokens of a mask, or of all. Computed once: both parameters have need of it.
        """
        if self._pairs is None:
            xs, u, weights = self.rows(module, mask)
            first, second = xs.of
            dy = (d[xs.tokens] * weights).to(xs.of[first].dtype)
            if getattr(module, "has_post_expert_norm", False):
                y = _product(module, second, xs.of[second], xs.counts)
                dy = _pulled_back(cast(Any, module).post_expert_norm, y, dy)
            da = _product(module, second, dy, xs.counts, backwards=True)
            du = _pulled_back(partial(_gated, module), u, da)
            self._pairs = xs, Rows({first: du, second: dy}, xs.tokens, xs.counts)
        return self._pairs


def _gated(module: Any, u: Tensor) -> Tensor:
    """What the second product multiplies, from the outputs of the first."""
    return cast(Tensor, module._apply_gate(u) if module.has_gate else module.act_fn(u))


def _product(
    module: Any, name: str, x: Tensor, counts: list[int], backwards: bool = False
) -> Tensor:
    """Rows times their experts' weights, with biases; or backwards, from outputs to inputs."""
    weight = getattr(module, name).detach()
    weight = weight if module.is_transposed != backwards else weight.mT
    parts = [rows @ of for rows, of in zip(x.split(counts), weight, strict=True)]
    if module.has_bias and not backwards:
        bias = getattr(module, f"{name}_bias").detach()
        parts = [part.add_(of) for part, of in zip(parts, bias, strict=True)]
    return torch.cat(parts)


def _pulled_back(function: Callable[[Tensor], Tensor], x: Tensor, d: Tensor) -> Tensor:
    """The gradient of a function's input, from that of its output."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(x), x, d)
    return found


# ------------------------------------------------------------------------------- kinds of layers


@dataclass(frozen=True)
class ExpertsKind(LayerKind):
    """One of the two weights, an expert to a group."""

    family: str = ROUTED

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        transposed = bool(module.is_transposed)
        experts, out, width = getattr(module, self.weight).shape
        if transposed:
            out, width = width, out
        return FactorShape(experts, width + int(bias), out, transposed=transposed, routed=True)

    def statistics(
        self, module: nn.Module, x: Any, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        inputs, gradients = x.pairs(module, d, options.row_mask.mask)
        a = [gram(rows.unsqueeze(0), options.has_bias) for rows in self._by_expert(inputs, d)]
        g = [gram(rows.unsqueeze(0)) for rows in self._by_expert(gradients, d)]
        counts = torch.tensor(inputs.counts, dtype=d.dtype, device=d.device)
        factors = {"A": torch.cat(a), "G": torch.cat(g)}
        return PairStatistics(factors, options.row_mask.count, examples_per_group=counts)

    def gradient(self, module: nn.Module, x: Any, d: Tensor) -> Tensor:
        inputs, gradients = replace(x, _pairs=None).pairs(module, d)
        each = zip(self._by_expert(inputs, d), self._by_expert(gradients, d), strict=True)
        found = torch.stack([of.mT @ rows for rows, of in each])
        return found.mT if module.is_transposed else found

    def fits(self, module: nn.Module, x: Any, d: Tensor) -> bool:
        return isinstance(x, Routed) and d.shape == x.hidden.shape

    def _by_expert(self, rows: Rows, d: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = rows.of[self.weight].to(d.dtype).split(rows.counts)
        return parts


EXPERTS = {name: ExpertsKind(name, f"{name}_bias") for name in WEIGHTS}
"""Their kinds, by the names of the parameters."""
