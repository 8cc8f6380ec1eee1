"""What a system with Kronecker factors has to say: who does which part, and how results travel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from second_order.distributed.assignment import LayerDims
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import Decomposition
from second_order.kronecker.factors import StatisticsSums

__all__ = ["Placement", "layer_dims"]


def layer_dims(blocks: Sequence[KroneckerBlock]) -> list[LayerDims]:
    """What assignment needs to know of layers."""
    shapes = [block.shape for block in blocks]
    return [LayerDims(s.groups, s.in_dim, s.out_dim, s.diagonal_a) for s in shapes]


class Placement:
    """The places and exchanges that a :class:`KFACOptimizer` asks for.

    Layers are given by their index among those that train now.
    """

    def _place(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Decide who works on which of these layers; the same answer on every rank."""
        raise NotImplementedError

    def _solves(self, index: int) -> tuple[bool, bool]:
        """Whether this rank decomposes A and G of an active layer."""
        raise NotImplementedError

    def _ready(self, seen: list[int]) -> list[int]:
        """The layers that are to be solved, the same on every rank.

        Args:
            seen: Those that this rank knows to have statistics.
        """
        return seen

    def _preconditions(self, index: int) -> bool:
        """Whether this rank preconditions an active layer's gradient."""
        raise NotImplementedError

    def _computed_by(self, index: int) -> str:
        """Who works on an active layer, for :meth:`summary`."""
        raise NotImplementedError

    def _keeper(self, index: int) -> tuple[int, int] | None:
        """The ranks that keep A and G of an active layer; None if every rank keeps both."""
        raise NotImplementedError

    def _takes_statistics(self, block: KroneckerBlock) -> bool:
        """Whether this rank's batches go into a layer's factors."""
        return True

    def _exchange_statistics(self, sums: list[StatisticsSums]) -> None:
        """Add statistics over the ranks that contribute, in place.

        Heads for all ranks, factors for those that keep them.

        Args:
            sums: Of the active layers whose statistics this rank takes.
        """
        raise NotImplementedError

    def _exchange_decompositions(
        self, mine: dict[tuple[int, str], Decomposition], ready: Sequence[int]
    ) -> dict[tuple[int, str], Decomposition]:
        """Give every gradient worker the decompositions of its layers.

        Args:
            mine: What this rank decomposed, by (layer, "A" or "G"); failed ones are absent.
            ready: Active layers that were to be solved, the same on every rank.
        """
        raise NotImplementedError

    def _exchange_gradients(
        self, mine: dict[int, Tensor], solved: Sequence[int]
    ) -> dict[int, Tensor]:
        """Give every rank the preconditioned gradients of all ``solved`` layers."""
        raise NotImplementedError
