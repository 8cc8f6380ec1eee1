"""Numbers to log of a step with Kronecker factors.

All are of this process and of the inverses and factors that are here; nothing is sent. A number
that is not known here is NaN, so that every process has the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from second_order.kfac.layers import Layers
from second_order.kfac.plan import LayerPlan
from second_order.kfac.solves import Solves
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.condition import condition_estimate
from second_order.stages import ELSEWHERE

__all__ = ["ACCOUNTS", "NAMES", "statistics_of"]

ACCOUNTS = (
    "statistics",
    "statistics_exchange",
    "solve",
    "solve_exchange",
    "wait",
    "average_gradients",
    "precondition",
    "precondition_exchange",
    "base",
    "compare",
    ELSEWHERE,
)
"""The accounts of seconds and bytes."""

NAMES = (
    "clip",
    "damping",
    "damping/min",
    "damping/max",
    "trace_A/min",
    "trace_A/max",
    "trace_G/min",
    "trace_G/max",
    "condition/min",
    "condition/max",
    "age/inverses",
    "age/statistics",
    "factor_update_steps",
    "inv_update_steps",
    "drift/cosine",
    "drift/cosine/min",
    "drift/interval",
    "drift/length",
    "step_length",
    "layers",
    "layers/solved",
    "layers/failing",
    "layers/under_way",
    "layers/settled",
    "failed",
    "spared",
    "dropped",
)
"""The names of the numbers, but those by account."""


def statistics_of(
    layers: Layers, plan: Mapping[KroneckerBlock, LayerPlan], solves: Solves, step: int
) -> dict[str, float]:
    """Numbers on layers, factors and inverses. Waits for the device.

    Args:
        layers: The layers of the model.
        plan: The layers that train.
        solves: The layers' inverses.
        step: The number of the last step, from 0; -1 before it.
    """
    found = dict.fromkeys(NAMES, math.nan)
    blocks = list(plan)
    solved = [block for block in blocks if block.solved]
    found |= {
        "damping": solves.damping,
        "layers": float(len(blocks)),
        "layers/solved": float(len(solved)),
        "layers/failing": float(sum(block.state.failures > 0 for block in blocks)),
        "layers/under_way": float(len(solves.flights)),
        "layers/settled": float(len(solves.traces.settled)) if solves.traces else 0.0,
        "failed": float(solves.failed),
        "spared": solves.traces.share if solves.traces else math.nan,
        "dropped": float(sum(_numbers([block.staged.dropped for block in layers.blocks]))),
    }
    taken = [solves.taken_at[block] for block in solved if block in solves.taken_at]
    if taken:
        found["age/inverses"] = float(step - min(taken))
    dampings = [solves.dampings[block] for block in solved if block in solves.dampings]
    found |= _range("damping", _numbers(dampings))
    found |= _traces(blocks)
    inverses = [condition_estimate(block) for block in solved if block.inverse is not None]
    found |= _range("condition", _numbers([c for c in inverses if c is not None]))
    return found


def _traces(blocks: Sequence[KroneckerBlock]) -> dict[str, float]:
    """The ranges of tr A and tr G over the layers whose averages are known here."""
    traces: dict[str, list[Tensor]] = {"A": [], "G": []}
    weights = []
    for block in blocks:
        factors, shape = block.factors, block.shape
        if factors is None:
            continue
        weights.append(factors.weight)
        for letter, of_layers in traces.items():
            means = factors.means[shape.letters.index(letter)]
            of_layers.append(means.sum() * shape.dim(letter))
    known = [weight > 0 for weight in _numbers(weights)]
    found: dict[str, float] = {}
    for letter, of_layers in traces.items():
        pairs = zip(_numbers(of_layers), known, strict=True)
        found |= _range(f"trace_{letter}", [trace for trace, is_known in pairs if is_known])
    return found


def _numbers(values: Iterable[Tensor | float]) -> list[float]:
    """Numbers as Python has them; a device is waited for once."""
    listed = list(values)
    tensors = [value for value in listed if isinstance(value, Tensor)]
    if len(tensors) < len(listed):
        return [float(value) for value in listed]
    if not tensors:
        return []
    device = tensors[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    found: list[float] = torch.stack([t.detach().to(device, wide) for t in tensors]).tolist()
    return found


def _range(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/min": min(values), f"{name}/max": max(values)}
