"""Layer batches: equal layers are processed together as each would be alone."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from factor_checks import kind_of
from hypothesis import given
from hypothesis import strategies as st
from models import CLASSES
from optimizer_cases import each_kronecker, make, take
from ranks import agreed, assert_same_trajectory, vector
from torch import Tensor, nn

from second_order import KAISA, SecondOrderOptimizer
from second_order.kfac.precondition import precondition_batches, write_gradients
from second_order.kronecker import block as banks
from second_order.kronecker.block import KroneckerBlock, LayerBatch, batch_layers, per_group
from second_order.kronecker.solvers import SOLVERS

if TYPE_CHECKING:
    from pool import World

F64 = torch.float64


def definite(groups: int, n: int) -> Tensor:
    x = torch.randn(groups, n, n + 2, dtype=F64)
    return x @ x.mT


def blocks_of(kind: str, layers: int, bias: bool, solver: str) -> list[KroneckerBlock]:
    """Equal layers with gradients, and inverses of their own."""
    made: list[KroneckerBlock] = []
    for i in range(layers):
        module: Any = {
            "linear": lambda: nn.Linear(4, 3, bias=bias),
            "convolution": lambda: nn.Conv2d(4, 6, 3, groups=2, bias=bias),
            "embedding": lambda: nn.Embedding(7, 3),
            "transposed": lambda: nn.ConvTranspose2d(4, 3, 2),
        }[kind]()
        module.to(F64)
        own = module.bias if bias and kind not in ("embedding", "transposed") else None
        block = KroneckerBlock([f"layer {i}"], [module], own, F64, [kind_of(module)])
        for p in block.params:
            p.grad = torch.randn_like(p)
        shape = block.shape
        parts: dict[str, Any] = {}
        for letter in shape.factor_names:
            n = shape.dims[letter]
            if letter in shape.diagonals:
                parts[letter] = (torch.rand(shape.groups, n, dtype=F64) + 1,)
            elif solver == "inverse":
                parts[letter] = (definite(shape.groups, n),)
            else:
                values, vectors = torch.linalg.eigh(definite(shape.groups, n))
                parts[letter] = vectors, values
        block.inverse = SOLVERS[solver].combine(parts, 0.1)
        made.append(block)
    return made


def one_by_one(blocks: list[KroneckerBlock]) -> list[Tensor]:
    """P of the layers' parameters, each layer alone."""
    found: list[Tensor] = []
    for block in blocks:
        assert block.inverse is not None
        alone = LayerBatch([block], block.inverse)
        results = alone.precondition(alone.gradient(), F64)
        found += [p.reshape(-1) for p in alone.parameter_parts(results)]
    return found


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "embedding", "transposed"])
@given(bias=st.booleans(), layers=st.integers(1, 4), data=st.data())
def test_a_layer_batch_equals_its_layers_one_by_one(
    kind: str, solver: str, bias: bool, layers: int, data: st.DataObject
) -> None:
    blocks = blocks_of(kind, layers, bias, solver)
    (bank,) = batch_layers(blocks)
    inverses = {block: block.inverse for block in blocks if block.inverse is not None}
    chosen = [b for b in blocks if data.draw(st.booleans())] or blocks[-1:]
    expected = one_by_one(chosen)
    copies = {block: [t.clone() for t in inverse.tensors] for block, inverse in inverses.items()}
    stacked = bank.inverse.split_layers(blocks[0].shape.groups)
    for inverse, before in zip(stacked, copies.values(), strict=True):
        assert all(map(torch.equal, inverse.tensors, before))
    for block, before in copies.items():  # parts of the bank's
        assert block.inverse is not None
        assert all(map(torch.equal, block.inverse.tensors, before))
        for part, whole in zip(block.inverse.tensors, bank.inverse.tensors, strict=True):
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    others = [p.grad.clone() for b in blocks if b not in chosen for p in b.params]  # type: ignore[union-attr]
    preconditioned = precondition_batches([bank], F64, among=chosen)
    write_gradients(preconditioned, torch.tensor(0.5, dtype=F64))
    written = [p.grad.reshape(-1) for b in chosen for p in b.params]  # type: ignore[union-attr]
    for found, expected_value in zip(written, expected, strict=True):
        torch.testing.assert_close(found, 0.5 * expected_value, rtol=1e-10, atol=1e-12)
    left = [p.grad for b in blocks if b not in chosen for p in b.params]
    assert all(torch.equal(*pair) for pair in zip(left, others, strict=True))


def test_refreshing_one_layer_of_a_batch_keeps_the_other_inverses() -> None:
    blocks = blocks_of("linear", 3, True, "inverse")
    (bank,) = batch_layers(blocks)
    before = bank.inverse
    old = [t.clone() for t in before.tensors]
    (again,) = blocks_of("linear", 1, True, "inverse")
    assert again.inverse is not None
    blocks[1].install_inverse(again.inverse)
    for t, o, n in zip(bank.inverse.tensors, old, again.inverse.tensors, strict=True):
        assert torch.equal(t, torch.cat([o[:1], n, o[2:]]))
    assert bank.inverse is bank.inverse, "stacked once"
    assert all(map(torch.equal, before.tensors, old)), "a comparison with the last one may need it"


