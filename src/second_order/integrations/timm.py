"""Registration with timm's optimizer factory."""

from __future__ import annotations

import torch
from timm.optim._optim_factory import OptimInfo, default_registry

from second_order.optimizers.distkfac import DistKFAC
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.kaisa import KAISA

__all__ = ["register"]


def register() -> list[str]:
    """Let timm make KAISA, DPKFAC and DistKFAC by name.

        register()
        optimizer = timm.optim.create_optimizer_v2(model, opt="kaisa", lr=0.1, damping=0.1)

    "kaisa" has SGD as its base, with timm's momentum (0.9 by default), and "kaisaadamw" has AdamW.
    DPKFAC and DistKFAC follow the same pattern. All options are keywords, or ``--opt-kwargs`` in
    timm's scripts. DHO2 and MRDHO2 are not registered, because they need a curvature closure.

    Returns:
        The names.
    """
    names = []
    for system in (KAISA, DPKFAC, DistKFAC):
        for base in (torch.optim.SGD, torch.optim.AdamW):
            is_adam = base is torch.optim.AdamW
            name = f"{system.__name__}{'adamw' if is_adam else ''}".lower()
            info = OptimInfo(
                name=name,
                opt_class=system,
                description=f"{system.__name__} over {base.__name__}, of second_order",
                has_eps=is_adam,
                has_betas=is_adam,
                has_momentum=not is_adam,
                defaults={"base": base},
            )
            default_registry.register(info)
            names.append(name)
    return names
