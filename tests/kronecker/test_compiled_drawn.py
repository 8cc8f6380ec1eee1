"""Pairs of drawn labels from compiled models: those of eager ones, from whole graphs.

The graph of a container of torch's, and that of a function which calls the model, have the model's
own hooks. The graph of a class of one's own is that of its forward, and has not.
"""

from __future__ import annotations

import copy
import gc
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from contract import (
    DPKFAC,
    KAISA,
    DistKFAC,
    assert_same_factors,
    factors,
    make,
    take,
)
from models import CLASSES, ZOO
from ranks import replaced
from recorders import Pair, Recorder, linears
from reference import cross_entropy
from stepped import assert_near
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from second_order.kronecker.capture import Capture
from second_order.kronecker.fisher import LabelSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
X, Y = MLP.batch()
BATCHES = MLP.batches(4)


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Own(nn.Module):
    """A class of one's own: a layer used twice, a checkpoint, an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, CLASSES)

    def part(self, x: Tensor) -> Tensor:
        return torch.relu_(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.part, x, use_reentrant=False)
        return self.head(x + self.part(x))


class Broken(Own):
    """What no graph can have in the middle of it."""

    def part(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().part(x)


def built(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "container":
            return MLP.model()
        return (Broken() if kind == "broken" else Own()).double()


class Keeper(Recorder):
    """A recorder that keeps copies: a graph uses the memory of a pair again."""

    def consume(self, module: nn.Module, x: Tensor, d: Tensor, *rest: Any) -> None:
        super().consume(module, x.clone(), d.clone(), *rest)

    def of(self, model: nn.Module) -> list[Pair]:
        """The pairs in an order that does not depend on how they came."""
        place = {module: i for i, module in enumerate(model.modules())}
        return sorted(self.pairs, key=lambda p: (p.pass_id, place[p.module], float(p.d.norm())))


def watched(model: nn.Module, likelihood: Any = "categorical") -> tuple[Capture, Keeper]:
    """A capture of all Linear layers with drawn labels; the empirical one's if None."""
    recorder, sampler = Keeper(), None
    how: dict[str, Any] = {}
    if likelihood is not None:
        sampler = LabelSampler(likelihood, 0)
        how["reads"] = sampler.reads
    capture = Capture(recorder, sampler, **how)
    capture.attach(model, linears(model))
    return capture, recorder


def assert_same_pairs(
    found: Keeper, model: nn.Module, expected: Keeper, twin: nn.Module, rtol: float = 1e-12
) -> None:
    mine, its = found.of(model), expected.of(twin)
    assert len(mine) == len(its) > 0
    names, others = ({m: n for n, m in each.named_modules()} for each in (model, twin))
    for one, other in zip(mine, its, strict=True):
        assert names[one.module] == others[other.module]
        assert one.pass_id == other.pass_id
        torch.testing.assert_close(one.x, other.x, rtol=rtol, atol=1e-14)
        torch.testing.assert_close(one.d, other.d, rtol=rtol, atol=1e-14)


def whole(model: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("kind", "made", "backend"),
    [
        ("container", "before", "aot_eager"),
        ("container", "after", "eager"),
        ("own class", "before", "eager"),
        ("own class", "after", "aot_eager"),
    ],
)
def test_a_whole_graph_draws_what_the_eager_model_draws(kind: str, made: str, backend: str) -> None:
    """Of the same labels, in each of two passes, and the user's gradients are as ever."""
    model, twin = built(kind), built(kind)
    compiled = whole(model, backend)
    if made == "after":
        compiled(X).sum().backward()
        model.zero_grad()
    (_one, found), (_other, expected) = watched(model), watched(twin)
    for each, recorder in ((compiled, found), (twin, expected)):
        losses = [cross_entropy(each(x), y) for x, y in BATCHES[:2]]
        assert not recorder.pairs, "nothing counts before the user's backward"
        (losses[0] + losses[1]).backward()
    assert_same_pairs(found, model, expected, twin)
    assert len({pair.pass_id for pair in found.pairs}) == 2
    assert not any(found.grad_enabled)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_they_are_not_those_of_the_datas_labels() -> None:
    """The control of the one above."""
    model, twin = built("container"), built("container")
    (_one, drawn), (_other, empirical) = watched(model), watched(twin, None)
    for each in (whole(model), twin):
        cross_entropy(each(X), Y).backward()
    with pytest.raises(AssertionError):
        assert_same_pairs(drawn, model, empirical, twin, rtol=1e-3)


