"""Verify that the captured pairs of a layer reproduce the gradient of its weight.

A pair is an input x and the gradient d of the output. If the hooks capture all calls of
a layer, the sum of dᵀ x over the passes (x may also be patches or one-hot rows) is the
gradient ∇ of its weight W, whatever the loss is. If the two differ, A and G are not the
layer's curvature: the forward computes something else, W is used outside of the layer,
or the loss contains derivatives of the model. We compare the two by their products with
random vectors, the columns of R:

    E = Σ dᵀ x R          from the pairs
    Γ = Σ ∇ R             from the gradient that arrives at the weight, before any
                          averaging or clipping
    r = min over c of ‖Γ - E - c W R‖ / max(‖Γ‖, ‖E‖)

The term c W R allows for an L2 penalty in the loss, whose gradient c W is in no pair.

    forward, backward   ``Verification.add`` adds E of each pair.
    gradient            A hook on the weight calls ``Verification.add_gradient``, which
                        adds Γ.
    step                ``residuals`` returns r of all layers, with one device read.

The missing share of the gradient may grow during training, for example if a
decoder also uses an embedding's weight. So a layer is verified at the start of
training and again later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from second_order.kronecker.autograd import is_reached
from second_order.kronecker.storage import group_equal, read_numbers

__all__ = ["TOLERANCE", "Verification", "comparisons_due", "residuals"]

# The largest r of a verified layer. Rounding in bfloat16 gives up to 0.04.
TOLERANCE = 0.1

# From each of these steps on, a layer is due for two more comparisons, at its next
# steps with statistics. A layer that fails one is compared at every such step until it
# passes.
VERIFIED_FROM = (0, 100, 1000)
VERIFIED_STEPS = 2

# Columns of R.
NUM_VECTORS = 8

# Weights of more than two dimensions become matrices of at most this many columns.
MAX_COLUMNS = 2**18

# Relative rounding errors: of float32 sums, and of products in TF32.
ROUNDING = 8 * torch.finfo(torch.float32).eps
TF32_ROUNDING = 2.0**-11

_norm = torch.linalg.vector_norm


class PairSketch(NamedTuple):
    """The contribution of a captured pair."""

    product: Tensor  # its part of E; if the weight is a vector, of the gradient itself
    x_norm: Tensor  # ‖x‖ ‖d‖ bounds the rounding error of dᵀ x
    d_norm: Tensor


class Verification:
    """E and Γ of a layer, summed over the passes of a step.

    The first pair of a pass registers a hook on the weight. The hook adds the gradient
    of the pass to Γ and removes itself.

    Attributes:
        pairs: The captured pairs.
        gradient: Γ. None before the first gradient arrives.
        weight: W R. None for a weight that is a vector.
        elements: Number of elements of the weight.
        dtype: The dtype of the gradients of the layer's output.
    """

    def __init__(self) -> None:
        self.pairs: list[PairSketch] = []
        self.gradient: Tensor | None = None
        self.weight: Tensor | None = None
        self.elements = 0
        self.dtype = torch.float32
        self._is_possible = True
        self._hook: RemovableHandle | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the pairs and the gradient are both there, and comparable."""
        return self._is_possible and bool(self.pairs) and self.gradient is not None

    @property
    def key(self) -> Hashable:
        """A key that is equal for layers that :func:`residuals` batches."""
        product = self.pairs[0].product
        gradient = cast(Tensor, self.gradient)
        # Tensors of these shapes, devices and dtypes can be stacked. The elements and
        # the dtype of the layer also determine its bound on rounding errors.
        sizes = (product.shape, self.elements, len(self.pairs), self.weight is None)
        return sizes, product.device, product.dtype, gradient.dtype, self.dtype

    def add(self, product: Tensor, x: Tensor, d: Tensor, weight: Tensor) -> None:
        """Add a pair.

        Args:
            product: The pair's part of the gradient, of the weight's shape.
            x: The rows of the input.
            d: The gradient of the output.
            weight: The leaf that the gradient will arrive at.
        """
        # A hook of the user on the weight may change the gradient before it arrives.
        if self._hook is None and weight._backward_hooks:
            self._is_possible = False
        if not self._is_possible:
            return

        # Integer inputs are indices of one-hot rows, each of norm 1.
        sketch = _sketch(product)
        x_norm = (
            _norm_of(x)
            if x.is_floating_point()
            else sketch.new_full((), x.numel() ** 0.5)
        )
        self.pairs.append(PairSketch(sketch, x_norm, _norm_of(d)))
        self.elements = weight.numel()
        self.dtype = d.dtype
        if self._hook is None:
            self._hook = weight.register_hook(partial(self.add_gradient, weight))

    @torch.no_grad()
    def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a pass as it arrives at the weight."""
        if not is_reached(weight):  # torch.autograd.grad calls the hook as well
            return
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        sketch = _sketch(gradient.to(dtype))
        self.gradient = sketch if self.gradient is None else self.gradient + sketch
        if self.weight is None and weight.dim() > 1:
            self.weight = _sketch(weight.detach().to(dtype))


def comparisons_due(step: int) -> int:
    """Return how many comparisons a layer should have had by a step."""
    return VERIFIED_STEPS * bisect_right(VERIFIED_FROM, step)


def residuals(verifications: Sequence[Verification]) -> list[float]:
    """Return r of complete verifications, less the part that rounding may cause.

    All of them are computed before the host reads the device, once.
    """
    order: list[int] = []
    parts: list[Tensor] = []
    for group in group_equal([layer.key for layer in verifications]):
        order += group
        parts.append(_residuals([verifications[i] for i in group]))
    results = [0.0] * len(verifications)
    for i, value in zip(order, read_numbers(parts), strict=True):
        results[i] = value
    return results


def _residuals(layers: Sequence[Verification]) -> Tensor:
    """Return r of layers with one key, less the part that rounding may cause.

    Its shape is ``(layers,)``.
    """
    first = layers[0]
    sketches: list[Tensor] = []
    norms: list[Tensor] = []
    gradients: list[Tensor] = []
    weights: list[Tensor] = []
    for layer in layers:
        for pair in layer.pairs:
            sketches.append(pair.product)
            norms += (pair.x_norm, pair.d_norm)
        gradients.append(cast(Tensor, layer.gradient))
        if layer.weight is not None:
            weights.append(layer.weight)

    # E of each pair, (layers, pairs, elements), and Γ - E without its component along
    # the weight.
    products = torch.stack(sketches).unflatten(0, (len(layers), -1)).flatten(2)
    reproduced = products.sum(1)
    gradient = torch.stack(gradients).flatten(1)
    missing = gradient - reproduced
    if weights:
        weight = torch.stack(weights).flatten(1)
        c = (missing * weight).sum(1) / weight.square().sum(1).clamp_min(1e-30)
        missing = missing - c.unsqueeze(1) * weight

    # What rounding may cause: in the products, in their sums, and by underflow.
    dtype_info = torch.finfo(first.dtype)
    norm_products = torch.stack(norms).view(len(layers), -1, 2).prod(-1).sum(1)
    may_be_tf32 = products.device.type == "cuda" and first.dtype is torch.float32
    noise = norm_products * (TF32_ROUNDING if may_be_tf32 else ROUNDING)
    noise = noise + _norm(products, dim=-1).sum(1) * dtype_info.eps
    noise = noise + dtype_info.smallest_normal * dtype_info.eps * first.elements**0.5

    largest = torch.maximum(_norm(gradient, dim=-1), _norm(reproduced, dim=-1))
    result: Tensor = (_norm(missing, dim=-1) - noise).clamp_min(0.0) / largest
    return result


def _norm_of(tensor: Tensor) -> Tensor:
    """The norm of a tensor in float32 at least."""
    norm: Tensor = _norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm


def _sketch(tensor: Tensor) -> Tensor:
    """Multiply a tensor, as a matrix, by R. Vectors are copied.

    All dimensions but the first become columns. If these are too many, as for fused
    experts, only the last dimension becomes columns.
    """
    if tensor.dim() < 2:
        return tensor.clone()
    matrix = (
        tensor.flatten(1) if tensor[0].numel() <= MAX_COLUMNS else tensor.flatten(0, -2)
    )
    return matrix @ _random_signs(matrix.shape[1], matrix.dtype, matrix.device)


@lru_cache(maxsize=256)
def _random_signs(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """R, ``(rows, NUM_VECTORS)``: independent signs, scaled so that E‖M R‖² = ‖M‖²."""
    generator = torch.Generator(device).manual_seed(0)
    signs = torch.empty(rows, NUM_VECTORS, dtype=dtype, device=device)
    return signs.bernoulli_(generator=generator).sub_(0.5).mul_(2 / NUM_VECTORS**0.5)
