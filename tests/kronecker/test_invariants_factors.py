"""The package's factors against exact curvature and formulas by hand: invariants 1 to 14.

The numbers in names are those of the invariants. A block is `KroneckerFactors.to_dense()`: A ⊗ G as
the matrix that multiplies a layer's gradient, row after row, the rows being those of [weight bias].
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import reference as ref
import torch
from contract import assert_same_factors, factors, make, take
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import CLASSES, FACTORED, ZOO, Checkpointed, Pool, Shared
from reference import cross_entropy, half_squared_error
from torch import Tensor, nn
from torch.nn import functional

from second_order import KAISA
from second_order.kronecker import layers as kinds
from second_order.kronecker import patches as windows
from second_order.kronecker.examples import LiveRows
from second_order.kronecker.factors import (
    KroneckerFactors,
    StagedStatistics,
    StatisticsSums,
)
from second_order.kronecker.fisher import sampled_loss
from second_order.kronecker.layers import factor_shape, pair_statistics
from second_order.kronecker.patches import extract_patches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reference import Approx, Batch, Factors, Likelihood, Loss

F64 = torch.float64
CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**16)
LIKELIHOODS: list[Likelihood] = ["categorical", "bernoulli", "gaussian"]
each_approx = pytest.mark.parametrize("approx", ["expand", "reduce"])


def close(actual: Any, expected: Any, rtol: float = 1e-10) -> None:
    """Equal up to rounding, elements measured by their tensor's largest."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=rtol, atol=rtol * float(b.detach().abs().max()) + 1e-14
        )


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((actual - expected).norm() / expected.norm())


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """By group."""
    return factor.diagonal(dim1=-2, dim2=-1).mean(-1)


def block(kronecker: KroneckerFactors) -> Tensor:
    """A layer's whole block; that of a grouped convolution is zero between its groups."""
    return torch.block_diag(*kronecker.to_dense())


def empirical(
    model: nn.Module, batch: Batch, loss: Loss = cross_entropy, **options: Any
) -> dict[str, KroneckerFactors]:
    """By layer, what the package has after one batch with the data's labels."""
    optimizer = make(KAISA, model, lr=0.0, **options)
    take(model, optimizer, batch, loss)
    return {block.name: block.ensure_factors() for block in optimizer._curvature.layers.blocks}


def exact(
    model: nn.Module, x: Tensor, likelihood: Likelihood, **options: Any
) -> dict[str, KroneckerFactors]:
    """By layer, what the package has with the model's own labels, when they are enumerated.

    A pass for each loss term and label, with √p times that label's gradient. The sampled Fisher
    takes the mean over passes where the expectation is the sum. The rows of other terms, which have
    no gradient in a pass, are to be examples of it, too.
    """
    with torch.no_grad():
        outputs = model(x)
    rows = outputs.reshape(-1, outputs.shape[-1])
    vectors = ref.label_gradients(rows, likelihood)
    todo = list(itertools.product(range(len(vectors)), range(len(rows))))
    remaining = iter(todo)

    def one_term(outputs: Tensor) -> Tensor:
        label, term = next(remaining)
        return outputs.reshape(rows.shape)[term] @ vectors[label, term]

    optimizer = make(KAISA, model, lr=0.0, fisher="sampled", likelihood=one_term, **options)
    with patch.object(kinds, "live_rows", lambda d: LiveRows(None, len(d))):
        for _ in todo:
            model(x).sum().backward()  # the user's own, which the sampled gradients wait for
    optimizer.step()
    averages = {block.name: block.ensure_factors() for block in optimizer._curvature.layers.blocks}
    for found in averages.values():
        found.g.mul_(len(todo))
        found.means[1] *= len(todo)
    return averages


