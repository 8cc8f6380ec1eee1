"""One number of loss terms for all layers of a pass, and A over the rows that take part."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from loss_terms import CLASSES, WIDTH, B, Causal, Experts, T, labels, mlp, normal, seeded
from optimizer_cases import assert_same_factors, each_kronecker, factors, make, matrices
from torch import Tensor, nn
from torch.nn import functional

from second_order import DPKFAC, KAISA

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

F64 = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def captured(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor]
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return inputs with a 1 appended and gradients of the loss of each call, by layer."""
    outputs: list[tuple[str, Tensor, Tensor]] = []
    handles = []

    def listen(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            ones = torch.ones_like(args[0][..., :1])
            outputs.append((name, torch.cat([args[0], ones], -1).detach(), output))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(listen(name)))
    gradients = torch.autograd.grad(loss_of(model), [o for _, _, o in outputs])
    for handle in handles:
        handle.remove()
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, x, _), d in zip(outputs, gradients, strict=True):
        found.setdefault(name, []).append((x.flatten(0, -2), d.flatten(0, -2)))
    return found


def expected(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    terms: int,
    taking_part: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """A over the rows that take part, and G = N Σ d dᵀ, by layer."""
    reference = {}
    for name, calls in captured(model, loss_of).items():
        x, d = (torch.cat(each) for each in zip(*calls, strict=True))
        if taking_part is not None and len(taking_part) == len(x):
            x = x[taking_part]
        reference[name] = (x.T @ x / len(x)).unsqueeze(0), (terms * d.T @ d).unsqueeze(0)
    return reference


def found(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], **options: Any) -> Any:
    """A and G of KAISA after one step, by layer."""
    optimizer = make(options.pop("System", KAISA), model, lr=0.0, **options)
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    return factors(optimizer)


# --------------------------------------------------------------------------- examples of a batch


def gated(model: nn.Module) -> Tensor:
    """Half of the rows are dead at the first layers."""
    x = normal(B, WIDTH)
    gate = (torch.arange(B) % 2).to(F64).unsqueeze(1)
    hidden = model[2](model[1](model[0](x))) * gate
    return functional.cross_entropy(model[4](hidden), torch.arange(B) % 3)


def hinge(model: nn.Module) -> Tensor:
    """The hinge of some examples is satisfied: no layer has a gradient of theirs."""
    y = (torch.arange(B) % 2 * 2 - 1).to(F64)
    score = model(normal(B, WIDTH)).sum(1)
    margin = torch.where(torch.arange(B) < 3, 10.0, 0.0)
    return (1 - y * score - margin).clamp_min(0.0).mean()


def hinge_of_classes(model: nn.Module) -> Tensor:
    """Rows of gradients add up to zero, as those of a cross-entropy do."""
    score = model(normal(B, WIDTH)) * torch.tensor([20.0, 20, 20, 0.1, 0.1, 0.1])[:, None]
    return functional.multi_margin_loss(score, score.argmax(1).detach())


def clipped(model: nn.Module) -> Tensor:
    """PPO's loss: ratios beyond the clip are constant."""
    x = normal(B, WIDTH)
    action = torch.arange(B) % 3
    logp = model(x).log_softmax(1).gather(1, action[:, None]).squeeze(1)
    ratio = (logp - logp.detach() + torch.linspace(-0.5, 0.5, B, dtype=F64)).exp()
    advantage = torch.ones(B, dtype=F64)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def ignored(model: nn.Module) -> Tensor:
    """A loss that ignores labels looks like one that is flat there."""
    y = (torch.arange(B) % 3).masked_fill(torch.arange(B) >= 4, -100)
    return functional.cross_entropy(model(normal(B, WIDTH)), y)


def weighted(model: nn.Module) -> Tensor:
    """Some examples have weight zero."""
    weights = (torch.arange(B) % 2).to(F64)
    y = torch.arange(B) % 3
    losses = functional.cross_entropy(model(normal(B, WIDTH)), y, reduction="none")
    return (losses * weights).mean()


@each_kronecker
@pytest.mark.parametrize("loss_of", [gated, hinge, hinge_of_classes, clipped, ignored, weighted])
def test_examples_with_zero_gradients_are_loss_terms(System: Any, loss_of: Any) -> None:
    model = seeded(mlp)
    dead = [(d == 0).all(1).sum() for ((_, d),) in captured(model, loss_of).values()]
    assert any(0 < int(n) < B for n in dead)
    assert_same_factors(found(model, loss_of, System=System), expected(model, loss_of, B))


