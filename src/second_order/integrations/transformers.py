"""A callback for the Trainer of transformers."""

from __future__ import annotations

import math
from typing import Any

from transformers import DefaultFlowCallback, Trainer, TrainerCallback

from second_order.optimizers.base import SecondOrderOptimizer

__all__ = ["MetricsCallback"]


class MetricsCallback(TrainerCallback):
    """Adds the optimizer's metrics to the logs, and consolidates its state for saves.

        trainer = Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, None)
        )
        MetricsCallback.add_to(trainer)

    The Trainer calls its callbacks in order. Its first, ``DefaultFlowCallback``,
    decides whether to save. Those for TensorBoard and other reporters are next, and
    ``callbacks=`` come last. :meth:`add_to` puts this one before the reporters, so all
    of them get the metrics. With ``callbacks=[MetricsCallback()]``, only the history
    and the printed lines have them. If a callback of yours sets
    ``control.should_save``, it must come before this one.

    Args:
        prefix: The start of the metrics' names.
        save_to: The rank that saves the optimizer's state; None if all ranks do.
    """

    def __init__(self, prefix: str = "second_order/", save_to: int | None = 0) -> None:
        self.prefix = prefix
        self.save_to = save_to

    @classmethod
    def add_to(cls, trainer: Trainer, **options: Any) -> MetricsCallback:
        """Make a callback and put it before those of the Trainer's reporters."""
        callback = cls(**options)
        callbacks = trainer.callback_handler.callbacks
        position = 0
        for i, other in enumerate(callbacks, start=1):
            if isinstance(other, DefaultFlowCallback):
                position = i
        callbacks.insert(position, callback)
        return callback

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics that are known, so not NaN, to the logs of a step."""
        optimizer = _unwrapped(kwargs.get("optimizer"))
        logs = kwargs["logs"]
        if optimizer is None or "loss" not in logs or not state.is_world_process_zero:
            return
        found = optimizer.metrics().items()
        metrics = {
            f"{self.prefix}{name}": value
            for name, value in found
            if not math.isnan(value)
        }
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Consolidate the optimizer's state if the Trainer saves after this step."""
        optimizer = _unwrapped(kwargs.get("optimizer"))
        if optimizer is not None and control.should_save:
            optimizer.consolidate(to=self.save_to)

    on_epoch_end = on_step_end  # with save_strategy="epoch"

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Consolidate it after each evaluation if the Trainer saves the best model."""
        optimizer = _unwrapped(kwargs.get("optimizer"))
        may_save = control.should_save or args.save_strategy == "best"
        if optimizer is not None and may_save:
            optimizer.consolidate(to=self.save_to)


def _unwrapped(optimizer: Any) -> SecondOrderOptimizer | None:
    """Return the second-order optimizer inside Accelerate's wrapper, or None."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, SecondOrderOptimizer) else None
