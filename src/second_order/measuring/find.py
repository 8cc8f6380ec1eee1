"""Which layers of a model are measured, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from second_order.kronecker.layers import KINDS
from second_order.kronecker.model_blocks import LeftToBase, find_blocks
from second_order.measuring.statistics import Layer
from second_order.measuring.watch import trainable
from second_order.patterns import first_match, unmatched_patterns

__all__ = ["find_layers"]

MARGINAL = "its weight is an embedding's and an output layer's, whose factors are of the gradient"
NOT_ASKED = "not among layers="


def find_layers(
    model: nn.Module, patterns: Sequence[str] | None, inputs: bool
) -> tuple[list[Layer], list[LeftToBase]]:
    """The layers that patterns name, and what has no factors.

    ``inputs``: of their weights alone.

    Raises:
        ValueError: If a pattern matches no module, or there is no layer.
    """
    unmatched = unmatched_patterns(model, patterns or ())
    if unmatched:
        raise ValueError(
            f"layers: {unmatched[0]!r} is the name of no module, nor of a class of one; shell "
            f"style: '*.mlp.*', 'Linear'"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    with trainable(model):
        sizes = {id(p): p.numel() for p in model.parameters()}
        blocks, left = find_blocks(model, sizes, (), {}, torch.float32, False)
        everything = dict(model.named_modules(remove_duplicate=False))
        layers: list[Layer] = []
        for block in blocks:
            module, key = block.modules[0], block.keys[0]
            params, reason = block.params[: 1 if inputs else 2], ""
            asked = patterns is None or any(
                first_match(patterns, everything, name) for name in block.names
            )
            if not asked:
                reason = NOT_ASKED
            elif block.shape.marginal or key is None:
                reason = MARGINAL
            if reason:
                kind, count = type(module).__name__, sum(p.numel() for p in params)
                left.append(LeftToBase(block.name, kind, reason, count))
                continue
            assert key is not None
            shape = KINDS[key].shape(module, False) if inputs else block.shape
            shapes = {names[id(p)]: p.shape for p in params}
            layers.append(Layer(block, replace(shape), shapes))
    if not layers:
        said = "; ".join(f"{row.name}: {row.reason}" for row in left[:3])
        raise ValueError(f"no layer of the model is measured ({said})")
    return layers, left
