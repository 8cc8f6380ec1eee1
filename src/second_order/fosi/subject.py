"""The model as workers send it to accelerators, which take it over; either may be sharded.

A worker sends what it has: the rows that FSDP2 has left it, and the first worker what is whole on
all. An accelerator takes the elements that it has itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.buckets import unpack_by_dtype
from second_order.distributed.spread import Spread, pack_parts, taken
from second_order.errors import SecondOrderError
from second_order.fosi.vector import ParameterVector
from second_order.sharded import is_dtensor, local, reshard

__all__ = ["Subject"]


class Subject:
    """The model whose curvature is computed: parameters that train, and the rest.

    Args:
        training: The training of the model.
        vector: The parameters that train.

    Attributes:
        training: The training of the model.
        vector: The parameters that train.
    """

    def __init__(self, training: Training, vector: ParameterVector) -> None:
        self.training, self.vector = training, vector

    def _whole_model(self) -> list[Tensor]:
        reshard(self.training.model)  # which may show whole parameters after an evaluation
        return self.training.whole_model()

    # ------------------------------------------------------------------------------ on a worker

    @property
    def forms(self) -> dict[str, list[bool]]:
        """Whether each parameter and buffer of the whole model trains, and is sharded."""
        whole = self._whole_model()
        return {
            "train": [t.requires_grad for t in whole],
            "sharded": [is_dtensor(t) for t in whole],
        }

    @property
    def in_parts(self) -> bool:
        """Whether every process sends a part, and not the first one all."""
        return any(map(is_dtensor, self._whole_model()))

    def rest(self) -> list[Tensor]:
        """Copies of frozen parameters and buffers, as far as this process sends them.

        One flat tensor for each dtype, empty where this process sends none of it.
        """
        return pack_parts(self._rest(), first=self.training.world.rank == 0)

    def _rest(self) -> list[Tensor]:
        mine = set(map(id, self.vector.params))
        return [t for t in self._whole_model() if id(t) not in mine]

    # ------------------------------------------------------------------------- on an accelerator

    def follow(self, train: Sequence[bool]) -> None:
        """Freeze and unfreeze parameters as they are on the workers.

        Raises:
            SecondOrderError: If the workers have more or fewer parameters and buffers.
        """
        whole = self._whole_model()
        if len(train) != len(whole):
            raise SecondOrderError(
                f"the workers have {len(train)} parameters and buffers, this accelerator "
                f"{len(whole)}: build and change the same model on every rank"
            )
        for tensor, trains in zip(whole, train, strict=True):
            if tensor.requires_grad != trains:
                tensor.requires_grad_(trains)
        self.vector.follow()

    def sharded_there(self, sharded: Sequence[bool]) -> Mapping[int, bool]:
        """Whether the workers have sharded a tensor, by its id here.

        Args:
            sharded: What :attr:`forms` says there, of as many tensors as :meth:`follow` takes.
        """
        return {id(t): there for t, there in zip(self._whole_model(), sharded, strict=True)}

    def write(self, parts: Sequence[Tensor], there: Mapping[int, bool]) -> None:
        """Set the parameters that train, from each worker's elements of their vector.

        Args:
            parts: What each worker has sent: one all, or each the rows it has.
            there: As :meth:`sharded_there` tells.

        Raises:
            SecondOrderError: If the other processes have more or fewer elements.
        """
        n, sent = self.vector.layout.size, sum(map(len, parts))
        if sent != n:
            raise SecondOrderError(
                f"the workers train {sent} numbers, this accelerator {n}: add the same groups of "
                f"parameters on every rank"
            )
        flat = self._mine(self.vector.params, parts, there)
        self.vector.overwrite(flat.to(self.vector.device))

    def write_rest(self, parts: Sequence[Sequence[Tensor]], there: Mapping[int, bool]) -> None:
        """Set frozen parameters and buffers, from each worker's :meth:`rest`.

        Raises:
            SecondOrderError: If the other processes have more or fewer elements.
        """
        alike: dict[Any, list[Tensor]] = {}
        for t in self._rest():
            alike.setdefault(t.dtype, []).append(t)
        sizes = {dtype: sum(t.numel() for t in tensors) for dtype, tensors in alike.items()}
        found = [(flats[0].dtype, sum(map(len, flats))) for flats in zip(*parts, strict=True)]
        if found != list(sizes.items()):
            raise SecondOrderError(
                f"what does not train is {found} on the workers and {list(sizes.items())} on this "
                f"accelerator: build and change the same model on every rank"
            )
        flats = [
            self._mine(tensors, of, there)
            for tensors, of in zip(alike.values(), zip(*parts, strict=True), strict=True)
        ]
        unpack_by_dtype(flats, [local(t) for t in self._rest()])

    def _mine(
        self, tensors: Sequence[Tensor], parts: Sequence[Tensor], there: Mapping[int, bool]
    ) -> Tensor:
        """This process's elements of flat tensors, from all workers' parts of them."""
        sharded = [there[id(t)] for t in tensors]
        world = self.training.world
        here = Spread.of(tensors, world.size)
        theirs = Spread(here.shapes, sharded, len(parts))
        mine = here.runs(world.rank)
        try:
            return taken(parts, theirs, mine)
        except ValueError as error:
            raise SecondOrderError(
                f"of the workers {error}: shard the model over a mesh of all workers in their "
                f"order, such as optimizer.worker_group's"
            ) from None
