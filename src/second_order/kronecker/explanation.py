"""Whether what the hooks on a layer see explains the gradient of its weight.

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
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from second_order.kronecker.autograd import is_reached
from second_order.kronecker.stacks import in_groups, numbers_of

__all__ = ["TOLERANCE", "Explanation", "residuals"]

TOLERANCE = 0.1
"""The largest r of a layer whose gradient counts as explained: low precision rounds by 4 %."""

VECTORS = 8  # columns of R
MOST = 2**12  # rows of R for all weights with no more columns
LONGEST = 2**18  # columns of a matrix that weights of more than two dimensions are seen as
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of sums; TF32's is wider
TF32_ROUNDING = 2.0**-11

_norm = torch.linalg.vector_norm


class Explanation:
    """The products with R that a layer's passes leave for a step to compare.

    A hook hangs on the weight from a pair until the gradient arrives, in the same pass.

    Attributes:
        pairs: E, of the weight's rows by :data:`VECTORS`; or as the weight, if that is a vector.
        gradient: Γ.
        weight: W R, of a weight that is no vector.
        norms: Of each pair ‖d‖ and ‖x‖.
        sizes: Of each pair its part's norm, where there are several.
        rough: The dtype of d with the fewest digits.
    """

    def __init__(self) -> None:
        self.pairs: Tensor | None = None
        self.gradient: Tensor | None = None
        self.weight: Tensor | None = None
        self.elements = 0  # of the weight
        self.norms: list[tuple[Tensor, Tensor]] = []
        self.sizes: list[Tensor] = []
        self.rough = torch.float64
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
        length = _size(x) if x.is_floating_point() else part.new_full((), x.numel() ** 0.5)
        self.norms.append((_size(d), length))
        self.rough = max(self.rough, d.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        self.elements = weight.numel()
        if self.pairs is None:
            self.pairs = part
        else:
            self.sizes = [*(self.sizes or [_size(self.pairs)]), _size(part)]
            self.pairs = self.pairs + part
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
        sketch, before = _sketch(gradient.to(wide)), self.gradient
        self.gradient = sketch if before is None else before + sketch
        if self.weight is None and weight.dim() > 1:
            self.weight = _sketch(weight.detach().to(wide))


def _arrive(
    explanation: weakref.ref[Explanation], weight: weakref.ref[Tensor], gradient: Tensor
) -> None:
    alive, leaf = explanation(), weight()
    # torch.autograd.grad comes by here, too.
    if alive is not None and leaf is not None and is_reached(leaf):
        with torch.no_grad():
            alive.take(gradient.detach(), leaf)


# ------------------------------------------------------------------------------- what is left over


def residuals(explanations: Sequence[Explanation]) -> list[float]:
    """R of each, less what rounding may make; all of them are known."""
    groups = in_groups(list(map(_key, explanations)))
    found = [_residuals([explanations[i] for i in group]) for group in groups]
    (values,), order = numbers_of(found), (i for group in groups for i in group)
    return [value for _, value in sorted(zip(order, values, strict=True))]


def _key(each: Any) -> Any:
    """What is the same of all that are compared together."""
    dtypes = each.pairs.dtype, each.gradient.dtype, each.rough
    shape = each.pairs.shape, each.elements, each.weight is None
    return each.pairs.device, dtypes, shape, len(each.norms)


def _residuals(members: Sequence[Any]) -> Tensor:
    """R of members whose sketches and numbers of pairs are alike, ``(n,)``."""
    first, count = members[0], len(members[0].norms)
    number, device = torch.finfo(first.rough), first.pairs.device
    dtype = torch.promote_types(first.pairs.dtype, first.gradient.dtype)

    def stacked(of: str) -> Tensor:
        return torch.stack([getattr(each, of) for each in members]).flatten(1).to(dtype)

    gradient, pairs = stacked("gradient"), stacked("pairs")
    rest, sizes = gradient - pairs, _norm(pairs, dim=-1)
    largest = torch.maximum(_norm(gradient, dim=-1), sizes)
    if first.weight is not None:
        weight = stacked("weight")
        common = (rest * weight).sum(-1) / weight.square().sum(-1).clamp_min(1e-30)
        rest = rest.addcmul(weight, common.unsqueeze(1), value=-1.0)
    norms = torch.stack([norm for each in members for both in each.norms for norm in both])
    tf32 = device.type == "cuda" and first.rough is torch.float32
    noise = norms.view(-1, count, 2).prod(-1).sum(1) * (TF32_ROUNDING if tf32 else ROUNDING)
    if count > 1:
        parts = torch.stack([size for each in members for size in each.sizes])
        sizes = parts.view(-1, count).sum(1)
    noise = noise.add(sizes, alpha=number.eps)  # of adding up
    noise = noise + number.smallest_normal * number.eps * first.elements**0.5 * count
    result: Tensor = (_norm(rest, dim=-1) - noise).clamp_min(0.0) / largest
    return result


def _size(tensor: Tensor) -> Tensor:
    size: Tensor = _norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return size


def _sketch(tensor: Tensor) -> Tensor:
    """The product of a tensor, as a matrix of its first dimension's rows, with R; or a vector.

    Of rows of many entries, as those of fused experts are, each is cut to the last dimension's.
    """
    if tensor.dim() < 2:
        return tensor.clone()
    matrix = tensor.flatten(1) if tensor[0].numel() <= LONGEST else tensor.flatten(0, -2)
    rows = matrix.shape[1]
    most = max(MOST, 1 << (rows - 1).bit_length())
    return matrix @ _signs(most, matrix.dtype, matrix.device)[:rows]


@lru_cache(maxsize=256)
def _signs(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """R, ``(rows, VECTORS)``: independent signs of a size by which ‖M R‖² is ‖M‖² on average."""
    generator = torch.Generator(device).manual_seed(0)
    signs = torch.empty(rows, VECTORS, dtype=dtype, device=device)
    return signs.bernoulli_(generator=generator).sub_(0.5).mul_(2 / VECTORS**0.5)