def network(
    widths: Sequence[int], activation: Callable[[], nn.Module], bias: bool, seed: int
) -> nn.Sequential:
    """Linear layers, named "0", "2", "4" and so on, with activations between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for d_in, d_out in itertools.pairwise(widths):
        layers += [nn.Linear(d_in, d_out, bias=bias), activation()]
    return nn.Sequential(*layers[:-1]).double()


WIDTHS = st.lists(st.integers(1, 5), min_size=2, max_size=3).map(lambda inner: [*inner, 3])


# 1. One example, one location, no sharing: A ⊗ G = the exact Fisher block, for any network and
# loss, when the expectation over labels is exact.


@given(
    widths=WIDTHS,
    activation=st.sampled_from([nn.Tanh, nn.Softplus, nn.ReLU]),
    bias=st.booleans(),
    likelihood=st.sampled_from(LIKELIHOODS),
    seed=SEEDS,
)
def test_1_one_example_is_exact(
    widths: list[int], activation: Any, bias: bool, likelihood: Likelihood, seed: int
) -> None:
    model = network(widths, activation, bias, seed)
    x, y = torch.randn(1, widths[0], dtype=F64), torch.randint(CLASSES, (1,))
    layers = exact(model, x, likelihood)
    assert len(layers) == len(widths) - 1
    for name, found in layers.items():
        close([block(found)], [ref.exact_fisher(model, x, likelihood, name)])
    for name, found in empirical(model, (x, y)).items():
        close([block(found)], [ref.empirical_fisher(model, x, y, cross_entropy, name)])


@pytest.mark.parametrize("layer", ["0", "2"])
def test_1_not_for_8_examples_through_tanh(layer: str) -> None:
    model, (x, _) = ZOO["mlp"].model(), ZOO["mlp"].batch(8)
    found = block(exact(model, x, "categorical")[layer])
    assert error(found, ref.exact_fisher(model, x, "categorical", layer)) > 0.05


# 2. Deep linear network, squared loss, any batch: A ⊗ G = Fisher = GGN = the layer's Hessian.


@given(widths=WIDTHS, bias=st.booleans(), n=st.integers(1, 6), seed=SEEDS)
def test_2_deep_linear_with_squared_loss_is_exact(
    widths: list[int], bias: bool, n: int, seed: int
) -> None:
    model = network(widths, nn.Identity, bias, seed)
    x, y = torch.randn(n, widths[0], dtype=F64), torch.randn(n, 3, dtype=F64)
    for name, found in exact(model, x, "gaussian").items():
        for expected in (
            ref.exact_fisher(model, x, "gaussian", name),
            ref.ggn(model, x, y, half_squared_error, name),
            ref.hessian(model, x, y, half_squared_error, name),
        ):
            close([block(found)], [expected])


@pytest.mark.parametrize("layer", ["0", "1", "2"])
def test_2_not_for_cross_entropy(layer: str) -> None:
    case = ZOO["deep_linear"]
    model, (x, _) = case.model(), case.batch(6)
    with torch.no_grad():
        model[2].weight.mul_(5)  # predictions that are not all alike
    found = block(exact(model, x, "categorical")[layer])
    assert error(found, ref.exact_fisher(model, x, "categorical", layer)) > 0.05


# 3. Deep linear, squared loss per position, no mixing of positions: expand is exact.
# 4. Deep linear, uniformly pooled output, squared loss: reduce is exact.


@given(widths=WIDTHS, n=st.integers(1, 3), t=st.integers(1, 4), seed=SEEDS)
def test_3_expand_is_exact_with_a_loss_per_position(
    widths: list[int], n: int, t: int, seed: int
) -> None:
    model = network(widths, nn.Identity, True, seed)
    x = torch.randn(n, t, widths[0], dtype=F64)
    for name, found in exact(model, x, "gaussian", kfac_approx="expand").items():
        close([block(found)], [ref.exact_fisher(model, x, "gaussian", name)])


@given(widths=WIDTHS, after=st.booleans(), n=st.integers(1, 3), t=st.integers(1, 4), seed=SEEDS)
def test_4_reduce_is_exact_with_pooled_positions(
    widths: list[int], after: bool, n: int, t: int, seed: int
) -> None:
    model = network(widths, nn.Identity, True, seed)
    model.insert(len(model) - 1 if after else len(model), Pool())  # before or after the last layer
    x = torch.randn(n, t, widths[0], dtype=F64)
    for name, found in exact(model, x, "gaussian", kfac_approx="reduce").items():
        close([block(found)], [ref.exact_fisher(model, x, "gaussian", name)])


@pytest.mark.parametrize(
    ("name", "inexact"), [("sequence_linear", "reduce"), ("pooled_linear", "expand")]
)
def test_3_and_4_not_the_other_way_round(name: str, inexact: str) -> None:
    case = ZOO[name]
    model, (x, _) = case.model(), case.batch(4)
    for layer in ("0", "1"):
        fisher = ref.exact_fisher(model, x, "gaussian", layer)
        assert case.shared is not None
        close([block(exact(model, x, "gaussian", kfac_approx=case.shared)[layer])], [fisher])
        other = block(exact(model, x, "gaussian", kfac_approx=inexact)[layer])
        assert error(other, fisher) > 0.05
        # And no multiple of it either.
        scale = float((other * fisher).sum() / (other * other).sum())
        assert error(scale * other, fisher) > 0.05


# 5. A convolution whose kernel covers its input = the Linear on the flattened input.


CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]


def covering(kernel: Sequence[int], c_in: int, c_out: int, bias: bool) -> nn.Sequential:
    conv = CONVS[len(kernel) - 1](c_in, c_out, tuple(kernel), bias=bias)
    return nn.Sequential(conv, nn.Flatten(), nn.Tanh(), nn.Linear(c_out, CLASSES)).double()


@given(
    kernel=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    c_in=st.integers(1, 3),
    c_out=st.integers(1, 3),
    bias=st.booleans(),
    approx=st.sampled_from(["expand", "reduce"]),
    n=st.integers(1, 5),
    seed=SEEDS,
)
def test_5_a_kernel_that_covers_its_input_is_a_linear(
    kernel: list[int], c_in: int, c_out: int, bias: bool, approx: str, n: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = covering(kernel, c_in, c_out, bias)
    linear = nn.Linear(c_in * math.prod(kernel), c_out, bias=bias, dtype=F64)
    flat = nn.Sequential(nn.Flatten(), linear, nn.Tanh(), copy.deepcopy(model[3]))
    with torch.no_grad():
        linear.weight.copy_(model[0].weight.flatten(1))
        if bias:
            linear.bias.copy_(model[0].bias)
    x, y = torch.randn(n, c_in, *kernel, dtype=F64), torch.randint(CLASSES, (n,))
    found = empirical(model, (x, y), kfac_approx=approx)
    expected = empirical(flat, (x, y), kfac_approx=approx)
    for mine, its in [("0", "1"), ("3", "3")]:
        close([found[mine].a, found[mine].g], [expected[its].a, expected[its].g])


def test_5_not_for_a_kernel_smaller_than_its_input() -> None:
    """With two locations expand and reduce part; with one they are the same."""
    model = covering([2, 3], 2, 3, True)
    y = torch.randint(CLASSES, (4,))
    for height, same in [(2, True), (3, False)]:
        x = torch.randn(4, 2, height, 3, dtype=F64)
        model[3] = nn.Linear(3 * (height - 1), CLASSES, dtype=F64)
        expand, reduce = (
            block(empirical(model, (x, y), kfac_approx=approx)["0"])
            for approx in ("expand", "reduce")
        )
        assert (error(reduce, expand) < 1e-10) == same
        assert same or error(reduce, expand) > 0.05


def test_1_and_5_a_grouped_convolution_of_one_location_is_exact_within_its_groups() -> None:
    conv = nn.Conv2d(4, 6, (3, 2), groups=2)
    model = nn.Sequential(conv, nn.Flatten(), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(1, 4, 3, 2, dtype=F64)
    found = exact(model, x, "categorical")["0"]
    fisher = ref.exact_fisher(model, x, "categorical", "0")
    assert found.to_dense().shape == (2, 3 * 13, 3 * 13)
    within = torch.block_diag(torch.ones(39, 39), torch.ones(39, 39))
    close([block(found)], [fisher * within])
    assert error(block(found), fisher) > 0.05


# 6. Every convolution: A equals the one built from patches, however it is really computed.


@dataclass(frozen=True)
class ConvCase:
    """A convolution, and the size of its input without the batch."""

    dims: int
    channels: tuple[int, int]
    shape: tuple[int, ...]
    options: dict[str, Any]
    approx: Approx
    layout: str
    n: int | None

    def conv(self) -> Any:
        return CONVS[self.dims - 1](*self.channels, **self.options).double()


@st.composite
def conv_cases(draw: Any) -> ConvCase:
    dims = draw(st.integers(1, 3))
    most = 3 if dims < 3 else 2

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, dilation, groups = each(1, most), each(1, most), draw(st.integers(1, 3))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    kind = draw(st.sampled_from(["numbers", "same", "valid"]))
    padding: Any = {"numbers": each(0, 2)}.get(kind, kind)
    after = {"numbers": padding, "same": [r // 2 for r in reach], "valid": [0] * dims}[kind]
    # Large enough for one location, and for what is reflected or wrapped around.
    shape = tuple(
        max(r - 2 * p if kind == "numbers" else r, p + 1) + draw(st.integers(0, 2))
        for r, p in zip(reach, after, strict=True)
    )
    return ConvCase(
        dims,
        (groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))),
        shape,
        {
            "kernel_size": kernel,
            "dilation": dilation,
            "groups": groups,
            "padding": padding,
            "padding_mode": draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"])),
            "stride": (1,) * dims if kind == "same" else each(1, 3),
            "bias": draw(st.booleans()),
        },
        draw(st.sampled_from(["expand", "reduce"])),
        draw(st.sampled_from(["plain", "channels last", "transposed"])),
        draw(st.sampled_from([None, 1, 2, 3])),  # None: one example without the batch's axis
    )


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another order in memory."""
    if layout == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.mT.contiguous().mT if layout == "transposed" else x


