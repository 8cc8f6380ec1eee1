"""Whether what the hooks on a layer see explains its gradient.

Of a layer whose calls are all seen, the sum over passes of dᵀ x (of patches, of one-hot rows) is
the gradient of its weight, whatever the loss is. Where it is not, A and G are not the layer's
curvature: its forward computes something else, its weight is used without a call of it, the loss
contains derivatives. Both are compared by their products with a few random vectors,

    E = Σ dᵀ x R          of the pairs
    Γ = Σ ∇ R             as it arrives at the weight, before anything averages or clips it
    r = min over c of ‖Γ - E - c W R‖ / max(‖Γ‖, ‖E‖)

c leaves room for a penalty on the weight's length in the loss, whose curvature is no layer's.
"""

from __future__ import annotations

import weakref
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from second_order.kronecker.autograd import is_reached

__all__ = ["TOLERANCE", "Explanation"]

TOLERANCE = 0.1
"""The largest r of a layer whose gradient counts as explained: low precision rounds by 4 %."""

VECTORS = 8  # columns of R
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of sums; TF32's is wider
TF32_ROUNDING = 2.0**-11


class Explanation:
    """The gradient of one weight in the passes of a step, beside what the layer's pairs make of it.

    It hangs a hook on the weight from a pair until the gradient arrives, in the same pass.
    """

    def __init__(self) -> None:
        self._complete = True  # no hook of the user's changes the gradient before it arrives
        self._pairs: Tensor | float = 0.0
        self._gradient: Tensor | float = 0.0
        self._weight: Tensor | None = None
        self._noise: Tensor | float = 0.0
        self._hook: RemovableHandle | None = None

    def add(self, product: Tensor, x: Tensor, d: Tensor, weight: Tensor) -> None:
        """Add a pair, whose part of the gradient of a leaf is a product of the leaf's shape."""
        if self._hook is None and weight._backward_hooks:
            self._complete = False
        if not self._complete:
            return
        part = _sketch(product)
        self._pairs = self._pairs + part
        number, size = torch.finfo(d.dtype), float(x.numel()) ** 0.5
        tf32 = d.device.type == "cuda" and d.dtype is torch.float32
        rounding = (TF32_ROUNDING if tf32 else ROUNDING) * d.float().norm()
        rounding = rounding * (x.float().norm() if x.is_floating_point() else size)
        least = number.smallest_normal * number.eps * weight.numel() ** 0.5
        self._noise = self._noise + number.eps * part.norm() + rounding + least  # of adding up
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
        self._gradient = self._gradient + _sketch(gradient.to(wide))
        self._weight = _sketch(weight.detach().to(wide)) if weight.dim() > 1 else None

    def residual(self) -> Tensor | None:
        """r, a scalar tensor, less what rounding may make; None if it is not all seen."""
        gradient, pairs = self._gradient, self._pairs
        if not (self._complete and isinstance(gradient, Tensor) and isinstance(pairs, Tensor)):
            return None
        left, weight = gradient - pairs, self._weight
        if weight is not None:
            left = left - weight * ((left * weight).sum() / weight.square().sum().clamp_min(1e-30))
        size = torch.maximum(gradient.norm(), pairs.norm())
        residual: Tensor = (left.norm() - self._noise).clamp_min(0.0) / size
        return residual.float()


def _arrive(
    explanation: weakref.ref[Explanation], weight: weakref.ref[Tensor], gradient: Tensor
) -> None:
    alive, leaf = explanation(), weight()
    # torch.autograd.grad comes by here, too.
    if alive is not None and leaf is not None and is_reached(leaf):
        with torch.no_grad():
            alive.take(gradient.detach(), leaf)


def _sketch(tensor: Tensor) -> Tensor:
    """The product of a tensor, as a matrix of its first dimension's rows, with R; or a vector."""
    if tensor.dim() < 2:
        return tensor
    matrix = tensor.flatten(1)
    return matrix @ _signs(matrix.shape[1], matrix.dtype, matrix.device)


@lru_cache(maxsize=256)
def _signs(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """R, ``(rows, VECTORS)``: independent signs of a size by which ‖M R‖² is ‖M‖² on average."""
    generator = torch.Generator().manual_seed(rows)
    signs = torch.randint(2, (rows, VECTORS), generator=generator, device="cpu")
    found: Tensor = (2 * signs - 1).to(device, dtype) / VECTORS**0.5
    return found
