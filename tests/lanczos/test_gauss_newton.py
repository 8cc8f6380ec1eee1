"""Products of Gauss-Newton and empirical Fisher matrices, against the dense ones.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO
from reference import cross_entropy, empirical_fisher, ggn
from reference import hessian as dense_hessian
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from second_order.errors import CurvatureError
from second_order.lanczos import Hessian, Outputs, eigenpairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


MLP = ZOO["mlp"]
EXACT = ["retained", "recomputed"]
MODES = [*EXACT, "differences"]
KINDS = ["gauss-newton", "empirical-fisher"]
few = settings(max_examples=15, deadline=None)


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss an example."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def outputs_of(name: str, size: int = 6) -> tuple[nn.Module, Callable[[], Outputs]]:
    """A model, and its outputs on a batch with their loss."""
    case = ZOO[name]
    model, (x, y) = case.model(), case.batch(size)
    return model, lambda: Outputs(model(x), lambda z: case.loss(z, y))


def matrix(
    closures: Any, params: Iterable[Tensor], curvature: Any = "gauss-newton", mode: Any = "auto"
) -> Tensor:
    """All of it, a product with each unit vector."""
    params = list(params)
    with Hessian(closures, params, mode=mode, curvature=curvature) as H:
        columns = [H.product(v) for v in torch.eye(H.size, dtype=torch.float64)]
        return torch.stack(columns, 1) / H.examples


def assert_close(actual: Tensor, expected: Tensor, mode: str = "retained") -> None:
    rtol = 1e-7 if mode == "differences" else 1e-12
    torch.testing.assert_close(actual, expected, rtol=0, atol=rtol * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name", ["mlp", "attention", "embedding", "tied", "batch_norm", "shared_linear", "lora"]
)
def test_gauss_newton_is_the_dense_one(name: str) -> None:
    """In each mode, over frozen and tied weights; and it is not the Hessian."""
    case = ZOO[name]
    model, closure = outputs_of(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    x, y = case.batch(6)
    twin = copy.deepcopy(model)
    with sdpa_kernel(SDPBackend.MATH):
        flags = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
        expected = ggn(twin, x, y, case.loss)[flags][:, flags]
        hessian = dense_hessian(twin, x, y, case.loss)[flags][:, flags]
    V = torch.randn(len(expected), 3, dtype=torch.float64)
    for mode in MODES:
        with Hessian(closure, trained, mode=mode, curvature="gauss-newton") as G:  # type: ignore[arg-type]
            found = torch.stack([G.product(v) for v in V.T], 1)
            loss = float(G.loss)
        assert_close(found, expected @ V, mode)
        assert loss == pytest.approx(float(case.loss(twin(x), y).detach()))
    assert float((hessian - expected).abs().max()) > 1e-3 * float(expected.abs().max())
    assert_close(matrix(closure, trained, "hessian"), hessian)  # of Outputs, too


@pytest.mark.parametrize("mode", MODES)
def test_empirical_fisher_is_the_mean_of_outer_products(mode: str) -> None:
    model, (x, y) = MLP.model(), MLP.batch(6)
    expected = empirical_fisher(model, x, y, cross_entropy)
    found = matrix(
        lambda: Outputs(model(x), lambda z: each(z, y)),
        model.parameters(), "empirical-fisher", mode,
    )  # fmt: skip
    assert_close(found, expected, mode)
    assert float((ggn(model, x, y, cross_entropy) - expected).abs().max()) > 0.01


@few
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=3),
    st.sampled_from(MODES), st.sampled_from(KINDS), st.booleans(),
)  # fmt: skip
def test_micro_batches_are_one_batch(sizes: list[int], mode: str, kind: str, counted: bool) -> None:
    """Weighted by their examples, told or seen from the number of losses."""
    model, (x, y) = MLP.model(), MLP.batch(sum(sizes))
    params = list(model.parameters())[-2:]
    whole = matrix(lambda: Outputs(model(x), lambda z: each(z, y)), params, kind)

    def closure(x: Tensor, y: Tensor) -> Callable[[], Any]:
        if not counted:
            return lambda: Outputs(model(x), lambda z: each(z, y))
        loss = cross_entropy if kind == "gauss-newton" else each
        return lambda: (Outputs(model(x), lambda z: loss(z, y)), len(y))

    parts = [closure(*part) for part in zip(x.split(sizes), y.split(sizes), strict=True)]
    assert_close(matrix(parts, params, kind, mode), whole, mode)


@few
@given(
    st.integers(0, 999), st.integers(1, 4), st.floats(0.1, 3.0), st.sampled_from(KINDS),
    st.sampled_from(["classes", "numbers"]),
)  # fmt: skip
def test_no_eigenvalue_is_negative(
    seed: int, examples: int, scale: float, kind: str, task: str
) -> None:
    """Whatever the weights; of the Hessian some are, at most of these points."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    x = torch.randn(examples, 3).double()
    y = torch.randint(3, (examples,)) if task == "classes" else torch.randn(examples, 3).double()

    def loss(z: Tensor) -> Tensor:
        return each(z, y) if task == "classes" else (z - y).square().sum(1)

    G = matrix(lambda: Outputs(model(x), loss), model.parameters(), kind)
    values = torch.linalg.eigvalsh(G)
    assert float(values[0]) >= -1e-9 * max(float(values[-1]), 1e-300)
    assert_close(G.T, G)


