"""The package's factors against exact curvature and formulas by hand: invariants 1 to 5, 7 and 14.

The numbers in names are those of the invariants. A block is `blocks.dense`: A ⊗ G as
the matrix that multiplies a layer's gradient, row after row, the rows being those of [weight bias].
"""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import reference as ref
import torch
from factor_checks import WIDTHS, block, close, dense, empirical, error, exact, network
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CLASSES, FACTORED, Pool
from optimizer_cases import factors, make, matrices
from reference import cross_entropy, half_squared_error
from torch import Tensor, nn
from torch.nn import functional

from second_order import KAISA
from second_order.kronecker.fisher import sampled_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reference import Batch, Likelihood


F64 = torch.float64
SEEDS = st.integers(0, 2**16)
LIKELIHOODS: list[Likelihood] = ["categorical", "bernoulli", "gaussian"]
CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]


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
    x = torch.randn(1, widths[0], dtype=F64)
    y = torch.randint(CLASSES, (1,))
    layers = exact(model, x, likelihood)
    assert len(layers) == len(widths) - 1
    for name, found in layers.items():
        close([block(found)], [ref.exact_fisher(model, x, likelihood, name)])
    for name, found in empirical(model, (x, y)).items():
        close([block(found)], [ref.empirical_fisher(model, x, y, cross_entropy, name)])


# 2. Deep linear network, squared loss, any batch: A ⊗ G = Fisher = GGN = the layer's Hessian.


@settings(max_examples=12)
@given(widths=WIDTHS, bias=st.booleans(), n=st.integers(1, 6), seed=SEEDS)
def test_2_deep_linear_with_squared_loss_is_exact(
    widths: list[int], bias: bool, n: int, seed: int
) -> None:
    model = network(widths, nn.Identity, bias, seed)
    x = torch.randn(n, widths[0], dtype=F64)
    y = torch.randn(n, 3, dtype=F64)
    for name, found in exact(model, x, "gaussian").items():
        for expected in (
            ref.exact_fisher(model, x, "gaussian", name),
            ref.ggn(model, x, y, half_squared_error, name),
            ref.hessian(model, x, y, half_squared_error, name),
        ):
            close([block(found)], [expected])


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


# 5. A convolution whose kernel covers its input = the Linear on the flattened input.


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
    x = torch.randn(n, c_in, *kernel, dtype=F64)
    y = torch.randint(CLASSES, (n,))
    found = empirical(model, (x, y), kfac_approx=approx)
    expected = empirical(flat, (x, y), kfac_approx=approx)
    for own, its in [("0", "1"), ("3", "3")]:
        close(found[own].stored.values(), expected[its].stored.values())


def test_1_and_5_a_grouped_convolution_of_one_location_is_exact_within_its_groups() -> None:
    conv = nn.Conv2d(4, 6, (3, 2), groups=2)
    model = nn.Sequential(conv, nn.Flatten(), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(1, 4, 3, 2, dtype=F64)
    found = exact(model, x, "categorical")["0"]
    fisher = ref.exact_fisher(model, x, "categorical", "0")
    assert dense(found).shape == (2, 3 * 13, 3 * 13)
    within = torch.block_diag(torch.ones(39, 39), torch.ones(39, 39))
    close([block(found)], [fisher * within])
    assert error(block(found), fisher) > 0.05


# 7. Embedding = the Linear on one-hot rows.


class OneHot(nn.Module):
    """Rows of the identity; zeros for the padding index, as an embedding treats it."""

    def __init__(self, rows: int, padding: int | None) -> None:
        super().__init__()
        self.rows = rows
        self.padding = padding

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
    found = empirical(embedding, batch)
    expected = empirical(linear, batch)
    assert found["1"].stored["A"].shape == (1, rows)  # its diagonal, never a matrix
    for name in expected:
        close([block(found[name])], [block(expected[name])])
    counts = torch.bincount(batch[0].flatten(), minlength=rows).double() / (n * t)
    if padded:
        counts[rows // 2] = 0
    close([found["1"].stored["A"][0]], [counts])


# Every layer of the zoo, so that no kind is left out of the above.


@pytest.mark.parametrize("name", FACTORED)
def test_factors_of_every_model_equal_the_reference(name: str) -> None:
    case = FACTORED[name]
    plain = case.reference.model()
    batch = case.batch()
    for approx in ("expand", "reduce"):
        found = empirical(case.model(), batch, case.loss, kfac_approx=approx)
        for layer, kronecker in found.items():
            expected = ref.empirical_factors(plain, *batch, case.loss, layer, approx)
            close(matrices(kronecker), expected)
            close([block(kronecker)], [ref.block(*expected)])


def joint_labels(likelihood: Likelihood, n: int, outputs: int) -> list[Tensor]:
    """All the ways to label n examples: class numbers, or a zero or one for every output."""
    if likelihood == "categorical":
        return [torch.tensor(labels) for labels in itertools.product(range(outputs), repeat=n)]
    bits = itertools.product((0.0, 1.0), repeat=n * outputs)
    return [torch.tensor(labels, dtype=F64).view(n, outputs) for labels in bits]


def negative_log_likelihood(likelihood: Likelihood, labels: Tensor, outputs: Tensor) -> Tensor:
    """Summed, as the sampled Fisher requires."""
    if likelihood == "categorical":
        return functional.cross_entropy(outputs, labels, reduction="sum")
    return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@settings(max_examples=4)
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
        optimizer = make(KAISA, model, lr=0.0, fisher=loss)
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


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_14_labels_are_sampled_from_the_models_distribution(likelihood: Likelihood) -> None:
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
