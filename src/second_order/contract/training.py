"""What an optimizer and its curvature share: groups, warnings, averages, and how they call it.

prepare        plan anew, refresh what is due          before gradients travel
precondition   p.grad <- what the base is to see
step_base      the base's step
correct        what is left to do to the parameters, and what the coming passes are to leave
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from second_order.contract.saved import SavedPart
from second_order.distributed.world import World
from second_order.errors import SecondOrderWarning
from second_order.options import PEAK_LR
from second_order.report import Summary
from second_order.sharded import caller, ddp_under_way, is_dtensor, reshard

__all__ = [
    "ARRIVED",
    "NAMES",
    "Curvature",
    "PendingAverage",
    "Routed",
    "RunningDDP",
    "Training",
    "check_step",
    "follow_peak_rates",
    "members_of",
    "named_like",
    "nameless",
    "settings_of",
    "start_average",
    "trainable",
    "unhooked",
    "warn",
    "whole_group",
]

P = ParamSpec("P")
R = TypeVar("R")
Routed: TypeAlias = tuple[Sequence[Tensor], Sequence[int]] | None

NAMES = "param_names"
RATES = "lr", "initial_lr", "max_lr"
NO_BACKWARD = -1  # the number of the backward pass that runs, if none does


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a model that train, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def whole_group(group: Any) -> Any:
    """A copy of a group that can be walked through twice, with names beside its parameters.

    Raises:
        ValueError: If it has no parameters, or not as many names as parameters.
    """
    if not isinstance(group, dict):
        return group
    if "params" not in group:
        raise ValueError(f"a parameter group has no 'params', only {[*group]}")
    whole, params = dict(group), group["params"]
    whole["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    names = whole.get(NAMES)
    if names is not None and (names or params):
        if len(names) != len(params):
            raise ValueError(
                f"a group has {len(params)} parameters and {len(names)} {NAMES!r}; give each its "
                f"name, or leave {NAMES!r} out"
            )
        whole["params"] = list(zip(whole.pop(NAMES), params, strict=True))
    return whole


def nameless(groups: Iterable[Any]) -> list[Any]:
    """Copies of groups for a base, which may not know of names; or a list of parameters."""
    plain = [{**g, "params": members_of([g])} if isinstance(g, dict) else g for g in groups]
    for group in plain:
        if isinstance(group, dict):
            group.pop(NAMES, None)
    return [g[1] if isinstance(g, tuple) else g for g in plain]


def settings_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A group's entries but its parameters, with tensors as numbers."""
    return {
        k: v.tolist() if isinstance(v, Tensor) else v for k, v in entries.items() if k != "params"
    }


def members_of(groups: Iterable[Any]) -> list[Tensor]:
    """The parameters of groups, or of a list of parameters, named or not."""
    members: list[Tensor] = []
    for group in groups:
        for p in group["params"] if isinstance(group, dict) else [group]:
            member = p[1] if isinstance(p, tuple) else p
            if isinstance(member, Tensor):
                members.append(member)
    return members


def named_like(
    others: Sequence[Mapping[str, Any]], group: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """A group with names where the ``others`` have them, as torch asks: all or none.

    ``names`` are of the model's parameters, by id; others are called by their place.
    """
    known = any(isinstance(p, tuple) for p in group["params"])
    if known or not any(NAMES in other for other in others):
        return group
    if not group["params"]:
        return {**group, NAMES: []}
    members = enumerate(group["params"], start=sum(len(other["params"]) for other in others))
    return {**group, "params": [(names.get(id(p), f"parameter {i}"), p) for i, p in members]}


def check_step(training: Training, matters: str, closure: Any, unwatched: bool) -> None:
    """Raise unless a step can be taken now: before anything has changed.

    ``matters`` is why a GradScaler has to be announced; ``unwatched``: hooks are off the model.
    """
    if torch._C._current_graph_task_id() != NO_BACKWARD:
        raise RuntimeError(
            f"{training.name}.step() is called while backward() runs, from a parameter's hook, "
            f"perhaps: a layer's curvature is of its weight and bias together, and complete once "
            f"backward() has returned. Make one optimizer of the model, {training.name}(model, "
            f"lr=...), and call step() after backward()"
        )
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{training.name}.step() cannot be recorded in a CUDA graph, because Python decides at "
            f"each step what is due: call it outside of torch.cuda.graph(). torch.compile(model) "
            f"saves launches in the forward and backward pass"
        )
    training.require_group("step()")
    for group in training.groups:
        if group.get("train_mode") is False:
            raise RuntimeError(
                f"{training.name}.step() with a schedule-free base that is not in train mode: call "
                f"optimizer.train() before training, and optimizer.eval() before evaluation"
            )
    if unwatched:
        raise RuntimeError(
            f"{training.name}.step() inside hooks_removed(): the passes in there leave no "
            f"statistics; train after the block"
        )
    # A rank without a batch repeats DDP's collectives, but not those of a step. Inside a pass an
    # error would leave DDP's messages on their way.
    if training.running_ddp.joins:
        raise RuntimeError(
            f"{training.name}.step() of a model in torch's Join: a rank that has no batch left "
            f"takes no step, and the other ranks would wait for it. Give every rank the same "
            f"number of batches (DistributedSampler does, or stop when the first rank is done), "
            f"and leave Join out, or pass it enable=False"
        )
    if closure is not None and not callable(closure):
        raise TypeError(f"closure={closure!r} is not a function; use step() without one")
    # Of an unknown GradScaler captured gradients are not unscaled: the factors would be too large
    # by the square of the scale, and training would stall without a word.
    unknown = training.steps == 0 and training.scaler is None and matters
    if unknown and caller(function="_maybe_opt_step") is not None:
        raise ValueError(
            f"{training.name}.step() is called by a GradScaler that it was not told of: {matters}; "
            f"write {training.name}(..., grad_scaler=scaler)"
        )


