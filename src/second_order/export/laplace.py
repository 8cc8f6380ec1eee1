"""A Hessian for laplace-torch: https://github.com/aleximmer/Laplace."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from second_order.export.layers import check_factors, weight_only
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["to_laplace"]


def to_laplace(
    curvature: KroneckerCurvature,
    laplace: Any,
    train_loader: Any,
    *,
    examples: float | None = None,
) -> None:
    """Give laplace-torch's posterior its Hessian, in the place of ``laplace.fit(train_loader)``.

        la = Laplace(model, "classification", subset_of_weights="last_layer",
                     hessian_structure="kron", last_layer_name="head")
        to_laplace(curvature, la, train_loader)

    H = Σ over the terms of the loss = N F, as a ``Kron`` of [N G, A] for a weight and [N G] for its
    bias: A loses the bias's column, and H what couples the two, as laplace-torch has it. For a
    weight ``(in, out)`` it is [A, N G]. Of normalisations and biases alone it has a block a
    parameter. The loss is to be a negative log-likelihood: of a regression ½ ‖f - y‖², whose σ is
    laplace's. A and G are used where there are corrected eigenvalues, as a ``Kron`` has none.

    The forward passes that the loss of ``log_marginal_likelihood`` needs are run.

    Args:
        curvature: With G; of the same model, all parameters of ``laplace`` in it.
        laplace: A ``KronLaplace``, or a ``KronLLLaplace`` that was given ``last_layer_name``.
        train_loader: As for ``laplace.fit``.
        examples: The number of terms to make H the sum over. None: N, as many as were measured.

    Raises:
        TypeError: For another ``laplace``.
        ValueError: If there is no G; for a parameter without curvature, or with one that is no
            Kronecker product, of a grouped convolution or a doubly factored layer.
    """
    package = importlib.import_module("laplace")
    if not isinstance(laplace, package.KronLaplace):
        raise TypeError(
            f"{type(laplace).__name__} has no Kronecker factors; give a Laplace of "
            f"hessian_structure='kron', of all weights or of the last layer"
        )
    model = laplace.model
    params = laplace.params
    if isinstance(laplace, package.KronLLLaplace):
        if model.last_layer is None:
            raise ValueError("the last layer is not known; give last_layer_name= to Laplace")
        params = list(model.last_layer.parameters())
        model = model.model
    names = {parameter: name for name, parameter in model.named_parameters()}
    wanted = [names[parameter] for parameter in params]
    blocks = dict[str, list[Tensor]]()
    for name in {each.rpartition(".")[0]: None for each in wanted}:
        if name in curvature:
            blocks |= _blocks(curvature[name], examples)
    missing = [name for name in wanted if name not in blocks]
    if missing:
        raise ValueError(
            f"{missing[0]!r} and {len(missing) - 1} more parameters have no curvature: "
            f"{curvature.uncovered.get(missing[0], 'their layers were not measured')}; freeze "
            f"them, or measure them"
        )
    kfacs = [[b.to(p) for b in blocks[name]] for name, p in zip(wanted, params, strict=True)]
    laplace.model.eval()
    laplace.mean = parameters_to_vector(params).detach()
    laplace.loss = 0.0
    laplace.n_data = len(train_loader.dataset)
    device = params[0].device
    with torch.no_grad():
        for data in train_loader:
            x, y = (data, data[laplace.dict_key_y]) if isinstance(data, Mapping) else data
            out = laplace.model(x.to(device) if isinstance(x, Tensor) else x)
            loss = laplace.backend.lossfunc(out, y.to(device))
            laplace.loss += laplace.backend.factor * loss
    laplace.n_outputs = laplace.model.output_size = out.shape[-1]
    laplace.H_facs = importlib.import_module("laplace.utils.matrix").Kron(kfacs)
    laplace.H = laplace.H_facs.decompose(damping=laplace.damping)


def _blocks(layer: LayerCurvature, examples: float | None) -> dict[str, list[Tensor]]:
    """N F's diagonal blocks as Kronecker factors, by parameter."""
    shape = layer.shape
    check_factors(layer, "AG", "laplace-torch")
    if (shape.groups > 1 and not shape.exact) or shape.locations:
        raise ValueError(f"layer {layer.name!r} has no pair of factors; freeze it for Laplace")
    g = layer.G * (layer.examples * layer.updates if examples is None else examples)
    if shape.exact:
        sizes = [size.numel() for size in layer.shapes.values()]
        whole = g[0] if shape.groups == 1 else g.flatten()
        ends = list(accumulate(sizes))
        spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return {k: [whole[(s,) * whole.dim()]] for k, s in zip(layer.shapes, spans, strict=True)}
    weight, *bias = layer.shapes
    pair = [g[0], weight_only(layer).A[0]]
    return {weight: pair[::-1] if shape.transposed else pair} | {
        name: [g[0] * layer.A[0, -1, -1]] for name in bias
    }