def conv_statistics(conv: Any, x: Tensor, d: Tensor, approx: Approx) -> Factors:
    """The package's A and G of one pair, for a loss that is a mean over examples."""
    pair = pair_statistics(conv, x, d, bias=conv.bias is not None, approximation=approx, dtype=F64)
    return pair.factors["A"] / pair.examples, pair.factors["G"] * pair.examples


@settings(max_examples=300)
@given(case=conv_cases())
def test_6_every_convolution_has_the_factors_of_its_patches(case: ConvCase) -> None:
    conv = case.conv()
    x = laid_out(torch.randn(case.n or 1, conv.in_channels, *case.shape, dtype=F64), case.layout)
    with torch.no_grad():
        outputs = conv(x)
    d = laid_out(torch.randn_like(outputs), case.layout)
    expected = ref.conv_factors(x, d, conv, case.approx)
    if case.n is None:
        x, d = x[0], d[0]
    close(conv_statistics(conv, x, d, case.approx), expected)


@settings(max_examples=100)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    more=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.sampled_from([0, 1, "same"]),
    padding_mode=st.sampled_from(["zeros", "reflect", "circular", "replicate"]),
    bias=st.booleans(),
    layout=st.sampled_from(["plain", "channels last", "transposed"]),
    n=st.integers(1, 3),
    patches=st.booleans(),
)
def test_6_plain_convolutions_of_inputs_much_larger_than_their_kernel(
    kernel: tuple[int, int],
    more: tuple[int, int],
    channels: tuple[int, int],
    padding: Any,
    padding_mode: Any,
    bias: bool,
    layout: str,
    n: int,
    patches: bool,
) -> None:
    """What most networks are made of: with patches, and by autocorrelations as large ones are."""
    conv = nn.Conv2d(
        *channels, kernel, padding=padding, padding_mode=padding_mode, bias=bias, dtype=F64
    )
    size = [k + extra for k, extra in zip(kernel, more, strict=True)]
    x = laid_out(torch.randn(n, channels[0], max(size[0], 2), max(size[1], 2), dtype=F64), layout)
    with torch.no_grad():
        d = laid_out(torch.randn_like(conv(x)), layout)
    with patch.object(kinds, "AUTOCORRELATION_ELEMENTS", math.inf if patches else 0):
        found = conv_statistics(conv, x, d, "expand")
    close(found, ref.conv_factors(x, d, conv, "expand"))


@given(case=conv_cases())
def test_6_weight_times_patches_is_the_convolution(case: ConvCase) -> None:
    """What the factors are factors of, checked without the reference."""
    conv = case.conv()
    x = laid_out(torch.randn(2, conv.in_channels, *case.shape, dtype=F64), case.layout)
    patches = extract_patches(x, conv).flatten(2, 2 + case.dims).flatten(3)  # (N, groups, in, T)
    weight = conv.weight.flatten(1).unflatten(0, (conv.groups, -1))
    outputs = torch.einsum("goi,ngit->ngot", weight, patches).flatten(1, 2)
    if conv.bias is not None:
        outputs = outputs + conv.bias[:, None]
    close([outputs], [conv(x).flatten(2)])


