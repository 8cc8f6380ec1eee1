"""Hessians for quantization by GPTQ, GPTQModel and llm-compressor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from second_order.checkpoint.files import save_tensors
from second_order.export.layers import exported_layers, numbers_of, weight_only, writes
from second_order.kronecker.layers import CONVOLUTIONS
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["to_gptq"]


def to_gptq(curvature: KroneckerCurvature, folder: str | Path | None = None) -> dict[str, Tensor]:
    """H = 2/R Σ x xᵀ = 2 A by module name, ``(in, in)`` on the CPU, as GPTQ stores it.

    H is that of the weight alone: a bias's column is dropped. For a grouped convolution it is the
    mean over its groups, as GPTQModel takes it; for fused experts ``(experts, in, in)``, each one's
    own. It has no damping: GPTQ adds its percentage of the mean diagonal. GPTQModel counts rows;
    AutoGPTQ and llm-compressor count sequences, so that their H is larger by the mean length of
    one, and gives the same weights.

    Args:
        curvature: With any factors.
        folder: Where to write ``MODULE.safetensors`` with "H" and, in "nsamples", R; None for no
            files.

    Returns:
        H of each layer with factors of inputs, on every rank.

    Raises:
        ValueError: If there is no such layer.
    """
    found: dict[str, Tensor] = {}
    is_writer = folder is not None and writes(curvature)
    for layer in exported_layers(curvature, "A", "GPTQ", {}, with_groups=True):
        a = weight_only(layer).A
        takes_mean = layer.shape.groups == 1 or issubclass(layer.kind, CONVOLUTIONS)
        h = 2 * (a.mean(0) if takes_mean else a).cpu()
        for module in layer.modules:
            found[module] = h
            if is_writer:
                number = torch.tensor([numbers_of(layer)[1]], device="cpu")
                path = Path(folder or "") / f"{module}.safetensors"
                save_tensors({"H": h, "nsamples": number}, path)
    return found
