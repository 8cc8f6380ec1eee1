"""Further kinds of layers: transposed weights and convolutions, tied embeddings, users' own."""

from __future__ import annotations

import copy
import io
import itertools
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import reference as ref
import torch
from models import CLASSES, TransposedLinear
from optimizer_cases import each_kronecker, factors, make, take
from reference import cross_entropy
from tolerances import near
from torch import Tensor, nn

import second_order
from second_order import KAISA
from second_order.kfac import plan
from second_order.kronecker.kinds import ASSUMED_LINEAR, match
from second_order.kronecker.layers import LINEAR, LayerKind, Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from reference import Batch

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


# What computes like a Linear.


class Conv1D(nn.Module):
    """A Linear with its weight transposed, as GPT-2 has it."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_in, d_out) / d_in)
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class NoisyConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


class GraphLinear(nn.Module):
    """A Linear of graphs, named as `torch_geometric.nn.Linear`."""

    __module__ = "torch_geometric.nn.dense.linear"
    __qualname__ = "Linear"

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__()
        self.in_channels = d_in
        self.out_channels = d_out
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / d_in)
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class GraphConvolution(nn.Module):
    """As `torch_geometric.nn.GCNConv`: the mean of the neighbors' products, and then a bias."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.lin = GraphLinear(d_in, d_out, bias=False)
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        neighbors = x.new_zeros(len(x), len(x))
        neighbors[edges[1], edges[0]] = 1 / len(x)
        return neighbors @ self.lin(x) + self.bias


def network(first: nn.Module, second: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, CLASSES)).double()


def trained(System: Any, model: nn.Module, **options: Any) -> list[Tensor]:
    """Parameters after four steps, matrices of `Conv1D` as those of Linears."""
    optimizer = make(System, model, **options)
    for seed in range(4):
        x = torch.randn(6, 2, 5, dtype=F64, generator=torch.Generator().manual_seed(seed))
        y = torch.randint(CLASSES, (6, 2), generator=torch.Generator().manual_seed(seed))
        take(model, optimizer, (x, y))
    weights = [m for m in model.modules() if hasattr(m, "weight")]
    return [
        (m.weight.T if isinstance(m, Conv1D) else m.weight).detach().clone() for m in weights
    ] + [m.bias.detach().clone() for m in weights]


