"""DHO2 with parameters of every kind, and its state: checkpoints, copies, pickles."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from dho2_training import ADAM, BATCHES, CASE, QUICK, SGD, closure_of, dho2, go, take, vector
from optimizer_cases import same
from ranks import assert_same_trajectory
from reference import cross_entropy
from saved_states import are_equal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from second_order import DHO2, SecondOrderWarning

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Parameters of every kind.

SIZE = 70_001
CUTS: dict[str, list[tuple[int, ...]]] = {
    "one": [(SIZE,)],
    "many small": [(1,), *[(1000,)] * 70],
    "large and small": [(), (30, 40), (66_000,), (5, 7, 8, 10)],
    "transposed": [(300, 200), (), (8, 5, 25, 10)],
    "none": [(SIZE,), (0,), (0, 3)],
}


def pieces(start: Tensor, cut: list[tuple[int, ...]], strided: bool = False) -> list[nn.Parameter]:
    parts = start.split([torch.Size(shape).numel() for shape in cut])
    found = []
    for part, shape in zip(parts, cut, strict=True):
        value = part.view(shape).clone()
        if strided and value.dim() == 2:
            value = value.t().contiguous().t()
        if strided and value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        found.append(nn.Parameter(value))
    return found


def train_cut(name: str, base: Any, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Of one function of a long vector, in whatever parameters it comes."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SIZE, generator=generator).to(dtype)
    A = torch.randn(4, SIZE, generator=generator).to(dtype) / SIZE**0.5
    scales = torch.tensor([40.0, 20.0, 10.0, -6.0], dtype=dtype)
    params = pieces(start, CUTS[name], strided=name == "transposed")
    assert all(p.is_contiguous() for p in params) == (name != "transposed")

    def loss() -> Tensor:
        x = torch.cat([p.reshape(-1) for p in params])
        return 0.5 * (scales * (A @ x).square()).sum() + (0.1 * x.square() + 0.05 * x.cos()).sum()

    options = {"warmup_steps": 1, "curvature_interval": 2, "lanczos_iterations": 12}
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:]}]
    optimizer = DHO2(
        groups if half else iter(params), base=base, lr=1e-2, num_largest=3, num_smallest=1,
        curvature_closure=loss, lanczos_tol=1e-9, **options,
    )  # fmt: skip
    trajectory = []
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        trajectory.append(torch.cat([p.detach().reshape(-1).clone() for p in params]))
    return trajectory


@pytest.mark.parametrize("base", [SGD, ADAM])
def test_the_split_into_parameters_changes_nothing(base: Any) -> None:
    """Large, small, scalar, empty and not contiguous ones, in one group or two."""
    expected = train_cut("one", base)
    for name in CUTS:
        assert_same_trajectory(train_cut(name, base), expected, rtol=1e-10, hint=name)


class UnusedLayer(nn.Module):
    """A network with a part that the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.used = CASE.model()
        self.unused = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("base", [SGD, ADAM])
def test_a_parameter_without_a_gradient_does_not_move(base: Any) -> None:
    model = UnusedLayer()
    plain = CASE.model()
    before = copy.deepcopy(model.unused)
    kwargs = {"base": base, "weight_decay": 0.1}
    found = go(model, dho2(model, lanczos_iterations=127, **kwargs), BATCHES)
    assert same(model.unused, before)
    assert all(p.grad is None for p in model.unused.parameters())
    expected = go(plain, dho2(plain, **kwargs), BATCHES)
    assert_same_trajectory([each[:111] for each in found], expected, rtol=1e-8)


@pytest.mark.parametrize("kwargs", [{"momentum": 0.9}, {"base": ADAM}], ids=str)
def test_maximizing_the_negative_loss_equals_minimizing_the_loss(kwargs: dict[str, Any]) -> None:
    down = CASE.model()
    up = CASE.model()
    expected = go(down, dho2(down, **kwargs), BATCHES)

    def negative() -> Tensor:
        return -closure_of(up)()

    optimizer = dho2(up, maximize=True, curvature_closure=negative, **kwargs)
    found = []
    for x, y in BATCHES:
        optimizer.zero_grad()
        (-cross_entropy(up(x), y)).backward()
        optimizer.step()
        found.append(vector(up))
    assert_same_trajectory(found, expected, rtol=1e-9)
    assert optimizer.curvature.eigenvalues[0] > 0.0 > optimizer.curvature.eigenvalues[-1]


def dropped(messages: list[warnings.WarningMessage]) -> int:
    return sum("the eigenpairs are dropped" in str(w.message) for w in messages)


