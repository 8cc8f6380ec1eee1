"""The references against each other, and against numbers that can be checked by hand.

Numbers in names are the lines of the invariants they instantiate: see `reference` for conventions.
"""

from __future__ import annotations

import math
import pickle
from functools import partial
from typing import TYPE_CHECKING, Literal

import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import FACTORED, ZOO, Case
from reference import cross_entropy, half_squared_error
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

F64 = torch.float64
CONVOLUTIONS = [case for name, case in FACTORED.items() if "conv" in name]

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((actual - expected).norm() / expected.norm())


def spd(size: int, seed: int) -> Tensor:
    x = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return x @ x.T / size


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=F64)


def layers_of(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}


# The zoo.


@pytest.mark.parametrize("case", ZOO.values(), ids=str)
def test_zoo_trains(case: Case) -> None:
    model, (x, y) = case.model(torch.float32), case.batch(6, torch.float32)
    loss = case.loss(model(x), y)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("case", ZOO.values(), ids=str)
def test_zoo_is_the_same_each_time_and_for_each_dtype(case: Case) -> None:
    for p, q in zip(case.model().parameters(), case.model(torch.float32).parameters(), strict=True):
        close(p, q.double())
    (x, y), (x32, y32) = case.batch(3), case.batch(3, torch.float32)
    torch.testing.assert_close((x, y), (x32, y32), check_dtype=False)


@pytest.mark.parametrize("case", ZOO.values(), ids=str)
def test_zoo_can_be_sent_and_equals_its_reference(case: Case) -> None:
    gradients = []
    for each in (pickle.loads(pickle.dumps(case)), case.reference):
        model, (x, y) = each.model(), each.batch()
        each.loss(model(x), y).backward()
        gradients.append([p.grad for p in model.parameters()])
    close(gradients[0], gradients[1])


# Curvature.


@pytest.mark.parametrize("name", ["mlp", "conv_strided", "norms", "embedding", "language_model"])
def test_flat_round_trip(name: str) -> None:
    model = ZOO[name].model()
    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, nn.Embedding)
    for layers in [(), tuple(layers_of(model, *kinds))]:
        flat = ref.Flat(model, *layers)
        named = flat.named(flat.vector)
        assert named.keys() == dict(model.named_parameters()).keys()
        for key, value in named.items():
            assert torch.equal(value, model.get_parameter(key))


def test_a_layer_is_flattened_row_by_row_with_its_bias() -> None:
    layer = nn.Linear(2, 2, dtype=F64)
    expected = [layer.weight[0, 0], layer.weight[0, 1], layer.bias[0]]
    expected += [layer.weight[1, 0], layer.weight[1, 1], layer.bias[1]]
    close(ref.Flat(layer, "").vector, torch.stack(expected).detach())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_fisher_is_ggn(likelihood: ref.Likelihood) -> None:
    """Natural parameters: the Fisher is the GGN; of the last layer, it is the Hessian."""
    model, (x, y) = ZOO["mlp"].model(), ZOO["mlp"].batch(5)
    targets = functional.one_hot(y, 3).to(F64)
    loss, target = {
        "categorical": (cross_entropy, y),
        "gaussian": (half_squared_error, targets),
        "bernoulli": (
            lambda z, t: 3 * functional.binary_cross_entropy_with_logits(z, t),
            targets,
        ),
    }[likelihood]
    fisher = ref.exact_fisher(model, x, likelihood, "0", "2", "4")
    close(fisher, ref.ggn(model, x, target, loss, "0", "2", "4"))
    close(fisher[-21:, -21:], ref.hessian(model, x, target, loss, "4"))


def test_label_gradients_are_those_of_the_losses_by_hand() -> None:
    """One coin with p = 1/4: E[(p − y)²] = p (1 − p) = 3/16, as a bernoulli and as two classes."""
    logit = torch.tensor([[-math.log(3)]], dtype=F64)
    v = ref.label_gradients(logit, "bernoulli")[:, 0]
    close(v.T @ v, torch.tensor([[3 / 16]], dtype=F64))
    v = ref.label_gradients(torch.cat([logit, 0 * logit], 1), "categorical")[:, 0]
    close(v.T @ v, torch.tensor([[3.0, -3.0], [-3.0, 3.0]], dtype=F64) / 16)