@each_kronecker
@pytest.mark.parametrize(
    "options",
    [{}, {"solver": "inverse"}, {"kfac_approx": "reduce"}, {"fisher": "categorical"}],
    ids=str,
)
def test_a_transposed_linear_trains_like_a_linear(System: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    linear = network(nn.Linear(5, 4), nn.Linear(4, 4))
    transposed = network(Conv1D(5, 4), Conv1D(4, 4))
    for i in (0, 2, 4):
        weight = linear[i].weight.detach()
        transposed[i].weight.data.copy_(weight if i == 4 else weight.T)
        transposed[i].bias.data.copy_(linear[i].bias)
    start = [p.detach().clone() for p in linear.parameters()]
    found = trained(System, transposed, **options)
    expected = trained(System, linear, **options)
    for one, other in zip(found, expected, strict=True):
        near(one, other)
    assert (linear[0].weight - start[0]).norm() > 1e-3


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(5, 4), LINEAR),
        (Conv1D(5, 4), Linear(transposed=True)),
        (Conv1D(4, 4), Linear(transposed=True)),
        (TransposedLinear(5, 4), Linear(transposed=True)),
        (NoisyConv1D(5, 4), None),
        (Noisy(5, 4), ASSUMED_LINEAR),
        (GraphLinear(5, 4), LINEAR),
        (nn.Bilinear(3, 3, 4), None),
        (nn.LSTMCell(3, 4), None),
        (nn.LayerNorm(4), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_subclasses_of_linear_count_as_linears(
    module: nn.Module, expected: LayerKind | None
) -> None:
    assert match(module).kind == expected


class GraphNetwork(nn.Module):
    def __init__(self, convolution: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first = convolution(5, 4)
        self.second = convolution(4, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x, edges).tanh(), edges)


def with_linears(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A copy whose modules of a class are Linears of torch."""
    twin = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, kind):
            linear = nn.Linear(module.in_channels, module.out_channels, module.bias is not None)
            linear.double().load_state_dict(module.state_dict())
            twin.set_submodule(name, linear)
    return twin


@each_kronecker
@pytest.mark.parametrize("name", ["stand-in", "GCNConv", "SAGEConv", "GATConv"])
def test_a_graph_linear_trains_like_a_linear(System: Any, name: str) -> None:
    torch.manual_seed(0)
    if name == "stand-in":
        kind = GraphLinear
        convolution = GraphConvolution
    else:
        geometric = pytest.importorskip("torch_geometric.nn")
        kind = geometric.Linear
        convolution = getattr(geometric, name)
    model = GraphNetwork(convolution).double()
    twin = with_linears(model, kind)
    x = torch.randn(9, 5, dtype=F64)
    y = torch.randint(CLASSES, (9,))
    edges = torch.randint(9, (2, 30))
    for each in (model, twin):
        optimizer = make(System, each)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(each(x, edges), y).backward()
            optimizer.step()
        rows = {row.name: row.status for row in optimizer.summary().rows}
        products = [name for name, module in each.named_modules() if hasattr(module, "weight")]
        assert {rows[name] for name in products} == {"preconditioned"}
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        near(one.detach(), other.detach())


# Norms of other classes.


class LlamaNorm(nn.Module):
    variance_epsilon = 1e-5

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return (self.weight + self.offset) * normal


class OwnLayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.bias = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(-1, keepdim=True, unbiased=False) + 1e-6
        return (x - x.mean(-1, keepdim=True)) / variance.sqrt() * self.weight + self.bias


class LayerScale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * self.gamma


class Untold(LayerScale):
    """Nothing is known of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cos() * self.gamma


second_order.register_layer(LayerScale, gain=lambda module, x: x.sin(), weight="gamma", bias=None)


@each_kronecker
@pytest.mark.parametrize("most", [256, 2], ids=["matrix", "diagonal"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: LlamaNorm(4),
        lambda: LlamaNorm(4, 1.0),
        lambda: OwnLayerNorm(4),
        lambda: LayerScale(4),
    ],
    ids=["Llama", "Gemma", "LayerNorm of one's own", "registered"],
)
def test_norms_have_exact_blocks(System: Any, build: Callable[[], nn.Module], most: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(build(), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    x = torch.randn(6, 4, dtype=F64)
    y = torch.randint(CLASSES, (6,))
    params = dict(model[0].named_parameters())
    rows = []
    for n in range(6):
        loss = cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        found = torch.autograd.grad(loss, list(params.values()))
        rows.append(torch.cat([g.flatten() for g in found]))
    each = torch.stack(rows)
    F = each.T @ each / 6
    F = torch.diag(F.diagonal()) if most == 2 else F
    expected = ref.dense_solve(F, each.mean(0), 0.1)
    with mock.patch.object(plan, "MAX_EXACT_DIM", most):
        optimizer = make(System, model, lr=1.0, precondition_norms=True)
    take(model, optimizer, (x, y))
    step = torch.cat([p.grad.flatten() for p in params.values() if p.grad is not None])
    near(step, expected)
    assert (step - each.mean(0)).norm() > 0.1 * step.norm()
    assert optimizer.summary().preconditioned_share == 1.0


# Transposed convolutions.

TRANSPOSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1), (3, 4)),
    "1d, dilated": (lambda: nn.ConvTranspose1d(2, 3, 2, dilation=3, output_padding=2), (2, 4)),
    "2d": (lambda: nn.ConvTranspose2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 3, 2)),
    "2d, grouped": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (4, 2, 3)),
    "3d": (lambda: nn.ConvTranspose3d(2, 2, 2, bias=False), (2, 2, 1, 2)),
}


def transposed(name: str, n: int = 4) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    build, shape = TRANSPOSED[name]
    layer = build()
    size = layer(torch.zeros(1, *shape)).numel()
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(size, CLASSES)).double()
    return model, (torch.randn(n, *shape, dtype=F64), torch.randint(CLASSES, (n,)))


def transposed_factors(model: nn.Module, batch: Batch, approx: str) -> tuple[Tensor, Tensor]:
    """Compute the factors by loops over the patches of the output's gradient."""
    x, y = batch
    conv: Any = model[0]
    ((_, d),) = ref.captured(model, x, lambda outputs: cross_entropy(outputs, y), "0")["0"]
    n = len(x)
    locations = x[0, 0].numel()
    whole = ref.patches(d, conv)
    outputs = [
        (d.shape[2 + i] + 2 * conv.padding[i] - conv.dilation[i] * (conv.kernel_size[i] - 1) - 1)
        // conv.stride[i]
        + 1
        for i in range(x.dim() - 2)
    ]
    remaining = [
        j
        for j, place in enumerate(itertools.product(*map(range, outputs)))
        if all(p < s for p, s in zip(place, x.shape[2:], strict=True))
    ]
    g = whole[:, remaining] * n  # (N, T, groups, out)
    a = x.flatten(2).unflatten(1, (conv.groups, -1)).permute(0, 3, 1, 2)
    if approx == "reduce":
        a = a.mean(1)
        g = g.sum(1)
        return torch.einsum("ngi,ngj->gij", a, a) / n, torch.einsum("ngi,ngj->gij", g, g) / n
    A = torch.einsum("ntgi,ntgj->gij", a, a) / n
    return A, torch.einsum("ntgi,ntgj->gij", g, g) / (n * locations)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_transposed_convolution_has_the_factors_of_its_patches(name: str, approx: Any) -> None:
    model, batch = transposed(name)
    optimizer = make(KAISA, model, kfac_approx=approx)
    expected = transposed_factors(model, batch, approx)
    take(model, optimizer, batch)
    for one, other in zip(factors(optimizer)["0"], expected, strict=True):
        near(one, other)


