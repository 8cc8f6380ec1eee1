"""Captures of compiled models: the pairs of eager ones, from whole graphs."""

from __future__ import annotations

from typing import Any

import capture_recorders
import pytest
import torch
from capture_recorders import Keeper, Recorder, backward, linears
from models import ZOO
from optimizer_cases import hook_count
from torch import Tensor, nn

from second_order import register_layer
from second_order.kronecker.capture import Capture

MLP = ZOO["mlp"]  # Linear layers "0", "2", "4"
X = MLP.batch()[0]
pytestmark = [
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
each_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def watched(model: nn.Module) -> tuple[Capture, Keeper]:
    return capture_recorders.watched(model, recorder=Keeper())


def whole(model: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def assert_same_pairs(found: Recorder, expected: Recorder, rtol: float = 1e-12) -> None:
    assert len(found.pairs) == len(expected.pairs) > 0
    for actual_pair, its in zip(found.pairs, expected.pairs, strict=True):
        torch.testing.assert_close(actual_pair.x, its.x, rtol=rtol, atol=1e-14)
        torch.testing.assert_close(actual_pair.d, its.d, rtol=rtol, atol=1e-14)


@each_backend
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_a_compiled_model_gives_the_pairs_of_the_eager_model(name: str, backend: str) -> None:
    case = ZOO[name]
    model = case.model()
    twin = case.model()
    x = case.batch()[0]
    compiled = whole(model, backend)
    kinds = (nn.Linear, nn.Conv2d)
    recorders = []
    captures = []
    for each in (model, twin):
        recorders.append(Keeper())
        captures.append(Capture(recorders[-1]))
        captures[-1].attach(each, [m for m in each.modules() if isinstance(m, kinds)])
    backward(compiled, x)
    backward(twin, x)
    assert_same_pairs(*recorders)
    assert not any(recorders[0].grad_enabled)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_disabled_capture_adds_nothing_to_the_graph() -> None:
    model = MLP.model()
    seen: list[set[str]] = []

    def note(graph: Any, inputs: Any) -> Any:
        seen.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    compiled = torch.compile(model, backend=note, fullgraph=True)
    capture, recorder = watched(model)
    for step in range(6):
        capture.gate.open = step % 3 == 0
        backward(compiled)
        assert len(recorder.pairs) == 3 * (step // 3 + 1)
    assert len(seen) == 2
    assert "second_order.capture" in seen[0]
    assert "second_order.capture" not in seen[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Gate(nn.Module):
    """A product with the attributes of a router of experts."""

    num_experts = 3
    hidden_dim = 5

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def test_a_registered_class_can_have_the_attributes_of_a_router() -> None:
    register_layer(Gate, bias=None)
    model = nn.Sequential(nn.Linear(5, 5).double(), Gate())
    recorder = Keeper()
    capture = Capture(recorder)
    capture.attach(model, [model[1]])
    assert not capture.missed
    backward(whole(model))
    assert recorder.modules == [model[1]]


def test_blocks_of_one_kind_share_a_graph() -> None:
    """Each layer is compiled by itself. The number of a hook is not part of the graph."""
    model = nn.Sequential(*(Block() for _ in range(12)))
    _capture, recorder = watched(model)
    torch._dynamo.utils.counters.clear()
    for block in model:
        block.compile(backend="eager", fullgraph=True)
    backward(model)
    assert recorder.modules == linears(model)[::-1]
    assert graphs() == 2  # the first one's input requires no gradient


def test_captures_can_be_added_and_removed_after_compilation() -> None:
    """The hooks exist at the first run."""
    model = MLP.model()
    compiled = whole(model)
    recorder = Keeper()
    capture = Capture(recorder)
    capture.attach(model, linears(model))
    capture.attach(model, [model[0]])
    backward(compiled)
    assert recorder.modules == [model[0]]
    recorder.clear()
    capture.attach(model, linears(model))
    backward(compiled)
    assert len(recorder.pairs) == 3
    with capture.unhooked():
        assert hook_count(model) == 0
    backward(compiled)
    assert len(recorder.pairs) == 6
    capture.gate.open = False
    backward(compiled)
    capture.detach()
    assert hook_count(model) == 0
    backward(compiled)
    assert len(recorder.pairs) == 6


def test_evaluation_input_gradients_and_frozen_layers_give_no_pairs() -> None:
    model = MLP.model()
    capture, recorder = watched(model)
    compiled = whole(model)
    with torch.no_grad():
        compiled(X)
    x = X.clone().requires_grad_()
    torch.autograd.grad(compiled(x).sum(), x)
    assert not recorder.pairs
    assert "autograd.grad" in capture.missed[model[0]]
    model[2].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    backward(compiled)
    assert recorder.modules == [model[4], model[0]]


def test_inductor_gives_the_same_pairs() -> None:
    """Its memory planning uses the inputs' memory again as soon as it can."""
    model = MLP.model()
    twin = MLP.model()
    (_recorder, found) = watched(model)
    (_other, expected) = watched(twin)
    compiled = torch.compile(model, fullgraph=True)
    try:
        backward(compiled)
    except Exception as error:
        if "CppCompile" in repr(error) or "InvalidCxxCompiler" in repr(error):
            pytest.skip("no C++ compiler")
        raise
    backward(twin)
    assert_same_pairs(found, expected, rtol=1e-10)


def test_exported_and_traced_models_contain_no_hooks() -> None:
    model = MLP.model()
    _capture, recorder = watched(model)
    for strict in (False, True):
        targets = {
            str(node.target) for node in torch.export.export(model, (X,), strict=strict).graph.nodes
        }
        assert not any("second_order" in target for target in targets)
        assert any("linear" in target for target in targets)
    traced = torch.jit.trace(model, X)
    backward(traced)
    assert not recorder.pairs
    backward(model)
    assert len(recorder.pairs) == 3


def test_torch_jit_script_raises_with_a_remedy_that_works() -> None:
    model = MLP.model()
    capture, recorder = watched(model)
    with pytest.raises(AttributeError, match=r"with optimizer.hooks_removed\(\)"):
        torch.jit.script(model)
    with capture.unhooked():
        assert hook_count(model) == 0
        scripted = torch.jit.script(model)
        backward(model)
    torch.testing.assert_close(scripted(X), model(X))
    assert not recorder.pairs
    backward(model)
    assert len(recorder.pairs) == hook_count(model) == 3
