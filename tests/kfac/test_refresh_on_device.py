"""A refresh synchronizes with a device once, and has the same results as on the CPU."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from fake_device import NAME, pretend_device
from loss_terms import WIDTH, Attention, B, Causal, Experts, T, labels, mlp, normal, seeded
from optimizer_cases import factors, make
from separate_process import found_by
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from second_order import KAISA
from second_order.kronecker import statistics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pool import Forks

STEPS = 10
BAD = 6  # the step of a fault
SIZES = 3  # of factors
DRIFT: dict[str, Any] = {"inv_update_steps": "auto"}
EVERY: dict[str, Any] = {"inv_update_steps": 3, "factor_update_steps": 1}
CASES: dict[str, dict[str, Any]] = {
    "inverse by drift, valid": {"net": "valid", **DRIFT},
    "inverse by drift, bad": {"net": "bad", **DRIFT},
    "inverse by drift, climbing": {"net": "climbing", **DRIFT},
    "inverse, dead": {"net": "dead", **EVERY},
    "inverse, bad": {"net": "bad", **EVERY},
    "eigen by drift, bad": {"net": "bad", "solver": "eigen", **DRIFT},
}


class Net(nn.Module):
    """Factors of three sizes. A dead layer has captured pairs, and no examples."""

    def __init__(self, dead: bool) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.first = nn.Linear(6, 8, bias=False)
        self.head = nn.Linear(8, 3, bias=False)
        self.dead = dead

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for i, layer in enumerate(self.body):
            x = x + torch.tanh(layer(x)) * (0.0 if self.dead and i == 1 else 1.0)
        return self.head(x)


def first_fails(matrices: Tensor, native: Any = torch.linalg.cholesky_ex) -> Any:
    """The first of a batch is definite only in float64."""
    factors, info = native(matrices)
    if matrices.dtype == torch.float32:
        info[:1] = 1
    return factors, info


@contextmanager
def fault(net: str, factor: Tensor) -> Iterator[None]:
    """What goes wrong with a network: a factor that is not finite, or that needs a retry."""
    copied = factor.clone()
    if net == "bad":
        factor.fill_(torch.inf)
    native = torch.linalg.cholesky_ex
    routine = {"climbing": first_fails}.get(net, native)
    with patch.object(torch.linalg, "cholesky_ex", routine):
        yield
    factor.copy_(copied)


def trained(device: str, net: str, **options: Any) -> Iterator[Any]:
    """Yields before and after each step, and then the results."""
    torch.manual_seed(0)
    model = Net(net == "dead")
    x = torch.randn(STEPS, 16, 6)
    y = torch.randint(3, (STEPS, 16)).to(device)
    model = model.to(device)
    base: dict[str, Any] = {"base": torch.optim.SGD, "momentum": 0.9, "foreach": True}
    optimizer = KAISA(model, lr=0.05, **base, **options)
    x = x.to(device)
    plan = optimizer._curvature.plan  # type: ignore[attr-defined]
    for i in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(x[i]), y[i]).backward()
        yield None
        with fault(net, next(iter(plan)).stored("G")) if i == BAD else nullcontext():
            optimizer.step()
        yield None
    drift = optimizer._curvature.drift  # type: ignore[attr-defined]
    yield (
        [p.tolist() for p in model.parameters()],
        [(b.name, b.solved, b.no_statistics, b.failures) for b in plan],
        None if drift is None else [drift.interval(b) for b in plan],
    )


def main() -> None:
    """Print the device operations of each case, and its results on the device and on the CPU."""
    warnings.simplefilter("ignore")
    found = {}
    for name, arguments in CASES.items():
        requests: list[int] = []
        with pretend_device() as seen:
            for i, there in enumerate(trained(NAME, **arguments)):  # noqa: B007
                if i % 2:
                    requests.append(seen.syncs.total())
                seen.clear()
        *_, here = trained("cpu", **arguments)
        found[name] = requests, there, here
    found |= {ROWS: {name: row_difference(*arguments) for name, arguments in SEEN_ROWS.items()}}
    sys.stdout.write(json.dumps(found))


ROWS = "rows"
IGNORED = torch.tensor([0, 1, 2, 0, -100, -100])
SEEN_ROWS: dict[str, Any] = {
    "padding": (Causal, labels(2), {}),
    "prompts": (Causal, labels(2, 2), {}),
    "flat": (partial(Causal, True), labels(2, 2), {}),
    "reduced": (Causal, labels(2, 2), {"kfac_approx": "reduce"}),
    "norms": (Causal, labels(2, 2), {"precondition_norms": True}),
    "experts": (Experts, labels(2), {}),
    "attention": (Attention, labels(2, 1), {}),
    "hinge": (mlp, None, {}),
    "ignored": (mlp, IGNORED, {}),
}


def row_factors(device: str, net: Any, y: Tensor | None, options: dict[str, Any]) -> list[Tensor]:
    """All factors after two passes."""
    model = seeded(net).to(device)
    x = normal(*((B, WIDTH) if y is None or y.dim() == 1 else (B, T, WIDTH))).to(device)
    optimizer = make(KAISA, model, lr=0.0, foreach=True, **options)
    for scale in (1.0, 2.0):
        logits = model(scale * x)
        if y is None:
            margin = torch.arange(len(x)).sub(2).clamp_min(0).double().mul(10.0).to(device)
            loss = (1 - logits.sum(1) - margin).clamp_min(0.0).mean()
        else:
            loss = cross_entropy(logits.flatten(0, -2), y.to(device).flatten())
        loss.backward()
    optimizer.step()
    return [t.cpu().clone() for pair in factors(optimizer).values() for t in pair]


def row_difference(net: Any, y: Tensor | None, options: dict[str, Any]) -> float:
    """The largest difference from the CPU's factors, also if pairs are added early."""
    found = []
    for device, most in ((NAME, 2**26), (NAME, 2000), ("cpu", 0), ("cpu", 2**22)):
        there = pretend_device() if device == NAME else nullcontext()
        with patch.object(statistics, "max_queued_bytes", lambda _, most=most: most), there:
            found.append(row_factors(device, net, y, options))
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for other in found[:3]
        for a, b in zip(other, found[3], strict=True)
    )


