"""Train a small GPT-2, Llama or BERT on Python's own library with the Trainer of transformers.

python examples/trainer_language.py --model llama
python examples/trainer_language.py --model llama --lines --batch-size 4 --accumulate 4
python examples/trainer_language.py --model bert --save-steps 100 --folder runs
python examples/trainer_language.py --model bert --save-steps 100 --folder runs --resume
torchrun --standalone --nproc-per-node=2 examples/trainer_language.py --model gpt2

The configurations are made here, with weights drawn at random; tokens are characters. BERT guesses
characters that are hidden, the others the next one. With ``--lines`` the texts are lines, padded to
the longest of a batch. Batches then have unequal numbers of targets, and Llama and GPT-2 divide
their losses by that of all batches of a step; the optimizer sees it.
"""

import argparse
import os
import string
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

from groups import decayed_groups
from language_model import VOCABULARY, text
from second_order import KAISA

MASK = VOCABULARY
HIDDEN_SHARE = 0.15


def model_of(name: str, width: int, layers: int, length: int) -> PreTrainedModel:
    if name == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": length}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes))
    shared: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
        "max_position_embeddings": length,
    }
    if name == "bert":
        return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY + 1, **shared))
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **shared)
    return LlamaForCausalLM(config)


class Windows(Dataset[dict[str, Tensor]]):
    """Pieces of text, one after another, each its own label."""

    def __init__(self, length: int, hide: bool, *, held_out: bool = False) -> None:
        whole = text(held_out=held_out)
        self.rows = whole[: len(whole) // length * length].view(-1, length)
        self.hide = hide

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        if not self.hide:
            return {"input_ids": row, "labels": row}
        generator = torch.Generator().manual_seed(index)
        hidden = torch.rand(row.shape, generator=generator) < HIDDEN_SHARE
        return {
            "input_ids": row.masked_fill(hidden, MASK),
            "labels": row.masked_fill(~hidden, -100),
        }


class Lines(Dataset[dict[str, Tensor]]):
    """Lines of text, each as long as it is, with no more than so many characters."""

    def __init__(self, length: int, *, held_out: bool = False) -> None:
        whole = text(held_out=held_out)
        ends = (whole == string.printable.index("\n")).nonzero().squeeze(1) + 1
        lines = whole[: ends[-1]].tensor_split(ends[:-1])
        self.rows = [line[:length] for line in lines if len(line) > 1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts as long as the longest; what is added has no part in attention, and no label."""
    fill = {"labels": -100}
    return {
        name: pad_sequence([row[name] for row in rows], True, fill.get(name, 0)) for name in rows[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small language model by the Trainer.")
    parser.add_argument("--model", choices=["gpt2", "llama", "bert"], default="llama")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches to a step")
    parser.add_argument("--lines", action="store_true", help="lines, not windows; not for bert")
    parser.add_argument("--length", type=int, default=64, help="characters of a window, or line")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", default="trainer_language", help="for checkpoints")
    parser.add_argument("--save-steps", type=int, default=0, help="0: no checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last one in the folder")
    args = parser.parse_args()
    if args.lines and args.model == "bert":
        parser.error("--lines: BERT has windows, whose characters are hidden")

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
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,  # torchrun sets it
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    model = model_of(args.model, args.width, args.layers, args.length)
    # The Trainer wraps the model in DistributedDataParallel afterwards, which averages gradients.
    optimizer = KAISA(
        decayed_groups(model, weight_decay=0.1),
        lr=args.lr,
        betas=(0.9, 0.95),
        base=torch.optim.AdamW,
        gradient_averaging=False,
        # BERT takes the mean over each batch, and the Trainer adds these up.
        loss_reduction="pass_mean" if args.model == "bert" else "auto",
    )
    hide = args.model == "bert"
    data: list[Any] = [
        Lines(args.length, held_out=part)
        if args.lines
        else Windows(args.length, hide, held_out=part)
        for part in (False, True)
    ]
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data[0],
        eval_dataset=torch.utils.data.Subset(data[1], range(128)),
        data_collator=padded,
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(optimizer.summary())
        print(f"held-out loss {found['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
