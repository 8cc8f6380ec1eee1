"""Train a small network with Lightning. KAISA is one line of ``configure_optimizers``.

python lightning_digits.py
python lightning_digits.py --find-lr --accumulate 2 --clip 1.0 --precision bf16-mixed
torchrun --standalone --nproc-per-node=2 lightning_digits.py --strategy ddp
python lightning_digits.py --save digits.ckpt
python lightning_digits.py --resume digits.ckpt --steps 400
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from second_order import KAISA

Batch = tuple[Tensor, Tensor]


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits: training images and labels, test images and labels.

    The images, (N, 64), are standardized by the mean and standard deviation of the
    training pixels.
    """
    images, labels = load_digits(return_X_y=True)
    arrays = train_test_split(
        images, labels, test_size=360, random_state=0, stratify=labels
    )
    x_train, x_test, y_train, y_test = (torch.from_numpy(array) for array in arrays)
    mean = x_train.mean()
    std = x_train.std(correction=0)
    x_train = ((x_train - mean) / std).float()
    x_test = ((x_test - mean) / std).float()
    return x_train, y_train, x_test, y_test


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Classifier(pl.LightningModule):
    """A small convolutional network and how to train it."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr  # --find-lr writes the learning rate that it finds here
        self.net = make_model()
        self.loss = nn.CrossEntropyLoss()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # trainer.model is this module, inside DistributedDataParallel if there are
        # several processes. KAISA then sees that gradients are averaged already.
        return KAISA(self.trainer.model, lr=self.lr, momentum=0.9)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.loss(self.net(images), labels)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("test accuracy", accuracy, sync_dist=True)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            print(self.optimizers().summary())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small network with Lightning."
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--precision", default="32-true", help="such as bf16-mixed")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    parser.add_argument("--clip", type=float, help="largest norm of the gradient")
    parser.add_argument("--strategy", default="auto", help="such as ddp")
    parser.add_argument(
        "--find-lr", action="store_true", help="let Lightning choose the rate"
    )
    parser.add_argument("--save", help="where to write a checkpoint at the end")
    parser.add_argument("--resume", help="a checkpoint to continue from")
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    x_train, y_train, x_test, y_test = load_data()
    train = TensorDataset(x_train, y_train)
    test = TensorDataset(x_test, y_test)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    trainer = pl.Trainer(
        accelerator="auto",
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
    results = trainer.validate(module, DataLoader(test, len(test)), verbose=False)
    if trainer.is_global_zero:
        accuracy = results[0]["test accuracy"]
        print(f"step {trainer.global_step}  test accuracy {accuracy:.1%}")
    if args.save:
        trainer.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