def test_empirical_fisher_by_hand() -> None:
    """s = w x, ½(y − s)²: ∇ = (s − y) x; here −2·1 and 4·2."""
    model = nn.Linear(1, 1, bias=False, dtype=F64)
    nn.init.constant_(model.weight, 2.0)
    x, y = torch.tensor([[1.0], [2.0]], dtype=F64), torch.tensor([[4.0], [0.0]], dtype=F64)
    fisher = ref.empirical_fisher(model, x, y, half_squared_error, "")
    close(fisher, torch.tensor([[(4.0 + 64.0) / 2]], dtype=F64))
    A, G = ref.empirical_factors(nn.Sequential(model), x, y, half_squared_error, "0")
    close(A, torch.tensor([[[(1.0 + 4.0) / 2]]], dtype=F64))
    close(G, torch.tensor([[[(4.0 + 16.0) / 2]]], dtype=F64))


def test_hessian_of_all_parameters_by_hand() -> None:
    """w² x² has the Hessian 2x² in w; two layers multiply."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for p, value in zip(model.parameters(), (2.0, 3.0), strict=True):
        nn.init.constant_(p, value)
    x, y = torch.ones(1, 1, dtype=F64), torch.zeros(1, 1, dtype=F64)
    # ½ (u v)²: d²/du² = v², d²/du dv = 2 u v, d²/dv² = u².
    expected = torch.tensor([[9.0, 12.0], [12.0, 4.0]], dtype=F64)
    close(ref.hessian(model, x, y, half_squared_error), expected)


# Factors against exact blocks.


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [("mlp", "categorical"), ("mlp_no_bias", "bernoulli"), ("mlp", "gaussian")],
)
def test_1_one_example_is_exact(name: str, likelihood: ref.Likelihood) -> None:
    model, (x, y) = ZOO[name].model(), ZOO[name].batch(1)
    for layer in layers_of(model, nn.Linear):
        factors = ref.exact_factors(model, x, likelihood, layer)
        close(ref.block(*factors), ref.exact_fisher(model, x, likelihood, layer))
        factors = ref.empirical_factors(model, x, y, cross_entropy, layer)
        close(ref.block(*factors), ref.empirical_fisher(model, x, y, cross_entropy, layer))


@pytest.mark.parametrize("groups", [1, 2])
def test_1_and_5_one_location_is_exact(groups: int) -> None:
    """A kernel that covers its input: exact, and the Linear of the flattened input."""
    conv = nn.Conv2d(2, 4, (3, 2), groups=groups)
    model = nn.Sequential(conv, nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(1, 2, 3, 2, dtype=F64)
    factors = ref.exact_factors(model, x, "categorical", "0")
    fisher = ref.exact_fisher(model, x, "categorical", "0")
    within = torch.block_diag(*[torch.ones(28 // groups, 28 // groups)] * groups)
    if groups == 1:
        within = torch.ones_like(fisher)
    close(ref.block(*factors), fisher * within)
    if groups == 1:
        x, d = torch.randn(5, 2, 3, 2, dtype=F64), torch.randn(5, 4, 1, 1, dtype=F64)
        for approx in ("expand", "reduce"):
            expected = ref.linear_factors(x.flatten(1), d.flatten(1), True)
            close(ref.conv_factors(x, d, conv, approx), expected)


def test_1_not_for_a_batch_through_tanh() -> None:
    model, (x, _) = ZOO["mlp"].model(), ZOO["mlp"].batch(8)
    factors = ref.exact_factors(model, x, "categorical", "0")
    assert error(ref.block(*factors), ref.exact_fisher(model, x, "categorical", "0")) > 0.02


def test_2_deep_linear_is_exact() -> None:
    case = ZOO["deep_linear"]
    model, (x, y) = case.model(), case.batch(6)
    for layer in ("0", "1", "2"):
        block = ref.block(*ref.exact_factors(model, x, "gaussian", layer))
        close(block, ref.exact_fisher(model, x, "gaussian", layer))
        close(block, ref.ggn(model, x, y, half_squared_error, layer))
        close(block, ref.hessian(model, x, y, half_squared_error, layer))
        factors = ref.exact_factors(model, 4 * x, "categorical", layer)
        fisher = ref.exact_fisher(model, 4 * x, "categorical", layer)
        assert error(ref.block(*factors), fisher) > 0.02


@pytest.mark.parametrize(
    ("name", "exact", "other"),
    [("sequence_linear", "expand", "reduce"), ("pooled_linear", "reduce", "expand")],
)
def test_3_and_4_expand_and_reduce(name: str, exact: ref.Approx, other: ref.Approx) -> None:
    model, (x, _) = ZOO[name].model(), ZOO[name].batch(5)
    for layer in ("0", "1"):
        fisher = ref.exact_fisher(model, x, "gaussian", layer)
        close(ref.block(*ref.exact_factors(model, x, "gaussian", layer, exact)), fisher)
        inexact = ref.exact_factors(model, x, "gaussian", layer, other)
        assert error(ref.block(*inexact), fisher) > 0.02


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_6_weight_times_patches_is_the_convolution(case: Case) -> None:
    model, (x, _) = case.model(), case.batch(2)
    convs = layers_of(model, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    with ref.tapped(*convs.values()) as calls:
        model(x)
    for conv, uses in calls.items():
        for inputs, outputs in uses:
            weight = conv.weight.flatten(1).unflatten(0, (conv.groups, -1))
            product = torch.einsum("goi,ntgi->ngot", weight, ref.patches(inputs, conv))
            expected = outputs.flatten(2)
            if conv.bias is not None:
                expected = expected - conv.bias[:, None]
            close(product.flatten(1, 2), expected)


def test_6_patches_are_unfold() -> None:
    conv = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 3))
    x = torch.randn(2, 2, 6, 5, dtype=F64)
    unfold = functional.unfold(x, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 3))
    close(ref.patches(x, conv)[:, :, 0], unfold.mT)


def test_7_embedding_is_a_linear_on_one_hot_rows() -> None:
    case = ZOO["language_model"]
    model, (x, y) = case.model(), case.batch(4)
    factors = ref.empirical_factors(model, x, y, cross_entropy, "0")
    counts = torch.bincount(x.flatten(), minlength=6).to(F64)
    close(factors[0][0], (counts / x.numel()).diag())
    fisher = ref.exact_fisher(model, x[:1, :1], "categorical", "0")
    close(ref.block(*ref.exact_factors(model, x[:1, :1], "categorical", "0")), fisher)


@pytest.mark.parametrize("name", ["conv_strided", "conv_grouped", "conv1d", "conv3d"])
def test_8_cheap_factors_are_reduced_patches(name: str) -> None:
    """A convolution is a Linear with its locations as positions, whose terms are pooled."""
    case = ZOO[name]
    model, (x, y) = case.model(), case.batch(3)
    (layer, conv), *_ = layers_of(model, nn.Conv1d, nn.Conv2d, nn.Conv3d).items()
    ((a, d),) = ref.captured(model, x, lambda z: cross_entropy(z, y), layer)[layer]
    A, G = ref.conv_factors(a, d, conv, "reduce")
    rows = ref.patches(a, conv)
    gradients = d.flatten(2).mT.unflatten(-1, (conv.groups, -1))
    for group in range(conv.groups):
        bias = conv.bias is not None
        expected = ref.linear_factors(rows[:, :, group], gradients[:, :, group], bias, "reduce")
        close((A[group], G[group]), (expected[0][0], expected[1][0]))
    # "expand" spreads the sum over locations evenly over both: A grows by T, G shrinks by T.
    A, G = ref.conv_factors(a, d, conv, "expand")
    t = rows.shape[1]
    expected = ref.linear_factors(rows[:, :, 0], gradients[:, :, 0], bias, "expand")
    close((A[0], G[0]), (expected[0][0] * t, expected[1][0] / t**2))


def test_9_a_shared_module_is_lumped() -> None:
    case = ZOO["shared_linear"]
    model, (x, y) = case.model(), case.batch(4)
    uses = ref.captured(model, x, lambda z: cross_entropy(z, y), "shared")["shared"]
    assert len(uses) == 2
    A, G = ref.layer_factors(model.get_submodule("shared"), uses)
    rows = torch.cat([torch.cat([a, torch.ones(4, 1)], 1) for a, _ in uses])
    gradients = torch.cat([4 * d for _, d in uses])
    close(ref.block(A, G), 2 * torch.kron(gradients.T @ gradients / 8, rows.T @ rows / 8))
    # The uses' gradients add up to the parameter's.
    case.loss(model(x), y).backward()
    total = sum(d.T @ torch.cat([a, torch.ones(4, 1)], 1) for a, d in uses)
    weight, bias = ref.from_matrix(model.get_submodule("shared"), total)
    close((weight, bias), (model.shared.weight.grad, model.shared.bias.grad))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_10_and_11_shards_are_weighted_by_examples(counts: list[int]) -> None:
    model, (x, y) = ZOO["mlp"].model(), ZOO["mlp"].batch(sum(counts))
    whole = ref.empirical_factors(model, x, y, cross_entropy, "2")
    shards = [
        ref.empirical_factors(model, a, b, cross_entropy, "2")
        for a, b in zip(x.split(counts), y.split(counts), strict=True)
    ]
    for X, parts in zip(whole, zip(*shards, strict=True), strict=True):
        close(ref.weighted_mean(parts, counts), X)
    if max(counts) > min(counts):
        assert not torch.allclose(sum(part[1] for part in shards) / len(counts), whole[1])


def test_11_in_place_activations_do_not_reach_the_capture() -> None:
    case = ZOO["inplace"]
    model, (x, y) = case.model(), case.batch()
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    plain = ref.captured(model, x, lambda z: cross_entropy(z, y), "0", "2")
    inplace = ref.captured(case.model(), x, lambda z: cross_entropy(z, y), "0", "2")
    close(inplace["0"], plain["0"])
    close(inplace["2"], plain["2"])


@given(st.floats(0.0, 0.999), st.integers(1, 12))
def test_13_running_average(decay: float, count: int) -> None:
    values = list(torch.randn(count, 2, 2, dtype=F64))
    ema, total, weight = torch.zeros(2, 2, dtype=F64), torch.zeros(2, 2, dtype=F64), 0.0
    for value in values:
        ema = decay * ema + (1 - decay) * value
        weight = decay * weight + 1
        total = total + (value - total) / weight
    close(ref.debiased_average(values, decay), total)
    close(ref.debiased_average(values, decay), ema / (1 - decay**count))
    close(ref.debiased_average(values[:1], decay), values[0])
    close(ref.debiased_average(values[:1] * count, [decay] * count), values[0])


# Solves.


@given(st.integers(1, 4), st.integers(1, 4), st.floats(1e-4, 10), st.integers(0, 1000))
def test_15_and_16_solves(d_in: int, d_out: int, damping: float, seed: int) -> None:
    A, G = spd(d_in, seed), spd(d_out, seed + 1)
    gradient = torch.randn(d_out, d_in, dtype=F64)
    P = ref.damped_dense_solve(A[None], G[None], gradient, damping)
    torch.testing.assert_close(G @ P @ A + damping * P, gradient, rtol=1e-8, atol=1e-10)
    P = ref.damped_factored_solve(A[None], G[None], gradient, damping)
    p, root = ref.pi(A, G), math.sqrt(damping)
    damped = G + root / p * eye(d_out), A + p * root * eye(d_in)
    torch.testing.assert_close(damped[0] @ P @ damped[1], gradient, rtol=1e-8, atol=1e-10)
    close(ref.damp((A, G), damping), [damped[1], damped[0]])


@pytest.mark.parametrize("solve", [ref.damped_dense_solve, ref.damped_factored_solve])
def test_groups_are_solved_one_by_one(solve: Callable[..., Tensor]) -> None:
    A = torch.stack([spd(3, seed) for seed in range(2)])
    G = torch.stack([spd(2, seed + 2) for seed in range(2)])
    gradient = torch.randn(4, 3, dtype=F64)
    each = [solve(A[g : g + 1], G[g : g + 1], gradient[2 * g : 2 * g + 2], 0.1) for g in range(2)]
    close(solve(A, G, gradient, 0.1), torch.cat(each))


@given(st.lists(st.integers(1, 3), min_size=2, max_size=3), st.floats(1e-3, 10))
def test_16_factored_damping(sizes: list[int], damping: float) -> None:
    factors = [spd(size, seed) for seed, size in enumerate(sizes)]
    damped = ref.damp(factors, damping)
    assert math.prod(ref.pis(*factors)) == pytest.approx(1)
    whole = ref.kron(*factors)
    excess = ref.kron(*damped) - whole - damping * eye(len(whole))
    assert torch.linalg.eigvalsh(excess).min() > -1e-9
    scaled = [factors[0] * 7, factors[1] / 7, *factors[2:]]
    close(ref.kron(*ref.damp(scaled, damping)), ref.kron(*damped))
    gradient = torch.randn(sizes, dtype=F64)
    P = ref.dense_solve(ref.kron(*damped), gradient)
    for axis, factor in enumerate(damped):
        P = torch.tensordot(factor, P, ([1], [axis])).movedim(0, axis)
    torch.testing.assert_close(P, gradient, rtol=1e-8, atol=1e-10)


def test_pi_by_hand() -> None:
    A, G = 8 * eye(2), 2 * eye(3)
    assert ref.pi(A, G) == 2
    assert ref.pi(A, 0 * G) == 1
    # Means 8, 2 and 4 over their geometric mean, 4.
    assert ref.pis(A, G, 2 * G) == pytest.approx([2, 0.5, 1])


def test_18_doubly_factored_is_exact_for_one_rank_one_example() -> None:
    layer = nn.Linear(6, 4, bias=False, dtype=F64)
    x = torch.outer(torch.randn(3, dtype=F64), torch.randn(2, dtype=F64))[None]
    d = torch.randn(1, 4, dtype=F64)
    K, Psi, G = ref.doubly_factored_factors(x, d)
    factors = ref.linear_factors(x.flatten(1), d, layer.bias is not None)
    close(ref.kron(G, K, Psi), ref.block(*factors))


@given(st.floats(1e-3, 10), st.floats(1e-6, 100))
def test_19_clip(lr: float, kappa: float) -> None:
    pairs = [(torch.randn(3, 2), torch.randn(3, 2)) for _ in range(3)]
    change = lr**2 * sum(abs(float((P * g).sum())) for P, g in pairs)
    nu = ref.clip_factor(pairs, lr, kappa)
    assert nu**2 * change == pytest.approx(min(kappa, change))
    assert ref.clip_factor(pairs, lr, None) == 1
    assert ref.clip_factor([], lr, kappa) == 1


# Training.


def test_one_step_by_hand() -> None:
    """w = 2, x = 3, y = 0: s = 6, ∇ = 18, A = 9, G = 36; γ = 36 so P = 18 / 360 = 1/20."""
    x, y = torch.tensor([[3.0]], dtype=F64), torch.tensor([[0.0]], dtype=F64)
    for kl_clip, nu in [(None, 1.0), (0.225, 0.5)]:  # lr² P ∇ = 0.9
        model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=F64))
        nn.init.constant_(model[0].weight, 2.0)
        kfac = ref.ReferenceKFAC(
            model, lr=1.0, damping=36.0, kl_clip=kl_clip, loss=half_squared_error
        )
        (vector,) = kfac.trajectory([(x, y)])
        close(vector, torch.tensor([2 - nu / 20], dtype=F64))


def test_two_steps_by_hand() -> None:
    """No clip, β = ½, momentum ½, solves every second step: the second uses the first's factors."""
    x, y = torch.tensor([[1.0]], dtype=F64), torch.tensor([[0.0]], dtype=F64)
    model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=F64))
    nn.init.constant_(model[0].weight, 2.0)
    kfac = ref.ReferenceKFAC(
        model, lr=1.0, momentum=0.5, damping=4.0, factor_decay=0.5, inv_update_steps=2,
        kl_clip=None, loss=half_squared_error,
    )  # fmt: skip
    # A = 1, G = 4: P = 2/8 = 1/4; w = 1.75. Then P = 1.75/8, v = 1/8 + 1.75/8 = 2.75/8.
    first, second = kfac.trajectory([(x, y), (x, y)])
    close(first, torch.tensor([1.75], dtype=F64))
    close(second, torch.tensor([1.75 - 2.75 / 8], dtype=F64))
    # (½·4 + 1.75²) / 1.5
    close(kfac.factors()["0"][1], torch.tensor([[[(2 + 1.75**2) / 1.5]]], dtype=F64))


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("name", ["mlp", "conv_grouped", "shared_linear"])
def test_20_infinite_damping_is_the_base(name: str, solver: Literal["eigen", "inverse"]) -> None:
    """P ≈ ∇ / γ, so that a step of lr γ is one of the base."""
    case = ZOO[name]
    plain = case.model()
    kfac = ref.ReferenceKFAC(case.model(), lr=1e8, damping=1e9, kl_clip=None, solver=solver)
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    for x, y in case.batches(3):
        kfac.step(x, y)
        sgd.zero_grad()
        case.loss(plain(x), y).backward()
        sgd.step()
    expected = ref.Flat(plain).vector
    torch.testing.assert_close(ref.Flat(kfac.model).vector, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["unused", "norms", "transformer", "lora", "embedding"])
