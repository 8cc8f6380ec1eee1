"""Hessian-vector products: against closed forms and dense Hessians, and traceless for training.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO
from reference import cross_entropy, empirical_fisher, ggn, half_squared_error
from reference import hessian as dense_hessian
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from second_order.errors import CurvatureError
from second_order.lanczos import Hessian, Outputs, eigenpairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


EXACT = ["retained", "recomputed"]
MODES = [*EXACT, "differences"]
MLP = ZOO["mlp"]
few = settings(max_examples=15, deadline=None)


def products(
    loss_fns: Any,
    params: Iterable[Tensor],
    V: Tensor,
    mode: Any = "auto",
    curvature: Any = "hessian",
) -> Tensor:
    """H V."""
    with Hessian(loss_fns, list(params), mode=mode, curvature=curvature) as H:
        columns = [H.product(v) for v in V.T]
        return torch.stack(columns, 1) / H.examples


def hessian(
    loss_fns: Any, params: Iterable[Tensor], mode: Any = "auto", dtype: torch.dtype = torch.float64
) -> Tensor:
    """All of it, a product with each unit vector."""
    params = list(params)
    size = sum(p.numel() for p in params)
    return products(loss_fns, params, torch.eye(size, dtype=dtype), mode)


def matrix(
    closures: Any, params: Iterable[Tensor], curvature: Any = "gauss-newton", mode: Any = "auto"
) -> Tensor:
    """All of another one."""
    params = list(params)
    size = sum(p.numel() for p in params)
    return products(closures, params, torch.eye(size, dtype=torch.float64), mode, curvature)


def probes(params: Iterable[Tensor]) -> Tensor:
    """Four random vectors, as columns."""
    return torch.randn(sum(p.numel() for p in params), 4, dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor, mode: str = "retained", rtol: float = 0) -> None:
    """To rounding for exact modes; relative to the largest element."""
    rtol = rtol or (1e-6 if mode == "differences" else 1e-11)
    torch.testing.assert_close(actual, expected, rtol=0, atol=rtol * float(expected.abs().max()))


def loss_of(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model and its loss on a batch."""
    case = ZOO[name]
    model = case.model()
    (x, y) = case.batch(8)
    return model, lambda: case.loss(model(x), y)


# What the products are.


@few
@given(
    st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99),
    st.sampled_from(MODES),
)  # fmt: skip
def test_products_equal_closed_forms(
    examples: int, inputs: int, outputs: int, seed: int, mode: str
) -> None:
    """Of linear, logistic and softmax regression, the first two with a bias."""
    torch.manual_seed(seed)
    x = torch.randn(examples, inputs).double()
    rows = torch.cat([x, torch.ones(examples, 1)], 1)  # weight, then bias
    one = nn.Linear(inputs, 1).double()
    many = nn.Linear(inputs, outputs, bias=False).double()

    y = torch.randn(examples, 1).double()
    linear = hessian(lambda: functional.mse_loss(one(x), y), one.parameters(), mode)
    assert_close(linear, 2 * rows.T @ rows / examples, mode)

    y = torch.randint(2, (examples, 1)).double()
    logistic = functional.binary_cross_entropy_with_logits
    p = one(x).sigmoid().detach()
    expected = rows.T @ (p * (1 - p) * rows) / examples
    assert_close(hessian(lambda: logistic(one(x), y), one.parameters(), mode), expected, mode, 1e-6)

    labels = torch.randint(outputs, (examples,))
    p = many(x).softmax(1).detach()
    expected = torch.zeros(many.weight.numel(), many.weight.numel()).double()
    for q, r in zip(p, x, strict=True):
        curvature = torch.diag(q) - torch.outer(q, q)
        expected += torch.kron(curvature, torch.outer(r, r)) / examples
    softmax = hessian(lambda: cross_entropy(many(x), labels), many.parameters(), mode)
    torch.testing.assert_close(softmax, expected, rtol=1e-6, atol=1e-7)


SMOOTH = ["mlp", "conv_grouped", "conv_circular", "norms", "attention", "embedding", "tied"]
EVERY = [*SMOOTH, "batch_norm", "transformer", "unused", "lora", "shared_linear", "inplace"]


