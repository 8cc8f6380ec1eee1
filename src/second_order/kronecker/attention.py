"""The projections of ``nn.MultiheadAttention``, which multiplies by weights and calls no modules.

Its in-projection is one matrix, of queries, keys and values below each other, and ``out_proj`` is a
Linear that is never called. So no forward hook sees their inputs. What does is the graph that
autograd has recorded of the call: the node of each product with one of these weights has the
product's input, as autograd needs it too, and gets the gradient of its output.

The in-projection is a grouped layer of three groups: A and G of queries, of keys, of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.autograd import current_node, saving_hooks

__all__ = [
    "Assembly",
    "Place",
    "Projection",
    "hosts",
    "inputs_of",
    "is_attention",
    "is_checkpointed",
    "projections",
]

PRODUCTS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
"""Nodes of a product with a weight, whose edge is the last one, and their names of the input."""

LONGEST_PATH = 8  # nodes between a product and its weight: transpose, split, a cast by autocast


def is_attention(module: nn.Module) -> bool:
    """Whether a module projects as ``nn.MultiheadAttention`` does."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    )


def hosts(root: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules whose calls are those of the layers: of an ``out_proj`` its attention's.

    Args:
        root: The model.
        layers: Some of its modules.
    """
    attention = [module for module in root.modules() if is_attention(module)]
    of = {cast(nn.Module, module.out_proj): module for module in attention}
    return list(dict.fromkeys(of.get(layer, layer) for layer in layers))


@dataclass(frozen=True)
class Projection:
    """A product with a weight of an attention, in a call.

    Attributes:
        owner: The module whose weight it is: the attention, or its ``out_proj``.
        node: The product's node in autograd's graph.
        thirds: Of the in-projection, which of queries, keys and values: 0, 1 or 2.
    """

    owner: nn.Module
    node: Any
    thirds: tuple[int, ...]


def projections(
    module: nn.Module, output: Tensor, given: Iterable[Any], owners: Mapping[Tensor, nn.Module]
) -> list[Projection]:
    """The products with the weights of an attention in its last call.

    Args:
        module: The attention.
        output: Its output.
        given: The arguments of the call: the search does not go beyond them.
        owners: The attention or its ``out_proj``, by their parameters as the call has them.
    """
    beyond = {t.grad_fn for t in given if isinstance(t, Tensor)}
    attention = cast(nn.MultiheadAttention, module)
    found: list[Projection] = []
    todo, seen = [output.grad_fn], set(beyond)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        if node.name() in PRODUCTS:
            weight, part = _weight_of(node)
            owner = None if weight is None else owners.get(weight)
            if owner is not None:
                thirds = _thirds(node, part, attention) if owner is module else ()
                found.append(Projection(owner, node, thirds))
    return found


def _weight_of(product: Any) -> tuple[Tensor | None, int]:
    """The parameter that a product multiplies by, and the number of the piece, if it was cut."""
    (node, output), piece = product.next_functions[-1], 0
    for _ in range(LONGEST_PATH):
        if node is None or hasattr(node, "variable"):
            return getattr(node, "variable", None), piece
        if node.name().startswith("Split"):
            piece = output
        if len(node.next_functions) != 1:
            break
        node, output = node.next_functions[0]
    return None, 0


def _thirds(product: Any, piece: int, attention: nn.MultiheadAttention) -> tuple[int, ...]:
    """Which of queries, keys and values a product makes, from the width of its output."""
    width = product._input_metadata[0].shape[-1] // attention.embed_dim
    return (0, 1, 2)[piece : piece + width]


def inputs_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a call, each ``(batch, positions, in)``; views of those given."""
    given = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
    q, k, v = (_batched(module, given[name]) for name in ("query", "key", "value"))
    return q, k, v


def _batched(module: nn.Module, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def is_checkpointed() -> bool:
    """Whether a checkpoint that saves nothing is in force: what a node saves can be read once."""
    hooks: Any = saving_hooks(True)
    return bool(hooks) and hooks[0].__module__ == "torch.utils.checkpoint"


class Place:
    """Where the input of ``out_proj`` is to be found, in the manner of a node that saves it.

    Args:
        node: The product's node; None for that whose gradient is being computed. A hook of a node
            must not hold it: nothing would free the two.
    """

    def __init__(self, node: Any = None) -> None:
        self._node = node

    @property
    def saved_tensors(self) -> tuple[Tensor]:
        """The input, ``(positions batch, in)``, as long as autograd has it."""
        node = current_node() if self._node is None else self._node
        return (getattr(node, PRODUCTS[node.name()]),)


@dataclass
class Assembly:
    """A call's pair, made of those of its products.

    Attributes:
        batch: The number of sequences.
        parts: The products' pairs that have come, by thirds.
    """

    batch: int
    parts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(
        self, projection: tuple[int, ...], x: Tensor, d: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Take a product's pair; returns the call's pair once it is complete.

        Args:
            projection: Which of queries, keys and values the product makes; empty for ``out_proj``.
            x: Its input, ``(batch, positions, in)``, or ``(positions batch, in)``.
            d: The gradient of its output, ``(positions batch, out)``.

        Returns:
            ``(batch, positions, in)`` and ``(batch, positions, out)``; of queries, keys and values
            with unlike inputs, ``(3, batch, positions, in)`` and ``(3, batch, positions, in)``,
            filled up by zeros.
        """
        d = d.unflatten(0, (-1, self.batch)).transpose(0, 1)
        x = x if x.dim() == 3 else x.unflatten(0, (-1, self.batch)).transpose(0, 1)
        if len(projection) in (0, 3):
            return x, d
        for third, each in zip(projection, d.chunk(len(projection), -1), strict=True):
            self.parts[third] = x, each
        if len(self.parts) < 3:
            return None
        parts, self.parts = [self.parts[third] for third in range(3)], {}
        longest = max(x.shape[1] for x, _ in parts)
        xs, ds = zip(*parts, strict=True)
        return _stacked(xs, longest), _stacked(ds, longest)


def _stacked(tensors: Sequence[Tensor], positions: int) -> Tensor:
    pad = nn.functional.pad
    return torch.stack([pad(t, (0, 0, 0, positions - t.shape[1])) for t in tensors])