def test_what_has_no_factors_keeps_its_gradient(name: str) -> None:
    case = ZOO[name]
    model, plain, (x, y) = case.model(), case.model(), case.batch()
    kfac = ref.ReferenceKFAC(model, lr=0.1, skip=["0"])
    kfac.step(x, y)
    case.loss(plain(x), y).backward()
    factored = {id(p) for layer in kfac.factors() for p in model.get_submodule(layer).parameters()}
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        expected = q if q.grad is None else q - 0.1 * q.grad
        assert torch.allclose(p, expected) == (id(p) not in factored)


def test_shards_of_statistics_are_the_whole_batch() -> None:
    case = ZOO["conv"]
    (x, y) = case.batch(6)
    one, many = ref.ReferenceKFAC(case.model()), ref.ReferenceKFAC(case.model())
    one.step(x, y)
    many.step(x, y, statistics=[(x[:2], y[:2]), (x[2:], y[2:])])
    close(ref.Flat(many.model).vector, ref.Flat(one.model).vector)


def test_staleness_delays_the_solves() -> None:
    """Two steps late: steps 0 to 2 use the solve of step 0, step 3 that of step 1."""
    case = ZOO["mlp"]
    late = ref.ReferenceKFAC(case.model(), staleness=2).trajectory(case.batches(4))
    first = ref.ReferenceKFAC(case.model(), inv_update_steps=100).trajectory(case.batches(4))
    second = ref.ReferenceKFAC(case.model(), inv_update_steps=3).trajectory(case.batches(4))
    close(late[:3], first[:3])
    assert not torch.allclose(late[3], first[3])
    assert not torch.allclose(late[3], second[3])
