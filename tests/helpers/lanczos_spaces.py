"""Spaces of a symmetric matrix of any origin, for the tests of the Lanczos recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.lanczos.hvp import RowSpace

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Product:
    """A product that replaces the Hessian's."""

    product: Callable[[Tensor], Tensor]
    size: int
    params: list[Tensor]
    examples: float = 1.0
    loss: float = 0.0
    constant: bool = False


def space_of(
    product: Callable[[Tensor], Tensor],
    size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kind: type[RowSpace] = RowSpace,
) -> RowSpace:
    hessian: Any = Product(product, size, [torch.empty(0, device=device)])
    return kind(hessian, World.alone(), dtype)
