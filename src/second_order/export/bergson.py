"""A Hessian for Bergson: https://github.com/EleutherAI/bergson."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from second_order.checkpoint.files import replacing, save_tensors
from second_order.export.layers import eigen_of, exported_layers, numbers_of, weight_only, writes
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["to_bergson"]


def to_bergson(
    curvature: KroneckerCurvature,
    folder: str | Path,
    *,
    prefix: str = "",
    include_bias: bool = False,
    documents: int | None = None,
) -> dict[str, str]:
    """Write a Hessian that Bergson applies: ``--hessian_path folder``, ``load_preconditioner``.

    In folders of one ``shard_0.safetensors`` each, by names below ``model.base_model``, for a loss
    that is a sum over a document's tokens: ``activation_sharded`` Σ x xᵀ and ``gradient_sharded``
    Σ d dᵀ, ``total_processed.pt`` with R; ``eigen_*`` the eigenvectors; ``eigenvalue_sharded``
    those of A ⊗ G N / D, a mean over the D documents, as ``factor_eig_a`` and ``factor_eig_g``
    multiplied with each other are; ``eigenvalue_correction_sharded`` Λ N / D. Bergson leaves the
    last token of each sequence out of A; :func:`second_order.measure` does with ``mask=``.

    Args:
        curvature: With G.
        folder: The Hessian's; existing files are replaced.
        prefix: Of the layers to write, removed from their names: "model." for a causal Llama.
        include_bias: As Bergson's own. False: a bias's column of A is dropped.
        documents: D, the number of examples of the batches. None: N, each being a term of the loss.

    Returns:
        Why a layer has been left out, by name.

    Raises:
        ValueError: If there is no G, or no layer to write; for corrected eigenvalues, which are of
            an eigenbasis with the bias, of a layer whose bias is to be dropped.
    """
    left_out: dict[str, str] = {}
    files: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    is_writer = writes(curvature)
    rows = 0
    for layer in exported_layers(curvature, "AG", "Bergson", left_out, prefix=prefix):
        part = layer if include_bias else weight_only(layer)
        if layer.corrected is not None and part.corrected is None:
            raise ValueError(
                f"layer {layer.name!r} has a bias, and its corrected eigenvalues are of the "
                f"eigenbasis with it; give include_bias=True here and to Bergson"
            )
        if not is_writer:
            continue
        terms, rows = numbers_of(layer)
        examples = documents or terms
        a, q_a = eigen_of(part, "A")
        g, q_g = eigen_of(part, "G")
        scale = (rows / examples) ** 0.5
        found = {
            "activation_sharded": part.A * rows,
            "gradient_sharded": part.G * terms,
            "eigen_activation_sharded": q_a,
            "eigen_gradient_sharded": q_g,
            "eigenvalue_sharded": g.unsqueeze(-1) * a.unsqueeze(-2) * (terms / examples),
            "factor_eig_a": a * scale,
            "factor_eig_g": g * (terms / rows * scale),
        }
        if part.corrected is not None:
            found["eigenvalue_correction_sharded"] = part.corrected * (terms / examples)
        names = [module.removeprefix(prefix) for module in layer.modules]
        for file, tensor in found.items():
            files[file] |= dict.fromkeys(names, tensor[0].cpu())

    for file, tensors in files.items():
        save_tensors(tensors, Path(folder) / file / "shard_0.safetensors")
    if files:
        with replacing(Path(folder) / "total_processed.pt") as total:
            torch.save(torch.tensor(rows, device="cpu"), total)
    return left_out
