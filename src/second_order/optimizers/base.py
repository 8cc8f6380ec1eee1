"""The base class of all optimizers: a ``torch.optim`` optimizer around another one.

One step, as :meth:`SecondOrderOptimizer.step` takes it:

    check                           that a step can be taken now
    loss = closure()                if there is one, with gradients enabled
    compare                         that all workers, the ranks that train, are about to
                                    take the same step
    curvature.prepare()             assigns layers to ranks, or refreshes eigenpairs; on
                                    a helper rank, serves the workers until they have
                                    taken the step
    gradients <- mean over ranks    unless DistributedDataParallel or FSDP2 has averaged
                                    them, or gradient_averaging=False
    curvature.precondition()        gradients <- curvature⁻¹ gradients, in place
    curvature.step_base()           base.step(), the base optimizer, on the same groups
                                    and state; K-FAC scales the step
    curvature.finish_step()         FOSI corrects the step; DistKFAC sends the
                                    parameters to stats workers
    curvature.watch()               registers the hooks that the next passes need

The curvature and the base do the numerical work. This file connects them, and makes the
result behave like any other ``torch.optim`` optimizer: groups, checkpoints, copies,
``train()`` and ``eval()``.

``state[p]`` has two parts. The base sees ``state[p]["base"]`` as its whole state for p.
``state[p]["curvature"]`` refers to tensors that the curvature has. ``_publish_state``
writes it when ``state_dict()`` is called, when a checkpoint is loaded, and when the
curvature has replaced or dropped tensors, which ``state`` would else keep in memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from second_order.checkpoint.caller import caller, is_checkpointing
from second_order.checkpoint.saved import BASE, CURVATURE, BaseState
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
    FrozenParams,
    check_listed_once,
    check_model_owns_params,
    check_not_on_meta,
    check_scaler,
    read_arguments,
    warn_about_unowned,
    warn_if_no_process_group,
)
from second_order.optimizers.base_pair import (
    AUX_BASE,
    BasePair,
    base_of,
    describe_groups,
    mode_switch,
)
from second_order.optimizers.checkpoint import (
    Checkpoint,
    Collected,
    add_checkpoint_entries,
    add_collected,
    check_is_complete,
    check_is_state,
    collects_in_state_dict,
    export_base_state,
    header,
    read_checkpoint,
)
from second_order.optimizers.config import CommonOptions
from second_order.optimizers.consistency import Consistency
from second_order.optimizers.find_model import find_model
from second_order.optimizers.keywords import (
    Rate,
    check_base,
    keywords_of,
    split_base_keywords,
)
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
    python_number,
    rate_of_groups,
)
from second_order.utils.stages import stage

__all__ = ["ParamsOrModel", "SecondOrderOptimizer"]

P = ParamSpec("P")
R = TypeVar("R")
ParamsOrModel: TypeAlias = nn.Module | Iterable[Any]
Self = TypeVar("Self", bound="SecondOrderOptimizer")


# torch gives this id instead of a backward pass's, while none is running.
NO_BACKWARD = -1


def runs_eagerly(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that ``torch.compile`` must not trace: it breaks the graph."""
    disabled = torch.compiler.disable(
        method,
        reason="a second-order step exchanges and decomposes factors in Python, between graphs: "
        "compile the model, or the function around the step without fullgraph",
    )
    return cast(Callable[P, R], disabled)


