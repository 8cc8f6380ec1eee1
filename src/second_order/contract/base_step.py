"""The base's own step: without hooks that have run, or gradients that are not to count."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar, cast

import torch

from second_order.contract.groups import members_of
from second_order.contract.training import Training
from second_order.distributed.checkpointing import is_checkpointing
from second_order.sharded import is_dtensor, local

__all__ = [
    "initialises_state",
    "refuse_in_evaluation",
    "refuse_unknown_scaler",
    "refuse_within_backward",
    "runs_between_graphs",
    "set_aside",
    "unhooked_step",
    "without_gradients",
]

P = ParamSpec("P")
R = TypeVar("R")
NO_BACKWARD = -1  # the number of the backward pass that runs, if none does


def runs_between_graphs(step: Callable[P, R]) -> Callable[P, R]:
    """Decorate a step, or what goes with it: ``torch.compile`` leaves all that it calls as it is.

    Under ``fullgraph=True``, which cannot, torch's error gives the reason.
    """
    disabled = torch.compiler.disable(
        step,
        reason="a second-order step exchanges and decomposes factors in Python, between graphs: "
        "compile the model, or the function around the step without fullgraph",
    )
    return cast(Callable[P, R], disabled)


def without_gradients(step: Callable[P, R]) -> Callable[P, R]:
    """Decorate a step: it runs without gradients, and no interrupt (Ctrl-C) leaves them off."""

    @functools.wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.is_grad_enabled()
        try:
            try:
                torch._C._set_grad_enabled(False)
                return step(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(before)
        finally:  # it may have been cut short
            torch._C._set_grad_enabled(before)

    return run


def refuse_within_backward(name: str) -> None:
    """Raise RuntimeError while a backward pass runs: no layer is sure to be complete."""
    if torch._C._current_graph_task_id() != NO_BACKWARD:
        raise RuntimeError(
            f"{name}.step() is called while backward() runs, from a parameter's hook, perhaps: "
            f"a layer's curvature is of its weight and bias together, and complete once "
            f"backward() has returned. Make one optimizer of the model, {name}(model, lr=...), and "
            f"call step() after backward()"
        )


def unhooked_step(base: torch.optim.Optimizer) -> None:
    """Step a base without the hooks that the wrapper's own step already runs."""
    step = type(base).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(base)


def initialises_state(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether this is the empty step by which checkpointing code makes state exist.

    ``torch.distributed.checkpoint`` steps a fresh optimizer with lr 0 and zero gradients.
    Where parameters are sharded, gradients may be zero here and not elsewhere: then it has to be
    that code that is calling.
    """
    if any(map(is_dtensor, members_of(groups))) and not is_checkpointing():
        return False
    return all(
        float(group["lr"]) == 0.0
        and all(
            p.grad is not None and not bool(local(p.grad).count_nonzero())
            for p in group["params"]
            if p.requires_grad
        )
        for group in groups
    )


def refuse_in_evaluation(name: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise RuntimeError if a schedule-free base has not been told that it trains.

    It would raise itself, and leave gradients that are preconditioned already.
    """
    if any(group.get("train_mode") is False for group in groups):
        raise RuntimeError(
            f"{name}.step() with a schedule-free base that is not in train mode: call "
            f"optimizer.train() before training, and optimizer.eval() before evaluation"
        )


def refuse_unknown_scaler(name: str, reason: str) -> None:
    """Raise if a GradScaler calls ``step`` without having been announced.

    The parameters' gradients are unscaled then, but captured ones are not: the factors
    would be too large by the square of the scale, and training would stall without a word.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "_maybe_opt_step" and module == "torch.amp.grad_scaler":
            raise ValueError(
                f"{name}.step() is called by a GradScaler that it was not told of: {reason}; "
                f"write {name}(..., grad_scaler=scaler)"
            )
        frame = frame.f_back


@contextmanager
def set_aside(training: Training) -> Iterator[None]:
    """Hide gradients of frozen parameters from the step: they differ between processes."""
    params = []
    if training.averages:
        members = [p for group in training.groups for p in group["params"]]
        frozen = [p for p in members if not p.requires_grad and p not in training.trained]
        params = [p for p in frozen if p.grad is not None]
    gradients = [p.grad for p in params]
    if params and training.first_time("frozen gradients"):
        names = training.names()
        listed = ", ".join(repr(names.get(id(p), "(not in the model)")) for p in params[:20])
        training.warn(
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
