"""Pre-train a small BERT on Python's standard library, and fine-tune it to label code.

    python fine_tune_bert.py
    torchrun --standalone --nproc-per-node=2 fine_tune_bert.py --optimizer adamw

Tokens are bytes, and nothing is downloaded. BERT first learns to fill in masked bytes,
then to label each byte as code, comment or string. Fine-tuning uses layer-wise learning
rates, a faster head, and weight decay on matrices only.
"""

import argparse
import io
import os
import sysconfig
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification

from second_order import KAISA

KINDS = ("code", "comment", "string")
MASK = 256  # the token that replaces masked bytes
VOCABULARY = 257  # bytes and the mask
MASKED_SHARE = 0.15
FILES = 100


def kinds_of(source: str) -> Tensor:
    """Return the kind of each character of a source file, an index in KINDS (int64)."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    kinds = torch.zeros(len(source), dtype=torch.int64)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = {tokenize.COMMENT: 1, tokenize.STRING: 2}.get(token.type, 0)
        if kind:
            first_line, first_column = token.start
            last_line, last_column = token.end
            start = starts[first_line - 1] + first_column
            stop = starts[last_line - 1] + last_column
            kinds[start:stop] = kind
    return kinds


def sources(held_out: bool) -> Tensor:
    """Return the bytes of source files and their kinds, of shape (2, bytes).

    Every fifth file is held out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(folder.glob("*.py"))[:FILES]:
        text = path.read_bytes()
        if text.isascii() and b"\r" not in text and b"\f" not in text:
            texts.append(text)
    chosen = [text for i, text in enumerate(texts) if (i % 5 == 0) is held_out]
    kinds = torch.cat([kinds_of(text.decode()) for text in chosen])
    content = torch.frombuffer(bytearray(b"".join(chosen)), dtype=torch.uint8)
    return torch.stack([content, kinds])


def windows(
    source: Tensor, count: int, length: int, generator: torch.Generator
) -> Tensor:
    """Cut random windows out of the source: bytes and kinds, (2, count, length)."""
    starts = torch.randint(source.shape[1] - length, (count, 1), generator=generator)
    return source[:, starts + torch.arange(length)]


def masked_loss(model: nn.Module, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Return the loss of predicting masked bytes."""
    inputs = rows[0]
    masked = torch.rand(inputs.shape, generator=generator) < MASKED_SHARE
    labels = inputs.masked_fill(~masked, -100)
    loss: Tensor = model(input_ids=inputs.masked_fill(masked, MASK), labels=labels).loss
    return loss


def labeling_loss(model: nn.Module, rows: Tensor, _: torch.Generator) -> Tensor:
    """Return the loss of predicting each byte's kind."""
    loss: Tensor = model(input_ids=rows[0], labels=rows[1]).loss
    return loss


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    rates: dict[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Make parameter groups: only matrices decay, and some layers have other rates.

    Args:
        model: The model.
        lr: The learning rate of parameters that ``rates`` does not name.
        weight_decay: The weight decay of matrices.
        rates: Learning rates by a part of the parameter's name. The first match counts.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        rate = lr
        for part, other_rate in (rates or {}).items():
            if part in name:
                rate = other_rate
                break
        decay = weight_decay if p.ndim > 1 else 0.0
        groups.setdefault((rate, decay), []).append(p)
    return [
        {"params": params, "lr": rate, "weight_decay": decay}
        for (rate, decay), params in groups.items()
    ]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Tensor, torch.Generator], Tensor],
    draw: Callable[[torch.Generator], Tensor],
    steps: int,
    rank: int,
) -> None:
    warmup = max(1, steps // 10)
    scheduler = LambdaLR(optimizer, lambda s: min((s + 1) / warmup, 1 - s / steps))
    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, draw(generator), generator)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step % 50 == 0 or step == steps):
            print(f"  step {step:4}  loss {loss:.4f}")


def run(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    train_source = sources(held_out=False)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        intermediate_size=4 * args.width,
        max_position_embeddings=args.length,
        num_labels=len(KINDS),
    )

    def draw(generator: torch.Generator) -> Tensor:
        count = args.batch_size // world_size
        return windows(train_source, count, args.length, generator)

    def make_optimizer(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        if args.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=args.lr)
        return KAISA(groups, lr=args.lr, base=torch.optim.AdamW)

    if rank == 0:
        print("pre-training: masked bytes")
    pretrained = BertForMaskedLM(config)
    model: nn.Module = pretrained
    if world_size > 1:
        model = DistributedDataParallel(pretrained)
    groups = parameter_groups(pretrained, args.lr, weight_decay=0.1)
    train(model, make_optimizer(groups), masked_loss, draw, args.pretrain_steps, rank)

    if rank == 0:
        print(f"fine-tuning: {', '.join(KINDS)}")
    net = BertForTokenClassification(config)
    net.bert.load_state_dict(pretrained.bert.state_dict())
    model = net
    if world_size > 1:
        model = DistributedDataParallel(net)
    # Layers near the input learn more slowly.
    rates = {"classifier": 2 * args.lr, "embeddings": 0.8**args.layers * args.lr}
    for i in range(args.layers):
        rates[f"layer.{i}."] = 0.8 ** (args.layers - 1 - i) * args.lr
    groups = parameter_groups(net, args.lr, weight_decay=0.1, rates=rates)
    optimizer = make_optimizer(groups)
    train(model, optimizer, labeling_loss, draw, args.steps, rank)

    if rank == 0:
        net.eval()
        generator = torch.Generator().manual_seed(0)
        rows = windows(sources(held_out=True), 256, args.length, generator)
        with torch.no_grad():
            correct = net(input_ids=rows[0]).logits.argmax(dim=-1) == rows[1]
        by_kind = []
        for k, kind in enumerate(KINDS):
            accuracy = correct[rows[1] == k].float().mean()
            by_kind.append(f"{kind} {accuracy:.0%}")
        print(f"held-out accuracy: {correct.float().mean():.1%} ({', '.join(by_kind)})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Pre-train and fine-tune a small BERT."
    )
    parser.add_argument("--optimizer", choices=["kaisa", "adamw"], default="kaisa")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--pretrain-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400, help="of fine-tuning")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="of all processes together"
    )
    parser.add_argument("--length", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    rank = 0
    world_size = 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group()
        rank = dist.get_rank()
        world_size = dist.get_world_size()

    # DistributedDataParallel, local to `run`, must not outlive the process group.
    run(args, rank, world_size)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
