"""Captured pairs reproduce the gradient, or the layer falls back to the base; operations in place.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from fsdp_training import batches, fsdp, narrow
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CLASSES, ZOO, TransposedLinear
from optimizer_cases import KRONECKER, each_kronecker, factors, make, take
from ranks import agreed, replaced, shard, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from second_order import DPKFAC, KAISA, DistKFAC, SecondOrderWarning
from second_order.kronecker.block import KroneckerBlock, LayerStatus
from second_order.kronecker.verification import TOLERANCE, Verification, residuals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pool import World

F64 = torch.float64
quiet = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


@contextmanager
def judged() -> Iterator[dict[str, float]]:
    """The shares of gradients that pairs have left unexplained, by layer, the largest of each."""
    found: dict[str, float] = {}
    inner = KroneckerBlock.record_residual

    def record_residual(block: KroneckerBlock, residual: float | None) -> None:
        found[block.name] = max(residual or 0.0, found.get(block.name, 0.0))
        inner(block, residual)

    with patch.object(KroneckerBlock, "record_residual", record_residual):
        yield found


def sequence(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, 5, dtype=F64, generator=generator)
    return x, torch.randint(CLASSES, (n, 4), generator=generator)


# What explains its gradient.


@quiet
@pytest.mark.parametrize("precondition_norms", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_the_pairs_of_every_layer_reproduce_its_gradient(
    name: str, precondition_norms: bool
) -> None:
    case = ZOO[name]
    model = case.model()
    with judged() as found:
        optimizer = make(KAISA, model, precondition_norms=precondition_norms)
        for batch in (case.batch(8), case.batch(5, seed=1)):  # micro-batches
            case.loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    expected = {b.name for b in optimizer._curvature.layers.active if b.has_gradient}
    for block in optimizer._curvature.layers.active:
        if block.status is not LayerStatus.CAPTURED:
            expected.discard(block.name)
    assert found.keys() == expected
    assert max(found.values()) < 1e-9


@quiet
@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_verification_tolerates_low_precision_and_loss_scaling(dtype: Any, fisher: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, CLASSES))
    x = torch.randn(2000, 20) + 1.0
    y = torch.randint(CLASSES, (2000,))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with judged() as found:
        optimizer = KAISA(model, lr=0.1, grad_scaler=scaler, fisher=fisher)
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
    assert found.keys() == {"0", "2"}
    assert max(found.values()) < TOLERANCE / 2


@quiet
def test_verification_tolerates_cancellation() -> None:
    """Two uses of a layer on nearly one input: their difference is lost in float32."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 6)
    x = torch.randn(64, 4)
    with judged() as found:
        optimizer = KAISA(nn.Sequential(layer), lr=0.1)
        (layer(x) - layer(x + 1e-7 * torch.randn(64, 4))).tanh().mean().backward()
        optimizer.step()
    assert found["0"] < TOLERANCE


@quiet
def test_a_weight_penalty_does_not_hide_missing_pairs() -> None:
    case = ZOO["mlp"]
    for clipped, penalty in ((True, 0.5), (False, 0.05)):
        model = case.model()

        def loss(outputs: Tensor, y: Tensor, model: Any = model, by: float = penalty) -> Tensor:
            return cross_entropy(outputs, y) + by * sum(
                p.square().sum() for p in model.parameters()
            )

        if clipped:
            loss(model(case.batch()[0]), case.batch()[1]).backward()
        with judged() as found:
            take(model, make(KAISA, model), case.batch(), loss)
        assert max(found.values()) < 1e-9


