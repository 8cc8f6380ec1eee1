"""The model as workers send it to accelerators, which take it over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.parcels import pack_by_dtype, unpack_by_dtype
from second_order.errors import SecondOrderError
from second_order.fosi.vector import ParameterVector

__all__ = ["Subject"]


class Subject:
    """The model whose curvature is computed: parameters that train, and the rest.

    Args:
        training: The training of the model.
        vector: The parameters that train, whole.

    Attributes:
        training: The training of the model.
        vector: The parameters that train, whole.
    """

    def __init__(self, training: Training, vector: ParameterVector) -> None:
        self.training, self.vector = training, vector

    @property
    def train(self) -> list[bool]:
        """Whether each parameter and buffer of the whole model trains."""
        return [t.requires_grad for t in self.training.whole_model()]

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

    def write(self, flat: Tensor) -> None:
        """Set the parameters that train to a flat vector.

        Raises:
            SecondOrderError: If the other processes have more or fewer elements.
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
        """Copies of frozen parameters and buffers, one flat tensor for each dtype."""
        return pack_by_dtype(self._rest())

    def write_rest(self, flats: Sequence[Tensor]) -> None:
        """Set frozen parameters and buffers, from one flat tensor for each dtype.

        Raises:
            SecondOrderError: If the other processes have more or fewer elements.
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
