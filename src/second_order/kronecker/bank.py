"""Layers of one shape, whose gradients are preconditioned together.

gradient   the layers' gradients as one stack of matrices, by one concatenation
inverse    their inverses, stacked alike; a layer has a view
write      the layers' parts of a stack of results, into their gradients

What a device is asked to do then does not grow with the number of layers that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.layers import Layout
from second_order.kronecker.solvers import Inverse
from second_order.kronecker.stacks import as_stack, in_groups

__all__ = [
    "CPU_BANK_BYTES",
    "Bank",
    "Gradients",
    "as_matrices",
    "banks_of",
    "of_groups",
    "of_parameters",
]

# Bytes of gradients that are preconditioned together, unless one layer alone has more. On a CPU a
# batch saves calls alone, and what has been computed is to be found in its cache.
CPU_BANK_BYTES, BANK_BYTES = 2**20, 64 * 2**20

Gradients: TypeAlias = Callable[[Tensor], Tensor | None]
"""The gradient of a parameter, if it has one."""


def as_matrices(gradients: list[Tensor], layout: Layout) -> Tensor:
    """The gradients of equal layers, one after the other, as ``(layers x groups, out, in)``.

    It is a view of a single one wherever that is possible.
    """
    number = len(layout.views)
    grouped = len(layout.views[0]) > 2
    layers = len(gradients) // number
    views = [g.reshape(view) for g, view in zip(gradients, layout.views * layers, strict=True)]
    if layers > 1 and gradients[0].device.type == "cpu":
        # Products of matrices whose rows lie apart take twice as long.
        columns = [torch.stack(views[i::number]) for i in range(number)]
        whole = columns[0] if number == 1 else torch.cat(columns, layout.axis + 1)
    else:
        whole = views[0] if len(views) == 1 else torch.cat(views, layout.axis)
        whole = whole.unflatten(layout.axis, (layers, -1)).movedim(layout.axis, 0)
    if grouped:
        whole = whole.flatten(0, 1)
    return whole.mT if layout.flipped else whole


def of_parameters(matrices: Tensor, layout: Layout, layers: int = 1) -> Sequence[Tensor]:
    """The parts of equal layers' ``(layers x groups, out, in)`` by parameter, stacked.

    Each is ``(layers, ...)``, a view; the rest of its shape has the order of the parameter's.
    """
    stacked = matrices.mT if layout.flipped else matrices
    if len(layout.views[0]) > 2:
        stacked = stacked.unflatten(0, (layers, -1))
    sizes = [view[layout.axis] for view in layout.views]
    parts: Sequence[Tensor] = stacked.split_with_sizes(sizes, layout.axis + 1)
    return parts


class Bank:
    """Layers whose gradients are matrices of one shape, dtype and device, laid out alike.

    ``inverse`` is that of all of them, its tensors ``(layers x groups, ...)``; of a layer that has
    none, there is nothing of use.
    """

    def __init__(self, blocks: Sequence[KroneckerBlock], inverse: Inverse | None = None) -> None:
        self.blocks = list(blocks)
        self.inverse = inverse
        first = self.blocks[0]
        self._groups = first.shape.groups
        self._dtype = first.work_dtype
        self._layout = first.layout
        self.params = [p for block in self.blocks for p in block.params]

    def some(self, blocks: Sequence[KroneckerBlock]) -> Bank:
        """The bank of some of the layers, in their order; with views of inverses if in a row."""
        if len(blocks) == len(self.blocks):
            return self
        if self.inverse is None:
            return Bank(blocks)
        here = [self.blocks.index(block) for block in blocks]
        stacks = [as_stack([parts[i] for i in here]) for parts in self._parts(self.inverse)]
        return Bank(blocks, self.inverse.of([stack.flatten(0, 1) for stack in stacks]))

    def install(self, blocks: Sequence[KroneckerBlock], new: Inverse, keeps: bool) -> None:
        """Put the stacked inverses of some layers in their places; ``keeps`` the old ones."""
        found = self.inverse
        if (found is None or keeps) and len(blocks) == len(self.blocks):
            found = new.of([_owned(t) for t in new.tensors])
        else:
            if found is None:
                size = len(self.blocks) * self._groups
                found = new.of([t.new_zeros(size, *t.shape[1:]) for t in new.tensors])
            elif keeps:
                found = found.of([t.clone() for t in found.tensors])
            index = [self.blocks.index(block) for block in blocks]
            places = [parts[i] for parts in self._parts(found) for i in index]
            torch._foreach_copy_(places, list(chain(*self._parts(new))))
        self.inverse = found
        renewed = set(blocks)
        for block, *views in zip(self.blocks, *self._parts(found), strict=True):
            if block in renewed or (keeps and block.inverse is not None):
                block.use(found.of(views))

    def _parts(self, inverse: Inverse) -> list[Sequence[Tensor]]:
        """The parts of each layer in each tensor of an inverse."""
        return [t.unflatten(0, (-1, self._groups)).unbind() for t in inverse.tensors]

    def gradient(self, gradient_of: Gradients | None = None) -> Tensor:
        """The gradients, ``(layers x groups, out, in)``; a view of a single one where it can be.

        A bias without a gradient has zeros.
        """
        found: list[Tensor] = []
        for p in self.params:
            g = p.grad if gradient_of is None else gradient_of(p)
            found.append(torch.zeros(p.shape, dtype=p.dtype, device=p.device) if g is None else g)
        whole = as_matrices(found, self._layout)
        return whole if whole.dtype == self._dtype else whole.to(self._dtype)

    def precondition(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverses, of a dtype, applied to :meth:`gradient`."""
        assert self.inverse is not None
        if gradient.dtype == dtype:
            return self.inverse.precondition(gradient)
        return self.inverse.precondition(gradient.to(dtype)).to(gradient.dtype)

    def by_layer(self, results: Tensor) -> Sequence[Tensor]:
        """The layers' parts, ``(groups, out, in)`` each."""
        layers: Sequence[Tensor] = results.unflatten(0, (len(self.blocks), -1)).unbind()
        return layers

    def pieces(self, results: Tensor, scale: float | None) -> list[Tensor]:
        """The parts of :attr:`params` in results, which are scaled in place.

        On a device they are contiguous, as most gradients are: one kernel writes those of one
        stride.
        """
        if scale is not None:
            results.mul_(scale)
        parts = of_parameters(results, self._layout, len(self.blocks))
        if results.device.type != "cpu":
            parts = [part.contiguous() for part in parts]
        return list(chain(*zip(*(part.unbind() for part in parts), strict=True)))


