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

import weakref
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from second_order.kronecker.autograd import is_reached
from second_order.kronecker.storage import numbers_of

__all__ = ["TOLERANCE", "Explanation", "residuals"]

TOLERANCE = 0.1
"""The largest r of a layer whose gradient counts as explained: low precision rounds by 4 %."""

VECTORS = 8  # columns of R
LONGEST = 2**18  # columns of a matrix that weights of more than two dimensions are seen as
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of sums
TF32_ROUNDING = 2.0**-11

_norm = torch.linalg.vector_norm


class Explanation:
    """The products with R that a layer's passes leave for a step to compare.

    A hook hangs on the weight from a pair until the gradient arrives, in the same pass.

    Attributes:
        pairs: E, of the weight's rows by :data:`VECTORS`; or as the weight, if that is a vector.
        gradient: Γ.
        weight: W R, of a weight that is no vector.
        noise: A bound on the rounding errors in E and Γ.
    """

    def __init__(self) -> None:
        self.pairs: Tensor | None = None
        self.gradient: Tensor | None = None
        self.weight: Tensor | None = None
        self.noise: Tensor | float = 0.0
        self._complete = True  # no hook of the user's changes the gradient before it arrives
        self._hook: RemovableHandle | None = None

    @property
    def known(self) -> bool:
        """Whether pairs and gradient are all seen."""
        return self._complete and self.pairs is not None and self.gradient is not None

    def add(self, product: Tensor, x: Tensor, d: Tensor, weight: Tensor) -> None:
        """Add a pair, whose part of the gradient of a leaf is a product of the leaf's shape."""
        if self._hook is None and weight._backward_hooks:
            self._complete = False
        if not self._complete:
            return
        part = _sketch(product)
        self.pairs = part if self.pairs is None else self.pairs + part
        self.noise = self.noise + _noise(part, x, d, weight.numel())
        if self._hook is None:
            hook = partial(_arrive, weakref.ref(self), weakref.ref(weight))
            self._hook = weight.register_hook(hook)
            weakref.finalize(self, self._hook.remove).atexit = False

    def take(self, gradient: Tensor, weight: Tensor) -> None:
        """Add a pass's gradient, as it arrives at the weight."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sketch = _sketch(gradient.to(wide))
        self.gradient = sketch if self.gradient is None else self.gradient + sketch
        if self.weight is None and weight.dim() > 1:
            self.weight = _sketch(weight.detach().to(wide))

    def residual(self) -> Tensor:
        """The share r of the gradient that the pairs leave over, less what rounding may make."""
        assert self.pairs is not None
        assert self.gradient is not None
        rest = self.gradient - self.pairs
        if self.weight is not None:
            common = (rest * self.weight).sum() / self.weight.square().sum().clamp_min(1e-30)
            rest = rest - common * self.weight
        largest = torch.maximum(_norm(self.gradient), _norm(self.pairs))
        share: Tensor = (_norm(rest) - self.noise).clamp_min(0.0) / largest
        return share


def _arrive(
    explanation: weakref.ref[Explanation], weight: weakref.ref[Tensor], gradient: Tensor
) -> None:
    alive, leaf = explanation(), weight()
    # torch.autograd.grad also comes by here.
    if alive is not None and leaf is not None and is_reached(leaf):
        with torch.no_grad():
            alive.take(gradient.detach(), leaf)


def residuals(explanations: Sequence[Explanation]) -> list[float]:
    """The residuals of explanations that are known; a device is read once."""
    (values,) = numbers_of([each.residual() for each in explanations])
    return values


def _noise(part: Tensor, x: Tensor, d: Tensor, elements: int) -> Tensor:
    """What rounding may change in a pair's part of the gradient: of products, sums, underflow."""
    number = torch.finfo(d.dtype)
    length = _size(x) if x.is_floating_point() else x.numel() ** 0.5
    tf32 = d.device.type == "cuda" and d.dtype is torch.float32
    products = _size(d) * length * (TF32_ROUNDING if tf32 else ROUNDING)
    underflow = number.smallest_normal * number.eps * elements**0.5
    noise: Tensor = products + _norm(part) * number.eps + underflow
    return noise


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
