"""Process groups that one borrower has to itself: what is sent there meets nothing else.

Collectives of one group must come in the same order on every rank. Two senders that set out in
the middle of passes cannot promise that to each other, so that each has a group of its own. Groups
that come back are lent again: to make one costs a connection to each rank.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from second_order.distributed.groups import group_like
from second_order.distributed.lost import explained
from second_order.distributed.world import World

__all__ = ["Loan", "borrow_group"]

_spare: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Loan:
    """A group on loan: ``world``, of the ranks of the group ``lender``; None with one process.

    Attributes:
        settled: Whether all that this rank has begun to send has been waited for. Else the group
            never comes back: what other ranks have begun there may have no counterpart here.
    """

    def __init__(self, world: World, lender: dist.ProcessGroup | None, number: int) -> None:
        self.world, self.settled = world, True
        self._lender, self._number = lender, number

    def give_back(self) -> None:
        """Let the group be lent again."""
        lender, group = self._lender, self.world.group
        if lender is None or group is None or not self.settled:
            return
        self._lender = None
        if lender in _made:  # not after destroy_process_group()
            _spare.setdefault(lender, {})[self._number] = group


@explained()
def borrow_group(world: World) -> Loan:
    """Lend a group of the same ranks and backend; a collective.

    It is the oldest one that has come back on every rank, or a new one.
    """
    lender = world.group
    if lender is None or world.size == 1:
        return Loan(world, None, 0)
    spare = _spare.setdefault(lender, {})
    everyone = world.all_gather_object((sorted(spare), _made.get(lender, 0)))
    common = set(everyone[0][0]).intersection(*(numbers for numbers, _ in everyone))
    if common:
        number = min(common)
        group = spare.pop(number)
    else:
        world.level()
        number = max(count for _, count in everyone)
        group = group_like(lender, world.global_ranks)
    _made[lender] = max(number + 1, *(count for _, count in everyone))
    own = World.alone(world.rank, world.size)
    own.group = group
    return Loan(own, lender, number)
