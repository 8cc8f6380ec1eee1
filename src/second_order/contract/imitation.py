"""Wrappers that imitate an optimizer's class, and the optimizer that they wrap.

Lightning makes a class for each optimizer on the fly, which inherits from the optimizer's own and
passes on whatever it does not have. What reads attributes works on such a wrapper; what assigns
them would change the wrapper and leave the optimizer as it was.
"""

from __future__ import annotations

from typing import TypeVar

import torch

__all__ = ["imitated"]

Wrapper = TypeVar("Wrapper", bound=torch.optim.Optimizer)


def imitated(optimizer: Wrapper) -> Wrapper | None:
    """Find the optimizer that a wrapper imitates; None for an optimizer itself.

    Args:
        optimizer: An optimizer of this package, or an object of a class made of such a one's.
    """
    own = vars(optimizer)
    if "_training" in own:
        return None
    kinds = type(optimizer).__mro__[1:]
    return next((value for value in own.values() if type(value) in kinds), None)
