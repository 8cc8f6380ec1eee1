"""What gradient workers and stats workers say to each other, over a link of one's own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from distkfac_training import BATCHES, CASE, distkfac
from optimizer_cases import noted
from torch import Tensor, nn

from second_order import PerStep
from second_order.distributed.helper_link import Message
from second_order.kfac.stats_workers import StatsWorker, StatsWorkers

if TYPE_CHECKING:
    from collections.abc import Callable


FORGETFUL = PerStep(0.95)
MODEL = SimpleNamespace(parameters=lambda: [torch.ones(2)], buffers=list)
TWO: Any = SimpleNamespace(model=MODEL, groups=[], world=SimpleNamespace(rank=0))


class FakeLink:
    """A link whose messages arrive immediately.

    Attributes:
        sent: what was sent.
        came: what is to arrive.
    """

    lost = peer_closed = False
    peer = 1

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.came: list[Message] = []

    def send(self, tensors: list[Tensor], to: int | None = None, **note: Any) -> None:
        self.sent.append(Message([t.clone() for t in tensors], note))

    def receive(self) -> Message | None:
        return self.came.pop(0) if self.came else None

    wait = receive

    def close(self, patience: float) -> None:
        pass


def noted_point(tensors: int) -> dict[str, Any]:
    """The note of a snapshot of so many tensors, all of which train."""
    return {"train": [True] * tensors, "optimized": [True] * tensors, "plan_version": 0}


def helped(optimizer: Any) -> FakeLink:
    """Make an optimizer of one process a worker with a stats worker."""
    link: Any = FakeLink()
    helpers = StatsWorkers(1, 1.0)
    helpers.links = [link]
    optimizer._curvature.stats_workers = helpers
    return link


def helping(optimizer: Any) -> FakeLink:
    """Make it a stats worker of one worker."""
    link: Any = FakeLink()
    link.peer_closed = True
    training = optimizer._training
    curvature = optimizer._curvature
    worker = StatsWorker(training, curvature._options, curvature._system, 0, 1.0)
    worker.layers = curvature.layers
    worker.link = link
    worker.optimized = [True] * len(training.model_tensors())
    optimizer._curvature = worker
    return link


def message(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor], how: str) -> Any:
    """What a stats worker sends of a pass, and its factors by layer."""
    link = helping(optimizer)
    optimizer._curvature.layers.capture.gate.open = True
    if how == "serve":
        tensors = list(model.parameters())
        flat = torch.cat([p.detach().reshape(-1) for p in tensors])
        link.came.append(Message([flat], noted_point(len(tensors))))
        optimizer.serve([None], lambda _: loss())
    else:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return link.sent[0]


def loss_on(model: nn.Module) -> Tensor:
    return CASE.loss(model(BATCHES[0][0]), BATCHES[0][1])


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((4, 4, 4), {"loss_reduction": "mean"}),
        ((4, 4, 4), {"loss_reduction": "auto"}),
        ((2, 10), {"loss_reduction": "step_mean"}),
        ((12,), {"loss_reduction": "step_mean"}),
    ],
)
def test_a_stats_worker_counts_micro_batches(
    sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    """The loop itself may also divide the losses of several passes by their number or terms."""
    (x, y) = BATCHES[0]
    sent = []
    for parts, chosen in (((12,), {}), (sizes, options)):
        model = CASE.model()
        optimizer = distkfac(model, **chosen)
        link = helping(optimizer)
        optimizer._curvature.layers.capture.gate.open = True
        with noted():
            for part in zip(x.split(parts), y.split(parts), strict=True):
                (CASE.loss(model(part[0]), part[1]) * (len(part[0]) / 12)).backward()
            optimizer.step()
        sent.append(link.sent[0].tensors)
    torch.testing.assert_close(sent[1], sent[0])


def worker_with_link() -> tuple[nn.Module, Any, FakeLink, Any]:
    """A worker's model, optimizer and link, and what a stats worker might send it."""
    other = CASE.model()
    model = CASE.model()
    sent = message(other, distkfac(other), lambda: loss_on(other), "step")
    worker = distkfac(model)
    return model, worker, helped(worker), sent