@pytest.mark.parametrize("kind", ["container", "own class"])
def test_backward_passes_that_do_not_count_and_second_ones(kind: str) -> None:
    model = built(kind)
    _capture, recorder = watched(model)
    compiled = whole(model)
    x = X.clone().requires_grad_()
    torch.autograd.grad(compiled(x).sum(), x)
    with torch.no_grad():
        compiled(X)
    assert not recorder.pairs
    loss = compiled(X).sum()
    loss.backward(retain_graph=True)
    once = len(recorder.pairs)
    loss.backward()
    assert once == len(recorder.pairs) == (3 if kind == "container" else 5)


@pytest.mark.parametrize("kind", ["container", "own class"])
def test_two_captures_get_their_own_gradients(kind: str) -> None:
    """One of drawn labels, one of the data's: neither sees what the other's pass brings."""
    model, twin = built(kind), built(kind)
    captures = [watched(each, how) for how in ("categorical", None) for each in (model, twin)]
    for each in (whole(model, "eager"), twin):
        cross_entropy(each(X), Y).backward()
    (_, drawn), (_, expected), (_, empirical), (_, its) = captures
    assert_same_pairs(drawn, model, expected, twin)
    for pair in (*empirical.pairs, *its.pairs):
        pair.pass_id = 0
    assert_same_pairs(empirical, model, its, twin)


class Interrupted(Own):
    """Calls a function in the first backward pass that comes through."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.functions = [function]

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        output.register_hook(lambda _: self.functions.pop()() if self.functions else None)
        return output


@pytest.mark.parametrize("compiles", [False, True])
def test_training_in_another_thread_keeps_its_pairs(compiles: bool) -> None:
    """While labels are drawn: a pass is known by its number, not by the time at which it runs."""
    other = built("own class")
    capture, recorder = watched(other, None)
    forward = whole(other, "eager") if compiles else other

    def train() -> None:
        thread = threading.Thread(target=lambda: cross_entropy(forward(X), Y).backward())
        thread.start()
        thread.join()

    model = Interrupted(train).double()
    _capture, drawn = watched(model)
    loss = cross_entropy(model(X), Y)
    assert (len(recorder.pairs), len(drawn.pairs)) == (5, 0)
    loss.backward()
    assert (len(recorder.pairs), len(drawn.pairs)) == (5, 5)
    assert capture.enabled


def test_the_compilers_setting_is_put_back_when_nobody_draws_labels() -> None:
    config: Any = torch._functorch.config
    before = config.donated_buffer
    model = built("own class")
    first, second = KAISA(model, lr=0.1, fisher="sampled"), watched(built("own class"))
    assert not config.donated_buffer
    first.close()
    assert not config.donated_buffer
    first = KAISA(model, lr=0.1, fisher="sampled")
    del second
    gc.collect()
    assert not config.donated_buffer
    del first
    gc.collect()
    assert config.donated_buffer == before
    with config.patch(donated_buffer=False):
        KAISA(model, lr=0.1, fisher="sampled").close()
        assert not config.donated_buffer


@pytest.mark.parametrize("kind", ["container", "own class"])
def test_a_closed_gate_leaves_nothing_in_the_graph(kind: str) -> None:
    model = built(kind)
    graphs: list[str] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    compiled = torch.compile(model, backend=note, fullgraph=True)
    capture, recorder = watched(model)
    for step in range(4):
        capture.enabled = step % 2 == 0
        compiled(X).sum().backward()
    assert len(graphs) == 2
    assert "second_order" in graphs[0]
    assert "second_order" not in graphs[1]
    assert len(recorder.pairs) == 2 * (3 if kind == "container" else 5)


class Named(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits, self.numbers = logits, [logits.detach().argmax(-1)]


FORMS: dict[str, Any] = {
    "dict": lambda z: {"hidden": [z * 2, None], "logits": z},
    "tuple": lambda z: (z, (z * 2, 3)),
    "named tuple": lambda z: Named(z, z * 2),
    "object": Output,
}


class Formed(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(5, CLASSES), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layer(x))


def calling(model: nn.Module) -> Any:
    """A function that does no more; its graph has the model's own hooks."""

    def call(x: Tensor) -> Any:
        return model(x)

    return call


def logits_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output.logits


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_every_form_in_the_graph_of_a_function(form: str) -> None:
    """Which has the model's output, and so draws from it inside of the graph."""
    torch.manual_seed(0)
    model = Formed(FORMS[form]).double()
    twin = copy.deepcopy(model)
    (_one, found), (_other, expected) = watched(model, "gaussian"), watched(twin, "gaussian")
    call = torch.compile(calling(model), backend="aot_eager", fullgraph=True)
    output, plain = call(X), twin(X)
    assert type(output) is type(plain)
    for each in (output, plain):
        logits_of(each).square().sum().backward()
    assert_same_pairs(found, model, expected, twin)
    torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)


def doubled(output: Any) -> Tensor:
    """A likelihood of one's own."""
    return (logits_of(output) if not isinstance(output, Tensor) else output).square().sum()


