"""Factors of several uses, shards, micro-batches and steps: invariants 9, 10, 11 and 13.

The numbers in names are those of the invariants.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import reference as ref
import torch
from factor_checks import (
    block,
    bring,
    close,
    empirical,
    factor_shape,
    mean_eigenvalue,
    pair_statistics,
)
from hypothesis import given
from hypothesis import strategies as st
from models import CLASSES, ZOO, Shared
from optimizer_cases import assert_same_factors, factors, make, matrices
from reference import cross_entropy
from torch import Tensor, nn

from second_order import KAISA
from second_order.kronecker.factors import (
    KroneckerFactors,
    StagedStatistics,
    StatisticsSums,
    collect_sums,
    update_running_averages,
)
from second_order.kronecker.layers import PairStatistics
from second_order.kronecker.storage import pack_upper_triangular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reference import Factors

F64 = torch.float64
CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**16)


# 9. A module used U times = the lumped formula, written out by hand.


class Repeated(nn.Module):
    """One layer used several times, on inputs and with gradients of its own each time."""

    def __init__(self, width: int, uses: int) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = torch.tanh(self.shared(x))
        return self.head(x)


@given(uses=st.integers(1, 4), width=st.integers(1, 4), n=st.integers(1, 5), seed=SEEDS)
def test_9_a_module_used_u_times_is_lumped(uses: int, width: int, n: int, seed: int) -> None:
    """F ≈ U · E[ā āᵀ] ⊗ E[d dᵀ], both expectations over examples and uses."""
    torch.manual_seed(seed)
    model = Repeated(width, uses).double()
    x = torch.randn(n, width, dtype=F64)
    y = torch.randint(CLASSES, (n,))
    pairs = ref.captured(model, x, lambda outputs: cross_entropy(outputs, y), "shared")["shared"]
    inputs = torch.cat([torch.cat([a, torch.ones(n, 1)], 1) for a, _ in pairs])
    gradients = torch.cat([n * d for _, d in pairs])
    A = inputs.T @ inputs / (n * uses)
    G = gradients.T @ gradients / (n * uses)
    found = empirical(model, (x, y))["shared"]
    close(matrices(found), [A[None], uses * G[None]])
    close([block(found)], [uses * torch.kron(G, A)])


def test_9_several_passes_give_other_factors() -> None:
    """Passes share the step's weight, uses add up: by U, here 2."""
    case = ZOO["shared_linear"]
    model = case.model()
    batch = case.batch()
    assert isinstance(model, Shared)
    pairs = ref.captured(model, batch[0], lambda z: cross_entropy(z, batch[1]), "shared")["shared"]
    as_passes = stage(model.shared, [(x, d * len(x)) for x, d in pairs])
    found = empirical(model, batch)["shared"]
    close([matrices(found)[1]], [2 * as_passes[1]])


def test_9_the_mean_eigenvalues_of_a_module_used_twice_are_those_of_its_factors() -> None:
    """A relative damping, which is the default, is made of them."""
    case = ZOO["shared_linear"]
    for found in empirical(case.model(), case.batch()).values():
        close(found.means, [mean_eigenvalue(each) for each in matrices(found)])


# 10. Equal shards: the mean of the ranks' factors = the full batch's. Unequal shards: the
# example-weighted mean; the plain mean is not.
# 11. k micro-batches = one batch.

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (partial(nn.Linear, 3, 4), (3,)),
    "sequence": (partial(nn.Linear, 3, 4, bias=False), (2, 3)),
    "convolution": (partial(nn.Conv2d, 2, 4, 2, groups=2), (2, 3, 4)),
}
COUNTS = st.lists(st.integers(1, 5), min_size=2, max_size=4)
each_module = pytest.mark.parametrize("kind", MODULES)


