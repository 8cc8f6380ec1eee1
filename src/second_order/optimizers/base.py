"""The base class of all optimizers here: a ``torch.optim`` optimizer that wraps another.

    loss = closure()                   once, first, with gradients enabled
    curvature.prepare()                updates the assignment of layers, or the eigenpairs
    gradients <- mean over processes   unless DistributedDataParallel has averaged them
    curvature.precondition()           gradients <- curvature⁻¹ gradients, in place
    base.step()                        the wrapped optimizer, on the same groups and state
    curvature.finish_step()                scales or corrects the base's step

This file does no numerical work. ``state[p]`` holds two parts. The wrapped optimizer sees the part
``"base"`` as its whole state for p. ``state_dict()`` fills the part ``"curvature"``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from second_order.checkpoint.caller import caller, is_checkpointing
from second_order.checkpoint.saved import BASE, CURVATURE, BaseState, SavedPart
from second_order.distributed.fsdp import (
    DTENSORS,
    ParamLocations,
    check_mesh,
    check_sharding,
    is_dtensor,
    shard_like,
)
from second_order.distributed.roles import Role, sharding_error
from second_order.distributed.world import World
from second_order.optimizers.arguments import (
    check_scaler,
    read_arguments,
    refuse_foreign_model,
    refuse_meta,
    warn_about_unowned,
    warn_of_single_launch,
)
from second_order.optimizers.base_pair import AUX_BASE, BasePair, base_of, group_lines, switch_of
from second_order.optimizers.checkpoint import (
    Collected,
    add_collected,
    add_to_save,
    check_is_state,
    collects_by_itself,
    export_base_state,
    header,
    read_checkpoint,
    require_whole,
)
from second_order.optimizers.config import ScriptOptions
from second_order.optimizers.consistency import Consistency
from second_order.optimizers.find_model import find_model
from second_order.optimizers.keywords import Rate, check_base, keywords_of, split_base_keywords
from second_order.reporting.summary import Summary
from second_order.training.context import Training, step_without_hooks
from second_order.training.curvature import NO_AVERAGE, Curvature, start_average
from second_order.training.groups import (
    NAMES,
    copy_group,
    group_params,
    match_names,
    update_peak_rates,
    without_names,
)
from second_order.utils.checks import (
    PEAK_LR,
    check_choice,
    check_group_options,
    check_learning_rate,
    check_rank,
    rate_of_groups,
)
from second_order.utils.stages import stage

__all__ = ["ParamsOrModel", "SecondOrderOptimizer"]

P = ParamSpec("P")
R = TypeVar("R")
ParamsOrModel: TypeAlias = nn.Module | Iterable[Any]
Self = TypeVar("Self", bound="SecondOrderOptimizer")


NO_BACKWARD = -1  # the id of the running backward pass, if none runs


def between_graphs(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that ``torch.compile`` runs in Python, between two graphs."""
    disabled = torch.compiler.disable(
        method,
        reason="a second-order step exchanges and decomposes factors in Python, between graphs: "
        "compile the model, or the function around the step without fullgraph",
    )
    return cast(Callable[P, R], disabled)


