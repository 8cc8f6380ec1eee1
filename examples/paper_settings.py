"""The settings of the papers, in place of defaults that are ours: what each value is from.

    optimizer = KAISA(model, lr=0.1, momentum=0.9, **paper_settings(KAISA))

Copy what you need; the tests hold the trajectories by these settings to the papers' equations.

[K] Pauloski 2022 (KAISA). [Z] Zhang et al. 2023 (DP-KFAC). [B] Ba, Grosse, Martens 2017 (DistKFAC).
[M] Martens, Grosse 2015 (K-FAC). [D] DHO2 and MR-DHO2, 2025. [F] Sivan et al. 2024 (FOSI), which
[D] spreads over processes. What a paper does not speak of keeps its default.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from second_order import (
    DHO2,
    DPKFAC,
    KAISA,
    MRDHO2,
    DecayingClip,
    DistKFAC,
    SecondOrderOptimizer,
)

__all__ = ["paper_settings"]


def _constant(value: float, step: int) -> float:
    """A number that does not follow the learning rate's schedule, as a plain one does."""
    return value


def paper_settings(
    optimizer: type[SecondOrderOptimizer], *, epoch_steps: int | None = None
) -> dict[str, Any]:
    """The keywords that make an optimizer its paper's algorithm, for its constructor.

    For another value change the dict: a keyword that is given beside it is refused by Python. To
    ``DistKFAC`` give ``damping`` as well, which its paper tunes by hand.

    Args:
        optimizer: The class: KAISA, DPKFAC, DistKFAC, DHO2 or MRDHO2.
        epoch_steps: Steps of an epoch, by which the papers of the last three count.
    """
    if optimizer not in SETTINGS:
        names = ", ".join(known.__name__ for known in SETTINGS)
        raise TypeError(f"{optimizer!r} is of no paper here; give one of the classes {names}")
    settings = dict(SETTINGS[optimizer])
    if optimizer in (KAISA, DPKFAC):
        return settings
    if epoch_steps is None:
        raise ValueError(
            f"the paper of {optimizer.__name__} counts in epochs; give "
            f"paper_settings({optimizer.__name__}, epoch_steps=len(loader))"
        )
    if optimizer is DistKFAC:
        # Sections 5 and 6.2: c₀ ζᵏ, where k grows each half epoch.
        return {**settings, "kl_clip": DecayingClip(0.01, 0.96, max(epoch_steps // 2, 1))}
    # [D] III-D and IV-B: pairs once an epoch; [F]: a warm-up as long.
    every = "epoch_steps" if optimizer is MRDHO2 else "curvature_interval"
    return {**settings, every: epoch_steps, "warmup_steps": epoch_steps}


ABSOLUTE: dict[str, Any] = {
    "relative_damping": False,  # [K] 4.2, [Z] 15, [B] 10
    "preconditioner_scale": "newton",  # [K] 4.3, [Z] 15, [B] 3
    "factor_decay": 0.95,  # [Z] 6.1, [M] 5; [K] names none, and [B] tunes it by hand
}
EXTREME: dict[str, Any] = {
    "largest": 10,  # [F], experiments
    "smallest": 0,
    "newton_scale": partial(_constant, 0.01),  # [F], experiments
    "lanczos_tol": 0.0,  # [D] algorithm 1: as many products each time
    "eigenvalue_floor": 0.0,
}
SETTINGS: dict[type[SecondOrderOptimizer], dict[str, Any]] = {
    KAISA: {
        **ABSOLUTE,
        "damping": 0.003,  # table 6.2
        "kl_clip": partial(_constant, 1e-3),  # 5.1
        "solver": "eigen",  # 4.1 to 4.3
        "factor_update_steps": 1,  # table 6.2, ResNet-34; 50 for ResNet-50
        "inv_update_steps": 10,  # table 6.2, ResNet-34; 500 for ResNet-50; 5.3: ten times as many
    },
    DPKFAC: {
        **ABSOLUTE,
        "assignment": "round_robin",  # 5.1
        "gradient_exchange": "all_reduce",  # algorithm 1, line 5
        "damping": 0.03,  # 6.1; 0.002 for ResNet-50
        "kl_clip": None,  # algorithm 1
        "solver": "eigen",  # 5.3
        "factor_update_steps": 1,  # algorithm 1, lines 8 to 10
        "inv_update_steps": 1,
    },
    DistKFAC: {
        **ABSOLUTE,
        "solver": "inverse",  # 4.1
        "factor_update_steps": 1,  # 6: after each gradient computation
        "inv_update_steps": 20,  # 6.1; on threads they came every 16 to 30 steps
        "fisher": "sampled",  # eq. 1: targets are the network's
        "conv_factors": "cheap",  # 6.2, appendix A
        "doubly_factored": "auto",  # 4
        "exact_blocks": True,  # 6.2.1
    },
    DHO2: {
        **EXTREME,
        "preset": "general",
        "lr_scale_clip": None,  # [F]: 3 for SGD, 1 for Adam
        "lr_scale_guard": False,
        "warm_start": False,  # [D] algorithm 1: from a random vector
        "subspace_momentum": "base",  # [F]
        "trust_region": False,
        "layout": "column",  # [D] algorithm 3
    },
    MRDHO2: {**EXTREME, "final_update": "paper"},  # [D] 17
}
