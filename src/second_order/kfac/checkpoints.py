"""Save the curvature of a K-FAC optimizer, and resume from a checkpoint.

A checkpoint contains the running averages, the inverses, and the numbers that later
steps need. :mod:`second_order.kfac.state` lists the entries of a layer, and says what
shared numbers are. A training run resumes in this order:

    check      raises an error if the entries do not fit; nothing has been loaded yet
    load       loads the state of throttle, drift, step scale and clip, reads the
               remaining shared numbers, and calls ``install``
    install    loads the running averages of layers that have none, installs the saved
               inverses and the state of THOR's rule, and recomputes the inverses that
               were pending
    assign     may come next, before the first step: if the script freezes or unfreezes
               parameters after loading, the optimizer assigns the layers to ranks
               again. This drops all inverses, so the optimizer calls ``install`` again.
    agree      at the first step, requests a refresh of each layer if any rank lacks an
               entry that it needs for this layer. The averages of a layer start again
               if a factor is lost, or if its size changed because the layer's bias was
               frozen or unfrozen.

``load`` and ``install`` return a :class:`Resumption`, which the optimizer keeps until
``agree``. Until then, ``summary()`` and ``metrics()`` show the loaded state, because
``load`` installs the inverses right away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from second_order.checkpoint.caller import caller, is_checkpointing
from second_order.checkpoint.saved import SavedPart
from second_order.kfac.inversion import Inverses
from second_order.kfac.layers import Layers
from second_order.kfac.plan import LayerPlan, StepPlan, contributes
from second_order.kfac.precondition import Clip
from second_order.kfac.schedule import Schedule
from second_order.kfac.state import (
    DAMPING,
    STEP,
    SharedNumbers,
    check_saved,
    factor_entries,
    inverse_entries,
    inverse_state,
    load_inverses,
    read_shared_numbers,
    send_entries,
)
from second_order.kfac.step_scale import StepScale
from second_order.kfac.thor import TraceRefresh
from second_order.kronecker.block import KroneckerBlock
from second_order.training.context import Training

__all__ = ["Checkpoints", "Resumption"]


class _SharedPart(Protocol):
    """A part of the optimizer that saves shared numbers."""

    def saved(self) -> dict[str, float]:
        """Return its shared numbers, by the names of their entries."""

    def load(self, saved: Mapping[Tensor, SavedPart], /) -> None:
        """Load its shared numbers from any layer's part of a checkpoint."""


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that was loaded since the last step.

    Attributes:
        saved: The checkpoint.
        numbers: Its shared numbers.
        missing: The layers for which it lacks an entry that this rank needs.
    """

    saved: Mapping[Tensor, SavedPart]
    numbers: SharedNumbers
    missing: Set[KroneckerBlock] = frozenset()

    def has_same_layers(self, plan: Mapping[KroneckerBlock, LayerPlan]) -> bool:
        """Return whether the same layers train now as when it was written.

        Args:
            plan: The plans of the layers that train now.
        """
        trained = {weight for weight, part in self.saved.items() if STEP in part}
        return trained == {block.weight for block in plan}


class Checkpoints:
    """Saves the state of a K-FAC optimizer, and loads it.

    Args:
        training: The ranks and the step.
        layers: The layers.
        inverses: Their inverses.
        schedule: The throttle and the drift, if they are on.
        traces: THOR's rule, if it is on.
        step_scale: The step scale, if it is on.
        clip: The clip, if it is on.
    """

    def __init__(
        self,
        training: Training,
        layers: Layers,
        inverses: Inverses,
        schedule: Schedule,
        traces: TraceRefresh | None,
        step_scale: StepScale | None,
        clip: Clip | None,
    ) -> None:
        self._training = training
        self._layers = layers
        self._inverses = inverses
        self._drift = schedule.drift
        self._traces = traces
        self._step_scale = step_scale
        candidates: list[_SharedPart | None] = [schedule.throttle, step_scale]
        if clip is not None:
            candidates.append(clip.usual)
        self._shared_parts = [part for part in candidates if part is not None]

    # --------------------------------------------------------------------------- saving

    def state(
        self,
        plan: Mapping[KroneckerBlock, LayerPlan],
        all_plans: Mapping[KroneckerBlock, LayerPlan],
        numbers: SharedNumbers,
    ) -> dict[Tensor, dict[str, Any]]:
        """Return the factors that this rank stores, by weight, and the shared numbers.

        These entries are in ``optimizer.state`` all the time. Checkpoints also have
        those of :meth:`state_to_save`. Tensors are not copied.

        Args:
            plan: The plans of the layers that train now.
            all_plans: The last plans of all layers that ever trained.
            numbers: The shared numbers of the curvature.
        """
        training = self._training
        shared: dict[str, Any] = {}
        for part in self._shared_parts:
            shared |= part.saved()
        shared |= numbers.entries(training.world.size)

        # Before the first step, every rank has the entries of all layers, because
        # torch.distributed.checkpoint loads into existing tensors.
        is_first = training.steps == 0
        state: dict[Tensor, dict[str, Any]] = {}
        for block in self._layers.blocks:
            has_factors = block.factors is not None
            if block not in plan and not has_factors:
                continue
            entries = {**shared, **block.agreed_entries()}
            layer = all_plans.get(block)
            if is_first or (has_factors and contributes(layer, training.world.rank)):
                entries |= block.saved_factors()
            if self._traces is not None:
                entries |= self._traces.saved(block)
            if self._drift is not None:
                entries |= self._drift.saved(block)
            state[block.weight] = entries
        return state

    def state_to_save(
        self, plan: Mapping[KroneckerBlock, LayerPlan]
    ) -> dict[Tensor, dict[str, Any]]:
        """Return what only checkpoints have: inverses and the parameters' last step.

        A resumed run needs them until the next refresh. Tensors are not copied. This
        method waits for the inverses that threads compute.

        Args:
            plan: The plans of the layers that train now.
        """
        inverses = self._inverses
        inverses.inverter.finish()
        # torch.distributed.checkpoint loads in place, so zeros replace absent tensors.
        fill = is_checkpointing(part=True)
        # set_optimizer_state_dict(full_state_dict=True) first gets this rank's state. It
        # raises KeyError if that state lacks a 0-d tensor, even one of another rank.
        is_loading = caller(function="_load_optim_state_dict") is not None
        damping = float(inverses.damping_option)
        if math.isnan(damping):  # there has been no refresh
            damping = -1.0
        state: dict[Tensor, dict[str, Any]] = {}
        for block, layer in plan.items():
            if self._step_scale is not None:
                for p in block.params:
                    state[p] = self._step_scale.saved_step(p, fill)
            entries = inverse_state(block, layer, inverses, fill)
            entries[DAMPING] = damping
            if is_loading:
                entries |= block.saved_factors()
            state.setdefault(block.weight, {}).update(entries)
        return state

    def gather(
        self,
        ranks: Sequence[int],
        plan: Mapping[KroneckerBlock, LayerPlan],
        all_plans: Mapping[KroneckerBlock, LayerPlan],
        numbers: SharedNumbers,
    ) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Send each of ``ranks`` the factors and inverses that it lacks. Collective.

        The other arguments are those of :meth:`state`.
        """
        state = self.state(plan, all_plans, numbers)
        to_save = self.state_to_save(plan)
        gathered: dict[Tensor, dict[str, dict[str, Any]]] = {}
        for block, layer in all_plans.items():
            entries = factor_entries(block, layer)
            if block in plan:
                entries += inverse_entries(block, layer, self._inverses)
            local = {**state.get(block.weight, {}), **to_save.get(block.weight, {})}
            received = send_entries(self._training.world, block, entries, local, ranks)
            gathered[block.weight] = {"curvature": received}
        return gathered

    # -------------------------------------------------------------------------- loading

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if a checkpoint does not fit the layers."""
        check_saved(saved, self._layers.blocks, self._inverses)

    def load(
        self, saved: Mapping[Tensor, SavedPart], step_plan: StepPlan
    ) -> Resumption:
        """Load a checkpoint. The caller sets the shared numbers that the result has.

        Args:
            saved: The checkpoint.
            step_plan: The current plan, whose layers start without inverses.
        """
        training = self._training
        blocks = self._layers.blocks
        for block in blocks:
            block.staged.clear()
            block.restart_averages()
        if self._drift is not None:
            self._drift.load(saved, blocks)
        for part in self._shared_parts:
            part.load(saved)
        self._inverses.restart(step_plan)
        numbers = read_shared_numbers(saved, training.world.size, training.steps)
        return self.install(Resumption(saved, numbers), step_plan.layers)

    def install(
        self, resumption: Resumption, plan: Mapping[KroneckerBlock, LayerPlan]
    ) -> Resumption:
        """Load averages and inverses, and recompute inverses that were pending.

        Call this while the layers are still without inverses.

        Args:
            resumption: The checkpoint.
            plan: The plans of the layers that train now.

        Returns:
            The checkpoint, and the layers that lack an entry that this rank needs.
        """
        saved = resumption.saved
        if self._training.steps > 0:
            for block in self._layers.blocks:
                block.load_factors(saved.get(block.weight, {}))
        loaded = load_inverses(saved, plan, self._inverses)
        self._inverses.load(loaded)
        for block, layer in plan.items():
            part: Mapping[str, Any] = saved.get(block.weight, {})
            block.load_history(part, layer.contributors(self._training.world.size))
        if self._traces is not None:
            self._traces.load(saved, self._layers.blocks)

        # Several ranks agree at the next step on the inverses to drop. A single rank
        # drops them now, so that summary() and metrics() do not count inverses that
        # will be refreshed.
        if self._training.world.size == 1:
            self._inverses.drop(loaded.missing)
        return replace(resumption, missing=loaded.missing)

    def agree(
        self, resumption: Resumption, plan: Mapping[KroneckerBlock, LayerPlan]
    ) -> None:
        """Refresh the layers for which the checkpoint lacks an entry on any rank.

        Collective.

        If the layers that train have changed since the checkpoint was written, refresh
        all layers. An uninterrupted run does the same when you freeze or unfreeze
        layers. If any rank has lost a layer's factor, the layer starts again without
        statistics.

        Args:
            resumption: The checkpoint.
            plan: The plans of the layers that train now.
        """
        training = self._training
        blocks = self._layers.blocks
        missing = resumption.missing
        if not resumption.has_same_layers(plan):
            missing = plan.keys()

        # Does any rank lack the inverse of a layer, or has it lost a factor?
        lacks_inverse = [float(block in missing) for block in blocks]
        lacks_factor = [float(block.has_lost_factor) for block in blocks]
        flags = torch.tensor(
            [lacks_inverse, lacks_factor], dtype=torch.float32, device="cpu"
        )
        training.world.on_cpu().all_reduce_max([flags]).wait()
        inverse_flags, factor_flags = flags.tolist()
        missing_anywhere = list(itertools.compress(blocks, inverse_flags))
        lost = list(itertools.compress(blocks, factor_flags))

        # Request new inverses, and restart the averages of layers that lost a factor.
        self._inverses.drop([*missing_anywhere, *lost])
        for block in lost:
            training.warn(
                f"a factor of layer {block.name!r} is not loaded, so its running averages start "
                f"again. Either the layer's bias was frozen or unfrozen since the factor was "
                f"saved, which changes its size, or the checkpoint lacks the factor, perhaps "
                f"because it was written without consolidate()"
            )
            block.restart_averages()
        if lost:
            self._layers.schedule_all_at(training.steps + 1)
            training.publish()  # without the lost factors
        if (missing_anywhere or lost) and self._drift is not None:
            self._drift.invalidate()  # its tick depends on which layers have inverses

    # ------------------------------------------------------------- state of other ranks

    def has_remote_factors(self, all_plans: Mapping[KroneckerBlock, LayerPlan]) -> bool:
        """Return whether there are factors that only other ranks store.

        Before the first step, this is false, so that Accelerate can read a new
        optimizer's state.

        Args:
            all_plans: The last plans of all layers that ever trained.
        """
        if self._training.world.size == 1 or self._training.steps == 0:
            return False
        return not all(layer.factors_everywhere for layer in all_plans.values())

    def has_remote_inverses(self, plan: Mapping[KroneckerBlock, LayerPlan]) -> bool:
        """Return whether there are inverses that only other ranks store.

        Args:
            plan: The plans of the layers that train now.
        """
        size = self._training.world.size
        return any(
            block.solved and len(layer.workers) < size for block, layer in plan.items()
        )
