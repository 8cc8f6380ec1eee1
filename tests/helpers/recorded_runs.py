"""Runs that were recorded before the optimizers were rebuilt.

A scene trains one system for eight steps. `data/recorded.pt` has the parameters after each step, as
the package computed them at commit c00e611. To record a scene that is added:

    PYTHONPATH=src:tests:tests/helpers python tests/helpers/recorded_runs.py

Scenes that are recorded stay as they are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from models import ZOO
from optimizer_cases import EXACT, DenseFirst
from ranks import replaced, shard, vector
from reference import cross_entropy
from torch import Tensor, nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

DATA = Path(__file__).parents[1] / "data" / "recorded.pt"
STEPS = 8
BATCH = 12
EARLY = 2  # each of these first steps had a refresh, and its inverses
ADAM: dict[str, Any] = {"base": torch.optim.Adam, "lr": 0.01}
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
# An interval of three, a clip that binds at some steps and not at others.
KFAC: dict[str, Any] = {
    **EXACT,
    "damping": 0.3,
    "damping_floor": 0.0,
    "relative_damping": True,
    "kl_clip": 2e-3,
    "grafting": "none",
    "factor_decay": 0.9,
    "factor_update_steps": DenseFirst(EARLY, 2),
    "inv_update_steps": DenseFirst(EARLY, 3),
}
EIGEN = {"solver": "eigen"}
THREADS: dict[str, Any] = {"deterministic": True, "max_staleness": 2, "inverse_threads": 1}
PAIRS: dict[str, Any] = {"num_largest": 3, "num_smallest": 1, "lanczos_iterations": 111}
SPLIT: dict[str, Any] = {**PAIRS, "lanczos_tol": 1e-12, "warmup_steps": 1, "curvature_interval": 3}
EPOCHS: dict[str, Any] = {
    **PAIRS,
    "lanczos_tol": 1e-12,
    "epoch_steps": 2,
    "newton_scale": 0.1,
    "helper_timeout": 60.0,
}

# By name: the system, the model, its options, and numbers of processes.
SCENES: dict[str, tuple[Any, str, dict[str, Any], tuple[int, ...]]] = {
    "KAISA": (KAISA, "mlp", {**KFAC, **EIGEN, **MOMENTUM}, (1, 2)),
    "KAISA, inverse, Adam": (
        KAISA,
        "conv",
        {**KFAC, **ADAM, "solver": "inverse"},
        (1, 2),
    ),
    "KAISA, one gradient worker": (
        KAISA,
        "mlp",
        {
            **KFAC,
            **EIGEN,
            **MOMENTUM,
            "grad_worker_fraction": 0.5,
            "factor_exchange": "reduce",
        },
        (2,),
    ),
    "KAISA, words": (
        KAISA,
        "embedding",
        {**KFAC, **EIGEN, **MOMENTUM, "kfac_approx": "reduce"},
        (1, 2),
    ),
    "DPKFAC": (DPKFAC, "mlp", {**KFAC, **EIGEN, **MOMENTUM}, (1, 2)),
    "DPKFAC, Adam": (DPKFAC, "conv", {**KFAC, **EIGEN, **ADAM}, (1, 2)),
    "DistKFAC": (DistKFAC, "mlp", {**KFAC, **MOMENTUM, **THREADS}, (1, 2)),
    "DistKFAC, exact blocks": (
        DistKFAC,
        "norms",
        {**KFAC, **MOMENTUM, **THREADS, "precondition_norms": True, "solver": "eigen"},
        (1, 2),
    ),
    "DistKFAC, no staleness": (
        DistKFAC,
        "conv",
        {**KFAC, **ADAM, "async_inverse": False, "solver": "inverse"},
        (1, 2),
    ),
    "DHO2, row": (DHO2, "mlp", {**SPLIT, **MOMENTUM, "layout": "row"}, (1, 2)),
    "DHO2, column, Adam": (DHO2, "mlp", {**SPLIT, **ADAM, "layout": "column"}, (1, 2)),
    "MRDHO2, paper": (MRDHO2, "mlp", {**EPOCHS, **MOMENTUM, "final_update": "paper"}, (2, 3)),
    "MRDHO2, guarded": (MRDHO2, "mlp", {**EPOCHS, **MOMENTUM, "final_update": "guarded"}, (2,)),
}


def run(rank: int, world_size: int, name: str) -> list[Tensor] | None:
    """The parameters after each step on one rank of a scene; None on an accelerator."""
    System, case, options, _ = SCENES[name]
    model: nn.Module = ZOO[case].model()
    batches = ZOO[case].batches(STEPS, n=BATCH)
    curved = ZOO[case].batch(BATCH, seed=99)
    workers = world_size - (System is MRDHO2)
    if System is DHO2:
        part = shard(curved, rank, world_size)
        options = {**options, "curvature_closure": lambda: cross_entropy(model(part[0]), part[1])}
    optimizer = System(model, **options)
    try:
        if getattr(optimizer, "role", "worker") == "accelerator":
            optimizer.serve([curved] * 5, lambda batch: cross_entropy(model(batch[0]), batch[1]))
            return None
        trajectory: list[Tensor] = []
        for step in range(STEPS):
            x, y = shard(batches[step], rank, workers)
            optimizer.zero_grad()
            ZOO[case].loss(model(x), y).backward()
            with at_once(optimizer) if step < EARLY else nullcontext():
                optimizer.step()
            trajectory.append(vector(model))
        return trajectory
    finally:
        if hasattr(optimizer, "close"):
            optimizer.close()


def at_once(optimizer: Any) -> AbstractContextManager[None]:
    """Wait for the solves on threads."""
    if not isinstance(optimizer, DistKFAC):
        return nullcontext()
    return replaced(optimizer._curvature.inverses, {"_must_wait_for": lambda block: True})


def key_of(name: str, processes: int) -> str:
    """The key of a scene in the file."""
    return f"{name}, {processes} process{'es' if processes > 1 else ''}"


def main() -> None:
    from pool import World

    world = World()
    found = torch.load(DATA) if DATA.exists() else {}
    for name, (_, _, _, worlds) in SCENES.items():
        for processes in worlds:
            key = key_of(name, processes)
            if key not in found:
                found[key] = world.run(run, processes, name)[0]
    DATA.parent.mkdir(exist_ok=True)
    torch.save(found, DATA)
    world.close()


if __name__ == "__main__":
    main()