@pytest.mark.parametrize(
    "other",
    [
        {"stride": (1, 2)},
        {"padding": (0, 2)},
        {"dilation": (2, 1)},
        {"groups": 1},
        {"padding_mode": "zeros"},
        {"padding_mode": "replicate"},
        {"padding_mode": "reflect"},
    ],
    ids=str,
)
def test_6_not_with_another_option(other: dict[str, Any]) -> None:
    """The reference tells one option from another wherever shapes do not."""
    options = {
        "kernel_size": (2, 3),
        "stride": (2, 1),
        "padding": (1, 1),
        "dilation": (1, 2),
        "groups": 2,
        "padding_mode": "circular",
    }
    conv = nn.Conv2d(4, 4, **options).double()
    wrong = nn.Conv2d(4, 4, **{**options, **other}).double()
    x = torch.randn(3, 4, 6, 7, dtype=F64)
    found, _ = conv_statistics(conv, x, torch.randn_like(conv(x)), "expand")
    expected, _ = ref.conv_factors(x, torch.randn_like(wrong(x)), wrong, "expand")
    assert found.shape != expected.shape or error(found, expected) > 0.01


# 8. Appendix-A convolution factors = reduce over locations.


@settings(max_examples=100)
@given(case=conv_cases(), way=st.sampled_from(["at once", "by dimensions", "patches"]))
def test_8_cheap_factors_are_those_of_a_linear_whose_positions_are_reduced(
    case: ConvCase, way: str
) -> None:
    """Each group of the convolution is a Linear on its patches, with locations for positions."""
    conv = case.conv()
    x = torch.randn(case.n or 1, conv.in_channels, *case.shape, dtype=F64)
    x = laid_out(x, case.layout)
    d = torch.randn_like(conv(x))
    with (
        patch.object(windows, "TAPS_AT_ONCE", 2**16 if way == "at once" else 0),
        patch.object(windows, "TAPS_A_DIMENSION", 0 if way == "patches" else 2**12),
    ):
        A, G = conv_statistics(conv, x, d, "reduce")
    rows = extract_patches(x, conv).flatten(2, 2 + case.dims).flatten(3).mT  # (N, groups, T, in)
    gradients = d.flatten(2).unflatten(1, (conv.groups, -1)).mT
    for group in range(conv.groups):
        linear = nn.Linear(rows.shape[-1], gradients.shape[-1], bias=conv.bias is not None)
        expected = conv_statistics(linear, rows[:, group], gradients[:, group], "reduce")
        close([A[group], G[group]], [expected[0][0], expected[1][0]])
        # By hand: ã the mean over locations, d̃ the sum.
        a, g = rows[:, group].mean(1), gradients[:, group].sum(1) * len(x)
        if conv.bias is not None:
            a = torch.cat([a, torch.ones(len(x), 1)], 1)
        close([A[group], G[group]], [a.T @ a / len(x), g.T @ g / len(x)])


def test_8_not_expand() -> None:
    conv = nn.Conv2d(2, 3, 2).double()
    x = torch.randn(4, 2, 3, 3, dtype=F64)
    d = torch.randn_like(conv(x))
    cheap, full = (conv_statistics(conv, x, d, approx) for approx in ("reduce", "expand"))
    assert error(cheap[0], full[0]) > 0.05
    assert error(cheap[1], full[1]) > 0.05


# 9. A module used U times = the lumped formula, written out by hand.


class Repeated(nn.Module):
    """One layer used several times, on inputs and with gradients of its own each time."""

    def __init__(self, width: int, uses: int) -> None:
        super().__init__()
        self.shared, self.head, self.uses = nn.Linear(width, width), nn.Linear(width, 3), uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = torch.tanh(self.shared(x))
        return self.head(x)


@given(uses=st.integers(1, 4), width=st.integers(1, 4), n=st.integers(1, 5), seed=SEEDS)
def test_9_a_module_used_u_times_is_lumped(uses: int, width: int, n: int, seed: int) -> None:
    """F ≈ U · E[ā āᵀ] ⊗ E[d dᵀ], both expectations over examples and uses."""
    torch.manual_seed(seed)
    model = Repeated(width, uses).double()
    x, y = torch.randn(n, width, dtype=F64), torch.randint(CLASSES, (n,))
    pairs = ref.captured(model, x, lambda outputs: cross_entropy(outputs, y), "shared")["shared"]
    inputs = torch.cat([torch.cat([a, torch.ones(n, 1)], 1) for a, _ in pairs])
    gradients = torch.cat([n * d for _, d in pairs])
    A, G = inputs.T @ inputs / (n * uses), gradients.T @ gradients / (n * uses)
    found = empirical(model, (x, y))["shared"]
    close(found.matrices(F64), [A[None], uses * G[None]])
    close([block(found)], [uses * torch.kron(G, A)])


def test_9_not_as_so_many_passes() -> None:
    """Passes share the step's weight, uses add up: by U, here 2."""
    case = ZOO["shared_linear"]
    model, batch = case.model(), case.batch()
    assert isinstance(model, Shared)
    pairs = ref.captured(model, batch[0], lambda z: cross_entropy(z, batch[1]), "shared")["shared"]
    as_passes = stage(model.shared, [(x, d * len(x)) for x, d in pairs])
    found = empirical(model, batch)["shared"]
    close([found.matrices(F64)[1]], [2 * as_passes[1]])


