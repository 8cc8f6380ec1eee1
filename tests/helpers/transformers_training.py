"""Small models of transformers with weights made on the spot, and training by its Trainer."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor, nn

transformers.logging.set_verbosity_error()

VOCABULARY = 13
LENGTH = 6
CLASSES = 3
STEPS = 4
BATCH = 4
CURVED = 3
LR = 0.02
NAMES = ("input_ids", "labels", "attention_mask")
# Attention: eager is the only one with second derivatives.
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": LENGTH}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0}
GPT2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


def bert() -> nn.Module:
    config = BertConfig(**SMALL, **SIZES, **UNDROPPED, num_labels=CLASSES)
    return BertForSequenceClassification(config)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL, **SIZES, num_key_value_heads=1, use_cache=False))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(**SMALL, **GPT2, use_cache=False))


MODELS: dict[str, Callable[[], nn.Module]] = {"BERT": bert, "Llama": llama, "GPT-2": gpt2}


def model_of(name: str) -> nn.Module:
    """A model in float64, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().double().train()


def examples(name: str, count: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
    """Rows of tokens, with a class each or to be continued."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    if name == "BERT":
        labels = torch.randint(CLASSES, (count,), generator=generator)
        return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]
    return [{"input_ids": x, "labels": x} for x in rows]


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def ragged(name: str, count: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
    """Texts of unequal lengths, most of them short."""
    lengths = [LENGTH if i % BATCH == 1 else 2 + i % 2 for i in range(count)]
    rows = zip(examples(name, count), lengths, strict=True)
    return [{key: value[:n] for key, value in row.items()} for row, n in rows]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts as long as the longest; what is added has no label and no part in attention."""

    def filled(tensors: list[Tensor], value: int) -> Tensor:
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    return {
        "input_ids": filled([row["input_ids"] for row in rows], 0),
        "attention_mask": filled([torch.ones_like(row["input_ids"]) for row in rows], 0),
        "labels": filled([row["labels"] for row in rows], -100),
    }


def targets(batch: dict[str, Tensor]) -> int:
    """Number of tokens to be guessed."""
    return int((batch["labels"][:, 1:] != -100).sum())


@contextmanager
def in_float64() -> Iterator[None]:
    """Losses of models of transformers, which put logits into float32."""
    narrow = torch.Tensor.float

    def wide(t: Tensor) -> Tensor:
        return t if t.dtype is torch.float64 else narrow(t)

    with patch.object(torch.Tensor, "float", wide):
        yield


def on_whole_steps(model: nn.Module, optimizer: Any, steps: Sequence[Any]) -> None:
    """A loop of torch, the texts of a step in one batch; its loss has the number of all targets.

    The batches are recorded ones of the Trainer, whose schedule is kept.
    """
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (len(steps) - s) / len(steps))
    for batches in steps:
        rows = [
            {"input_ids": x[mask > 0], "labels": y[mask > 0]}
            for batch in batches
            for x, y, mask in zip(*map(batch.get, NAMES), strict=True)
        ]
        optimizer.zero_grad()
        number = batches[0]["num_items_in_batch"] * len(batches)  # it may count otherwise than we
        model(**padded(rows), num_items_in_batch=number).loss.backward()
        optimizer.step()
        rate.step()


def curved(name: str) -> dict[str, Tensor]:
    """The batch of a curvature closure, of another size than any other."""
    return collated(examples(name)[:CURVED])


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@contextmanager
def recorded(model: nn.Module, parts: int) -> Iterator[list[dict[str, Tensor]]]:
    """Records the training batches in order, without those of a curvature closure.

    The Trainer has a loss divided by the number of targets in all `parts` of a step, on all
    processes, which it may count otherwise than the model does. Divided by `parts`, the number
    gives each part's own mean.
    """
    seen: list[dict[str, Tensor]] = []

    def note(_: nn.Module, __: Any, batch: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled() and len(batch["input_ids"]) != CURVED:
            noted = {key: batch[key].clone() for key in NAMES if key in batch}
            if "num_items_in_batch" in batch:
                noted["num_items_in_batch"] = batch["num_items_in_batch"] / parts
            seen.append(noted)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


@contextmanager
def fresh_state() -> Iterator[None]:
    """What Accelerate keeps of a process, forgotten before and after."""
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def fit(
    model: nn.Module,
    name: str,
    folder: Path,
    *,
    resume: str | None = None,
    callbacks: Any = None,
    optimizers: Any = (None, None),
    optimizer_cls_and_kwargs: Any = None,
    data: Any = None,
    collator: Any = collated,
    **arguments: Any,
) -> tuple[Trainer, list[dict[str, Tensor]]]:
    """Train by the Trainer; it, and the batches that the model has seen."""
    all_arguments = {
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": LR,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        **arguments,
    }
    parts = all_arguments.get("gradient_accumulation_steps", 1) * int(
        os.environ.get("WORLD_SIZE", "1")
    )
    with fresh_state(), recorded(model, parts) as seen:
        trainer = Trainer(
            model,
            TrainingArguments(str(folder), **all_arguments),
            train_dataset=examples(name) if data is None else data,
            data_collator=collator,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        trainer.train(resume_from_checkpoint=resume)
    return trainer, seen
