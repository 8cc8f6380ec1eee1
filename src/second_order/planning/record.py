"""One rank's step, run by the optimizer's own code in a world that sends nothing.

The optimizer is real: it is built on a copy of the model, as one rank of a pretended process group,
and takes two steps with all that can be due. Collectives record what they are handed, and return.
A simulated clock advances by what each operation and each message takes on the machine that is
planned for, and that time is counted by stage. Large products, convolutions and
decompositions are not computed: their results are positive numbers of no meaning.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from second_order.distributed.world import World
from second_order.kfac.plan import LayerPlan
from second_order.kfac.solve_async import WorkerPool
from second_order.kronecker import layers
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.layers import FactorShape
from second_order.planning.machine import Interconnect, Machine
from second_order.stages import recorded_by

__all__ = ["ELSEWHERE", "Record", "Simulation", "loss_of", "record"]

ELSEWHERE = "elsewhere"
"""The place of a stage's name for what is in none: forward and backward."""

LARGE = 2**14
"""Elements of an operand from which on dense operations are not computed."""

aten = torch.ops.aten
EIGH, CHOLESKY = aten._linalg_eigh, aten.linalg_cholesky_ex
GRAM = layers.gram
# The seconds of Cholesky are with the inverse from its factor.
DECOMPOSITIONS = {EIGH, CHOLESKY, aten.cholesky_inverse}


@dataclass(frozen=True)
class Record:
    """One rank at a step with statistics and a refresh.

    Attributes:
        seconds: Simulated seconds by stage; "elsewhere" are forward and backward.
        sent: Bytes handed to ``torch.distributed``, by stage.
        hidden: Simulated seconds of solves on threads.
        kept: Bytes of tensors that are there after the step: of optimizer and gradients.
        peak: Bytes at the highest, above the model itself.
        covers_middle: Whether the rank in the middle of the world has no duty beyond this rank's.
    """

    seconds: Mapping[str, float]
    sent: Mapping[str, float]
    hidden: float
    kept: int
    peak: int
    covers_middle: bool


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments or results of an operation, and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_in(value)
    return found


def _described(value: Any) -> Any:
    """Arguments as a key: tensors by shape and dtype."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Let the collector look at the objects only that are made here: seconds instead of minutes."""
    if gc.get_freeze_count():  # they would be unfrozen as well
        yield
        return
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class _Gram:
    """The result's shape and the cost of a large Gram matrix of one shape.

    Attributes:
        shape: The shape of the result.
        seconds: Simulated seconds.
        peak: Bytes at the highest, above those before.
    """

    shape: torch.Size
    seconds: float
    peak: int


