"""Export a Hessian for posteriors with laplace-torch.

https://github.com/aleximmer/Laplace
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from second_order.export.layers import check_factors, drop_bias
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
    """Set the Hessian of a laplace-torch posterior, instead of ``laplace.fit``.

        la = Laplace(model, "classification", subset_of_weights="last_layer",
                     hessian_structure="kron", last_layer_name="head")
        to_laplace(curvature, la, train_loader)

    H is the sum over the loss terms, N F. It is a ``Kron`` with the factors [N G, A]
    for a weight, or [A, N G] for a weight of shape ``(in, out)``, and [N G] for its
    bias. As in laplace-torch, A loses the column of the bias, and H the coupling of
    weight and bias. For norm layers and biases without a weight, H has one block per
    parameter. Corrected eigenvalues are ignored, because a ``Kron`` has none.

    The loss must be a negative log-likelihood. For regression it is ½ ‖f - y‖², and
    laplace-torch handles its σ. The function runs a forward pass over ``train_loader``
    for the loss in ``log_marginal_likelihood``.

    Args:
        curvature: The curvature of the same model, with G. It must cover all parameters
            of ``laplace``.
        laplace: A ``KronLaplace``, or a ``KronLLLaplace`` with ``last_layer_name``. It
            is modified.
        train_loader: As for ``laplace.fit``.
        examples: The number of loss terms that H is a sum over. None means N, the
            measured number.

    Raises:
        TypeError: If ``laplace`` is another posterior.
        ValueError: If there is no G, or if a parameter has no curvature or one without
            a pair of factors, as in grouped convolutions and doubly factored layers.
    """
    # Find the parameters of the posterior.
    package = importlib.import_module("laplace")
    if not isinstance(laplace, package.KronLaplace):
        raise TypeError(
            f"{type(laplace).__name__} has no Kronecker factors; use hessian_structure='kron', "
            f"with all weights or the last layer"
        )
    model = laplace.model
    params = laplace.params
    if isinstance(laplace, package.KronLLLaplace):
        if model.last_layer is None:
            raise ValueError(
                "the last layer is not known; give last_layer_name= to Laplace"
            )
        params = list(model.last_layer.parameters())
        model = model.model
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    names = [name_of[parameter] for parameter in params]

    # Build H from the layers that these parameters belong to.
    blocks: dict[str, list[Tensor]] = {}
    missing: list[str] = []
    for name in names:
        layer_name = curvature.parameter_layers.get(name)
        if layer_name is None:
            missing.append(name)
        elif name not in blocks:
            blocks |= _layer_blocks(curvature[layer_name], examples)
    if missing:
        reason = curvature.uncovered.get(missing[0], "no measured layer has them")
        raise ValueError(
            f"{missing[0]!r} and {len(missing) - 1} more parameters have no curvature: {reason}; "
            f"freeze them, or measure them"
        )
    factors = []
    for name, parameter in zip(names, params, strict=True):
        factors.append([factor.to(parameter) for factor in blocks[name]])

    # Set what `fit` would set.
    laplace.model.eval()
    laplace.mean = parameters_to_vector(params).detach()
    laplace.n_data = len(train_loader.dataset)
    fit = _evaluate_loss(laplace, train_loader, params[0].device)
    laplace.loss = fit.loss
    laplace.n_outputs = fit.num_outputs
    laplace.model.output_size = fit.num_outputs
    kron = importlib.import_module("laplace.utils.matrix").Kron
    laplace.H_facs = kron(factors)
    laplace.H = laplace.H_facs.decompose(damping=laplace.damping)


class TrainingLoss(NamedTuple):
    """A posterior's loss over the training data, and the model's number of outputs."""

    loss: Any
    num_outputs: int


def _evaluate_loss(
    laplace: Any, train_loader: Any, device: torch.device
) -> TrainingLoss:
    """Evaluate a posterior's loss over the training data, as ``laplace.fit`` does."""
    total: Any = 0.0
    with torch.no_grad():
        for data in train_loader:
            if isinstance(data, Mapping):
                x: Any = data
                y = data[laplace.dict_key_y]
            else:
                x, y = data
            if isinstance(x, Tensor):
                x = x.to(device)
            output = laplace.model(x)
            loss = laplace.backend.lossfunc(output, y.to(device))
            total += laplace.backend.factor * loss
    return TrainingLoss(total, output.shape[-1])


def _layer_blocks(
    layer: LayerCurvature, examples: float | None
) -> dict[str, list[Tensor]]:
    """Return the diagonal blocks of N F as Kronecker factors, by parameter name."""
    shape = layer.shape
    check_factors(layer, "AG", "laplace-torch")
    if (shape.groups > 1 and not shape.exact) or shape.locations:
        raise ValueError(
            f"layer {layer.name!r} has no pair of factors; freeze it for Laplace"
        )
    if examples is None:
        examples = layer.examples * layer.updates
    g = layer.G * examples
    if shape.exact:
        return _exact_blocks(layer, g)

    weight, *biases = layer.shapes
    factors = [g[0], drop_bias(layer).A[0]]
    if shape.transposed:
        factors.reverse()
    blocks = {weight: factors}
    for bias in biases:
        blocks[bias] = [g[0] * layer.A[0, -1, -1]]
    return blocks


def _exact_blocks(layer: LayerCurvature, g: Tensor) -> dict[str, list[Tensor]]:
    """Return the blocks of a layer whose G is F, or the diagonal of F as groups."""
    f = g[0] if layer.shape.groups == 1 else g.flatten()
    blocks = {}
    start = 0
    for name, size in layer.shapes.items():
        end = start + size.numel()
        block = f[start:end]
        if f.dim() == 2:
            block = block[:, start:end]
        blocks[name] = [block]
        start = end
    return blocks