def follow_peak_rates(groups: Iterable[dict[str, Any]]) -> None:
    """Keep the largest learning rate of each group, that of the schedule to come included.

    Rates may be tensors on a device, which schedules fill in place: the host does not read them.
    """
    for group in groups:
        peak = group[PEAK_LR]
        for name in RATES:
            if name in group:
                peak = _larger(peak, group[name])
        group[PEAK_LR] = peak


def _larger(peak: Any, rate: Any) -> Any:
    if isinstance(peak, Tensor) and isinstance(rate, Tensor):
        return torch.maximum(peak, rate.detach().reshape(()))
    if isinstance(rate, Tensor):
        return rate.detach().reshape(()).clamp(min=peak)
    return peak.clamp(min=rate) if isinstance(peak, Tensor) else max(peak, rate)


def unhooked(base: torch.optim.Optimizer) -> Callable[[], None]:
    """A base's step without the hooks that the wrapper's own step already runs."""
    step = type(base).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return functools.partial(step, base)


def warn(message: str) -> None:
    """Give a SecondOrderWarning."""
    warnings.warn(message, SecondOrderWarning, stacklevel=3)


class RunningDDP:
    """A hook before the model's forward, which notes the DistributedDataParallel that runs it.

    Frameworks wrap models after the optimizer is made. Copies of the hook know of no DDP.
    """

    def __init__(self) -> None:
        self._last: Callable[[], Any] = lambda: None  # a weak reference

    def __reduce__(self) -> Any:
        return type(self), ()

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Note the DDP of a pass with gradients."""
        ddp = None if torch.compiler.is_compiling() else ddp_under_way()
        if ddp is not None and torch.is_grad_enabled():
            self._last = weakref.ref(ddp)

    @property
    def joins(self) -> bool:
        """Whether the DDP is in torch's ``Join``: ranks may have different numbers of batches."""
        ddp = self._last()
        return ddp is not None and bool(ddp._join_config.enable)


