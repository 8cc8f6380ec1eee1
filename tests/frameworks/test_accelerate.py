"""Accelerate: `prepare`, `accumulate`, its checkpoints, and calls of its wrapper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from framework_training import BATCHES, CASE, assert_as_usual, loss_of, optimizer_of
from optimizer_cases import each_of_five
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


@pytest.fixture
def accelerate() -> Iterator[Any]:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def made(**options: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Accelerator(cpu=True, **options)

    yield made
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, clip: float | None) -> None:
    for batch in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = loss_of(model, batch)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def loaded(batches: Any = BATCHES) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None)


@pytest.mark.works("Accelerate")
@each_of_five
def test_accelerate_prepares_accumulates_and_clips(accelerate: Any, System: Any) -> None:
    accelerator = accelerate(gradient_accumulation_steps=2)
    net = CASE.model()
    optimizer = optimizer_of(System, net, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loaded())
    train(accelerator, model, optimizer, loader, 0.1)
    assert_as_usual(net, System, accumulate=2, clip=0.1, options={"momentum": 0.9})
