"""The sampled Fisher against its expectation over all labels: invariant 14.

The numbers in names are those of the invariants.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from blocks import close, empirical, error, network
from contract import factors, make
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO
from torch import Tensor, nn
from torch.nn import functional

from second_order import KAISA
from second_order.kronecker.fisher import sampled_loss

if TYPE_CHECKING:
    from reference import Likelihood

F64 = torch.float64
SEEDS = st.integers(0, 2**16)
LIKELIHOODS: list[Likelihood] = ["categorical", "bernoulli", "gaussian"]


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
