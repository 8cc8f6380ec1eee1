"""`unsupported_layers="gradient_factors"`: unsupported matrices get factors of their gradients."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import reference as ref
import torch
from fsdp_training import fsdp
from models import CLASSES
from optimizer_cases import each_kronecker, factors, make, same, take
from ranks import agreed, assert_same_trajectory, go, shard
from reference import cross_entropy
from torch import Tensor, nn

from second_order import DPKFAC, KAISA, DistKFAC, SecondOrderWarning
from second_order.kronecker.gradient import matrix_shape

if TYPE_CHECKING:
    from pool import World
    from reference import Batch

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
GRADIENT = {"unsupported_layers": "gradient_factors"}


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.cell = kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Lone(nn.Module):
    """A matrix, a stack of matrices, a row and a vector of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 4))
        self.stack = nn.Parameter(torch.randn(2, 4, 3))
        self.row = nn.Parameter(torch.randn(1, 4))
        self.vector = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.matrix + self.row)
        return torch.einsum("ni,eij->nj", x, self.stack) + self.vector


def batches(shape: tuple[int, ...], count: int = 4, n: int = 6) -> list[Batch]:
    torch.manual_seed(1)
    x = torch.randn(count, n, *shape, dtype=F64)
    return [(each, torch.randint(CLASSES, (n,))) for each in x]


def made(kind: type[nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args).double()


def gradient_of(model: nn.Module, batch: Batch, name: str) -> Tensor:
    p = model.get_parameter(name)
    (found,) = torch.autograd.grad(cross_entropy(model(batch[0]), batch[1]), p)
    return found.reshape(matrix_shape(p.shape))


# Factors and steps.


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_factors_are_running_averages_over_gradients(kind: type[nn.RNNBase]) -> None:
    """A of columns, of trace 1, and G of rows, times the number of examples."""
    model = made(Recurrent, kind)
    optimizer = make(KAISA, model, **GRADIENT)
    gradients: list[Tensor] = []
    for batch in batches((2, 3), 3):
        gradients.append(gradient_of(model, batch, "cell.weight_hh_l0"))
        take(model, optimizer, batch)
    A, G = factors(optimizer)["cell.weight_hh_l0"]
    columns = [g.T @ g / g.square().sum() for g in gradients]
    rows = [6 * g @ g.T for g in gradients]
    torch.testing.assert_close(A[0], ref.debiased_average(columns, 0.95), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(G[0], ref.debiased_average(rows, 0.95), rtol=1e-9, atol=1e-14)


@each_kronecker
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("most", [8192, 4])
@pytest.mark.parametrize("name", ["matrix", "stack"])
def test_a_step_equals_the_dense_solve(System: Any, name: str, most: int, solver: str) -> None:
    """A side longer than the largest factor has its diagonal."""
    model = made(Lone)
    (batch,) = batches((5,), 1)
    gradient = gradient_of(model, batch, name)
    rows = gradient.T if most == 4 else gradient  # (4, 5), (3, 8)
    # No layer counts examples here: the clip assumes 64 as well.
    A = rows.T @ rows / rows.square().sum()
    G = 64 * rows @ rows.T
    A = torch.diag(A.diagonal()) if most == 4 else A
    solve = ref.damped_dense_solve if solver == "eigen" else ref.damped_factored_solve
    expected = solve(A[None], G[None], rows, 0.1)
    take(model, make(System, model, solver=solver, max_factor_dim=most, **GRADIENT), batch)
    found = model.get_parameter(name).grad
    assert found is not None
    found = found.reshape(gradient.shape)
    found = found.T if most == 4 else found
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    assert (expected - rows).norm() > 0.1 * rows.norm()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 4), (5, 4)),
        ((64, 32, 3, 3), (64, 288)),
        ((8, 64, 48), (512, 48)),
        ((2, 1, 1, 9), (2, 9)),
    ],
)
def test_a_tensor_is_folded_to_the_smallest_factors(
    shape: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert matrix_shape(shape) == expected


# Layers that are excluded.


@each_kronecker
def test_skipped_large_and_sparse_matrices_have_no_factors(System: Any) -> None:
    """Skipped and sparse ones are the base's; a layer that is too large has its gradient's."""
    model = nn.ModuleDict(
        {
            "skipped": nn.Linear(3, 3),
            "sparse": nn.Embedding(4, 3, sparse=True),
            "large": nn.Linear(3, 30),
            "frozen": nn.Bilinear(2, 2, 3).requires_grad_(False),
        }
    )
    optimizer = make(
        System, list(model.parameters()), model=model, skip_layers=["skipped"], max_factor_dim=10,
        **GRADIENT,
    )  # fmt: skip
    rows = {row.name: row for row in optimizer.summary().rows}
    assert rows["skipped"].status == rows["sparse"].status == "base"
    assert rows["large.weight"].detail == "of gradients: A 30, G 3²"
    assert rows["large"].parameters == 30  # the bias
    assert rows["frozen.weight"].status == "frozen"


@each_kronecker
def test_missing_zero_and_non_finite_gradients_leave_the_factors_unchanged(System: Any) -> None:
    """So do gradients whose squares are too small to be represented."""
    model = made(Recurrent)
    optimizer = make(System, model, **GRADIENT)
    x, y = batches((2, 3), 1)[0]
    take(model, optimizer, (x, y))
    known = factors(optimizer)["cell.weight_hh_l0"]
    weight = model.get_parameter("cell.weight_hh_l0")
    for value in (None, 0.0, 1e-150, torch.nan):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        assert weight.grad is not None
        if value is None:
            weight.grad = None
        else:
            weight.grad.fill_(value)
        optimizer.step()
        assert same(factors(optimizer)["cell.weight_hh_l0"], known)
    assert optimizer.summary().dropped == 1


def on_ranks(rank: int, size: int, name: str, options: dict[str, Any]) -> list[Tensor]:
    """The parameters after each step on a rank's share of the batches."""
    System = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}[name]
    model = made(Recurrent)
    optimizer = make(System, model, **{"relative_damping": True, "damping": 0.5, **options})
    case: Any = type("Case", (), {"loss": staticmethod(cross_entropy)})
    return go(model, optimizer, case, [shard(b, rank, size) for b in batches((2, 3))])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("KAISA", {"grad_worker_fraction": 0.5, "factor_exchange": "reduce"}),
        ("DPKFAC", {}),
        ("DistKFAC", {}),
    ],
)
def test_many_processes_train_like_one(world: World, name: str, options: dict[str, Any]) -> None:
    """DPKFAC skips the head, whose factors are those of its owner's batches alone."""
    chosen = {**options, **GRADIENT, **({"skip_layers": ["head"]} if name == "DPKFAC" else {})}
    found = agreed(world.run(on_ranks, 2, name, chosen))
    assert_same_trajectory(found, on_ranks(0, 1, name, chosen))
    without = on_ranks(0, 1, name, {**chosen, "unsupported_layers": "base_optimizer"})
    assert (found[-1] - without[-1]).norm() > 1e-4 * without[-1].norm()


