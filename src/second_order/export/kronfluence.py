"""Factors for kronfluence: https://github.com/pomonam/kronfluence."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from second_order.checkpoint.files import replacing, save_tensors
from second_order.export.layers import eigen_of, exported_layers, numbers_of, writes
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["to_kronfluence"]


def to_kronfluence(
    curvature: KroneckerCurvature, folder: str | Path, *, documents: int | None = None
) -> dict[str, str]:
    """Write factors that kronfluence's ``Analyzer`` loads as its own.

        to_kronfluence(curvature, "influence_results/digits/factors_ours")
        analyzer = Analyzer("digits", model, task)  # output_dir="influence_results"
        analyzer.compute_pairwise_scores("scores", factors_name="ours", ...)

    kronfluence fits them to a loss that is a sum over a batch: Σ x xᵀ and Σ d dᵀ with R as the
    number of both, their eigenvectors, the eigenvalues of both divided by R, and with corrected
    eigenvalues Σ_b (Q_Gᵀ ∇_b Q_A)² with the number of examples. It tracks ``nn.Linear`` and
    ``nn.Conv2d`` by the modules' names; a bias is A's last column there, too.
    ``factor_arguments.json`` says "ekfac", or "kfac", from which
    ``analyzer.fit_lambda_matrices(..., load_from_factors_name=)`` continues.

    Args:
        curvature: With G.
        folder: ``factors_NAME`` in the folder of the analysis; existing files are replaced.
        documents: The number of examples of the batches, such as sequences. None: N, each example
            being a term of the loss. It scales the corrected eigenvalues.

    Returns:
        Why a layer has been left out, by name; such a module must not be tracked.

    Raises:
        ValueError: If there is no G, or no layer to write.
    """
    left_out: dict[str, str] = {}
    files: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    is_writer = writes(curvature)
    for layer in exported_layers(curvature, "AG", "kronfluence", left_out):
        if not is_writer:
            continue
        terms, rows = numbers_of(layer)
        a, q_a = eigen_of(layer, "A")
        g, q_g = eigen_of(layer, "G")
        found = {
            "activation_covariance": layer.A * rows,
            "gradient_covariance": layer.G * terms,
            "num_activation_covariance_processed": torch.tensor([[rows]], device="cpu"),
            "num_gradient_covariance_processed": torch.tensor([[rows]], device="cpu"),
            "activation_eigenvectors": q_a,
            "activation_eigenvalues": a,
            "gradient_eigenvectors": q_g,
            "gradient_eigenvalues": g * (terms / rows),
        }
        if layer.corrected is not None:
            found["lambda_matrix"] = layer.corrected * terms
            found["num_lambda_processed"] = torch.tensor([[documents or terms]], device="cpu")
        for file, tensor in found.items():
            files[file] |= dict.fromkeys(layer.modules, tensor[0].cpu())

    if files:
        # kronfluence needs Λ of all layers or of none.
        strategy = "ekfac"
        if len(files["lambda_matrix"]) < len(files["activation_covariance"]):
            strategy = "kfac"
            files.pop("lambda_matrix")
            files.pop("num_lambda_processed", None)
        for file, tensors in files.items():
            save_tensors(tensors, Path(folder) / f"{file}.safetensors")
        with replacing(Path(folder) / "factor_arguments.json") as arguments:
            arguments.write(json.dumps({"strategy": strategy}).encode())
    return left_out