@pytest.mark.parametrize("name", EVERY)
def test_every_kind_of_layer_has_the_dense_hessian(name: str) -> None:
    """In each mode; with kinks and with unused parameters too, whose rows are zero."""
    case = ZOO[name]
    model, loss = loss_of(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        expected = dense_hessian(copy.deepcopy(model), *case.batch(8), case.loss)
    flags = [torch.full((p.numel(),), p.requires_grad) for p in model.parameters()]
    V = probes(trained)
    expected = expected[torch.cat(flags)][:, torch.cat(flags)] @ V
    retained = products(loss, trained, V, "retained")
    assert_close(retained, expected)
    assert torch.equal(products(loss, trained, V, "recomputed"), retained)
    if name in SMOOTH:
        assert_close(products(loss, trained, V, "differences"), expected, "differences")
    if name == "unused":
        start = sum(p.numel() for p in model.get_submodule("first").parameters())
        stop = start + sum(p.numel() for p in model.get_submodule("unused").parameters())
        assert not retained[start:stop].any()


def test_recurrent_layers_are_supported() -> None:
    lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True).double()
    head = nn.Linear(4, 2).double()
    x = torch.randn(5, 6, 3).double()
    y = torch.randn(5, 2).double()
    inside = []

    def loss() -> Tensor:
        outputs = lstm(x)[0]
        inside.append(torch.backends.cudnn.enabled)
        return half_squared_error(head(outputs[:, -1]), y)

    params = [*lstm.parameters(), *head.parameters()]
    V = probes(params)
    HV = products(loss, params, V)
    assert_close(V.T @ HV, (V.T @ HV).T)
    assert_close(products(loss, params, V, "differences"), HV, "differences")
    assert inside == [False] * len(inside)
    assert torch.backends.cudnn.enabled


@few
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from(MODES))
def test_micro_batches_equal_one_batch(sizes: list[int], mode: str) -> None:
    """By their counts of examples; without the counts they weigh the same, which is not it."""
    model = MLP.model()
    (x, y) = MLP.batch(sum(sizes))
    params = list(model.parameters())
    V = probes(params)
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    means = [lambda x=x, y=y: cross_entropy(model(x), y) for x, y in parts]
    pairs = [lambda f=f, y=y: (f(), len(y)) for f, (_, y) in zip(means, parts, strict=True)]
    expected = products(lambda: cross_entropy(model(x), y), params, V)
    assert_close(products(pairs, params, V, mode), expected, mode)
    if len(set(sizes)) > 1:
        unweighted = products(means, params, V, mode)
        with pytest.raises(AssertionError):
            assert_close(unweighted, expected, mode)


@pytest.mark.parametrize(
    ("dtype", "mode", "rtol"),
    [
        (torch.float32, "retained", 1e-5),
        (torch.float32, "differences", 5e-3),
        (torch.bfloat16, "retained", 0.05),
        (torch.bfloat16, "recomputed", 0.05),
    ],
)
def test_parameters_can_have_any_dtype(dtype: torch.dtype, mode: str, rtol: float) -> None:
    """Products are in the dtype of the vector."""
    model = MLP.model().to(dtype)
    (x, y) = MLP.batch(8)
    reference = copy.deepcopy(model).double()
    expected = hessian(lambda: cross_entropy(reference(x), y), reference.parameters())
    H = hessian(
        lambda: cross_entropy(model(x.to(dtype)), y), model.parameters(), mode, torch.float32
    )
    assert H.dtype == torch.float32
    assert_close(H.double(), expected, rtol=rtol)


def test_differences_under_autocast_take_a_step_for_its_dtype() -> None:
    """A step for float32 would divide the rounding of bfloat16 by a number that is too small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    x = torch.randn(32, 8)
    y = torch.randint(3, (32,))
    V = torch.randn(sum(p.numel() for p in model.parameters()), 4)

    def in_mode(mode: Any) -> Tensor:
        return products(lambda: cross_entropy(model(x), y), model.parameters(), V, mode)

    expected = in_mode("retained")
    with torch.autocast("cpu", torch.bfloat16):
        found = in_mode("differences")
    assert float((found - expected).norm()) < 0.3 * float(expected.norm())


# What is random or remembered stays the same for all products.


class Noisy(nn.Module):
    """Dropout, a part of it inside a checkpoint if wanted."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5))
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        middle = partial(checkpoint, self.middle, use_reentrant=False)
        return self.head((middle if self.checkpointed else self.middle)(x))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_frozen(checkpointed: bool, mode: str) -> None:
    """And what a checkpoint recomputes is what was dropped before; another seed drops others."""
    torch.manual_seed(1)
    model = Noisy(checkpointed).double()
    plain = Noisy(False).double()
    plain.load_state_dict(model.state_dict())
    x, y = MLP.batch(8)
    H = hessian(lambda: cross_entropy(model(x), y), model.parameters(), mode)
    assert_close(H.T, H, mode)
    with Hessian(lambda: cross_entropy(model(x), y), list(model.parameters()), mode=mode) as twice:
        v = torch.randn(twice.size).double()
        assert torch.equal(twice.product(v), twice.product(v))
    expected = hessian(lambda: cross_entropy(plain(x), y), plain.parameters())
    assert_close(H, expected, mode)
    torch.manual_seed(2)
    other = hessian(lambda: cross_entropy(plain(x), y), plain.parameters())
    assert float((other - expected).abs().max()) > 0.1 * float(expected.abs().max())


