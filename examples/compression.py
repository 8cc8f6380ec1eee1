"""Compress a small Llama to low rank, with and without the curvature of its inputs.

    python compression.py --output compression.png

Let A = E x xᵀ be K-FAC's factor of a layer's inputs, and let U_r have the first r left
singular vectors of W A^(1/2). Then U_r U_rᵀ W changes the layer's outputs less than any
other matrix of rank r. (Wang et al. 2024, SVD-LLM, whiten with a Cholesky factor of A.
The script uses eigenvectors and inverts nothing, so A may be singular.) The baseline is
the plain SVD of W.

The model trains for some seconds on the characters of Python's standard library. The
loss is measured on held-out files.
"""

from __future__ import annotations

import argparse
import string
import sysconfig
from copy import deepcopy
from pathlib import Path
from typing import cast

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from second_order import measure

VOCABULARY = len(string.printable) + 1
LAYERS = 2
WIDTH = 64
HEADS = 4
CONTEXT = 64  # characters in a window
BATCH = 16
HELD_OUT_WINDOWS = 64
RANKS = (4, 8, 12, 16, 20, 24, 32, 40, 48)  # of 64, the full one of each layer
COLORS = {"plain SVD": "#D55E00", "whitened": "#0072B2"}


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


def random_windows(
    text: Tensor, count: int, length: int, generator: torch.Generator
) -> Tensor:
    """Cut windows of ``length + 1`` characters out of a text, at random places."""
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train(seed: int, steps: int) -> LlamaForCausalLM:
    """Train a Llama with AdamW and a one-cycle schedule."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=3 * WIDTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, steps, pct_start=0.1
    )
    text = load_text(held_out=False)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        windows = random_windows(text, BATCH, CONTEXT, generator)
        optimizer.zero_grad()
        loss_of(model, windows).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def directions(weight: Tensor, a: Tensor | None = None) -> Tensor:
    """Return the left singular vectors of W, or of W A^(1/2) if A is given."""
    if a is not None:
        values, vectors = torch.linalg.eigh(a.double())
        # A^(1/2) times a rotation, which does not change the left singular vectors.
        weight = weight @ (vectors * values.clamp(min=0).sqrt()).to(weight)
    return cast(Tensor, torch.linalg.svd(weight, full_matrices=False).U)


def compress(model: nn.Module, vectors: dict[str, Tensor], rank: int) -> nn.Module:
    """Return a copy whose layers in ``vectors`` have weights of a lower rank."""
    copy = deepcopy(model)
    for name, u in vectors.items():
        weight = copy.get_parameter(f"{name}.weight")
        weight.data = u[:, :rank] @ (u[:, :rank].T @ weight.data)
    return copy


@torch.no_grad()
def losses(
    model: nn.Module, windows: list[Tensor], held_out: Tensor
) -> dict[str, list[float]]:
    """Return the held-out loss by method and rank; "uncompressed" has one loss."""
    # Compute the curvature of the blocks' layers, and the directions to keep.
    inputs = [each[:, :-1] for each in windows]
    curvature = measure(model, inputs, layers=["model.layers.*"], progress=False)
    plain = {}
    whitened = {}
    num_singular = 0
    for name, layer in curvature.items():
        weight = model.get_parameter(f"{name}.weight")
        plain[name] = directions(weight)
        whitened[name] = directions(weight, layer.A[0])
        num_singular += int(torch.linalg.cholesky_ex(layer.A).info > 0)
    print(f"{num_singular} of {len(plain)} factors A are singular")

    # Compress at every rank.
    found = {"uncompressed": [loss_of(model, held_out).item()]}
    for method, u in (("plain SVD", plain), ("whitened", whitened)):
        found[method] = []
        for rank in RANKS:
            compressed = compress(model, u, rank)
            found[method].append(loss_of(compressed, held_out).item())
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compress a small Llama to low rank.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500, help="of training")
    parser.add_argument("--windows", type=int, default=128, help="of text, for A")
    parser.add_argument("--output", type=Path, default=Path("compression.png"))
    args = parser.parse_args(arguments)
    held_out = random_windows(
        load_text(held_out=True),
        HELD_OUT_WINDOWS,
        CONTEXT,
        torch.Generator().manual_seed(2**20),
    )
    text = load_text(held_out=False)
    found = {}
    for seed in args.seeds:
        # Train, draw windows for the curvature, and compress.
        model = train(seed, args.steps)
        generator = torch.Generator().manual_seed(2**10 + seed)
        windows = [
            random_windows(text, 1, CONTEXT, generator) for _ in range(args.windows)
        ]
        found[seed] = losses(model, windows, held_out)

        uncompressed = found[seed]["uncompressed"][0]
        print(f"seed {seed}: held-out loss {uncompressed:.3f}; compressed:")
        print("        rank " + " ".join(f"{rank:5}" for rank in RANKS))
        for method in COLORS:
            columns = " ".join(f"{loss:5.3f}" for loss in found[seed][method])
            print(f"   {method:9} {columns}")

    # Draw each seed, and the mean.
    drawing = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = drawing.subplots()
    for method, color in COLORS.items():
        curves = torch.tensor([by_method[method] for by_method in found.values()])
        axes.plot(RANKS, curves.T, color=color, linewidth=0.6, alpha=0.6)
        axes.plot(
            RANKS, curves.mean(0), "o-", color=color, markersize=3.5, label=method
        )
    baselines = [by_method["uncompressed"][0] for by_method in found.values()]
    mean = sum(baselines) / len(baselines)
    axes.axhline(mean, color="0.4", linewidth=0.8, linestyle="--", label="uncompressed")
    axes.set(
        xlabel="rank of the layers (full: 64)",
        ylabel="held-out loss (nats per character)",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawing.savefig(args.output, dpi=160, facecolor="#ffffff")
    print(f"figure: {args.output}")


if __name__ == "__main__":
    main()
