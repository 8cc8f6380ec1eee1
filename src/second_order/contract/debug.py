"""The option ``debug``: every so many steps, ranks compare what is to be the same on all of them.

    parameters                        those of the model and of the groups
    the base's state                  unless each rank has a part of it
    what the curvature keeps alike    factors, and inverses, where every rank has them

Of parameters that FSDP2 has sharded, ranks that have the same rows compare these. Buffers are left
out: the running averages of a BatchNorm are each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.contract.curvature import Curvature
from second_order.contract.groups import members_of
from second_order.contract.training import Training
from second_order.distributed.checksums import Shared, require_same_bits
from second_order.distributed.rows import rows_of
from second_order.options import check_debug
from second_order.sharded import is_dtensor, local

__all__ = ["Comparison"]

REMEDY = (
    "Nothing has been changed by this step. Load the last checkpoint of before; and look for what "
    "one rank does by itself: it changes parameters or the base's state, its gradients are not "
    "averaged (gradient_averaging=), or its memory or a kernel fails"
)


class Comparison:
    """Compares the ranks' parameters and states, at the steps that the option asks for.

    Args:
        debug: The option: True, False, or a number of steps.

    Attributes:
        every: Number of steps between comparisons; 0 for none.
    """

    def __init__(self, debug: bool | int) -> None:
        self.every = check_debug(debug)
        self._same_at: int | None = None

    def compare(self, training: Training, curvature: Curvature) -> None:
        """Raise on every rank unless all have the same, if it is time; a collective then.

        Raises:
            RankMismatchError: With the first tensor that differs, and the ranks.
        """
        step = training.steps
        if not self.every or step % self.every or training.world.size == 1:
            return
        same_at, self._same_at = self._same_at, None
        ever = same_at is not None and same_at < step
        since = f" (at step {same_at} all was the same)" if ever else ""
        values = list(_shared(training, curvature))
        when = f"before step {step}{since}"
        require_same_bits(training.world, when, values, _rows(training), REMEDY)
        self._same_at = step


def _shared(training: Training, curvature: Curvature) -> Iterator[Shared]:
    names, members = training.names(), members_of(training.groups)
    called = {p: names.get(id(p), f"number {i} of the groups") for i, p in enumerate(members)}
    called |= {p: names[id(p)] for p in training.model.parameters() if id(p) in names}
    for p, name in called.items():
        yield Shared(f"parameter {name!r}", local(p), is_dtensor(p))
    state = {} if curvature.base_in_parts else dict(training.base.state)
    for p in members:
        for key, value in _leaves(state.get(p, {})):
            name = f"the base's {key!r} of parameter {called[p]!r}"
            in_rows = isinstance(value, Tensor) and is_dtensor(value)
            yield Shared(name, local(value) if isinstance(value, Tensor) else value, in_rows)
    for name, tensor in curvature.kept_by_all():
        yield Shared(name, tensor)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Tensor | float]]:
    """Tensors and numbers in nested containers, by where they are."""
    if isinstance(value, Tensor | int | float):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{i}")


def _rows(training: Training) -> list[Any] | None:
    """By rank, the rows that it has of sharded parameters; None if none is sharded."""
    world = training.world
    sharded = [p for p in training.model.parameters() if is_dtensor(p)]
    bounds = [rows_of(p, world).bounds for p in sharded]
    return [tuple(of(rank) for of in bounds) for rank in range(world.size)] if sharded else None
