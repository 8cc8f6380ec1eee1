"""The layers of a model that are measured, and the rank that owns the factors of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from second_order.distributed.assignment import balance_costs
from second_order.kronecker.autograd import is_attention
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.layers import FactorShape, LayerKind, Linear
from second_order.kronecker.model_blocks import LeftToBase, find_blocks
from second_order.measuring.hooks import requires_grad
from second_order.utils.modules import first_match, unmatched_patterns

__all__ = ["Layer", "find_layers"]

TIED = "its weight is an embedding's and an output layer's, whose factors are of the gradient"
NOT_ASKED = "not among layers="
LIKE_LINEAR = "it has the sizes of a Linear, and may compute something else: use register_layer"
INPUTS = 'factors="inputs" measures Linears and fused experts: use "kfac"'


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that is measured.

    Attributes:
        block: Its modules and their kinds.
        shape: Sizes of its factors; of the weight alone with ``factors="inputs"``.
        shapes: Shapes of its parameters, by name.
        factors: Names of the factors that are measured.
        owner: The rank that stores the factors.
    """

    block: KroneckerBlock
    shape: FactorShape
    shapes: Mapping[str, torch.Size]
    factors: Sequence[str]
    owner: int

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.block.name

    @property
    def has_bias(self) -> bool:
        """Whether A has a last row for the bias."""
        return len(self.shapes) > 1

    def stored_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the factors as their owner stores them: triangles, or diagonals."""
        return {name: torch.Size(self.shape.stored_shape(name)) for name in self.factors}

    def kind(self, module: nn.Module) -> LayerKind:
        """The rules for one of its modules."""
        return self.block.kinds[module]

    def is_linear(self, module: nn.Module) -> bool:
        """Whether one of its modules multiplies rows by a matrix."""
        return self.kind(module).multiplies_rows

    @property
    def weight_name(self) -> str:
        """The name of its weight within its module."""
        return self.kind(self.block.modules[0]).weight


def find_layers(
    model: nn.Module, patterns: Sequence[str] | None, inputs_only: bool, num_ranks: int
) -> tuple[list[Layer], list[LeftToBase]]:
    """The layers that patterns name, and the modules that have no factors.

    Raises:
        ValueError: If a pattern matches no module, or if there is no layer.
    """
    unmatched = unmatched_patterns(model, patterns or ())
    if unmatched:
        raise ValueError(
            f"layers: {unmatched[0]!r} is neither the name of a module nor of a class; shell "
            f"style: '*.mlp.*', 'Linear'"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    modules = dict(model.named_modules(remove_duplicate=False))
    never_called = {module.out_proj for module in modules.values() if is_attention(module)}
    sizes = {id(p): p.numel() for p in model.parameters()}
    found: list[Layer] = []
    with requires_grad(model, True):
        blocks, left = find_blocks(model, sizes, (), {}, torch.float32)

        # Leave out what was not asked for, and what cannot be measured.
        for block in blocks:
            module = block.modules[0]
            kind = block.kinds.get(module)
            params = block.params[:1] if inputs_only else block.params
            reason = ""
            if not any(patterns is None or first_match(patterns, modules, n) for n in block.names):
                reason = NOT_ASKED
            elif block.shape.marginal or kind is None:
                reason = TIED
            elif isinstance(kind, Linear) and kind.supposed:
                reason = LIKE_LINEAR
            elif inputs_only and (module in never_called or not _has_rows(block)):
                reason = INPUTS
            if reason:
                count = sum(p.numel() for p in params)
                left.append(LeftToBase(block.name, type(module).__name__, reason, count))
                continue
            assert kind is not None
            found.append(
                Layer(
                    block=block,
                    shape=kind.shape(module, False) if inputs_only else block.shape,
                    shapes={names[id(p)]: p.shape for p in params},
                    factors="A" if inputs_only else block.shape.factor_names,
                    owner=0,
                )
            )
    if not found:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in left[:3])
        raise ValueError(f"no layer of the model is measured ({reasons})")

    # Give each layer an owner, so that ranks store equally much.
    costs = [sum(shape.numel() for shape in layer.stored_shapes().values()) for layer in found]
    owners = balance_costs(costs, num_ranks)
    return [replace(layer, owner=owner) for layer, owner in zip(found, owners, strict=True)], left


def _has_rows(block: KroneckerBlock) -> bool:
    """Whether a layer multiplies rows by matrices."""
    return block.shape.routed or block.kinds[block.modules[0]].multiplies_rows
