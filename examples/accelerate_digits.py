"""Train a small network with Hugging Face Accelerate and KAISA.

python accelerate_digits.py
torchrun --standalone --nproc-per-node=2 accelerate_digits.py --accumulate 2
python accelerate_digits.py --folder run
python accelerate_digits.py --folder run --resume
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from second_order import KAISA


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small network with Accelerate."
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, help="at most so many in an epoch; default: all"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    parser.add_argument("--precision", default="no", help="such as bf16")
    parser.add_argument("--folder", help="where to save the state after each epoch")
    parser.add_argument(
        "--resume", action="store_true", help="from the state in the folder"
    )
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accumulate,
        mixed_precision=args.precision,
    )
    torch.manual_seed(0)
    x_train, y_train, x_test, y_test = load_data()
    train = TensorDataset(x_train, y_train)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    # Prepare the model first, so that KAISA sees the DistributedDataParallel around it,
    # which averages the gradients.
    model = accelerator.prepare(make_model())
    optimizer = KAISA(model, lr=args.lr, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, args.epochs)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    if args.resume:
        accelerator.load_state(args.folder)

    while schedule.last_epoch < args.epochs:
        model.train()
        for index, (images, labels) in enumerate(loader):
            if index == args.steps:
                break
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                # An earlier call would drop accumulated gradients.
                optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            logits = accelerator.unwrap_model(model)(x_test.to(accelerator.device))
        accuracy = (logits.argmax(dim=1).cpu() == y_test).float().mean()
        accelerator.print(f"epoch {schedule.last_epoch}  test accuracy {accuracy:.1%}")
        if args.folder:
            accelerator.save_state(args.folder)
    # KAISA is inside Accelerate's wrapper.
    accelerator.print(optimizer.optimizer.summary())


if __name__ == "__main__":
    main()
