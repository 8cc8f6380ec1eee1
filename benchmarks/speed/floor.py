"""The least that K-FAC costs: its statistics, decompositions and products as bare library calls.

Nothing of the package is used. The inputs and output gradients of every layer come from one pass of
the workload's model; each stage is then the plainest call that gives the same matrix. Convolutions
take the cheaper of two ways to their A, layer by layer: patches and one product, or, at stride 1,
sums over pairs of pixels at every offset, taken as the weight gradient of a convolution.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold
from torch.nn.grad import conv2d_weight

from workloads import Workload

__all__ = ["Layer", "captured", "floor_ratios", "measure_floor"]

EXPENSIVE = 0.3  # seconds from which on three repeats must do


@dataclass(frozen=True)
class Layer:
    """A layer that K-FAC preconditions, with what went through it."""

    module: nn.Linear | nn.Conv2d
    x: Tensor
    grad: Tensor

    @property
    def autocorrelates(self) -> bool:
        """Whether A can be had from sums over pairs of pixels."""
        module = self.module
        if isinstance(module, nn.Linear):
            return False
        return module.kernel_size > (1, 1) and module.stride == (1, 1) == module.dilation


def captured(workload: Workload) -> list[Layer]:
    """The layers of a workload with their inputs and output gradients of one pass."""
    model = workload.model()
    inputs: dict[nn.Module, Tensor] = {}
    grads: dict[nn.Module, Tensor] = {}

    def remember(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[module] = args[0].detach()
        output.register_hook(lambda grad: grads.__setitem__(module, grad.detach()))

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for module in layers:
        module.register_forward_hook(remember)
    workload.loss(model, workload.batch()).backward()
    return [Layer(m, inputs[m].float(), grads[m].float()) for m in layers if m in grads]


# ---------------------------------------------------------------------------------- statistics


def rows(x: Tensor) -> Tensor:
    """Features last, everything else in one dimension."""
    return x.flatten(0, -2)


def a_by_one_product(layer: Layer) -> Tensor:
    """A of a Linear; of a convolution from its patches."""
    module = layer.module
    x = layer.x
    if isinstance(module, nn.Linear):
        x = rows(x)
        return x.T @ x
    if module.kernel_size == (1, 1):
        down, right = module.stride
        x = x[:, :, ::down, ::right].permute(1, 0, 2, 3).flatten(1)
        return x @ x.T
    assert not isinstance(module.padding, str)
    patches = unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    patches = patches.permute(1, 0, 2).flatten(1)
    return patches @ patches.T


def a_by_offsets(layer: Layer) -> Tensor:
    """Sums over pairs of pixels at each of (2k - 1)² offsets: all that A at stride 1 is made of."""
    module = layer.module
    assert isinstance(module, nn.Conv2d)
    assert not isinstance(module.padding, str)
    down, right = (k - 1 for k in module.kernel_size)
    x = pad(layer.x, (module.padding[1], module.padding[1], module.padding[0], module.padding[0]))
    core = x[:, :, down : x.shape[2] - down, right : x.shape[3] - right]
    channels = x.shape[1]
    offsets = (channels, channels, 2 * down + 1, 2 * right + 1)
    result: Tensor = conv2d_weight(x, offsets, core)
    return result


def g_by_one_product(layer: Layer) -> Tensor:
    """G of a layer."""
    if isinstance(layer.module, nn.Linear):
        grad = rows(layer.grad)
        return grad.T @ grad
    grad = layer.grad.permute(1, 0, 2, 3).flatten(1)
    return grad @ grad.T


def factors(layer: Layer) -> tuple[Tensor, Tensor]:
    """A, with a row and a column for the bias, and G, as means."""
    a = a_by_one_product(layer)
    g = g_by_one_product(layer)
    if layer.module.bias is not None:
        a = pad(a, (0, 1, 0, 1))
        a[-1, -1] = a.diagonal().mean()
    return a / a.diagonal().mean(), g / g.diagonal().mean().clamp_min(torch.finfo(g.dtype).tiny)


# ---------------------------------------------------------------------------------- the products


def eigen_product(q_a: Tensor, q_g: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    """Into the eigenbases, divided by the eigenvalues, and back: four products."""
    return q_g @ ((q_g.T @ gradient @ q_a) / scale) @ q_a.T


def inverse_product(a: Tensor, g: Tensor, gradient: Tensor) -> Tensor:
    """Two products."""
    return g @ gradient @ a


def cholesky_inverse(matrix: Tensor) -> Tensor:
    """The inverse of a positive definite matrix."""
    result: Tensor = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    return result


# ------------------------------------------------------------------------------------ measuring


class Stopwatch:
    """Milliseconds of a call: the median of some repeats after one that warms up."""

    def __init__(self, device: str, repeats: int) -> None:
        self._cuda = device == "cuda"
        self._repeats = repeats

    def __call__(self, function: Callable[..., Any], *args: Any) -> float:
        first = self._once(function, *args)
        repeats = min(self._repeats, 3) if first > EXPENSIVE else self._repeats
        return 1000 * statistics.median(self._once(function, *args) for _ in range(repeats))

    def _once(self, function: Callable[..., Any], *args: Any) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function(*args)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def statistics_times(watch: Stopwatch, layers: Sequence[Layer]) -> dict[str, float]:
    """A both ways and G; "statistics" takes the cheaper way to A in each layer."""
    times = {"patches": 0.0, "offsets": 0.0, "g": 0.0, "statistics": 0.0}
    for layer in layers:
        patches = watch(a_by_one_product, layer)
        offsets = watch(a_by_offsets, layer) if layer.autocorrelates else patches
        g = watch(g_by_one_product, layer)
        times["patches"] += patches
        times["offsets"] += offsets
        times["g"] += g
        times["statistics"] += min(patches, offsets) + g
    return times


def solve_times(watch: Stopwatch, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Both decompositions of every factor, and the products with their results."""
    times = dict.fromkeys(("eigh", "cholesky", "precondition_eigen", "precondition_inverse"), 0.0)
    for a, g in pairs:
        for matrix in (a, g):
            damped = matrix + torch.eye(len(matrix), device=matrix.device)
            times["eigh"] += watch(torch.linalg.eigh, matrix)
            times["cholesky"] += watch(cholesky_inverse, damped)
        gradient = a.new_ones(len(g), len(a))
        times["precondition_eigen"] += watch(eigen_product, a, g, gradient, gradient)
        times["precondition_inverse"] += watch(inverse_product, a, g, gradient)
    return times