def test_buffers_are_restored_at_each_evaluation() -> None:
    """Spectral norm's power iteration, a constant for autograd, advances at each forward pass."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh()).double()
    x = torch.randn(7, 5).double()

    def loss() -> Tensor:
        return model(x).square().mean()

    v = probes(model.parameters())[:, :1]
    expected, differences = (
        products(loss, model.parameters(), v, mode) for mode in ("retained", "differences")
    )
    repeated = v.expand(-1, 3)
    assert torch.equal(
        products(loss, model.parameters(), repeated, "recomputed"), expected.expand(-1, 3)
    )
    assert torch.equal(
        products(loss, model.parameters(), repeated, "differences"), differences.expand(-1, 3)
    )
    model(x)
    assert not torch.equal(products(loss, model.parameters(), v), expected)


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


def half_mean_square(outputs: Tensor) -> Tensor:
    return 0.5 * outputs.square().mean()


def freed(outputs: Tensor) -> Tensor:
    loss = outputs.square().mean()
    loss.backward()
    return loss


def ctc(outputs: Tensor) -> Tensor:
    targets = torch.ones(1, 2, dtype=torch.long)
    lengths = torch.tensor([len(outputs)])
    return functional.ctc_loss(
        outputs.log_softmax(-1)[:, None], targets, lengths, torch.tensor([2])
    )


def recomputed(outputs: Tensor) -> Tensor:
    return checkpoint(torch.tanh, outputs, use_reentrant=True).square().mean()


NOT_TWICE = [
    (ctc, "no derivative of .*_ctc_loss_backward", "replace the operation"),
    (lambda z: Cube.apply(z).square().mean(), "Function Cube", "differentiable operations"),
    # Linear in it: torch's own second derivative is 0, without an error.
    (lambda z: Cube.apply(z).mean(), "Function Cube", "differentiable operations"),
]
NOT_ONCE = [
    (freed, "already been freed", "without calling backward"),
    (lambda z: z, r"shape \(7, 3\)", "mean or its sum"),
    (lambda z: "loss", "returned a str", "scalar tensor"),
    (lambda z: z.square().mean().detach(), "without a graph", "do not detach"),
    (lambda z: (z.square().mean(), 0), r"the pair \(loss, 0\)", "at least one"),
    (lambda z: (z.square().mean(), z.detach()), r"the pair \(loss, a Tensor\)", "loss alone"),
    (recomputed, "reentrant", "use_reentrant=False"),
]


@pytest.mark.parametrize(("function", "problem", "remedy"), [*NOT_TWICE, *NOT_ONCE])
@pytest.mark.parametrize("mode", MODES)
def test_errors_give_the_reason_and_the_remedy(
    mode: str, function: Callable[[Tensor], Any], problem: str, remedy: str
) -> None:
    """Differences of gradients need one derivative only."""
    model = nn.Linear(4, 3).double()
    x = torch.randn(7, 4).double()

    def loss() -> Any:
        return function(model(x))

    if mode == "differences" and (function, problem, remedy) in NOT_TWICE:
        H = hessian(loss, model.parameters(), mode)
        assert float(H.abs().max()) > 1e-3
        assert_close(H.T, H, rtol=1e-5)
        return
    with pytest.raises(CurvatureError, match=f"(?s){problem}.*{remedy}") as caught:
        eigenpairs(loss, model, largest=1, hvp=mode)
    once = (function, problem, remedy) in NOT_ONCE
    assert once or 'hvp="differences"' in str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_raise(mode: Any) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    tokens = torch.tensor([0, 3, 1])
    with pytest.raises(CurvatureError, match=r"sparse gradient.*use sparse=False"):
        eigenpairs(lambda: model(tokens).square().sum(), model, largest=1, hvp=mode)


@pytest.mark.parametrize("mode", MODES)
def test_products_outside_of_the_context_raise(mode: Any) -> None:
    w = nn.Parameter(torch.ones(2).double())
    v = torch.ones(2).double()
    H = Hessian(lambda: w.square().sum(), [w], mode=mode)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="outside of its context; write: with hessian"):
            H.product(v)
        with H:
            torch.testing.assert_close(H.product(v), 2 * v)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("loss", [torch.mean, half_mean_square])
def test_compiled_modules_are_supported(loss: Callable[[Tensor], Tensor]) -> None:
    """Where the loss is linear in what they compute, torch alone gives no error but zeros."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    x = torch.randn(7, 4)
    compiled = torch.compile(model, backend="aot_eager")

    def eigenvalues(f: Any, mode: Any) -> Tensor:
        return eigenpairs(lambda: loss(f(x)), model, largest=1, hvp=mode).eigenvalues

    with pytest.raises(CurvatureError, match=r"torch\.compile.*uncompiled"):
        eigenvalues(compiled, "retained")
    found = eigenvalues(compiled, "differences")
    expected = eigenvalues(model, "retained")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