def test_9_the_mean_eigenvalues_of_a_module_used_twice_are_those_of_its_factors() -> None:
    """A relative damping, which is the default, is made of them."""
    case = ZOO["shared_linear"]
    for found in empirical(case.model(), case.batch()).values():
        close(found.means, [mean_eigenvalue(each) for each in found.matrices(F64)])


# 10. Equal shards: the mean of the ranks' factors = the full batch's. Unequal shards: the
# example-weighted mean; the plain mean is not.
# 11. k micro-batches = one batch.


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (partial(nn.Linear, 3, 4), (3,)),
    "sequence": (partial(nn.Linear, 3, 4, bias=False), (2, 3)),
    "convolution": (partial(nn.Conv2d, 2, 4, 2, groups=2), (2, 3, 4)),
}
COUNTS = st.lists(st.integers(1, 5), min_size=2, max_size=4)
each_module = pytest.mark.parametrize("kind", MODULES)


def staging(
    module: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]], triangular: bool = True
) -> StagedStatistics:
    """Statistics of (inputs, gradients of each example's loss), every pair a pass of its own.

    As a backward would have it, the loss being a mean, a gradient is divided by its pair's terms.
    """
    bias = getattr(module, "bias", None) is not None
    staged = StagedStatistics(factor_shape(module, bias), CPU, F64, triangular)
    for index, (x, gradients) in enumerate(pairs):
        terms = x.shape[:-1].numel() if isinstance(module, nn.Linear) else len(x)
        pair = pair_statistics(
            module, x, gradients / terms, bias=bias, approximation="expand", dtype=F64
        )
        staged.add(pair, pair.examples, index)
    return staged


def mean_of(staged: Sequence[StagedStatistics]) -> Factors:
    """As ranks do it: sums added, then divided. Mean eigenvalues are those of the factors."""
    sums = [each.sums() for each in staged]
    a, g = (sum(each.factors[letter] for each in sums) for letter in "AG")
    head = sum(each.head for each in sums)
    shape = staged[0].shape
    average = KroneckerFactors(shape, CPU, F64, staged[0].triangular)
    average.update(StatisticsSums({"A": a.clone(), "G": g.clone()}, head.clone()), 0.0)
    A, G = average.matrices(F64)
    close(average.means, [mean_eigenvalue(A), mean_eigenvalue(G)])
    assert float(average.weight) == 1.0
    return A, G


