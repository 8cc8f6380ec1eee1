"""Dense float64 references for K-FAC: slow, short, and written from the formulas alone.

Conventions, everywhere:

- A layer computes s = W̄ ā with W̄ = [W b] of shape (out, in[+1]). A convolution's weight is
  `flatten(1)`, an embedding's is transposed (the Linear on one-hot rows), and what has no matrix
  (a norm) is the one row [weight bias]. A layer's vector is W̄ row by row, so that one example's
  gradient is kron(d, ā) and a Fisher block is kron(G, A).
- A *loss term* is one row of the model's output: all its axes but the last count terms. The loss is
  the mean over terms, and so are Fisher, GGN and Hessian.
- d is what autograd hands over at a layer's output: the gradient of that mean. The functions
  multiply it back to one term's or example's.
- Factors have a leading axis of groups, which is 1 except for grouped convolutions.
- "gaussian" has unit variance: `half_squared_error`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian as autograd_hessian
from torch.autograd.functional import jacobian as autograd_jacobian
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parameters_to_vector

Likelihood: TypeAlias = Literal["categorical", "bernoulli", "gaussian"]
Approx: TypeAlias = Literal["expand", "reduce"]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Batch: TypeAlias = tuple[Tensor, Tensor]
Factors: TypeAlias = tuple[Tensor, Tensor]  # A (groups, in[+1], in[+1]), G (groups, out, out)
T = TypeVar("T")


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over terms; outputs (*terms, classes), targets (*terms)."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖y − f‖² a term, mean over terms; both (*terms, coordinates)."""
    return 0.5 * (outputs - targets).square().sum(-1).mean()


# Layers as matrices, models as vectors.