def test_a_transposed_convolution_can_be_called_with_an_output_size() -> None:
    conv = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1).double()
    x = torch.randn(4, 2, 4, 5, dtype=F64)
    output = conv(x, output_size=(8, 9))  # by default it is (7, 9)
    d = torch.randn_like(output)
    kind = match(conv).kind
    assert kind is not None
    (expected,) = torch.autograd.grad(output, conv.weight, d)
    near(kind.weight_gradient(conv, x, d), expected)


# Embeddings that are scaled, or tied to the output layer.


class ScaledEmbedding(nn.Embedding):
    """As BART and Gemma have it."""

    embed_scale = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.embed_scale * super().forward(x)


class Positions(nn.Embedding):
    """Overrides the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(super().forward(x))


@each_kronecker
def test_a_scaled_embedding_has_the_factors_of_its_gradient(System: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ScaledEmbedding(6, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    x = torch.randint(6, (8,))
    y = torch.randint(CLASSES, (8,))
    rows = []
    for n in range(8):
        loss = cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        rows += torch.autograd.grad(loss, [model[0].weight])
    optimizer = make(System, model)
    take(model, optimizer, (x, y))
    A, G = factors(optimizer)["0"]
    near(A[0], torch.bincount(x, minlength=6).double() / 8)
    near(G[0], sum((g.T @ g for g in rows), torch.zeros(4, 4, dtype=F64)) / 8)
    assert match(Positions(6, 4)) == (None, "Positions overrides Embedding.forward")


class Tied(nn.Module):
    def __init__(self, bias: bool, padding: int | None, scale: float) -> None:
        super().__init__()
        self.embedding: nn.Embedding = ScaledEmbedding(6, 4, padding_idx=padding)
        if scale == 1:
            self.embedding = nn.Embedding(6, 4, padding_idx=padding)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


def tied(bias: bool = True, padding: int | None = None, scale: float = 1.0) -> tuple[Tied, Batch]:
    torch.manual_seed(0)
    model = Tied(bias, padding, scale).double()
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randint(6, (5, 3), generator=generator) for _ in range(2))
    return model, (x, y)


def partial_traces(model: Tied, batch: Batch) -> tuple[Tensor, Tensor]:
    """The partial traces of the sum of both uses' blocks, from one gradient per token and use."""
    untied = copy.deepcopy(model)
    untied.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    weights = [untied.embedding.weight, untied.head.weight]
    entries = torch.zeros(6, dtype=F64)
    width = torch.zeros(4, 4, dtype=F64)
    tokens = list(zip(batch[0].flatten(), batch[1].flatten(), strict=True))
    for x, y in tokens:
        loss = cross_entropy(untied(x.view(1, 1)), y.view(1, 1))
        for g in torch.autograd.grad(loss, weights):
            entries += g.square().sum(1) / len(tokens)
            width += g.T @ g / len(tokens)
    return entries, width


@each_kronecker
@pytest.mark.parametrize(
    ("bias", "padding", "scale"), [(True, None, 1.0), (False, 2, 1.0), (False, None, 3.0)]
)
def test_a_tied_embedding_has_the_partial_traces_of_both_uses(
    System: Any, bias: bool, padding: int | None, scale: float
) -> None:
    model, batch = tied(bias, padding, scale)
    entries, width = partial_traces(model, batch)
    optimizer = make(System, model)
    take(model, optimizer, batch)
    A, G = factors(optimizer)["embedding = head"]
    near(A[0], entries / entries.sum())
    near(G[0], width)
    near(entries.sum(), width.trace())


# Users' own.


