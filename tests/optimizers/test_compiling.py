"""Models in whole graphs, compiled steps, modules that hold the model, and several processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import ZOO
from optimizer_cases import (
    KAISA,
    asking,
    assert_same_curvature,
    curvature_of,
    each_system,
    make,
    same,
    take,
)
from reference import cross_entropy
from step_reference import assert_near
from torch._dynamo.testing import CompileCounter
from torch.optim.lr_scheduler import OneCycleLR

pytestmark = [
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
MLP = ZOO["mlp"]
BATCHES = MLP.batches(5)


@each_system
def test_a_compiled_step_equals_an_eager_step_and_works_with_schedulers(System: Any) -> None:
    model = MLP.model()
    twin = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    plain = make(System, twin, momentum=0.9)
    schedules = [OneCycleLR(each, 0.1, total_steps=9) for each in (optimizer, plain)]
    counter = CompileCounter()
    step = torch.compile(optimizer.step, backend=counter)
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
    assert counter.frame_count == 0  # no storm of graphs


def test_compiling_the_step_with_fullgraph_raises_with_the_reason() -> None:
    model = MLP.model()
    optimizer = make(KAISA, model)
    cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"compile the model, or the function"):
        step()
    assert same(model, before)


@each_system
def test_the_model_can_be_exported_traced_scripted_and_compiled_between_steps(System: Any) -> None:
    model = MLP.model()
    twin = MLP.model()
    optimizer = make(System, model)
    plain = make(System, twin)
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


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@each_system
def test_hooks_stay_removed_until_the_outer_block_ends(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model[2:].parameters(), model=model)
    optimizer.training.add_forward_pre_hook(lambda module, arguments: None)
    before = hooks_of(model)
    with optimizer.hooks_removed():
        with optimizer.hooks_removed():
            assert hooks_of(model) == 0
        assert hooks_of(model) == 0
        with pytest.raises(RuntimeError, match=r"add_param_group\(\) inside hooks_removed\(\)"):
            optimizer.add_param_group({"params": list(model[0].parameters())})
        assert hooks_of(model) == 0
    assert hooks_of(model) == before


@each_system
def test_a_step_without_hooks_raises(System: Any) -> None:
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
