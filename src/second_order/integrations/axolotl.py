"""A plugin for axolotl.

    plugins:
      - second_order.integrations.axolotl.SecondOrderPlugin
    second_order: {optimizer: KAISA, base: AdamW, damping: 0.1}
    learning_rate: 0.001
    weight_decay: 0.1

These settings replace axolotl's own `optimizer:`. axolotl 0.19 never calls a plugin's
`create_optimizer`, so this plugin gives the trainer a class and keywords.
"""

from __future__ import annotations

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from second_order.integrations.transformers import MetricsCallback
from second_order.optimizers.distkfac import DistKFAC
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.kaisa import KAISA

__all__ = ["SecondOrderArgs", "SecondOrderPlugin"]

SYSTEMS: dict[str, Any] = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}


class SecondOrderArgs(BaseModel):
    """What the plugin adds to axolotl's configuration.

    Attributes:
        second_order: The optimizer's keywords. "optimizer" is its name, KAISA by
            default; "base" and "aux_base" are names of classes in ``torch.optim``; "lr"
            is ``learning_rate`` by default. None: axolotl's optimizer.
    """

    second_order: dict[str, Any] | None = None


class SecondOrderPlugin(BasePlugin):
    """Trains with KAISA, DPKFAC or DistKFAC, and logs its metrics."""

    def get_input_args(self) -> str:
        """The class of the plugin's part of the configuration."""
        return f"{__name__}.SecondOrderArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Set the optimizer that the trainer makes with its own parameter groups."""
        if cfg.second_order is None:
            return
        options = dict(cfg.second_order)
        name = options.pop("optimizer", "KAISA")
        if name not in SYSTEMS:
            raise ValueError(
                f"second_order: optimizer={name!r} is not one of {', '.join(SYSTEMS)}"
            )
        for key in {"base", "aux_base"} & options.keys():
            options[key] = getattr(torch.optim, options[key])
        # The trainer wraps the model in DistributedDataParallel later.
        options.setdefault("gradient_averaging", False)
        options.setdefault("lr", trainer.args.learning_rate)
        trainer.optimizer_cls_and_kwargs = SYSTEMS[name], options
        MetricsCallback.add_to(trainer)
