"""Export Hessians for quantization by GPTQ, GPTQModel and llm-compressor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from second_order.checkpoint.files import save_tensors
from second_order.export.layers import (
    drop_bias,
    exported_layers,
    is_writer,
    read_counts,
)
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["to_gptq"]


def to_gptq(
    curvature: KroneckerCurvature, folder: str | Path | None = None
) -> dict[str, Tensor]:
    """Return GPTQ's Hessian H = 2/R Σ x xᵀ = 2 A, ``(in, in)``, of each module.

        curvature = second_order.measure(model, loader, factors="inputs")
        H = to_gptq(curvature)["model.layers.0.mlp.down_proj"]

    H is that of the weight, so the column of a bias is dropped. For a grouped
    convolution it is the mean over groups, as GPTQModel computes it, and for the
    in-projection of an attention that of queries, keys and values. For fused experts it
    has the shape ``(experts, in, in)``. H has no damping, because GPTQ adds its
    percentage of the mean diagonal. GPTQModel divides by the number of rows R. AutoGPTQ
    and llm-compressor divide by the number of sequences: their H is larger by the mean
    length of a sequence and quantizes to the same weights.

    If ranks own different layers, it is a collective.

    Args:
        curvature: The curvature, with any factors.
        folder: Where to write ``MODULE.safetensors``, or ``(model).safetensors`` if the
            model is one layer, with H as "H" and R as "nsamples"; None to write no
            files.

    Returns:
        H by module name, on the CPU of every rank.

    Raises:
        ValueError: If no layer has a factor of inputs.
    """
    hessians: dict[str, Tensor] = {}
    for layer in exported_layers(curvature, "A", "GPTQ", skipped={}, with_groups=True):
        a = drop_bias(layer).A
        # Each fused expert has its own inputs and its own weight.
        if not layer.shape.routed:
            a = a.mean(0)
        h = 2 * a.cpu()
        for module in layer.modules:
            hessians[module] = h
            if folder is not None and is_writer(curvature):
                num_rows = torch.tensor([read_counts(layer).rows], device="cpu")
                path = Path(folder) / f"{module or layer.name}.safetensors"
                save_tensors({"H": h, "nsamples": num_rows}, path)
    return hessians