# Other matrices: Gauss-Newton and the empirical Fisher, of outputs and their loss.

KINDS = ["gauss-newton", "empirical-fisher"]


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss an example."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def outputs_of(name: str, size: int = 6) -> tuple[nn.Module, Callable[[], Outputs]]:
    """A model, and its outputs on a batch with their loss."""
    case = ZOO[name]
    model = case.model()
    (x, y) = case.batch(size)
    return model, lambda: Outputs(model(x), lambda z: case.loss(z, y))


@pytest.mark.parametrize(
    "name", ["mlp", "attention", "embedding", "tied", "batch_norm", "shared_linear", "lora"]
)
def test_gauss_newton_equals_the_dense_matrix(name: str) -> None:
    """In each mode, over frozen and tied weights; and it is not the Hessian."""
    case = ZOO[name]
    model, closure = outputs_of(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    x, y = case.batch(6)
    twin = copy.deepcopy(model)
    with sdpa_kernel(SDPBackend.MATH):
        flags = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
        expected = ggn(twin, x, y, case.loss)[flags][:, flags]
        curved = dense_hessian(twin, x, y, case.loss)[flags][:, flags]
    V = torch.randn(len(expected), 3, dtype=torch.float64)
    for mode in EXACT:
        with Hessian(closure, trained, mode=mode, curvature="gauss-newton") as G:  # type: ignore[arg-type]
            found = torch.stack([G.product(v) for v in V.T], 1)
            loss = float(G.loss)
        assert_close(found, expected @ V, mode)
        assert loss == pytest.approx(float(case.loss(twin(x), y).detach()))
    assert float((curved - expected).abs().max()) > 1e-3 * float(expected.abs().max())
    assert_close(matrix(closure, trained, "hessian"), curved)  # also of Outputs


@pytest.mark.parametrize("mode", EXACT)
def test_empirical_fisher_is_the_mean_of_outer_products(mode: str) -> None:
    model = MLP.model()
    (x, y) = MLP.batch(6)
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
    st.sampled_from(EXACT), st.sampled_from(KINDS), st.booleans(),
)  # fmt: skip
def test_micro_batches_of_outputs_equal_one_batch(
    sizes: list[int], mode: str, kind: str, counted: bool
) -> None:
    """Weighted by their number of examples, returned or taken from the number of losses."""
    model = MLP.model()
    (x, y) = MLP.batch(sum(sizes))
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
def test_gauss_newton_has_no_negative_eigenvalue(
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


def test_the_hessian_has_negative_eigenvalues() -> None:
    """Control, at the same network."""
    model, closure = outputs_of("mlp")
    values = torch.linalg.eigvalsh(matrix(closure, model.parameters(), "hessian"))
    assert float(values[0]) < -0.01 * float(values[-1])
    found = eigenpairs(closure, model, smallest=2, largest=1, curvature="gauss-newton")
    assert float(found.eigenvalues[1:].min()) > -1e-9


@pytest.mark.parametrize("mode", EXACT)
def test_models_can_have_several_outputs(mode: str) -> None:
    """A tuple as one tensor; one of them is constant, and one is a function of another."""
    model = MLP.model()
    (x, y) = MLP.batch(6)
    body = model[:3]
    head = model[3:]

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


@pytest.mark.parametrize("mode", EXACT)
def test_an_output_can_be_a_parameter(mode: str) -> None:
    """A learned scale of the noise has the same curvature as an output computed from it."""
    model = nn.Linear(4, 1).double()
    log_scale = nn.Parameter(torch.tensor(0.3).double())
    x = torch.randn(7, 4).double()
    y = torch.randn(7, 1).double()

    def negative_log_likelihood(z: tuple[Tensor, Tensor]) -> Tensor:
        return (0.5 * ((y - z[0]) / z[1].exp()) ** 2 + z[1]).mean()

    params = [*model.parameters(), log_scale]
    found = matrix(
        lambda: Outputs((model(x), log_scale), negative_log_likelihood), params, mode=mode
    )
    expected = matrix(
        lambda: Outputs((model(x), 1.0 * log_scale), negative_log_likelihood), params, mode=mode
    )
    assert_close(found, expected)
    assert float(found[-1, -1]) > 0.0


def test_functions_without_a_second_derivative_raise() -> None:
    model = nn.Linear(4, 3).double()
    x = torch.randn(7, 4).double()
    below = lambda: Outputs(Cube.apply(model(x)), lambda z: z.square().mean())  # noqa: E731
    above = lambda: Outputs(model(x), lambda z: Cube.apply(z).mean())  # noqa: E731
    for closure in below, above:
        with pytest.raises(CurvatureError, match=r"(?s)Function Cube.*hvp=\"differences\""):
            eigenpairs(closure, model, largest=1, curvature="gauss-newton")
        with pytest.raises(ValueError, match="use hvp='auto', or curvature='hessian'"):
            eigenpairs(closure, model, largest=1, curvature="gauss-newton", hvp="differences")


BAD_OUTPUTS = [
    (lambda z: z.square().mean(), "gauss-newton", r"tensor of shape \(\)", r"Outputs\(model\(x\)"),
    (lambda z: (z.mean(), 3), "empirical-fisher", r"tensor of shape \(\)", "reduction=.none"),
    (lambda z: Outputs(z.detach(), torch.mean), "gauss-newton", "without a graph", "no_grad"),
    (lambda z: Outputs({"z": z}, torch.mean), "gauss-newton", "Outputs of a dict", "tuple"),
    (lambda z: Outputs(z, lambda z: z), "gauss-newton", r"shape \(7, 3\)", "mean"),
    (lambda z: Outputs(z, lambda z: "x"), "gauss-newton", "returned a str", "scalar"),
    (lambda z: Outputs(z, torch.mean), "empirical-fisher", r"is a tensor of shape \(\)", "vector"),
]


@pytest.mark.parametrize(("function", "curvature", "problem", "remedy"), BAD_OUTPUTS)
def test_invalid_outputs_raise(function: Any, curvature: Any, problem: str, remedy: str) -> None:
    model = nn.Linear(4, 3).double()
    x = torch.randn(7, 4).double()
    for mode in EXACT:
        with pytest.raises(CurvatureError, match=f"(?s){problem}.*{remedy}"):
            eigenpairs(lambda: function(model(x)), model, largest=1, curvature=curvature, hvp=mode)
    assert all(p.grad is None for p in model.parameters())


class NamedOutputs(NamedTuple):
    first: Tensor
    second: Tensor


class TupleSubclass(tuple[Tensor, ...]):
    """A tuple that torch's pytrees do not know."""

    __slots__ = ()


@pytest.mark.parametrize("kind", [tuple, list, TupleSubclass, NamedOutputs._make])
def test_outputs_that_depend_on_each_other_are_separated_in_any_sequence(kind: Any) -> None:
    """The Gauss-Newton matrix is that of the outputs, though one is computed from the other."""
    scale = torch.tensor([1.5, 0.5], dtype=torch.float64)
    weight = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    module = nn.Module()
    module.weight = weight

    def closure() -> Outputs:
        first = scale * weight
        second = first**2
        return Outputs(kind([first, second]), lambda z: z[0].square().sum() + z[1].square().sum())

    pairs = eigenpairs(closure, module, largest=2, curvature="gauss-newton", iterations=2)
    # J has the rows diag(scale) and diag(2 scale² w), and the Hessian of the loss is 2 I.
    diagonal = 2 * (scale**2 + (2 * scale**2 * weight.detach()) ** 2)
    torch.testing.assert_close(pairs.eigenvalues, diagonal.sort(descending=True).values)
