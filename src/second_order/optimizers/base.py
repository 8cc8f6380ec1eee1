"""The contract of a ``torch.optim`` optimizer that wraps another.

    loss = closure()                   once, first, with gradients enabled
    gradients <- mean over processes   unless DistributedDataParallel has done it
    gradients <- curvature⁻¹ gradients in place, what a subclass adds
    base.step()                        the wrapped optimizer, on the same groups and state

Nothing here is numerical. ``state[p]`` holds two parts: ``"base"``, which the wrapped optimizer
sees as its whole state for p, and ``"curvature"``, which belongs to the subclass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from second_order.contract.averaging import PendingAverage, Routed
from second_order.contract.base_state import CURVATURE, BaseState
from second_order.contract.checkpoint import Checkpoint, check_is_state, header, read_checkpoint
from second_order.contract.given import check_scaler, look_through, refuse_unknown_scaler
from second_order.contract.groups import (
    check_assigned,
    check_ownership,
    loose,
    materialised,
    members_of,
    named_like,
    outline_of,
    rename_assigned,
    shallow,
    trainable,
)
from second_order.contract.notices import Notices, warns_at_its_end
from second_order.contract.outline import Outline, outline_of_load
from second_order.contract.saved import SavedPart
from second_order.distributed.collectives import World
from second_order.options import (
    check_base,
    check_choice,
    check_learning_rate,
    check_params,
    split_base_keywords,
)

__all__ = ["ParamsOrModel", "SecondOrderOptimizer"]

ParamsOrModel: TypeAlias = nn.Module | Iterable[Any]
Self = TypeVar("Self", bound="SecondOrderOptimizer")


class SecondOrderOptimizer(torch.optim.Optimizer):
    """Base class: everything a wrapper of ``torch.optim`` owes its surroundings.

    Subclasses set up their own parts, call :meth:`_finish_construction`, and implement
    :meth:`_transform_gradients`.

    Args:
        params_or_model: A module, whose trainable parameters are optimized, or parameters or
            groups.
        model: The module, where ``params_or_model`` is not one.
        base: Class of the first-order optimizer.
        base_kwargs: Its keyword arguments.
        own_keywords: Names of the subclass's options, for messages.
        gradient_averaging: "auto": average gradients over the processes unless the model is wrapped
            in DistributedDataParallel; True or False: always or never.
        grad_scaler: The GradScaler that scales the loss, if one does.
        process_group: The processes to work with; None for the default group.
        group_defaults: Further entries of every parameter group, primitives.

    Raises:
        TypeError: For an unknown keyword, a base that is no optimizer class, or a missing model.
        ValueError: For a value outside its bounds.
    """

    _needs_model = True
    _read_by_all: tuple[str, ...] = ()  # entries of the curvature that each rank reads of a file
    _scaler_matters = "the gradients it has captured carry the scale"

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None,
        base: type[torch.optim.Optimizer],
        base_kwargs: dict[str, Any],
        own_keywords: Iterable[str],
        gradient_averaging: str | bool,
        grad_scaler: Any,
        process_group: Any,
        group_defaults: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        check_base(base, SecondOrderOptimizer)
        split_base_keywords(base, own_keywords, base_kwargs)
        check_learning_rate(base_kwargs.get("lr", 0.0))
        check_choice("gradient_averaging", gradient_averaging, ("auto", True, False))
        if isinstance(params_or_model, nn.Module):
            if model is not None and model is not params_or_model:
                raise TypeError(f"{name} got two models; pass the model once")
            model = params_or_model
            groups: list[Any] = trainable(look_through(model)[0])
        elif model is None and self._needs_model:
            raise TypeError(
                f"{name} needs the model to see its layers; write "
                f"{name}(params, model=model, lr=...) or {name}(model, lr=...)"
            )
        else:
            check_params(name, params_or_model)
            groups = [materialised(g) for g in params_or_model]
            model = loose(groups) if model is None else model
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r} is not a torch.nn.Module")

        self._model, self._under_ddp = look_through(model)
        params = members_of(groups)
        strange = check_ownership(name, base.__name__, params, self._model)
        self._world = World(process_group)
        self._averages = (
            self._world.size > 1 and not self._under_ddp
            if gradient_averaging == "auto"
            else bool(gradient_averaging) and self._world.size > 1
        )
        self._grad_scaler = grad_scaler
        check_scaler(grad_scaler, self._averages, self._averaging_processes())
        self._notices = Notices()
        self._steps = 0
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched.isdigit() and int(launched) > 1 and self._world.group is None:
            self._warn(
                f"WORLD_SIZE is {launched}, but no process group is initialised: each process "
                f"trains alone; call torch.distributed.init_process_group() before making the "
                f"optimizer"
            )
        self._constructed, self._outline = False, Outline()

        if strange and self._needs_model:
            self._warn(
                f"{len(strange)} of {len(params)} parameters are not the model's, and are trained "
                f"by {base.__name__} alone, without curvature: of shapes {', '.join(strange[:10])}"
            )
        # Groups of a model are named, as named_parameters() are; a base may not know of names.
        of_model = isinstance(params_or_model, nn.Module)
        self._base = base(params if of_model else [shallow(g) for g in groups], **base_kwargs)
        super().__init__(
            [shallow(g) for g in groups], {**self._base.defaults, **(group_defaults or {})}
        )
        made = dict(self._base.state)  # Adagrad makes its state at construction
        self._bind_base()
        self._base.state.update(made)
        self._trained = set(self._training())  # at the last step

    def _finish_construction(self, description: list[str]) -> None:
        """Agree with the other processes, and start from the same parameters.

        Raises:
            RankMismatchError: On every rank, if descriptions or parameters' shapes differ.
            ValueError: On every rank, if the processes cannot do what the options say.
        """
        named = dict(self._model.named_parameters())
        lines = [
            f"{name}: {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
            for name, p in named.items()
        ]
        lines += [f"{n}: {tuple(b.shape)} {b.dtype}" for n, b in self._model.named_buffers()]
        names = {id(p): name for name, p in named.items()}
        for i, group in enumerate(self.param_groups):
            entries = {k: _printable(v) for k, v in group.items() if k != "params"}
            members = [names.get(id(p), "(not in the model)") for p in group["params"]]
            group_name = f"{type(self._base).__name__} group {i}"
            lines += [f"{group_name}: {entries}", f"{group_name}: parameters {members}"]
        lines.append(f"gradients averaged by the optimizer: {self._averages}")
        self._world.require_equal([*lines, *description], "models or options")
        self._check_processes()  # of equal options, so that all raise or none
        if self._averages:
            with torch.no_grad():
                tensors = [*self._model.parameters(), *self._model.buffers()]
                self._world.broadcast_from_first(tensors)
        if self._world.size > 1:
            self._world.level()
            self._world.aside()  # made now, while every rank is here
        self._constructed = True

    def _agree(self, doing: str, coming: Sequence[dict[str, Any]] | None = None) -> None:
        """Raise RankMismatchError on every rank unless all are about to do this; a collective."""
        self._outline.compare(
            self._world,
            f"{doing} of {type(self).__name__}",
            self._steps,
            self.param_groups,
            self._facts,
            lambda: {id(p): name for name, p in self._model.named_parameters()},
            coming,
        )

    # ---------------------------------------------------------------- what subclasses implement

    def _check_processes(self) -> None:
        """Raise what these processes and devices cannot do, before anything has changed."""

    def _averaging_processes(self) -> int:
        """How many average gradients, where the optimizer does; asked at construction."""
        return self._world.size

    def _transform_gradients(self, average: Callable[[], None]) -> None:
        """Replace ``p.grad`` in place by the preconditioned gradient.

        Args:
            average: Waits until gradients are the mean over the processes; to be called before
                gradients are read, as often as it suits.
        """
        raise NotImplementedError

    def _facts(self) -> list[tuple[str, Any]]:
        """What else decides which collectives a step has, by name; primitives."""
        return []

    def _replan(self) -> None:
        """Parameters or groups have changed: look at the model again."""

    def _nothing_captured(self) -> bool:
        """Whether no statistic has arrived since the last step."""
        return True

    def _curvature_state(self) -> dict[Tensor, dict[str, Any]]:
        """The ``"curvature"`` part of each parameter that has one; tensors are shared."""
        return {}

    def _adopt_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over the ``"curvature"`` parts of a checkpoint, in the dtypes they were saved in."""

    def _check_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if a checkpoint's ``"curvature"`` parts do not fit the model."""

    # ------------------------------------------------------------------------------- stepping

    @warns_at_its_end
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the model, calls ``backward`` and returns the loss. Called once.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None and not callable(closure):
            raise TypeError(f"closure={closure!r} is not a function; use step() without one")
        if self._steps == 0 and self._grad_scaler is None and self._scaler_matters:
            refuse_unknown_scaler(type(self).__name__, self._scaler_matters)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._initialises_state():
            self._share_state()
            self._base_step()
            return loss
        self._agree("take a step")
        average = self._start_averaging()
        self._transform_gradients(average)
        with record_function("second_order.base"), self._set_aside():
            self._base_step()
        self._trained = set(self._training())
        self._steps += 1
        if self._steps == 1:
            self._share_state()
        return loss

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Step no parameter by gradients that differ between processes."""
        params = self._without_average() if self._averages else []
        gradients = [p.grad for p in params]
        if params and self._first_time("frozen gradients"):
            names = {id(p): name for name, p in self._model.named_parameters()}
            listed = ", ".join(repr(names.get(id(p), "(not in the model)")) for p in params[:20])
            self._warn(
                f"frozen parameters have gradients that the processes have not averaged, and are "
                f"not stepped: {listed}; call zero_grad() after freezing"
            )
        for p in params:
            p.grad = None
        try:
            yield
        finally:
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient

    def _initialises_state(self) -> bool:
        """Whether this is the empty step by which checkpointing code brings state into being.

        ``torch.distributed.checkpoint`` steps a fresh optimizer with lr 0 and zero gradients. Such
        a step must move no counter and start no collective, since one rank alone may take it.
        """
        return (
            not self.state
            and self._steps == 0
            and all(float(group["lr"]) == 0.0 for group in self.param_groups)
            and self._nothing_captured()
            and all(
                p.grad is not None and not bool(p.grad.count_nonzero())
                for group in self.param_groups
                for p in group["params"]
                if p.requires_grad
            )
        )

    def _start_averaging(self) -> Callable[[], None]:
        if not self._averages:
            return lambda: None
        params = self._averaged_params()
        return PendingAverage(params, self._world, self._route_gradients).wait

    def _training(self) -> list[Tensor]:
        return [p for g in self.param_groups for p in g["params"] if p.requires_grad]

    def _averaged_params(self) -> list[Tensor]:
        """Those that train, or did at the last step: a backward may have come before the freeze."""
        params = [p for g in self.param_groups for p in g["params"]]
        return [p for p in params if p.requires_grad or p in self._trained]

    def _without_average(self) -> list[Tensor]:
        """Frozen parameters whose gradients are each process's own, where they should be equal."""
        params = [p for g in self.param_groups for p in g["params"]]
        frozen = [p for p in params if not p.requires_grad and p not in self._trained]
        return [p for p in frozen if p.grad is not None]

    def _route_gradients(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Parts of the gradients, and the rank that alone gets the mean of each; None: all do."""
        return None

    def _base_step(self) -> None:
        """Step the base without the hooks that this optimizer's own step already runs."""
        step = type(self._base).step
        while getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self._base)

    def _share_state(self) -> None:
        """Show counters and curvature in ``state``, where checkpoints look."""
        parts = self._curvature_state()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p][CURVATURE] = {**parts.get(p, {}), **header(self._steps, self._base)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and with them what else the last backward left."""
        super().zero_grad(set_to_none)

    # ------------------------------------------------------------------- groups and checkpoints

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, which are the base's, too. Another list may be assigned."""
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take another list: the base follows, and other parameters are planned for."""
        if not self.__dict__.get("_constructed"):
            self.__dict__["param_groups"] = groups
            return
        check_assigned(groups, self.defaults)
        params = members_of(groups)
        check_ownership(type(self).__name__, type(self._base).__name__, params, self._model)
        rename_assigned(groups, self._model, self.param_groups)
        before = self.param_groups
        members = ([list(map(id, g["params"])) for g in each] for each in (before, groups))
        others = next(members) != next(members)
        if others:
            self._agree("assign other parameters", groups)
        self._take_groups(groups)
        if others:
            try:
                with self._notices:
                    self._replan()
            except Exception:
                self._take_groups(before)
                raise

    def _take_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = self._base.param_groups = groups

    def _device(self) -> torch.device:
        """Where the first parameter is; groups may be empty."""
        return next((p.device for p in members_of(self.param_groups)), torch.device("cpu"))

    @warns_at_its_end
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its layers are planned from the next step on. Every process calls it.

        Raises:
            RankMismatchError: On every process, if another does something else.
        """
        if self.__dict__.get("_constructed"):
            param_group = materialised(param_group)
            coming = [*self.param_groups, outline_of(param_group, self.defaults)]
            self._agree("add a parameter group", coming)
            param_group = named_like(self.param_groups, param_group, self._model)
        super().add_param_group(param_group)
        if self.__dict__.get("_constructed"):
            self._trained |= {p for p in self.param_groups[-1]["params"] if p.requires_grad}
            self._replan()

    def state_dict(self) -> dict[str, Any]:
        """The state as primitives and tensors, as ``torch.load`` accepts with its defaults."""
        if self.state:
            self._share_state()
        # That of parameters which no group has any more waits here for their return.
        here = set(members_of(self.param_groups))
        away = [p for p in self.state if p not in here]
        parked = {p: self.state.pop(p) for p in away}
        try:
            return super().state_dict()
        finally:
            self.state.update(parked)

    @warns_at_its_end
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or one of its base alone.

        A checkpoint written by any number of processes loads on any other. Inverses are not in it:
        they are recomputed at the next step. The state of the base optimizer alone is taken as the
        base's part, and curvature starts anew.

        Raises:
            ValueError: Naming the entry, if something does not fit, is not finite, out of bounds
                or unknown, or another base's; nothing has changed then.
        """
        check_is_state(state_dict)
        names = {id(p): name for name, p in self._model.named_parameters()}
        found = Checkpoint({}, {}, 0, [])

        def read(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            nonlocal found
            found = read_checkpoint(state, self._base, self.param_groups, names)
            self._check_curvature(found.curvature)
            # Loading casts floating state to the parameter's dtype, so curvature goes around it.
            return {**state, "state": found.base}

        last = self.register_load_state_dict_pre_hook(read)  # after what users' hooks make of it
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            last.remove()
        saved = found.curvature
        self._outline.loaded = self._read_alike(saved)
        self._steps = found.steps
        if found.absent:
            self._warn(
                f"the checkpoint has nothing of {', '.join(found.absent[:20])}: their state begins "
                f"anew"
            )
        for group in self.param_groups:  # a checkpoint of the base alone lacks our entries
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._bind_base()
        if len(self._base.state):  # some bases look at their first entry without asking
            self._base.__setstate__({"state": self._base.state, "param_groups": self.param_groups})
        self._adopt_curvature(saved)
        self._share_state()

    def _read_alike(self, saved: Mapping[Tensor, SavedPart]) -> Sequence[tuple[str, Any]]:
        """What of a checkpoint that has been loaded is to be the same on every rank."""
        if self._world.size == 1 or not self._outline.compared:
            return []
        named = dict(self._model.named_parameters())
        return outline_of_load(named, self.state, saved, self._read_by_all)

    def _bind_base(self) -> None:
        """Let the base work on the very groups and state of this optimizer."""
        self._base.param_groups = self.param_groups
        self._base.state = BaseState(self.state)  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("step", None)  # a scheduler's patch, bound to this instance
        state["_base"] = (type(self._base), self._base.defaults)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_base" not in state:  # called by load_state_dict with state and groups alone
            super().__setstate__(state)
            return
        base_class, base_defaults = state.pop("_base")
        super().__setstate__(state)
        self._base = base_class.__new__(base_class)
        torch.optim.Optimizer.__setstate__(
            self._base,
            {"defaults": base_defaults, "state": {}, "param_groups": self.param_groups},
        )
        self._bind_base()
        if len(self._base.state):
            self._base.__setstate__({"state": self._base.state, "param_groups": self.param_groups})

    # ------------------------------------------------------------------------------ odds and ends

    def close(self) -> None:
        """End what goes on beside training; from now on the base steps alone."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first_time(self, key: str) -> bool:
        return self._notices.first_time(key)

    def _warn(self, message: str) -> None:
        self._notices.say(message)


def _printable(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