def test_a_callable_likelihood_takes_a_tensor_in_the_graph_and_else_says_so() -> None:
    model, twin = built("container"), built("container")
    (_one, found), (_other, expected) = watched(model, doubled), watched(twin, doubled)
    whole(model)(X).sum().backward()
    twin(X).sum().backward()
    assert_same_pairs(found, model, expected, twin)
    torch.manual_seed(0)
    formed = Formed(FORMS["dict"]).double()
    _kept, recorder = watched(formed, doubled)
    with pytest.raises(Exception, match="a callable likelihood= needs Python"):
        torch.compile(calling(formed), backend="eager", fullgraph=True)(X)
    torch._dynamo.reset()
    call = torch.compile(lambda x: formed(x)["logits"].sum(), backend="eager")
    call(X).backward()
    assert len(recorder.pairs) == 1
    torch._dynamo.reset()
    recorder.clear()
    whole(formed)(X)["logits"].sum().backward()  # the graph of its forward alone
    assert len(recorder.pairs) == 1


def test_blocks_compiled_one_by_one_and_breaks_in_the_middle() -> None:
    """All the same pairs, whatever of the model is in graphs."""
    twin = built("own class")
    _kept, expected = watched(twin)
    cross_entropy(twin(X), Y).backward()
    for kind in ("own class", "broken"):
        model = built(kind)
        _capture, found = watched(model)
        called: Any = model
        if kind == "broken":
            called = torch.compile(model, backend="aot_eager")
        else:
            for block in (model.first, model.head):
                block.compile(backend="aot_eager", fullgraph=True)
        cross_entropy(called(X), Y).backward()
        assert_same_pairs(found, model, expected, twin)
        torch._dynamo.reset()


def test_inductor_runs_the_backward_twice() -> None:
    """Without using memory again that the second time needs."""
    model, twin = built("own class"), built("own class")
    (_one, found), (_other, expected) = watched(model), watched(twin)
    compiled = torch.compile(model, fullgraph=True)
    try:
        cross_entropy(compiled(X), Y).backward()
    except Exception as error:
        if "CppCompile" in repr(error) or "InvalidCxxCompiler" in repr(error):
            pytest.skip("no C++ compiler")
        raise
    cross_entropy(twin(X), Y).backward()
    assert_same_pairs(found, model, expected, twin, rtol=1e-10)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.works("compile", when="with drawn labels")
@pytest.mark.parametrize(
    ("System", "kind"),
    [(KAISA, "container"), (KAISA, "own class"), (DPKFAC, "own class"), (DistKFAC, "container")],
)
def test_training_in_one_graph_is_that_of_the_eager_model(System: Any, kind: str) -> None:
    """Statistics every other step, and not those of the data's labels, or of the base alone."""
    ends = []
    for how in ("compiled", "eager", "empirical", "base"):
        model = built(kind)
        called = whole(model, "eager") if how == "compiled" else model
        options: dict[str, Any] = {"fisher": "empirical" if how == "empirical" else "sampled"}
        options |= {"skip_layers": ["*"]} if how == "base" else {}
        optimizer = make(System, model, factor_update_steps=2, **options)
        for batch in BATCHES:
            take(called, optimizer, batch)
        ends.append((model, optimizer))
    (model, optimizer), (twin, plain), *others = ends
    assert_same_factors(factors(optimizer), factors(plain))
    assert_near(model, twin)
    for other, _ in others:
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert max(float((p - q).detach().abs().max()) for p, q in pairs) > 1e-4


def under_ddp(rank: int, world_size: int) -> tuple[list[float], str]:
    """How far factors are from the eager ones; and what the graph inside of a wrapper says."""
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        model = built("own class")
        with replaced(dist, {"_DEFAULT_FIRST_BUCKET_BYTES": 1}):
            wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=1e-4)
            optimizer = make(KAISA, model, fisher="sampled")
            called = torch.compile(wrapped, backend="aot_eager") if compiles else wrapped
            for x, y in BATCHES[:2]:
                take(called, optimizer, (x[rank::world_size], y[rank::world_size]))
        found.append(factors(optimizer))
    apart = [
        float((mine - its).abs().max() / its.abs().max())
        for name, pair in found[0].items()
        for its, mine in zip(pair, found[1][name], strict=True)
    ]
    torch._dynamo.reset()
    model = built("container")
    wrapped = DistributedDataParallel(whole(model, "eager"))
    optimizer = make(KAISA, model, fisher="sampled")
    try:
        wrapped(X)
    except Exception as error:
        message = str(error)
    torch._dynamo.reset()
    return apart, message


def test_graphs_that_ddp_divides(world: World) -> None:
    for apart, message in world.run(under_ddp, 2):
        assert max(apart) < 1e-9
        assert "compile the DistributedDataParallel module instead" in message
