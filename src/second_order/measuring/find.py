"""Which layers of a model are measured, why not the others; and by whom, in how many passes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from second_order.distributed.assignment import spread_costs
from second_order.kronecker.layers import KINDS
from second_order.kronecker.model_blocks import LeftToBase, find_blocks
from second_order.measuring.statistics import Layer
from second_order.measuring.sums import Keep
from second_order.measuring.watch import trainable
from second_order.patterns import first_match, unmatched_patterns

__all__ = ["find_layers", "passes_of", "shared_out"]

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
        blocks, left = find_blocks(model, sizes, (), {}, torch.float32)
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
            letters = "A" if inputs else shape.letters
            layers.append(Layer(block, replace(shape), shapes, letters))
    if not layers:
        said = "; ".join(f"{row.name}: {row.reason}" for row in left[:3])
        raise ValueError(f"no layer of the model is measured ({said})")
    return layers, left


def shared_out(
    layers: Sequence[Layer], keep: Keep, ekfac: bool, itemsize: int, ranks: int, budget: int | None
) -> list[list[Layer]]:
    """Give each layer its owner; returns the layers of each pass, within a budget of bytes."""
    keep = "device" if keep == "owner" and ranks == 1 else keep
    costs = [_cost(layer, keep, ekfac) for layer in layers]
    costs = [(everywhere * itemsize, owned * itemsize) for everywhere, owned in costs]
    owners = spread_costs([*map(sum, costs)], ranks)
    for layer, owner in zip(layers, owners, strict=True):
        layer.assigned = owner
    return [[layers[i] for i in each] for each in passes_of(costs, owners, budget)]


def _cost(layer: Layer, keep: Keep, ekfac: bool) -> tuple[int, int]:
    """Numbers in a layer's sums on each process while they grow, and how many more on its owner.

    While EK-FAC's eigenvalues are summed, all processes have the eigenvectors.
    """

    def numbers(packed: bool) -> int:
        return sum(layer.size(letter, packed).numel() for letter in layer.letters)

    sums, everywhere = numbers(keep != "device"), 0
    if ekfac:
        everywhere = numbers(packed=False)
        sums = max(sums - everywhere, math.prod(layer.shape.gradient_size))
    return (everywhere, sums) if keep == "owner" else (everywhere + sums, 0)


def passes_of(
    costs: Sequence[tuple[int, int]], owners: Sequence[int], budget: int | None
) -> list[list[int]]:
    """Positions of layers by pass: as many in a row as fit into a budget on every process.

    ``costs``: bytes of each layer on every process, and how many more on its owner.

    Raises:
        ValueError: If a layer alone does not fit.
    """
    if budget is None:
        return [list(range(len(costs)))]
    most = max(map(sum, costs), default=0)
    if most > budget:
        raise ValueError(
            f"memory={budget:,} bytes are less than one layer takes, {most:,}; give at least that, "
            f"or leave that layer out by layers="
        )
    found: list[list[int]] = [[]]
    filled, own = 0, Counter[int]()
    for i, ((everywhere, more), owner) in enumerate(zip(costs, owners, strict=True)):
        filled, own[owner] = filled + everywhere, own[owner] + more
        if filled + max(own.values()) > budget:
            found.append([])
            filled, own = everywhere, Counter({owner: more})
        found[-1].append(i)
    return found