class Simulation(TorchDispatchMode):
    """A clock that operations and messages advance, and the memory of tensors."""

    def __init__(self, machine: Machine, links: Interconnect | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine, self.links = machine, links
        self.clock = self.hidden = 0.0
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by id
        self.begin_step()
        self._noise = torch.empty(0, dtype=torch.float32, device="cpu")
        # By the operands' shapes of dense operations, because many layers have equal shapes.
        self._shapes: dict[Any, Any] = {}
        self._seconds: dict[Any, float] = {}
        self._grams: dict[Any, _Gram] = {}

    def begin_step(self) -> None:
        """Count peak memory, time and messages from here on."""
        self.peak = self.now
        self.hidden = 0.0
        self.seconds: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self._stage = ELSEWHERE
        self._stage_began = self.clock

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time meanwhile as that of a stage."""
        outer = self._stage
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str) -> None:
        spent = self.clock - self._stage_began
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + spent
        self._stage = name
        self._stage_began = self.clock

    def count_sent(self, nbytes: int) -> None:
        """Count bytes that the rank hands to others in a stage."""
        self.sent[self._stage] = self.sent.get(self._stage, 0) + nbytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps the next method, which takes a third of its time. Where a mode is active,
        # torch compiles nothing anyway.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:  # three of four operations: they take no time, and no memory
            return func(*args, **kwargs)
        name = func.overloadpacket
        dense = name in flop_registry or name in DECOMPOSITIONS
        operands = _tensors_in((*args, *kwargs.values()))
        key = (func, _described(args), _described(tuple(kwargs.items()))) if dense else None
        if dense and max(t.numel() for t in operands) > LARGE:
            result = self._pretended(func, args, kwargs, operands[0].device, key)
        else:
            result = func(*args, **kwargs)
        made = _tensors_in((result,))
        machine, nbytes = self.machine, sum(t.nbytes for t in (*operands, *made))
        kernel, host = nbytes / machine.bandwidth, machine.launch + machine.python
        if dense:
            if key not in self._seconds:
                self._seconds[key] = self._dense(name, args, kwargs, result)
            kernel = max(kernel, self._seconds[key])
        self.clock += kernel + host if machine.device == "cpu" else max(kernel, host)
        old = {id(t.untyped_storage()) for t in operands}
        for storage in (t.untyped_storage() for t in made):
            if id(storage) not in old and id(storage) not in self._known:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage from now on until it is freed."""
        key, nbytes = id(storage), storage.nbytes()

        def freed(_: Any) -> None:
            del self._known[key]
            self.now -= nbytes

        self._known[key] = weakref.ref(storage, freed)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _pretended(self, func: Any, args: Any, kwargs: Any, device: torch.device, key: Any) -> Any:
        """A result of the right shape, and of positive numbers; status words are 0."""
        out = kwargs.get("out")
        if key not in self._shapes:
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
            self._shapes[key] = func(*args, **kwargs)
        shapes = self._shapes[key]

        def fill(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return torch.zeros(x.shape, dtype=x.dtype, device=device)
            if self._noise.numel() < x.numel():
                seed = torch.Generator().manual_seed(0)
                noise = torch.rand(x.numel(), generator=seed, dtype=torch.float32, device="cpu")
                self._noise = noise.to(device) + 0.1
            return self._noise[: x.numel()].view(x.shape).to(x.dtype, copy=True)

        found = tree_map_only(Tensor, fill, shapes)
        return found if out is None else out.copy_(found)

    def gram(
        self, x: Tensor, homogeneous: bool, triangular: bool, ones: int | Tensor | None = None
    ) -> Tensor:
        """Stand in for :func:`second_order.kronecker.layers.gram`.

        One Gram matrix takes some hundred operations, and a layer's costs as much as that of the
        next layer of its shape. Only the first one of each shape runs, operation by operation.
        """
        key = (_described(x), homogeneous, triangular, _described(ones))
        known = self._grams.get(key)
        if known is not None:
            clock = self.clock + known.seconds
            self.peak = max(self.peak, self.now + known.peak)
            result = x.new_ones(known.shape)  # no negative eigenvalue
            self.clock = clock
            return result

        clock = self.clock
        before = self.now
        peak = self.peak
        self.peak = before
        result = GRAM(x, homogeneous, triangular, ones)
        if result.numel() > LARGE:
            self._grams[key] = _Gram(result.shape, self.clock - clock, self.peak - before)
        self.peak = max(self.peak, peak)
        return result

    def _dense(self, name: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Seconds of a dense operation."""
        x = _tensors_in(args)[0]
        n, count = x.shape[-1], x.shape[:-2].numel()
        if name in (EIGH, CHOLESKY):
            seconds = count * self.machine.decomposition("eigen" if name is EIGH else "inverse", n)
        elif name in DECOMPOSITIONS:
            seconds = 0.0
        else:
            seconds = self.machine.dense(flop_registry[name](*args, **kwargs, out_val=result))
        return (2.0 if x.dtype is torch.float64 else 1.0) * seconds

    def message(self, verb: str, ranks: Sequence[int], *sizes: int) -> None:
        """Let the time of a collective pass."""
        assert self.links is not None
        self.clock += getattr(self.links, verb)(*sizes, ranks)

    def aside(self, work: Callable[[], Any]) -> Future[Any]:
        """Do at once what a thread would do, and count its time apart."""
        before, ticket = self.clock, Future[Any]()
        ticket.set_result(work())
        self.hidden += self.clock - before
        self.clock = before
        return ticket


@dataclass(frozen=True)
class _Done:
    """The message of a world that sends nothing."""

    def wait(self) -> None:
        """Return at once."""


class PlannedWorld(World):
    """One rank of a world whose other ranks are as if they were like it; nothing is sent.

    It is not a process group of ``torch.distributed``, which may be initialized or not.
    """

    planned = True

    def __init__(self, simulation: Simulation, ranks: Sequence[int], rank: int) -> None:
        self.group = None
        self.rank = rank
        self.size = len(ranks)
        self._simulation = simulation
        self._ranks = ranks

    @property
    def global_ranks(self) -> list[int]:
        """The ranks as the whole world numbers them."""
        return list(self._ranks)

    @property
    def backend(self) -> str:
        """The name that torch gives to a backend that sends nothing."""
        return "fake"

    def subgroup(
        self, ranks: Sequence[int], *, grouped: bool = False, timeout: timedelta | None = None
    ) -> PlannedWorld:
        """The world of some of these ranks."""
        del grouped, timeout
        members = [self._ranks[rank] for rank in ranks]
        return PlannedWorld(self._simulation, members, ranks.index(self.rank))

    def aside(self) -> World:
        """No other rank: what is compared on the way costs next to nothing."""
        return World.alone()

    def all_gather_object(self, value: Any) -> list[Any]:
        """This rank's value for every rank."""
        return [value] * self.size

    def _all_reduced(self, flat: Tensor, op: Any = None) -> Any:
        self._simulation.count_sent(flat.nbytes)
        self._simulation.message("all_reduce", self._ranks, flat.nbytes)
        return _Done()

    def _broadcast_from_first(self, flat: Tensor) -> None:
        self._simulation.count_sent(flat.nbytes if self.rank == 0 else 0)
        self._simulation.message("all_reduce", self._ranks, flat.nbytes)

    def _all_to_all_single(
        self, buffer: Tensor, flat: Tensor, received: list[int], parts: list[int]
    ) -> Any:
        self._simulation.count_sent(flat.nbytes)
        self._simulation.message("all_to_all", self._ranks, flat.nbytes, buffer.nbytes)
        own = parts[self.rank]
        if own and set(received) == {own}:  # as if all ranks were alike
            buffer.view(len(received), -1).copy_(flat.split(parts)[self.rank])
        else:  # a matrix of ones has no negative eigenvalue
            buffer.fill_(1.0)
        return _Done()


def loss_of(output: Any) -> Tensor:
    """The mean square of a model's outputs, in place of a loss: its cost is next to nothing."""
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs:
        raise ValueError("no output of the model depends on a parameter that trains")
    return torch.stack([t.float().square().mean() for t in outputs]).sum()


def duties_of(
    plan: Mapping[KroneckerBlock, LayerPlan], rank: int
) -> Counter[tuple[str, FactorShape]]:
    """How many layers of each shape a rank has each duty for."""
    duties = Counter[tuple[str, FactorShape]]()
    for block, layer in plan.items():
        keeps_A, keeps_G = layer.keeps(rank)
        has = {
            "statistics": layer.source in (None, rank),
            "keep A": keeps_A,
            "keep G": keeps_G,
            "solve A": layer.solver("A") == rank,
            "solve G": layer.solver("G") == rank,
            "precondition": rank in layer.workers,
        }
        duties.update((duty, block.shape) for duty, is_so in has.items() if is_so)
    return duties


def record(
    make: Callable[..., Any],
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    machine: Machine,
    links: Interconnect,
    rank: int = 0,
    ranks: int = 1,
) -> Record:
    """Have one rank of so many take two steps, and return what the second one takes.

    ``make`` makes the optimizer of a copy of the model and a ``process_group``; everything is due
    at every step. ``run`` runs the model on a batch.
    """
    with _only_new_garbage():
        return _recorded(make, model, run, Simulation(machine, links), range(ranks), rank)


def _recorded(
    make: Callable[..., Any],
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    simulation: Simulation,
    ranks: Sequence[int],
    rank: int,
) -> Record:
    """Take the two steps and read the clock."""
    model = copy.deepcopy(model).train()
    with (
        warnings.catch_warnings(action="ignore"),  # of a training that nobody sees
        patch.object(WorkerPool, "submit", lambda _, work: simulation.aside(work)),
        patch.object(layers, "gram", simulation.gram),  # a Linear's statistics look it up there
        torch.enable_grad(),
    ):
        with simulation:
            optimizer = make(model, process_group=PlannedWorld(simulation, ranks, rank))
        try:
            plan = optimizer._curvature.plan
            middle_duties = duties_of(plan, len(ranks) // 2)
            covers_middle = middle_duties <= duties_of(plan, rank)
            with simulation, recorded_by(simulation.stage):
                for _ in range(2):
                    optimizer.zero_grad()
                    gc.collect()  # of tensors that only circles hold
                    simulation.begin_step()
                    loss_of(run(model)).backward()
                    optimizer.step()
            gc.collect()
            kept = simulation.now
        finally:
            optimizer.close()
    seconds = {name: spent for name, spent in simulation.seconds.items() if spent}
    seconds.setdefault(ELSEWHERE, 0.0)
    return Record(seconds, simulation.sent, simulation.hidden, kept, simulation.peak, covers_middle)
