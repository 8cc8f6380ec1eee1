"""Export factors for influence functions with kronfluence.

kronfluence fits factors to a loss that is a sum over a batch. It stores sums, and the
counts to divide them by: https://github.com/pomonam/kronfluence
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from second_order.checkpoint.files import replacing, save_tensors
from second_order.export.layers import (
    dense_eigen,
    exported_layers,
    is_writer,
    read_counts,
)
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["to_kronfluence"]


def to_kronfluence(
    curvature: KroneckerCurvature, folder: str | Path, *, documents: int | None = None
) -> dict[str, str]:
    """Write factors that kronfluence's ``Analyzer`` loads as its own.

        to_kronfluence(curvature, "influence_results/digits/factors_ours")
        analyzer = Analyzer("digits", model, task)  # output_dir="influence_results"
        analyzer.compute_pairwise_scores("scores", factors_name="ours", ...)

    The files contain Σ x xᵀ and Σ d dᵀ, with R as the count of both, their
    eigenvectors, and the eigenvalues of both divided by R. If there are corrected
    eigenvalues, they also contain Σ_b (Q_Gᵀ ∇_b Q_A)², with the number of documents as
    its count. kronfluence tracks ``nn.Linear`` and ``nn.Conv2d`` by module name, and as
    here, a bias is the last column of A.

    ``factor_arguments.json`` says "ekfac" if all layers have corrected eigenvalues, and
    otherwise "kfac", which
    ``analyzer.fit_lambda_matrices(..., load_from_factors_name=)`` completes. If ranks
    own different layers, it is a collective.

    Args:
        curvature: The curvature, with G.
        folder: ``factors_NAME`` in the analysis's folder. Existing files are replaced.
        documents: The number of examples of the batches, such as sequences, by which
            kronfluence divides corrected eigenvalues. None means N, one loss term per
            document.

    Returns:
        The reason for each layer that was skipped, by name. kronfluence must not track
        its module.

    Raises:
        ValueError: If there is no G, or no layer to write.
    """
    skipped: dict[str, str] = {}
    files: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for layer in exported_layers(curvature, "AG", "kronfluence", skipped):
        if is_writer(curvature):
            for file, tensor in _layer_tensors(layer, documents).items():
                files[file] |= dict.fromkeys(layer.modules, tensor[0].cpu())
    if not files:
        return skipped

    # kronfluence needs Λ of all layers or of none.
    strategy = "ekfac"
    if len(files["lambda_matrix"]) < len(files["activation_covariance"]):
        strategy = "kfac"
        files.pop("lambda_matrix")
        files.pop("num_lambda_processed", None)
        # Remove those of an earlier export, which belong to other eigenvectors.
        for file in ("lambda_matrix", "num_lambda_processed"):
            (Path(folder) / f"{file}.safetensors").unlink(missing_ok=True)
    for file, tensors in files.items():
        save_tensors(tensors, Path(folder) / f"{file}.safetensors")
    with replacing(Path(folder) / "factor_arguments.json") as arguments:
        arguments.write(json.dumps({"strategy": strategy}).encode())
    return skipped


def _layer_tensors(layer: LayerCurvature, documents: int | None) -> dict[str, Tensor]:
    """Return the tensors of a layer by the file that they are written to."""
    terms, rows = read_counts(layer)
    a, q_a = dense_eigen(layer, "A")
    g, q_g = dense_eigen(layer, "G")
    num_rows = torch.tensor([[rows]], device="cpu")
    tensors = {
        "activation_covariance": layer.A * rows,
        "gradient_covariance": layer.G * terms,
        "num_activation_covariance_processed": num_rows,
        "num_gradient_covariance_processed": num_rows,
        "activation_eigenvectors": q_a,
        "activation_eigenvalues": a,
        "gradient_eigenvectors": q_g,
        "gradient_eigenvalues": g * (terms / rows),
    }
    if layer.corrected is not None:
        num_documents = torch.tensor([[documents or terms]], device="cpu")
        tensors["lambda_matrix"] = layer.corrected * terms
        tensors["num_lambda_processed"] = num_documents
    return tensors
