"""One rank's step, run by the optimizer's own code in a world that sends nothing.

The optimizer is real: it is built on a copy of the model, as one rank of a pretended process group,
and takes two steps with all that can be due. Collectives record what they are handed, and return.
A simulated clock advances by what each operation and each message takes on the machine that is
planned for; the optimizer's own meter reads that clock. Large products, convolutions and
decompositions are not computed: their results are positive numbers of no meaning.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from second_order.kfac.solve_async import WorkerPool
from second_order.kronecker import decompositions
from second_order.planning.machine import Interconnect, Machine
from second_order.stages import ELSEWHERE, PAPER_NAMES

__all__ = ["Record", "Simulation", "loss_of", "record"]

LARGE = 2**14
"""Elements of an operand from which on dense operations are not computed."""

aten = torch.ops.aten
EIGH, CHOLESKY = aten._linalg_eigh, aten.linalg_cholesky_ex
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
    """

    seconds: Mapping[str, float]
    sent: Mapping[str, float]
    hidden: float
    kept: int
    peak: int


class Simulation(TorchDispatchMode):
    """A clock that operations and messages advance, and the memory of tensors."""

    def __init__(self, machine: Machine, links: Interconnect | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine, self.links = machine, links
        self.clock = self.hidden = 0.0
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._noise = torch.empty(0, device="cpu")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket
        dense = name in flop_registry or name in DECOMPOSITIONS
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if dense and max(t.numel() for t in operands) > LARGE:
            result = self._pretended(func, args, kwargs, operands[0].device)
        else:
            result = func(*args, **kwargs)
        if func.is_view:
            return result
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        machine, nbytes = self.machine, sum(t.nbytes for t in (*operands, *made))
        kernel = self._dense(name, args, kwargs, result) if dense else 0.0
        kernel, host = max(kernel, nbytes / machine.bandwidth), machine.launch + machine.python
        self.clock += kernel + host if machine.device == "cpu" else max(kernel, host)
        old = {id(t.untyped_storage()) for t in operands}
        for storage in (t.untyped_storage() for t in made):
            if id(storage) not in old and storage not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._give_back, storage.nbytes())
        return result

    def _give_back(self, nbytes: int) -> None:
        self.now -= nbytes

    def _pretended(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """A result of the right shape, and of positive numbers; status words are 0."""
        out = kwargs.get("out")
        args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        shapes = func(*args, **kwargs)

        def fill(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return torch.zeros(x.shape, dtype=x.dtype, device=device)
            if self._noise.numel() < x.numel():
                seed = torch.Generator().manual_seed(0)
                self._noise = torch.rand(x.numel(), generator=seed, device="cpu").to(device) + 0.1
            return self._noise[: x.numel()].view(x.shape).to(x.dtype, copy=True)

        found = tree_map_only(Tensor, fill, shapes)
        return found if out is None else out.copy_(found)

    def _dense(self, name: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Seconds of a dense operation."""
        x = next(t for t in tree_leaves(args) if isinstance(t, Tensor))
        n, count = x.shape[-1], x.shape[:-2].numel()
        if name in (EIGH, CHOLESKY):
            seconds = count * self.machine.decomposition("eigen" if name is EIGH else "inverse", n)
        elif name in DECOMPOSITIONS:
            seconds = 0.0
        else:
            seconds = self.machine.dense(flop_registry[name](*args, **kwargs, out_val=result))
        return (2.0 if x.dtype is torch.float64 else 1.0) * seconds

    def message(self, verb: str, group: Any, *sizes: int) -> None:
        """Let the time of a collective pass."""
        assert self.links is not None
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.clock += getattr(self.links, verb)(*sizes, ranks)

    def aside(self, work: Callable[[], Any]) -> Future[Any]:
        """Do at once what a thread would do, and count its time apart."""
        before, ticket = self.clock, Future[Any]()
        ticket.set_result(work())
        self.hidden += self.clock - before
        self.clock = before
        return ticket


@contextmanager
def _pretended(simulation: Simulation, rank: int, ranks: int) -> Iterator[None]:
    """Be one rank of a world whose others are pretended to be like it."""
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            "a plan pretends process groups, and torch.distributed is initialised here; plan in a "
            "process of its own, with the machine and the network that calibrate() has measured"
        )
    if ranks == 1:
        yield
        return

    done = SimpleNamespace(wait=lambda: None)  # nothing travels

    def all_reduce(x: Tensor, *_: Any, group: Any = None, **__: Any) -> Any:
        simulation.message("all_reduce", group, x.nbytes)
        return done

    def all_to_all_single(
        output: Tensor, x: Tensor, received: list[int], sent: list[int], group: Any = None, **_: Any
    ) -> Any:
        here = dist.get_rank(group)
        simulation.message("all_to_all", group, x.nbytes, output.nbytes)
        if sent[here] and set(received) == {sent[here]}:  # as if all were alike
            output.view(len(received), -1).copy_(x.split(sent)[here])
        else:  # a matrix of ones has no negative eigenvalue
            output.fill_(1.0)
        return done

    def all_gather(output: Tensor, x: Tensor, group: Any = None, **_: Any) -> Any:
        simulation.message("all_gather", group, x.nbytes)
        output.view(-1, x.numel()).copy_(x.view(1, -1).expand(output.numel() // x.numel(), -1))
        return done

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    dist.init_process_group("fake", rank=rank, world_size=ranks)
    verbs: dict[str, Any] = {
        **dict.fromkeys(("all_reduce", "broadcast"), all_reduce),
        **dict.fromkeys(("all_gather_single", "all_gather_into_tensor"), all_gather),
        "all_to_all_single": all_to_all_single,
        "all_gather_object": all_gather_object,
    }
    try:
        with patch.multiple(dist, **{k: v for k, v in verbs.items() if hasattr(dist, k)}):
            yield
    finally:
        dist.destroy_process_group()


def loss_of(output: Any) -> Tensor:
    """The mean square of a model's outputs, in place of a loss: its cost is next to nothing."""
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs:
        raise ValueError("no output of the model depends on a parameter that trains")
    return torch.stack([t.float().square().mean() for t in outputs]).sum()


def record(
    make: Callable[[nn.Module], Any],
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    machine: Machine,
    links: Interconnect,
    rank: int = 0,
    ranks: int = 1,
) -> Record:
    """Have one rank of so many take two steps, and tell what the second one takes.

    ``make`` makes the optimizer, of which all is due at every step, of a copy of the model, which
    ``run`` runs on a batch.
    """
    model = copy.deepcopy(model).train()
    simulation = Simulation(machine, links)
    with (
        warnings.catch_warnings(action="ignore"),  # of a training that nobody sees
        _pretended(simulation, rank, ranks),
        patch.object(WorkerPool, "submit", lambda _, work: simulation.aside(work)),
        # Of matrices that mean nothing every decomposition is sound.
        patch.object(decompositions, "RESIDUAL_TOLERANCE", inf),
        torch.enable_grad(),
    ):
        with simulation:
            optimizer = make(model)
        try:
            optimizer.training.meter.now = lambda: simulation.clock
            with simulation:
                for _ in range(2):
                    optimizer.zero_grad()
                    gc.collect()  # of tensors that only circles hold
                    simulation.peak, simulation.hidden = simulation.now, 0.0
                    loss_of(run(model)).backward()
                    optimizer.step()
            gc.collect()
            kept = simulation.now
            found = optimizer.training.meter.read((ELSEWHERE, *PAPER_NAMES))
        finally:
            optimizer.close()
    seconds, sent = (
        {n.removeprefix(kind): v for n, v in found.items() if n.startswith(kind) and v}
        for kind in ("seconds/", "bytes/")
    )
    seconds.setdefault(ELSEWHERE, 0.0)
    return Record(seconds, sent, simulation.hidden, kept, simulation.peak)