def staging(module: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> StagedStatistics:
    """Statistics of (inputs, gradients of each example's loss), every pair a pass of its own.

    As a backward would have it, the loss being a mean, a gradient is divided by its pair's terms.
    """
    bias = getattr(module, "bias", None) is not None
    staged = StagedStatistics(factor_shape(module, bias), CPU, F64)
    for index, (x, gradients) in enumerate(pairs):
        terms = x.shape[:-1].numel() if isinstance(module, nn.Linear) else len(x)
        pair = pair_statistics(
            module, x, gradients / terms, has_bias=bias, approximation="expand", dtype=F64
        )
        staged.record_pair(index)
        bring(staged, pair, pair.num_examples, index)
    return staged


def mean_of(staged: Sequence[StagedStatistics]) -> Factors:
    """Add the sums and divide, as ranks do. The mean eigenvalues are those of the factors."""
    sums = collect_sums(staged)
    a, g = (sum(each.factors[letter] for each in sums) for letter in "AG")
    head = sum(each.head for each in sums)
    shape = staged[0].shape
    average = KroneckerFactors(shape, CPU, F64)
    total = StatisticsSums({"A": a.clone(), "G": g.clone()}, head.clone())
    update_running_averages([average], [total], 0.0)
    A, G = matrices(average)
    close(average.means, [mean_eigenvalue(A), mean_eigenvalue(G)])
    assert float(average.weight) == 1.0
    return A, G


def stage(module: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> Factors:
    return mean_of([staging(module, pairs)])


def drawn(kind: str, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A module, inputs, and the gradients of each example's loss at its outputs."""
    build, shape = MODULES[kind]
    module = build().double()
    x = torch.randn(count, *shape, dtype=F64)
    return module, x, torch.randn_like(module(x))


@each_module
@given(counts=COUNTS, seed=SEEDS)
def test_10_ranks_are_weighted_by_their_examples(kind: str, counts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    module, x, gradients = drawn(kind, sum(counts))
    whole = stage(module, [(x, gradients)])
    shards = [
        staging(module, [pair])
        for pair in zip(x.split(counts), gradients.split(counts), strict=True)
    ]
    close(mean_of(shards), whole)
    each = [mean_of([shard]) for shard in shards]
    for X, parts in zip(whole, zip(*each, strict=True), strict=True):
        close([ref.weighted_mean(parts, counts)], [X])
        if len(set(counts)) == 1:
            close([torch.stack(parts).mean(0)], [X])


@each_module
@given(counts=COUNTS, seed=SEEDS)
def test_11_micro_batches_of_any_sizes_are_one_batch(
    kind: str, counts: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    module, x, gradients = drawn(kind, sum(counts))
    parts = list(zip(x.split(counts), gradients.split(counts), strict=True))
    close(stage(module, parts), stage(module, [(x, gradients)]))


@given(n=st.integers(1, 4), k=st.integers(1, 4), seed=SEEDS)
def test_11_pass_means_that_are_divided_have_smaller_factors(n: int, k: int, seed: int) -> None:
    """With ``loss_reduction="pass_mean"``, no loss is taken for one that was divided by k."""
    case = ZOO["shared_conv"]
    model = case.model()
    (x, y) = case.batch(n * k, seed=seed)
    expected = empirical(model, (x, y))
    optimizer = make(KAISA, model, lr=0.0, loss_reduction="pass_mean")
    for part in zip(x.split(n), y.split(n), strict=True):
        (cross_entropy(model(part[0]), part[1]) / k).backward()
    optimizer.step()
    for name, kronecker in expected.items():
        close([factors(optimizer)[name][1]], [matrices(kronecker)[1] / k**2])


@given(power=st.integers(-10, 16))
def test_11_a_grad_scaler_changes_nothing(power: int) -> None:
    case = ZOO["conv_strided"]
    model = case.model()
    (x, y) = case.batch()
    expected = empirical(model, (x, y))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power)
    optimizer = make(KAISA, model, lr=0.0, grad_scaler=scaler)
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same_factors(
        factors(optimizer), {name: matrices(found) for name, found in expected.items()}
    )


# 13. Running average: first update = first statistic; constants stay; equals EMA / (1 − βᵗ).

DECAYS = st.floats(0.0, 0.999)


def running(kronecker: KroneckerFactors, values: Sequence[Factors], decays: Sequence[float]) -> Any:
    """The averages after every update, by statistics of varying numbers of examples."""
    for index, ((A, G), decay) in enumerate(zip(values, decays, strict=True)):
        sums = summed(kronecker, A, G, examples=index % 3 + 1)
        update_running_averages([kronecker], [sums], decay)
        close(kronecker.means, [mean_eigenvalue(each) for each in matrices(kronecker)])
        yield list(matrices(kronecker))


def summed(kronecker: KroneckerFactors, A: Tensor, G: Tensor, examples: int) -> StatisticsSums:
    """The sums over so many examples whose means are A and G."""
    one = torch.ones(1, dtype=F64)
    head = torch.cat([one, one, mean_eigenvalue(A), mean_eigenvalue(G)]) * examples
    factors = {"A": A, "G": G}
    for letter, factor in factors.items():
        factors[letter] = pack_upper_triangular(factor).to(kronecker.dtype) * examples
    return StatisticsSums(factors, head)


def symmetric(*size: int) -> Tensor:
    x = torch.randn(*size, dtype=F64)
    return x + x.mT


@given(decay=DECAYS, count=st.integers(1, 10), seed=SEEDS)
def test_13_running_average_is_the_debiased_ema(decay: float, count: int, seed: int) -> None:
    torch.manual_seed(seed)
    shape = factor_shape(nn.Conv2d(2, 6, 1, groups=2), True)
    values = [(symmetric(2, 2, 2), symmetric(2, 3, 3)) for _ in range(count)]
    kronecker = KroneckerFactors(shape, CPU, F64)
    averages = list(running(kronecker, values, [decay] * count))
    close(averages[0], values[0])
    for which in range(2):
        ema = torch.zeros_like(values[0][which])
        for t, value in enumerate(values):
            ema = decay * ema + (1 - decay) * value[which]
            close([averages[t][which]], [ema / (1 - decay ** (t + 1))], rtol=1e-9)
    constant = KroneckerFactors(shape, CPU, F64)
    for average in running(constant, values[:1] * count, [decay] * count):
        close(average, values[0])


def test_13_a_step_without_examples_leaves_the_average_bit_for_bit() -> None:
    shape = factor_shape(nn.Linear(2, 3), True)
    kronecker = KroneckerFactors(shape, CPU, F64)
    values = [(symmetric(1, 3, 3), symmetric(1, 3, 3)) for _ in range(3)]
    *_, before = running(kronecker, values, [0.9] * 3)
    weight = kronecker.weight.clone()
    means = kronecker.means.clone()
    absent = torch.tensor([8.0, 0.0, 7.0, 7.0], dtype=F64)
    factors = {"A": kronecker.stored["A"] * 7, "G": kronecker.stored["G"] * 7}
    update_running_averages([kronecker], [StatisticsSums(factors, absent)], 0.9)
    assert torch.equal(kronecker.weight, weight)
    assert torch.equal(kronecker.means, means)
    for a, b in zip(matrices(kronecker), before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("gradient_factored", [False, True])
def test_13_bfloat16_factors_are_divided_by_the_exact_number_of_examples(
    gradient_factored: bool,
) -> None:
    """259 of them, which bfloat16 does not have. Sums and means are rounded, once each."""
    shape = replace(factor_shape(nn.Linear(20, 30), True), gradient_factored=gradient_factored)
    staged = StagedStatistics(shape, CPU, torch.bfloat16)
    totals = {"A": symmetric(1, 21, 21).float() + 20, "G": symmetric(1, 30, 30).float() + 20}
    staged.record_pair(0)
    bring(staged, PairStatistics(totals, 259), 1.0, 0)
    (sums,) = collect_sums([staged])
    scales = {"A": torch.ones(1), "G": torch.ones(1)}
    if gradient_factored:  # A has the trace 1
        scales["A"] = 259 / (21 * mean_eigenvalue(totals["A"]))
    kronecker = KroneckerFactors(shape, CPU, torch.bfloat16)
    expected = {}
    for name, total in totals.items():
        rounded = pack_upper_triangular(total).bfloat16()
        assert torch.equal(sums.factors[name], rounded)
        expected[name] = (rounded.float() * scales[name] / 259).bfloat16()
    update_running_averages([kronecker], [sums], 0.95)
    for name, mean in expected.items():
        assert torch.equal(kronecker.stored[name], mean)