@pytest.mark.parametrize("change", ["freeze", "thaw", "add"])
def test_after_parameters_change_the_base_steps_alone_until_the_next_refresh(change: str) -> None:
    """As plain SGD would, its momentum kept; pairs of the new vector come at the next refresh."""
    kwargs = {"lr": 0.05, "momentum": 0.9}
    model = CASE.model()
    last = model.get_submodule("4")
    if change == "thaw":
        last.requires_grad_(False)
    rest = [p for name, p in model.named_parameters() if not name.startswith("4")]
    params = rest if change == "add" else list(model.parameters())
    optimizer = dho2(model, params, **kwargs)
    before = copy.deepcopy(last)
    go(model, optimizer, BATCHES[:3])
    assert same(last, before) == (change != "freeze")
    assert optimizer.curvature.refreshes == 1
    if change == "add":
        optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.01})
    else:
        last.requires_grad_(change == "thaw")
        last.zero_grad()
    twin = copy.deepcopy(model)
    plain = SGD(twin.parameters(), **kwargs)
    momenta = [
        optimizer.state[p].get("base", {}).get("momentum_buffer") for p in model.parameters()
    ]
    for p, momentum in zip(twin.parameters(), momenta, strict=True):
        plain.state[p]["momentum_buffer"] = None if momentum is None else momentum.clone()
    if change == "add":
        plain.param_groups[0]["params"] = plain.param_groups[0]["params"][:4]
        plain.add_param_group({"params": list(twin.parameters())[4:], "lr": 0.01})
    expected = go(twin, plain, BATCHES[3:6])
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always", SecondOrderWarning)
        assert same(go(model, optimizer, BATCHES[3:6]), expected)
        assert dropped(messages) == 1
        assert all("eigenvectors" not in parts["curvature"] for parts in optimizer.state.values())
        take(model, optimizer, BATCHES[6])
    assert dropped(messages) == 1
    size = 111 if change != "freeze" else 111 - 21
    assert optimizer._curvature.subspace.basis.vectors.shape == (5, size)  # type: ignore[union-attr]
    assert optimizer.curvature.refreshes == 2
    assert same(last, before) is False


# State.

KINDS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, **QUICK},
    "SGD": QUICK,
    "Adam": {"base": ADAM, "lr": 0.02, **QUICK},
}


def reloaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("at", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_equal_bit_for_bit(kind: str, at: int) -> None:
    """From warm-up, between refreshes, and with momentum of earlier subspaces."""
    model = CASE.model()
    other = CASE.model(seed=7)
    optimizer = dho2(model, **KINDS[kind])
    go(model, optimizer, BATCHES[:at])
    state = reloaded((model.state_dict(), optimizer.state_dict()))
    assert are_equal(state[1], optimizer.state_dict())
    fresh = dho2(other, **KINDS[kind])
    go(other, fresh, BATCHES[:3])  # and what is there already is replaced
    other.load_state_dict(state[0])
    fresh.load_state_dict(state[1])
    expected = go(model, optimizer, BATCHES[at:])
    assert same(go(other, fresh, BATCHES[at:]), expected)


def test_a_checkpoint_of_another_model_raises_before_anything_changes() -> None:
    model = CASE.model()
    optimizer = dho2(model, momentum=0.9, **QUICK)
    go(model, optimizer, BATCHES[:8])
    before = copy.deepcopy(optimizer.state_dict())

    def shape(state: Any) -> None:
        vectors = state["state"][0]["curvature"]["eigenvectors"]
        state["state"][0]["curvature"]["eigenvectors"] = vectors[:, :-1]

    def count(state: Any) -> None:
        vectors = state["state"][0]["curvature"]["eigenvectors"]
        state["state"][0]["curvature"]["eigenvectors"] = vectors[:-1]

    def vectors(state: Any) -> None:
        state["state"][0]["curvature"]["eigenvectors"][0] = float("nan")

    def groups(state: Any) -> None:
        state["param_groups"][0]["params"].pop()

    for spoil, text in (
        (shape, r"eigenvectors.*the shape \(5, 110\), where \(5, 111\) is needed"),
        (count, r"eigenvectors.*the shape \(4, 111\), where \(5, 111\) is needed"),
        (vectors, "eigenvectors.*is not finite"),
        (groups, "group"),
    ):
        wrong = copy.deepcopy(before)
        spoil(wrong)
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(wrong)
        assert are_equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("mid", [False, True], ids=["fresh", "mid-run"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dcp_resumed_run_is_equal_bit_for_bit(kind: str, mid: bool, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    for at in (1, 4, 8):
        model = CASE.model()
        other = CASE.model(seed=7)
        optimizer = dho2(model, **KINDS[kind])
        fresh = dho2(other, **KINDS[kind])
        go(model, optimizer, BATCHES[:at])
        state = reloaded(get_optimizer_state_dict(model, optimizer, options=options))
        weights = copy.deepcopy(model.state_dict())
        expected = go(model, optimizer, BATCHES[at:])
        if mid:
            go(other, fresh, BATCHES[:7])
        other.load_state_dict(weights)
        set_optimizer_state_dict(other, fresh, state, options=options)
        assert same(go(other, fresh, BATCHES[at:]), expected), f"at {at}"


def test_a_sparse_gradient_raises_with_the_remedy() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3))
    optimizer = DHO2(model, lr=0.1)
    before = vector(model)
    model(torch.tensor([[0, 2]])).sum().backward()
    with pytest.raises(TypeError, match="use sparse=False"):
        optimizer.step()
    assert torch.equal(vector(model), before)