# Warnings.


def warned(rank: int, world_size: int, order: str) -> list[str]:
    """The warnings of KAISA over AdamW at construction, and once FSDP2 has sharded the model."""
    model = made(Recurrent)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if order == "FSDP2 first":
            fsdp(model, "layers")
        optimizer = KAISA(model, lr=0.1, base=torch.optim.AdamW)
        if order == "FSDP2 later":
            fsdp(model, "layers")
            optimizer.zero_grad()
        own_params = {id(p) for b in optimizer._curvature.layers.blocks for p in b.params}
        assert (id(model.cell.weight_hh_l0) in own_params) == (order == "none")
    return [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]


@pytest.mark.filterwarnings("default::second_order.SecondOrderWarning")
def test_only_the_vectors_of_a_recurrent_layer_fall_back() -> None:
    (message,) = warned(0, 1, "none")
    assert "trained by AdamW alone, without curvature: vectors of cell (LSTM); summary()" in message
    optimizer = KAISA(made(Recurrent), lr=0.1, base=torch.optim.AdamW)
    row = next(row for row in optimizer.summary().rows if row.name == "cell")
    assert row.detail == "no factors are made of the gradients of its vectors"


@pytest.mark.filterwarnings("default::second_order.SecondOrderWarning")
@pytest.mark.parametrize("order", ["FSDP2 first", "FSDP2 later"])
def test_under_fsdp2_unsupported_matrices_fall_back_with_a_reason(world: World, order: str) -> None:
    for messages in world.run(warned, 2, order):
        assert "without curvature: cell (LSTM" in messages[-1]
        assert not any("more are with unsupported_layers" in each for each in messages[-2:])