@dataclass
class Training:
    """One training, as this process takes part in it."""

    name: str  # of the optimizer's class, for messages
    model: nn.Module  # the user's module, without wrappers
    known: bool  # the parameters belong to that module
    inside: str  # class of a module around one that was found by its parameters; "" for none
    under_ddp: bool  # the module was wrapped in DistributedDataParallel
    world: World  # the processes that train together; on a helper, those that help together
    averages: bool  # the optimizer averages gradients over the processes
    scaler: Any  # the GradScaler that scales the loss, or None
    debug: bool = False  # verify at every step what is else verified at the first ones
    warned: set[str] = field(default_factory=set)  # keys of warnings that appeared
    steps: int = 0  # number of steps taken
    trained: set[Tensor] = field(default_factory=set)  # what trained at the last step
    base: torch.optim.Optimizer = None  # type: ignore[assignment]
    base_name: str = ""  # in messages
    groups: list[dict[str, Any]] = field(default_factory=list)  # one list with the base's
    publish: Callable[[], None] = lambda: None  # shows counters and curvature in ``state``
    running_ddp: RunningDDP = field(default_factory=RunningDDP)
    ddp_hooks: list[Any] = field(default_factory=list)  # handles of hooks that see it
    # The modules' entries that parameters had when they were last looked for.
    places: Sequence[tuple[nn.Module, str, Tensor]] = ()
    # Parts of the state that other processes keep, once they have been collected here, and the rank
    # that has all of them; None for each.
    collected: tuple[dict[Tensor, dict[str, dict[str, Any]]], int | None] | None = None

    def add_ddp_hook(self, hook: Callable[[nn.Module, Any], None]) -> None:
        """Call a hook before the model's forward, as long as there is this training."""
        handle = self.model.register_forward_pre_hook(hook)
        self.ddp_hooks.append(handle)
        weakref.finalize(self, handle.remove).atexit = False

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; groups may be empty."""
        for group in self.groups:
            for p in group["params"]:
                device: torch.device = p.device
                return device
        return torch.device("cpu")

    def training_params(self) -> list[Tensor]:
        """The parameters in the groups that train now."""
        return [p for group in self.groups for p in group["params"] if p.requires_grad]

    def averaged_params(self) -> list[Tensor]:
        """The parameters that train, or did at the last step: backward may precede a freeze.

        FSDP2 averages the gradients of those that it has sharded.
        """
        params = [p for group in self.groups for p in group["params"] if not is_dtensor(p)]
        return [p for p in params if p.requires_grad or p in self.trained]

    def look_for_places(self) -> None:
        """Find the modules' entries that the parameters have, to see later what replaces them."""
        ours = {id(p) for p in members_of(self.groups) if not is_dtensor(p)}
        self.places = [
            (module, name, p)
            for module in self.model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, p in module._parameters.items()
            if p is not None and id(p) in ours
        ]

    def new_shards(self) -> dict[Tensor, Tensor]:
        """The shards that FSDP2 has put in the places of parameters since, by these."""
        found: dict[Tensor, Tensor] = {}
        for module, name, p in self.places:
            new = module._parameters.get(name)
            if new is not None and new is not p and is_dtensor(new) and new.shape == p.shape:
                found[p] = new
        return found

    def require_group(self, doing: str) -> None:
        """Raise RuntimeError if the process group that other ranks are reached by is gone."""
        if self.world.size > 1 and self.world.is_destroyed:
            raise RuntimeError(
                f"{self.name}: {doing} after destroy_process_group(), which has destroyed the "
                f"group of the {self.world.size} processes that train together; destroy it once "
                f"training is over, or make the optimizer anew after init_process_group()"
            )

    def names(self) -> dict[int, str]:
        """The names of the model's parameters, by id."""
        reshard(self.model)
        return {id(p): name for name, p in self.model.named_parameters()}

    def work_with(self, team: World) -> None:
        """Train with these ranks only from now on: the others help."""
        self.world = team
        self.averages = self.averages and team.size > 1

    def whole_model(self) -> list[Tensor]:
        """All parameters, the model's and others in the groups, and buffers."""
        params = [*self.model.parameters(), *members_of(self.groups)]
        return list(dict.fromkeys([*params, *self.model.buffers()]))

    def first_time(self, key: str) -> bool:
        """True once for each key, so that a warning is given once."""
        new = key not in self.warned
        self.warned.add(key)
        return new

    def warn(self, message: str) -> None:
        """Give a SecondOrderWarning."""
        warn(message)

    def titled(self, *what: str) -> str:
        """The first line of a summary: the optimizer, its base, ``what``, and the step."""
        size = self.world.size
        rate = f"lr {settings_of(self.groups[0])['lr']}" if self.groups else "no parameter groups"
        processes = f"{size} process{'es' if size > 1 else ''}"
        parts = ", ".join([rate, *what, processes, f"step {self.steps}"])
        return f"{self.name} over {self.base_name}, {parts}"


