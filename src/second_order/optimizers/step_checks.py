"""Checks before a step, while nothing has changed."""

from __future__ import annotations

import torch

from second_order.checkpoint.caller import caller
from second_order.training.context import Training

__all__ = ["check_step"]

NO_BACKWARD = -1  # the id of the running backward pass, if none runs


def check_step(training: Training, scaler_matters: str, unwatched: bool) -> None:
    """Raise unless a step can be taken now.

    Args:
        training: The model, the groups and the ranks.
        scaler_matters: Why the optimizer needs to know the GradScaler; "" if it does not.
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
    training.require_group("step()")
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
    may_be_scaled = training.steps == 0 and training.scaler is None and scaler_matters
    if may_be_scaled and caller(function="_maybe_opt_step") is not None:
        raise ValueError(
            f"{training.name}.step() is called by a GradScaler that it does not know: "
            f"{scaler_matters}; write {training.name}(..., grad_scaler=scaler)"
        )