def test_of_the_hessian_some_are_negative() -> None:
    """Control, at the same network."""
    model, closure = outputs_of("mlp")
    values = torch.linalg.eigvalsh(matrix(closure, model.parameters(), "hessian"))
    assert float(values[0]) < -0.01 * float(values[-1])
    found = eigenpairs(closure, model, smallest=2, largest=1, curvature="gauss-newton")
    assert float(found.eigenvalues[1:].min()) > -1e-9


@pytest.mark.parametrize("mode", MODES)
def test_several_outputs(mode: str) -> None:
    """A tuple as one tensor; one of them is constant, and one is a function of another."""
    model, (x, y) = MLP.model(), MLP.batch(6)
    body, head = model[:3], model[3:]

    def closure() -> Outputs:
        hidden = body(x)
        return Outputs(
            (head(hidden), x, hidden),
            lambda z: cross_entropy(z[0], y) + (z[2] * z[1][:, :1]).square().mean(),
        )

    def joined() -> Outputs:
        hidden = body(x)
        z = torch.cat([head(hidden), hidden], 1)
        return Outputs(
            z, lambda z: cross_entropy(z[:, :3], y) + (z[:, 3:] * x[:, :1]).square().mean()
        )

    expected = matrix(joined, model.parameters())
    assert_close(matrix(closure, model.parameters(), mode=mode), expected, mode)


# What cannot be done is said, with what to do.


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def test_outputs_that_cannot_be_differentiated_twice_are_by_differences() -> None:
    model, x = nn.Linear(4, 3).double(), torch.randn(7, 4).double()
    closure = lambda: Outputs(Cube.apply(model(x)), lambda z: z.square().mean())  # noqa: E731
    plain = lambda: Outputs(model(x) ** 3, lambda z: z.square().mean())  # noqa: E731
    with pytest.raises(CurvatureError, match=r"(?s)Function Cube.*hvp=\"differences\""):
        eigenpairs(closure, model, largest=1, curvature="gauss-newton")
    found = matrix(closure, model.parameters(), mode="differences")
    assert_close(found, matrix(plain, model.parameters()), "differences")
    above = lambda: Outputs(model(x), lambda z: Cube.apply(z).mean())  # noqa: E731
    with pytest.raises(CurvatureError, match="Function Cube"):
        eigenpairs(above, model, largest=1, curvature="gauss-newton", hvp="differences")


BAD = [
    (lambda z: z.square().mean(), "gauss-newton", r"tensor of shape \(\)", r"Outputs\(model\(x\)"),
    (lambda z: (z.mean(), 3), "empirical-fisher", r"tensor of shape \(\)", "reduction=.none"),
    (lambda z: None, "gauss-newton", "NoneType", "Outputs"),
    (lambda z: Outputs(z.detach(), torch.mean), "gauss-newton", "without a graph", "no_grad"),
    (lambda z: Outputs({"z": z}, torch.mean), "gauss-newton", "Outputs of a dict", "tuple"),
    (lambda z: Outputs(z, lambda z: z), "gauss-newton", r"shape \(7, 3\)", "mean"),
    (lambda z: Outputs(z, lambda z: "x"), "gauss-newton", "returned a str", "scalar"),
    (lambda z: Outputs(z, torch.mean), "empirical-fisher", r"is a tensor of shape \(\)", "vector"),
    (lambda z: (Outputs(z, torch.mean), 0), "gauss-newton", "0 examples", "at least one"),
]


@pytest.mark.parametrize(("function", "curvature", "problem", "remedy"), BAD)
def test_errors_say_what_and_how(function: Any, curvature: Any, problem: str, remedy: str) -> None:
    model, x = nn.Linear(4, 3).double(), torch.randn(7, 4).double()
    for mode in ("retained", "differences"):
        with pytest.raises(CurvatureError, match=f"(?s){problem}.*{remedy}"):
            eigenpairs(lambda: function(model(x)), model, largest=1, curvature=curvature, hvp=mode)
    assert all(p.grad is None for p in model.parameters())
