"""The references against each other, and against numbers that can be checked by hand.

Numbers in names are the lines of the invariants they instantiate: see `reference` for conventions.
"""

from __future__ import annotations

from functools import partial

import reference as ref
import torch
from reference import half_squared_error
from torch import nn

F64 = torch.float64

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


# Curvature.


def test_the_empirical_fisher_equals_a_computation_by_hand() -> None:
    """s = w x, ½(y − s)²: ∇ = (s − y) x; here −2·1 and 4·2."""
    model = nn.Linear(1, 1, bias=False, dtype=F64)
    nn.init.constant_(model.weight, 2.0)
    x = torch.tensor([[1.0], [2.0]], dtype=F64)
    y = torch.tensor([[4.0], [0.0]], dtype=F64)
    fisher = ref.empirical_fisher(model, x, y, half_squared_error, "")
    close(fisher, torch.tensor([[(4.0 + 64.0) / 2]], dtype=F64))
    A, G = ref.empirical_factors(nn.Sequential(model), x, y, half_squared_error, "0")
    close(A, torch.tensor([[[(1.0 + 4.0) / 2]]], dtype=F64))
    close(G, torch.tensor([[[(4.0 + 16.0) / 2]]], dtype=F64))


def test_one_step_equals_a_computation_by_hand() -> None:
    """w = 2, x = 3, y = 0: s = 6, ∇ = 18, A = 9, G = 36; γ = 36 so P = 18 / 360 = 1/20."""
    x = torch.tensor([[3.0]], dtype=F64)
    y = torch.tensor([[0.0]], dtype=F64)
    for kl_clip, nu in [(None, 1.0), (0.225, 0.5)]:  # lr² P ∇ = 0.9
        model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=F64))
        nn.init.constant_(model[0].weight, 2.0)
        kfac = ref.ReferenceKFAC(
            model, lr=1.0, damping=36.0, kl_clip=kl_clip, loss=half_squared_error
        )
        (vector,) = kfac.trajectory([(x, y)])
        close(vector, torch.tensor([2 - nu / 20], dtype=F64))
