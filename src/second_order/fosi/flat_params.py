"""The trainable parameters as one vector in R^n, complete or sharded by rows.

    row-sharded   a process receives its rows of the mean gradient, the base steps these
                  rows, and all processes receive all rows. Together this moves as much
                  as one all-reduce, and a process stores n/P elements of each of the
                  base's state tensors.
    complete      every process averages, and steps, the complete vector

The flags of :class:`FlatParams` by case:

                          row_sharded  by_rows  base_steps_rows  fsdp_sharded
    one process           no           yes      no               no
    layout="column"       no           no       no               no
    layout="row"          yes          yes      yes              no
    FSDP2, several ranks  yes          yes      no               yes

The vector has the parameters group by group, each in the order of ``p.reshape(-1)``.
This process's rows are copied to a buffer, in which they are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from second_order.distributed.fsdp import (
    is_dtensor,
    local_tensor,
    reshard,
    shard_layout,
)
from second_order.distributed.world import World
from second_order.lanczos.closure import Closures
from second_order.lanczos.hvp import (
    Hessian,
    RowSpace,
    ShardedHessian,
    lanczos_dtype,
    row_slice,
)
from second_order.lanczos.spectrum import check_one_device
from second_order.optimizers.config import FOSIOptions
from second_order.training.context import Training
from second_order.training.curvature import Routed

__all__ = ["FlatParams", "ParamPiece", "all_gather_on_cpu", "check_one_vector"]

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
"""The bases that update every element separately, so that they can step rows."""


@dataclass(frozen=True, eq=False)
class ParamPiece:
    """Contiguous elements of a flattened parameter, which one process steps."""

    param: Tensor
    group: int  # index of the parameter's group
    rank: int  # the process that has the piece; 0 if every process has all of them
    start: int  # index of the first element in the parameter
    size: int  # number of elements
    offset: int  # index of the first element in the vector of all parameters
    is_complete: bool  # whether the piece is the complete parameter

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return this piece of a tensor of the parameter's shape, as a view.

        The view has the parameter's shape if the piece is complete, and else is flat.
        """
        if self.is_complete:
            return tensor
        if is_dtensor(tensor):  # the local shard is the piece
            return local_tensor(tensor).reshape(-1)
        return tensor.view(-1)[self.start : self.start + self.size]


class Buffer(NamedTuple):
    """A vector of the local rows, and its views that the local pieces are copied to."""

    flat: Tensor
    views: list[Tensor]


