"""Train a small causal transformer with KAISA over AdamW, optionally sharded.

    python train_language_model.py
    torchrun --standalone --nproc-per-node=2 train_language_model.py
    torchrun --standalone --nproc-per-node=2 train_language_model.py --fsdp

The text is the source of Python's standard library, character by character; every tenth
file is held out. With several processes the model is in DistributedDataParallel, or
with ``--fsdp`` each block and the model are sharded by FSDP2.
"""

import argparse
import os
import string
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from second_order import KAISA

VOCABULARY = len(string.printable) + 1
CONTEXT = 64  # characters in a window
BATCH = 32  # windows in a step, over all processes
HELD_OUT_WINDOWS = 64


# --------------------------------------------------------------------------------- data


def load_text(held_out: bool) -> Tensor:
    """Return the characters of the standard library's source as numbers (int64)."""
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


def random_windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Cut windows of ``CONTEXT + 1`` characters out of a text, at random places."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


# -------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Attention and a feed-forward network, each after LayerNorm, with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def _split_heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q = self._split_heads(self.q(y))
        k = self._split_heads(self.k(y))
        v = self._split_heads(self.v(y))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        output: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return output


class Transformer(nn.Module):
    """Predicts the next character at every position of a window."""

    def __init__(self, layers: int = 2, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        """Return logits of shape (batch, context, VOCABULARY)."""
        positions = torch.arange(windows.shape[1], device=windows.device)
        x = self.characters(windows) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of each character after the first, in nats."""
    logits = model(windows[:, :-1])
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


# ----------------------------------------------------------------------------- training


def train(
    args: argparse.Namespace, rank: int, world_size: int, device: torch.device
) -> None:
    # Model and optimizer. FSDP2 shards parameters before the optimizer sees them.
    torch.manual_seed(0)
    net = Transformer().to(device)
    model: nn.Module = net
    if args.fsdp:
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    elif world_size > 1:
        model = DistributedDataParallel(net)
    # With "reduce", each factor is on one process, as sharded parameters are.
    optimizer = KAISA(
        model.parameters(), lr=args.lr, base=torch.optim.AdamW, factor_exchange="reduce"
    )

    # Every process draws the same windows and takes its own part of them.
    train_text = load_text(held_out=False)
    test_text = load_text(held_out=True)
    test_generator = torch.Generator().manual_seed(1)
    test_windows = random_windows(test_text, HELD_OUT_WINDOWS, test_generator)
    test_windows = test_windows[rank::world_size].to(device)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, args.steps + 1):
        windows = random_windows(train_text, BATCH, generator)
        windows = windows[rank::world_size].to(device)
        optimizer.zero_grad()
        loss = loss_of(model, windows)
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == args.steps:
            # On every rank: the forward of a sharded model is collective.
            with torch.no_grad():
                test_loss = loss_of(model, test_windows)
            if rank == 0:
                print(f"step {step:3}  loss {loss:.3f}  held out {test_loss:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument(
        "--fsdp", action="store_true", help="shard the model with FSDP2"
    )
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    rank = 0
    world_size = 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:  # started by torchrun
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        rank = dist.get_rank()
        world_size = dist.get_world_size()

    # DistributedDataParallel, local to `train`, must not outlive the process group.
    train(args, rank, world_size, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
