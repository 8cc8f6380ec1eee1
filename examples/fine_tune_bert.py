"""Train a small BERT on Python's own library, then fine-tune it to tell code from comments.

python examples/fine_tune_bert.py
torchrun --standalone --nproc-per-node=2 examples/fine_tune_bert.py --optimizer adamw

Nothing is downloaded: the configuration is made here, tokens are bytes, and the weights that are
fine-tuned are those of a short training to fill in bytes that have been hidden. The fine-tuning has
what such recipes have: rates that fall from block to block, a faster head, no decay of vectors.
"""

import argparse
import io
import sysconfig
import tokenize
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification

from groups import decayed_groups
from processes import processes, spread
from second_order import KAISA

KINDS = ("code", "comment", "string")
MASK, VOCABULARY = 256, 257  # bytes, and one that hides them
HIDDEN_SHARE = 0.15
FILES = 100


def kinds_of(source: str) -> Tensor:
    """The kind of each character of a source, int64: its place in KINDS."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    kinds = torch.zeros(len(source), dtype=torch.int64)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = {tokenize.COMMENT: 1, tokenize.STRING: 2}.get(token.type, 0)
        (first, left), (last, right) = token.start, token.end
        if kind:
            kinds[starts[first - 1] + left : starts[last - 1] + right] = kind
    return kinds


def sources(held_out: bool) -> Tensor:
    """Bytes of the library's files, and their kinds, (2, count); every fifth file is held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))[:FILES]]
    texts = [text for text in texts if text.isascii() and b"\r" not in text and b"\f" not in text]
    chosen = [text for i, text in enumerate(texts) if (i % 5 == 0) is held_out]
    found = torch.cat([kinds_of(text.decode()) for text in chosen])
    return torch.stack([torch.frombuffer(bytearray(b"".join(chosen)), dtype=torch.uint8), found])


def windows(source: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """(2, count, length) bytes and their kinds, from places drawn at random."""
    starts = torch.randint(source.shape[1] - length, (count, 1), generator=generator)
    return source[:, starts + torch.arange(length)]


def fill_in(model: nn.Module, rows: Tensor, generator: torch.Generator) -> Tensor:
    """The loss of guessing the bytes that are hidden."""
    inputs = rows[0]
    hidden = torch.rand(inputs.shape, generator=generator) < HIDDEN_SHARE
    labels = inputs.masked_fill(~hidden, -100)
    loss: Tensor = model(input_ids=inputs.masked_fill(hidden, MASK), labels=labels).loss
    return loss


def tell_apart(model: nn.Module, rows: Tensor, _: torch.Generator) -> Tensor:
    """The loss of guessing each byte's kind."""
    loss: Tensor = model(input_ids=rows[0], labels=rows[1]).loss
    return loss


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
    learned = sources(held_out=False)
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
        return windows(learned, args.batch_size // world_size, args.length, generator)

    def optimizer_of(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        if args.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=args.lr)
        return KAISA(groups, lr=args.lr, base=torch.optim.AdamW)

    if rank == 0:
        print("pre-training: hidden bytes")
    first = BertForMaskedLM(config)
    model = spread(first, world_size)
    groups = decayed_groups(first, weight_decay=0.1)
    train(model, optimizer_of(groups), fill_in, draw, args.pretrain_steps, rank)

    if rank == 0:
        print(f"fine-tuning: {', '.join(KINDS)}")
    net = BertForTokenClassification(config)
    net.bert.load_state_dict(first.bert.state_dict())
    model = spread(net, world_size)
    rules = {"^classifier": {"lr": 2 * args.lr}, "embeddings": {"lr": 0.8**args.layers * args.lr}}
    for i in range(args.layers):  # the nearer to the input, the slower
        rules[rf"layer\.{i}\."] = {"lr": 0.8 ** (args.layers - 1 - i) * args.lr}
    groups = decayed_groups(net, weight_decay=0.1, rules=rules)
    optimizer = optimizer_of(groups)
    train(model, optimizer, tell_apart, draw, args.steps, rank)

    if rank == 0:
        net.eval()
        rows = windows(sources(held_out=True), 256, args.length, torch.Generator().manual_seed(0))
        with torch.no_grad():
            right = net(input_ids=rows[0]).logits.argmax(dim=-1) == rows[1]
        shares = (
            f"{kind} {right[rows[1] == k].float().mean():.0%}" for k, kind in enumerate(KINDS)
        )
        print(f"held-out bytes told apart: {right.float().mean():.1%} ({', '.join(shares)})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-train and fine-tune a small BERT.")
    parser.add_argument("--optimizer", choices=["kaisa", "adamw"], default="kaisa")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--pretrain-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400, help="of fine-tuning")
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--length", type=int, default=64, help="bytes of a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    with processes() as (rank, world_size):
        run(args, rank, world_size)


if __name__ == "__main__":
    main()