class FlatParams:
    """The vector of parameters, each process's rows, and the base's step on them.

    Attributes:
        params: The parameters that train, group by group, in order.
        size: n, the number of elements of these parameters.
        dtype: The dtype of the eigenvectors and of the buffer.
        fsdp_sharded: Whether FSDP2 shards the parameters, and averages the gradients.
        row_sharded: Whether each process has its own rows: ``layout="row"`` or FSDP2.
        by_rows: Whether eigenvectors are stored by rows here, not as complete vectors.
        base_steps_rows: Whether the base steps the local rows of complete parameters.
        base_state_in_rows: Whether the base's state has been cut to the local rows.
        pieces: The pieces of all processes, ordered by rank.
        local_pieces: The pieces of this process.
        local_params: The parameters of these pieces, in the same order.
        group_spans: The slice of the local rows that belongs to each parameter group.
    """

    def __init__(self, training: Training, options: FOSIOptions) -> None:
        self._training = training
        self._options = options
        self.model = training.model if training.owns_params else None
        self.lay_out()
        if self.base_steps_rows and type(training.base) not in ELEMENTWISE:
            raise ValueError(
                f"layout='row' on {training.world.size} processes needs an elementwise base, and "
                f"{training.base_name} is not known to be elementwise; use layout='column'"
            )

    def lay_out(self) -> None:
        """Lay out the vector.

        The base's state must be complete, as at the beginning and after a load.
        """
        self.base_state_in_rows = False
        self._buffer: Buffer | None = None

        groups = []
        for group in self._training.groups:
            trainable = [p for p in group["params"] if p.requires_grad]
            groups.append(trainable)
        self.params = list(chain(*groups))
        self.size = sum(p.numel() for p in self.params)
        self.dtype = self._options.lanczos_dtype or lanczos_dtype(self.params)

        world = self._training.world
        self.fsdp_sharded = any(is_dtensor(p) for p in self.params)
        self.row_sharded = world.size > 1 and (
            self._options.layout == "row" or self.fsdp_sharded
        )
        self.by_rows = self.row_sharded or world.size == 1
        self.base_steps_rows = self.row_sharded and not self.fsdp_sharded

        self.pieces = self._cut_params(groups)
        local_rank = world.rank if self.row_sharded else 0
        self.local_pieces = [piece for piece in self.pieces if piece.rank == local_rank]
        self.local_params = [piece.param for piece in self.local_pieces]

        # The local rows of the groups follow each other.
        self.group_spans = []
        stop = 0
        for index in range(len(groups)):
            start = stop
            for piece in self.local_pieces:
                if piece.group == index:
                    stop += piece.size
            self.group_spans.append(slice(start, stop))

    def _cut_params(self, groups: Sequence[Sequence[Tensor]]) -> list[ParamPiece]:
        """Cut the parameters into the pieces of all processes, ordered by rank."""
        world = self._training.world
        num_ranks = 1
        if self.row_sharded:
            num_ranks = world.size
        pieces: list[ParamPiece] = []
        offset = 0  # of the parameter in the vector
        for index, group in enumerate(groups):
            for p in group:
                shards = shard_layout(p, world) if self.fsdp_sharded else None
                for rank in range(num_ranks):
                    if shards is None:
                        rows = row_slice(self.size, num_ranks, rank)
                        start = max(rows.start - offset, 0)
                        size = min(rows.stop - offset, p.numel()) - start
                    else:
                        start = shards.bounds(rank)[0] * shards.width
                        size = shards.size(rank)
                    if size <= 0:
                        continue
                    piece = ParamPiece(
                        param=p,
                        group=index,
                        rank=rank,
                        start=start,
                        size=size,
                        offset=offset + start,
                        is_complete=size == p.numel() and shards is None,
                    )
                    pieces.append(piece)
                offset += p.numel()
        return sorted(pieces, key=lambda piece: piece.rank)

    def update_layout(self) -> bool:
        """Lay out the vector again if other parameters train, or if its dtype changes.

        Collective if it lays out the vector.

        Returns:
            Whether the vector was laid out again.
        """
        trainable = self._training.trainable_params()
        same_params = list(map(id, trainable)) == list(map(id, self.params))
        dtype = self._options.lanczos_dtype or lanczos_dtype(trainable)
        if same_params and dtype == self.dtype:
            return False

        # Gather the base's state, which is cut to the rows of the old layout.
        world = self._training.world
        state: Mapping[Tensor, dict[str, Any]] = {}
        if self.base_state_in_rows:
            state = self.gather_base_state(range(world.size))
        self.lay_out()
        for group in self._training.groups:
            step_on_device = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                if p not in state:
                    continue
                for key, value in state[p].items():
                    # torch's load_state_dict() uses the same devices.
                    if isinstance(value, Tensor) and (key != "step" or step_on_device):
                        state[p][key] = value.to(p.device)
                self._training.base.state[p] = state[p]
        return True

    # -------------------------------------------------------------------------- numbers

    def without_autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager that turns autocast off."""
        kind = self._training.device.type
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
        return nullcontext()

    @property
    def sign(self) -> float:
        """The sign of the loss: −1 if it is maximized, else 1."""
        return -1.0 if self._training.groups[0].get("maximize") else 1.0

    def hessian(self, loss_fn: Closures) -> RowSpace:
        """Return a context manager: the Hessian of a loss on all processes' batches."""
        world = self._training.world
        options = self._options
        if self.fsdp_sharded:
            reshard(self._training.model)
            sharded = ShardedHessian(loss_fn, self.params, world, self.model)
            return RowSpace(sharded, world, self.dtype, self.sign, self.local_rows)
        hessian = Hessian(
            loss_fn,
            self.params,
            mode=options.hvp,
            model=self.model,
            curvature=options.curvature,
        )
        return RowSpace(hessian, world, self.dtype, self.sign)

    def local_rows(self, vectors: Tensor) -> Tensor:
        """Return the local elements of complete vectors ``(..., n)``."""
        parts = []
        for piece in self.local_pieces:
            stop = piece.offset + piece.size
            parts.append(vectors[..., piece.offset : stop])
        return torch.cat(parts, -1) if parts else vectors[..., :0]

    def gather(self, rows: Tensor) -> Tensor:
        """Return complete vectors ``(..., n)`` from all processes' rows.

        Collective if sharded.
        """
        if not self.row_sharded:
            return rows
        vectors = rows.new_empty((*rows.shape[:-1], self.size))
        sizes = [piece.size for piece in self.local_pieces]
        parts_by_rank = all_gather_on_cpu(self._training.world, rows.split(sizes, -1))
        for piece, part in zip(self.pieces, chain(*parts_by_rank), strict=True):
            vectors[..., piece.offset : piece.offset + piece.size] = part
        return vectors

    def read(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Copy the local pieces of tensors to a buffer, which the next read overwrites.

        Args:
            tensors: For each local parameter, a tensor of its shape; None for zeros.

        Returns:
            The buffer, ``(local rows,)``.
        """
        buffer = self._allocated_buffer()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for piece, view, tensor in zip(
            self.local_pieces, buffer.views, tensors, strict=True
        ):
            if tensor is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(piece.view_of(tensor))
        if targets:
            torch._foreach_copy_(targets, sources)
        return buffer.flat

    def write(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy the buffer of the last read to the local pieces; skip None."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        views = self._allocated_buffer().views
        for piece, view, tensor in zip(self.local_pieces, views, tensors, strict=True):
            if tensor is not None:
                targets.append(piece.view_of(tensor))
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _allocated_buffer(self) -> Buffer:
        """Return the buffer, allocated at first use and after a change of device."""
        device = self._training.device
        if self._buffer is None or self._buffer.flat.device != device:
            sizes = [piece.size for piece in self.local_pieces]
            flat = torch.empty(sum(sizes), dtype=self.dtype, device=device)
            views = list(flat.split(sizes))
            for i, piece in enumerate(self.local_pieces):
                if piece.is_complete:
                    views[i] = views[i].view(piece.param.shape)
            self._buffer = Buffer(flat, views)
        return self._buffer

    # --------------------------------------------------------------------------- a step

    def check_gradients(self) -> None:
        """Make gradients contiguous if parts of them are sent.

        Raises:
            TypeError: If a gradient is sparse.
            ValueError: If the base steps rows, and a cut parameter is not contiguous.
        """
        for p in self.params:
            gradient = p.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise TypeError(
                    "a sparse gradient cannot be a part of one vector of all parameters; use "
                    "sparse=False in the embedding"
                )
            if self.base_steps_rows and not gradient.is_contiguous():
                p.grad = gradient.contiguous()

        if not self.base_steps_rows:
            return
        # A piece is a range of memory only if its parameter is contiguous.
        for piece in self.pieces:
            if not (piece.is_complete or piece.param.is_contiguous()):
                raise ValueError(
                    f"layout='row' cuts a parameter of shape {tuple(piece.param.shape)} that is "
                    f"not contiguous (channels_last, or transposed); use layout='column', or make "
                    f"the parameter contiguous"
                )

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Return the pieces of the gradients, and the rank that receives each mean.

        Returns:
            The pieces and their ranks. None: every rank receives every mean.
        """
        if not self.base_steps_rows:
            return None
        gradient_of = dict(zip(params, gradients, strict=True))
        parts = [piece.view_of(gradient_of[piece.param]) for piece in self.pieces]
        return parts, [piece.rank for piece in self.pieces]

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base take its step, with local pieces instead of parameters."""
        if not self.base_steps_rows:
            step()
            return

        # The base's state has the shapes of the local pieces from its first step on.
        local_pieces = {piece.param: piece for piece in self.local_pieces}
        if not self.base_state_in_rows:
            self._cut_base_state(local_pieces)

        # Show the base the local pieces. Restore the complete parameters in any case.
        complete = [(p, p.data, p.grad) for p in self.params]
        try:
            for p, data, gradient in complete:
                p.grad = None
                if p in local_pieces and gradient is not None:
                    p.data = local_pieces[p].view_of(data)
                    p.grad = local_pieces[p].view_of(gradient)
            step()
        finally:
            for p, data, gradient in complete:
                p.data = data
                p.grad = gradient

    def _cut_base_state(self, local_pieces: Mapping[Tensor, ParamPiece]) -> None:
        """Cut the base's state tensors to the local pieces, n/P elements each."""
        state = self._training.base.state
        for p in list(state):
            if p not in local_pieces:
                # The state of a frozen parameter, or of one without elements, stays.
                if p.requires_grad and p.numel():
                    del state[p]
                continue
            for key, value in state[p].items():
                same_shape = isinstance(value, Tensor) and value.shape == p.shape
                if same_shape and key != "step":
                    local_value = local_pieces[p].view_of(value.contiguous())
                    state[p][key] = local_value.clone()
        self.base_state_in_rows = True

    def broadcast_rows(self) -> None:
        """Broadcast each process's rows of the parameters after the base's step."""
        parts = [piece.view_of(piece.param) for piece in self.pieces]
        self._training.world.broadcast(parts, [piece.rank for piece in self.pieces])

    def gather_base_state(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, Any]]:
        """Return the base's complete state on some ranks, an empty one on the others.

        This is a collective if the state is cut to rows.
        """
        world = self._training.world
        state = self._training.base.state
        if not self.base_state_in_rows:
            return dict(state) if world.rank in ranks else {}
        local_state = [dict(state.get(p, {})) for p in self.local_params]
        states_by_rank = all_gather_on_cpu(world, local_state)
        if world.rank not in ranks:
            return {}

        # Join the pieces of each parameter, which come in order. A parameter without
        # elements has no pieces.
        parts: dict[Tensor, dict[str, list[Any]]] = {}
        joined: dict[Tensor, dict[str, Any]] = {}
        for p in self.params:
            if p.numel():
                parts[p] = {}
            else:
                joined[p] = dict(state.get(p, {}))
        for piece, entries in zip(self.pieces, chain(*states_by_rank), strict=True):
            for key, value in entries.items():
                parts[piece.param].setdefault(key, []).append(value)
        for p, values_by_key in parts.items():
            joined[p] = {key: _join(values, p) for key, values in values_by_key.items()}
        return joined


