"""`statistics()`: numbers of the last step by names that are everywhere the same; nothing is sent.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from accelerated import BATCHES as EPOCH_BATCHES
from accelerated import CASE as EPOCH_CASE
from accelerated import loss_of, mrdho2
from contract import EIGENPAIRS, KRONECKER, PLAIN, each_kronecker, each_of_five, make, same, take
from models import ZOO
from ranks import kaisa, shard
from torch.autograd import profiler

from instruments import sent_bytes
from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC
from second_order import stages as module
from second_order.fosi import metrics as eigenpair_statistics
from second_order.kfac import metrics as kronecker_statistics
from second_order.stages import Meter

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(5, n=12)


@each_of_five
def test_asking_changes_nothing_and_the_names_are_always_the_same(System: Any) -> None:
    """Before the first step, after each, in a copy, and once it is closed."""
    trajectories = []
    for asks in (True, False):
        model = MLP.model()
        optimizer = make(System, model, momentum=0.9)
        names = set(optimizer.statistics())
        for step, batch in enumerate(BATCHES):
            take(model, optimizer, batch, MLP.loss)
            if asks:
                found = optimizer.statistics()
                assert set(found) == names
                assert all(type(value) is float for value in found.values() if value != 0)
                assert found["step"] == step + 1
        optimizer.close()
        assert set(optimizer.statistics()) == names
        trajectories.append([p.detach().clone() for p in model.parameters()])
    assert same(*trajectories)
    assert not same(trajectories[0], MLP.model())


@each_kronecker
def test_intervals_are_those_of_the_last_step(System: Any) -> None:
    """A schedule is not asked for the coming one."""
    model = MLP.model()
    rare = {"factor_update_steps": lambda step: 1 if step < 2 else 5}
    optimizer = make(System, model, **rare)
    found = []
    for batch in BATCHES[:3]:
        take(model, optimizer, batch, MLP.loss)
        found.append(optimizer.statistics()["factor_update_steps"])
    assert found == [1, 1, 5]


@each_kronecker
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("scale", ["newton", "gradient"])
def test_what_is_said_of_layers_is_what_dense_matrices_say(
    System: Any, solver: str, scale: str
) -> None:
    model = MLP.model()
    options = {"relative_damping": True, "damping": 0.3, "kl_clip": 1e-3, "solver": solver}
    options["preconditioner_scale"] = scale
    optimizer = make(System, model, inv_update_steps=3, **options)
    for batch in BATCHES:
        take(model, optimizer, batch, MLP.loss)
        if optimizer.statistics()["age/inverses"] == 0:  # factors that the inverses are of
            blocks = list(optimizer._curvature.plan)
            factors = [block.ensure_factors() for block in blocks]
            matrices = [f.matrices(torch.float64) for f in factors]
            dampings = [0.3 * float(f.mean_curvature()) for f in factors]
            expected = conditions(matrices, dampings, solver)
    found = optimizer.statistics()
    assert found["age/inverses"] == 1  # solved at steps 0 and 3, of 0 to 4
    assert found["age/statistics"] == 0
    assert (found["factor_update_steps"], found["inv_update_steps"]) == (1, 3)
    assert found["damping"] == 0.3
    assert found["damping/min"] == pytest.approx(min(dampings))
    assert found["damping/max"] == pytest.approx(max(dampings))
    assert found["layers"] == found["layers/solved"] == len(blocks)
    now = [block.ensure_factors().matrices(torch.float64) for block in blocks]
    for position, letter in enumerate("AG"):
        traces = [float(m[position].diagonal(dim1=-2, dim2=-1).sum()) for m in now]
        assert found[f"trace_{letter}/min"] == pytest.approx(min(traces))
        assert found[f"trace_{letter}/max"] == pytest.approx(max(traces))
    if solver == "eigen":
        assert found["condition/max"] == pytest.approx(max(expected))
        assert found["condition/min"] == pytest.approx(min(expected))
    else:
        assert max(expected) / 2 < found["condition/max"] < max(expected) * 2


def conditions(matrices: Any, dampings: list[float], solver: str) -> list[float]:
    """Of A ⊗ G + γ, or of (A + π√γ) ⊗ (G + √γ/π)."""
    found = []
    for pair, damping in zip(matrices, dampings, strict=True):
        a, g = (m if m.dim() == 3 else torch.diag_embed(m) for m in pair)
        if solver == "eigen":
            dense = torch.kron(g[0], a[0]) + damping * torch.eye(g.shape[-1] * a.shape[-1])
            found.append(float(torch.linalg.cond(dense)))
            continue
        pi = math.sqrt(float(a[0].trace()) / len(a[0]) / (float(g[0].trace()) / len(g[0])))
        parts = ((a[0], pi * math.sqrt(damping)), (g[0], math.sqrt(damping) / pi))
        damped = [m + x * torch.eye(len(m)) for m, x in parts]
        found.append(math.prod(float(torch.linalg.cond(m)) for m in damped))
    return found


@each_kronecker
def test_the_clip_is_the_one_that_shortened_the_gradient(System: Any) -> None:
    """The same step with and without it."""
    gradients = []
    for kl_clip in (1e-6, None):
        model = MLP.model()
        optimizer = make(System, model, kl_clip=kl_clip)
        assert optimizer.statistics()["clip"] == 1.0
        take(model, optimizer, BATCHES[0], MLP.loss)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        clip = optimizer.statistics()["clip"]
        if kl_clip is not None:
            nu = clip
            assert 0 < nu < 0.9
        else:
            assert clip == 1.0
    for short, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(short, nu * whole, rtol=1e-10, atol=1e-14)


def raising(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("no")


def test_failures_are_counted() -> None:
    model = MLP.model()
    optimizer = kaisa(model)
    for step, batch in enumerate(BATCHES):
        with patch.object(torch.linalg, "eigh", raising if step in (2, 3) else torch.linalg.eigh):
            take(model, optimizer, batch, MLP.loss)
        found = optimizer.statistics()
        layers = found["layers"]
        failed = {2: layers, 3: 2 * layers, 4: 2 * layers}.get(step, 0)
        assert found["failed"] == failed
        assert found["layers/failing"] == (layers if step in (2, 3) else 0)
        assert found["age/inverses"] == {2: 1, 3: 2}.get(step, 0)


def test_the_newton_share_is_that_of_the_movement() -> None:
    """In coordinates of the eigenvectors, with the whole movement of the parameters."""
    model = MLP.model()
    stretched = {"lr_scale_clip": 3.0, "lr_scale_guard": False}
    optimizer = make(DHO2, model, curvature_interval=100, **stretched)
    for step, batch in enumerate(BATCHES):
        before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        take(model, optimizer, batch, MLP.loss)
        moved = torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before
        subspace, found = optimizer._curvature.subspace, optimizer.statistics()
        if step == 0:
            assert subspace is None
            assert math.isnan(found["newton_share"])
            assert found["pairs"] == 0
            continue
        assert found["rest_scale"] == subspace.rest_scale > 1.1
        inside = subspace.basis.vectors @ moved
        share = float(inside.square().sum() / moved.square().sum())
        assert found["newton_share"] == pytest.approx(share, rel=1e-8)
        assert 0.001 < share < 0.999
        assert found["age/pairs"] == step - 1
        report = optimizer.curvature
        assert found["eigenvalue/largest"] == float(report.eigenvalues.max())
        assert found["eigenvalue/smallest"] == float(report.eigenvalues.min())
        assert found["lanczos/products"] == report.products
        assert found["gradient_share"] == report.gradient_share
        assert found["pairs"] == 4


# ------------------------------------------------------------------------------- seconds and bytes


def test_all_accounts_together_are_the_whole_time() -> None:
    """By a clock that is told."""
    now = 100.0
    meter = Meter(now=lambda: now)
    now += 1.0
    with meter.stage("statistics"):
        now += 2.0
        with meter.stage("exchange"):
            now += 4.0
            module.sent(640)
        now += 8.0
        with meter.stage("capture"):
            now += 16.0
    with meter.stage("exchange"):
        now += 32.0
    with pytest.raises(KeyError), meter.stage("solve"):
        raise KeyError
    now += 64.0
    accounts = ("statistics", "statistics_exchange", "exchange", "solve", "elsewhere", "base")
    assert set(meter.read(accounts).values()) == {0.0}
    meter.lap()
    found = meter.read(accounts)
    seconds = [found[f"seconds/{name}"] for name in accounts]
    assert seconds == [26.0, 4.0, 32.0, 0.0, 65.0, 0.0]
    assert found["bytes/statistics_exchange"] == 640
    assert sum(found[f"bytes/{name}"] for name in accounts) == 640
    with meter.stage("base"):
        now += 128.0
    meter.lap()
    found = meter.read(accounts)
    assert found["seconds/base"] == found["total_seconds/base"] == 128.0
    assert (found["seconds/statistics"], found["total_seconds/statistics"]) == (0.0, 26.0)


@each_of_five
def test_without_a_profiler_no_range_is_entered(System: Any) -> None:
    """One takes microseconds even where nobody listens."""
    model = MLP.model()
    optimizer = make(System, model)
    entered = []
    enter = profiler.record_function.__enter__

    def note(self: Any) -> Any:
        entered.append(self.name)
        return enter(self)

    with patch.object(profiler.record_function, "__enter__", note):
        take(model, optimizer, BATCHES[0], MLP.loss)
        take(model, optimizer, BATCHES[1], MLP.loss)
        assert not [name for name in entered if name.startswith("second_order.")]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as result:
            take(model, optimizer, BATCHES[2], MLP.loss)
    shown = {event.name for event in result.events() or []}
    wanted = {"base", "split", "newton"} if System in EIGENPAIRS else {"capture", "solve", "base"}
    if System is not MRDHO2:
        assert {f"second_order.{name}" for name in wanted} <= shown
    assert set(entered) & shown


def bytes_of_steps(rank: int, world_size: int, System: Any, options: dict[str, Any]) -> Any:
    """Of a step, as the accounts have them, and as torch.distributed is given them."""
    model, found = MLP.model(), []
    optimizer = make(System, model, **options)
    for batch in BATCHES[:2]:
        with sent_bytes() as sent:
            take(model, optimizer, shard(batch, rank, world_size), MLP.loss)
        if rank == 0:  # nothing is sent: the others need not ask
            optimizer.statistics()
        found.append(sum(sent.values()))
    told = optimizer.statistics()
    mine = {name: told[name] for name in told if name.startswith("bytes/")}
    return sorted(told), found[-1], mine, told.get("clip")


@pytest.mark.parametrize(
    ("System", "options", "accounts"),
    [
        (KAISA, {"grad_worker_fraction": 0.5}, ["statistics_exchange", "precondition_exchange"]),
        (DPKFAC, {"kl_clip": 1e-5}, ["precondition_exchange", "average_gradients"]),
        (DistKFAC, {}, ["statistics_exchange", "solve_exchange", "average_gradients"]),
        (DHO2, {"layout": "row", "warmup_steps": 0}, ["exchange", "average_gradients", "split"]),
    ],
    ids=["KAISA", "DPKFAC", "DistKFAC", "DHO2"],
)
def test_every_byte_is_on_an_account_and_the_names_are_those_of_all_ranks(
    world: World, System: Any, options: dict[str, Any], accounts: list[str]
) -> None:
    results = world.run(bytes_of_steps, 2, System, options)
    for names, sent, mine, clip in results:
        assert names == results[0][0]
        assert clip == results[0][3]
        assert sum(mine.values()) == sent > 0
        assert all(mine[f"bytes/{name}"] > 0 for name in accounts)
        assert mine["bytes/elsewhere"] == 0


def with_helpers(rank: int, world_size: int, System: Any) -> tuple[str, dict[str, float]]:
    """The last rank helps."""
    model = EPOCH_CASE.model()
    if System is MRDHO2:
        optimizer: Any = mrdho2(model, largest=2, smallest=0, lanczos_iterations=8, epoch_steps=2)
    else:
        optimizer = DistKFAC(model, stats_workers=1, helper_timeout=30.0, **PLAIN)
    with optimizer:
        if optimizer.role != "worker":
            optimizer.serve(EPOCH_BATCHES, lambda batch: loss_of(model, batch))
        else:
            for batch in EPOCH_BATCHES[:5]:
                optimizer.zero_grad()
                loss_of(model, shard(batch, rank, 2)).backward()
                optimizer.step()
        return optimizer.role, optimizer.statistics()


@pytest.mark.parametrize("System", [DistKFAC, MRDHO2], ids=["DistKFAC", "MRDHO2"])
def test_helpers_have_the_same_names(world: World, System: Any) -> None:
    results = world.run(with_helpers, 3, System)
    assert {role for role, _ in results} > {"worker"}
    for role, found in results:
        assert found.keys() == results[0][1].keys()
        assert (found["step"] == 5) == (role == "worker")
    worker = results[0][1]
    if System is MRDHO2:
        assert worker["epoch/number"] == 2
        assert worker["epoch/waited"] >= 0
        assert worker["total_bytes/average_gradients"] > 0


# ---------------------------------------------------------------------------------------- the page


def test_the_page_has_every_name_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "instruments.md").read_text("utf-8")
    page = page.split("## The stage picture")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    expected = {"step", *kronecker_statistics.NAMES, *eigenpair_statistics.NAMES}
    expected |= set(eigenpair_statistics.EPOCH_NAMES)
    expected |= {"seconds/…", "total_seconds/…", "bytes/…", "total_bytes/…"}
    accounts = {*kronecker_statistics.ACCOUNTS, *eigenpair_statistics.ACCOUNTS}
    assert named == expected | accounts


def test_each_system_gives_the_names_of_its_kind() -> None:
    for System in [*KRONECKER, DHO2, MRDHO2]:
        found = {n for n in make(System, MLP.model()).statistics() if "seconds/" not in n}
        ours = eigenpair_statistics if System in EIGENPAIRS else kronecker_statistics
        epochs = eigenpair_statistics.EPOCH_NAMES if System is MRDHO2 else ()
        named = {n for n in found if "bytes/" not in n}
        assert named == {"step", *ours.NAMES, *epochs}
        assert {n.removeprefix("bytes/") for n in found if n.startswith("bytes/")} == set(
            ours.ACCOUNTS
        )
