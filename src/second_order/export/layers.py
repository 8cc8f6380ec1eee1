"""What all exporters share: the layers that a format can represent, and their counts.

    F = A ⊗ G
    A = Σ x xᵀ / R                 over the R rows of inputs, x with a 1 for the bias
    G = Σ d dᵀ / N                 over the N loss terms, d the gradient of their sum
    Λ = Σ_b (Q_Gᵀ ∇_b Q_A)² / N    over the examples b of the batches (EK-FAC)

Each of the other packages divides by another count. A always belongs to inputs and G to
outputs, even if the weight is ``(in, out)``, as in ``transformers.Conv1D``. For a
convolution, R counts images, A sums over their T locations, and G is a mean over these
(Grosse & Martens 2016). Packages that count locations would compute an A ⊗ G that is
smaller by T, and the same Λ. Modules that share a weight get the same factors.

An exporter skips the layers that its format cannot represent: embeddings, norm layers,
biases without a weight, and, unless it says otherwise, grouped convolutions and fused
experts. ``to_bergson`` and ``to_kronfluence`` return their names with the reason.
``to_laplace`` needs all layers of the posterior, and raises instead.

If ranks own different layers, every rank calls the exporter, and the owner of the first
layer writes. It needs host memory for everything that goes into one file. The other
ranks do not wait for the files. If every rank has all layers, call the exporter on one
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = [
    "Counts",
    "check_factors",
    "dense_eigen",
    "drop_bias",
    "exported_layers",
    "is_writer",
    "read_counts",
]


def exported_layers(
    curvature: KroneckerCurvature,
    factors: str,
    package: str,
    skipped: dict[str, str],
    *,
    prefix: str = "",
    with_groups: bool = False,
) -> Iterator[LayerCurvature]:
    """Yield the layers with a pair of factors, one at a time to save memory.

    Args:
        curvature: The curvature.
        factors: The factors that the format needs: "A" or "AG".
        package: Name of the other package, for error messages.
        skipped: Receives the reason for each skipped layer, by name.
        prefix: Layers whose names begin otherwise are skipped.
        with_groups: Whether the format can represent layers with several groups.

    Raises:
        ValueError: If a layer lacks a factor, or if no layer is left.
    """
    for name in curvature:
        if not name.startswith(prefix):
            skipped[name] = f"its name does not begin with {prefix!r}"
            continue
        layer = curvature[name]
        shape = layer.shape
        if shape.exact:
            skipped[name] = "its curvature is one matrix, without a factor of inputs"
        elif shape.diagonal_a:
            skipped[name] = "its inputs are indices"
        elif shape.locations:
            skipped[name] = "it is doubly factored"
        elif shape.groups > 1 and not with_groups:
            skipped[name] = f"it has {shape.groups} groups, with a pair of factors each"
        else:
            check_factors(layer, factors, package)
            # The copy, which is freed, caches eigendecompositions instead of the layer.
            yield replace(layer)
    if len(skipped) == len(curvature):
        name, reason = next(iter(skipped.items()), ("none", "there is none"))
        raise ValueError(f"no layer can be exported to {package}; {name!r}: {reason}")


def check_factors(layer: LayerCurvature, factors: str, package: str) -> None:
    """Raise ValueError if a layer lacks one of the factors."""
    for factor in factors:
        if factor not in layer.stored:
            raise ValueError(
                f"layer {layer.name!r} has no {factor}, which {package} needs; measure with "
                f"factors='kfac'"
            )


def is_writer(curvature: KroneckerCurvature) -> bool:
    """Return whether this rank owns the first layer, and so writes the files."""
    return next(iter(curvature), None) in curvature.local_layers


class Counts(NamedTuple):
    """The numbers N of loss terms and R of rows that a layer's factors are means of."""

    terms: int
    rows: int


def read_counts(layer: LayerCurvature) -> Counts:
    """Return the counts of a layer as integers of at least 1. An unknown R is N."""
    terms = layer.examples * layer.updates
    rows = layer.rows or terms
    return Counts(max(1, round(terms)), max(1, round(rows)))


def dense_eigen(layer: LayerCurvature, factor: str) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors of a factor that is not diagonal."""
    values, vectors = layer.eigen[factor]
    assert vectors is not None
    return values, vectors


def drop_bias(layer: LayerCurvature) -> LayerCurvature:
    """Return the curvature of a layer's weight, without A's row and column of the bias.

    If the layer has a bias, the result has no corrected eigenvalues, because they
    belong to the eigenbasis with the bias.
    """
    shape = layer.shape
    weight, size = next(iter(layer.shapes.items()))
    columns = size.numel() // (shape.groups * shape.out_dim)
    if columns == shape.in_dim:
        return layer
    a = layer.A[..., :columns, :columns].contiguous()
    return replace(
        layer,
        shapes={weight: size},
        shape=replace(shape, in_dim=columns),
        stored={**layer.stored, "A": a},
        corrected=None,
        basis=None,
    )
