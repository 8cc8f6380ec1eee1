"""The settings of the papers, for users who want the published algorithms.

    from second_order import KAISA
    from second_order.papers import paper_settings

    optimizer = KAISA(model, lr=0.1, momentum=0.9, **paper_settings(KAISA))

Each value has its source next to it:

[K] Pauloski 2022 (KAISA). [Z] Zhang et al. 2023 (DP-KFAC). [B] Ba, Grosse and Martens
2017 (DistKFAC). [M] Martens and Grosse 2015 (K-FAC). [D] DHO2 and MR-DHO2, 2025. [F]
Sivan et al. 2024 (FOSI), the algorithm that [D] distributes.

An option that a paper does not mention keeps our default. Tests compare the
trajectories with these settings to the papers' equations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from second_order.optimizers.base import SecondOrderOptimizer
from second_order.optimizers.config import DecayingClip
from second_order.optimizers.dho2 import DHO2
from second_order.optimizers.distkfac import DistKFAC
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.kaisa import KAISA
from second_order.optimizers.mrdho2 import MRDHO2
from second_order.utils.checks import check_count

__all__ = ["paper_settings"]


def paper_settings(
    optimizer: type[SecondOrderOptimizer], *, epoch_steps: int | None = None
) -> dict[str, Any]:
    """Return the keywords that make an optimizer the algorithm of its paper.

    To use another value for one of them, change the dict. ``DistKFAC`` also needs
    ``damping``, which its paper tunes by hand.

    Args:
        optimizer: The class: KAISA, DPKFAC, DistKFAC, DHO2 or MRDHO2.
        epoch_steps: Steps per epoch. DistKFAC, DHO2 and MRDHO2 need it, because their
            papers give intervals in epochs.

    Raises:
        TypeError: The class is not one of the five, or ``epoch_steps`` is not an integer.
        ValueError: ``epoch_steps`` is missing, or below 1.
    """
    if optimizer not in SETTINGS:
        names = ", ".join(known.__name__ for known in SETTINGS)
        raise TypeError(
            f"no paper settings for {optimizer!r}; pass one of the classes {names}"
        )

    settings = dict(SETTINGS[optimizer])
    if optimizer in (KAISA, DPKFAC):
        return settings

    if epoch_steps is None:
        raise ValueError(
            f"the paper of {optimizer.__name__} gives its intervals in epochs; pass "
            f"paper_settings({optimizer.__name__}, epoch_steps=len(loader))"
        )
    check_count("epoch_steps", epoch_steps, meaning="steps")
    if optimizer is DistKFAC:
        # [B] sections 5 and 6.2: c₀ ζᵏ, where k increases every half epoch.
        half_epoch = max(epoch_steps // 2, 1)
        settings["kl_clip"] = DecayingClip(start=0.01, decay=0.96, every=half_epoch)
    elif optimizer is DHO2:
        # [D] III-D: eigenpairs once per epoch; [F]: a warm-up of one interval.
        settings["curvature_interval"] = epoch_steps
        settings["warmup_steps"] = epoch_steps
    else:
        # [D] IV-B: eigenpairs once per epoch; [F]: a warm-up of one interval.
        settings["epoch_steps"] = epoch_steps
        settings["warmup_steps"] = epoch_steps
    return settings


def _constant(value: float) -> Callable[[int], float]:
    """A schedule with one value.

    A plain number would follow the learning rate's schedule.
    """
    return partial(_value_at, value)


def _value_at(value: float, step: int) -> float:
    return value


ABSOLUTE_DAMPING: dict[str, Any] = {
    "relative_damping": False,  # [K] 4.2, [Z] 15, [B] 10
    "grafting": "none",  # [K] 4.3, [Z] 15, [B] 3
    "factor_decay": 0.95,  # [Z] 6.1, [M] 5; [K] gives none, and [B] tunes it by hand
}
EXTREME_EIGENPAIRS: dict[str, Any] = {
    "num_largest": 10,  # [F], experiments
    "num_smallest": 0,
    "newton_scale": _constant(0.01),  # [F], experiments
    "lanczos_tol": 0.0,  # [D] algorithm 1: the number of products is fixed
    "eigenvalue_floor": 0.0,
}
SETTINGS: dict[type[SecondOrderOptimizer], dict[str, Any]] = {
    KAISA: {
        **ABSOLUTE_DAMPING,
        "damping": 0.003,  # table 6.2
        "kl_clip": _constant(1e-3),  # 5.1
        "solver": "eigen",  # 4.1 to 4.3
        "factor_update_steps": 1,  # table 6.2, ResNet-34; 50 for ResNet-50
        # Table 6.2, ResNet-34; 500 for ResNet-50; 5.3: ten times as many.
        "inv_update_steps": 10,
    },
    DPKFAC: {
        **ABSOLUTE_DAMPING,
        "assignment": "round_robin",  # 5.1
        "gradient_exchange": "all_reduce",  # algorithm 1, line 5
        "damping": 0.03,  # 6.1; 0.002 for ResNet-50
        "kl_clip": None,  # algorithm 1
        "solver": "eigen",  # 5.3
        "factor_update_steps": 1,  # algorithm 1, lines 8 to 10
        "inv_update_steps": 1,
    },
    DistKFAC: {
        **ABSOLUTE_DAMPING,
        "solver": "inverse",  # 4.1
        "factor_update_steps": 1,  # 6: after each gradient computation
        "inv_update_steps": 20,  # 6.1; on threads they arrived every 16 to 30 steps
        "fisher": "categorical",  # eq. 1: labels are sampled from the network
        "conv_factors": "cheap",  # 6.2, appendix A
        "doubly_factored": "auto",  # 4
        "precondition_norms": True,  # 6.2.1
    },
    DHO2: {
        **EXTREME_EIGENPAIRS,
        "lr_scale_clip": None,  # [F]: 3 for SGD, 1 for Adam
        "lr_scale_guard": False,
        "warm_start": False,  # [D] algorithm 1: starts from a random vector
        "subspace_momentum": "base",  # [F]
        "trust_region": False,
        "layout": "column",  # [D] algorithm 3
    },
    MRDHO2: {
        **EXTREME_EIGENPAIRS,
        "final_update": "paper",  # [D] 17
    },
}