def _join(values: Sequence[Any], p: Tensor) -> Any:
    """Join the state tensors of a parameter's pieces.

    A number is taken from the first piece.
    """
    if not isinstance(values[0], Tensor) or values[0].dim() == 0:
        return values[0]
    return torch.cat([value.reshape(-1) for value in values]).view(p.shape).to(p.device)


def all_gather_on_cpu(world: World, value: Any) -> list[Any]:
    """Gather nested dictionaries and lists of tensors of all ranks. Collective.

    The tensors are sent, and arrive, on the CPU.
    """
    on_cpu = tree_map_only(Tensor, Tensor.cpu, value)
    return world.on_cpu().all_gather_object(on_cpu)


def check_one_vector(training: Training, options: FOSIOptions) -> None:
    """Raise unless the parameters make one vector whose steps can be corrected.

    Raises:
        TypeError: If the base averages parameters, or FSDP2's sharding or the options
            for it are not supported.
        ValueError: If the parameters are on several devices, or ``maximize`` differs.
    """
    groups = training.groups
    base = training.base
    name = training.name
    params = [p for group in groups for p in group["params"]]

    # The vector has one device and one direction, and the base changes it last.
    check_one_device(params)
    if len({bool(group.get("maximize")) for group in groups}) > 1:
        raise ValueError(
            "maximize differs between parameter groups, but eigenvectors span all of them; use "
            "the same maximize for all groups"
        )
    if all(callable(getattr(base, method, None)) for method in ("train", "eval")):
        raise TypeError(
            f"{name} corrects the parameters after its base's step, but {training.base_name}, "
            f"which has train() and eval(), keeps averages of them that the correction does not "
            f"reach; use another base, or KAISA, DPKFAC or DistKFAC"
        )

    # FSDP2 shards by rows, and its hooks support first derivatives only.
    sharded = [p for p in params if is_dtensor(p)]
    if not sharded:
        return
    if len(sharded) < len(params):
        raise TypeError(
            f"{name}: fully_shard has sharded {len(sharded)} of {len(params)} parameters, but one "
            f"vector spans all of them; shard all parameters, without ignored_params"
        )
    if any(cast(Any, p).device_mesh.ndim > 1 for p in sharded):
        raise TypeError(
            f"{name}: the parameters are sharded over a mesh with replicas (HSDP), but each "
            f"process needs its own rows; shard over a mesh of one dimension"
        )
    if options.hvp not in ("auto", "differences") or options.curvature != "hessian":
        raise TypeError(
            f"{name}: hvp={options.hvp!r} with curvature={options.curvature!r} needs more than "
            f"first derivatives of the loss, which are all that FSDP2 supports; use "
            f"hvp='differences' and curvature='hessian', or DistributedDataParallel"
        )
