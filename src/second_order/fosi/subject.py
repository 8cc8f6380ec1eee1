"""The model whose curvature accelerators compute: parameters that train, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.parcels import pack_by_dtype, unpack_by_dtype
from second_order.errors import SecondOrderError
from second_order.fosi.vector import ParameterVector

__all__ = ["Subject"]


class Subject:
    """The model as worker 0 sends it to accelerators, which take it over.

    Args:
        training: The training of the model.
        vector: The parameters that train.

    Attributes:
        training: The training of the model.
        vector: The parameters that train.
    """

    def __init__(self, training: Training, vector: ParameterVector) -> None:
        self.training, self.vector = training, vector

    def trains(self) -> list[bool]:
        """Whether each parameter and buffer of the whole model trains."""
        return [t.requires_grad for t in self.training.whole_model()]

    def rest(self) -> list[Tensor]:
        """Copies of frozen parameters and buffers, in one flat tensor for each dtype."""
        return pack_by_dtype(self._rest())

    def _rest(self) -> list[Tensor]:
        mine = set(map(id, self.vector.params))
        return [t for t in self.training.whole_model() if id(t) not in mine]

    def follow(self, train: Sequence[bool]) -> None:
        """Freeze and unfreeze parameters as they are on the workers.

        Raises:
            SecondOrderError: If the workers have more or fewer parameters and buffers.
        """
        whole = self.training.whole_model()
        if len(train) != len(whole):
            raise SecondOrderError(
                f"the workers have {len(train)} parameters and buffers, this accelerator "
                f"{len(whole)}: build and change the same model on every rank"
            )
        for tensor, trains in zip(whole, train, strict=True):
            if tensor.requires_grad != trains:
                tensor.requires_grad_(trains)
        self.vector.follow()

    def write(self, flat: Tensor, rest: Sequence[Tensor]) -> None:
        """Set the parameters that train from their vector, and the rest from :meth:`rest`.

        Raises:
            SecondOrderError: If the workers have more or fewer numbers.
        """
        n = self.vector.layout.size
        if len(flat) != n:
            raise SecondOrderError(
                f"the workers train {len(flat)} numbers, this accelerator {n}: add the same groups "
                f"of parameters on every rank"
            )
        self.vector.overwrite(flat.to(self.vector.device))
        into, sent = self._rest(), sum(map(len, rest))
        here = sum(t.numel() for t in into)
        if sent != here:
            raise SecondOrderError(
                f"what does not train is {sent} numbers on the workers and {here} on this "
                f"accelerator: build and change the same model on every rank"
            )
        unpack_by_dtype(rest, into)