@pytest.fixture(scope="module")
def found(forks: Forks) -> dict[str, Any]:
    cases: dict[str, Any] = found_by(forks, __file__)
    return cases


def test_the_same_rows_count_on_a_device(found: dict[str, Any]) -> None:
    """The device is not read during a pass. Pairs of many bytes are added before it ends."""
    assert max(found[ROWS].values()) < 1e-12, found[ROWS]


@pytest.mark.parametrize("name", CASES)
def test_a_refresh_gives_equal_results_on_a_device(found: dict[str, Any], name: str) -> None:
    _, (params, states, interval), (expected, expected_states, usual) = found[name]
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(torch.tensor(p), torch.tensor(q), rtol=1e-4, atol=1e-6)
    assert (states, interval) == (expected_states, usual)
    assert [solved for _, solved, *_ in states].count(False) == name.endswith("dead")


@pytest.mark.parametrize("name", CASES)
def test_a_refresh_synchronizes_with_the_device_once(found: dict[str, Any], name: str) -> None:
    """``eigh`` also waits once for each size of a factor, and a factor that fails for its retries.

    At the first two steps, the captured pairs are compared with the gradient, which waits as well.
    """
    requests = found[name][0]
    most = 1 + SIZES * name.startswith("eigen")
    fails = name.endswith(("bad", "climbing"))
    if not name.endswith("dead"):  # whose pairs are compared until they reproduce the gradient
        assert max(n for i, n in enumerate(requests) if i > 1 and not (fails and i == BAD)) == most
    if fails:
        assert requests[BAD] > most
    elif not name.endswith("dead"):
        assert requests[0] == most + 1


if __name__ == "__main__":
    main()
