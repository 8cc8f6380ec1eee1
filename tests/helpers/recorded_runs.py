"""Runs that were recorded before optimizers were rebuilt, and their checkpoints.

A scene trains one system for eight steps. `data/recorded.pt` has, of each, what the package did at
commit c00e611: the parameters after each step, a checkpoint after the fourth, and the steps that a
new optimizer takes from there. To record anew what a scene that is added does now:

    PYTHONPATH=src:tests python tests/helpers/recorded_runs.py

What is recorded already stays as it is.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from models import ZOO
from optimizer_cases import EXACT, DenseFirst
from ranks import replaced, shard, vector
from reference import cross_entropy
from torch import Tensor, nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data" / "recorded.pt"
STEPS = 8
SAVED_AT = 4
BATCH = 12
EARLY = 2  # steps that were refreshed each, and that waited for their solves
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


def run(rank: int, world_size: int, name: str, saved: dict[str, Any] | None = None) -> Any:
    """One rank of a scene, from its start or from a checkpoint; None on an accelerator.

    Returns:
        The parameters after each step, and what was saved on the way.
    """
    System, case, options, _ = SCENES[name]
    model: nn.Module = ZOO[case].model()
    batches = ZOO[case].batches(STEPS, n=BATCH)
    curved = ZOO[case].batch(BATCH, seed=99)
    workers = world_size - (System is MRDHO2)
    if System is DHO2:
        part = shard(curved, rank, world_size)
        options = {**options, "curvature_closure": lambda: cross_entropy(model(part[0]), part[1])}
    if saved is not None:
        torch.nn.utils.vector_to_parameters(saved["parameters"].clone(), model.parameters())
    optimizer = System(model, **options)
    try:
        if saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        if getattr(optimizer, "role", "worker") == "accelerator":
            optimizer.serve([curved] * 5, lambda batch: cross_entropy(model(batch[0]), batch[1]))
            return None
        trajectory: list[Tensor] = []
        recorded: dict[str, Any] = {}
        for step in range(0 if saved is None else SAVED_AT, STEPS):
            if step == SAVED_AT and saved is None:
                if hasattr(optimizer, "consolidate"):
                    optimizer.consolidate(to=None)
                state = copy.deepcopy(optimizer.state_dict())
                recorded = {"parameters": vector(model), "optimizer": state}
            x, y = shard(batches[step], rank, workers)
            optimizer.zero_grad()
            ZOO[case].loss(model(x), y).backward()
            with at_once(optimizer) if step < EARLY else nullcontext():
                optimizer.step()
            trajectory.append(vector(model))
        return trajectory, recorded
    finally:
        if hasattr(optimizer, "close"):
            optimizer.close()


def at_once(optimizer: Any) -> AbstractContextManager[None]:
    """Wait for the solves on threads."""
    if not isinstance(optimizer, DistKFAC):
        return nullcontext()
    return replaced(optimizer._curvature.inverses, {"_must_wait_for": lambda block: True})


def record(start: Callable[..., Any], name: str, processes: int) -> dict[str, Any]:
    """What a scene does now: `start(function, processes, ...)` gives the ranks' results."""
    trajectory, saved = start(run, processes, name)[0]
    resumed, _ = start(run, processes, name, saved)[0]
    return {"trajectory": trajectory, "saved": saved, "resumed": resumed}


def main() -> None:
    from pool import World

    world = World()
    found = torch.load(DATA) if DATA.exists() else {}
    for name, (_, _, _, worlds) in SCENES.items():
        for processes in worlds:
            key = f"{name}, {processes} process{'es' if processes > 1 else ''}"
            if key not in found:
                start = partial(world.run) if processes > 1 else alone
                found[key] = record(start, name, processes)
    DATA.parent.mkdir(exist_ok=True)
    torch.save(found, DATA)
    world.close()


def alone(function: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """A scene in this process."""
    return [function(0, processes, *arguments)]


if __name__ == "__main__":
    main()
