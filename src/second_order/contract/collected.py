"""State of other processes, collected by ``consolidate`` and kept until the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from second_order.contract.base_state import BASE, CURVATURE
from second_order.contract.curvature import Curvature
from second_order.contract.groups import members_of
from second_order.contract.training import Training
from second_order.distributed.checkpointing import is_checkpointing, is_sharded_checkpoint
from second_order.errors import SecondOrderError
from second_order.sharded import is_dtensor

__all__ = ["Collected"]

Parts: TypeAlias = Mapping[Tensor, Mapping[str, Mapping[str, Any]]]


class Collected:
    """Parts of the state that other processes keep, once they have been collected here."""

    def __init__(self) -> None:
        self._parts: Parts | None = None
        self._to: int | None = None

    def take(self, parts: Parts, to: int | None) -> None:
        """Keep parts for the next ``state_dict``; ``to``: the rank that has all; None: each."""
        self._parts, self._to = parts, to

    def drop(self) -> bool:
        """Drop the collected parts; returns whether there were any."""
        parts, self._parts = self._parts, None
        return bool(parts)

    def require(self, training: Training, curvature: Curvature) -> None:
        """Warn, or raise, where a ``state_dict`` of this process would lack entries.

        Raises:
            SecondOrderError: If nothing has been collected, and it is not
                ``torch.distributed.checkpoint`` that asks for this process's part.
        """
        lacking, rank = curvature.kept_elsewhere, training.world.rank
        rows = any(map(is_dtensor, members_of(training.groups))) and not is_checkpointing()
        if rows and training.world.size > 1 and training.first_time("rows of a state"):
            training.warn(
                "state_dict() of a sharded model has this process's rows of the base's state; save "
                "what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives"
            )
        if not lacking:
            return
        if self._parts is None and not (curvature.parts_suffice and is_sharded_checkpoint()):
            sharded = (
                "save with torch.distributed.checkpoint"
                if curvature.parts_suffice
                else "consolidate(to=None) for torch.distributed.checkpoint"
            )
            raise SecondOrderError(
                f"{training.name}.state_dict() would lack {lacking}; call "
                f"optimizer.consolidate(to=0) on every process first, or {sharded}"
            )
        elsewhere = self._parts is not None and self._to not in (None, rank)
        if elsewhere and training.first_time("partial"):
            training.warn(
                f"state_dict() on rank {rank} lacks some of the state: "
                f"consolidate(to={self._to}) collected it elsewhere; save it there, or use to=None"
            )

    def add_to(self, state: dict[Any, dict[str, Any]], params: Sequence[Tensor]) -> None:
        """Add the collected parts to a state whose keys are the parameters' numbers."""
        for index, p in enumerate(params):
            if self._parts and p in self._parts and index in state:
                parts, entry = self._parts[p], state[index]
                state[index] = {
                    BASE: parts.get(BASE, entry.get(BASE, {})),
                    CURVATURE: {**entry.get(CURVATURE, {}), **parts.get(CURVATURE, {})},
                }