def test_workers_capture_again_when_no_valid_statistics_arrive() -> None:
    _, worker, link, sent = worker_with_link()
    helpers = worker._curvature.stats_workers
    own = []
    spoiled = [t * math.nan for t in sent[0]], sent[1]
    for content in (sent, spoiled, sent):
        link.came.append(Message(content[0], content[1]))
        own_blocks = {block.name: block for block in worker._curvature.layers.blocks}
        with noted():
            list(helpers.receive_statistics(own_blocks, worker._training))
        helpers.agree(worker._training)
        own.append(helpers.own_passes)
    assert own == [False, True, False]


@pytest.mark.filterwarnings("ignore:no layer gave statistics")
def test_factors_decay_between_messages_as_in_as_many_steps() -> None:
    other = CASE.model()
    model = CASE.model()
    sent = message(other, distkfac(other), lambda: loss_on(other), "step")
    worker = distkfac(model, factor_decay=FORGETFUL)
    link = helped(worker)
    expected = 0.0
    last = 0
    for step in (2, 5, 7):
        while worker._training.steps < step:
            worker.step()
        deliver_statistics(worker, link, sent, 0)
        expected = expected * FORGETFUL.decay ** (step - last) + 1.0
        last = step
        for block in worker._curvature.layers.blocks:
            assert float(block.factors.weight) == pytest.approx(expected)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_first_message_decays_factors_since_the_last_update(resumed: bool) -> None:
    """Which was of own passes, or is in the checkpoint."""
    other = CASE.model()
    model = CASE.model()
    sent = message(other, distkfac(other), lambda: loss_on(other), "step")
    worker = distkfac(model, factor_decay=FORGETFUL)
    for _ in range(60):
        worker.zero_grad()
        loss_on(model).backward()
        worker.step()
    if resumed:
        saved = worker.state_dict()
        worker = distkfac(model, factor_decay=FORGETFUL, factor_update_steps=1000)  # by own passes
        worker.load_state_dict(saved)
    before = [float(block.factors.weight) for block in worker._curvature.layers.blocks]
    deliver_statistics(worker, helped(worker), sent, 0)
    for block, weight in zip(worker._curvature.layers.blocks, before, strict=True):
        assert float(block.factors.weight) == pytest.approx(weight * FORGETFUL.decay + 1.0)


def test_a_stats_workers_gradients_do_not_accumulate() -> None:
    model = CASE.model()
    seen = []
    optimizer = distkfac(model)
    link = helping(optimizer)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    note = noted_point(6)
    link.came += [Message([flat], note) for _ in range(3)]

    def loss(_: Any) -> Tensor:
        seen.append(all(p.grad is None for p in model.parameters()))
        return loss_on(model)

    assert optimizer.serve([None], loss) == 3
    assert seen == [True] * 3


def test_no_snapshot_is_sent_while_statistics_are_in_transit() -> None:
    link: Any = FakeLink()
    helpers = StatsWorkers(1, 1.0)
    helpers.links = [link]

    def send(copies: list[Tensor], deliver: Any) -> None:
        deliver(copies)

    for answered, expected in ((None, 1), (0, 1), (1, 2), (None, 2)):
        if answered is not None:
            note = {"layers": [], "plan_version": 0, "snapshots": answered}
            link.came.append(Message([], note))
            list(helpers.receive_statistics({}, TWO))
        helpers.send_snapshots(TWO, send)
        assert len(link.sent) == expected


def deliver_statistics(worker: Any, link: FakeLink, sent: Any, version: int) -> None:
    """Take a step, with a message that is about layers as they were at an edition."""
    tensors, note = sent
    link.came.append(Message(tensors, note | {"plan_version": version}))
    worker.step()


def test_after_a_change_workers_capture_until_newer_messages_arrive() -> None:
    """A message that was on its way is dropped, even if its shapes fit."""
    model, worker, link, sent = worker_with_link()
    captured = []
    for i, version in enumerate([0, 0, 1, 1, 2]):
        model[2].requires_grad_(i != 1)  # frozen for one step
        worker.zero_grad()
        loss_on(model).backward()
        captured.append(any(not b.staged.empty for b in worker._curvature.layers.blocks))
        deliver_statistics(worker, link, sent, version)
        assert worker._curvature.stats_workers.own_passes == (i in (1, 2, 3))
    assert captured[3:] == [True, True]
