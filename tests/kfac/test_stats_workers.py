"""What gradient workers and stats workers say to each other, over a link of one's own."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from distkfac_training import BATCHES, CASE, distkfac
from optimizer_cases import noted
from ranks import replaced
from torch import Tensor, nn

from second_order import PerStep
from second_order.distributed.helper_link import Message
from second_order.kfac.stats_workers import StatsWorker, StatsWorkers
from second_order.kronecker.block import KroneckerBlock

if TYPE_CHECKING:
    from collections.abc import Callable


FORGETFUL = PerStep(0.95)
MODEL = SimpleNamespace(parameters=lambda: [torch.ones(2)], buffers=list)
TWO: Any = SimpleNamespace(model=MODEL, groups=[], world=SimpleNamespace(rank=0), steps=6)


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

    def request_shutdown(self) -> None:
        pass

    def close(self, patience: float) -> None:
        pass


def noted_point(tensors: int, step: int = 1) -> dict[str, Any]:
    """The note of a snapshot of so many tensors, all of which train."""
    trains = [True] * tensors
    return {"train": trains, "optimized": trains, "plan_version": 0, "step": step}


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
            note = {"layers": [], "plan_version": 0, "snapshots": answered, "unverified": {}}
            link.came.append(Message([], note))
            list(helpers.receive_statistics({}, TWO))
        helpers.send_snapshots(TWO, send)
        assert len(link.sent) == expected
    assert {sent.note["step"] for sent in link.sent} == {7}, "the step that the snapshot is for"


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


def test_statistics_from_before_a_rollback_are_discarded() -> None:
    """They belong to parameters that load_state_dict has replaced."""
    _, worker, link, sent = worker_with_link()
    deliver_statistics(worker, link, sent, 0)
    saved = copy.deepcopy(worker.state_dict())
    assert not worker._curvature.stats_workers.own_passes
    worker.load_state_dict(saved)
    assert worker._curvature.stats_workers.own_passes
    weights = []
    for version in (0, 1):
        deliver_statistics(worker, link, sent, version)
        weights.append(float(worker._curvature.layers.blocks[0].factors.weight))
        assert worker._curvature.stats_workers.own_passes == (version == 0)
    assert weights[0] == 1.0, "only of the message before"
    assert weights[1] > 1.0


def serve_snapshot(model: nn.Module, stats: Any, step: int) -> Message:
    """What a stats worker sends of a snapshot for a step."""
    link = stats._curvature.link
    tensors = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in tensors])
    link.came.append(Message([flat], noted_point(len(tensors), step)))
    stats.serve([None], lambda _: loss_on(model))
    return link.sent.pop()


def test_a_stats_worker_verifies_layers_at_the_milestones_of_the_workers() -> None:
    """Its snapshots are of any steps, so it verifies at the first two after a milestone."""
    model = CASE.model()
    stats = distkfac(model)
    helping(stats)
    compared = []
    record_residual = KroneckerBlock.record_residual

    def recorded(block: KroneckerBlock, residual: float | None) -> None:
        compared.append((block.name, step))
        record_residual(block, residual)

    with replaced(KroneckerBlock, {"record_residual": recorded}):
        for step in (1, 2, 40, 99, 103, 110, 111, 1009, 1010, 1020):
            serve_snapshot(model, stats, step)
    for name in ("0", "2", "4"):
        assert [s for layer, s in compared if layer == name] == [1, 2, 103, 110, 1009, 1010]


@pytest.mark.parametrize("is_patched", [True, False])
def test_a_layer_that_a_stats_worker_cannot_verify_falls_back_until_it_passes(
    is_patched: bool,
) -> None:
    """The worker warns once, of this layer only; of a healthy model it does not warn."""
    stats_model: Any = CASE.model()
    stats = distkfac(stats_model)
    helping(stats)
    plain = stats_model[2].forward
    with noted() as warned:
        model = CASE.model()
        worker = distkfac(model, max_staleness=0)
        link = helped(worker)
        statuses = []
        for step in (1, 2, 100, 101, 102, 103, 104, 105, 106):
            if is_patched and step == 101:
                stats_model[2].forward = lambda x: 3 * plain(x)
            elif is_patched and step == 103:
                del stats_model[2].forward
            sent = serve_snapshot(stats_model, stats, step)
            worker.zero_grad()
            loss_on(model).backward()
            deliver_statistics(worker, link, sent, 0)
            rows = {row.name: row for row in worker.summary().rows}
            assert rows["0"].status == rows["4"].status == "preconditioned"
            is_solved = worker._curvature.layers.blocks[1].solved
            statuses.append((step, rows["2"].status == "preconditioned" and is_solved))
            if rows["2"].status == "base":
                assert "of its gradient unexplained" in rows["2"].detail
    fallen = [step for step, preconditioned in statuses if not preconditioned]
    assert fallen == ([101, 102, 103] if is_patched else [])
    assert len(warned) == is_patched
    assert all(line.startswith("'2': the inputs and output gradients") for line in warned)


@pytest.mark.parametrize("lost", [False, True])
def test_a_layer_is_verified_again_only_when_no_stats_worker_has_found_it_unverified(
    lost: bool,
) -> None:
    """The finding of a lost stats worker ends with its link."""
    worker = distkfac(CASE.model())
    training = worker._training
    helpers = StatsWorkers(2, 1.0)
    links: list[Any] = [FakeLink(), FakeLink()]
    helpers.links = list(links)
    helpers.own_passes = False
    blocks = worker._curvature.layers.blocks

    def deliver(link: FakeLink, *names: str) -> list[str]:
        residuals = dict.fromkeys(names, 0.5)
        note = {"layers": [], "plan_version": 0, "snapshots": 1, "unverified": residuals}
        link.came.append(Message([], note))
        list(helpers.receive_statistics({}, training))
        helpers.update_verification(blocks)
        return [block.name for block in blocks if block.unverified]

    assert deliver(links[0], "2") == ["2"]
    assert deliver(links[1], "2", "4") == ["2", "4"]
    assert deliver(links[1]) == ["2"]
    if lost:
        links[0].lost = True
        with noted():
            helpers.agree(training)
        helpers.own_passes = False
        helpers.update_verification(blocks)
        assert not any(block.unverified for block in blocks)
    else:
        assert deliver(links[0]) == []
        assert deliver(links[0], "2") == ["2"]

    # After a change of layers, this rank's own comparisons count alone.
    helpers.restart()
    for block in blocks:
        block.record_residual(0.0)
    helpers.update_verification(blocks)
    assert not any(block.unverified for block in blocks)


def test_stats_workers_do_not_verify_what_a_workers_own_passes_found_unverified() -> None:
    """While a worker's statistics are those of its own passes."""
    worker = distkfac(CASE.model())
    helpers = StatsWorkers(1, 1.0)
    block = worker._curvature.layers.blocks[1]
    block.record_residual(0.5)
    for own_passes in (True, False):
        helpers.own_passes = own_passes
        helpers.update_verification([block])
        assert block.unverified == own_passes