class PendingAverage:
    """The exchange of one step's gradients, which ``finish`` waits for, if it is under way."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait until the means are in place; at once if they are."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


ARRIVED = PendingAverage()


def start_average(
    training: Training, route: Callable[[Sequence[Tensor], Sequence[Tensor]], Routed]
) -> PendingAverage:
    """Start to average gradients, to whom ``route`` says; a collective. TypeError if sparse."""
    world, params = training.world, training.averaged_params()
    frozen = [p for g in training.groups for p in g["params"] if not p.requires_grad]
    left = [p for p in frozen if p.grad is not None and p not in training.trained]
    for p in left:  # not averaged: they differ between ranks
        p.grad = None
    if left and training.first_time("frozen gradients"):
        names = training.names()
        listed = ", ".join(repr(names.get(id(p), "(not in the model)")) for p in left[:20])
        training.warn(
            f"frozen parameters have gradients that the processes have not averaged, and that are "
            f"dropped: {listed}; call zero_grad() after freezing"
        )
    if not params:  # all are frozen, or others average
        return ARRIVED
    layout = torch.contiguous_format
    gradients = [
        torch.zeros_like(p, memory_format=layout) if p.grad is None else p.grad for p in params
    ]
    if any(gradient.is_sparse for gradient in gradients):
        raise TypeError(
            "a sparse gradient cannot be averaged in buckets; use sparse=False in the embedding, "
            "or wrap the model in DistributedDataParallel"
        )
    torch._foreach_div_(gradients, float(world.size))  # first: a sum in float16 overflows
    here = [float(p.grad is not None) for p in params]
    # The dtype of every message is named: ranks may have different defaults.
    kind: Any = {"dtype": torch.float32, "device": params[0].device}
    present = torch.ones(len(params), **kind)
    if 0.0 in here:  # else the device is sent nothing
        present = torch.tensor(here, **kind)
    routed = route(params, gradients)
    work = (
        world.all_reduce([*gradients, present])
        if routed is None
        else world.reduce([*routed[0], present], [*routed[1], None])
    )

    def finish() -> None:
        work.wait()
        if 0.0 in here:  # a gradient that is None everywhere stays None, as for the base alone
            for p, g, n in zip(params, gradients, present.tolist(), strict=True):
                if p.grad is None and n > 0:
                    p.grad = g

    return PendingAverage(finish)


class Curvature:
    """A curvature that leaves a base optimizer as it is; base class of the real ones."""

    helps = False  # this process helps others: prepare() is all of its steps
    parts_suffice = False  # torch.distributed.checkpoint may save each rank's part by itself
    base_in_parts = False  # each rank has a part of the base's state, and no other the same one
    scaler_matters = ""  # why a GradScaler has to be announced; "" if it need not be

    def __init__(self, training: Training) -> None:
        self.training = training

    # ------------------------------------------------------------------- construction and changes

    def description(self) -> list[str]:
        """Options in lines, which must be equal on all ranks, as model and groups must."""
        return []

    def begin(self) -> None:
        """Begin, once all ranks agree: check the processes, give them their roles, and plan.

        Raises before anything has changed if processes or devices cannot do what is asked.
        """

    def replan(self) -> None:
        """Look at the model again, after parameters or groups have changed."""

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Go on with the shards, in the groups by now, of parameters; or raise."""

    def unwatched(self) -> AbstractContextManager[None]:
        """Make a context manager that takes all hooks off the model and puts them back."""
        return nullcontext()

    def close(self) -> None:
        """End threads, hooks and messages; from now on the base steps alone."""

    # ------------------------------------------------------------------------------------- a step

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has; primitives."""
        return []

    def prepare(self) -> None:
        """Plan anew, and refresh what is due, before gradients travel."""

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Parts of the gradients, and the rank that alone gets the mean of each; None: all do."""
        return None

    def precondition(self, pending: PendingAverage) -> None:
        """Replace ``p.grad``, once its mean has arrived, by the gradient that the base sees."""
        pending.wait()

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base take its step."""
        step()

    def correct(self) -> None:
        """Correct the parameters after the base's step."""

    def watch(self) -> None:
        """Turn capture on or off for the coming passes, as the coming step needs."""

    def drop_pending(self) -> None:
        """Drop statistics of the backward passes since the last step."""

    # -------------------------------------------------------------------------------------- state

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The ``"curvature"`` part of each parameter that has one; tensors are shared."""
        return {}

    def state_to_save(self) -> dict[Tensor, dict[str, Any]]:
        """More of these parts, for checkpoints alone: tensors that later steps replace.

        If ``optimizer.state`` had them, old ones would stay in memory.
        """
        return {}

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if a checkpoint's ``"curvature"`` parts do not fit the model."""

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over the ``"curvature"`` parts of a checkpoint, in the dtypes they were saved in."""

    @property
    def kept_elsewhere(self) -> str:
        """A name for state that only other processes keep; "" if there is none."""
        return ""

    @property
    def dispensable(self) -> bool:
        """Whether training can resume without what only other processes keep."""
        return False

    def kept_by_all(self) -> Iterable[tuple[str, Tensor]]:
        """Tensors by name that every rank keeps, bit for bit the same."""
        return ()

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Collect the parts of the state that the ranks ``ranks`` lack; a collective.

        A ``"base"`` part replaces the one here, a ``"curvature"`` part is added to it.
        """
        return {}

    # ------------------------------------------------------------------------------- what is told

    def summary(self) -> Summary:
        """A table of the parameters and layers that are preconditioned."""
        return Summary(self.training.titled(), [])

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by names that are the same on every rank; nothing is sent."""
        return {}
