"""The references against each other, and against numbers that can be checked by hand.

Numbers in names are the lines of the invariants they instantiate: see `reference` for conventions.
"""

from __future__ import annotations

from functools import partial

import pytest
import reference as ref
import torch
from models import ZOO
from reference import cross_entropy, half_squared_error
from torch import Tensor, nn
from torch.nn import functional

F64 = torch.float64

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=F64)


def layers_of(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}


# Curvature.


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_fisher_is_ggn(likelihood: ref.Likelihood) -> None:
    """Natural parameters: the Fisher is the GGN; of the last layer, it is the Hessian."""
    model, (x, y) = ZOO["mlp"].model(), ZOO["mlp"].batch(5)
    targets = functional.one_hot(y, 3).to(F64)
    loss, target = {
        "categorical": (cross_entropy, y),
        "gaussian": (half_squared_error, targets),
        "bernoulli": (
            lambda z, t: 3 * functional.binary_cross_entropy_with_logits(z, t),
            targets,
        ),
    }[likelihood]
    fisher = ref.exact_fisher(model, x, likelihood, "0", "2", "4")
    close(fisher, ref.ggn(model, x, target, loss, "0", "2", "4"))
    close(fisher[-21:, -21:], ref.hessian(model, x, target, loss, "4"))


def test_empirical_fisher_by_hand() -> None:
    """s = w x, ½(y − s)²: ∇ = (s − y) x; here −2·1 and 4·2."""
    model = nn.Linear(1, 1, bias=False, dtype=F64)
    nn.init.constant_(model.weight, 2.0)
    x, y = torch.tensor([[1.0], [2.0]], dtype=F64), torch.tensor([[4.0], [0.0]], dtype=F64)
    fisher = ref.empirical_fisher(model, x, y, half_squared_error, "")
    close(fisher, torch.tensor([[(4.0 + 64.0) / 2]], dtype=F64))
    A, G = ref.empirical_factors(nn.Sequential(model), x, y, half_squared_error, "0")
    close(A, torch.tensor([[[(1.0 + 4.0) / 2]]], dtype=F64))
    close(G, torch.tensor([[[(4.0 + 16.0) / 2]]], dtype=F64))


# Factors against exact blocks.


@pytest.mark.parametrize("name", ["mlp", "mlp_no_bias"])
def test_1_one_example_is_exact(name: str) -> None:
    model, (x, y) = ZOO[name].model(), ZOO[name].batch(1)
    for layer in layers_of(model, nn.Linear):
        factors = ref.empirical_factors(model, x, y, cross_entropy, layer)
        close(ref.block(*factors), ref.empirical_fisher(model, x, y, cross_entropy, layer))


# Training.


def test_one_step_by_hand() -> None:
    """w = 2, x = 3, y = 0: s = 6, ∇ = 18, A = 9, G = 36; γ = 36 so P = 18 / 360 = 1/20."""
    x, y = torch.tensor([[3.0]], dtype=F64), torch.tensor([[0.0]], dtype=F64)
    for kl_clip, nu in [(None, 1.0), (0.225, 0.5)]:  # lr² P ∇ = 0.9
        model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=F64))
        nn.init.constant_(model[0].weight, 2.0)
        kfac = ref.ReferenceKFAC(
            model, lr=1.0, damping=36.0, kl_clip=kl_clip, loss=half_squared_error
        )
        (vector,) = kfac.trajectory([(x, y)])
        close(vector, torch.tensor([2 - nu / 20], dtype=F64))
