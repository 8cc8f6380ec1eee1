"""Pairs of drawn labels from compiled models: those of eager ones, as the models run eagerly then.

The graph of a container of torch's, and that of a function which calls the model, have the model's
own hooks. The graph of a class of one's own is that of its forward, and has not.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from capture_recorders import Keeper, linears
from models import CLASSES, ZOO
from optimizer_cases import (
    DPKFAC,
    KAISA,
    DistKFAC,
    assert_same_factors,
    factors,
    make,
    take,
)
from ranks import replaced
from reference import cross_entropy
from step_reference import assert_near
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from second_order.errors import SecondOrderError
from second_order.kronecker.capture import Capture
from second_order.kronecker.fisher import LabelSampler

if TYPE_CHECKING:
    from pool import World

pytestmark = [
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
]
MLP = ZOO["mlp"]
X, Y = MLP.batch()
BATCHES = MLP.batches(4)


class Own(nn.Module):
    """A class of one's own: a layer used twice, a checkpoint, an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.head = nn.Linear(5, CLASSES)

    def part(self, x: Tensor) -> Tensor:
        return torch.relu_(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.part, x, use_reentrant=False)
        return self.head(x + self.part(x))


class Broken(Own):
    """Breaks the graph in the middle."""

    def part(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().part(x)


def built(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "container":
            return MLP.model()
        return (Broken() if kind == "broken" else Own()).double()


def watched(model: nn.Module, likelihood: Any = "categorical") -> tuple[Capture, Keeper]:
    """A capture of all Linear layers with drawn labels; the empirical one's if None."""
    recorder = Keeper()
    capture = Capture(recorder, None if likelihood is None else LabelSampler(likelihood, 0))
    capture.attach(model, linears(model))
    return capture, recorder


def assert_same_pairs(
    found: Keeper, model: nn.Module, expected: Keeper, twin: nn.Module, rtol: float = 1e-12
) -> None:
    own = found.of(model)
    its = expected.of(twin)
    assert len(own) == len(its) > 0
    names, others = ({m: n for n, m in each.named_modules()} for each in (model, twin))
    for one, other in zip(own, its, strict=True):
        assert names[one.module] == others[other.module]
        assert one.pass_id == other.pass_id
        torch.testing.assert_close(one.x, other.x, rtol=rtol, atol=1e-14)
        torch.testing.assert_close(one.d, other.d, rtol=rtol, atol=1e-14)


def called(model: nn.Module, how: str = "model", backend: str = "aot_eager") -> Any:
    """A model, or a function that calls it, compiled."""
    if how == "inside":
        model.compile(backend=backend)
        return model
    target = model if how == "model" else (lambda x: model(x * 1.0))
    return torch.compile(target, backend=backend)


@pytest.mark.parametrize("kind", ["container", "own class", "broken"])
@pytest.mark.parametrize("how", ["model", "inside"])
def test_a_compiled_model_samples_the_labels_of_the_eager_model(kind: str, how: str) -> None:
    """Both have the same labels in each of two passes, and equal gradients of the weights."""
    model = built(kind)
    twin = built(kind)
    compiled = called(model, how)
    (_one, found) = watched(model)
    (_other, expected) = watched(twin)
    for each, recorder in ((compiled, found), (twin, expected)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            losses = [cross_entropy(each(x), y) for x, y in BATCHES[:2]]
        messages = [str(each.message) for each in caught]
        assert sum("without torch.compile" in line for line in messages) == (each is compiled)
        assert not recorder.pairs, "nothing counts before the user's backward"
        (losses[0] + losses[1]).backward()
    assert_same_pairs(found, model, expected, twin)
    assert len({pair.pass_id for pair in found.pairs}) == 2
    assert not any(found.grad_enabled)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("how", ["model", "function"])
def test_if_no_statistics_are_due_the_model_is_one_graph(how: str) -> None:
    model = built("own class")
    graphs: list[str] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)  # without comments, which have the paths of files
        return graph.forward

    target = model if how == "model" else (lambda x: model(x * 1.0))
    compiled = torch.compile(target, backend=note, fullgraph=True)
    capture, recorder = watched(model)
    capture.gate.open = False
    for _ in range(2):
        compiled(X).sum().backward()
    assert len(graphs) == 1
    assert "second_order" not in graphs[0]
    assert not recorder.pairs


def test_unsupported_models_raise_when_compiled() -> None:
    """One that must be whole, and parts that are compiled by themselves."""
    model = built("own class")
    _capture, _recorder = watched(model)
    with pytest.raises(Exception, match="leave fullgraph off"):
        torch.compile(lambda x: model(x * 1.0), backend="eager", fullgraph=True)(X)
    torch._dynamo.reset()
    part = built("own class")
    _watcher, _other = watched(part)
    part.first.compile(backend="eager")
    with pytest.raises(SecondOrderError, match=r"block.compile\(\)"):
        part(X)


@pytest.mark.works("compile")
@pytest.mark.parametrize(
    ("System", "kind"),
    [(KAISA, "container"), (KAISA, "own class"), (DPKFAC, "own class"), (DistKFAC, "container")],
)
def test_compiled_training_equals_eager_training(System: Any, kind: str) -> None:
    """Statistics every other step, and not those of the data's labels, or of the base alone."""
    ends = []
    for how in ("compiled", "eager", "empirical", "base"):
        model = built(kind)
        forward = called(model, backend="eager") if how == "compiled" else model
        options: dict[str, Any] = {"fisher": "empirical" if how == "empirical" else "categorical"}
        options |= {"skip_layers": ["*"]} if how == "base" else {}
        optimizer = make(System, model, factor_update_steps=2, **options)
        for batch in BATCHES:
            take(forward, optimizer, batch)
        ends.append((model, optimizer))
    (model, optimizer), (twin, plain), *others = ends
    assert_same_factors(factors(optimizer), factors(plain))
    assert_near(model, twin)
    for other, _ in others:
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert max(float((p - q).detach().abs().max()) for p, q in pairs) > 1e-4


def under_ddp(rank: int, world_size: int) -> list[float]:
    """How far factors are from the eager ones, with the wrapper compiled, or what is inside."""
    torch._dynamo.reset()
    found = []
    for compiles in ("nothing", "wrapper", "model"):
        model = built("own class")
        with replaced(dist, {"_DEFAULT_FIRST_BUCKET_BYTES": 1}):
            inner: Any = called(model, backend="eager") if compiles == "model" else model
            wrapped: Any = DistributedDataParallel(inner, bucket_cap_mb=1e-4)
            optimizer = make(KAISA, model, fisher="categorical")
            forward = called(wrapped, backend="eager") if compiles == "wrapper" else wrapped
            for x, y in BATCHES[:2]:
                take(forward, optimizer, (x[rank::world_size], y[rank::world_size]))
        found.append(factors(optimizer))
    return [
        float((own - its).abs().max() / its.abs().max())
        for other in found[1:]
        for name, pair in found[0].items()
        for its, own in zip(pair, other[name], strict=True)
    ]


def test_graphs_split_by_ddp_are_supported(world: World) -> None:
    for difference in world.run(under_ddp, 2):
        assert max(difference) < 1e-9
