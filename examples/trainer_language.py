"""Train a small GPT-2, Llama or BERT with Hugging Face's Trainer and KAISA.

    python trainer_language.py --model llama
    python trainer_language.py --model llama --lines --batch-size 4 --accumulate 4
    python trainer_language.py --model bert --save-steps 100 --folder runs
    python trainer_language.py --model bert --save-steps 100 --folder runs --resume
    torchrun --standalone --nproc-per-node=2 trainer_language.py --model gpt2

The models are small and have random weights. Tokens are the characters of Python's
standard library. BERT predicts masked characters; the others predict the next one. With
``--lines`` the texts are lines, padded to the longest in a batch. Batches then have
different numbers of targets: GPT-2 and Llama divide the loss by the number of targets
in all batches of a step, and KAISA recognizes this.
"""

import argparse
import os
import string
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from second_order import KAISA

VOCABULARY = len(string.printable) + 1
MASK = VOCABULARY  # BERT's mask token
MASKED_SHARE = 0.15


def load_text(held_out: bool) -> Tensor:
    """Return the characters of the standard library's source as numbers (int64).

    Every tenth file is held out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    excluded = ("test", "site-packages", "idlelib")
    nested = folder.glob("*/*.py")
    packages = [path for path in nested if path.parent.name not in excluded]
    files = sorted(folder.glob("*.py")) + sorted(packages)
    chosen = [path for i, path in enumerate(files) if (i % 10 == 0) is held_out]
    content = b"\n".join(path.read_bytes() for path in chosen)

    # Printable characters get the numbers 0 to 99; all others share the last one.
    numbers = torch.full((256,), VOCABULARY - 1)
    for number, character in enumerate(string.printable):
        numbers[ord(character)] = number
    return numbers[torch.frombuffer(bytearray(content), dtype=torch.uint8).long()]


def make_model(name: str, width: int, layers: int, length: int) -> PreTrainedModel:
    if name == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": length}
        gpt2_config = GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes)
        return GPT2LMHeadModel(gpt2_config)
    shared: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
        "max_position_embeddings": length,
    }
    if name == "bert":
        return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY + 1, **shared))
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **shared
    )
    return LlamaForCausalLM(config)


class Windows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of the text.

    With ``masked``, some characters are replaced by MASK.
    """

    def __init__(self, length: int, masked: bool, *, held_out: bool = False) -> None:
        text = load_text(held_out)
        self.rows = text[: len(text) // length * length].view(-1, length)
        self.masked = masked

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        if not self.masked:
            return {"input_ids": row, "labels": row}
        generator = torch.Generator().manual_seed(index)
        masked = torch.rand(row.shape, generator=generator) < MASKED_SHARE
        return {
            "input_ids": row.masked_fill(masked, MASK),
            "labels": row.masked_fill(~masked, -100),
        }


class Lines(Dataset[dict[str, Tensor]]):
    """Lines of the text, cut after ``length`` characters."""

    def __init__(self, length: int, *, held_out: bool = False) -> None:
        text = load_text(held_out)
        ends = (text == string.printable.index("\n")).nonzero().squeeze(1) + 1
        lines = text[: ends[-1]].tensor_split(ends[:-1])
        self.rows = [line[:length] for line in lines if len(line) > 1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad all rows to the longest. Padding has no label, and attention ignores it."""
    batch = {}
    for name in rows[0]:
        fill = -100 if name == "labels" else 0
        batch[name] = pad_sequence([row[name] for row in rows], True, fill)
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small language model with the Trainer."
    )
    parser.add_argument("--model", choices=["gpt2", "llama", "bert"], default="llama")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    parser.add_argument(
        "--lines", action="store_true", help="texts are lines; not for bert"
    )
    parser.add_argument("--length", type=int, default=64, help="characters in a text")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", default="trainer_language", help="for checkpoints")
    parser.add_argument("--save-steps", type=int, default=0, help="0: no checkpoints")
    parser.add_argument(
        "--resume", action="store_true", help="from the last checkpoint"
    )
    args = parser.parse_args()
    if args.lines and args.model == "bert":
        parser.error("--lines is not supported for bert; leave it out")

    ddp_backend = None
    if "RANK" in os.environ:  # started by torchrun
        ddp_backend = "nccl" if torch.cuda.is_available() else "gloo"
    arguments = TrainingArguments(
        args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        warmup_steps=max(1, args.steps // 10),
        lr_scheduler_type="cosine",
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 1,
        logging_steps=max(1, args.steps // 10),
        ddp_backend=ddp_backend,
        # On CPUs, the Trainer needs this to use DistributedDataParallel.
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    model = make_model(args.model, args.width, args.layers, args.length)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = KAISA(
        groups,
        lr=args.lr,
        betas=(0.9, 0.95),
        base=torch.optim.AdamW,
        # Later, the Trainer adds DistributedDataParallel, which averages gradients.
        gradient_averaging=False,
        # BERT's loss is the mean over a batch, and the Trainer adds up those of a step.
        loss_reduction="pass_mean" if args.model == "bert" else "auto",
    )
    train_set: Dataset[Any]
    test_set: Dataset[Any]
    if args.lines:
        train_set = Lines(args.length)
        test_set = Lines(args.length, held_out=True)
    else:
        masked = args.model == "bert"
        train_set = Windows(args.length, masked)
        test_set = Windows(args.length, masked, held_out=True)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train_set,
        eval_dataset=torch.utils.data.Subset(test_set, range(128)),
        data_collator=pad,
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(optimizer.summary())
        print(f"held-out loss {metrics['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
