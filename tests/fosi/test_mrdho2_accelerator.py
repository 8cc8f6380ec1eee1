"""The accelerators of MRDHO2: whose orders they follow, their batches, and whose model it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from mrdho2_training import CASE, OPTIONS, loss_of, worker
from ranks import assert_same_trajectory
from torch import Tensor, nn

from second_order import MRDHO2, SecondOrderError
from second_order.distributed.helper_link import Message, load_model, pack_by_dtype
from second_order.fosi.accelerator import AcceleratorCurvature, closures_by_epoch

if TYPE_CHECKING:
    from pool import World as Pool


class Unsized:
    """As a DataLoader of a dataset without a length is."""

    def __init__(self, *batches: int) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        raise TypeError("has no len()")


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([0, 1, 2], {4: 1, 5: 2, 6: 0, 8: 2, 2: 2}),
        (Unsized(0, 1, 2), {4: 0, 5: 1, 6: 2, 8: 0, 2: 1}),
        ((k for k in range(3)), {4: 0, 5: 1, 6: 2}),
    ],
)
def test_each_epoch_uses_the_batch_of_its_index(batches: Any, expected: dict[int, int]) -> None:
    result = closures_by_epoch(batches, lambda batch: batch)
    assert [result(epoch)() for epoch in expected] == list(expected.values())


class Counting(nn.Module):
    """Two layers of one size, and buffers of two dtypes that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
        self.layers[0].requires_grad_(False)
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1))

    def loss(self) -> Tensor:
        x = self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x + 1))
        return x.square().sum() * self.count


def whole(model: nn.Module) -> tuple[list[Tensor], list[bool]]:
    tensors = model.state_dict(keep_vars=True).values()
    return [t.detach().clone() for t in tensors], [t.requires_grad for t in tensors]


def followed(rank: int, world_size: int) -> dict[str, Any]:
    """The whole model at the start of each epoch, and at the last decision about an update."""
    model = Counting()
    found: dict[str, Any] = {}
    optimizer = MRDHO2(model.parameters(), model=model, lr=0.1, epoch_steps=2, num_largest=2)
    if optimizer.role == "accelerator":

        def loss_fn(epoch: int) -> Tensor:
            found.setdefault(f"epoch {epoch}", whole(model))
            found["last update"] = whole(model)
            return model.loss()

        with optimizer:
            optimizer.serve(range(3), loss_fn)
        del found["last update"][0][2:]  # the update may not have been made
        return found
    with torch.no_grad():  # as a checkpoint that is loaded here alone
        for t in model.parameters():
            t.add_(torch.randn_like(t))
    with optimizer:
        for step in range(6):
            model.shift += 0.1
            model.count += 1
            if step == 4:  # others train, as many as before
                for layer, trains in zip(model.layers, (True, False), strict=True):
                    layer.requires_grad_(trains)
            if step % 2 == 0:
                found[f"epoch {step // 2}"] = whole(model)
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
    found["last update"] = whole(model)
    del found["last update"][0][2:]
    return found


def test_accelerators_receive_the_workers_whole_model(world: Pool) -> None:
    """Frozen parameters and buffers too, and what trains there trains here."""
    there, here = world.run(followed, 2)
    assert list(there) == ["epoch 0", "epoch 1", "epoch 2", "last update"]
    for when, (tensors, train) in there.items():
        assert here[when][1] == train
        assert all(map(torch.equal, here[when][0], tensors)), when


def test_another_model_than_the_workers_raises() -> None:
    model = Counting()
    optimizer = MRDHO2(model.parameters(), model=model, lr=0.1, num_largest=0)
    tensors = optimizer._training.model_tensors()
    with pytest.raises(SecondOrderError, match="has 3 parameters and buffers of 27 elements, but"):
        load_model([torch.zeros(27)], [True] * 3, tensors)
    train = [True] * 2 + [False] * 4
    result = pack_by_dtype([torch.ones_like(t) for t in tensors])
    options: Any = optimizer._curvature.options
    accelerator = AcceleratorCurvature(optimizer._training, options, None)
    note = {"train": train, "size": 12, "model": 2}
    accelerator._load_model(Message(result, note), load_following=True)
    assert accelerator.flat_params.params == list(model.layers[0].parameters())
    assert all(bool((t == 1).all()) for t in tensors)
    with pytest.raises(
        SecondOrderError, match="train 24 parameters, but this accelerator has 12; add"
    ):
        accelerator._load_model(Message(result, note | {"size": 24}), load_following=True)


def autocast_around(rank: int, world_size: int, enabled: bool) -> Any:
    """Of `serve`; the loss itself is evaluated without."""
    model = CASE.model(torch.float32)
    batches = CASE.batches(4, 12, torch.float32)
    options = {**OPTIONS, "lanczos_iterations": 40, "lanczos_tol": 1e-5}
    with MRDHO2(model, **options) as optimizer:
        if optimizer.role == "accelerator":

            def loss_fn(batch: Any) -> Tensor:
                with torch.autocast("cpu", enabled=False):
                    return loss_of(model, batch)

            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return optimizer.serve(batches, loss_fn)
        return worker(model, optimizer, 0, 1, batches)


def test_autocast_around_serve_does_not_round_the_vectors(world: Pool) -> None:
    plain, within = (world.run(autocast_around, 2, enabled)[0] for enabled in (False, True))
    assert_same_trajectory(within, plain, rtol=1e-6)
