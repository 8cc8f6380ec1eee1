"""The contract of a ``torch.optim`` optimizer that wraps another.

    loss = closure()                   once, first, with gradients enabled
    curvature.prepare()                plans anew, refreshes what is due
    gradients <- mean over processes   unless DistributedDataParallel has done it
    curvature.precondition()           gradients <- curvature⁻¹ gradients, in place
    base.step()                        the wrapped optimizer, on the same groups and state
    curvature.correct()                what is left to do to the parameters

Nothing here is numerical. ``state[p]`` holds two parts: ``"base"``, which the wrapped optimizer
sees as its whole state for p, and ``"curvature"``, which is put there for ``state_dict()``.
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

from second_order.contract.arguments import (
    check_mesh,
    check_scaler,
    check_sharding,
    read_arguments,
    refuse_foreign_model,
    refuse_meta,
    warn_about_unowned,
    warn_of_single_launch,
)
from second_order.contract.checkpoint import (
    add_collected,
    add_to_save,
    check_is_state,
    collects_by_itself,
    export_base_state,
    header,
    read_checkpoint,
    require_whole,
)
from second_order.contract.consistency import Consistency
from second_order.contract.saved import BASE, CURVATURE, BaseState, SavedPart
from second_order.contract.training import (
    ARRIVED,
    NAMES,
    Curvature,
    Training,
    check_step,
    follow_peak_rates,
    members_of,
    named_like,
    nameless,
    start_average,
    unhooked,
    whole_group,
)
from second_order.contract.two_bases import REST, TwoBases, base_of, group_lines, name_of, switch_of
from second_order.distributed.roles import Role, whole_models
from second_order.distributed.world import World
from second_order.optimizers.find_model import find_model
from second_order.options import (
    PEAK_LR,
    check_base,
    check_choice,
    check_group_options,
    check_learning_rate,
    check_rank,
    rate_of_groups,
    split_base_keywords,
)
from second_order.report import Summary
from second_order.sharded import DTENSORS, is_checkpointing, is_dtensor, like
from second_order.stages import stage

__all__ = ["ParamsOrModel", "SecondOrderOptimizer"]

P = ParamSpec("P")
R = TypeVar("R")
ParamsOrModel: TypeAlias = nn.Module | Iterable[Any]
Self = TypeVar("Self", bound="SecondOrderOptimizer")


def between_graphs(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method: ``torch.compile`` leaves it as it is; ``fullgraph=True`` cannot."""
    disabled = torch.compiler.disable(
        method,
        reason="a second-order step exchanges and decomposes factors in Python, between graphs: "
        "compile the model, or the function around the step without fullgraph",
    )
    return cast(Callable[P, R], disabled)


