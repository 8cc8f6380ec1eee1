"""A callback for the Trainer of transformers."""

from __future__ import annotations

import math
from typing import Any

from transformers import Trainer, TrainerCallback

from second_order.optimizers.base import SecondOrderOptimizer

__all__ = ["MetricsCallback"]


class MetricsCallback(TrainerCallback):
    """Adds the optimizer's metrics to the logs, and consolidates its state for saves.

        trainer = Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, None)
        )
        MetricsCallback.add_to(trainer)

    The Trainer calls its callbacks in order, and its own for TensorBoard and other
    reporters come before ``callbacks=``. :meth:`add_to` puts this one first, so all
    reporters get the metrics. With ``callbacks=[MetricsCallback()]``, only the history
    and the printed lines have them.

    Args:
        prefix: The start of the metrics' names.
        save_to: The rank that saves the optimizer's state; None if all ranks do.
    """

    def __init__(self, prefix: str = "second_order/", save_to: int | None = 0) -> None:
        self.prefix = prefix
        self.save_to = save_to

    @classmethod
    def add_to(cls, trainer: Trainer, **options: Any) -> MetricsCallback:
        """Make a callback and put it before the Trainer's other callbacks."""
        callback = cls(**options)
        trainer.callback_handler.callbacks.insert(0, callback)
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

    on_epoch_end = on_step_end

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