@each_kronecker
def test_an_experts_block_counts_all_loss_terms(System: Any) -> None:
    """A is over its own rows, and G is the sum over them by the number of all terms."""

    def loss_of(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(normal(B, WIDTH)), torch.arange(B) % 3)

    model = seeded(Experts)
    assert len(captured(model, loss_of)["experts.0"][0][0]) == 2
    assert_same_factors(found(model, loss_of, System=System), expected(model, loss_of, B))


# --------------------------------------------------------------------------------- positions


def tokens_loss(y: Tensor, eager: bool = False) -> Callable[[nn.Module], Tensor]:
    def loss_of(model: nn.Module) -> Tensor:
        logits = model(normal(B, T, WIDTH), eager)
        return functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    return loss_of


@each_kronecker
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("prompt", [0, 2])
@pytest.mark.parametrize("padded", [0, 2])
def test_padding_is_not_in_a_but_prompts_are(
    System: Any, padded: int, prompt: int, flat: bool
) -> None:
    model = seeded(lambda: Causal(flat))
    y = labels(padded, prompt)
    taking_part = labels(padded) != -100
    terms = int((y != -100).sum())
    loss_of = tokens_loss(y)
    reference = expected(model, loss_of, terms, taking_part.flatten())
    assert_same_factors(found(model, loss_of, System=System), reference)


def test_slices_of_the_logits_have_all_loss_terms() -> None:
    """In chunks of the positions, or sequence by sequence; a call without rows changes nothing."""
    model = seeded(mlp)
    y = labels(2)
    terms = int((y != -100).sum())

    def one_by_one(model: nn.Module) -> Tensor:
        x = normal(B, T, WIDTH)
        lengths = (y != -100).sum(1).tolist()
        logits = [model(x[i : i + 1, :n])[0] for i, n in enumerate([*lengths])]
        empty = model(x[:0]).sum()
        return empty + functional.cross_entropy(torch.cat(logits), y[y != -100])

    def in_chunks(model: nn.Module) -> Tensor:
        hidden = model[:4](normal(B, T, WIDTH)[:, :4])
        logits = torch.cat([model[4](each) for each in hidden.chunk(2, 1)], 1)
        return functional.cross_entropy(logits.flatten(0, 1), y[:, :4].flatten())

    assert_same_factors(found(model, one_by_one), expected(model, one_by_one, terms))
    number = int((y[:, :4] != -100).sum())
    got = found(model, in_chunks)
    reference = expected(model, in_chunks, number)
    for name, (_, g) in reference.items():
        torch.testing.assert_close(got[name][1], g)


def test_rounding_does_not_change_the_counted_terms() -> None:
    """The first token's query has no gradient in one implementation, and rounding in another."""
    model = seeded(Causal)
    got = [found(copy.deepcopy(model), tokens_loss(labels(), eager)) for eager in (False, True)]
    assert_same_factors(*got, rtol=1e-9)
    d = captured(model, tokens_loss(labels()))["q"][0][1].view(B, T, -1)
    assert not d[:, 0].any()


class Adapted(nn.Module):
    """A Linear with an adapter of low rank next to it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 2, bias=False, dtype=F64)
        self.up = nn.Linear(2, WIDTH, bias=False, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out

    def merged(self) -> nn.Module:
        merged = copy.deepcopy(self.base)
        with torch.no_grad():
            merged.weight.add_(self.up.weight @ self.down.weight)
        return merged


@pytest.mark.parametrize("eager", [False, True])
def test_merging_an_adapter_does_not_change_the_terms(eager: bool) -> None:
    model: Any = seeded(Causal)
    model.q = Adapted(model.q)
    merged = copy.deepcopy(model)
    merged.q = model.q.merged()
    loss_of = tokens_loss(labels(2), eager)
    separate = found(model, loss_of)
    together = found(merged, loss_of)
    separate["q"] = separate.pop("q.base")
    assert_same_factors({name: separate[name] for name in together}, together, rtol=1e-9)


class DroppedPaths(nn.Module):
    """Stochastic depth, of examples or not at all, on positions that are pooled."""

    def __init__(self, per_sample: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)
        self.per_sample = per_sample

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        keep = (torch.arange(len(x), device=x.device) % 3 == 0).to(x).view(-1, 1, 1)
        x = x + torch.tanh(self.body(x)) * (keep if self.per_sample else 1.0)
        return self.head(x.mean(1))


class Images(nn.Module):
    """Layers of positions behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.relu(self.conv(x)).flatten(2).mT
        return self.head(torch.relu(self.body(maps)).mean(1))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: DroppedPaths(per_sample=True), (T, WIDTH)),
        (lambda: DroppedPaths(per_sample=False), (T, WIDTH)),
        (Images, (2, 3, 4)),
    ],
    ids=["dropped paths", "all paths", "convolution"],
)
def test_pooled_positions_of_an_example_share_its_loss_term(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(normal(B, *shape)), torch.arange(B) % 3)

    model = seeded(build)
    got = found(model, loss_of)
    reference = expected(model, loss_of, B)
    assert_same_factors({name: got[name] for name in reference}, reference)


