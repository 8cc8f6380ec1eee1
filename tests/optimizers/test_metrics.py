"""`metrics()`: numbers of the last step by names that are everywhere the same."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from models import ZOO
from optimizer_cases import each_kronecker, each_of_five, make, same, take
from ranks import kaisa, shard

from instruments import bytes_by_stage
from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC
from second_order.kfac import metrics as kfac_metrics
from second_order.kfac.schedule import ADAPTIVE, MAX_INTERVAL
from second_order.kfac.step_scale import ADAPTIVE_BOUNDS, PLAIN_BOUNDS
from second_order.utils.stages import recorded_by, stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(5, n=12)


@each_of_five
def test_metrics_change_nothing_and_have_constant_names(System: Any) -> None:
    """Before the first step, after each, in a copy, and once it is closed."""
    trajectories = []
    for requested in (True, False):
        model = MLP.model()
        optimizer = make(System, model, momentum=0.9)
        names = set(optimizer.metrics())
        for step, batch in enumerate(BATCHES):
            take(model, optimizer, batch, MLP.loss)
            if requested:
                found = optimizer.metrics()
                assert set(found) == names
                assert all(type(value) is float for value in found.values() if value != 0)
                assert found["step"] == step + 1
        optimizer.close()
        assert set(optimizer.metrics()) == names
        trajectories.append([p.detach().clone() for p in model.parameters()])
    assert same(*trajectories)
    assert not same(trajectories[0], MLP.model())


@each_kronecker
def test_the_reported_clip_is_the_one_that_was_applied(System: Any) -> None:
    """The same step with and without it."""
    gradients = []
    for kl_clip in (1e-6, None):
        model = MLP.model()
        optimizer = make(System, model, kl_clip=kl_clip)
        assert optimizer.metrics()["clip"] == 1.0
        take(model, optimizer, BATCHES[0], MLP.loss)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        clip = optimizer.metrics()["clip"]
        if kl_clip is not None:
            nu = clip
            assert 0 < nu < 0.9
        else:
            assert clip == 1.0
    for short, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(short, nu * whole, rtol=1e-10, atol=1e-14)


def test_after_close_no_step_is_clipped_or_scaled() -> None:
    model = MLP.model()
    optimizer = make(KAISA, model, step_scale=True)
    for batch in BATCHES:
        take(model, optimizer, batch, MLP.loss)
    assert optimizer.metrics()["step_scale"] != 1.0
    optimizer.close()
    take(model, optimizer, BATCHES[0], MLP.loss)
    metrics = optimizer.metrics()
    assert (metrics["clip"], metrics["step_scale"]) == (1.0, 1.0)


def raising(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("no")


def test_failures_are_counted() -> None:
    model = MLP.model()
    optimizer = kaisa(model)
    for step, batch in enumerate(BATCHES):
        with patch.object(torch.linalg, "eigh", raising if step in (2, 3) else torch.linalg.eigh):
            take(model, optimizer, batch, MLP.loss)
        found = optimizer.metrics()
        layers = found["layers"]
        failed = {2: layers, 3: 2 * layers, 4: 2 * layers}.get(step, 0)
        assert found["failed"] == failed
        assert found["layers/failing"] == (layers if step in (2, 3) else 0)
        assert found["age/inverses"] == {2: 1, 3: 2}.get(step, 0)


def names_and_bytes(rank: int, world_size: int, System: Any, options: dict[str, Any]) -> Any:
    """The names of the metrics, the bytes of the last step by stage, and the clip."""
    model = MLP.model()
    optimizer = make(System, model, **options)
    for batch in BATCHES[:2]:
        with bytes_by_stage() as sent:
            take(model, optimizer, shard(batch, rank, world_size), MLP.loss)
        if rank == 0:  # nothing is sent: the other ranks need not call it
            optimizer.metrics()
    metrics = optimizer.metrics()
    return sorted(metrics), dict(sent), metrics.get("clip")


@pytest.mark.parametrize(
    ("System", "options", "stages"),
    [
        (KAISA, {"grad_worker_fraction": 0.5}, ["statistics_exchange", "precondition_exchange"]),
        (DPKFAC, {"kl_clip": 1e-5}, ["precondition_exchange", "average_gradients"]),
        (DistKFAC, {}, ["statistics_exchange", "solve_exchange", "average_gradients"]),
        (DHO2, {"layout": "row", "warmup_steps": 0}, ["exchange", "average_gradients", "split"]),
    ],
    ids=["KAISA", "DPKFAC", "DistKFAC", "DHO2"],
)
def test_every_message_belongs_to_a_stage(
    world: World, System: Any, options: dict[str, Any], stages: list[str]
) -> None:
    results = world.run(names_and_bytes, 2, System, options)
    for names, sent, clip in results:
        assert names == results[0][0]
        assert clip == results[0][2]
        assert all(sent[name] > 0 for name in stages)
        assert sent.get("", 0) == 0


def test_stages_are_ranges_of_torch_profiler() -> None:
    model = MLP.model()
    optimizer = make(KAISA, model, factor_update_steps=1, inv_update_steps=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take(model, optimizer, BATCHES[0], MLP.loss)
    names = {event.name for event in profile.events()}
    stages = {"statistics", "solve", "precondition", "base"}
    assert names >= {f"second_order.{stage}" for stage in stages}
    assert isinstance(stage("base"), nullcontext)  # without a profiler


def test_a_recorder_replaces_the_profiler() -> None:
    seen: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    with recorded_by(noted), stage("solve"):
        pass
    with stage("base"):
        pass
    assert seen == ["solve"]


def test_the_page_lists_all_metrics() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to/monitor.md").read_text("utf-8")
    page = page.split("## Stages of a step")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    expected = {*kfac_metrics.METRIC_NAMES, *make(MRDHO2, MLP.model()).metrics()}
    assert named == expected


def test_healthy_values_on_the_page_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to/monitor.md").read_text("utf-8")
    page = " ".join(page.split())
    highs = (
        f"up to {PLAIN_BOUNDS.high:g} over SGD, and up to {ADAPTIVE_BOUNDS.high:g} over adaptive"
    )
    assert highs in page
    assert PLAIN_BOUNDS.low == ADAPTIVE_BOUNDS.low
    assert f"falls towards {PLAIN_BOUNDS.low}" in page
    assert f"mostly above {ADAPTIVE.halve_below}" in page
    assert f"from 1 towards {MAX_INTERVAL}" in page


def test_the_page_lists_all_stages() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "how-to/monitor.md").read_text("utf-8")
    page = page.split("## Stages of a step")[1].split("\n## ")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    entered: set[str] = set()
    for path in (root / "src").rglob("*.py"):
        entered |= set(re.findall(r'\bstage\("(\w+)"\)', path.read_text("utf-8")))
    entered -= {"judge"}  # on accelerators, which take no steps
    assert listed == entered | {"wait"}
