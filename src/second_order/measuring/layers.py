"""Select the layers of a model to measure, and the rank that owns each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from second_order.distributed.assignment import balance_costs
from second_order.kronecker.autograd import attention_by_out_proj
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.layers import FactorShape, LayerKind, Linear
from second_order.kronecker.model_blocks import LeftToBase, find_blocks
from second_order.measuring.hooks import set_requires_grad
from second_order.utils.modules import modules_inside, unmatched_patterns

__all__ = ["Layer", "Selection", "find_layers"]

# Reasons why a layer is skipped, for the report and `KroneckerCurvature.uncovered`.
NOT_SELECTED = "not among layers="
TIED = (
    "its weight is both an embedding's and an output layer's, so that its factors would have to be "
    "computed from its gradient"
)
LIKE_LINEAR = (
    "it has the parameters of a Linear, but may compute something else; "
    "use register_layer"
)
NO_INPUT_ROWS = 'factors="inputs" measures Linears and fused experts only; use "kfac"'


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer to measure.

    Attributes:
        name: The name of the layer.
        block: The modules of the layer.
        kinds: By module, the rules for its kind.
        shape: Sizes of the factors. If only inputs are measured, without the bias.
        shapes: Shapes of the measured parameters, by name; the weight first.
        has_bias: Whether A has a last row for the bias.
        factors: Names of the factors to measure.
        owner: The rank that stores the factors.
    """

    name: str
    block: KroneckerBlock
    kinds: Mapping[nn.Module, LayerKind]
    shape: FactorShape
    shapes: Mapping[str, torch.Size]
    has_bias: bool
    factors: Sequence[str]
    owner: int

    @property
    def weight_name(self) -> str:
        """The name of the weight within its module."""
        return self.kinds[self.block.modules[0]].weight

    def stored_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the factors as stored: triangles or diagonals."""
        return {
            name: torch.Size(self.shape.stored_shape(name)) for name in self.factors
        }

    def eigenvalue_shapes(self) -> dict[str, torch.Size]:
        """Return the shape ``(groups, out, in)`` of the eigenvalues of "F"."""
        return {"F": torch.Size(self.shape.gradient_shape)}


class Selection(NamedTuple):
    """The layers to measure, and what is skipped, with the reasons."""

    layers: list[Layer]
    skipped: list[LeftToBase]


def find_layers(
    model: nn.Module, patterns: Sequence[str] | None, inputs_only: bool, num_ranks: int
) -> Selection:
    """Find the layers that match the patterns, and assign an owner to each.

    Args:
        model: The model.
        patterns: Shell-style patterns of module names or classes; None for all layers.
        inputs_only: Whether only A of the weights is measured.
        num_ranks: The number of ranks that may own layers.

    Raises:
        ValueError: If a pattern matches no module, or if no layer can be measured.
    """
    # Check the patterns.
    unmatched = unmatched_patterns(model, patterns or ())
    if unmatched:
        raise ValueError(
            f"layers: {unmatched[0]!r} is neither the name of a module nor of a class; use "
            f"shell-style patterns such as '*.mlp.*' or 'Linear'"
        )

    # Frozen layers are measured as well, so each parameter counts as trainable for the
    # search.
    sizes = {id(p): p.numel() for p in model.parameters()}
    with set_requires_grad(model, True):
        blocks, skipped = find_blocks(model, sizes, (), {}, torch.float32)

        # Skip the layers that do not match, and those that cannot be measured.
        names = {id(p): name for name, p in model.named_parameters()}
        selected = modules_inside(model, patterns or ())
        never_called = attention_by_out_proj(model).keys()
        layers: list[Layer] = []
        for block in blocks:
            module = block.modules[0]
            params = block.params[:1] if inputs_only else block.params
            reason = NOT_SELECTED
            if patterns is None or not selected.keys().isdisjoint(block.modules):
                reason = _reason_to_skip(block, inputs_only, never_called)
            if reason:
                kind = type(module).__name__
                size = sum(p.numel() for p in params)
                skipped.append(LeftToBase(block.name, kind, reason, size))
                continue

            shape = block.shape
            factors = shape.factor_names
            if inputs_only:
                shape = block.kinds[module].shape(module, False)
                factors = "A"
            layer = Layer(
                name=block.name,
                block=block,
                kinds=block.kinds,
                shape=shape,
                shapes={names[id(p)]: p.shape for p in params},
                has_bias=len(params) > 1,
                factors=factors,
                owner=0,
            )
            layers.append(layer)
    if not layers:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in skipped[:3])
        raise ValueError(f"no layer of the model can be measured ({reasons})")

    # Give each layer an owner, so that all ranks store about the same number of
    # entries.
    stored_shapes = [layer.stored_shapes().values() for layer in layers]
    costs = [sum(shape.numel() for shape in shapes) for shapes in stored_shapes]
    owners = balance_costs(costs, num_ranks)
    owned: list[Layer] = []
    for layer, owner in zip(layers, owners, strict=True):
        owned.append(replace(layer, owner=owner))
    return Selection(owned, skipped)


def _reason_to_skip(
    block: KroneckerBlock, inputs_only: bool, never_called: Collection[nn.Module]
) -> str:
    """Return why a layer cannot be measured, or ""."""
    module = block.modules[0]
    kind = block.kinds.get(module)
    if block.shape.gradient_factored or kind is None:
        return TIED
    if isinstance(kind, Linear) and kind.assumed:
        return LIKE_LINEAR
    # Experts multiply rows by one matrix each.
    has_rows = block.shape.routed or kind.multiplies_rows
    if inputs_only and (module in never_called or not has_rows):
        return NO_INPUT_ROWS
    return ""