def to_matrix(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W̄ of tensors shaped as `module`'s weight and bias: its parameters, or their gradients."""
    if isinstance(module, nn.Embedding):
        return weight.T
    if not isinstance(module, nn.Linear | _ConvNd):
        return torch.cat([t.flatten() for t in (weight, bias) if t is not None])[None]
    matrix = weight.flatten(1)
    return matrix if bias is None else torch.cat([matrix, bias[:, None]], 1)


def from_matrix(module: nn.Module, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a W̄."""
    weight, bias = parameters_of(module)
    if isinstance(module, nn.Embedding):
        return matrix.T, None
    if not isinstance(module, nn.Linear | _ConvNd):
        matrix = matrix.view(-1, 1) if bias is None else matrix.view(2, -1).T
    if bias is None:
        return matrix.reshape(weight.shape), None
    return matrix[:, :-1].reshape(weight.shape), matrix[:, -1].reshape(bias.shape)


def parameters_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias."""
    weight = module.weight
    bias = getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return weight, bias


class Flat:
    """Some layers' parameters as one vector, layer after layer; without layers, the whole model's.

    The whole model's is that of `parameters_to_vector`, in the order of `model.parameters()`.
    """

    def __init__(self, model: nn.Module, *layers: str) -> None:
        self.model = model
        self.layers = {name: model.get_submodule(name) for name in layers}

    @property
    def vector(self) -> Tensor:
        if not self.layers:
            return parameters_to_vector(self.model.parameters()).detach()
        matrices = [to_matrix(m, *parameters_of(m)) for m in self.layers.values()]
        return torch.cat([matrix.flatten() for matrix in matrices]).detach()

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters that `vector` holds, by their names in the model."""
        if not self.layers:
            parameters = dict(self.model.named_parameters())
            parts = vector.split([p.numel() for p in parameters.values()])
            return {
                name: part.view_as(p)
                for (name, p), part in zip(parameters.items(), parts, strict=True)
            }
        named = {}
        for name, module in self.layers.items():
            shape = to_matrix(module, *parameters_of(module)).shape
            part = vector[: shape.numel()]
            vector = vector[shape.numel() :]
            weight, bias = from_matrix(module, part.view(shape))
            named[f"{name}.weight".lstrip(".")] = weight
            if bias is not None:
                named[f"{name}.bias".lstrip(".")] = bias
        return named

    def outputs(self, vector: Tensor, x: Tensor) -> Tensor:
        """The model's outputs (terms, coordinates) with the parameters of `vector`."""
        outputs = functional_call(self.model, self.named(vector), (x,))
        return outputs.reshape(-1, outputs.shape[-1])


# Fisher, GGN, Hessian.


def label_gradients(outputs: Tensor, likelihood: Likelihood) -> Tensor:
    """Vectors v (labels, terms, coordinates) with Σ v vᵀ = E[g gᵀ], g a term's output gradient.

    The expectation is over labels of the model's distribution, enumerated: v = √p(label) g(label).
    Coordinates that are independent of each other (bernoulli, gaussian) are taken one by one, since
    the expectation of their products is zero.
    """
    eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype)
    if likelihood == "categorical":
        p = outputs.softmax(-1)
        return torch.stack([p[:, c, None].sqrt() * (p - eye[c]) for c in range(len(eye))])
    if likelihood == "bernoulli":
        p = outputs.sigmoid()
        ones = [p[:, c, None].sqrt() * (p - 1) * eye[c] for c in range(len(eye))]
        zeros = [(1 - p[:, c, None]).sqrt() * p * eye[c] for c in range(len(eye))]
        return torch.stack(ones + zeros)
    return eye[:, None].expand(-1, *outputs.shape)


def exact_fisher(model: nn.Module, x: Tensor, likelihood: Likelihood, *layers: str) -> Tensor:
    """Mean over terms of E[∇ ∇ᵀ], the labels from the model; for the `Flat` of `layers`."""
    flat = Flat(model, *layers)
    outputs = flat.outputs(flat.vector, x).detach()
    jacobian = autograd_jacobian(lambda vector: flat.outputs(vector, x), flat.vector)
    gradients = torch.einsum("ltc,tcp->ltp", label_gradients(outputs, likelihood), jacobian)
    return torch.einsum("ltp,ltq->pq", gradients, gradients) / len(outputs)


def empirical_fisher(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, *layers: str) -> Tensor:
    """Mean over examples of ∇ ∇ᵀ, the labels from the data."""
    flat = Flat(model, *layers)
    gradients: list[Tensor] = []
    for n in range(len(x)):
        vector = flat.vector.requires_grad_()
        outputs = functional_call(model, flat.named(vector), (x[n : n + 1],))
        gradients += torch.autograd.grad(loss(outputs, y[n : n + 1]), vector)
    rows = torch.stack(gradients)
    return rows.T @ rows / len(rows)


def hessian(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, *layers: str) -> Tensor:
    flat = Flat(model, *layers)
    return autograd_hessian(
        lambda vector: loss(functional_call(model, flat.named(vector), (x,)), y), flat.vector
    )


def ggn(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, *layers: str) -> Tensor:
    """JᵀHJ, J the Jacobian of all outputs and H the loss's Hessian with respect to them."""
    flat = Flat(model, *layers)
    outputs = functional_call(model, flat.named(flat.vector), (x,)).detach()
    curvature = autograd_hessian(lambda z: loss(z.view_as(outputs), y), outputs.flatten())
    jacobian = autograd_jacobian(lambda vector: flat.outputs(vector, x).flatten(), flat.vector)
    return jacobian.T @ curvature @ jacobian


# Kronecker factors.


def _with_one(rows: Tensor, bias: bool) -> Tensor:
    """ā: the homogeneous coordinate appended to the last axis."""
    return torch.cat([rows, torch.ones_like(rows[..., :1])], -1) if bias else rows


def _second_moment(rows: Tensor) -> Tensor:
    """Σ r rᵀ / number of rows, for rows (rows, groups, dim)."""
    return torch.einsum("rgi,rgj->gij", rows, rows) / len(rows)


def linear_factors(
    x: Tensor, d: Tensor, bias: bool, approx: Approx = "expand", terms: int | None = None
) -> Factors:
    """Of a Linear with inputs x (N, *T, in) and captured gradients d (N, *T, out).

    The loss is a mean over so many terms; None: over N T of them with "expand".
    """
    x = x.reshape(len(x), -1, x.shape[-1])
    d = d.reshape(len(d), -1, d.shape[-1])
    a = _with_one(x, bias)
    (n, t) = x.shape[:2]
    if approx == "expand":
        a = a.flatten(0, 1)
        g = d.flatten(0, 1) * ((terms or n * t) * n * t) ** 0.5
    else:
        a = a.mean(1)
        g = d.sum(1) * n
    return _second_moment(a[:, None]), _second_moment(g[:, None])


def embedding_factors(
    x: Tensor, d: Tensor, rows: int, approx: Approx = "expand", terms: int | None = None
) -> Factors:
    """Of an Embedding with `rows` entries: the Linear on one-hot rows, A dense.

    A is diagonal for "expand" (counts / rows of x), and not for "reduce" of several positions.
    """
    return linear_factors(functional.one_hot(x, rows).to(d), d, False, approx, terms)


def conv_factors(x: Tensor, d: Tensor, conv: _ConvNd, approx: Approx = "expand") -> Factors:
    """Of a convolution with inputs x (N, c_in, *) and captured gradients d (N, c_out, *).

    "expand": A = Σ_{n,t} ā āᵀ / N and G = Σ_{n,t} d dᵀ / (N T); "reduce": the mean of ā and the sum
    of d over locations first.
    """
    a = _with_one(patches(x, conv), conv.bias is not None)
    n, t = a.shape[:2]
    g = d.reshape(n, conv.groups, -1, t).permute(0, 3, 1, 2) * n
    if approx == "expand":
        return _second_moment(a.flatten(0, 1)) * t, _second_moment(g.flatten(0, 1))
    return _second_moment(a.mean(1)), _second_moment(g.sum(1))


def patches(x: Tensor, conv: _ConvNd) -> Tensor:
    """What each output location of `conv` sees of x (N, c_in, *).

    Returns:
        (N, T, groups, c_in / groups * prod(kernel)): T counts the locations row by row, the last
        axis is that of `weight.flatten(1)`, so that weight times patches is the output.
    """
    dimensions = range(len(conv.kernel_size))
    before, after = zip(*(_padding(conv, i) for i in dimensions), strict=True)
    reach = [conv.dilation[i] * (conv.kernel_size[i] - 1) + 1 for i in dimensions]
    padded = [before[i] + x.shape[2 + i] + after[i] for i in dimensions]
    locations = [range((padded[i] - reach[i]) // conv.stride[i] + 1) for i in dimensions]
    rows = []
    for location in itertools.product(*locations):
        columns = []
        for offset in itertools.product(*map(range, conv.kernel_size)):
            pixel: Any = x
            for i in dimensions:
                index = location[i] * conv.stride[i] + offset[i] * conv.dilation[i] - before[i]
                # Each step takes the first spatial axis away.
                pixel = _pixel(pixel, index, conv.padding_mode)
            columns.append(pixel)
        rows.append(torch.stack(columns, -1))
    return torch.stack(rows, 1).reshape(len(x), len(rows), conv.groups, -1)


def _padding(conv: _ConvNd, dimension: int) -> tuple[int, int]:
    """Before and after; the odd one of "same" comes after."""
    if conv.padding == "valid":
        return 0, 0
    if conv.padding == "same":
        total = conv.dilation[dimension] * (conv.kernel_size[dimension] - 1)
        return total // 2, total - total // 2
    padding = int(conv.padding[dimension])
    return padding, padding


def _pixel(x: Tensor, index: int, mode: str) -> Tensor:
    """x (N, c, size, *) at `index` of its third axis, which may lie outside: (N, c, *)."""
    size = x.shape[2]
    inside = 0 <= index < size
    if not inside and mode == "zeros":
        return torch.zeros_like(x[:, :, 0])
    if not inside and mode == "circular":
        index = index % size
    if not inside and mode == "replicate":
        index = min(max(index, 0), size - 1)
    if not inside and mode == "reflect":
        index = -index if index < 0 else 2 * (size - 1) - index
    return x[:, :, index]


def lumped_factors(uses: Sequence[Factors]) -> Factors:
    """Of a module used several times: the mean of its uses' A and the sum of their G."""
    inputs, gradients = zip(*uses, strict=True)
    return sum(inputs) / len(uses), sum(gradients)


def layer_factors(
    module: nn.Module,
    uses: Sequence[tuple[Tensor, Tensor]],
    approx: Approx = "expand",
    terms: int | None = None,
) -> Factors:
    """Of any layer with factors, from the (input, captured gradient) of each of its uses."""
    factors: list[Factors] = []
    for x, d in uses:
        if isinstance(module, _ConvNd):
            factors.append(conv_factors(x, d, module, approx))
        elif isinstance(module, nn.Embedding):
            factors.append(embedding_factors(x, d, module.num_embeddings, approx, terms))
        else:
            bias = parameters_of(module)[1] is not None
            factors.append(linear_factors(x, d, bias, approx, terms))
    return lumped_factors(factors)


def doubly_factored_factors(x: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E[κκᵀ], E[ψψᵀ], E[ddᵀ] for x (N, T, C), the feature map before it was flattened.

    κψᵀ is the best rank-one approximation of an example's x, √σ on each side. In the order of the
    axes of a gradient (out, T, C) the block is kron(G, K, Ψ).
    """
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    kappa = u[:, :, 0] * s[:, :1].sqrt()
    psi = v[:, 0] * s[:, :1].sqrt()
    moments = [_second_moment(rows[:, None])[0] for rows in (kappa, psi, d * len(d))]
    return moments[0], moments[1], moments[2]


@contextmanager
def tapped(*modules: nn.Module) -> Iterator[dict[nn.Module, list[tuple[Tensor, Tensor]]]]:
    """Collect the (input, output) of every call of `modules`, by standing in for `forward`."""
    calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {module: [] for module in modules}

    def stand_in(module: nn.Module) -> Callable[[Tensor], Tensor]:
        forward = module.forward

        def tapped_forward(x: Tensor) -> Tensor:
            output = forward(x)
            calls[module].append((x.detach().clone(), output))
            return output + 0  # a copy, so that callers may change it in place

        return tapped_forward

    for module in modules:
        module.forward = stand_in(module)
    try:
        yield calls
    finally:
        for module in modules:
            del module.forward


def captured(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], *layers: str
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """By layer, the (input, d) of each of its uses: d is zero for a use that `loss` does not see.

    `loss` is of the model's outputs. Checkpointed models need their plain equivalent.
    """
    modules = {layer: model.get_submodule(layer) for layer in layers}
    with tapped(*modules.values()) as calls:
        value = loss(model(x))
    pairs = {layer: calls[module] for layer, module in modules.items()}
    outputs = [output for uses in pairs.values() for _, output in uses]
    gradients = iter(torch.autograd.grad(value, outputs, allow_unused=True, materialize_grads=True))
    return {layer: [(a, next(gradients)) for a, _ in uses] for layer, uses in pairs.items()}


def empirical_factors(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, layer: str, approx: Approx = "expand"
) -> Factors:
    """With the labels of the data."""
    pairs = captured(model, x, lambda outputs: loss(outputs, y), layer)
    with torch.no_grad():
        terms = model(x).shape[:-1].numel()
    return layer_factors(model.get_submodule(layer), pairs[layer], approx, terms)


def weighted_mean(values: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Of shards' or micro-batches' statistics, by their examples."""
    total = torch.stack([v * n for v, n in zip(values, counts, strict=True)]).sum(0)
    return total / sum(counts)


def debiased_average(values: Sequence[Tensor], decay: float | Sequence[float]) -> Tensor:
    """EMA / (1 − βᵗ) in closed form: the i-th value's weight is the product of the later decays.

    Args:
        values: the statistics, oldest first.
        decay: β, or the β of each update (the first one's has no effect).
    """
    decays = [decay] * len(values) if isinstance(decay, float | int) else decay
    weights = [math.prod(decays[i + 1 :]) for i in range(len(values))]
    total = torch.stack([w * v for w, v in zip(weights, values, strict=True)]).sum(0)
    return total / sum(weights)


# Damped solves. A gradient is W̄-shaped.


def kron(*factors: Tensor) -> Tensor:
    product = factors[0]
    for factor in factors[1:]:
        product = torch.kron(product, factor)
    return product


def block(A: Tensor, G: Tensor) -> Tensor:
    """The Fisher block of factors (groups, ., .): kron(G, A) of each group, on the diagonal."""
    return torch.block_diag(*(torch.kron(g, a) for a, g in zip(A, G, strict=True)))


def pi(A: Tensor, G: Tensor) -> float:
    """√((tr A / dim A) / (tr G / dim G)) of two matrices; 1 if a trace is zero."""
    return math.sqrt(pis(A, G)[0] / pis(A, G)[1])


def pis(*factors: Tensor) -> list[float]:
    """nᵢ / (Π n)^{1/N} with n the mean eigenvalue of each matrix; 1 if one is zero."""
    means = [float(factor.trace()) / len(factor) for factor in factors]
    if 0.0 in means:
        return [1.0] * len(means)
    return [mean / math.prod(means) ** (1 / len(means)) for mean in means]


def damp(factors: Sequence[Tensor], damping: float) -> list[Tensor]:
    """F̃ᵢ = Fᵢ + πᵢ γ^{1/N} I."""
    root = damping ** (1 / len(factors))
    return [
        factor + p * root * torch.eye(len(factor), dtype=factor.dtype)
        for factor, p in zip(factors, pis(*factors), strict=True)
    ]


def dense_solve(matrix: Tensor, gradient: Tensor, damping: float = 0.0) -> Tensor:
    """(matrix + γI)⁻¹ applied to the gradient as a vector."""
    damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
    return torch.linalg.solve(damped, gradient.flatten()).view_as(gradient)


def damped_dense_solve(A: Tensor, G: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """What "eigen" means: (A ⊗ G + γI)⁻¹ of gradient (out, in[+1])."""
    return dense_solve(block(A, G), gradient, damping)


def damped_factored_solve(A: Tensor, G: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """What "inverse" means: ((A + π√γ I) ⊗ (G + √γ/π I))⁻¹ of gradient (out, in[+1])."""
    damped = [damp((a, g), damping) for a, g in zip(A, G, strict=True)]
    return dense_solve(torch.block_diag(*(torch.kron(g, a) for a, g in damped)), gradient)


def clip_factor(pairs: Sequence[tuple[Tensor, Tensor]], lr: float, kappa: float | None) -> float:
    """ν = min(1, √(κ / (lr² Σ |P·∇|))) for the pairs (P, ∇) of all layers."""
    change = lr**2 * sum(float((P * gradient).sum().abs()) for P, gradient in pairs)
    return 1.0 if kappa is None or change == 0 else min(1.0, math.sqrt(kappa / change))


# Training.


def _swapped(loss: Loss, targets: Tensor, outputs: Tensor) -> Tensor:
    return loss(outputs, targets)


def at(value: T | Callable[[int], T], step: int) -> T:
    """A hyperparameter, which may be a function of the step."""
    return value(step) if callable(value) else value


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    """By group."""
    return factor.diagonal(dim1=-2, dim2=-1).mean(-1)


@dataclass(frozen=True)
class Snapshot:
    """What one solve saw; in use from step `ready` on."""

    ready: int
    factors: dict[str, Factors]
    damping: float


class ReferenceKFAC:
    """K-FAC on one process, every solve dense.

    Each `step`: factors when due, solves when due, P of each layer, KL clip, then `base`. Numbers
    may be functions of the step, counted from 0. The layers are the Linear, convolution and
    Embedding modules with a trainable weight, not tied to another; those that are never called, and
    all other parameters, keep their gradients.

    Args:
        lr: of `base`, where it is set at each step, and of the clip.
        momentum, weight_decay: of `base` when that is SGD.
        base: (parameters) -> their optimizer.
        solver: "eigen" or "inverse".
        staleness: a solve is used this many steps later; the first one immediately.
        skip: names of layers to leave to `base`.
        relative_damping: the damping of a layer is so many times its mean curvature.
        gradient_scale: P is multiplied by the layer's mean curvature and its damping.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float | Callable[[int], float] = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        base: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        damping: float | Callable[[int], float] = 1e-3,
        factor_decay: float | Callable[[int], float] = 0.95,
        factor_update_steps: int | Callable[[int], int] = 1,
        inv_update_steps: int | Callable[[int], int] = 1,
        kl_clip: float | Callable[[int], float] | None = 1e-3,
        solver: Literal["eigen", "inverse"] = "eigen",
        approx: Approx = "expand",
        loss: Loss = cross_entropy,
        staleness: int = 0,
        skip: Collection[str] = (),
        relative_damping: bool = False,
        gradient_scale: bool = False,
    ) -> None:
        self.model = model
        self.relative_damping = relative_damping
        self.gradient_scale = gradient_scale
        self.lr = lr
        self.damping = damping
        self.factor_decay = factor_decay
        self.factor_update_steps = factor_update_steps
        self.inv_update_steps = inv_update_steps
        self.kl_clip = kl_clip
        self.staleness = staleness
        self.solve = damped_dense_solve if solver == "eigen" else damped_factored_solve
        self.approx = approx
        self.loss = loss
        self.layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding | _ConvNd)
            and module.weight.requires_grad
            and name not in skip
        }
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.base = (
            torch.optim.SGD(parameters, at(lr, 0), momentum, weight_decay=weight_decay)
            if base is None
            else base(parameters)
        )
        self.steps = 0
        self.statistics: dict[str, list[Factors]] = {name: [] for name in self.layers}
        self.decays: dict[str, list[float]] = {name: [] for name in self.layers}
        self.snapshots: list[Snapshot] = []

    def update_factors(self, *batches: Batch, layers: Sequence[str] | None = None) -> None:
        """Average in the factors of `batches`, each computed alone, weighted by examples."""
        names = list(self.layers) if layers is None else layers
        shards: dict[str, list[Factors]] = {name: [] for name in names}
        for x, y in batches:
            outputs = partial(_swapped, self.loss, y)
            pairs = captured(self.model, x, outputs, *names) if names else {}
            with torch.no_grad():
                terms = self.model(x).shape[:-1].numel()
            for name, uses in pairs.items():
                if uses:
                    found = layer_factors(self.layers[name], uses, self.approx, terms)
                    shards[name].append(found)
        counts = [len(x) for x, _ in batches]
        for name in names:
            if shards[name]:
                A, G = (weighted_mean(X, counts) for X in zip(*shards[name], strict=True))
                self.statistics[name].append((A, G))
                self.decays[name].append(at(self.factor_decay, self.steps))

    def factors(self) -> dict[str, Factors]:
        """The running averages (A, G), by layer."""
        averages = {}
        for name, statistics in self.statistics.items():
            if statistics:
                A, G = zip(*statistics, strict=True)
                decays = self.decays[name]
                averages[name] = debiased_average(A, decays), debiased_average(G, decays)
        return averages

    def update_inverses(self) -> None:
        ready = self.steps + self.staleness if self.snapshots else 0
        self.snapshots.append(Snapshot(ready, self.factors(), at(self.damping, self.steps)))

    def precondition(self) -> None:
        """Replace the layers' gradients by νP."""
        snapshot = [s for s in self.snapshots if s.ready <= self.steps][-1]
        pairs = {}
        for name, (A, G) in snapshot.factors.items():
            module = self.layers[name]
            weight, bias = parameters_of(module)
            assert weight.grad is not None
            gradient = to_matrix(module, weight.grad, None if bias is None else bias.grad)
            mean = float((_mean_eigenvalue(A) * _mean_eigenvalue(G)).mean())
            damping = snapshot.damping * (mean if self.relative_damping else 1.0)
            scale = mean + damping if self.gradient_scale else 1.0
            pairs[name] = (scale * self.solve(A, G, gradient, damping), gradient)
        nu = clip_factor(
            list(pairs.values()), at(self.lr, self.steps), at(self.kl_clip, self.steps)
        )
        for name, (P, _) in pairs.items():
            new = from_matrix(self.layers[name], nu * P)
            for parameter, part in zip(parameters_of(self.layers[name]), new, strict=True):
                if parameter is not None and part is not None:
                    parameter.grad = part.contiguous()

    def step(self, x: Tensor, y: Tensor, *, statistics: Sequence[Batch] | None = None) -> float:
        """One step on a batch, the factors from `statistics` where given; returns the loss."""
        if self.steps % at(self.factor_update_steps, self.steps) == 0:
            self.update_factors(*([(x, y)] if statistics is None else statistics))
        if self.steps % at(self.inv_update_steps, self.steps) == 0:
            self.update_inverses()
        self.base.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.precondition()
        for group in self.base.param_groups:
            group["lr"] = at(self.lr, self.steps)
        self.base.step()
        self.steps += 1
        return loss.item()

    def trajectory(self, batches: Sequence[Batch]) -> list[Tensor]:
        """All parameters as one vector, after each batch's step."""
        vectors = []
        for x, y in batches:
            self.step(x, y)
            vectors.append(parameters_to_vector(self.model.parameters()).detach().clone())
        return vectors
