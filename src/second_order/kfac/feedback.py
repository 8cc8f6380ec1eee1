"""What all ranks learn from a refresh.

before preconditioning   s, of the gradient and the last step                (kfac/step_length.py)
after the base's step    one sum over the ranks: s, mean curvatures, what the refresh has changed,
                         and the work of the passes; τ, the mean curvature of all layers, by which
                         γ has its floor, and the intervals follow it
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.kfac.drift import Drift
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import LayerPlan, solve_cost_of
from second_order.kfac.solves import Solves
from second_order.kfac.step_length import StepLength
from second_order.kronecker.block import KroneckerBlock
from second_order.sharded import is_dtensor

__all__ = ["Feedback"]

PRICE = {"inverse": 4.0, "eigen": 15.0}  # operations of a solve over n³ of its factors


class Feedback:
    """What a training follows after its refreshes; the same on every rank.

    Args:
        training: The training to serve.
        options: The options; where nothing follows a refresh, nothing is sent.
        solves: The layers' inverses, and γ.
        drift: The layers' intervals by drift, or None.
        step_length: The length of steps.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        solves: Solves,
        drift: Drift | None,
        step_length: StepLength,
    ) -> None:
        self._training, self._options = training, options
        self._solves, self._drift, self._step_length = solves, drift, step_length

    @property
    def refreshed(self) -> bool:
        """Whether layers have been put to use at this step; the same on every rank."""
        return self._training.steps in self._solves.landed_at.values()

    def measured(self, plan: Mapping[KroneckerBlock, LayerPlan], rows: bool) -> Tensor | None:
        """Compute s at a step with a refresh, before gradients are preconditioned; None elsewhere.

        Args:
            plan: The plan of each layer that trains.
            rows: Whether every rank has rows of all gradients.
        """
        mine = self._mine(plan)
        blocks = [b for b in plan if b in mine or (rows and is_dtensor(b.weight))]
        stepping = [p for block in blocks if block.solved for p in block.params]
        return self._step_length.measured(stepping if self.refreshed else ())

    def keep(self, plan: Mapping[KroneckerBlock, LayerPlan], coming: bool) -> None:
        """Keep what the base's step is scaled from, and looked at by.

        Args:
            plan: The plan of each layer that trains.
            coming: Whether a refresh is due at the next step.
        """
        params = [p for block in plan if block.solved for p in block.params]
        self._step_length.keep(params, asked=self.refreshed or coming)

    def follow(
        self,
        plan: Mapping[KroneckerBlock, LayerPlan],
        blocks: Sequence[KroneckerBlock],
        measured: Tensor | None,
    ) -> None:
        """Let γ, intervals and the length of steps follow a refresh; a collective.

        Args:
            plan: The plan of each layer that trains.
            blocks: These layers, in the same order on every rank.
            measured: What :meth:`measured` has found at this step.
        """
        options, drift, world = self._options, self._drift, self._training.world
        follows = options.by_drift or options.follows_steps or options.damping_floor
        if not self.refreshed or not follows:
            return
        with self._training.meter.stage("agree"):
            mine = self._mine(plan)
            curvature = [b.ensure_factors().mean_curvature() for b in mine if b.factors is not None]
            changes = [] if drift is None else drift.changes_of(blocks, set(mine))
            told = [measured, _total(curvature), *changes]
            work = float(sum(block.state.work for block in mine))
            counts = [float(measured is not None), float(len(curvature)), work]
            numbers = _numbers(told, (1, 1, *(3 for _ in changes)))
            heard = torch.tensor([*counts, *numbers], dtype=torch.float64)
            if world.size > 1:
                world.on_cpu().all_reduce([heard]).wait()
            known, layers, work, s, total, *changed = heard.tolist()
            ours = {id(p) for block in blocks for p in block.params}
            groups = (g for g in self._training.groups if not ours.isdisjoint(map(id, g["params"])))
            rate = max((float(group["lr"]) for group in groups), default=0.0)
            self._step_length.follow(s if known else math.nan, rate, self._training.steps)
            if layers and math.isfinite(total):
                self._solves.mean_curvature = total / layers
            if drift is not None:
                price = PRICE[options.solver] / world.size
                drift.hear(blocks, changed, work, [price * solve_cost_of(b) for b in blocks])

    def _mine(self, plan: Mapping[KroneckerBlock, LayerPlan]) -> list[KroneckerBlock]:
        """The solved layers of which this rank tells."""
        rank = self._training.world.rank
        return [b for b, layer in plan.items() if b.solved and layer.workers[0] == rank]


def _total(scalars: Sequence[Tensor]) -> Tensor | None:
    """The sum of scalars on one device; None if there are none."""
    return torch.stack([each.to(scalars[0].device) for each in scalars]).sum() if scalars else None


def _numbers(tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> list[float]:
    """Entries of tensors, zeros for None, in float64; a device is waited for once."""
    known = [t for t in tensors if t is not None]
    flat = [t.reshape(-1).to(known[0].device, torch.float32) for t in known]
    entries = iter(torch.cat(flat).tolist() if flat else [])
    return [
        0.0 if t is None else float(next(entries))
        for t, size in zip(tensors, sizes, strict=True)
        for _ in range(size)
    ]