class SecondOrderOptimizer(torch.optim.Optimizer):
    """A base optimizer and a curvature, as one optimizer of ``torch.optim``.

    ``own_keywords`` are the names of the optimizer's own options, for messages; ``curvature`` makes
    the curvature of a training; of several ranks, so many ``helpers`` have the ``helper_role``.
    """

    options_by_layer = False
    """Whether parameter groups may have ``damping``, ``factor_decay`` and ``precondition``."""

    def __init__(
        self,
        params: ParamsOrModel,
        *,
        model: nn.Module | None,
        base: type[torch.optim.Optimizer],
        base_kwargs: dict[str, Any],
        own_keywords: Iterable[str],
        curvature: Callable[[Training], Curvature],
        needs_model: bool = True,
        gradient_averaging: str | bool,
        grad_scaler: Any,
        process_group: Any,
        debug: bool | int = False,
        rest: type[torch.optim.Optimizer] | None = None,
        rest_layers: Sequence[str] = (),
        rest_kwargs: Mapping[str, Any] | None = None,
        helper_role: Role | None = None,
        helpers: int = 0,
    ) -> None:
        name = type(self).__name__
        check_base(base, SecondOrderOptimizer)
        if rest is not None:
            check_base(rest, SecondOrderOptimizer, "rest")
        keywords = split_base_keywords(base, own_keywords, base_kwargs, rest, rest_kwargs)
        for each in keywords:
            check_learning_rate(each.get("lr", 0.0))
        check_choice("gradient_averaging", gradient_averaging, ("auto", True, False))
        self._consistency = Consistency(debug)
        given = read_arguments(name, params, model, find_model, needs_model)
        model, groups = given.model, given.groups
        self._refused = {*own_keywords} - {"lr"} - ({REST} if rest is not None else set())
        self._check_group_options(groups)
        if "lr" not in base_kwargs:
            rate = rate_of_groups(name, groups)
            for each in (base_kwargs, *keywords):
                each.setdefault("lr", rate)
        world = process_group if isinstance(process_group, World) else World(process_group)
        members = members_of(groups)
        helper_role = None if world.size == 1 else helper_role
        if helper_role is None:
            check_mesh(model, world)
        averages = gradient_averaging is True
        if gradient_averaging == "auto":
            averages = not given.under_ddp
        if members and all(map(is_dtensor, members)):
            averages = False  # FSDP2 does
        averages = averages and world.size > 1
        training = Training(
            name=name,
            model=model,
            known=given.known,
            inside=given.inside,
            under_ddp=given.under_ddp,
            world=world,
            averages=averages,
            scaler=grad_scaler,
            debug=bool(debug),
        )
        self._training, self._constructed, self._unwatched = training, False, False
        base_name = (rest or base).__name__
        warn_of_single_launch(training)
        refuse_foreign_model(training, members, base_name)
        self._needs_model = needs_model
        if needs_model:
            warn_about_unowned(training, groups, base_name)
        if rest is None:
            self._base = base(nameless(groups), **base_kwargs)
        else:
            self._base = TwoBases(groups, model, (base, rest), keywords, rest_layers)
            groups = self._base.param_groups
            for pattern in self._base.unmatched:
                training.warn(f"rest: the pattern {pattern!r} matches no module of the model")
        super().__init__([*map(whole_group, groups)], {**self._base.defaults, PEAK_LR: 0.0})
        for group, of_base in zip(self.param_groups, self._base.param_groups, strict=True):
            # A base may have changed its entries: torchao's make tensors of learning rates.
            group.update({k: v for k, v in of_base.items() if k not in ("params", NAMES)})
        made = dict(self._base.state)  # Adagrad makes its state at construction
        self._bind_base()
        self._base.state.update(made)
        self._step_base = unhooked(self._base)
        training.look_for_places()
        training.trained = set(training.training_params())
        self._curvature = curvature(training)
        training_ranks = world.size - helpers * (helper_role is not None)
        check_scaler(grad_scaler, training.averages, training_ranks)
        self._start_together(helper_role)

    def _start_together(self, helper_role: Role | None) -> None:
        """Agree with the other processes, and start from the same parameters."""
        training, world, lines = self._training, self._training.world, self._curvature.description()
        if isinstance(self._base, TwoBases):
            lines += self._base.description()
        self._consistency.check_built(training, lines)
        if helper_role is not None:
            sharded = any(map(is_dtensor, training.model.parameters()))
            if any(world.all_gather_object(sharded)):  # all raise, whoever has shards
                raise ValueError(whole_models(training.name, helper_role))
        averages, self._constructed = training.averages, True
        self._curvature.begin()  # with equal options, so that all raise or none
        if world.size > 1:
            training.add_ddp_hook(training.running_ddp)
        if averages:
            tensors = training.whole_model()
            with torch.no_grad():
                world.broadcast_from_first([t for t in tensors if not is_dtensor(t)])

    def _bind_base(self) -> None:
        """Let the base work on the very groups and state of this optimizer."""
        self._base.param_groups = self.param_groups
        self._base.state = BaseState(self.state)  # type: ignore[assignment]
        training = self._training
        training.base, training.base_name = self._base, name_of(self._base)
        training.groups = self.param_groups
        # Weakly: an optimizer goes as soon as nobody has it, and its hooks with it.
        training.publish = partial(_share_state_of, weakref.ref(self))

    def agree(self, doing: str) -> None:
        """Raise RankMismatchError on every rank unless all do the same; a collective."""
        self._training.require_group(doing)
        if not self._curvature.helps:  # a helper does as it is told
            doing = f"{doing} of {type(self).__name__}"
            self._consistency.check(self._training, self._curvature, doing)

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
        training, curvature, loss = self._training, self._curvature, None
        check_step(training, curvature.scaler_matters, closure, self._unwatched)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # By a step of lr 0 and zero gradients torch.distributed.checkpoint makes state exist. It
        # moves no counter and starts no collective: one rank alone may take it.
        empty = training.steps == 0 and not self.state and is_checkpointing()
        if DTENSORS in sys.modules and self.take_shards() and empty:
            # torch has set the gradients of those before
            for p in members_of(self.param_groups):
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        if empty:
            self._share_state()
            self._step_base()
            return loss
        if curvature.helps:
            curvature.prepare()
            return loss
        if training.collected is not None:
            training.collected = None
            self._share_state()
        if training.world.size > 1:
            with stage("compare"):
                doing = f"take a step of {training.name}"
                self._consistency.check(training, curvature, doing, tensors=True)
        follow_peak_rates(self.param_groups)
        curvature.prepare()
        pending = ARRIVED
        if training.averages:
            with stage("average_gradients"):
                pending = start_average(training, curvature.route)
        curvature.precondition(pending)
        with stage("base"):
            curvature.step_base(self._step_base)
        curvature.correct()
        if training.world.size > 1:
            training.trained = set(training.training_params())
        training.steps += 1
        if training.steps == 1:  # the rest of it is put there for whoever asks for a checkpoint
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault(CURVATURE, {})
        curvature.watch()
        return loss

    def take_shards(self) -> bool:
        """Go on with the shards of parameters that FSDP2 has replaced since the last look."""
        training, others = self._training, self._training.new_shards()
        if not others:
            return False
        check_sharding(training.model)
        check_mesh(training.model, training.world)
        before = [[*group["params"]] for group in self.param_groups]
        for group in self.param_groups:
            group["params"][:] = [others.get(p, p) for p in group["params"]]
        try:
            self._curvature.replace_params(others)
        except Exception:
            for group, params in zip(self.param_groups, before, strict=True):
                group["params"][:] = params
            raise
        for p in others.keys() & self.state.keys():
            parts = self.state[others[p]] = self.state.pop(p)
            for key, value in parts.get(BASE, {}).items():
                if isinstance(value, Tensor):
                    parts[BASE][key] = like(others[p], value)
        training.trained = {others.get(p, p) for p in training.trained}
        training.look_for_places()
        training.publish()  # what the curvature has dropped is in the parts that have moved
        return True

    def _share_state(self) -> None:
        """Show counters and curvature in ``state``, where checkpoints look."""
        parts = self._curvature.state()
        steps = self._training.steps
        for group in self.param_groups:
            written_by = base_of(self._base, group)
            for p in group["params"]:
                self.state[p][CURVATURE] = {**parts.get(p, {}), **header(steps, written_by)}

    @between_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and drop the statistics that the last backward left."""
        self.take_shards()
        super().zero_grad(set_to_none)
        self._curvature.drop_pending()

    @property
    def train(self) -> Callable[[], None]:
        """The base's ``train()``, which schedule-free ones want to be called before training."""
        return switch_of(self._base, "train", self._training.name, self.state)

    @property
    def eval(self) -> Callable[[], None]:
        """The base's ``eval()``: schedule-free ones set the parameters to their average."""
        return switch_of(self._base, "eval", self._training.name, self.state)

    # ------------------------------------------------------------------- groups and checkpoints

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another ``state`` but none, and ``param_groups`` that do not begin with ours."""
        # A wrapper of Lightning's has our class and passes on what it does not have.
        if name not in ("state", "param_groups") or not getattr(self, "_constructed", False):
            super().__setattr__(name, value)
        elif name == "param_groups":
            self._resume(value)
        elif not value:  # as fastai has the base start anew
            self.state.clear()
        else:
            raise AttributeError(
                f"{type(self).__name__}.state is shared with the base and cannot be replaced: use "
                f"load_state_dict(), or assign an empty one for the base to start anew"
            )

    def _resume(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over groups of a run before, as Lightning's BaseFinetuning assigns them."""
        ours, before = self.param_groups, len(self.param_groups)
        mine, theirs = ([[*map(id, group["params"])] for group in each] for each in (ours, groups))
        if theirs[:before] != mine:
            raise AttributeError(
                f"{type(self).__name__}.param_groups is shared with the base, and the list that is "
                f"assigned does not begin with its {before} groups: change settings in place "
                f"(group['lr'] = ...), use add_param_group(), or make the optimizer anew"
            )
        for group, settings in zip(ours, groups, strict=False):
            group.update({k: v for k, v in settings.items() if k not in ("params", NAMES, REST)})
        for group in groups[before:]:
            self.add_param_group(group)

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse ``copy.deepcopy``, ``copy.copy`` and ``pickle``."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it has hooks on its model, and "
            f"process groups. Copy or save its state_dict(), make another one of the model's copy, "
            f"and call load_state_dict() on that"
        )

    def _check_group_options(self, groups: Iterable[Any], first: int = 0) -> None:
        by_layer = self.options_by_layer
        check_group_options(type(self).__name__, groups, self._refused, by_layer, first)

    def _complete(self, group: dict[str, Any]) -> None:
        """Give a group the entries that it lacks, of the base that trains it."""
        for key, value in {**self.defaults, **base_of(self._base, group).defaults}.items():
            group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its layers are planned from the next step on. Every process calls it.

        Raises:
            RankMismatchError: On every process, if the processes do different things.
        """
        if "_training" not in vars(self):  # as in load_state_dict
            self.optimizer.add_param_group(param_group)  # type: ignore[attr-defined]
            return
        if not self._constructed:
            super().add_param_group(param_group)
            return
        training, before, group = self._training, [*self.param_groups], whole_group(param_group)
        refuse_meta(training.name, members_of([group]), training.model)
        base, doing = self._base, "add a parameter group"
        divided = base.divided if isinstance(base, TwoBases) else lambda group, _: [group]
        try:
            try:
                self._check_group_options([group], first=len(before))
                for part in divided(group, training.model):
                    named = named_like(self.param_groups, part, training.names())
                    self._complete(named)
                    super().add_param_group(named)
            except Exception as error:
                doing = f"refuse a parameter group ({error})"
                raise
            finally:
                self.agree(doing)
            self._curvature.replan()
        except Exception:
            self.param_groups[:] = before
            raise
        newcomers = members_of(self.param_groups[len(before) :])
        training.trained |= {p for p in newcomers if p.requires_grad}
        training.look_for_places()
        if self._needs_model:
            warn_about_unowned(training, [group], training.base_name, first=len(before))

    def consolidate(self, to: int | None = 0) -> None:
        """Collect the state that other processes keep, for the next :meth:`state_dict`.

        A collective: every process calls it. Collected state is dropped at the next step. Nothing
        happens where every process keeps everything.

        Args:
            to: The rank that is going to save; None if all ranks are.

        Raises:
            ValueError: If there is no such rank.
        """
        size = self._training.world.size
        check_rank("consolidate", to, size)
        if self._curvature.kept_elsewhere:
            self.agree(f"consolidate(to={to})")
            ranks = range(size) if to is None else [to]
            self._training.collected = self._curvature.gather(ranks), to

    # The name that torch's ZeroRedundancyOptimizer has for it: Lightning calls it before it saves.
    consolidate_state_dict = consolidate

    def state_dict(self) -> dict[str, Any]:
        """The state as primitives and tensors, as ``torch.load`` accepts with its defaults.

        It has what decides every later step, inverses included: ``summary()`` says how many bytes
        these add. Tensors are shared, not copied.

        Raises:
            SecondOrderError: If other processes keep some of it, :meth:`consolidate` has not
                collected it, and ``torch.distributed.checkpoint`` does not ask for a part.
        """
        self.take_shards()
        if collects_by_itself(self._training, self._curvature):
            everybody = range(self._training.world.size)
            self._training.collected = self._curvature.gather(everybody), None
        require_whole(self._training, self._curvature)
        if self.state:
            self._share_state()
        found = super().state_dict()
        # Copies, because close() takes the curvature out of the entries of `state`. The parts have
        # one order on every rank: torch.distributed.checkpoint gathers DTensors in that order.
        for index, entry in found["state"].items():
            parts = [part for part in (BASE, CURVATURE) if part in entry]
            found["state"][index] = {part: entry[part] for part in parts}
        add_to_save(self._training, self._curvature, found["state"])
        add_collected(self._training, found["state"])
        return found

    def export_base_state(self, rest: bool = False) -> dict[str, Any]:
        """The state that the base, or ``rest``, would have saved; see :meth:`state_dict`."""
        return export_base_state(self.state_dict(), rest)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint that any number of processes wrote, or a state of the base alone.

        Inverses are loaded by the processes that precondition with them; if some are missing, their
        layers are refreshed at the next step. With a state of the base alone, curvature restarts.

        Raises:
            ValueError: If an entry, named in the error, does not fit, is not finite, out of bounds
                or unknown, or is another base's; nothing has changed then.
        """
        if "_training" not in vars(self):  # a wrapper of Lightning's, whose class is made of ours
            self.optimizer.load_state_dict(state_dict)  # type: ignore[attr-defined]
            return
        check_is_state(state_dict)
        self.take_shards()
        training, names, groups = self._training, self._training.names(), self.param_groups
        saved: dict[Tensor, SavedPart] = {}
        steps, absent = 0, list[str]()

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
        training.collected = None
        if self.state and not any(saved.values()):
            training.warn(
                f"the state loaded is of {training.base_name} alone: it is taken over, and the "
                f"curvature starts anew"
            )
        if absent:
            listed = ", ".join(absent[:20])
            training.warn(f"the checkpoint has nothing of {listed}: their state begins anew")
        for group in self.param_groups:  # a checkpoint of the base alone lacks our entries
            self._complete(group)
        self._bind_base()
        if len(self._base.state):  # some bases expect their first entry to exist
            self._base.__setstate__({"state": self._base.state, "param_groups": self.param_groups})
        self._curvature.load(saved)
        self._share_state()

    # ------------------------------------------------------------------------------ odds and ends

    @property
    def training(self) -> Training:
        """What the optimizer and its curvature share."""
        return self._training

    def summary(self) -> Summary:
        """A table of the layers preconditioned, by which ranks, and of those left to the base.

        With several parameter groups, which base trains each, and with which settings.
        Bytes are those of this process. Reading it waits for the device.
        """
        return replace(self._curvature.summary(), groups=group_lines(self._training))

    def statistics(self) -> dict[str, float]:
        """Numbers to log: of the last step, and of the curvature in use.

        The names are the same on every process, and on the page *Instruments*; a number that this
        process does not know is NaN. Nothing is sent, and the device is waited for.
        """
        return {"step": float(self._training.steps), **self._curvature.metrics()}

    @contextmanager
    def hooks_removed(self) -> Iterator[None]:
        """Take all hooks off the model for a block, and put them back after it.

            with optimizer.hooks_removed():
                scripted = torch.jit.script(model)

        Passes inside the block leave no statistics, and :meth:`step` is refused there. Export,
        tracing and compiling for inference do not need this: hooks step aside by themselves.
        """
        outer, self._unwatched = self._unwatched, True
        hooks = self._training.model._forward_pre_hooks
        checks = {handle.id: hooks.pop(handle.id, None) for handle in self._training.ddp_hooks}
        try:
            with self._curvature.unwatched():
                yield
        finally:
            hooks.update({key: check for key, check in checks.items() if check is not None})
            self._unwatched = outer

    def close(self) -> None:
        """End threads, hooks and messages; from now on the base steps alone."""
        self._curvature.close()
        for handle in self._training.ddp_hooks:
            handle.remove()
        self._training.collected = None
        if self.state:
            self._share_state()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _share_state_of(optimizer: weakref.ref[SecondOrderOptimizer]) -> None:
    alive = optimizer()
    if alive is not None and alive.state:
        alive._share_state()