def test_an_inverse_does_not_keep_its_batch_alive() -> None:
    message = torch.randn(8, 3, 3, dtype=F64)
    whole = SOLVERS["inverse"].combine({"A": (message[:4],), "G": (message[4:],)}, 0.1)
    for inverse in whole.split_layers(2):
        for part, expected in zip(inverse.tensors, whole.tensors, strict=True):
            assert part.untyped_storage().nbytes() == expected.nbytes


def test_batches_contain_layers_of_equal_shape_up_to_a_size() -> None:
    blocks = blocks_of("linear", 5, True, "inverse") + blocks_of("linear", 2, False, "inverse")
    assert [len(bank.blocks) for bank in batch_layers(blocks)] == [5, 2]
    with patch.object(banks, "CPU_LAYER_BATCH_BYTES", 2 * 8 * 3 * 5):
        assert [len(bank.blocks) for bank in batch_layers(blocks)] == [2, 2, 1, 2]


def test_training_in_batches_equals_training_layer_by_layer() -> None:
    """One layer is skipped now and then, one is frozen, and one bias has no gradient."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6) for _ in range(4)]
        model = nn.Sequential(*layers).to(F64)
        optimizer = KAISA(model, lr=0.05, factor_update_steps=2, inv_update_steps=3)
        for step in range(30):
            if step == 10:
                layers[2].requires_grad_(False)
            x = torch.randn(8, 6, dtype=F64)
            for i, layer in enumerate(layers):
                if not (i == 1 and step % 4 == 3):
                    x = layer(x).tanh()
            optimizer.zero_grad()
            x.square().mean().backward()
            if step % 5 == 4:
                layers[0].bias.grad = None
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    together = run()
    with patch.object(banks, "CPU_LAYER_BATCH_BYTES", 1):
        alone = run()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@each_kronecker
def test_a_step_within_autocast_is_close_to_one_outside(System: Any) -> None:
    """Autocast multiplies by the inverses in bfloat16. The clip needs equal dtypes."""
    ends = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        optimizer = System(model, lr=0.05)
        for _ in range(4):
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
        optimizer.close()
        ends.append(vector(model))
    torch.testing.assert_close(*ends, rtol=1e-2, atol=1e-3)


class SameMatrices(nn.Module):
    """Layers of different kinds whose weights are matrices of one size.

    A convolution and a Linear, and two tensors of no layer, which have gradient factors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(27, 8)
        self.matrix = nn.Parameter(torch.randn(8, CLASSES))
        self.stack = nn.Parameter(torch.randn(2, 4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolution(x).mean((2, 3)) + self.linear(x.flatten(1)[:, :27])
        hidden = hidden.tanh()
        return hidden @ self.matrix + torch.einsum(
            "neh,ehc->nc", hidden.unflatten(1, (2, 4)), self.stack
        )


def train_same_matrices(
    rank: int, world_size: int, System: type[SecondOrderOptimizer], bank_bytes: int
) -> list[Tensor]:
    """The parameters after each step."""
    torch.manual_seed(0)
    model = SameMatrices().to(F64)
    torch.manual_seed(rank)
    trajectory = []
    with patch.object(banks, "CPU_LAYER_BATCH_BYTES", bank_bytes):
        optimizer = make(System, model, unsupported_layers="gradient_factors")
        for _ in range(3):
            x = torch.randn(6, 3, 4, 4, dtype=F64)
            y = torch.randint(CLASSES, (6,))
            take(model, optimizer, (x, y))
            trajectory.append(vector(model))
    assert all(layer.solved for layer in optimizer._curvature.layers.blocks)
    return trajectory


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
@pytest.mark.parametrize("processes", [1, 2])
@each_kronecker
def test_layers_of_different_kinds_can_share_a_batch(
    System: type[SecondOrderOptimizer], processes: int, world: World
) -> None:
    """They are preconditioned in one bank, as each alone is."""
    alone = agreed(world.run(train_same_matrices, processes, System, 1))
    together = agreed(
        world.run(train_same_matrices, processes, System, banks.CPU_LAYER_BATCH_BYTES)
    )
    assert_same_trajectory(together, alone)


DAMPING = st.floats(0.1, 1)


@given(dampings=st.lists(DAMPING | DAMPING.map(torch.tensor), min_size=1))
def test_layers_of_one_batch_can_have_different_damping(dampings: list[float | Tensor]) -> None:
    """Solves that were begun at different steps of a schedule may be put to use at one."""
    ones = torch.ones(2 * len(dampings), 1, dtype=F64)
    parts: dict[str, Any] = {k: (ones.unsqueeze(-1), ones) for k in "AG"}
    inverse = SOLVERS["eigen"].combine(parts, per_group(dampings, 2, ones))
    found = 1 / inverse.tensors[-1].view(-1, 2) - 1
    for actual, expected_value in zip(found, dampings, strict=True):
        torch.testing.assert_close(actual, torch.full((2,), float(expected_value), dtype=F64))


def test_close_releases_all_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = KAISA(model, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    layers = [weakref.ref(block) for block in optimizer._curvature.layers.blocks]  # type: ignore[attr-defined]
    optimizer.close()
    gc.collect()
    assert not [layer() for layer in layers if layer() is not None]


def test_moving_layers_to_another_device_rebuilds_the_batches() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers = (optimizer := KAISA(model, lr=0.1))._curvature.layers  # type: ignore[attr-defined]
    assert not layers.update_active()
    for p in model[1].parameters():
        torch.utils.swap_tensors(p, nn.Parameter(p.to("meta")))
    assert layers.update_active()
    optimizer.close()
