"""Verification that the pairs of a layer's hooks reproduce the gradient of its weight.

If hooks see all calls of a layer, the sum over passes of dᵀ x (of patches, of one-hot rows) is the
gradient of its weight, whatever the loss is. If it is not, A and G are not the layer's curvature:
its forward computes something else, its weight is used without a call of it, or the loss contains
derivatives. Both are compared by their products with a few random vectors R,

    E = Σ dᵀ x R          of the pairs
    Γ = Σ ∇ R             as it arrives at the weight, before anything averages or clips it
    r = min over c of ‖Γ - E - c W R‖ / max(‖Γ‖, ‖E‖)

c leaves room for a penalty on the weight's length in the loss, whose curvature is no layer's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from second_order.kronecker.autograd import is_reached
from second_order.kronecker.storage import group_equal, read_numbers

__all__ = ["TOLERANCE", "Verification", "residuals"]

TOLERANCE = 0.1
"""The largest r of a layer whose gradient counts as explained: low precision rounds by 4 %."""

VECTORS = 8  # columns of R
LONGEST = 2**18  # columns of a matrix that weights of more than two dimensions are seen as
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of sums
TF32_ROUNDING = 2.0**-11

_norm = torch.linalg.vector_norm


class PairSketch(NamedTuple):
    """What a captured pair contributes to the comparison."""

    product: Tensor  # its part of E, or of the gradient if the weight is a vector
    x_norm: Tensor
    d_norm: Tensor


class Verification:
    """The products with R that a layer's passes leave for a step to compare.

    A hook hangs on the weight from a pair until the gradient arrives, in the same pass.

    Attributes:
        pairs: The captured pairs.
        gradient: Γ.
        weight: W R, of a weight that is no vector.
        elements: Number of elements of the weight.
        dtype: Dtype of the gradients of the layer's output.
    """

    def __init__(self) -> None:
        self.pairs: list[PairSketch] = []
        self.gradient: Tensor | None = None
        self.weight: Tensor | None = None
        self.elements = 0
        self.dtype = torch.float32
        self._complete = True  # no hook of the user's changes the gradient before it arrives
        self._hook: RemovableHandle | None = None

    @property
    def is_complete(self) -> bool:
        """Whether pairs and gradient are all seen."""
        return self._complete and bool(self.pairs) and self.gradient is not None

    @property
    def key(self) -> Hashable:
        """What layers have in common that are compared together."""
        product, _, _ = self.pairs[0]
        gradient = cast(Tensor, self.gradient)
        size = product.shape, self.elements, len(self.pairs), self.weight is None
        return size, product.device, product.dtype, gradient.dtype, self.dtype

    def add(self, product: Tensor, x: Tensor, d: Tensor, weight: Tensor) -> None:
        """Add a pair, whose part of the gradient of a leaf is a product of the leaf's shape."""
        if self._hook is None and weight._backward_hooks:
            self._complete = False
        if not self._complete:
            return
        sketch = _sketch(product)
        x_norm = _size(x) if x.is_floating_point() else sketch.new_full((), x.numel() ** 0.5)
        self.pairs.append(PairSketch(sketch, x_norm, _size(d)))
        self.elements = weight.numel()
        self.dtype = d.dtype
        if self._hook is None:
            self._hook = weight.register_hook(partial(self.take, weight))

    @torch.no_grad()
    def take(self, weight: Tensor, gradient: Tensor) -> None:
        """Add a pass's gradient, as it arrives at the weight."""
        if not is_reached(weight):  # torch.autograd.grad also comes by here
            return
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sketch = _sketch(gradient.to(wide))
        self.gradient = sketch if self.gradient is None else self.gradient + sketch
        if self.weight is None and weight.dim() > 1:
            self.weight = _sketch(weight.detach().to(wide))


def residuals(explanations: Sequence[Verification]) -> list[float]:
    """The residuals of explanations that are known; a device is read once."""
    groups = group_equal([each.key for each in explanations])
    (values,) = read_numbers([_residuals([explanations[i] for i in group]) for group in groups])
    found = [0.0] * len(explanations)
    for i, value in zip(chain(*groups), values, strict=True):
        found[i] = value
    return found


def _residuals(layers: Sequence[Verification]) -> Tensor:
    """The share r of the gradient that pairs leave over, less what rounding may make, ``(n,)``.

    The layers have one :attr:`Verification.key`.
    """
    first = layers[0]
    sketches = [pair for layer in layers for pair in layer.pairs]
    parts = torch.stack([pair.product for pair in sketches])
    parts = parts.unflatten(0, (len(layers), -1)).flatten(2)  # (layers, pairs, elements)
    pairs = parts.sum(1)
    gradient = torch.stack([cast(Tensor, layer.gradient) for layer in layers]).flatten(1)

    # What is left over, apart from a multiple of the weight.
    rest = gradient - pairs
    if first.weight is not None:
        weight = torch.stack([cast(Tensor, layer.weight) for layer in layers]).flatten(1)
        common = (rest * weight).sum(1) / weight.square().sum(1).clamp_min(1e-30)
        rest = rest - common.unsqueeze(1) * weight

    # What rounding may change: of products, of sums, by underflow.
    number = torch.finfo(first.dtype)
    tf32 = parts.device.type == "cuda" and first.dtype is torch.float32
    norms = torch.stack([norm for pair in sketches for norm in (pair.x_norm, pair.d_norm)])
    products = norms.view(len(layers), -1, 2).prod(-1).sum(1)
    noise = products * (TF32_ROUNDING if tf32 else ROUNDING)
    noise = noise + _norm(parts, dim=-1).sum(1) * number.eps
    noise = noise + number.smallest_normal * number.eps * first.elements**0.5

    largest = torch.maximum(_norm(gradient, dim=-1), _norm(pairs, dim=-1))
    shares: Tensor = (_norm(rest, dim=-1) - noise).clamp_min(0.0) / largest
    return shares


def _size(tensor: Tensor) -> Tensor:
    size: Tensor = _norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return size


def _sketch(tensor: Tensor) -> Tensor:
    """The product of a tensor, as a matrix of its first dimension's rows, with R; or a vector.

    Rows of many entries, such as those of fused experts, are cut to the last dimension's.
    """
    if tensor.dim() < 2:
        return tensor.clone()
    matrix = tensor.flatten(1) if tensor[0].numel() <= LONGEST else tensor.flatten(0, -2)
    return matrix @ _signs(matrix.shape[1], matrix.dtype, matrix.device)


@lru_cache(maxsize=256)
def _signs(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """R, ``(rows, VECTORS)``: independent signs of a size by which ‖M R‖² is ‖M‖² on average."""
    generator = torch.Generator(device).manual_seed(0)
    signs = torch.empty(rows, VECTORS, dtype=dtype, device=device)
    return signs.bernoulli_(generator=generator).sub_(0.5).mul_(2 / VECTORS**0.5)