@quiet
def test_gradients_of_other_quantities_do_not_count() -> None:
    """Before, after and within the backward pass, there between the pairs of two uses."""
    case = ZOO["shared_linear"]
    model: Any = case.model()
    weight = model.shared.weight
    (x, y) = case.batch()

    def differentiate_other(_: Tensor) -> None:
        with torch.enable_grad():
            torch.autograd.grad(weight.exp().sum(), weight)

    def watch_output(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.register_hook(differentiate_other)

    with judged() as found:
        optimizer = make(KAISA, model)
        model.shared.register_forward_hook(watch_output)
        loss = cross_entropy(model(x), y)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        optimizer.step()
    assert max(found.values()) < 1e-9


@quiet
def test_a_hook_on_a_weight_prevents_the_comparison() -> None:
    """The hook may change the gradient, so a difference says nothing about the pairs."""
    case = ZOO["mlp"]
    model = case.model()
    model[2].weight.register_hook(lambda gradient: 2 * gradient)
    optimizer = make(KAISA, model)
    for batch in case.batches(2):
        take(model, optimizer, batch, case.loss)
    assert {row.status for row in optimizer.summary().rows} == {"preconditioned"}


def spread(rank: int, world_size: int, how: str) -> dict[str, float]:
    model: Any = fsdp(narrow(), "layers") if how == "FSDP2" else narrow()
    wrapped = DistributedDataParallel(model) if how == "DDP" else model
    with judged() as found:
        optimizer = make(KAISA, model, precondition_norms=how == "DDP")
        for batch in batches(2):
            x, y = shard(batch, rank, world_size)
            (wrapped(x) - y).square().mean().backward()
        optimizer.step()
    return found


@quiet
@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_each_rank_verifies_its_own_gradients(world: World, how: str) -> None:
    names = {"conv", "tokens", "middle.0", "middle.2", "head"} | (
        {"norm"} if how == "DDP" else set()
    )
    for found in world.run(spread, 2, how):
        assert found.keys() == names
        assert max(found.values()) < 1e-9


# Many layers at a time.


def compared(
    shapes: list[tuple[int, ...]], seed: int, device: str = "cpu", passes: int = 1
) -> list[Verification]:
    """Passes of weights, whose pairs explain a part of the gradient that is the weight's own."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, shape in enumerate(shapes):
        weight = torch.randn(shape, generator=generator).to(device).requires_grad_()
        found.append(Verification())
        for j in range(passes + (i % 2) * (passes > 1)):
            product, rows = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
            x = rows if i % 3 else torch.arange(5)
            found[-1].add(product, x, rows, weight)
            gradient = product + j * rows + 2 * weight.detach()
            (weight * gradient).sum().backward()
    return found


def alone(of: Any) -> float:
    """r as it is defined."""
    products = [pair.product.double() for pair in of.pairs]
    e = sum(products).flatten()
    g = of.gradient.double().flatten()
    left = g - e
    if of.weight is not None:
        w = of.weight.double().flatten()
        left -= w * (left @ w / (w @ w))
    eps = torch.finfo(torch.float32).eps
    noise = sum(float(8 * eps * pair.x_norm * pair.d_norm) for pair in of.pairs)
    noise += eps * sum(float(product.norm()) for product in products)
    return float((left.norm() - noise).clamp_min(0.0) / max(g.norm(), e.norm()))


@given(
    shapes=st.lists(st.sampled_from([(3, 4), (4, 3), (4, 3, 2), (6,), (3, 5)]), max_size=8),
    passes=st.integers(1, 3),
)
@settings(max_examples=30, deadline=None)
def test_batched_residuals_equal_those_of_each_layer(shapes: Any, passes: int) -> None:
    explanations = compared(shapes, 0, passes=passes)
    expected = [alone(each) for each in explanations]
    assert residuals(explanations) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    one_by_one = [residuals([each])[0] for each in explanations]
    assert residuals(explanations) == pytest.approx(one_by_one, rel=1e-6, abs=1e-7)


# What does not.


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(dropout(x, 0.5, self.training))


class Square(nn.Linear):
    """x W with a square W, which is taken for a Linear's."""

    def __init__(self) -> None:
        super().__init__(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Norm(nn.Module):
    """Called one, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * self.weight


def patched() -> nn.Linear:
    layer = nn.Linear(5, 4)
    layer.forward = lambda x: 3 * linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    return layer


ODD: dict[str, Callable[[], nn.Module]] = {
    "patched": patched,
    "masked": lambda: Masked(5, 4),
    "square": Square,
    "no norm": Norm,
}


def pooled(kind: str) -> nn.Module:
    """A layer whose forward, replaced on the instance, gives fewer rows than it gets."""
    layer: Any = {
        "linear": lambda: nn.Linear(5, 4),
        "transposed": lambda: TransposedLinear(5, 4),
        "embedding": lambda: nn.Embedding(7, 4),
        "convolution": lambda: nn.Conv1d(4, 4, 2),
        "norm": lambda: nn.LayerNorm(5),
    }[kind]()
    plain = layer.forward
    layer.forward = lambda x: plain(x)[..., :4].mean(1)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(4, CLASSES)).double()


@quiet
@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
@pytest.mark.parametrize("kind", ["linear", "transposed", "embedding", "convolution", "norm"])
def test_a_pair_of_unexpected_shape_does_not_break_backward(kind: str, fisher: str) -> None:
    torch.manual_seed(0)
    model = pooled(kind)
    x = torch.randn(6, 4, 5, dtype=F64)
    x = torch.randint(7, (6, 4)) if kind == "embedding" else x
    optimizer = make(KAISA, model, fisher=fisher, precondition_norms=True)
    for _ in range(2):
        take(model, optimizer, (x, torch.arange(6) % CLASSES))
    rows = {row.name: row.status for row in optimizer.summary().rows}
    assert rows == {"0": "base", "2": "preconditioned"}


def odd_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer = ODD[name]()
    size = 5 if name in ("square", "no norm") else 4
    return nn.Sequential(nn.Linear(5, 5), layer, nn.Tanh(), nn.Linear(size, CLASSES)).double()


@pytest.mark.parametrize(
    ("System", "fisher"),
    [(KAISA, "empirical"), (KAISA, "categorical"), (DPKFAC, "empirical"), (DistKFAC, "empirical")],
)
@pytest.mark.parametrize("name", ODD)
def test_a_subclass_that_computes_something_else_falls_back(
    System: Any, name: str, fisher: str
) -> None:
    model = odd_model(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(System, model, fisher=fisher, precondition_norms=True)
        for _ in range(3):
            torch.manual_seed(1)
            optimizer.zero_grad()
            loss = cross_entropy(model(sequence()[0]), sequence()[1])
            loss.backward()
            before = [None if p.grad is None else p.grad.clone() for p in model[1].parameters()]
            optimizer.step()
            for p, gradient in zip(model[1].parameters(), before, strict=True):
                assert p.grad is not None
                assert gradient is not None
                if name != "no norm" or p.dim() == 1:
                    torch.testing.assert_close(p.grad, gradient)
    messages = [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]
    messages = [message for message in messages if "output gradients of its calls" in message]
    assert len(messages) == 1
    assert messages[0].startswith(
        "'1': the inputs and output gradients of its calls do not reproduce"
    )
    assert "is replaced on the instance" in messages[0]
    assert "register_layer()" in messages[0]
    rows = {row.name: row for row in optimizer.summary().rows}
    assert rows["1"].status == "base"
    assert "of its gradient unexplained" in rows["1"].detail
    assert rows["0"].status == rows["3"].status == "preconditioned"


class OutsideToo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return linear(torch.tanh(self.hidden(self.words(x))), self.words.weight)


@each_kronecker
@quiet
def test_a_weight_used_outside_of_its_module_falls_back(System: Any) -> None:
    torch.manual_seed(0)
    model = OutsideToo().double()
    tokens = torch.randint(6, (5, 3))
    optimizer = make(System, model)
    take(model, optimizer, (tokens, tokens.roll(1, 1)))
    rows = {row.name: row.status for row in optimizer.summary().rows}
    assert rows == {"words": "base", "hidden": "preconditioned"}


class Decoder(OutsideToo):
    """A head, and next to it a share of the embedding's weight, which training may increase."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)
        self.share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.hidden(self.words(x)))
        return self.head(h) + self.share * linear(h, self.words.weight)


@each_kronecker
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_weight_used_outside_of_its_module_is_also_found_later(System: Any, share: float) -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    tokens = torch.randint(6, (5, 3))
    statuses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(System, model, lr=0.001, inv_update_steps="auto")
        for step in range(140):
            model.share = share * (step > 20)
            take(model, optimizer, (tokens, tokens.roll(1, 1)))
            rows = {row.name: row.status for row in optimizer.summary().rows}
            assert rows["hidden"] == rows["head"] == "preconditioned"
            statuses.append(rows["words"])
    assert set(statuses[:100]) == {"preconditioned"}
    messages = [str(w.message) for w in caught if "output gradients" in str(w.message)]
    assert len(messages) == share
    if share:
        assert statuses[-1] == "base"
        assert messages[0].startswith("'words': the inputs and output gradients of its calls")
    else:
        assert statuses[-1] == "preconditioned"


def verified_layers(rank: int, world_size: int) -> list[str]:
    """The names of the layers whose pairs this rank has verified, once for each pair."""
    case = ZOO["mlp"]
    model: Any = case.model()
    names: list[str] = []
    verify_pair = KroneckerBlock.verify_pair

    def recorded(block: KroneckerBlock, *args: Any) -> None:
        names.append(block.name)
        verify_pair(block, *args)

    with replaced(KroneckerBlock, {"verify_pair": recorded}):
        optimizer = make(DPKFAC, model, factor_update_steps=1)
        for step in range(5):
            take(model, optimizer, shard(case.batch(8, seed=step), rank, world_size))
    return names


def test_only_the_owner_verifies_a_layer(world: World) -> None:
    by_rank = world.run(verified_layers, 2)
    counts = Counter(name for names in by_rank for name in names)
    assert set(counts.values()) == {2}
    assert not set(by_rank[0]) & set(by_rank[1])


def test_a_layer_that_failed_is_compared_until_it_passes() -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    tokens = torch.randint(6, (5, 3))
    statuses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make(KAISA, model, lr=0.001, inv_update_steps="auto")
        for step in range(280):
            model.share = float(20 < step < 150)
            take(model, optimizer, (tokens, tokens.roll(1, 1)))
            rows = {row.name: row.status for row in optimizer.summary().rows}
            statuses.append(rows["words"])
    assert statuses[149] == "base"
    assert statuses[-1] == "preconditioned"


@pytest.mark.parametrize("is_called", [True, False])
def test_a_layer_that_passed_can_have_another_reason_later(is_called: bool) -> None:
    """A layer that passes, and is not called afterwards, gets a warning that says so."""
    case = ZOO["mlp"]
    model: Any = case.model()
    layer = model[2]
    plain = layer.forward
    optimizer = make(KAISA, model, debug=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(9):
            if step in (0, 4):
                layer.forward = lambda x: 3 * plain(x)
            elif step in (2, 5):
                del layer.forward
            elif step == 6 and not is_called:
                model[2] = nn.AdaptiveAvgPool1d(6)
            take(model, optimizer, case.batch(8, seed=step))
    messages = [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]
    assert "output gradients of its calls do not reproduce" in messages[0]
    assert ["did not call" in message for message in messages[1:]] == [True] * (not is_called)


@each_kronecker
def test_layers_with_derivatives_inside_the_loss_fall_back(System: Any) -> None:
    """Hooks see one part of the gradient of a double backward."""

    def residual(model: nn.Module, t: Tensor) -> Tensor:
        u = model(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return (du + u).square().mean()

    models = []
    for used in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        t = torch.linspace(0, 1, 20)[:, None].requires_grad_()
        options = {"base": torch.optim.Adam, "lr": 0.01}
        if used:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer: Any = make(System, model, **options)
                for _ in range(5):
                    optimizer.zero_grad()
                    residual(model, t).backward()
                    optimizer.step()
            first, message = dict.fromkeys(str(w.message) for w in caught)
            assert "the loss contains derivatives" in first
            assert "no layer gave statistics ('0', '2', '4'): " in message
            assert "; for example, '0': the inputs and output gradients of its calls" in message
            assert "If the loss contains derivatives" in message
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(5):
                optimizer.zero_grad()
                residual(model, t).backward()
                optimizer.step()
        models.append(vector(model))
    assert torch.equal(*models)


# In mid-run.


@pytest.mark.parametrize("debug", [False, True])
def test_debug_detects_a_layer_that_is_patched_during_training(debug: bool) -> None:
    case = ZOO["mlp"]
    model: Any = case.model()
    plain = model[2].forward
    optimizer = make(KAISA, model, debug=debug)
    statuses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            if step == 4:
                model[2].forward = lambda x: 3 * plain(x)
            if step == 8:
                del model[2].forward
            take(model, optimizer, case.batch(8, seed=step % 7))
            statuses.append(optimizer.summary().rows[1].status)
    expected = ["preconditioned"] * 12
    if debug:
        expected[4:9] = ["base"] * 5
    assert statuses == expected
    messages = [str(w.message) for w in caught if "output gradients" in str(w.message)]
    assert len(messages) == debug


def patched_from_the_start(rank: int, world_size: int, system: int) -> Any:
    case = ZOO["mlp"]
    model: Any = case.model()
    if rank == 0:
        plain = model[2].forward
        model[2].forward = lambda x: 3 * plain(x)
    optimizer = make(KRONECKER[system], model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            take(model, optimizer, shard(case.batch(8, seed=step), rank, world_size))
    messages = [str(w.message) for w in caught if "output gradients" in str(w.message)]
    return vector(model), [row.status for row in optimizer.summary().rows], messages


@pytest.mark.parametrize("system", range(len(KRONECKER)))
def test_a_layer_that_one_rank_cannot_verify_falls_back_on_all_ranks(
    world: World, system: int
) -> None:
    found = world.run(patched_from_the_start, 2, system)
    agreed([[vectors] for vectors, _, _ in found])
    for _, statuses, messages in found:
        if system == 1 and not messages:  # DPKFAC's owner was another rank
            assert statuses == ["preconditioned"] * 3
        else:
            assert statuses == ["preconditioned", "base", "preconditioned"]
            assert len(messages) == 1


# Operations in place.


class InPlace(nn.Module):
    """Changes the output of a layer in place, or a copy of it."""

    def __init__(self, how: str, leaves: bool, recomputes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.last = nn.Linear(4, CLASSES)
        self.how = how
        self.leaves = leaves
        self.recomputes = recomputes

    def _hidden(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h.clone() if self.leaves else h
        if self.how == "relu":
            return nn.functional.relu(h, inplace=True)
        if self.how == "add":
            h += x[..., :4]
            return torch.tanh(h)
        if self.how == "scaled":
            h *= 2.0
            return torch.tanh(h)
        return torch.tanh(h.masked_fill_(x[..., :4] > 0.3, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = partial(checkpoint, self._hidden, use_reentrant=False)
        return self.last((hidden if self.recomputes else self._hidden)(x))


@pytest.mark.parametrize("how", ["relu", "add", "scaled", "masked"])
@pytest.mark.parametrize(
    ("fisher", "recomputes"), [("empirical", False), ("empirical", True), ("categorical", False)]
)
@pytest.mark.parametrize("positions", [(4,), (2, 3)], ids=str)
def test_in_place_operations_lose_no_pairs(
    how: str, fisher: str, recomputes: bool, positions: tuple[int, ...]
) -> None:
    x = torch.randn(6, *positions, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    y = torch.randint(CLASSES, (6, *positions), generator=torch.Generator().manual_seed(2))
    found = []
    for leaves in (False, True):
        torch.manual_seed(0)
        model = InPlace(how, leaves, recomputes).double()
        with warnings.catch_warnings():
            warnings.simplefilter("error", SecondOrderWarning)
            optimizer = make(KAISA, model, fisher=fisher)
            for _ in range(2):
                take(model, optimizer, (x, y))
        assert factors(optimizer).keys() == {"first", "last"}
        found.append([f for pair in factors(optimizer).values() for f in pair])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