def test_padding_routed_to_experts_is_not_in_a() -> None:
    model = seeded(Experts)
    y = labels(2)

    def loss_of(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(normal(B, T, WIDTH)).flatten(0, 1), y.flatten())

    got = found(model, loss_of)
    reference = expected(model, loss_of, int((y != -100).sum()), (y != -100).flatten())
    for name, ((x, d),) in captured(model, loss_of).items():
        if name.startswith("experts"):
            alive = d.any(1)
            assert not alive.all()
            reference[name] = (x[alive].T @ x[alive] / alive.sum()).unsqueeze(0), reference[name][1]
    assert_same_factors(got, reference)


# ----------------------------------------------------------------------- passes and micro-batches


@pytest.mark.parametrize("options", [{}, {"kfac_approx": "reduce"}, {"System": DPKFAC}])
def test_micro_batches_with_unequal_padding_equal_one_batch(options: dict[str, Any]) -> None:
    """The loss of each micro-batch is divided by the terms of all."""
    y = labels(3, 1)
    terms = int((y != -100).sum())

    def part(model: nn.Module, some: slice) -> Tensor:
        logits = model(normal(B, T, WIDTH)[some])
        return functional.cross_entropy(logits.flatten(0, 1), y[some].flatten(), reduction="sum")

    got = []
    for parts in ([slice(0, B)], [slice(0, 1), slice(1, 5), slice(5, B)]):
        model = seeded(Causal)
        plain_options = {k: v for k, v in options.items() if k != "System"}
        System: Any = options.get("System", KAISA)
        optimizer = make(System, model, lr=0.0, loss_reduction="step_mean", **plain_options)
        for each in parts:
            (part(model, each) / terms).backward()
        optimizer.step()
        got.append(factors(optimizer))
    assert_same_factors(*got, rtol=1e-12)


def test_losses_of_separate_layers_count_their_own_terms() -> None:
    """An actor and a critic, each with a backward pass of its own."""
    pair = seeded(lambda: nn.ModuleList([mlp(), mlp()]))
    x = normal(B, WIDTH)
    y = torch.arange(B) % 3
    optimizer = make(KAISA, pair, lr=0.0)
    for net in pair:
        functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    got = factors(optimizer)
    for i, net in enumerate(pair):
        reference = expected(net, lambda net: functional.cross_entropy(net(x), y), B)
        assert_same_factors({n: got[f"{i}.{n}"] for n in reference}, reference)


def by_owners(rank: int, world_size: int) -> dict[str, Any]:
    """Return the factors of a rank that trains on some of the padded sequences."""
    model = seeded(Causal)
    y = labels(2, 1)
    some = slice(2 * rank, 2 * rank + 4)
    optimizer = make(DPKFAC, model, lr=0.0)
    logits = model(normal(B, T, WIDTH)[some])
    functional.cross_entropy(logits.flatten(0, 1), y[some].flatten()).backward()
    optimizer.step()
    blocks = optimizer._curvature.layers.blocks
    whole = (b for b in blocks if b.stored("A") is not None)
    return {b.name: matrices(b.factors, F64) for b in whole}


def test_every_rank_knows_the_terms_of_the_last_layer(world: World) -> None:
    """One number of loss terms for all layers of a pass, whichever rank takes their statistics."""
    found = world.run(by_owners, 2)
    model = seeded(Causal)
    y = labels(2, 1)
    owned = [set(each) for each in found]
    assert all(owned)
    assert owned[0].isdisjoint(owned[1])
    for rank, each in enumerate(found):
        some = slice(2 * rank, 2 * rank + 4)

        def loss_of(model: nn.Module, some: slice = some) -> Tensor:
            logits = model(normal(B, T, WIDTH)[some])
            return functional.cross_entropy(logits.flatten(0, 1), y[some].flatten())

        reference = expected(model, loss_of, int((y[some] != -100).sum()))
        for name, (_, g) in each.items():
            torch.testing.assert_close(g, reference[name][1], rtol=1e-10, atol=1e-14)
