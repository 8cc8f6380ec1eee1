"""Models in whole graphs, compiled steps, modules that hold the model, and several processes."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from contract import (
    DPKFAC,
    KAISA,
    DistKFAC,
    asking,
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_system,
    factors,
    make,
    same,
    take,
)
from models import ZOO
from ranks import agreed, assert_same_trajectory, replaced
from reference import cross_entropy
from stepped import assert_near
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from second_order import SecondOrderWarning

if TYPE_CHECKING:
    from pool import World
    from reference import Batch

pytestmark = [
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
MLP = ZOO["mlp"]
BATCHES = MLP.batches(5)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Whole graphs of other tests are not counted: past a number of them none is made."""
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("System", "backend"), [(KAISA, "aot_eager"), (DPKFAC, "eager"), (DistKFAC, "eager")]
)
def test_a_model_in_one_graph_trains_as_the_eager_one(System: Any, backend: str) -> None:
    """Statistics every other step: two graphs in all, and no more."""
    model, twin = MLP.model(), MLP.model()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = make(System, model, factor_update_steps=2)
    plain = make(System, twin, factor_update_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        for batch in BATCHES:
            take(compiled, optimizer, batch)
            take(twin, plain, batch)
    assert_same_factors(factors(optimizer), factors(plain))
    assert_near(model, twin)
    raw = MLP.model()
    take(raw, torch.optim.SGD(raw.parameters(), lr=0.05), BATCHES[0])
    assert not torch.allclose(raw[0].weight, twin[0].weight, rtol=1e-3)


@each_system
def test_a_compiled_step_takes_the_same_steps_and_schedulers_wrap_it(System: Any) -> None:
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model, momentum=0.9), make(System, twin, momentum=0.9)
    schedules = [OneCycleLR(each, 0.1, total_steps=9) for each in (optimizer, plain)]
    step = torch.compile(optimizer.step, backend="eager")
    rates = []
    for batch in BATCHES[:3]:
        x, y = batch
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        step(**asking(model, optimizer, batch))
        take(twin, plain, batch)
        for schedule in schedules:
            schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert same(model, twin)
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain))
    assert len(set(rates)) == 3


def test_a_step_in_one_graph_is_refused_with_the_reason() -> None:
    model = MLP.model()
    optimizer = make(KAISA, model)
    cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="compile the model, or the function around the step"):
        step()


# Modules that hold the model, as Lightning's do.


class Lit(nn.Module):
    """A module that has the loss within its compiled step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP.model()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch) -> Tensor:
        x, y = batch
        return cross_entropy(self(x), y)


def inside(lit: Lit) -> Lit:
    """As in `configure_model`: only the network is compiled, and takes its place."""
    lit.net = torch.compile(lit.net, backend="eager", fullgraph=True)  # type: ignore[assignment]
    return lit


# Processes.


def train_compiled(rank: int, world_size: int, System: Any, how: str) -> list[Tensor]:
    torch._dynamo.reset()
    model = MLP.model()
    whole: nn.Module = model
    if how == "DDP of compiled":
        whole = DistributedDataParallel(torch.compile(model, backend="aot_eager", fullgraph=True))
    elif how == "compiled DDP":
        whole = torch.compile(
            DistributedDataParallel(model, bucket_cap_mb=1e-4), backend="aot_eager"
        )
    elif how == "DDP":
        whole = DistributedDataParallel(model)
    optimizer = make(System, whole)
    trajectory = []
    # Buckets so small that the graph is split between layers.
    with replaced(dist, {"_DEFAULT_FIRST_BUCKET_BYTES": 1}):
        for x, y in BATCHES[:3]:
            mine = slice(rank * len(x) // world_size, (rank + 1) * len(x) // world_size)
            take(whole, optimizer, (x[mine], y[mine]))
            trajectory.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return trajectory


@pytest.mark.parametrize("System", [KAISA, DPKFAC])
def test_compiled_under_ddp_and_ddp_compiled(world: World, System: Any) -> None:
    plain = agreed(world.run(train_compiled, 2, System, "DDP"))
    for how in ("DDP of compiled", "compiled DDP"):
        assert_same_trajectory(agreed(world.run(train_compiled, 2, System, how)), plain)


# While the optimizer lives.


@each_system
def test_the_model_is_exported_traced_scripted_and_compiled_between_steps(System: Any) -> None:
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    x = BATCHES[0][0]
    for batch in BATCHES[:3]:
        take(model, optimizer, batch)
        take(twin, plain, batch)
        model.eval()
        with torch.no_grad():
            expected = model(x)
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), expected)
            torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
        with optimizer.hooks_removed():
            torch.testing.assert_close(torch.jit.script(model)(x), expected)
            assert not any(m._forward_hooks for m in copy.deepcopy(model).modules())
        model.train()
    assert_near(model, twin)
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain))


@each_system
def test_no_step_is_taken_without_hooks(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    before = copy.deepcopy(model)
    with optimizer.hooks_removed(), optimizer.hooks_removed():
        cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
        with pytest.raises(RuntimeError, match=r"step\(\) inside hooks_removed\(\)"):
            optimizer.step()
    assert same(model, before)
    take(model, optimizer, BATCHES[0])
    assert curvature_of(optimizer) or System.__name__ == "DHO2"