class _Baseline:
    """SGD's step: forward, backward and step."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._model = workload.model()
        self._batch = workload.batch()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._workload.loss(self._model, self._batch).backward()
        self._optimizer.step()


def measure_floor(workload: Workload, repeats: int = 7) -> dict[str, float]:
    """Milliseconds of each stage, summed over the layers; "sgd" is SGD's whole step."""
    watch = Stopwatch(workload.device, repeats)
    baseline = _Baseline(workload)
    layers = captured(workload)
    # In turn with the stages, since a machine's pace changes within a minute.
    sgd = [watch(baseline.step)]
    times = statistics_times(watch, layers)
    sgd.append(watch(baseline.step))
    times |= solve_times(watch, [factors(layer) for layer in layers])
    sgd.append(watch(baseline.step))
    return {"sgd": statistics.median(sgd), **times}


def floor_ratios(times: dict[str, float], solver: str, sgd: float) -> tuple[float, float]:
    """SGD's step with all stages every step, and with every 10th and 100th, over SGD's alone.

    Args:
        times: From :func:`measure_floor`.
        solver: "eigen" or "inverse".
        sgd: SGD's step as it was measured in turn with the steps that the floor is compared with.
    """
    taken = times["statistics"]
    solve = times["eigh" if solver == "eigen" else "cholesky"]
    product = times[f"precondition_{solver}"]
    every_step = sgd + taken + solve + product
    amortised = sgd + taken / 10 + solve / 100 + product
    return every_step / sgd, amortised / sgd
