"""The contract of a ``torch.optim`` optimizer that wraps another.

    loss = closure()                   once, first, with gradients enabled
    curvature.prepare()                plans anew, refreshes what is due
    gradients <- mean over processes   unless DistributedDataParallel has done it
    curvature.precondition()           gradients <- curvature⁻¹ gradients, in place
    base.step()                        the wrapped optimizer, on the same groups and state
    curvature.correct()                what is left to do to the parameters

Nothing here is numerical. ``state[p]`` holds two parts: ``"base"``, which the wrapped optimizer
sees as its whole state for p, and ``"curvature"``, which belongs to the curvature.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from second_order.contract.arguments import check_scaler, what_is_given
from second_order.contract.averaging import start_average
from second_order.contract.base_state import CURVATURE, BaseState
from second_order.contract.base_step import (
    initialises_state,
    refuse_in_evaluation,
    refuse_unknown_scaler,
    refuse_within_backward,
    runs_between_graphs,
    set_aside,
    unhooked_step,
    without_gradients,
)
from second_order.contract.checkpoint import (
    Checkpoint,
    Collected,
    check_is_state,
    export_base_state,
    header,
    read_checkpoint,
)
from second_order.contract.consistency import Consistency
from second_order.contract.curvature import Curvature
from second_order.contract.groups import (
    NAMES,
    materialised,
    members_of,
    named_like,
    outline_of,
    refuse_meta,
    shallow,
)
from second_order.contract.partition import REST, Partition
from second_order.contract.recipe import recipe_of
from second_order.contract.sharding import (
    Places,
    agree_on_shards,
    check_mesh,
    check_sharding,
    moved_state,
    replaced_in,
    trouble_with_mesh,
)
from second_order.contract.training import Training
from second_order.contract.two_bases import (
    TwoBases,
    base_of,
    name_of,
    parts_of,
    switch_of,
)
from second_order.contract.warnings import warns_at_its_end
from second_order.distributed.world import World
from second_order.options import (
    PEAK_LR,
    check_base,
    check_choice,
    check_learning_rate,
    check_rank,
    check_rest,
    follow_learning_rates,
    split_base_keywords,
)
from second_order.report import Recipe, Summary
from second_order.sharded import is_dtensor

__all__ = ["ParamsOrModel", "SecondOrderOptimizer"]

ParamsOrModel: TypeAlias = nn.Module | Iterable[Any]
Self = TypeVar("Self", bound="SecondOrderOptimizer")


class SecondOrderOptimizer(torch.optim.Optimizer):
    """A base optimizer and a curvature, as one optimizer of ``torch.optim``.

    Args:
        params_or_model: A module, whose trainable parameters are optimized, or parameters or
            groups.
        model: The module, where ``params_or_model`` is not one.
        base: Class of the first-order optimizer.
        base_kwargs: Keyword arguments of ``base``.
        own_keywords: Names of the optimizer's own options, for messages.
        curvature: Makes the curvature of a training.
        needs_model: Whether a model is required.
        gradient_averaging: "auto": average gradients over the processes unless the model is wrapped
            in DistributedDataParallel; True or False: always or never.
        grad_scaler: The GradScaler that scales the loss, if one does.
        process_group: The processes to work with; None for the default group.
        debug: Every how many steps ranks compare their parameters and states; True or False.
        rest: Class of a second first-order optimizer, for all that is no hidden weight; None for
            one base.
        rest_layers: Patterns of modules that ``rest`` trains besides.
        rest_kwargs: Keyword arguments of ``rest`` where they differ from those of the base.
        team: Gives the ranks that do what this one does, as torch numbers them; None for all. Where
            they are not, shards are checked on all ranks together.

    Raises:
        TypeError: For an unknown keyword, a base that is no optimizer class, or a missing model.
        ValueError: For a value outside its bounds.
        RankMismatchError: On every rank, if descriptions or parameters' shapes differ.
    """

    def __init__(
        self,
        params_or_model: ParamsOrModel,
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
        team: Callable[[World], Sequence[int]] | None = None,
    ) -> None:
        name = type(self).__name__
        check_base(base, SecondOrderOptimizer)
        layers = check_rest(rest, rest_layers, rest_kwargs, SecondOrderOptimizer)
        keywords = split_base_keywords(base, own_keywords, base_kwargs, rest, rest_kwargs)
        for each in keywords:
            check_learning_rate(each.get("lr", 0.0))
        check_choice("gradient_averaging", gradient_averaging, ("auto", True, False))
        self._consistency = Consistency(debug)
        given = what_is_given(name, base.__name__, params_or_model, model, needs_model)
        world = World(process_group)
        trouble = trouble_with_mesh(given.model, world, team and team(world))
        wanted = not given.under_ddp if gradient_averaging == "auto" else gradient_averaging is True
        if trouble is None and given.params and all(map(is_dtensor, given.params)):
            wanted = False  # FSDP2 averages
        self._training = training = Training(
            name,
            given.model,
            given.known,
            given.under_ddp,
            world,
            wanted and world.size > 1,
            grad_scaler,
        )
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched.isdigit() and int(launched) > 1 and world.group is None:
            training.warn(
                f"WORLD_SIZE is {launched}, but no process group is initialised: each process "
                f"trains alone; call torch.distributed.init_process_group() before making the "
                f"optimizer"
            )
        self._constructed, self._unwatched, self._collected = False, False, Collected()
        if given.strange and needs_model:
            training.warn(
                f"{len(given.strange)} of {len(given.params)} parameters are not the model's, and "
                f"are trained by {(rest or base).__name__} alone, without curvature: of shapes "
                f"{', '.join(given.strange[:10])}"
            )
        groups = given.groups
        self._division = division = None if rest is None else Partition(base, rest, layers)
        if division is None:
            # Groups of a model are named, as named_parameters() are; a base may not know of names.
            self._base = base(
                given.params if given.named else [shallow(g) for g in groups], **base_kwargs
            )
        else:
            groups = division.divided_all(groups, given.model)
            self._base = TwoBases(groups, base, keywords[0], division.rest, keywords[1])
            groups = self._base.param_groups
        super().__init__([shallow(g) for g in groups], {**self._base.defaults, PEAK_LR: 0.0})
        made = dict(self._base.state)  # Adagrad makes its state at construction
        self._bind_base()
        self._base.state.update(made)
        self._tell_of_patterns()
        self._places = Places(training.model, members_of(self.param_groups))
        training.trained = set(training.training_params())
        self._curvature = curvature(training)
        check_scaler(grad_scaler, training.averages, self._curvature.averaging_processes())
        self._start_together(trouble)

    def _start_together(self, trouble: str | None) -> None:
        """Agree with the other processes, and start from the same parameters."""
        training, world = self._training, self._training.world
        lines = self._curvature.description()
        if self._division is not None:
            lines += self._division.description(parts_of(self._base))
        self._consistency.check_built(training, lines)
        if trouble is not None:
            agree_on_shards(training, trouble)
        self._curvature.check_processes()  # of equal options, so that all raise or none
        if training.averages:
            tensors = [*training.model.parameters(), *training.model.buffers()]
            with torch.no_grad():
                world.broadcast_from_first([t for t in tensors if not is_dtensor(t)])
        self._constructed = True
        self._curvature.begin()

    def _agree(self, doing: str, coming: Sequence[dict[str, Any]] | None = None) -> None:
        """Raise RankMismatchError on every rank unless all do the same; a collective."""
        if self._curvature.instead is None:  # a helper does as it is told
            doing = f"{doing} of {type(self).__name__}"
            self._consistency.check(self._training, self._curvature, doing, coming)

    # ------------------------------------------------------------------------------- stepping

    @runs_between_graphs
    @warns_at_its_end
    @without_gradients
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
        training, curvature = self._training, self._curvature
        loss = None
        refuse_within_backward(training.name)
        refuse_in_evaluation(training.name, self.param_groups)
        if self._unwatched:
            raise RuntimeError(
                f"{training.name}.step() inside hooks_removed(): the passes in there leave no "
                f"statistics; train after the block"
            )
        if closure is not None and not callable(closure):
            raise TypeError(f"closure={closure!r} is not a function; use step() without one")
        if training.steps == 0 and training.scaler is None and curvature.scaler_matters:
            refuse_unknown_scaler(training.name, curvature.scaler_matters)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Such a step must move no counter and start no collective: one rank alone may take it.
        fresh = not self.state and training.steps == 0 and curvature.nothing_captured()
        empty = fresh and initialises_state(self.param_groups)
        if self._take_shards() and empty:  # torch has set the gradients of those before
            for p in members_of(self.param_groups):
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        if empty:
            self._share_state()
            self._base_step()
            return loss
        if curvature.instead is not None:
            curvature.instead()
            return loss
        if self._collected.drop():
            self._share_state()
        with training.meter.stage("compare"):
            doing = f"take a step of {training.name}"
            self._consistency.check(training, curvature, doing, tensors=True)
        follow_learning_rates(self.param_groups)
        curvature.prepare()
        with training.meter.stage("average_gradients"):
            pending = start_average(training, curvature.route)
        curvature.precondition(pending)
        with training.meter.stage("base"), set_aside(training):
            curvature.step_base(self._base_step)
        curvature.correct()
        training.trained = set(training.training_params())
        training.steps += 1
        if training.steps == 1:
            self._share_state()
        curvature.watch()
        training.meter.lap()
        return loss

    def _take_shards(self) -> bool:
        """Go on with the shards of parameters that FSDP2 has replaced since the last look."""
        others = self._places.replaced() if "_places" in self.__dict__ else {}
        if not others:
            return False
        model, world = self._training.model, self._training.world
        check_sharding(model)
        check_mesh(dict(model.named_parameters()), world)
        self._curvature.replace_params(others)
        replaced_in(self.param_groups, others)
        moved_state(self.state, others)
        self._training.trained = {others.get(p, p) for p in self._training.trained}
        self._places = Places(model, members_of(self.param_groups))
        self._curvature.replaced()
        return True

    def _base_step(self) -> None:
        unhooked_step(self._base)

    def _share_state(self) -> None:
        """Show counters and curvature in ``state``, where checkpoints look."""
        parts = self._curvature.state()
        steps = self._training.steps
        for group in self.param_groups:
            written_by = base_of(self._base, group)
            for p in group["params"]:
                self.state[p][CURVATURE] = {**parts.get(p, {}), **header(steps, written_by)}

    @runs_between_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and drop the statistics that the last backward left."""
        self._take_shards()
        super().zero_grad(set_to_none)
        if hasattr(self, "_curvature"):
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
        before, both = len(self.param_groups), (self.param_groups, groups)
        mine, theirs = ([[*map(id, group["params"])] for group in each] for each in both)
        if theirs[:before] != mine:
            raise AttributeError(
                f"{type(self).__name__}.param_groups is shared with the base, and the list that is "
                f"assigned does not begin with its {before} groups: change settings in place "
                f"(group['lr'] = ...), use add_param_group(), or make the optimizer anew"
            )
        for ours, group in zip(self.param_groups, groups, strict=False):
            ours.update({k: v for k, v in group.items() if k not in ("params", NAMES, REST)})
        for group in groups[before:]:
            self.add_param_group(group)

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse ``copy.deepcopy``, ``copy.copy`` and ``pickle``."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it has hooks on its model, and "
            f"process groups. Copy or save its state_dict(), make another one of the model's copy, "
            f"and call load_state_dict() on that"
        )

    def _complete(self, group: dict[str, Any]) -> None:
        """Give a group the default entries that it lacks, those of the base that trains it."""
        own = {} if self._division is None else base_of(self._base, group).defaults
        for key, value in {**self.defaults, **own}.items():
            group.setdefault(key, value)

    def _tell_of_patterns(self) -> None:
        """Warn of the patterns of ``rest_layers`` that match no module."""
        training = self._training
        unmatched = [] if self._division is None else self._division.unmatched(training.model)
        for pattern in unmatched:
            training.warn(f"rest_layers: the pattern {pattern!r} matches no module of the model")

    @warns_at_its_end
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its layers are planned from the next step on. Every process calls it.

        Raises:
            RankMismatchError: On every process, if the processes do different things.
        """
        if "_training" not in vars(self):  # as in load_state_dict
            self.optimizer.add_param_group(  # type: ignore[attr-defined]
                param_group
            )
            return
        if not self._constructed:
            super().add_param_group(param_group)
            return
        division, model, before = self._division, self._training.model, [*self.param_groups]
        group = materialised(param_group)
        refuse_meta(type(self).__name__, members_of([group]), model)
        self._agree("add a parameter group", [*before, outline_of(group, self.defaults)])
        try:
            for part in [group] if division is None else division.divided(group, model):
                named = named_like(self.param_groups, part, model)
                if division is not None:
                    self._complete(named)
                super().add_param_group(named)
        except Exception:
            self.param_groups[:] = before
            raise
        newcomers = members_of(self.param_groups[len(before) :])
        self._training.trained |= {p for p in newcomers if p.requires_grad}
        self._places = Places(self._training.model, members_of(self.param_groups))
        self._curvature.replan()

    @warns_at_its_end
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
            self._agree(f"consolidate(to={to})")
            ranks = range(size) if to is None else [to]
            self._collected.take(self._curvature.gather(ranks), to)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Call :meth:`consolidate`: the name that torch's ZeroRedundancyOptimizer has for it.

        Lightning calls it before it saves a checkpoint.
        """
        self.consolidate(to)

    def state_dict(self) -> dict[str, Any]:
        """The state as primitives and tensors, as ``torch.load`` accepts with its defaults.

        Raises:
            SecondOrderError: If other processes keep some of it, it has not been collected by
                :meth:`consolidate` since the last step, and it is not
                ``torch.distributed.checkpoint`` that asks for this process's part.
        """
        self._take_shards()
        self._collected.require(self._training, self._curvature)
        if self.state:
            self._share_state()
        found = super().state_dict()
        # Entries of their own: close() takes the curvature out of those of `state`.
        found["state"] = {index: dict(entry) for index, entry in found["state"].items()}
        self._collected.add_to(found["state"], members_of(self.param_groups))
        return found

    def export_base_state(self, rest: bool = False) -> dict[str, Any]:
        """The state that the base alone would have saved, for ``load_state_dict`` of its class.

        Args:
            rest: Whether to give the part of ``rest`` and not of ``base``, if there are two bases.

        Raises:
            SecondOrderError: If other processes keep some of the state; see :meth:`state_dict`.
            ValueError: For ``rest=True`` without two bases.
        """
        return export_base_state(self.state_dict(), rest)

    @warns_at_its_end
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or a state of its base alone.

        A checkpoint written by any number of processes loads on any other. Inverses are not saved:
        they are recomputed at the next step. The state of the base optimizer alone is taken as the
        base's part, and curvature starts anew.

        Raises:
            ValueError: If an entry, named in the error, does not fit, is not finite, out of bounds
                or unknown, or is another base's; nothing has changed then.
        """
        if "_training" not in vars(self):  # a wrapper of Lightning's, whose class is made of ours
            self.optimizer.load_state_dict(  # type: ignore[attr-defined]
                state_dict
            )
            return
        check_is_state(state_dict)
        self._take_shards()
        names = self._training.names()
        found = Checkpoint({}, [], {}, 0, [])

        def read(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            nonlocal found
            found = read_checkpoint(state, self._base, self.param_groups, names)
            self._curvature.check(found.curvature)
            # Loading casts floating state to the parameter's dtype, so curvature goes around it.
            return {**state, "state": found.base, "param_groups": found.groups}

        last = self.register_load_state_dict_pre_hook(read)  # after what users' hooks make of it
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            last.remove()
        saved = found.curvature
        self._consistency.loaded(self._training, self.state, saved, self._curvature.read_by_all)
        self._collected.drop()
        self._training.steps = found.steps
        if found.base and not any(saved.values()):
            self._training.warn(
                f"the state loaded is of {self._training.base_name} alone: it is taken over, and "
                f"the curvature starts anew"
            )
        if found.absent:
            self._training.warn(
                f"the checkpoint has nothing of {', '.join(found.absent[:20])}: their state begins "
                f"anew"
            )
        for group in self.param_groups:  # a checkpoint of the base alone lacks our entries
            self._complete(group)
        self._bind_base()
        if len(self._base.state):  # some bases expect their first entry to exist
            self._base.__setstate__({"state": self._base.state, "param_groups": self.param_groups})
        self._curvature.load(saved)
        self._share_state()

    def _bind_base(self) -> None:
        """Let the base work on the very groups and state of this optimizer."""
        self._base.param_groups = self.param_groups
        self._base.state = BaseState(self.state)  # type: ignore[assignment]
        self._training.base, self._training.base_name = self._base, name_of(self._base)
        # Weakly: an optimizer goes as soon as nobody has it, and its hooks with it.
        self._training.publish = partial(_share_state_of, weakref.ref(self))

    # ------------------------------------------------------------------------------ odds and ends

    def summary(self) -> Summary:
        """A table of the layers preconditioned, by which ranks, and of those left to the base.

        Bytes are those of this process. Reading it waits for the device.
        """
        return self._curvature.summary()

    def statistics(self) -> dict[str, float]:
        """Numbers to log: of the last step, of the curvature in use, seconds and bytes by stage.

        The names are the same on every process, and on the page *Instruments*; a number that this
        process does not know is NaN. Nothing is sent and nothing changes. Reading it waits for the
        device.
        """
        meter, curvature = self._training.meter, self._curvature
        steps = {"step": float(self._training.steps)}
        return {**steps, **curvature.statistics(), **meter.read(curvature.accounts)}

    def recipe(self) -> Recipe:
        """A table of which base trains each parameter, how, and whether it is preconditioned.

        Reading it waits for the device where learning rates are tensors there.
        """
        preconditioned = {id(p) for p in self._curvature.preconditioned()}
        return recipe_of(self._training, preconditioned)

    @contextmanager
    def hooks_removed(self) -> Iterator[None]:
        """Take all hooks off the model for a block, and put them back after it.

            with optimizer.hooks_removed():
                scripted = torch.jit.script(model)

        Passes inside the block leave no statistics, and :meth:`step` is refused there. Export,
        tracing and compiling for inference do not need this: hooks step aside by themselves.
        """
        outer, self._unwatched = self._unwatched, True
        try:
            if self._training.late_ddp is not None:
                self._training.late_ddp.remove()
            with self._curvature.unwatched():
                yield
        finally:
            self._unwatched = outer

    def close(self) -> None:
        """End threads, hooks and messages; from now on the base steps alone."""
        self._curvature.close()
        if self._training.late_ddp is not None:
            self._training.late_ddp.remove()
        self._collected.drop()
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
