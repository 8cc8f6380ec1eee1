"""`curvature()`: the factors as a matrix, against dense ones in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from layer_curvatures import dense, flat
from models import ZOO
from optimizer_cases import each_kronecker, make, same, take
from ranks import shard
from torch import Tensor, nn

from second_order import DPKFAC, KAISA, DistKFAC, SecondOrderError

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]

KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "linear": (KAISA, "mlp", {}),
    "linear, inverse": (DPKFAC, "mlp", {"solver": "inverse"}),
    "convolution": (KAISA, "conv_grouped", {}),
    "embedding": (KAISA, "language_model", {}),
    "exact": (DistKFAC, "norms", {"precondition_norms": True}),
    "doubly factored": (DistKFAC, "flattened", {"doubly_factored": {"3": (4, 2)}}),
}


class Flattened(nn.Sequential):
    """Its Linear is doubly factored if the option says so."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 5)),
            nn.Conv1d(1, 2, 2),
            nn.Flatten(),
            nn.Linear(8, 3),
        )


def trained(kind: str) -> tuple[nn.Module, Any]:
    System, name, options = KINDS[kind]
    if name == "flattened":
        torch.manual_seed(0)
        model: nn.Module = Flattened().double()
        case = MLP
        x = torch.randn(12, 5, dtype=torch.float64)
        batches = [(x, torch.randint(3, (12,)))] * 2
    else:
        case = ZOO[name]
        model = case.model()
        batches = case.batches(2)
    optimizer = make(System, model, relative_damping=True, **options)
    for batch in batches:
        take(model, optimizer, batch, case.loss)
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_applies_its_dense_matrix(kind: str) -> None:
    """The other functions are those of `test_curvature_functions.py`."""
    model, optimizer = trained(kind)
    curvature = optimizer.curvature(dtype=torch.float64)
    assert (kind == "doubly factored") == any("L" in each.factors for each in curvature.values())
    torch.manual_seed(1)
    covered = {name for layer in curvature.values() for name in layer.shapes}
    vector = {n: torch.randn_like(p) for n, p in model.named_parameters() if n in covered}
    product = curvature.apply(vector)
    assert set(product) == set(vector) == covered
    assert all(part.is_contiguous() for part in product.values())
    for layer in curvature.values():
        assert {*layer.modules} <= dict(model.named_modules()).keys()
        F = dense(layer)
        assert float(F.trace()) > 0
        expected = F @ flat(layer, vector)
        torch.testing.assert_close(flat(layer, product), expected, rtol=1e-10, atol=1e-13)


@each_kronecker
def test_solve_with_the_damping_of_training_equals_the_optimizers_step(System: Any) -> None:
    """With "eigen" and without a clip, a step replaces p.grad by its solution."""
    model = MLP.model()
    optimizer = make(System, model, relative_damping=True, damping=0.4)
    take(model, optimizer, MLP.batches(1)[0], MLP.loss)
    x, y = MLP.batches(2)[1]
    optimizer.zero_grad()
    MLP.loss(model(x), y).backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    solved = optimizer.curvature(dtype=torch.float64).solve(before)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, solved[name], rtol=1e-8, atol=1e-12)
        assert not torch.allclose(p.grad, before[name], rtol=0.01)