def _owned(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is a view of a larger batch or message."""
    owned = tensor.is_contiguous() and not tensor._is_view()
    return tensor if owned else tensor.clone(memory_format=torch.contiguous_format)


def of_groups(numbers: Sequence[float | Tensor], groups: int, like: Tensor) -> Any:
    """A number of each layer as one of each group, ``(layers x groups,)``; a float if all have it.

    Layers that are solved beside training may have been begun at steps of different γ.
    """
    first = numbers[0]
    if not isinstance(first, Tensor) and numbers.count(first) == len(numbers):
        return first
    each = torch.stack([n if isinstance(n, Tensor) else like.new_tensor(n) for n in numbers])
    return each.repeat_interleave(groups) if groups > 1 else each


def banks_of(blocks: Iterable[KroneckerBlock]) -> list[Bank]:
    """Banks of layers, in their order."""
    blocks = list(blocks)
    keys: list[object] = []
    shares: list[float] = []
    for block in blocks:
        weight, shape = block.weight, block.shape
        # An L's factors are not multiplied in stacks: such layers are few, and wide.
        alone = block if shape.locations else None
        keys.append((shape, block.work_dtype, weight.dtype, weight.device, block.layout, alone))
        most = CPU_BANK_BYTES if weight.device.type == "cpu" else BANK_BYTES
        shares.append(block.work_dtype.itemsize * math.prod(shape.gradient_size) / most)
    return [Bank([blocks[i] for i in group]) for group in in_groups(keys, shares, 1)]
