"""The scale of preconditioned gradients: a Newton step's, or the gradient's."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import each_kronecker, make, take
from hypothesis import given
from hypothesis import strategies as st
from models import ZOO
from torch.optim import SGD, Adam, AdamW, Muon, RMSprop

from second_order import KAISA

if TYPE_CHECKING:
    from second_order import SecondOrderOptimizer

NAMES = "mlp", "conv", "embedding", "norms", "transformer"


def preconditioned(System: Any, name: str, scale: str, **options: Any) -> Any:
    """An optimizer whose last step has left preconditioned gradients, and its model."""
    case = ZOO[name]
    model = case.model()
    approx = {"kfac_approx": case.shared} if case.shared else {}
    chosen = {"preconditioner_scale": scale, "exact_blocks": True, **approx, **options}
    optimizer = make(System, model, lr=0.0, **chosen)
    for batch in case.batches(2, n=8):
        take(model, optimizer, batch, case.loss)
    return optimizer


@given(
    name=st.sampled_from(NAMES),
    solver=st.sampled_from(["eigen", "inverse"]),
    relative=st.booleans(),
    damping=st.floats(0.01, 10.0),
)
@each_kronecker
def test_the_gradients_scale_is_newtons_times_the_mean_damped_curvature(
    System: type[SecondOrderOptimizer], name: str, solver: str, relative: bool, damping: float
) -> None:
    options = {"solver": solver, "relative_damping": relative, "damping": damping}
    newton, scaled = (preconditioned(System, name, s, **options) for s in ("newton", "gradient"))
    blocks: Any = [each._curvature.layers.active for each in (newton, scaled)]
    assert blocks[0]
    for plain, other in zip(*blocks, strict=True):
        mean = plain.ensure_factors().mean_curvature()
        assert mean > 0
        times_mean = mean + damping * (mean if relative else 1.0)
        for p, q in zip(plain.params, other.params, strict=True):
            torch.testing.assert_close(q.grad, p.grad * times_mean, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@each_kronecker
def test_with_much_damping_the_bases_own_steps_are_left(
    System: type[SecondOrderOptimizer], solver: str
) -> None:
    """Even where gradients grow: Newton steps become the shorter then, and Adam remembers."""
    case = ZOO["mlp"]
    start, batches = case.model(), case.batches(6, n=8)

    def grown(step: int, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 3.0**step * case.loss(outputs, targets)

    def train(base: type[torch.optim.Optimizer], **options: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(start)
        if options:
            optimizer = make(System, model, base=base, lr=0.01, solver=solver, **options)
        else:
            optimizer = base(model.parameters(), lr=0.01)
        for step, batch in enumerate(batches):
            take(model, optimizer, batch, partial(grown, step))
        return [p.detach() for p in model.parameters()]

    alone = train(Adam)
    options = {"damping": 1e12, "relative_damping": True, "factor_decay": 0.5}
    ours = train(Adam, **options, preconditioner_scale="auto")
    torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-6)
    newton = train(Adam, **options, preconditioner_scale="newton")
    assert max(float((a - b).abs().max()) for a, b in zip(newton, alone, strict=True)) > 5e-3


@each_kronecker
def test_auto_follows_the_base(System: type[SecondOrderOptimizer]) -> None:
    for base, expected in ((SGD, "newton"), (Adam, "gradient"), (AdamW, "gradient")):
        optimizer: Any = System(ZOO["mlp"].model(), base=base, lr=0.1)
        assert optimizer._curvature._options.preconditioner_scale == expected
    optimizer = System(ZOO["mlp"].model(), base=RMSprop, lr=0.1, preconditioner_scale="newton")
    assert optimizer._curvature._options.preconditioner_scale == "newton"


def test_of_two_bases_the_first_is_asked() -> None:
    optimizer: Any = KAISA(ZOO["mlp"].model(), lr=0.1, base=Muon, rest=SGD)
    assert optimizer._curvature._options.preconditioner_scale == "gradient"