def passed_on_by_wrappers(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that sets attributes, so that Lightning's wrapper passes it on.

    The wrapper's class inherits from the optimizer's. Attributes that the wrapper lacks
    are those of the optimizer. Those that a method sets would be the wrapper's own.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        called_on: Any = args[0]
        if "_constructed" in vars(called_on):
            return method(*args, **kwargs)
        passed_on = getattr(called_on.optimizer, method.__name__)
        return cast(R, passed_on(*args[1:], **kwargs))

    return call


class SecondOrderOptimizer(torch.optim.Optimizer):
    """A base optimizer and a curvature, as one ``torch.optim`` optimizer.

    Args:
        params: The model, or its parameters or parameter groups.
        lr: Learning rate of the base. None: every parameter group has its own, and that
            of the first group is the default for groups that are added later.
        common: The keywords that all optimizers share.
        base_kwargs: Arguments of the base optimizer.
        make_curvature: Makes the curvature of this training run.
        needs_model: Whether parameters that belong to no module get no curvature.
        helper_role: Role of the last ``num_helpers`` ranks. None: all ranks train.
        num_helpers: Number of ranks that do not train.
    """

    options_by_layer = False
    """Whether groups may have ``damping``, ``factor_decay`` and ``precondition``."""

    def __init__(
        self,
        params: ParamsOrModel,
        lr: Rate | None,
        *,
        common: CommonOptions,
        base_kwargs: Mapping[str, Any],
        make_curvature: Callable[[Training], Curvature],
        needs_model: bool = True,
        helper_role: Role | None = None,
        num_helpers: int = 0,
    ) -> None:
        name = type(self).__name__
        aux = common.aux
        self._constructed = False
        # Set by consolidate(), for state_dict().
        self._collected: Collected | None = None
        self._loaded_since_step = False
        self._hooks_are_removed = False
        self._needs_model = needs_model
        self._consistency = Consistency(common.debug)

        # Check the keywords, and divide those of the base between the two bases.
        own_keywords = keywords_of(type(self))
        check_base(common.base, SecondOrderOptimizer)
        if aux is not None:
            check_base(aux.optimizer_class, SecondOrderOptimizer, "aux_base")
        shared_kwargs = dict(base_kwargs)
        if lr is not None:
            shared_kwargs = {"lr": lr, **base_kwargs}
        kwargs_by_base = split_base_keywords(
            common.base, shared_kwargs, aux, own_keywords
        )
        for kwargs in kwargs_by_base:
            for keyword, value in kwargs.items():
                kwargs[keyword] = python_number(value)
            check_learning_rate(kwargs.get("lr", 0.0))
        check_choice(
            "gradient_averaging", common.gradient_averaging, ("auto", True, False)
        )

        # Find the model, and check the parameter groups.
        arguments = read_arguments(name, params, common.model, find_model, needs_model)
        groups = arguments.groups
        self._forbidden_in_groups = set(own_keywords) - {"lr"}
        if aux is not None:
            self._forbidden_in_groups.discard(AUX_BASE)
        self._check_group_options(groups)
        if lr is None:
            rate = rate_of_groups(name, groups)
            for kwargs in kwargs_by_base:
                kwargs.setdefault("lr", rate)

        # Find the ranks that train together.
        world = common.process_group
        if not isinstance(world, World):
            world = World(world)
        if world.size == 1:
            helper_role = None
        if helper_role is None:
            check_mesh(arguments.model, world)

        # Build the base, which shares its groups and its state with this optimizer.
        if aux is None:
            self._base = common.base(without_names(groups), **kwargs_by_base[0])
            own_groups = groups
        else:
            self._base = BasePair(
                groups=groups,
                model=arguments.model,
                optimizer_classes=(common.base, aux.optimizer_class),
                kwargs=kwargs_by_base,
                layers=aux.layers,
            )
            own_groups = self._base.param_groups
        # PEAK_LR is a group's largest learning rate so far or by its schedule. Numbers
        # for FOSI's newton_scale and for kl_clip are those at this rate. Each step
        # updates it.
        defaults = {**self._base.defaults, PEAK_LR: 0.0}
        super().__init__([copy_group(group) for group in own_groups], defaults)
        self._share_groups_and_state()

        # Build the curvature.
        params_in_groups = group_params(groups)
        training = Training(
            name=name,
            model=arguments.model,
            owns_params=arguments.owns_params,
            outer_class=arguments.outer_class,
            under_ddp=arguments.under_ddp,
            world=world,
            averages_gradients=_averages_gradients(
                common.gradient_averaging, arguments.under_ddp, params_in_groups, world
            ),
            scaler=common.grad_scaler,
            debug=bool(common.debug),
            base=self._base,
            # A weak reference, so that the optimizer and its hooks are freed with the
            # last reference that the script has.
            publish=partial(_publish_state_of, weakref.ref(self)),
        )
        self._training = training
        self._param_locations = ParamLocations(arguments.model, params_in_groups)
        # Given a model, the groups leave out the parameters that are frozen now.
        self._frozen: FrozenParams | None = None
        if isinstance(params, nn.Module):
            all_params = list(params.parameters())
            if not all(p.requires_grad for p in all_params):
                self._frozen = FrozenParams(all_params)
        warn_if_no_process_group(training)
        check_model_owns_params(training, params_in_groups)
        if needs_model:
            warn_about_unowned(training, groups)
        if isinstance(self._base, BasePair):
            for pattern in self._base.unmatched:
                training.warn(
                    f"aux_base: the pattern {pattern!r} matches no module of the model"
                )
        self._curvature = make_curvature(training)
        num_workers = world.size
        if helper_role is not None:
            num_workers -= num_helpers
        check_scaler(common.grad_scaler, training.averages_gradients, num_workers)

        self._start_together(helper_role)

    def _share_groups_and_state(self) -> None:
        """Let the base work on the groups and the state of this optimizer."""
        base_groups = self._base.param_groups
        for group, base_group in zip(self.param_groups, base_groups, strict=True):
            # A base may change its entries: torchao's turn learning rates into tensors.
            for key, value in base_group.items():
                if key not in ("params", NAMES):
                    group[key] = value
        # Adagrad creates its state at construction.
        initial_state = dict(self._base.state)
        self._bind_base()
        self._base.state.update(initial_state)
        self._base_step = step_without_hooks(self._base)

    def _bind_base(self) -> None:
        """Give the base this optimizer's list of groups, and its part of ``state``.

        torch replaces both objects when it loads a checkpoint.
        """
        self._base.param_groups = self.param_groups
        self._base.state = BaseState(self.state)  # type: ignore[assignment]

    def _start_together(self, helper_role: Role | None) -> None:
        """Check that all ranks built the same optimizer, and broadcast parameters."""
        training = self._training
        world = training.world
        options = self._curvature.description()
        if isinstance(self._base, BasePair):
            options += self._base.description()
        self._consistency.check_construction(training, options)
        if helper_role is not None:
            is_sharded = any(is_dtensor(p) for p in training.model.parameters())
            # All ranks raise if one has shards.
            if any(world.all_gather_object(is_sharded)):
                raise ValueError(sharding_error(training.name, helper_role))

        # `begin` assigns roles, after which `training` has only the ranks of one role.
        # The broadcast below includes all ranks, so it uses the values from before.
        averages_gradients = training.averages_gradients
        self._constructed = True
        self._curvature.begin()

        # Start from the parameters of rank 0 on all ranks, helpers included. If the
        # optimizer does not average gradients, DistributedDataParallel, FSDP2 or the
        # script does both.
        if averages_gradients:
            tensors = [t for t in training.model_tensors() if not is_dtensor(t)]
            with torch.no_grad():
                world.broadcast_from_first(tensors)

    def check_ranks(self, action: str, facts: Sequence[tuple[str, Any]] = ()) -> None:
        """Raise RankMismatchError on every worker unless all are about to do the same.

        Collective.

        Args:
            action: What this rank is about to do, for the message.
            facts: Further names and values that must be equal on all workers.
        """
        self._training.require_process_group(action)
        if self._curvature.is_helper:  # only the workers take part in the comparison
            return
        self._consistency.check(
            self._training, self._curvature, f"{action} of {type(self).__name__}", facts
        )

    # ---------------------------------------------------------------------------- steps

    @runs_eagerly
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        On a helper rank, serve the workers until they have taken theirs.

        Args:
            closure: Calls ``backward`` and returns the loss. It is called once.

        Returns:
            The result of the closure, or None.

        Raises:
            RankMismatchError: On every rank, if the ranks are not about to do the same.
            SecondOrderError: On every rank, if the curvature cannot be computed.
            RuntimeError: If backward is running, inside :meth:`hooks_removed`, in the
                capture of a CUDA graph, or if a schedule-free base is not in train
                mode.
            ValueError: If a GradScaler that was not passed as ``grad_scaler`` calls it.
        """
        training = self._training
        curvature = self._curvature
        self._check_step()

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # Before it loads a checkpoint, torch.distributed.checkpoint takes a step with
        # zero gradients, to create the state of the base.
        if training.steps == 0 and not self.state and is_checkpointing():
            self._create_base_state()
            return loss

        if DTENSORS in sys.modules and self._param_locations.find_new_shards():
            self.adopt_shards()
        if curvature.is_helper:
            # This blocks: it sends what the last passes gave, and serves the workers
            # until they have taken their step.
            curvature.prepare()
            return loss
        self._collected = None  # outdated after this step
        if self._frozen is not None:
            self._frozen.warn_if_trained(training)
        if training.world.size > 1:
            is_loaded = self._loaded_since_step
            with stage("compare"):
                self._consistency.check(
                    training,
                    curvature,
                    action=f"take a step of {training.name}",
                    facts=[("a checkpoint loaded since the last step", is_loaded)],
                    with_params=True,
                )
        update_peak_rates(self.param_groups)

        # Assign layers, or refresh eigenpairs. Then start to average the gradients. A
        # rank may need those of some layers only, so the assignment comes first.
        curvature.prepare()
        average = NO_AVERAGE
        if training.averages_gradients:
            with stage("average_gradients"):
                average = start_average(training, curvature.route)

        # Wait for the average, precondition in place, and let the base take the step.
        curvature.precondition(average)
        with stage("base"):
            curvature.step_base(self._base_step)
        curvature.finish_step()

        # Count the step, and prepare the capture of the next passes.
        self._loaded_since_step = False
        training.count_step()
        if training.steps == 1:
            # Checkpoints need an entry of each parameter, even if it is empty.
            for p in group_params(self.param_groups):
                self.state[p].setdefault(CURVATURE, {})
        curvature.watch()
        return loss

    def _check_step(self) -> None:
        """Raise an error if a step cannot be taken now, before anything has changed."""
        training = self._training
        name = training.name
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}.step() cannot be recorded in a CUDA graph, because each step decides in "
                f"Python which refreshes are due: call it outside of torch.cuda.graph(), and use "
                f"torch.compile(model) to save launches in the forward and backward pass"
            )
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            raise RuntimeError(
                f"{name}.step() is called while backward() runs, perhaps by a parameter's hook, "
                f"but the statistics of a layer are complete only after backward(): make one "
                f"optimizer for the whole model, {name}(model, lr=...), and call step() after "
                f"backward()"
            )
        training.require_process_group("step()")
        for group in self.param_groups:
            if group.get("train_mode") is False:
                raise RuntimeError(
                    f"{name}.step() with a schedule-free base that is not in train mode: call "
                    f"optimizer.train() before training, and optimizer.eval() before evaluation"
                )
        if self._hooks_are_removed:
            raise RuntimeError(
                f"{name}.step() inside hooks_removed(), where no statistics are captured: leave "
                f"the block before you continue training"
            )

        # A GradScaler calls step() from its method _maybe_opt_step. The statistics of
        # an unknown GradScaler's passes are not unscaled. Factors would be too large by
        # the square of the scale, and training would stall.
        reason = self._curvature.scaler_reason
        needs_scaler = training.scaler is None and reason != ""
        if training.steps == 0 and needs_scaler and caller(function="_maybe_opt_step"):
            raise ValueError(
                f"{name}.step() is called by a GradScaler that it does not know: {reason}; write "
                f"{name}(..., grad_scaler=scaler)"
            )

    def _create_base_state(self) -> None:
        """Create the state of the base for torch.distributed.checkpoint.

        Before torch called ``step()``, it set the learning rates and all gradients to
        0. The base takes that step. It is not counted and is not collective, because
        one rank may take it alone.
        """
        if DTENSORS in sys.modules and self.adopt_shards():
            # torch has set the gradients of the parameters that the shards replace.
            for p in group_params(self.param_groups):
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        self._publish_state()
        self._base_step()

    @passed_on_by_wrappers
    def adopt_shards(self) -> bool:
        """Adopt DTensor parameters that ``fully_shard`` created since the last call.

        Returns:
            Whether any parameter changed.
        """
        training = self._training
        shards = self._param_locations.find_new_shards()
        if not shards:
            return False
        check_sharding(training.model)
        check_mesh(training.model, training.world)

        # Replace the old parameters in the groups, the curvature and the state.
        for group in self.param_groups:
            group["params"][:] = [shards.get(p, p) for p in group["params"]]
        self._curvature.replace_params(shards)
        for p, shard in shards.items():
            if p in self.state:
                self._move_state(p, shard)
        params = group_params(self.param_groups)
        self._param_locations = ParamLocations(training.model, params)
        if self.state:
            self._publish_state()
        return True

    def _move_state(self, p: Tensor, shard: Tensor) -> None:
        """Move the state of a parameter to the shard that replaces it."""
        parts = self.state.pop(p)
        self.state[shard] = parts
        for key, value in parts.get(BASE, {}).items():
            if isinstance(value, Tensor):
                parts[BASE][key] = shard_like(shard, value)

    def _publish_state(self) -> None:
        """Write the step counter and the curvature's entries to ``state``."""
        curvature_parts = self._curvature.state()
        steps = self._training.steps
        for group in self.param_groups:
            base = base_of(self._base, group)
            for p in group["params"]:
                part = {**curvature_parts.get(p, {}), **header(steps, base)}
                self.state[p][CURVATURE] = part

    @runs_eagerly
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the statistics of passes since the last step.

        Between a forward and its backward pass, it keeps the statistics of that pass.
        """
        self.adopt_shards()
        super().zero_grad(set_to_none)
        self._curvature.drop_pending()

    # Properties, so that an optimizer has no train() and eval() if its base has none.
    # Frameworks look for these methods to recognize schedule-free optimizers.

    @property
    def train(self) -> Callable[[], None]:
        """The base's ``train()``. Call it before training with a schedule-free base."""
        return mode_switch(self._base, "train", self._training.name, self.state)

    @property
    def eval(self) -> Callable[[], None]:
        """The base's ``eval()``.

        A schedule-free base sets the parameters to their average.
        """
        return mode_switch(self._base, "eval", self._training.name, self.state)

    # ----------------------------------------------------------- groups and checkpoints

    def __setattr__(self, name: str, value: Any) -> None:
        """Accept only an empty ``state``, and more groups after the current ones."""
        # On a wrapper, this is the optimizer's attribute: see passed_on_by_wrappers.
        is_constructed = getattr(self, "_constructed", False)
        if name not in ("state", "param_groups") or not is_constructed:
            super().__setattr__(name, value)
        elif name == "param_groups":
            self._assign_groups(value)
        elif not value:  # fastai resets an optimizer by `state = {}`
            self.state.clear()
        else:
            raise AttributeError(
                f"{type(self).__name__}.state is shared with the base and cannot be replaced: use "
                f"load_state_dict(), or assign an empty dictionary to reset the base"
            )

    def _assign_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Adopt an earlier run's groups, as Lightning's BaseFinetuning assigns them."""
        num_groups = len(self.param_groups)
        current = [[id(p) for p in group["params"]] for group in self.param_groups]
        assigned = [[id(p) for p in group["params"]] for group in groups]
        if assigned[:num_groups] != current:
            raise AttributeError(
                f"{type(self).__name__}.param_groups is shared with the base, and the list that is "
                f"assigned does not begin with its {num_groups} groups: change settings in place "
                f"(group['lr'] = ...), use add_param_group(), or make a new optimizer"
            )

        # Adopt the settings of the groups that exist, and add the others.
        for group, settings in zip(self.param_groups, groups, strict=False):
            for key, value in settings.items():
                if key not in ("params", NAMES, AUX_BASE):
                    group[key] = value
        for group in groups[num_groups:]:
            self.add_param_group(group)

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse ``copy.deepcopy``, ``copy.copy`` and ``pickle``."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because it has hooks on its model "
            f"and process groups. Copy or save its state_dict(), make a new optimizer for the copy "
            f"of the model, and call load_state_dict() on it"
        )

    def _check_group_options(self, groups: Iterable[Any], first: int = 0) -> None:
        check_group_options(
            type(self).__name__,
            groups,
            self._forbidden_in_groups,
            self.options_by_layer,
            first,
        )

    def _fill_defaults(self, group: dict[str, Any]) -> None:
        """Give a group the settings that it lacks, from the defaults of its base."""
        defaults = {**self.defaults, **base_of(self._base, group).defaults}
        for key, value in defaults.items():
            group.setdefault(key, value)

    @passed_on_by_wrappers
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Its layers are preconditioned from the next step on. Collective.

        Raises:
            RankMismatchError: On every rank, if the ranks do not add the same group.
            RuntimeError: Inside :meth:`hooks_removed`.
        """
        if not self._constructed:
            super().add_param_group(param_group)
            return

        training = self._training
        if self._hooks_are_removed:
            raise RuntimeError(
                f"{training.name}.add_param_group() inside hooks_removed() would register hooks: "
                f"leave the block before you add a group"
            )
        prev_groups = list(self.param_groups)
        group = copy_group(param_group)
        try:
            self._add_checked_group(group)
            self._curvature.replan()
        except Exception:
            self.param_groups[:] = prev_groups
            raise
        params = group_params(self.param_groups)
        self._param_locations = ParamLocations(training.model, params)
        if self._needs_model:
            warn_about_unowned(training, [group])

    def _add_checked_group(self, group: dict[str, Any]) -> None:
        """Add a group to the list, and compare the outcome between ranks. Collective.

        If one rank refuses the group, the others must not add it. So the outcome, with
        the text of an error, is what the ranks compare. If it differs, the comparison
        raises on every rank. If all ranks refuse the group, each raises its own error.
        """
        training = self._training
        names = training.param_names()
        params = group_params([group])
        added = [names.get(id(p), "not in the model") for p in params]
        action = "add a parameter group"
        try:
            check_listed_once(params, training.model)
            check_not_on_meta(training.name, params, training.model)
            self._check_group_options([group], first=len(self.param_groups))

            # Divide the group between the bases, and give its parts names and defaults.
            parts = [group]
            if isinstance(self._base, BasePair):
                parts = self._base.split_group(group, training.model)
            for part in parts:
                named = match_names(self.param_groups, part, training.param_names())
                self._fill_defaults(named)
                super().add_param_group(named)
        except Exception as error:
            action = f"refuse a parameter group ({error})"
            raise
        finally:
            self.check_ranks(action, [("added parameters", added)])

    @passed_on_by_wrappers
    def consolidate(self, to: int | None = 0) -> None:
        """Collect the state of other ranks for the next :meth:`state_dict`. Collective.

            optimizer.consolidate(to=0)  # on every rank; then rank 0 saves state_dict()

        The next step drops the collected state. If every rank has the whole state, this
        method does nothing.

        Args:
            to: The rank that saves the checkpoint. None: all ranks.

        Raises:
            ValueError: If the rank does not exist.
        """
        size = self._training.world.size
        check_rank("consolidate", to, size)
        if self._curvature.remote_state:
            self.check_ranks(f"consolidate(to={to})")
            ranks = range(size) if to is None else [to]
            self._collected = Collected(self._curvature.gather(ranks), to)

    # The name that Lightning calls before it saves, as in ZeroRedundancyOptimizer.
    consolidate_state_dict = consolidate

    @passed_on_by_wrappers
    def state_dict(self) -> dict[str, Any]:
        """Return the state, which ``torch.load`` reads by default.

        It consists of primitives and tensors, and holds everything that determines the
        next steps, including the inverses. ``summary()`` prints how many bytes these
        take. Tensors are shared, not copied.

        Collective only if ``torch.distributed.checkpoint`` calls it for the full state
        of a sharded model: then it collects the state of other ranks.

        Raises:
            SecondOrderError: If other ranks store a part of the state. Call
                :meth:`consolidate` first, or save with
                ``torch.distributed.checkpoint``.
        """
        training = self._training
        curvature = self._curvature
        self.adopt_shards()
        if collects_in_state_dict(training, curvature, self._collected):
            ranks = range(training.world.size)
            self._collected = Collected(curvature.gather(ranks), to=None)
        check_is_complete(training, curvature, self._collected)

        if self.state:
            self._publish_state()
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            for key, value in group.items():  # a scheduler may set numbers of NumPy
                group[key] = python_number(value)
        # Copy the dictionaries of the parts. Those of `state` lose their factors in
        # close(), and a checkpoint that the caller holds must not. The parts have the
        # same order on every rank, in which torch.distributed.checkpoint gathers
        # DTensors.
        for index, entry in state_dict["state"].items():
            parts = [part for part in (BASE, CURVATURE) if part in entry]
            state_dict["state"][index] = {part: entry[part] for part in parts}
        add_checkpoint_entries(training, curvature, state_dict["state"])
        if self._collected is not None:
            add_collected(training, self._collected, state_dict["state"])
        return state_dict

    def export_base_state(self, aux_base: bool = False) -> dict[str, Any]:
        """Return the state that the base would have saved on its own.

        Args:
            aux_base: True for the state of ``aux_base`` instead.
        """
        return export_base_state(self.state_dict(), aux_base)

    @passed_on_by_wrappers
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint from any number of ranks, or the state of the base alone.

        If the checkpoint lacks inverses, the next step refreshes their layers. If it is
        the state of the base alone, the curvature starts from the beginning.

        Raises:
            ValueError: If an entry is missing, unknown, non-finite or out of bounds,
                does not fit, or belongs to another base optimizer. The error names the
                entry. All entries are checked before anything is loaded. After that,
                only your hooks, the base optimizer's own ``__setstate__``, and warnings
                that you turn into errors can raise.
        """
        check_is_state(state_dict)
        self.adopt_shards()
        checkpoint = self._load_groups_and_base(state_dict)

        # The base alone does not save our entries of the groups.
        for group in self.param_groups:
            self._fill_defaults(group)
        self._bind_base()  # torch has replaced `param_groups` and `state`
        if len(self._base.state):  # some bases fail if their state has no first entry
            self._base.__setstate__(
                {"state": self._base.state, "param_groups": self.param_groups}
            )

        self._training.resume_at(checkpoint.steps)
        self._collected = None
        self._loaded_since_step = True
        self._curvature.load(checkpoint.curvature)
        self._publish_state()

    def _load_groups_and_base(self, state_dict: dict[str, Any]) -> Checkpoint:
        """Check a whole checkpoint, and let torch load the groups and the base's state.

        The checks run in torch's pre-hook, after the pre-hooks that users registered. A
        pre-hook returns to torch, so it leaves the checkpoint for us in a list.
        """
        training = self._training
        names = training.param_names()
        groups = self.param_groups
        checkpoints: list[Checkpoint] = []

        def read(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            checkpoint = read_checkpoint(state, self._base, groups, names)
            self._curvature.check(checkpoint.curvature)
            checkpoints.append(checkpoint)
            # torch casts what it loads to a parameter's dtype, so hide the curvature.
            return checkpoint.state_dict

        hook = self.register_load_state_dict_pre_hook(read)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        (checkpoint,) = checkpoints

        # Warn if something starts from the beginning.
        if self.state and not any(checkpoint.curvature.values()):
            training.warn(
                f"the checkpoint has the state of {training.base_name} alone: it is loaded, and "
                f"the curvature starts from the beginning"
            )
        if checkpoint.absent:
            listed = ", ".join(checkpoint.absent[:20])
            training.warn(
                f"the checkpoint lacks {listed}: their state starts from the beginning"
            )
        return checkpoint

    # ---------------------------------------------------------------- summary and close

    @property
    def training(self) -> Training:
        """The model, the parameter groups and the ranks of this training run."""
        return self._training

    def summary(self) -> Summary:
        """Return a table of the layers: the ranks that precondition them, or the base.

            print(optimizer.summary())

        With several parameter groups, it also lists the base and the settings of each
        group. Memory is that of this rank. Synchronizes with the device.
        """
        summary = self._curvature.summary()
        training = self._training
        return replace(
            summary,
            lines=[*summary.lines, *describe_groups(training)],
            steps=training.steps,
        )

    def metrics(self) -> dict[str, float]:
        """Return numbers to log about the last step, the inverses and the eigenpairs.

            for name, value in optimizer.metrics().items():
                writer.add_scalar(f"second_order/{name}", value, step)

        All ranks return the same names, which the page *Monitoring* explains. A number
        that this rank does not have is NaN. The call synchronizes with the device, but
        not with other ranks.
        """
        return {"step": float(self._training.steps), **self._curvature.metrics()}

    @passed_on_by_wrappers
    @contextmanager
    def hooks_removed(self) -> Iterator[None]:
        """Remove all hooks from the model inside a ``with`` block.

            with optimizer.hooks_removed():
                scripted = torch.jit.script(model)

        Passes inside the block contribute no statistics, and :meth:`step` raises an
        error there. Export, tracing, and inference with a compiled model do not need
        this block.
        """
        if self._hooks_are_removed:  # by an outer block, which restores them
            yield
            return
        self._hooks_are_removed = True
        try:
            with self._curvature.hooks_removed(), self._training.pre_hooks_removed():
                yield
        finally:
            self._hooks_are_removed = False

    @passed_on_by_wrappers
    def close(self) -> None:
        """Stop threads and remove hooks. From then on the base trains alone."""
        self._curvature.close()
        for callback in self._training.close_callbacks:
            callback()
        self._collected = None
        if self.state:
            self._publish_state()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _averages_gradients(
    option: str | bool, under_ddp: bool, params: Sequence[Tensor], world: World
) -> bool:
    """Whether the optimizer averages gradients over the ranks."""
    # FSDP2 averages the gradients of its shards.
    all_sharded = bool(params) and all(is_dtensor(p) for p in params)
    if world.size == 1 or all_sharded:
        return False
    if option == "auto":
        return not under_ddp
    return bool(option)


def _publish_state_of(optimizer_ref: weakref.ref[SecondOrderOptimizer]) -> None:
    optimizer = optimizer_ref()
    if optimizer is not None and optimizer.state:
        optimizer._publish_state()