def stage(module: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> Factors:
    return mean_of([staging(module, pairs)])


def drawn(kind: str, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A module, inputs, and the gradients of each example's loss at its outputs."""
    build, shape = MODULES[kind]
    module = build().double()
    x = torch.randn(count, *shape, dtype=F64)
    return module, x, torch.randn_like(module(x))


@each_module
@given(counts=COUNTS, seed=SEEDS)
def test_10_shards_are_weighted_by_their_examples(kind: str, counts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    module, x, gradients = drawn(kind, sum(counts))
    whole = stage(module, [(x, gradients)])
    shards = [
        staging(module, [pair])
        for pair in zip(x.split(counts), gradients.split(counts), strict=True)
    ]
    close(mean_of(shards), whole)
    each = [mean_of([shard]) for shard in shards]
    for X, parts in zip(whole, zip(*each, strict=True), strict=True):
        close([ref.weighted_mean(parts, counts)], [X])
        if len(set(counts)) == 1:
            close([torch.stack(parts).mean(0)], [X])


def test_10_not_the_plain_mean_of_unequal_shards() -> None:
    module, x, gradients = drawn("linear", 9)
    whole = stage(module, [(x, gradients)])
    each = [stage(module, [(x[part], gradients[part])]) for part in (slice(0, 1), slice(1, 9))]
    for X, parts in zip(whole, zip(*each, strict=True), strict=True):
        assert error(torch.stack(parts).mean(0), X) > 0.05


@each_module
@given(counts=COUNTS, seed=SEEDS)
def test_11_micro_batches_of_any_sizes_are_one_batch(
    kind: str, counts: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    module, x, gradients = drawn(kind, sum(counts))
    parts = list(zip(x.split(counts), gradients.split(counts), strict=True))
    close(stage(module, parts), stage(module, [(x, gradients)]))


@given(n=st.integers(1, 4), k=st.integers(1, 4), seed=SEEDS)
def test_11_k_micro_batches_of_the_optimizer_are_one_batch(n: int, k: int, seed: int) -> None:
    case = ZOO["shared_conv"]
    model, (x, y) = case.model(), case.batch(n * k, seed=seed)
    expected = empirical(model, (x, y))
    optimizer = make(KAISA, model, lr=0.0, accumulation_steps=k)
    for part in zip(x.split(n), y.split(n), strict=True):
        (cross_entropy(model(part[0]), part[1]) / k).backward()
    optimizer.step()
    as_full = {name: found.matrices(F64) for name, found in expected.items()}
    assert_same_factors(factors(optimizer), as_full)
    optimizer = make(KAISA, model, lr=0.0, accumulation_steps=1)  # not
    for part in zip(x.split(n), y.split(n), strict=True):
        (cross_entropy(model(part[0]), part[1]) / k).backward()
    optimizer.step()
    for name, (_, G) in as_full.items():
        close([factors(optimizer)[name][1]], [G / k**2])


@given(power=st.integers(-10, 16))
def test_11_a_grad_scaler_changes_nothing(power: int) -> None:
    case = ZOO["conv_strided"]
    model, (x, y) = case.model(), case.batch()
    expected = empirical(model, (x, y))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power)
    optimizer = make(KAISA, model, lr=0.0, grad_scaler=scaler)
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same_factors(
        factors(optimizer), {name: found.matrices(F64) for name, found in expected.items()}
    )


def in_place(switch: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.ELU(inplace=switch), nn.Flatten(),
        nn.Linear(12, 5), nn.Hardtanh(inplace=switch), nn.Linear(5, CLASSES),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plain", "variant", "shape"),
    [
        (partial(Checkpointed, None), partial(Checkpointed, True), (5,)),
        (partial(Checkpointed, None), partial(Checkpointed, False), (5,)),
        (partial(in_place, False), partial(in_place, True), (2, 3, 3)),
    ],
    ids=["checkpointed, reentrant", "checkpointed", "in place"],
)
def test_11_checkpointed_and_in_place_are_plain(
    plain: Callable[[], nn.Module], variant: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    models = [build().double() for build in (plain, variant)]
    models[1].load_state_dict(models[0].state_dict())
    x, y = torch.randn(6, *shape, dtype=F64), torch.randint(CLASSES, (6,))
    expected, found = (
        {name: each.matrices(F64) for name, each in empirical(model, (x, y)).items()}
        for model in models
    )
    assert_same_factors(found, expected)


# 13. Running average: first update = first statistic; constants stay; equals EMA / (1 − βᵗ).


DECAYS = st.floats(0.0, 0.999)


def running(kronecker: KroneckerFactors, values: Sequence[Factors], decays: Sequence[float]) -> Any:
    """The averages after every update, by statistics of varying numbers of examples."""
    for index, ((A, G), decay) in enumerate(zip(values, decays, strict=True)):
        kronecker.update(summed(kronecker, A, G, examples=index % 3 + 1), decay)
        close(kronecker.means, [mean_eigenvalue(each) for each in kronecker.matrices(F64)])
        yield list(kronecker.matrices(F64))


def summed(kronecker: KroneckerFactors, A: Tensor, G: Tensor, examples: int) -> StatisticsSums:
    """The sums over so many examples whose means are A and G."""
    one = torch.ones(1, dtype=F64)
    head = torch.cat([one, mean_eigenvalue(A), mean_eigenvalue(G)]) * examples
    stored = {"A": kronecker.store(A) * examples, "G": kronecker.store(G) * examples}
    return StatisticsSums(stored, head)


def symmetric(*size: int) -> Tensor:
    x = torch.randn(*size, dtype=F64)
    return x + x.mT


@given(decay=DECAYS, count=st.integers(1, 10), triangular=st.booleans(), seed=SEEDS)
def test_13_running_average_is_the_debiased_ema(
    decay: float, count: int, triangular: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    shape = factor_shape(nn.Conv2d(2, 6, 1, groups=2), True)
    values = [(symmetric(2, 2, 2), symmetric(2, 3, 3)) for _ in range(count)]
    kronecker = KroneckerFactors(shape, CPU, F64, triangular)
    averages = list(running(kronecker, values, [decay] * count))
    close(averages[0], values[0])
    for which in range(2):
        ema = torch.zeros_like(values[0][which])
        for t, value in enumerate(values):
            ema = decay * ema + (1 - decay) * value[which]
            close([averages[t][which]], [ema / (1 - decay ** (t + 1))], rtol=1e-9)
    constant = KroneckerFactors(shape, CPU, F64, triangular)
    for average in running(constant, values[:1] * count, [decay] * count):
        close(average, values[0])


@given(decays=st.lists(DECAYS, min_size=1, max_size=6))
def test_13_decays_that_change_weigh_by_the_product_of_the_later_ones(decays: list[float]) -> None:
    """Through the optimizer, with lr 0, so that each batch's factors are those of one model."""
    case = ZOO["mlp"]
    model, batches = case.model(), case.batches(len(decays))
    optimizer = make(KAISA, model, lr=0.0, factor_decay=lambda step: decays[step])
    for batch in batches:
        take(model, optimizer, batch)
    for name, found in factors(optimizer).items():
        each = [ref.empirical_factors(model, x, y, cross_entropy, name) for x, y in batches]
        for X, values in zip(found, zip(*each, strict=True), strict=True):
            close([X], [ref.debiased_average(values, decays)])


def test_13_not_an_average_that_starts_from_zero() -> None:
    case = ZOO["mlp"]
    model, (x, y) = case.model(), case.batch()
    found = empirical(model, (x, y), factor_decay=0.9)["0"].matrices(F64)
    expected = ref.empirical_factors(model, x, y, cross_entropy, "0")
    close(found, expected)
    assert error(found[0], 0.1 * expected[0]) > 1


def test_13_a_step_without_examples_leaves_the_average_bit_for_bit() -> None:
    shape = factor_shape(nn.Linear(2, 3), True)
    kronecker = KroneckerFactors(shape, CPU, F64, True)
    values = [(symmetric(1, 3, 3), symmetric(1, 3, 3)) for _ in range(3)]
    *_, before = running(kronecker, values, [0.9] * 3)
    weight, means = kronecker.weight.clone(), kronecker.means.clone()
    assert kronecker.a is not None
    assert kronecker.g is not None
    absent = torch.tensor([0.0, 7.0, 7.0], dtype=F64)
    kronecker.update(StatisticsSums({"A": kronecker.a * 7, "G": kronecker.g * 7}, absent), 0.9)
    assert torch.equal(kronecker.weight, weight)
    assert torch.equal(kronecker.means, means)
    for a, b in zip(kronecker.matrices(F64), before, strict=True):
        assert torch.equal(a, b)


def test_13_bfloat16_factors_are_divided_by_the_exact_number_of_examples() -> None:
    """259 of them, which bfloat16 does not have: the mean alone is rounded."""
    kronecker = KroneckerFactors(factor_shape(nn.Linear(20, 30), True), CPU, torch.bfloat16, False)
    sums = summed(kronecker, symmetric(1, 21, 21), symmetric(1, 30, 30), 259)
    sums.head = sums.head.float()
    expected = [(total.float() / 259).bfloat16() for total in sums.factors.values()]
    kronecker.update(sums, 0.95)
    assert torch.equal(kronecker.stored["A"], expected[0])  # type: ignore[arg-type]
    assert torch.equal(kronecker.stored["G"], expected[1])  # type: ignore[arg-type]


def test_13_weights_and_means_of_bfloat16_factors_are_not_rounded() -> None:
    kronecker = KroneckerFactors(factor_shape(nn.Linear(2, 3), True), CPU, torch.bfloat16, False)
    values = [(symmetric(1, 3, 3), symmetric(1, 3, 3)) for _ in range(3)]
    for A, G in values:
        kronecker.update(summed(kronecker, A, G, 4), 0.95)
    assert float(kronecker.weight) == pytest.approx(1 + 0.95 + 0.95**2, rel=1e-6)
    for which in range(2):
        means = [mean_eigenvalue(value[which]) for value in values]
        expected = ref.debiased_average(means, [0.95] * 3)
        close([kronecker.means[which].double()], [expected], rtol=1e-6)


# 14. Sampled Fisher: its expectation over all labels, enumerated, = diag(p) − ppᵀ pulled back.


def joint_labels(likelihood: Likelihood, n: int, outputs: int) -> list[Tensor]:
    """All the ways to label n examples: class numbers, or a zero or one for every output."""
    if likelihood == "categorical":
        return [torch.tensor(labels) for labels in itertools.product(range(outputs), repeat=n)]
    bits = itertools.product((0.0, 1.0), repeat=n * outputs)
    return [torch.tensor(labels, dtype=F64).view(n, outputs) for labels in bits]


def negative_log_likelihood(likelihood: Likelihood, labels: Tensor, outputs: Tensor) -> Tensor:
    """Summed, as the sampled Fisher asks for."""
    if likelihood == "categorical":
        return functional.cross_entropy(outputs, labels, reduction="sum")
    return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@settings(max_examples=8)
@given(n=st.integers(1, 2), seed=SEEDS)
def test_14_expected_over_all_labels_is_the_models_own_covariance_pulled_back(
    likelihood: Likelihood, n: int, seed: int
) -> None:
    """Σ p(labels) G(labels), each from the package with those labels for its likelihood."""
    model = network([3, 4, 3], nn.Tanh, True, seed)
    x = torch.randn(n, 3, dtype=F64)
    with torch.no_grad():
        outputs = model(x)
    expected: dict[str, Tensor] = {"0": torch.tensor(0.0), "2": torch.tensor(0.0)}
    total = 0.0
    for labels in joint_labels(likelihood, n, 3):
        loss = partial(negative_log_likelihood, likelihood, labels)
        probability = math.exp(-float(loss(outputs)))
        total += probability
        optimizer = make(KAISA, model, lr=0.0, fisher="sampled", likelihood=loss)
        model(x).sum().backward()
        optimizer.step()
        for name, (_, G) in factors(optimizer).items():
            expected[name] = expected[name] + probability * G
    assert total == pytest.approx(1)
    if likelihood == "categorical":
        p = outputs.softmax(-1)
        covariance = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    else:
        p = outputs.sigmoid()
        covariance = torch.diag_embed(p * (1 - p))
    close([expected["2"][0]], [covariance.mean(0)])
    pulled_back = torch.zeros(4, 4, dtype=F64)
    for row, cov in zip(x, covariance, strict=True):
        slope = 1 - torch.tanh(model[0](row)).detach() ** 2
        jacobian = model[2].weight.detach() * slope  # of the outputs, by the first layer's
        pulled_back += jacobian.T @ cov @ jacobian / n
    close([expected["0"][0]], [pulled_back])


def test_14_not_with_the_datas_labels() -> None:
    model, (x, y) = ZOO["mlp"].model(), ZOO["mlp"].batch()
    p = model(x).softmax(-1).detach()
    covariance = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    _, G = empirical(model, (x, y))["4"].matrices(F64)
    assert error(G[0], covariance) > 0.05


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_14_labels_are_drawn_from_the_models_distribution(likelihood: Likelihood) -> None:
    """Over many seeds: the gradient p − label has mean zero and the model's covariance."""
    logits = torch.tensor([[1.0, -0.5, 0.2], [-2.0, 1.0, 0.0]], dtype=F64, requires_grad=True)
    draws = torch.stack(
        [
            torch.autograd.grad(sampled_loss(logits, likelihood, seed), logits)[0]
            for seed in range(4000)
        ]
    )
    p = (logits.softmax(-1) if likelihood == "categorical" else logits.sigmoid()).detach()
    covariance = {
        "categorical": torch.diag_embed(p) - p[:, :, None] * p[:, None],
        "bernoulli": torch.diag_embed(p * (1 - p)),
        "gaussian": torch.eye(3, dtype=F64).expand(2, 3, 3),
    }[likelihood]
    assert draws.mean(0).abs().max() < 0.06
    found = torch.einsum("sni,snj->nij", draws, draws) / len(draws)
    assert (found - covariance).abs().max() < 0.06
    # Two examples of one batch are labelled apart from each other.
    assert (torch.einsum("si,sj->ij", draws[:, 0], draws[:, 1]) / len(draws)).abs().max() < 0.06
    if likelihood != "gaussian":
        labels = p - draws
        assert torch.all((labels.abs() < 1e-12) | ((labels - 1).abs() < 1e-12))


def test_14_the_average_over_many_steps_nears_the_expectation() -> None:
    case = ZOO["mlp"]
    model, (x, _) = case.model(), case.batch(16)
    optimizer = make(
        KAISA, model, lr=0.0, fisher="sampled", factor_decay=0.9999, inv_update_steps=10**9
    )
    for _ in range(300):
        model(x).sum().backward()
        optimizer.step()
    for name, (A, G) in factors(optimizer).items():
        expected = ref.exact_factors(model, x, "categorical", name)
        close([A], [expected[0]])
        assert error(G, expected[1]) < 0.1


# 7. Embedding = the Linear on one-hot rows.


class OneHot(nn.Module):
    """Rows of the identity; zeros for the padding index, as an embedding treats it."""

    def __init__(self, rows: int, padding: int | None) -> None:
        super().__init__()
        self.rows, self.padding = rows, padding

    def forward(self, x: Tensor) -> Tensor:
        rows = functional.one_hot(x, self.rows).double()
        return rows if self.padding is None else rows * (x != self.padding)[..., None]


def lookups(
    rows: int, width: int, padding: int | None, pooled: bool
) -> tuple[nn.Sequential, nn.Sequential]:
    """A model that begins with an embedding, and its like with a Linear; its layer is "1"."""
    rest = [Pool()] if pooled else []
    rest += [nn.Tanh(), nn.Linear(width, CLASSES)]
    embedding = nn.Embedding(rows, width, padding_idx=padding)
    linear = nn.Linear(rows, width, bias=False)
    with torch.no_grad():
        linear.weight.copy_(embedding.weight.T)
    first = nn.Sequential(nn.Identity(), embedding, *copy.deepcopy(rest)).double()
    return first, nn.Sequential(OneHot(rows, padding), linear, *rest).double()


LOOKUPS: dict[str, Any] = {
    "rows": st.integers(2, 6),
    "width": st.integers(1, 4),
    "padded": st.booleans(),
    "n": st.integers(1, 4),
    "t": st.integers(1, 4),
    "seed": SEEDS,
}


def tokens(rows: int, n: int, t: int, pooled: bool) -> Batch:
    return torch.randint(rows, (n, t)), torch.randint(CLASSES, (n,) if pooled else (n, t))


@given(**LOOKUPS, pooled=st.booleans())
def test_7_an_embedding_has_the_factors_of_a_linear_on_one_hot_rows(
    rows: int, width: int, padded: bool, n: int, t: int, seed: int, pooled: bool
) -> None:
    torch.manual_seed(seed)
    embedding, linear = lookups(rows, width, rows // 2 if padded else None, pooled)
    batch = tokens(rows, n, t, pooled)
    found, expected = empirical(embedding, batch), empirical(linear, batch)
    assert found["1"].a.shape == (1, rows)  # its diagonal, never a matrix
    for name in expected:
        close([block(found[name])], [block(expected[name])])
    counts = torch.bincount(batch[0].flatten(), minlength=rows).double() / (n * t)
    if padded:
        counts[rows // 2] = 0
    close([found["1"].a[0]], [counts])


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("pooled", [False, True])
@given(**LOOKUPS)
def test_7_an_embedding_takes_the_steps_of_a_linear_on_one_hot_rows(
    solver: str, pooled: bool, rows: int, width: int, padded: bool, n: int, t: int, seed: int
) -> None:
    """Solves, relative damping and the clip included."""
    torch.manual_seed(seed)
    pair = lookups(rows, width, rows // 2 if padded else None, pooled)
    options = {"solver": solver, "relative_damping": True, "damping": 0.5, "kl_clip": 1e-3}
    optimizers = [make(KAISA, model, momentum=0.9, **options) for model in pair]
    for _ in range(3):
        batch = tokens(rows, n, t, pooled)
        for model, optimizer in zip(pair, optimizers, strict=True):
            take(model, optimizer, batch)
        found, expected = (list(model.parameters()) for model in pair)
        close([found[0].T, *found[1:]], expected, rtol=1e-8)


def test_7_one_token_is_exact() -> None:
    """Invariant 1, of an embedding."""
    model = ZOO["language_model"].model()
    x = torch.tensor([[4]])
    found = exact(model, x, "categorical")["0"]
    close([block(found)], [ref.exact_fisher(model, x, "categorical", "0")])


@given(seed=SEEDS)
def test_7_not_a_linear_on_the_token_numbers_of_others(seed: int) -> None:
    """Other tokens, other counts: the diagonal is seen."""
    torch.manual_seed(seed)
    model = ZOO["language_model"].model()
    x, y = ZOO["language_model"].batch(8, seed=seed)
    other = (x + 1) % 6
    counts = [torch.bincount(each.flatten(), minlength=6) for each in (x, other)]
    assume(not torch.equal(*counts))
    found, moved = (empirical(model, (each, y))["0"].a for each in (x, other))
    assert error(moved, found) > 1e-3


# Every layer of the zoo, so that no kind is left out of the above.


@pytest.mark.parametrize("name", FACTORED)
def test_factors_of_every_model_are_those_of_the_reference(name: str) -> None:
    case = FACTORED[name]
    plain, batch = case.reference.model(), case.batch()
    for approx in ("expand", "reduce"):
        found = empirical(case.model(), batch, case.loss, kfac_approx=approx)
        for layer, kronecker in found.items():
            expected = ref.empirical_factors(plain, *batch, case.loss, layer, approx)
            close(kronecker.matrices(F64), expected)
            close([block(kronecker)], [ref.block(*expected)])
