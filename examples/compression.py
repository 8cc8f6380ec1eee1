"""Compress the layers of a small Llama to low rank: in the metric of their inputs, and plainly.

    python examples/compression.py --output compression.png

Of all W' of rank r, the one that changes a layer's outputs least, E ‖(W - W') x‖², is U_r U_rᵀ W,
of the first r left singular vectors of W A^(1/2), A = E x xᵀ (whitening; Wang et al. 2024, SVD-LLM,
take a Cholesky factor of A). By the eigenvectors of A nothing is inverted, and of few tokens, as
with --windows 2, A may lack full rank; though then plain SVD is better.

The model is trained for some seconds on the characters of Python's own library. Files that are held
out tell the loss.
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from language_model import VOCABULARY, Size, batches, held_out
from second_order import measure

SIZE = Size(layers=2, width=64, heads=4, context=64, batch=16, steps=500, warmup=0)
RANKS = (4, 8, 12, 16, 20, 24, 32, 40, 48)  # of 64, the full one of each layer
COLOURS = {"plain SVD": "#D55E00", "whitened": "#0072B2"}


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def trained(size: Size, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=3 * size.width,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, size.steps, pct_start=0.1)
    for windows in islice(batches(size, seed), size.steps):
        optimizer.zero_grad()
        loss_of(model, windows).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def directions(weight: Tensor, a: Tensor | None = None) -> Tensor:
    """The left singular vectors of W, or of W A^(1/2)."""
    if a is not None:
        values, vectors = torch.linalg.eigh(a.double())
        weight = weight @ (vectors * values.clamp(min=0).sqrt()).to(weight)  # but for a rotation
    return cast(Tensor, torch.linalg.svd(weight, full_matrices=False).U)


def compressed(model: nn.Module, vectors: dict[str, Tensor], rank: int) -> nn.Module:
    """A copy of the model, with the weights of some layers of a lower rank."""
    copy = deepcopy(model)
    for name, u in vectors.items():
        weight = copy.get_parameter(f"{name}.weight")
        weight.data = u[:, :rank] @ (u[:, :rank].T @ weight.data)
    return copy


@torch.no_grad()
def losses(model: nn.Module, windows: list[Tensor], unseen: Tensor) -> dict[str, list[float]]:
    """By method, the held-out loss at each rank."""
    inputs = [each[:, :-1] for each in windows]
    curvature = measure(model, inputs, layers=["model.layers.*"], progress=False)
    weights = {name: model.get_parameter(f"{name}.weight") for name in curvature}
    plain = {name: directions(weight) for name, weight in weights.items()}
    whitened = {name: directions(w, curvature[name].A[0]) for name, w in weights.items()}
    failed = [name for name, c in curvature.items() if torch.linalg.cholesky_ex(c.A).info > 0]
    print(f"{len(failed)} of {len(weights)} A have no Cholesky factor")
    found = {"whole": [loss_of(model, unseen).item()]}
    for method, u in (("plain SVD", plain), ("whitened", whitened)):
        found[method] = [loss_of(compressed(model, u, r), unseen).item() for r in RANKS]
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compress a small Llama to low rank.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=SIZE.steps, help="of training")
    parser.add_argument("--windows", type=int, default=128, help="of text, for A")
    parser.add_argument("--output", type=Path, default=Path("compression.png"))
    args = parser.parse_args(arguments)
    size, found = replace(SIZE, steps=args.steps), {}
    for seed in args.seeds:
        model = trained(size, seed)
        windows = list(islice(batches(replace(size, batch=1), 2**10 + seed), args.windows))
        found[seed] = losses(model, windows, held_out(size))
        print(f"seed {seed}: held-out loss {found[seed]['whole'][0]:.3f}, of lower rank")
        print("        rank " + " ".join(f"{rank:5}" for rank in RANKS))
        for method in COLOURS:
            print(f"   {method:9} " + " ".join(f"{loss:5.3f}" for loss in found[seed][method]))
    drawing = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = drawing.subplots()
    for method, colour in COLOURS.items():
        curves = torch.tensor([each[method] for each in found.values()])
        axes.plot(RANKS, curves.T, color=colour, linewidth=0.6, alpha=0.6)
        axes.plot(RANKS, curves.mean(0), "o-", color=colour, markersize=3.5, label=method)
    whole = sum(each["whole"][0] for each in found.values()) / len(found)
    axes.axhline(whole, color="0.4", linewidth=0.8, linestyle="--", label="whole model")
    axes.set(xlabel="rank of the layers, of 64", ylabel="held-out loss, nats a character")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawing.savefig(args.output, dpi=160, facecolor="#ffffff")
    print(f"figure: {args.output}")


if __name__ == "__main__":
    main()