class SecondOrderOptimizer(torch.optim.Optimizer):
    """A base optimizer and a curvature, as one optimizer of ``torch.optim``.

    Args:
        params: The model, or its parameters or parameter groups.
        lr: The base's learning rate; None if the parameter groups have theirs.
        script: The base optimizer, and what describes the script.
        base_kwargs: Arguments of the base optimizer.
        curvature: Makes the curvature for this training run.
        needs_model: Whether parameters that belong to no module train without curvature.
        helper_role: What the last ``helpers`` ranks do instead of training; None if all train.
        helpers: Number of these ranks.
    """

    options_by_layer = False
    """Whether parameter groups may have ``damping``, ``factor_decay`` and ``precondition``."""

    def __init__(
        self,
        params: ParamsOrModel,
        lr: Rate | None,
        *,
        script: ScriptOptions,
        base_kwargs: Mapping[str, Any],
        curvature: Callable[[Training], Curvature],
        needs_model: bool = True,
        helper_role: Role | None = None,
        helpers: int = 0,
    ) -> None:
        name = type(self).__name__
        second = script.aux
        self._constructed = False
        self._collected: Collected | None = None  # by consolidate(), for the next state_dict()
        self._has_loaded = False  # a checkpoint, since the last step
        self._unwatched = False
        self._needs_model = needs_model
        self._consistency = Consistency(script.debug)

        # Check the keywords, and find the model.
        own_keywords = keywords_of(type(self))
        check_base(script.base, SecondOrderOptimizer)
        if second is not None:
            check_base(second.optimizer_class, SecondOrderOptimizer, "aux_base")
        shared = dict(base_kwargs) if lr is None else {"lr": lr, **base_kwargs}
        keywords = split_base_keywords(script.base, shared, second, own_keywords)
        for each in keywords:
            check_learning_rate(each.get("lr", 0.0))
        check_choice("gradient_averaging", script.gradient_averaging, ("auto", True, False))
        given = read_arguments(name, params, script.model, find_model, needs_model)
        groups = given.groups
        self._refused = {*own_keywords} - {"lr"} - ({AUX_BASE} if second is not None else set())
        self._check_group_options(groups)
        if lr is None:
            rate = rate_of_groups(name, groups)
            for each in keywords:
                each.setdefault("lr", rate)

        # Find the processes that train together.
        world = script.process_group
        if not isinstance(world, World):
            world = World(world)
        if world.size == 1:
            helper_role = None
        if helper_role is None:
            check_mesh(given.model, world)

        # Make the base, which shares its groups and state with this optimizer.
        if second is None:
            self._base = script.base(without_names(groups), **keywords[0])
            own_groups = groups
        else:
            kinds = (script.base, second.optimizer_class)
            self._base = BasePair(groups, given.model, kinds, keywords, second.layers)
            own_groups = self._base.param_groups
        defaults = {**self._base.defaults, PEAK_LR: 0.0}
        super().__init__([*map(copy_group, own_groups)], defaults)
        for group, of_base in zip(self.param_groups, self._base.param_groups, strict=True):
            # A base may have changed its entries: torchao's make tensors of learning rates.
            group.update({k: v for k, v in of_base.items() if k not in ("params", NAMES)})
        made = dict(self._base.state)  # Adagrad makes its state at construction
        self._bind_base()
        self._base.state.update(made)
        self._step_base = step_without_hooks(self._base)

        # What optimizer and curvature share.
        members = group_params(groups)
        averages = script.gradient_averaging
        training = self._training = Training(
            name=name,
            model=given.model,
            owns_params=given.known,
            outer_class=given.inside,
            under_ddp=given.under_ddp,
            world=world,
            averages_gradients=_averages(averages, given.under_ddp, members, world),
            scaler=script.grad_scaler,
            debug=bool(script.debug),
            base=self._base,
            # Weakly: an optimizer goes as soon as no script has it, and its hooks with it.
            publish=partial(_share_state_of, weakref.ref(self)),
        )
        self._places = ParamLocations(given.model, members)
        warn_of_single_launch(training)
        refuse_foreign_model(training, members)
        if needs_model:
            warn_about_unowned(training, groups)
        if isinstance(self._base, BasePair):
            for pattern in self._base.unmatched:
                training.warn(f"aux_base: the pattern {pattern!r} matches no module of the model")
        self._curvature = curvature(training)
        training_ranks = world.size if helper_role is None else world.size - helpers
        check_scaler(script.grad_scaler, training.averages_gradients, training_ranks)
        self._start_together(helper_role)

    def _start_together(self, helper_role: Role | None) -> None:
        """Agree with the other processes, and start from the same parameters."""
        training = self._training
        world = training.world
        lines = self._curvature.description()
        if isinstance(self._base, BasePair):
            lines += self._base.description()
        self._consistency.check_built(training, lines)
        if helper_role is not None:
            sharded = any(map(is_dtensor, training.model.parameters()))
            if any(world.all_gather_object(sharded)):  # all raise, whichever has shards
                raise ValueError(sharding_error(training.name, helper_role))
        averages = training.averages_gradients  # of all processes, before they get their roles
        self._constructed = True
        self._curvature.begin()  # with equal options, so that all raise or none
        if averages:
            whole = [t for t in training.model_tensors() if not is_dtensor(t)]
            with torch.no_grad():
                world.broadcast_from_first(whole)

    def _bind_base(self) -> None:
        """Let the base work on the very groups and state of this optimizer."""
        self._base.param_groups = self.param_groups
        self._base.state = BaseState(self.state)  # type: ignore[assignment]

    def agree(self, doing: str, facts: Sequence[tuple[str, Any]] = ()) -> None:
        """Raise RankMismatchError on every rank unless all do the same; a collective.

        ``facts`` are names and values that must also be equal.
        """
        self._training.require_process_group(doing)
        if not self._curvature.is_helper:  # the workers compare what they do, without the helpers
            doing = f"{doing} of {type(self).__name__}"
            self._consistency.check(self._training, self._curvature, doing, facts)

    # ------------------------------------------------------------------------------- stepping

    @between_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; on a helper, serve the workers until they have taken theirs.

        Args:
            closure: Evaluates the model, calls ``backward`` and returns the loss. Called once.

        Returns:
            What the closure returned, or None.

        Raises:
            RankMismatchError: On every rank, if the ranks do different things.
            SecondOrderError: On every rank, if the curvature cannot be computed.
            RuntimeError: While backward runs, inside :meth:`hooks_removed`, or if a schedule-free
                base is not in train mode.
        """
        training = self._training
        curvature = self._curvature

        # Run the closure, and check that this step can be taken, and that all ranks take it.
        _check_step(training, curvature.scaler_reason, self._unwatched)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if training.steps == 0 and not self.state and is_checkpointing():
            self._make_empty_state()
            return loss
        if DTENSORS in sys.modules:
            self.take_shards()
        if curvature.is_helper:
            curvature.prepare()
            return loss
        if self._collected is not None:  # by consolidate(), before this step
            self._collected = None
            self._share_state()
        if training.world.size > 1:
            with stage("compare"):
                doing = f"take a step of {training.name}"
                loaded = [("a checkpoint loaded since the last step", self._has_loaded)]
                self._consistency.check(training, curvature, doing, loaded, tensors=True)
        update_peak_rates(self.param_groups)

        # Start to average the gradients, to the ranks that need them.
        curvature.prepare()
        pending = NO_AVERAGE
        if training.averages_gradients:
            with stage("average_gradients"):
                pending = start_average(training, curvature.route)

        # Precondition, and let the base step.
        curvature.precondition(pending)
        with stage("base"):
            curvature.step_base(self._step_base)
        curvature.finish_step()

        # Count the step, and look ahead to the coming passes.
        if self._has_loaded:
            self._has_loaded = False
        training.steps += 1
        if training.steps == 1:  # checkpoints need an entry for each parameter
            for p in group_params(self.param_groups):
                self.state[p].setdefault(CURVATURE, {})
        curvature.watch()
        return loss

    def _make_empty_state(self) -> None:
        """Make the base's state for torch.distributed.checkpoint.

        It takes a step with a learning rate of 0 and zero gradients for that. The step is not
        counted and starts no collective, because one rank alone may take it.
        """
        if DTENSORS in sys.modules and self.take_shards():
            # torch has set the gradients of the parameters that shards have replaced.
            for p in group_params(self.param_groups):
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        self._share_state()
        self._step_base()

    def take_shards(self) -> bool:
        """Adopt the DTensor parameters that ``fully_shard`` created since the last call.

        Returns:
            Whether any parameter changed.
        """
        training = self._training
        others = self._places.find_new_shards()
        if not others:
            return False
        check_sharding(training.model)
        check_mesh(training.model, training.world)
        for group in self.param_groups:
            group["params"][:] = [others.get(p, p) for p in group["params"]]
        self._curvature.replace_params(others)
        for p in others.keys() & self.state.keys():
            parts = self.state[others[p]] = self.state.pop(p)
            for key, value in parts.get(BASE, {}).items():
                if isinstance(value, Tensor):
                    parts[BASE][key] = shard_like(others[p], value)
        self._places = ParamLocations(training.model, group_params(self.param_groups))
        training.publish()  # what the curvature has dropped is in the parts that have moved
        return True

    def _share_state(self) -> None:
        """Write counters and curvature to ``state``, from which checkpoints read."""
        parts = self._curvature.state()
        steps = self._training.steps
        for group in self.param_groups:
            written_by = base_of(self._base, group)
            for p in group["params"]:
                self.state[p][CURVATURE] = {**parts.get(p, {}), **header(steps, written_by)}

    @between_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the statistics of the last backward pass."""
        self.take_shards()
        super().zero_grad(set_to_none)
        self._curvature.drop_pending()

    @property
    def train(self) -> Callable[[], None]:
        """The base's ``train()``. Call it before training with a schedule-free base."""
        return switch_of(self._base, "train", self._training.name, self.state)

    @property
    def eval(self) -> Callable[[], None]:
        """The base's ``eval()``. A schedule-free base sets the parameters to their average."""
        return switch_of(self._base, "eval", self._training.name, self.state)

    # ------------------------------------------------------------------- groups and checkpoints

    def __setattr__(self, name: str, value: Any) -> None:
        """Accept only an empty ``state``, and ``param_groups`` that begin with the present ones."""
        # Lightning's wrapper has this class, but no attributes of its own.
        if name not in ("state", "param_groups") or not getattr(self, "_constructed", False):
            super().__setattr__(name, value)
        elif name == "param_groups":
            self._resume(value)
        elif not value:  # fastai resets an optimizer in this way
            self.state.clear()
        else:
            raise AttributeError(
                f"{type(self).__name__}.state is shared with the base and cannot be replaced: use "
                f"load_state_dict(), or assign an empty dictionary to reset the base"
            )

    def _resume(self, groups: Sequence[dict[str, Any]]) -> None:
        """Adopt the groups of an earlier run, as Lightning's BaseFinetuning assigns them."""
        before = len(self.param_groups)
        current = [[id(p) for p in group["params"]] for group in self.param_groups]
        assigned = [[id(p) for p in group["params"]] for group in groups]
        if assigned[:before] != current:
            raise AttributeError(
                f"{type(self).__name__}.param_groups is shared with the base, and the list that is "
                f"assigned does not begin with its {before} groups: change settings in place "
                f"(group['lr'] = ...), use add_param_group(), or make a new optimizer"
            )
        for group, settings in zip(self.param_groups, groups, strict=False):
            group.update(
                {k: v for k, v in settings.items() if k not in ("params", NAMES, AUX_BASE)}
            )
        for group in groups[before:]:
            self.add_param_group(group)

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse ``copy.deepcopy``, ``copy.copy`` and ``pickle``."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because it has hooks on its model "
            f"and process groups. Copy or save its state_dict(), make a new optimizer for the copy "
            f"of the model, and call load_state_dict() on it"
        )

    def _check_group_options(self, groups: Iterable[Any], first: int = 0) -> None:
        by_layer = self.options_by_layer
        check_group_options(type(self).__name__, groups, self._refused, by_layer, first)

    def _complete(self, group: dict[str, Any]) -> None:
        """Give a group the entries that it lacks, of the base that trains it."""
        for key, value in {**self.defaults, **base_of(self._base, group).defaults}.items():
            group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose layers are preconditioned from the next step on. Collective.

        Raises:
            RankMismatchError: On every process, if the processes do different things.
        """
        if "_constructed" not in vars(self):  # a wrapper of Lightning's
            self.optimizer.add_param_group(param_group)  # type: ignore[attr-defined]
            return
        if not self._constructed:
            super().add_param_group(param_group)
            return
        training = self._training
        before = list(self.param_groups)
        group = copy_group(param_group)
        refuse_meta(training.name, group_params([group]), training.model)
        base = self._base
        doing = "add a parameter group"
        names = training.param_names()
        added = [names.get(id(p), "not in the model") for p in group_params([group])]
        divided = base.divided if isinstance(base, BasePair) else lambda group, _: [group]
        try:
            try:
                self._check_group_options([group], first=len(before))
                for part in divided(group, training.model):
                    named = match_names(self.param_groups, part, training.param_names())
                    self._complete(named)
                    super().add_param_group(named)
            except Exception as error:
                doing = f"refuse a parameter group ({error})"
                raise
            finally:
                self.agree(doing, [("added parameters", added)])
            self._curvature.replan()
        except Exception:
            self.param_groups[:] = before
            raise
        self._places = ParamLocations(training.model, group_params(self.param_groups))
        if self._needs_model:
            warn_about_unowned(training, [group])

    def consolidate(self, to: int | None = 0) -> None:
        """Collect the state of the other processes for the next :meth:`state_dict`. Collective.

        The next step drops the collected state. If every process has the whole state, this method
        does nothing.

        Args:
            to: The rank that saves the checkpoint. None: all ranks.

        Raises:
            ValueError: If the rank does not exist.
        """
        size = self._training.world.size
        check_rank("consolidate", to, size)
        if self._curvature.remote_state:
            self.agree(f"consolidate(to={to})")
            ranks = range(size) if to is None else [to]
            self._collected = Collected(self._curvature.gather(ranks), to)

    # The name that torch's ZeroRedundancyOptimizer has for it: Lightning calls it before it saves.
    consolidate_state_dict = consolidate

    def state_dict(self) -> dict[str, Any]:
        """Return the state as primitives and tensors, which ``torch.load`` reads by default.

        The state holds everything that decides the next steps, inverses included. ``summary()``
        prints how many bytes the inverses add. Tensors are shared, not copied.

        Raises:
            SecondOrderError: If other processes store a part of the state. Call
                :meth:`consolidate` first, or save with ``torch.distributed.checkpoint``.
        """
        self.take_shards()
        if collects_by_itself(self._training, self._curvature, self._collected):
            ranks = range(self._training.world.size)
            self._collected = Collected(self._curvature.gather(ranks), None)
        require_whole(self._training, self._curvature, self._collected)
        if self.state:
            self._share_state()
        found = super().state_dict()
        # Copies, because close() takes the curvature out of the entries of `state`. The parts have
        # one order on every rank: torch.distributed.checkpoint gathers DTensors in that order.
        for index, entry in found["state"].items():
            parts = [part for part in (BASE, CURVATURE) if part in entry]
            found["state"][index] = {part: entry[part] for part in parts}
        add_to_save(self._training, self._curvature, found["state"])
        if self._collected is not None:
            add_collected(self._training, self._collected, found["state"])
        return found

    def export_base_state(self, aux_base: bool = False) -> dict[str, Any]:
        """Return the state that the base, or ``aux_base``, would have saved by itself."""
        return export_base_state(self.state_dict(), aux_base)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of any number of processes, or the state of the base alone.

        If the checkpoint lacks inverses, the next step refreshes their layers. If it is the state
        of the base alone, the curvature starts from the beginning.

        Raises:
            ValueError: If an entry does not fit, is not finite, is out of bounds or unknown, or
                belongs to another base. The error names the entry, and nothing has changed.
        """
        if "_constructed" not in vars(self):  # a wrapper of Lightning's
            self.optimizer.load_state_dict(state_dict)  # type: ignore[attr-defined]
            return
        check_is_state(state_dict)
        self.take_shards()
        training = self._training
        names = training.param_names()
        groups = self.param_groups
        saved: dict[Tensor, SavedPart] = {}
        steps = 0
        absent: list[str] = []

        def read(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            nonlocal saved, steps, absent
            # Loading casts floating state to the parameter's dtype, so curvature goes around it.
            loaded, saved, steps, absent = read_checkpoint(state, self._base, groups, names)
            self._curvature.check(saved)
            return loaded

        last = self.register_load_state_dict_pre_hook(read)  # after what users' hooks make of it
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        training.steps = steps
        self._collected = None
        self._has_loaded = True
        if self.state and not any(saved.values()):
            training.warn(
                f"the checkpoint has the state of {training.base_name} alone: it is loaded, and "
                f"the curvature starts from the beginning"
            )
        if absent:
            listed = ", ".join(absent[:20])
            training.warn(f"the checkpoint lacks {listed}: their state starts from the beginning")
        for group in self.param_groups:  # a checkpoint of the base alone lacks our entries
            self._complete(group)
        self._bind_base()
        if len(self._base.state):  # some bases expect their first entry to exist
            self._base.__setstate__({"state": self._base.state, "param_groups": self.param_groups})
        self._curvature.load(saved)
        self._share_state()

    # ------------------------------------------------------------------------- summary and close

    @property
    def training(self) -> Training:
        """The model, the parameter groups and the processes, as the curvature sees them."""
        return self._training

    def summary(self) -> Summary:
        """Return a table of the layers: which ranks precondition them, and which the base trains.

        With several parameter groups, it also lists the base and the settings of each group.
        Memory is that of this process. Synchronizes with the device.
        """
        summary = self._curvature.summary()
        return replace(summary, lines=[*summary.lines, *group_lines(self._training)])

    def metrics(self) -> dict[str, float]:
        """Return numbers to log about the last step and the inverses or eigenpairs in use.

            for name, value in optimizer.metrics().items():
                writer.add_scalar(f"second_order/{name}", value, step)

        All ranks return the same names, which the page *Instruments* explains. A number that this
        rank does not have is NaN. The call synchronizes with the device, but not with other ranks.
        """
        return {"step": float(self._training.steps), **self._curvature.metrics()}

    @contextmanager
    def hooks_removed(self) -> Iterator[None]:
        """Remove all hooks from the model inside a ``with`` block.

            with optimizer.hooks_removed():
                scripted = torch.jit.script(model)

        Passes inside the block give no statistics, and :meth:`step` raises an error there. You do
        not need this for export, tracing, or inference with a compiled model.
        """
        outer = self._unwatched
        self._unwatched = True
        try:
            with self._curvature.hooks_removed():
                yield
        finally:
            self._unwatched = outer

    def close(self) -> None:
        """Stop threads, remove hooks, and train with the base alone from now on."""
        self._curvature.close()
        for release in self._training.close_callbacks:
            release()
        self._collected = None
        if self.state:
            self._share_state()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _averages(option: str | bool, under_ddp: bool, members: Sequence[Tensor], world: World) -> bool:
    """Whether the optimizer itself averages gradients over the ranks."""
    if world.size == 1 or (members and all(map(is_dtensor, members))):
        return False
    return not under_ddp if option == "auto" else bool(option)


def _share_state_of(optimizer: weakref.ref[SecondOrderOptimizer]) -> None:
    alive = optimizer()
    if alive is not None and alive.state:
        alive._share_state()


def _check_step(training: Training, scaler_reason: str, unwatched: bool) -> None:
    """Raise an error if a step cannot be taken now; nothing has changed then.

    Args:
        training: The model, the groups and the ranks.
        scaler_reason: Why the optimizer needs to know the GradScaler; "" if it does not.
        unwatched: Whether the hooks are off the model.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{training.name}.step() cannot be recorded in a CUDA graph, because Python decides at "
            f"each step what is due: call it outside of torch.cuda.graph(). torch.compile(model) "
            f"saves launches in the forward and backward pass"
        )
    if torch._C._current_graph_task_id() != NO_BACKWARD:
        raise RuntimeError(
            f"{training.name}.step() is called while backward() runs, from a parameter's hook, "
            f"perhaps: a layer's curvature is of its weight and bias together, and complete once "
            f"backward() has returned. Make one optimizer of the model, {training.name}(model, "
            f"lr=...), and call step() after backward()"
        )
    training.require_process_group("step()")
    if any(group.get("train_mode") is False for group in training.groups):
        raise RuntimeError(
            f"{training.name}.step() with a schedule-free base that is not in train mode: call "
            f"optimizer.train() before training, and optimizer.eval() before evaluation"
        )
    if unwatched:
        raise RuntimeError(
            f"{training.name}.step() inside hooks_removed(): the passes in there leave no "
            f"statistics; train after the block"
        )
    # If the GradScaler is unknown, captured gradients are not unscaled. The factors would be too
    # large by the square of the scale, and training would stall.
    may_be_scaled = training.steps == 0 and training.scaler is None and scaler_reason
    if may_be_scaled and caller(function="_maybe_opt_step") is not None:
        raise ValueError(
            f"{training.name}.step() is called by a GradScaler that it does not know: "
            f"{scaler_reason}; write {training.name}(..., grad_scaler=scaler)"
        )
