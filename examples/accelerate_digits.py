"""Train on the digits with Accelerate.

python examples/accelerate_digits.py
torchrun --standalone --nproc-per-node=2 examples/accelerate_digits.py --accumulate 2
python examples/accelerate_digits.py --folder run
python examples/accelerate_digits.py --folder run --resume
"""

import argparse

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from digits import conv_net, load_split
from second_order import KAISA


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the digits with Accelerate.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, help="the most of an epoch; all by default")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches to a step")
    parser.add_argument("--precision", default="no", help="such as bf16")
    parser.add_argument("--folder", help="where to save the state after each epoch")
    parser.add_argument("--resume", action="store_true", help="from what is in the folder")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=args.accumulate, mixed_precision=args.precision
    )
    torch.manual_seed(0)
    data = load_split()
    train = TensorDataset(data.train_images, data.train_labels)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    # The model first: of the prepared one KAISA sees that gradients are averaged already.
    model = accelerator.prepare(conv_net())
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
                optimizer.zero_grad()  # not at the top, where it would drop earlier micro-batches
        schedule.step()
        model.eval()
        with torch.no_grad():
            guesses = accelerator.unwrap_model(model)(data.test_images).argmax(dim=1)
        accuracy = (guesses == data.test_labels).float().mean()
        accelerator.print(f"epoch {schedule.last_epoch}  test accuracy {accuracy:.1%}")
        if args.folder:
            accelerator.save_state(args.folder)
    accelerator.print(optimizer.optimizer.summary())  # behind Accelerate's wrapper


if __name__ == "__main__":
    main()