class ScaledLinear(nn.Linear):
    """Has a parameter of its own, next to a layer."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * self.layer(x))


def test_parameters_of_the_model_itself_have_the_reason_of_its_summary() -> None:
    model = ScaledLinear()
    optimizer = make(KAISA, model)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    reasons = {row.name: row.detail for row in optimizer.summary().rows}
    curvature = optimizer.curvature()
    assert set(curvature.uncovered) == {"weight", "bias"}
    for reason in curvature.uncovered.values():
        assert reason == f"SGD alone trains it ({reasons['(model)']})"


def test_layers_without_curvature_are_reported() -> None:
    model = ZOO["norms"].model()
    optimizer = make(KAISA, model, skip_layers=["0"])
    with pytest.raises(SecondOrderError, match=r"KAISA has no factors yet; .* after the first"):
        optimizer.curvature(dtype=torch.float64)
    take(model, optimizer, ZOO["norms"].batches(1)[0], ZOO["norms"].loss)
    curvature = optimizer.curvature(dtype=torch.float64)
    assert curvature.uncovered
    assert set(curvature.uncovered) & set(curvature.names) == set(curvature.uncovered)
    grads = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"'0.weight' has no curvature: SGD alone trains it \("):
        curvature.apply({"0.weight": grads["0.weight"]})
    with pytest.raises(ValueError, match="no layer has a parameter of this name"):
        curvature.apply({"no.weight": torch.ones(1)})
    with pytest.raises(TypeError, match=r"is not a vector; pass .* dict\(zip\(curvature.names"):
        curvature.apply(list(grads.values()))  # type: ignore[arg-type]
    optimizer.close()
    with pytest.raises(SecondOrderError, match="before close"):
        optimizer.curvature(dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: c.apply({"0.weight": torch.ones(2)}),
            r"\(2,\) for '0.weight', but the",
        ),
        (lambda c: c.logdet(damping=0.0), "damping=0.0 of layer '0' must be positive"),
        (lambda c: c.sample(damping=-1), "damping=-1 of layer '0' must be positive"),
        (lambda c: c.logdet({"0": 0.1, "2": math.inf}), "of layer '2' must be"),
    ],
)
def test_invalid_vectors_raise(call: Any, message: str) -> None:
    _, optimizer = trained("linear")
    with pytest.raises(ValueError, match=message):
        call(optimizer.curvature(dtype=torch.float64))


# -------------------------------------------------------------------------------------- processes


def frozen(rank: int, world_size: int, System: Any, options: dict[str, Any]) -> Any:
    """The curvature of a layer that is frozen later, for each owner of its factors."""
    model = MLP.model()
    optimizer = make(System, model, **options)
    take(model, optimizer, shard(MLP.batches(1, n=12)[0], rank, world_size), MLP.loss)
    before = {name: layer.factors for name, layer in optimizer.curvature().items()}
    model.get_submodule("0").requires_grad_(False)
    after = {name: layer.factors for name, layer in optimizer.curvature().items()}
    assert before.keys() == after.keys()
    assert all(same(before[name].values(), after[name].values()) for name in before)
    assert all(factor.dtype == torch.float32 for factor in after["0"].values())


@pytest.mark.parametrize(
    ("System", "options"), [(KAISA, {}), (KAISA, {"factor_exchange": "reduce"}), (DPKFAC, {})]
)
def test_frozen_layers_keep_their_curvature(
    world: World, System: Any, options: dict[str, Any]
) -> None:
    world.run(frozen, 2, System, options)


def gathered(rank: int, world_size: int, System: Any, options: dict[str, Any]) -> Any:
    """Return the factors of all layers, and the names of those that this rank stores."""
    model = MLP.model()
    optimizer = make(System, model, relative_damping=True, **options)
    for batch in MLP.batches(3, n=12):
        take(model, optimizer, shard(batch, rank, world_size), MLP.loss)
    before = [p.detach().clone() for p in model.parameters()]
    snapshot = optimizer.curvature(dtype=torch.float64)
    assert sorted(snapshot.local_layers) == sorted(
        k for k, owner in snapshot.owners.items() if owner == rank
    )
    factors = {name: (each.A, each.G, each.damping) for name, each in snapshot.items()}
    for whole in (optimizer.curvature(dtype=torch.float64, gather=True), snapshot.gather()):
        assert list(whole.local_layers) == list(whole) == list(snapshot)
        for name in sorted(whole, reverse=rank == 1):  # each rank calls it in its own order
            assert same((whole[name].A, whole[name].G), factors[name][:2])
    take(model, optimizer, shard(MLP.batches(4, n=12)[3], rank, world_size), MLP.loss)
    assert not same(before, model.parameters())
    return (
        factors,
        snapshot.uncovered,
        list(snapshot.local_layers),
        [p.detach().clone() for p in model.parameters()],
    )


@pytest.mark.parametrize(
    ("System", "options"),
    [
        (KAISA, {"grad_worker_fraction": 0.5}),
        (KAISA, {"factor_exchange": "reduce", "colocate_factors": False}),
        (DPKFAC, {}),
        (DistKFAC, {}),
    ],
    ids=["KAISA", "KAISA-reduce", "DPKFAC", "DistKFAC"],
)
def test_every_process_stores_its_layers_and_can_gather_all(
    world: World, System: Any, options: dict[str, Any]
) -> None:
    results = world.run(gathered, 2, System, options)
    first = results[0][0]
    assert sorted(name for each in results for name in each[2]) == sorted(first)
    assert len(first) == 3
    for factors, uncovered, here, parameters in results:
        assert uncovered == {}
        assert here
        assert same(parameters, results[0][3])
        for name, (a, g, damping) in factors.items():
            assert torch.equal(a, first[name][0])
            assert torch.equal(g, first[name][1])
            assert damping == pytest.approx(first[name][2])
    if System is KAISA:  # as one process has them, of the whole batches
        model = MLP.model()
        optimizer = make(KAISA, model, relative_damping=True)
        for batch in MLP.batches(3, n=12):
            take(model, optimizer, batch, MLP.loss)
        for name, layer in optimizer.curvature(dtype=torch.float64).items():
            torch.testing.assert_close(first[name][0], layer.A, rtol=1e-8, atol=1e-12)
            torch.testing.assert_close(first[name][1], layer.G, rtol=1e-8, atol=1e-12)
