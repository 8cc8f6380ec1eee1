"""The floor of K-FAC's cost: its statistics, decompositions and products as bare library calls.

This script does not use the package. It runs one pass of the workload's model to get the inputs and
output gradients of every layer. Each part of a step is then the simplest call that computes the
same matrix.

A convolution's A is computed in two ways, and the cheaper one counts. One way forms patches and
takes one product. The other is possible at stride 1: it sums over pairs of pixels at every offset,
as the weight gradient of a convolution.
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

__all__ = ["Layer", "capture_layers", "floor_ratios", "measure_floor"]

# A call that takes longer than this many seconds is repeated at most three times.
EXPENSIVE = 0.3


@dataclass(frozen=True)
class Layer:
    """A layer that K-FAC preconditions, with its inputs and output gradients."""

    module: nn.Linear | nn.Conv2d
    x: Tensor
    grad: Tensor

    @property
    def autocorrelates(self) -> bool:
        """Whether sums over pairs of pixels can compute A."""
        module = self.module
        if isinstance(module, nn.Linear):
            return False
        return module.kernel_size > (1, 1) and module.stride == (1, 1) == module.dilation


def capture_layers(workload: Workload) -> list[Layer]:
    """The layers of a workload, with their inputs and output gradients in one pass."""
    model = workload.model()
    inputs: dict[nn.Module, Tensor] = {}
    grads: dict[nn.Module, Tensor] = {}

    def capture(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        def capture_grad(grad: Tensor) -> None:
            grads[module] = grad.detach()

        inputs[module] = args[0].detach()
        output.register_hook(capture_grad)

    modules = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for module in modules:
        module.register_forward_hook(capture)
    workload.loss(model, workload.batch()).backward()
    return [Layer(m, inputs[m].float(), grads[m].float()) for m in modules if m in grads]


# ---------------------------------------------------------------------------------- statistics


def rows(x: Tensor) -> Tensor:
    """Flatten all dimensions but the last, which has the features."""
    return x.flatten(0, -2)


def a_by_one_product(layer: Layer) -> Tensor:
    """A of a Linear layer, or of a convolution as the product of its patches."""
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
    """Sums over pairs of pixels at each of (2k - 1)² offsets, which determine A at stride 1."""
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
    """A, with a row and a column for the bias, and G, scaled to a mean diagonal of 1."""
    a = a_by_one_product(layer)
    g = g_by_one_product(layer)
    if layer.module.bias is not None:
        a = pad(a, (0, 1, 0, 1))
        a[-1, -1] = a.diagonal().mean()
    smallest = torch.finfo(g.dtype).tiny
    return a / a.diagonal().mean(), g / g.diagonal().mean().clamp_min(smallest)


# ---------------------------------------------------------------------------------- the products


def eigen_product(q_a: Tensor, q_g: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    """Precondition a gradient in the eigenbases: four products and a division."""
    return q_g @ ((q_g.T @ gradient @ q_a) / scale) @ q_a.T


def inverse_product(a: Tensor, g: Tensor, gradient: Tensor) -> Tensor:
    """Precondition a gradient by inverses: two products."""
    return g @ gradient @ a


def cholesky_inverse(matrix: Tensor) -> Tensor:
    """The inverse of a positive definite matrix."""
    result: Tensor = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    return result


# ------------------------------------------------------------------------------------ measuring


class Stopwatch:
    """Measures the milliseconds of a call: the median over repeats, after one call as warm-up."""

    def __init__(self, device: str, repeats: int) -> None:
        self._cuda = device == "cuda"
        self._repeats = repeats

    def __call__(self, function: Callable[..., Any], *args: Any) -> float:
        warm_up = self._time_once(function, *args)
        repeats = self._repeats
        if warm_up > EXPENSIVE:
            repeats = min(repeats, 3)
        return 1000 * statistics.median(self._time_once(function, *args) for _ in range(repeats))

    def _time_once(self, function: Callable[..., Any], *args: Any) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function(*args)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def statistics_times(watch: Stopwatch, layers: Sequence[Layer]) -> dict[str, float]:
    """Times of A in both ways, and of G. "statistics" has the cheaper way to A for each layer."""
    times = {"patches": 0.0, "offsets": 0.0, "g": 0.0, "statistics": 0.0}
    for layer in layers:
        patches = watch(a_by_one_product, layer)
        offsets = patches
        if layer.autocorrelates:
            offsets = watch(a_by_offsets, layer)
        g = watch(g_by_one_product, layer)
        times["patches"] += patches
        times["offsets"] += offsets
        times["g"] += g
        times["statistics"] += min(patches, offsets) + g
    return times


def solve_times(watch: Stopwatch, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Times of both decompositions of all factors, and of the products with their results."""
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
    """A training run with SGD."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._model = workload.model()
        self._batch = workload.batch()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)

    def step(self) -> None:
        """Run the forward and the backward pass and SGD's step."""
        self._optimizer.zero_grad()
        self._workload.loss(self._model, self._batch).backward()
        self._optimizer.step()


def measure_floor(workload: Workload, repeats: int = 7) -> dict[str, float]:
    """Milliseconds of each part of a step, summed over the layers. "sgd" is a step of SGD."""
    watch = Stopwatch(workload.device, repeats)
    baseline = _Baseline(workload)
    layers = capture_layers(workload)
    # SGD's steps alternate with the other parts, because a machine's speed changes over time.
    sgd = [watch(baseline.step)]
    times = statistics_times(watch, layers)
    sgd.append(watch(baseline.step))
    times |= solve_times(watch, [factors(layer) for layer in layers])
    sgd.append(watch(baseline.step))
    return {"sgd": statistics.median(sgd), **times}


def floor_ratios(times: dict[str, float], solver: str, sgd: float) -> tuple[float, float]:
    """The floor of a step's time as a multiple of SGD's.

    Returns the ratio if statistics and inverses are updated at every step, and the ratio if
    statistics are updated every 10 steps and inverses every 100.

    Args:
        times: Times from :func:`measure_floor`.
        solver: "eigen" or "inverse".
        sgd: SGD's time per step, measured next to the steps that the floor is compared with.
    """
    update_statistics = times["statistics"]
    update_inverses = times["eigh" if solver == "eigen" else "cholesky"]
    precondition = times[f"precondition_{solver}"]
    every_step = sgd + update_statistics + update_inverses + precondition
    amortized = sgd + update_statistics / 10 + update_inverses / 100 + precondition
    return every_step / sgd, amortized / sgd
