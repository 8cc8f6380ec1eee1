"""What goes wrong quietly elsewhere: scales, memory, newcomers, overflows, ranks that differ."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from contract import SYSTEMS, each_system, eigenpairs_only, factors, make, take
from models import ZOO
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from second_order import KAISA, DecompositionError, RankMismatchError, SecondOrderWarning
from second_order.kfac.precondition import kl_change, kl_clip_coefficient
from second_order.kronecker import solvers

if TYPE_CHECKING:
    from pool import World

MLP = ZOO["mlp"]
BATCHES = MLP.batches(8)
quiet = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def trained(options: dict[str, Any], scale: float = 1.0) -> list[Tensor]:
    model = MLP.model()
    options = {"lr": 0.05, "damping": 1.0, "relative_damping": True, **options}
    optimizer = make(KAISA, model, **options)
    for x, y in BATCHES[:4]:
        optimizer.zero_grad()
        (scale * cross_entropy(model(x), y)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 1e4])
def test_relative_damping_is_free_of_the_scale_of_the_loss(scale: float) -> None:
    """c times the loss: c² times the curvature, and 1/c times the direction, the same one."""
    options = {"kl_clip": None, "factor_dtype": torch.float32}
    other = {**options, "lr": 0.05 * scale}
    for p, q in zip(trained(options), trained(other, scale), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


@eigenpairs_only
@pytest.mark.parametrize("scale", [1e-5, 1e4])
def test_newton_steps_are_free_of_the_scale_of_the_loss(System: Any, scale: float) -> None:
    """c times the loss: c times the eigenvalues and the gradient, and 1/c times the base's rate."""
    trajectories = []
    for c in (1.0, scale):
        model = MLP.model()
        optimizer = make(System, model, lr=0.05 / c, momentum=0.9)
        for batch in BATCHES[:6]:
            take(model, optimizer, batch, lambda outputs, y, c=c: c * cross_entropy(outputs, y))
        assert optimizer.curvature.refreshes == 3
        trajectories.append([p.detach() for p in model.parameters()])
    for p, q in zip(*trajectories, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("positions", [1, 2, 5])
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_an_embedding_of_pooled_tokens_has_the_trace_of_its_fisher(
    positions: int, fisher: str
) -> None:
    """With "reduce", whatever the number of positions; the labels drawn are those of the data."""

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    model = nn.Sequential(nn.Embedding(40, 4), Pool(), nn.Linear(4, 3)).double()
    x = torch.stack([torch.randperm(40)[:positions] for _ in range(6)])
    y = torch.randn(6, 3, dtype=torch.float64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (output - target).square().sum()

    exact = 0.0
    for i in range(6):
        (g,) = torch.autograd.grad(loss(model(x[i : i + 1]), y[i]), model[0].weight)
        exact += float(g.square().sum()) / 6
    optimizer = make(
        KAISA, model, kfac_approx="reduce", fisher=fisher, likelihood=lambda out: loss(out, y)
    )
    (loss(model(x), y) / 6).backward()
    optimizer.step()
    A, G = factors(optimizer)["0"]
    assert float(A.sum() * G[0].trace()) == pytest.approx(exact)


def test_relative_damping_of_bfloat16_factors_has_no_floor() -> None:
    exact = trained({"kl_clip": 1e-4})
    coarse = trained({"kl_clip": 1e-4, "factor_dtype": torch.bfloat16})
    start = [p.detach() for p in MLP.model().parameters()]
    moved = torch.cat([(p - s).flatten() for p, s in zip(exact, start, strict=True)])
    also = torch.cat([(p - s).flatten() for p, s in zip(coarse, start, strict=True)])
    assert torch.cosine_similarity(moved, also, dim=0) > 0.99


def test_the_clip_counts_half_precision_products_that_overflow_it() -> None:
    """With fp16 weights P·∇ is formed in float32: 65504 is no bound of it."""
    model = nn.Linear(4, 3).half()
    optimizer = KAISA(model, lr=1.0, kl_clip=1e-4, damping=1e-6, relative_damping=False)
    x = torch.randn(8, 4)
    before = model.weight.detach().clone()
    (model(x.half()).float() * 100).pow(2).mean().backward()
    optimizer.step()
    assert model.weight.isfinite().all()
    assert float((model.weight.detach() - before).abs().max()) < 0.1
    large = torch.full((4,), 1e4)
    assert float(kl_clip_coefficient(kl_change([large], [large], [1.0]), 1.0)) < 1


def test_inputs_go_with_the_graph_however_long_the_loss_is_kept() -> None:
    """`total += loss` without a detach must not keep every batch's activations."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = KAISA(model, lr=0.1)
    hidden: list[weakref.ref[Tensor]] = []
    handle = model[1].register_forward_hook(lambda *a: hidden.append(weakref.ref(a[2])))
    loss = model(torch.randn(4, 5)).square().mean()
    handle.remove()
    assert optimizer is not None
    assert hidden[0]() is not None
    loss.backward()
    gc.collect()
    assert hidden[0]() is None
    assert loss.isfinite()


@quiet
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_sampled_labels_of_outputs_that_are_not_finite_are_dropped(likelihood: str) -> None:
    """No error in the forward of the one rank that meets them; the statistics are counted out."""
    model = MLP.model()
    optimizer = make(KAISA, model, fisher="sampled", likelihood=likelihood)
    x, _ = BATCHES[0]
    x = x.clone()
    x[0, 0] = float("nan")
    model(x).sum().backward()
    model.zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.summary().dropped == 3
    assert all(not A.any() and not G.any() for A, G in factors(optimizer).values())


def test_sampled_labels_follow_the_models_distribution() -> None:
    """The largest of logit + Gumbel noise is a draw from the softmax."""
    from second_order.kronecker.fisher import sampled_loss

    logits = torch.tensor([2.0, 0.0, -1.0]).double()
    many = logits.expand(40_000, 3).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sampled_loss(many, "categorical", seed=3), many)
    drawn = (logits.softmax(-1) - gradient).mean(0)  # p - (p - onehot)
    torch.testing.assert_close(drawn, logits.softmax(-1), rtol=0, atol=0.01)
    ones = torch.full((40_000, 1), 0.7).double().requires_grad_()
    (gradient,) = torch.autograd.grad(sampled_loss(ones, "bernoulli", seed=3), ones)
    drawn = (torch.sigmoid(ones) - gradient).mean()
    assert float(drawn) == pytest.approx(float(torch.sigmoid(torch.tensor(0.7))), abs=0.01)


def test_sampled_fisher_names_the_remedy_for_reentrant_checkpoints() -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))

    model = Reentrant()
    sampled = KAISA(model, lr=0.1, fisher="sampled")
    with pytest.raises(RuntimeError, match=r"use_reentrant=False.*fisher='empirical'"):
        model(torch.randn(4, 5))
    assert sampled is not None


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_a_newcomer_is_solved_as_soon_as_it_has_statistics(how: str) -> None:
    """Not at the next of the long intervals, and without a warning that it is never called."""
    model = MLP.model()
    intervals = {"factor_update_steps": 100, "inv_update_steps": 100}
    late = list(model[2].parameters())
    if how == "unfrozen":
        model[2].requires_grad_(False)
        optimizer = make(KAISA, list(model.parameters()), model=model, **intervals)
    else:
        others = [*model[0].parameters(), *model[4].parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecondOrderWarning)
            optimizer = make(KAISA, others, model=model, **intervals)
    for batch in BATCHES[:3]:
        take(model, optimizer, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        if how == "unfrozen":
            model[2].requires_grad_(True)
        else:
            optimizer.add_param_group({"params": late})
        for batch in BATCHES[3:6]:
            take(model, optimizer, batch)
    held = {row.name: row.inverse_bytes for row in optimizer.summary().rows}
    assert all(held[name] > 0 for name in ("0", "2", "4"))


@quiet
def test_a_checkpoint_gives_a_failing_layer_all_its_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MLP.model()
    optimizer = make(KAISA, model, max_consecutive_failures=2)
    take(model, optimizer, BATCHES[0])
    good = optimizer.state_dict()
    with monkeypatch.context() as patch:
        nothing = lambda matrix: ((), torch.zeros(len(matrix), dtype=torch.bool))  # noqa: E731
        patch.setattr(solvers, "eigh", nothing)
        take(model, optimizer, BATCHES[1])
        with pytest.raises(DecompositionError):
            take(model, optimizer, BATCHES[2])
        optimizer.load_state_dict(good)
        take(model, optimizer, BATCHES[1])  # the first failure of two
    take(model, optimizer, BATCHES[2])


@each_system
def test_processes_that_were_launched_but_not_joined_are_told(
    System: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(SecondOrderWarning, match=r"each process trains alone; call .*init_process"):
        System(MLP.model(), lr=0.1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        System(MLP.model(), lr=0.1)


def test_a_copied_input_that_is_changed_in_place_is_dropped_and_told() -> None:
    """Legal without us: Linear multiplies a copy of a transposed input."""
    model = nn.Linear(4, 3)
    optimizer = KAISA(model, lr=0.1)
    x = torch.randn(4, 5, 2).transpose(0, 2)
    loss = model(x).square().mean()
    x.mul_(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SecondOrderWarning)
        try:
            loss.backward()
        except RuntimeError:
            pytest.skip("this torch keeps the input itself, and refuses the change by itself")
        optimizer.step()  # no error of a hook may part a rank from the others
    assert optimizer.summary().dropped == 1
    assert sum("changed in place" in str(w.message) for w in caught) == 1


@quiet
@pytest.mark.parametrize("name", ["mlp", "transformer"])
@pytest.mark.parametrize("times", [2, 3])
def test_factors_do_not_depend_on_the_size_of_the_batch(name: str, times: int) -> None:
    """The same examples several times over: the captured gradient of a mean is multiplied back.

    That they do not depend on the number of processes either is invariant 21.
    """
    case = ZOO[name]
    x, y = case.batch()
    found = []
    for repeats in (1, times):
        model = case.model()
        optimizer = make(KAISA, model, lr=0.0)
        take(model, optimizer, (torch.cat([x] * repeats), torch.cat([y] * repeats)), case.loss)
        found.append(factors(optimizer))
    for layer, (A, G) in found[0].items():
        torch.testing.assert_close(found[1][layer][0], A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[1][layer][1], G, rtol=1e-10, atol=1e-12)


@quiet
def test_a_layer_frozen_as_a_whole_keeps_its_factors() -> None:
    model = MLP.model()
    optimizer = make(KAISA, list(model.parameters()), model=model)
    take(model, optimizer, BATCHES[0])
    before = [f.clone() for f in factors(optimizer)["2"]]
    model[2].requires_grad_(False)
    take(model, optimizer, BATCHES[1])
    model[2].requires_grad_(True)
    assert all(torch.equal(f, b) for f, b in zip(factors(optimizer)["2"], before, strict=True))
    take(model, optimizer, BATCHES[2])
    assert not torch.equal(factors(optimizer)["2"][0], before[0])


# Ranks.


def build_lookalikes(rank: int, world_size: int) -> None:
    KAISA(nn.Conv2d(8, 8, 3, groups=2) if rank else nn.Conv2d(4, 8, 3), lr=0.1)


def test_layers_of_equal_shapes_and_unlike_kinds_are_told_apart(world: World) -> None:
    for error in world.run(build_lookalikes, 2, expect_errors=True, timeout=20):
        assert getattr(error, "type_name", type(error).__name__) == RankMismatchError.__name__


def groups_of_many(rank: int, world_size: int) -> int:
    before = dist.new_group
    made = []
    dist.new_group = lambda *a, **k: made.append(a) or before(*a, **k)  # type: ignore[assignment]
    try:
        for _ in range(3):
            KAISA(MLP.model(), lr=0.1, grad_worker_fraction=0.5)
    finally:
        dist.new_group = before
    return len(made)


def test_optimizers_share_their_groups(world: World) -> None:
    """A row, a column and what they compare in, for as many optimizers as there are."""
    assert world.run(groups_of_many, 4) == [3, 3, 3, 3]


def warm_up_from_zero(rank: int, world_size: int, system: int, zeros: bool) -> list[Tensor]:
    """lr 0 at first, and a rank that has nothing to learn from at that step."""
    model = MLP.model()
    optimizer = make(SYSTEMS[system], model, lr=0.0)
    x, y = BATCHES[0]
    if rank == 0 or zeros:
        (cross_entropy(model(x), y) * float(rank == 0)).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    for batch in BATCHES[1:4]:
        take(model, optimizer, batch)
    return [p.detach() for p in model.parameters()]


@quiet
@pytest.mark.parametrize("zeros", [False, True], ids=["no gradient", "gradients of zero"])
@pytest.mark.parametrize("system", range(len(SYSTEMS)))
def test_a_first_step_with_lr_zero_keeps_the_ranks_together(
    world: World, system: int, zeros: bool
) -> None:
    first, second = world.run(warm_up_from_zero, 2, system, zeros, timeout=30)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


# Python's own options.

STRIPPED = """
import torch
from torch import nn
from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, register_layer

assert False  # -OO takes it away
for System in (DHO2, DPKFAC, KAISA, DistKFAC):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    optimizer = System(model, lr=0.01)
    x, y = torch.randn(8, 1, 4, 4), torch.arange(8) % 3
    optimizer.curvature_closure = lambda: nn.functional.cross_entropy(model(x), y)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(System.__name__, losses[-1] < losses[0])
    optimizer.close()
"""


def test_without_docstrings_and_assertions_it_trains() -> None:
    """`python -OO`."""
    found = subprocess.run(
        [sys.executable, "-OO", "-W", "ignore", "-c", STRIPPED],
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [
        "DHO2",
        "True",
        "DPKFAC",
        "True",
        "KAISA",
        "True",
        "DistKFAC",
        "True",
    ]


OWN_RULE = """
from torch import nn
from second_order import register_layer

register_layer(nn.ConvTranspose1d, rows=lambda module, x, d: (x, d))
"""


def test_torchs_own_rules_are_there_before_anything_else_is_loaded() -> None:
    """Else the package's own would come after a user's, and take its place."""
    found = subprocess.run(
        [sys.executable, "-c", OWN_RULE], check=False, capture_output=True, text=True
    )
    assert "torch's ConvTranspose1d has a rule" in found.stderr
