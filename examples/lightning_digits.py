"""Train on the digits with Lightning: the optimizer is one line of configure_optimizers.

python examples/lightning_digits.py
python examples/lightning_digits.py --find-lr --accumulate 2 --clip 1.0 --precision bf16-mixed
torchrun --standalone --nproc-per-node=2 examples/lightning_digits.py --strategy ddp
python examples/lightning_digits.py --save digits.ckpt
python examples/lightning_digits.py --resume digits.ckpt --steps 400
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from digits import conv_net, load_split
from second_order import KAISA

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """The small convolutional network, and how it is trained."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr  # what --find-lr writes to
        self.net = conv_net()
        self.loss = nn.CrossEntropyLoss()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The trainer's model is this module, in DistributedDataParallel if there are processes:
        # of that one KAISA sees that gradients are averaged already.
        return KAISA(self.trainer.model, lr=self.lr, momentum=0.9)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.loss(self.net(images), labels)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("test accuracy", right, sync_dist=True)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            print(self.optimizers().summary())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the digits with Lightning.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--precision", default="32-true", help="such as bf16-mixed")
    parser.add_argument("--accumulate", type=int, default=1, help="batches to a step")
    parser.add_argument("--clip", type=float, help="largest norm of the gradient")
    parser.add_argument("--strategy", default="auto", help="such as ddp")
    parser.add_argument("--find-lr", action="store_true", help="let Lightning look for the rate")
    parser.add_argument("--save", help="where to write a checkpoint at the end")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    data = load_split()
    train = TensorDataset(data.train_images, data.train_labels)
    test = TensorDataset(data.test_images, data.test_labels)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),  # torchrun sets it
        strategy=args.strategy,
        max_steps=args.steps,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier(args.lr)
    if args.find_lr:
        Tuner(trainer).lr_find(module, loader, max_lr=1.0)
        print(f"found a learning rate of {module.lr:.3g}")
    trainer.fit(module, loader, ckpt_path=args.resume, weights_only=True)
    (found,) = trainer.validate(module, DataLoader(test, len(test)), verbose=False)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}  test accuracy {found['test accuracy']:.1%}")
    if args.save:
        trainer.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
