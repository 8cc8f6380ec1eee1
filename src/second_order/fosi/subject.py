"""What workers tell accelerators of the model, and accelerators take over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.parcels import pack_by_dtype, unpack_by_dtype
from second_order.errors import SecondOrderError
from second_order.fosi.vector import ParameterVector

__all__ = ["Subject"]


class Subject:
    """Whose curvature it is: the parameters that train, and the rest of the model.

    Args:
        training: Whose model it is.
        vector: The parameters that train, whole.

    Attributes:
        training: As it was given.
        vector: Likewise.
    """

    def __init__(self, training: Training, vector: ParameterVector) -> None:
        self.training, self.vector = training, vector

    @property
    def train(self) -> list[bool]:
        """Which of the whole model train."""
        return [t.requires_grad for t in self.training.whole_model()]

    def follow(self, train: Sequence[bool]) -> None:
        """Let the same train here from now on as on the workers.

        Raises:
            SecondOrderError: If they have more or fewer parameters and buffers.
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

    def write(self, flat: Tensor) -> None:
        """Set the parameters that train.

        Raises:
            SecondOrderError: If there are more or fewer of them elsewhere.
        """
        n = self.vector.layout.size
        if len(flat) != n:
            raise SecondOrderError(
                f"the workers train {len(flat)} numbers, this accelerator {n}: add the same groups "
                f"of parameters on every rank"
            )
        self.vector.overwrite(flat.to(self.vector.device))

    def _rest(self) -> list[Tensor]:
        mine = set(map(id, self.vector.params))
        return [t for t in self.training.whole_model() if id(t) not in mine]

    def rest(self) -> list[Tensor]:
        """Copies of what does not train, one flat tensor for each dtype."""
        return pack_by_dtype(self._rest())

    def write_rest(self, flats: Sequence[Tensor]) -> None:
        """Set what does not train.

        Raises:
            SecondOrderError: If there is more or less of it elsewhere.
        """
        rest = self._rest()
        sizes = dict.fromkeys((t.dtype for t in rest), 0)
        for t in rest:
            sizes[t.dtype] += t.numel()
        found = [(t.dtype, t.numel()) for t in flats]
        if found != list(sizes.items()):
            raise SecondOrderError(
                f"what does not train is {found} on the workers and {list(sizes.items())} on this "
                f"accelerator: build and change the same model on every rank"
            )
        unpack_by_dtype(flats, rest)
