"""Export a Hessian for influence functions with Bergson.

https://github.com/EleutherAI/bergson
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from second_order.checkpoint.files import replacing, save_tensors
from second_order.export.layers import (
    dense_eigen,
    drop_bias,
    exported_layers,
    is_writer,
    read_counts,
)
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["to_bergson"]

CORRECTION = "eigenvalue_correction_sharded"


def to_bergson(
    curvature: KroneckerCurvature,
    folder: str | Path,
    *,
    prefix: str = "",
    include_bias: bool = False,
    documents: int | None = None,
) -> dict[str, str]:
    """Write a Hessian for Bergson's ``--hessian_path`` or ``load_preconditioner``.

        curvature = second_order.measure(model, loader, factors="ekfac")
        to_bergson(curvature, "hessian", prefix="model.", documents=num_sequences)

    Bergson names modules below ``model.base_model``, and its loss is a sum over the
    tokens of a document. With R rows, N loss terms and D documents, the files are, each
    in a folder of its own as ``shard_0.safetensors``:

        activation_sharded              Σ x xᵀ
        gradient_sharded                Σ d dᵀ
        eigen_activation_sharded        the eigenvectors of Σ x xᵀ
        eigen_gradient_sharded          the eigenvectors of Σ d dᵀ
        factor_eig_a, factor_eig_g      eigenvalues whose products are the next
        eigenvalue_sharded              eigenvalues of A ⊗ G N / D, means over documents
        eigenvalue_correction_sharded   Λ N / D, if there is Λ

    ``total_processed.pt`` contains the largest R of these layers, because Bergson counts
    all tokens, also for a layer that receives fewer. Bergson leaves the last token of
    each sequence out of A. To do so in :func:`second_order.measure`, use ``mask=``. If
    ranks own different layers, it is a collective.

    Args:
        curvature: The curvature, with G.
        folder: The folder of the Hessian. Existing files are replaced.
        prefix: Prefix of the layers to write, which is removed from their names:
            "model." for a causal Llama.
        include_bias: As Bergson's option. False drops the column of a bias from A.
        documents: D, the number of examples of the batches. None means N, one loss term
            per document.

    Returns:
        The reason for each layer that was skipped, by name.

    Raises:
        ValueError: If there is no G or no layer to write, or if the bias of a layer
            with corrected eigenvalues would be dropped.
    """
    skipped: dict[str, str] = {}
    files: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    num_rows = 0
    for layer in exported_layers(curvature, "AG", "Bergson", skipped, prefix=prefix):
        # Bergson stores a layer with or without its bias.
        exported = layer if include_bias else drop_bias(layer)
        if layer.corrected is not None and exported.corrected is None:
            raise ValueError(
                f"layer {layer.name!r} has a bias, and its corrected eigenvalues belong to the "
                f"eigenbasis with it; use include_bias=True here and in Bergson"
            )
        # One rank writes.
        if not is_writer(curvature):
            continue
        num_rows = max(num_rows, read_counts(exported).rows)
        names = [module.removeprefix(prefix) for module in layer.modules]
        for file, tensor in _layer_tensors(exported, documents).items():
            files[file] |= dict.fromkeys(names, tensor[0].cpu())

    if not files:
        return skipped

    # Write one file per kind of factor, and the number of rows last.
    folder = Path(folder)
    if CORRECTION not in files:
        # Remove that of an earlier export, which belongs to other eigenvectors.
        shutil.rmtree(folder / CORRECTION, ignore_errors=True)
    for file, tensors in files.items():
        save_tensors(tensors, folder / file / "shard_0.safetensors")
    with replacing(folder / "total_processed.pt") as total:
        torch.save(torch.tensor(num_rows, device="cpu"), total)
    return skipped


def _layer_tensors(layer: LayerCurvature, documents: int | None) -> dict[str, Tensor]:
    """Return the tensors of a layer by the folder that they are written to."""
    counts = read_counts(layer)
    num_documents = documents or counts.terms
    a, q_a = dense_eigen(layer, "A")
    g, q_g = dense_eigen(layer, "G")
    scale = (counts.rows / num_documents) ** 0.5
    eigenvalues = g.unsqueeze(-1) * a.unsqueeze(-2)
    tensors = {
        "activation_sharded": layer.A * counts.rows,
        "gradient_sharded": layer.G * counts.terms,
        "eigen_activation_sharded": q_a,
        "eigen_gradient_sharded": q_g,
        "eigenvalue_sharded": eigenvalues * (counts.terms / num_documents),
        "factor_eig_a": a * scale,
        "factor_eig_g": g * (counts.terms / counts.rows * scale),
    }
    if layer.corrected is not None:
        correction = layer.corrected * (counts.terms / num_documents)
        tensors[CORRECTION] = correction
    return tensors
