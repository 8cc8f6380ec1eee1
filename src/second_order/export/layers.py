"""What all exporters share: which layers a format has a place for, and their numbers.

    F = A ⊗ G      A = Σ x xᵀ / R over the R rows of a layer's inputs, x with a 1 for the bias
                   G = Σ d dᵀ / N over the N terms of the loss, d of their sum
                   Λ = Σ_b (Q_Gᵀ ∇_b Q_A)² / N over the examples b of the batches (EK-FAC)

Each of the other packages divides by another number. Nothing is transposed where a weight is ``(in,
out)``, as in ``transformers.Conv1D``: A belongs to inputs and G to outputs. For a convolution, R
counts images, A sums over their T locations and G is a mean over these (Grosse & Martens 2016). For
packages that count locations, A ⊗ G is then T times what they would have found, and Λ the same.
Modules that share a weight get the same factors.

An exporter leaves out the layers that its format has no place for (embeddings, normalizations,
biases alone, and unless it says otherwise grouped convolutions and fused experts). It returns their
names with the reasons.

If ranks own different layers, each rank calls the exporter, and the one that owns the first layer
writes. It needs host memory for everything that goes into one file. If every rank has the whole
curvature, one of them calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["check_factors", "eigen_of", "exported_layers", "numbers_of", "weight_only", "writes"]


def exported_layers(
    curvature: KroneckerCurvature,
    factors: str,
    package: str,
    left_out: dict[str, str],
    *,
    prefix: str = "",
    with_groups: bool = False,
) -> Iterator[LayerCurvature]:
    """Yield layers with factors of a module's inputs and outputs, and note why others are left out.

    What is computed for a yielded layer is not kept. Raises ValueError if a factor is missing, or
    if no layer is left.
    """
    for name in curvature:
        layer = curvature[name] if name.startswith(prefix) else None
        shape = None if layer is None else layer.shape
        if layer is None or shape is None:
            left_out[name] = f"its name does not begin with {prefix!r}"
        elif shape.exact:
            left_out[name] = "its curvature is one matrix, without a factor of inputs"
        elif shape.diagonal_a:
            left_out[name] = "its inputs are indices"
        elif shape.locations:
            left_out[name] = "it is doubly factored"
        elif shape.groups > 1 and not with_groups:
            left_out[name] = f"it has {shape.groups} groups, with a pair of factors each"
        else:
            check_factors(layer, factors, package)
            yield replace(layer)
    if len(left_out) == len(curvature):
        name, reason = next(iter(left_out.items()), ("none", "there is none"))
        raise ValueError(f"no layer has anything for {package}; {name!r}: {reason}")


def check_factors(layer: LayerCurvature, factors: str, package: str) -> None:
    """Raise ValueError if a layer lacks one of the factors."""
    missing = [factor for factor in factors if factor not in layer.stored]
    if missing:
        raise ValueError(
            f"layer {layer.name!r} has no {missing[0]}, which {package} needs; measure with "
            f"factors='kfac'"
        )


def writes(curvature: KroneckerCurvature) -> bool:
    """Whether this rank owns the first layer."""
    return next(iter(curvature), None) in curvature.local_layers


def numbers_of(layer: LayerCurvature) -> tuple[int, int]:
    """N and R, whole numbers of at least 1; R is N where it is not known."""
    terms = layer.examples * layer.updates
    return max(1, round(terms)), max(1, round(layer.rows or terms))


def eigen_of(layer: LayerCurvature, factor: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a factor that is no diagonal."""
    values, vectors = layer.eigen[factor]
    assert vectors is not None
    return values, vectors


def weight_only(layer: LayerCurvature) -> LayerCurvature:
    """The curvature of a layer's weight alone; without corrected eigenvalues if it had a bias."""
    shape = layer.shape
    weight, size = next(iter(layer.shapes.items()))
    columns = size.numel() // (shape.groups * shape.out_dim)
    if columns == shape.in_dim:
        return layer
    return replace(
        layer,
        shapes={weight: size},
        shape=replace(shape, in_dim=columns),
        stored={**layer.stored, "A": layer.A[..., :columns, :columns].contiguous()},
        corrected=None,
        basis=None,
    )
