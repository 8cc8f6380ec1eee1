"""Training in Lightning, for its tests: a module around the small network, and trainers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from framework_training import BATCHES, CASE, loss_of, optimizer_of
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Lit(pl.LightningModule):
    """The small network, and how it is trained."""

    def __init__(
        self,
        System: Any,
        manual: bool = False,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        super().__init__()
        self.net = CASE.model(dtype)
        self.System = System
        self.options = options
        self.automatic_optimization = not manual
        self.lr = options.get("lr", 0.05)

    def make_optimizer(self, **more: Any) -> Any:
        options = {**self.options, "lr": self.lr, **more}
        loss = type(self).loss_of
        return optimizer_of(self.System, self, self.parameters(), loss, **options)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer()

    def loss_of(self, batch: Any) -> Tensor:
        return loss_of(self.net, batch)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.loss_of(batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def trainer(**options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options}
    return pl.Trainer(**arguments)


def fit(module: pl.LightningModule, batches: Sequence[Any] = BATCHES, **options: Any) -> pl.Trainer:
    """Fit a module, and hand back its trainer."""
    path = options.pop("ckpt_path", None)
    weights_only = options.pop("weights_only", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*dataloader.*does not have many workers.*")
        made = trainer(**options)
        loader = DataLoader(list(batches), batch_size=None)
        made.fit(module, loader, ckpt_path=path, weights_only=weights_only)
    return made