class Scaled(nn.Module):
    """Multiplies by three times its kernel, which has another name."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(d_in, d_out))
        self.offset = nn.Parameter(torch.zeros(d_out))

    def forward(self, x: Tensor) -> Tensor:
        return 3 * (x @ self.kernel + self.offset)


class ScaledToo(Scaled):
    """With the same forward."""


def times_three(module: nn.Module, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    return x, 3 * d


second_order.register_layer(
    Scaled, rows=times_three, transposed=True, weight="kernel", bias="offset"
)


@each_kronecker
@pytest.mark.parametrize("kind", [Scaled, ScaledToo])
def test_a_registered_layer_has_the_factors_of_its_product(System: Any, kind: type[Scaled]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    x = torch.randn(6, 5, dtype=F64)
    y = torch.randint(CLASSES, (6,))
    rows = []
    for n in range(6):
        loss = cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        kernel, offset = torch.autograd.grad(loss, list(model[0].parameters()))
        rows.append(torch.cat([kernel.T, offset[:, None]], 1))
    d = torch.stack([row[:, -1] for row in rows])  # the offset's gradient is 3 d
    one = torch.cat([x, torch.ones(6, 1, dtype=F64)], 1)
    A = one.T @ one / 6
    G = d.T @ d / 6
    optimizer = make(System, model)
    take(model, optimizer, (x, y))
    for found, expected in zip(factors(optimizer)["0"], (A, G), strict=True):
        near(found[0], expected)
    mean = torch.stack(rows).mean(0)
    expected = ref.damped_dense_solve(A[None], G[None], mean, 0.1)
    near(torch.cat([model[0].kernel.grad.T, model[0].offset.grad[:, None]], 1), expected, 1e-8)


def test_a_registered_class_can_have_the_attributes_of_a_router() -> None:
    class Router(nn.Module):
        num_experts = 4
        hidden_dim = 8

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 8))

    assert match(Router()).kind == ASSUMED_LINEAR
    second_order.register_layer(Router, rows=times_three, bias=None)
    kind = match(Router()).kind
    assert isinstance(kind, Linear)
    assert kind.rows is times_three


@pytest.mark.parametrize("when", ["after the step", "before the step"])
def test_pruned_weights_stay_pruned_if_masks_follow_the_step(when: str) -> None:
    """The page applies the masks after the step. Masks of gradients alone do not suffice."""
    page = (Path(__file__).parents[2] / "docs" / "reference/layers.md").read_text("utf-8")
    (example,) = re.findall(
        r"```python\n(.*?)```", page[page.index("## Pruned") : page.index("## Custom")], re.DOTALL
    )
    if when == "before the step":
        example = example.replace("optimizer.register_step_post_hook(apply_masks)\n", "")
        masked = "    for layer, mask in masks.items():\n        layer.weight.grad.mul_(mask)\n"
        example = example.replace("    optimizer.step()", f"{masked}    optimizer.step()")
    names: dict[str, Any] = {}
    exec(example, names)
    for layer, mask in names["masks"].items():
        assert bool((layer.weight[~mask] == 0).all()) == (when == "after the step")
        assert bool((layer.weight[mask] != 0).all())


def test_the_worked_example_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference/layers.md").read_text("utf-8")
    own = page[page.index("## Custom layers") :]
    first, second = re.findall(r"```python\n(.*?)```", own, re.DOTALL)
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(first, names)
    assert re.search(r"Scaled +144 +preconditioned +A 9², G 16²", printed.getvalue())
    assert names["optimizer"].summary().preconditioned_share == 1.0
    names["optimizer"].close()
    exec(second, names)
    model = nn.Sequential(names["LayerScale"](8), nn.Linear(8, 3))
    rows = KAISA(model, lr=0.1, precondition_norms=True).summary().rows
    assert {row.detail for row in rows} == {"exact 8²", "A 9², G 3²"}


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm])
@pytest.mark.parametrize(
    "how", [{"gain": lambda module, x: x}, {"rows": lambda module, x, d: (x, d)}]
)
def test_rules_of_torchs_layers_cannot_be_replaced(kind: Any, how: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"torch's {kind.__name__} has a rule.*a class of your own"
    ):
        second_order.register_layer(kind, **how)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    rows = KAISA(model, lr=0.1, precondition_norms=True).summary().rows
    assert {row.detail for row in rows} == {"A 4², G 4²", "exact 8²"}


def test_invalid_registrations_raise() -> None:
    register: Any = second_order.register_layer
    for kind in (nn.Module, int, nn.Linear(2, 2), "Linear"):
        with pytest.raises(TypeError, match="is not a class of modules"):
            register(kind)
    for option, value in (("rows", 3), ("gain", "x"), ("weight", 3), ("bias", 3)):
        with pytest.raises(TypeError, match=rf"{option}={value!r} is not"):
            register(Untold, **{option: value})
    with pytest.raises(TypeError, match="write bias='bias'"):
        register(Untold, bias=3)
    with pytest.raises(ValueError, match="give one or the other"):
        register(Untold, gain=lambda module, x: x, transposed=True)
    assert match(Untold(3)) == (None, "Untold has no Kronecker factors")
