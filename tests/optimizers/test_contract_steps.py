"""Steps: whatever runs between two calls of `step`, the right statistics are taken, once.

An optimizer of eigenpairs takes none: it trains as if nothing had run.
"""

from __future__ import annotations

import copy
import gc
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    BASES,
    asking,
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    each_system,
    each_variant,
    eigenpairs_only,
    factors,
    make,
    same,
    take,
)
from models import CLASSES, ZOO, Checkpointed, Pool
from reference import (
    captured,
    cross_entropy,
    damped_dense_solve,
    from_matrix,
    layer_factors,
    parameters_of,
    to_matrix,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from second_order import DHO2, CurvatureError, SecondOrderWarning
from second_order.fosi import pieces as flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from models import Case
    from reference import Batch, Factors, Loss

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)
LR, DAMPING = 0.05, 0.1  # those of `make`


def reference(
    model: nn.Module, batch: Batch, loss: Loss = cross_entropy, *layers: str
) -> dict[str, Factors]:
    """Factors of one batch, by the formulas, of all Linear and convolution layers or of some."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    names = layers or tuple(n for n, m in model.named_modules() if isinstance(m, kinds))
    pairs = captured(model, batch[0], lambda outputs: loss(outputs, batch[1]), *names)
    return {name: layer_factors(model.get_submodule(name), uses) for name, uses in pairs.items()}


def first_factors(System: Any, case: Case, batch: Batch | None = None, **options: Any) -> Any:
    """What a system has after one plain step: the first statistics themselves."""
    model = case.model()
    optimizer = make(System, model, **options)
    take(model, optimizer, batch or case.batch(), case.loss)
    return factors(optimizer)


def weights(optimizer: Any) -> set[float]:
    """How much each layer's running average weighs: 1 after one statistic."""
    states = optimizer.state_dict()["state"].values()
    found = [entry["curvature"].get("average_weight") for entry in states]
    return {round(float(weight), 12) for weight in found if weight is not None}


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]


def assert_near(a: nn.Module, b: nn.Module, rtol: float = 1e-8, atol: float = 1e-12) -> None:
    """Raise unless the parameters are equal up to rounding."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


# The step itself.


@each_kronecker
def test_factors_are_those_of_the_batch_and_the_step_is_their_dense_solve(System: Any) -> None:
    """The plain case that the others of this file are compared with; no clip unless asked for."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    before = copy.deepcopy(model)
    cross_entropy(before(BATCHES[0][0]), BATCHES[0][1]).backward()
    optimizer = make(System, model, kl_clip=None)
    take(model, optimizer, BATCHES[0])
    assert_same_factors(factors(optimizer), expected)
    for name, (A, G) in expected.items():
        old, new = before.get_submodule(name), model.get_submodule(name)
        P = damped_dense_solve(A, G, to_matrix(old, old.weight.grad, old.bias.grad), DAMPING)
        weight, bias = from_matrix(old, P)
        torch.testing.assert_close(new.weight, old.weight - LR * weight, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(new.bias, old.bias - LR * bias, rtol=1e-8, atol=1e-12)


@each_kronecker
def test_without_a_clip_the_step_is_longer(System: Any) -> None:
    model, twin = MLP.model(), MLP.model()
    take(model, make(System, model, kl_clip=None), BATCHES[0])
    take(twin, make(System, twin, kl_clip=1e-9), BATCHES[0])
    start = MLP.model()
    moved = [
        sum(float((m.state_dict()[name] - p).norm()) for name, p in start.state_dict().items())
        for m in (model, twin)
    ]
    assert moved[0] > 10 * moved[1] > 0


@each_system
def test_closure_is_called_once_with_gradients_enabled_and_its_loss_returned(System: Any) -> None:
    """Lightning runs forward and backward inside `step(closure)`."""
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    calls = []
    for x, y in BATCHES:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            calls.append(loss)
            return loss

        if System is DHO2:
            optimizer.curvature_closure = asking(model, optimizer, (x, y))["curvature_closure"]
        with torch.no_grad():
            returned = optimizer.step(closure)
        assert returned is calls[-1]
        take(twin, plain, (x, y))
    assert len(calls) == len(BATCHES)
    assert same(model, twin)
    assert optimizer.step() is None
    assert optimizer.step(closure=lambda: 3.5) == 3.5


@each_kronecker
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward_keeps_the_pair(
    System: Any, set_to_none: bool
) -> None:
    """Lightning does it; what the forward saw is not lost, and counts once."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    optimizer.zero_grad(set_to_none)
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)
    assert weights(optimizer) == {1}


@each_kronecker
def test_a_step_after_zero_grad_alone_takes_nothing_in(System: Any) -> None:
    model, (x, y) = MLP.model(), BATCHES[0]
    optimizer = make(System, model)
    cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(not pair[0].any() for pair in factors(optimizer).values())


@each_kronecker
def test_zero_grad_drops_the_statistics_of_completed_passes_only(System: Any) -> None:
    """As it drops their gradients."""
    model = MLP.model()
    expected = reference(model, BATCHES[1])
    optimizer = make(System, model)
    first, second = (cross_entropy(model(x), y) for x, y in BATCHES[:2])
    first.backward()
    optimizer.zero_grad()
    second.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_statistics_are_taken_only_every_so_many_steps(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, factor_update_steps=2, inv_update_steps=4)
    seen = []
    for batch in BATCHES:
        take(model, optimizer, batch)
        seen.append(weights(optimizer))
    assert seen == [{1}, {1}, {1.95}, {1.95}]


@each_kronecker
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_steps_in_between_cost_nothing(System: Any, fisher: str) -> None:
    """No input is saved for a step that will not look at it, nor does it count at the next."""
    model = MLP.model()
    x, y = BATCHES[0]

    def saved() -> int:
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            cross_entropy(model(x), y).backward()
        return len(packed)

    alone = saved()
    model.zero_grad()
    optimizer = make(System, model, factor_update_steps=2, lr=0.0, fisher=fisher)
    counts = []
    for _ in range(3):
        counts.append(saved() - alone)
        optimizer.step()
        model.zero_grad()
    assert counts[0] == counts[2] > 0
    assert counts[1] == 0


@each_kronecker
def test_two_backwards_through_one_graph_are_two_passes_of_the_same_statistics(System: Any) -> None:
    """`retain_graph=True`: the inputs are still there, and the mean over passes is what it was."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)
    assert weights(optimizer) == {1}


@each_kronecker
def test_two_losses_of_one_forward(System: Any) -> None:
    """Each backward is a pass with statistics of its own: A as before, G their mean."""
    model = MLP.model()
    (x, y), (_, z) = BATCHES[:2]
    ones, twos = reference(model, (x, y)), reference(model, (x, z))
    optimizer = make(System, model)
    outputs = model(x)
    cross_entropy(outputs, y).backward(retain_graph=True)
    cross_entropy(outputs, z).backward()
    optimizer.step()
    expected = {n: (ones[n][0], (ones[n][1] + twos[n][1]) / 2) for n in ones}
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_nothing_of_a_pass_is_held_after_its_backward(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    alive = inputs_of(model[2])
    gc.disable()
    try:
        take(model, optimizer, BATCHES[0])
        assert [ref.expired() for ref in alive] == [True]
        cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])  # a graph that sees no backward
        assert [ref.expired() for ref in alive] == [True, True]
    finally:
        gc.enable()


def inputs_of(layer: nn.Module) -> list[StorageWeakRef]:
    """References to the storages of all inputs the layer is to see."""
    refs: list[StorageWeakRef] = []
    layer.register_forward_pre_hook(
        lambda _, args: refs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    return refs


# GradScaler.


def cpu_scaler(**options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cpu.amp.GradScaler(**options)


def cuda_scaler(**options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cuda.amp.GradScaler(**options)


SCALERS: dict[str, Callable[[], Any]] = {
    "torch.amp": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
    "torch.cpu.amp": lambda: cpu_scaler(init_scale=1024.0, growth_interval=2),
    "torch.cuda.amp disabled": lambda: cuda_scaler(enabled=False),
}
each_scaler = pytest.mark.parametrize("scaler", SCALERS)


def scaled(model: nn.Module, optimizer: Any, scaler: Any, batch: Batch, unscale: bool) -> None:
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model(batch[0]), batch[1])).backward()
    if unscale:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(optimizer, **asking(model, optimizer, batch))
    scaler.update()


@each_system
@pytest.mark.parametrize("unscale", [False, True])
@each_scaler
def test_curvature_with_and_without_loss_scaling_agrees(
    System: Any, scaler: str, unscale: bool
) -> None:
    """Captured gradients carry the scale S and G its square, whatever S is at the time."""
    model, twin = MLP.model(), MLP.model()
    scaling = SCALERS[scaler]()
    optimizer, plain = make(System, model, grad_scaler=scaling), make(System, twin)
    for batch in BATCHES:
        scaled(model, optimizer, scaling, batch, unscale)
        take(twin, plain, batch)
        if System is not DHO2 or plain.curvature.refreshes:
            assert_same_curvature(curvature_of(optimizer), curvature_of(plain))
        assert_near(model, twin)
    if scaling.is_enabled():
        assert scaling.get_scale() > 1024


@each_kronecker
def test_a_scaler_that_the_optimizer_was_not_told_of_is_refused(System: Any) -> None:
    """The captured gradients would carry its scale, and training would stall without a word."""
    model = MLP.model()
    optimizer = make(System, model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"grad_scaler=scaler"):
        scaled(model, optimizer, SCALERS["torch.amp"](), BATCHES[0], unscale=False)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    scaled(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), BATCHES[0], unscale=False)


@eigenpairs_only
@pytest.mark.parametrize("scaler", ["torch.amp", "torch.cpu.amp"])
def test_one_process_of_eigenpairs_need_not_be_told_of_its_scaler(System: Any, scaler: str) -> None:
    """Gradients come unscaled, and the curvature closure's loss was never scaled."""
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    scaling = SCALERS[scaler]()
    for batch in BATCHES:
        scaled(model, optimizer, scaling, batch, unscale=False)
        take(twin, plain, batch)
    assert scaling.get_scale() > 1024
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain))
    assert_near(model, twin)


def infinite_gradient(layer: nn.Module) -> Any:
    """From now on the gradient at the layer's output has one infinity; returns the hook."""

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("inf")
        return gradient

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        output = output * 1  # behind the layer's own output, so that the layer sees it
        output.register_hook(spoil)
        return output

    return layer.register_forward_hook(hook)


@each_system
@pytest.mark.parametrize("where", ["everywhere", "first layer", "last layer"])
@pytest.mark.parametrize("scaler", ["torch.amp", "torch.cpu.amp"])
def test_a_step_skipped_by_the_scaler_leaves_no_trace(System: Any, scaler: str, where: str) -> None:
    """Statistics of the skipped pass are dropped, also those of layers that saw no infinity."""
    model, twin = MLP.model(), MLP.model()
    scaling, other = SCALERS[scaler](), SCALERS[scaler]()
    own = {"warmup_steps": 0} if System is DHO2 else {}
    optimizer = make(System, model, grad_scaler=scaling, **own)
    plain = make(System, twin, grad_scaler=other, **own)
    scaled(model, optimizer, scaling, BATCHES[0], unscale=False)
    scaled(twin, plain, other, BATCHES[0], unscale=False)
    before, known = copy.deepcopy(model), curvature_of(optimizer)
    x, y = BATCHES[3]
    if where == "everywhere":
        scaled(model, optimizer, scaling, (x * float("inf"), y), unscale=False)
    else:
        hook = infinite_gradient(model[0] if where == "first layer" else model[4])
        scaled(model, optimizer, scaling, (x, y), unscale=False)
        hook.remove()
    assert scaling.get_scale() == 512  # the scaler did skip the step
    assert same(model, before)
    assert_same_curvature(curvature_of(optimizer), known, rtol=0)
    for batch in BATCHES[1:]:
        scaled(model, optimizer, scaling, batch, unscale=False)
        scaled(twin, plain, other, batch, unscale=False)
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain))
    assert_near(model, twin)


@each_kronecker
def test_an_infinite_gradient_without_a_scaler_leaves_factors_finite_and_is_counted(
    System: Any,
) -> None:
    model = MLP.model()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    known = factors(optimizer)
    assert optimizer.summary().dropped == 0
    hook = infinite_gradient(model[2])
    x, y = BATCHES[1]
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    hook.remove()
    for p in model.parameters():  # the user repairs gradients; statistics are ours to guard
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    # Layers 2 and 0, which the infinity reached, keep what they knew; layer 4 goes on.
    assert optimizer.summary().dropped == 2
    now = factors(optimizer)
    for name in ("0", "2"):
        assert_same_factors({name: now[name]}, {name: known[name]}, rtol=0)
    assert not torch.equal(now["4"][1], known["4"][1])
    take(model, optimizer, BATCHES[2])
    assert all(bool(f.isfinite().all()) for pair in factors(optimizer).values() for f in pair)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not torch.equal(factors(optimizer)["0"][1], known["0"][1])


# Autocast.


@each_kronecker
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_under_autocast_are_float32_and_near_the_float64_reference(
    System: Any, dtype: torch.dtype
) -> None:
    """Activations are rounded; sums of them are not."""
    case = ZOO["conv"]
    batch = case.batch(64)
    expected = reference(case.model(), batch)
    model = case.model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    own = {"factor_dtype": torch.float32, "inv_dtype": torch.float32, "grad_scaler": scaler}
    optimizer = make(System, model, **own)
    with torch.autocast("cpu", dtype):
        loss = cross_entropy(model(batch[0].float()), batch[1])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert optimizer.state_dict()["state"][0]["curvature"]["A"].dtype == torch.float32
    for name, found in factors(optimizer).items():
        for actual, right in zip(found, expected[name], strict=True):
            assert float((actual - right).norm() / right.norm()) < 1e-2
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@eigenpairs_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eigenvalues_under_autocast_are_near_those_of_float64(
    System: Any, dtype: torch.dtype
) -> None:
    """The curvature closure evaluates under autocast as well; vectors are float32."""
    case = ZOO["conv"]
    x, y = case.batch(64)
    exact, model = case.model(), case.model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    own = {"warmup_steps": 0, "smallest": 0, "lanczos_tol": 1e-3, "lanczos_iterations": 60}
    plain, optimizer = make(System, exact, **own), make(System, model, grad_scaler=scaler, **own)
    take(exact, plain, (x, y))

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype):
            return cross_entropy(model(x.float()), y)

    scaler.scale(loss()).backward()
    scaler.step(optimizer, curvature_closure=loss)
    found, right = (o.curvature.eigenvalues for o in (optimizer, plain))
    assert float((found - right).norm() / right.norm()) < 3e-2
    vectors = optimizer.state_dict()["state"][0]["curvature"]["eigenvectors"]
    assert vectors.dtype == torch.float32
    assert_near(model.double(), exact, rtol=0, atol=5e-3)


@each_kronecker
@pytest.mark.parametrize("where", ["outside", "inside", "sampled"])
def test_sums_under_autocast_are_not_rounded_wherever_the_backward_runs(
    System: Any, where: str
) -> None:
    """With inputs that bf16 holds exactly A is exact; a product in bf16 would keep eight bits."""
    model = nn.Linear(5, CLASSES, bias=False)
    x = torch.randint(-9, 10, (64, 5)).float()
    y = torch.randint(CLASSES, (64,))
    own = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
    optimizer = make(System, model, fisher="sampled" if where == "sampled" else "empirical", **own)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(x), y)
        if where == "inside":
            loss.backward()
    if where != "inside":
        loss.backward()
    optimizer.step()
    A = factors(optimizer)[optimizer._curvature.layers.blocks[0].name][0][0]
    exact = x.double().T @ x.double() / 64
    assert torch.equal(A, exact)
    assert not torch.equal(exact.bfloat16().double(), exact)


@each_kronecker
def test_a_residual_added_in_place_under_autocast_is_as_legal_as_without_us(System: Any) -> None:
    """Autocast lets autograd save a bf16 copy, so the layer's float32 input is free to change."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            x += self.layer(x)
            return x

    case = ZOO["mlp"]
    own = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
    results = []
    for attach in (False, True):
        model = nn.Sequential(Residual(), nn.Linear(5, CLASSES))
        torch.nn.init.eye_(model[0].layer.weight)
        optimizer = make(System, model, **own) if attach else None
        x, y = case.batch(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        results.append(optimizer)
    optimizer = results[-1]
    optimizer.step()
    x = functional.layer_norm(case.batch()[0], (5,))
    expected = x.T @ x / len(x)
    found = factors(optimizer)["0.layer"][0][0, :5, :5]
    assert float((found - expected).norm() / expected.norm()) < 1e-2


# Accumulation.


ACCUMULATING = ["mlp", "conv_grouped", "shared_linear", "sequence_mlp", "inplace"]


@each_system
@pytest.mark.parametrize("name", ACCUMULATING)
@pytest.mark.parametrize("k", [2, 4])
def test_k_micro_batches_equal_one_batch(System: Any, name: str, k: int) -> None:
    """With the loss of each divided by k, as one does; a module called twice included."""
    case = ZOO[name]
    model, twin = case.model(), case.model()
    declared = {} if System is DHO2 else {"accumulation_steps": k}
    optimizer, plain = make(System, model, **declared), make(System, twin)
    for x, y in case.batches(3):
        optimizer.zero_grad()
        parts = list(zip(x.chunk(k), y.chunk(k), strict=True))
        for part_x, part_y in parts:
            (case.loss(model(part_x), part_y) / k).backward()
        asked = [asking(model, optimizer, part, case.loss) for part in parts]
        optimizer.step(**{name: [each[name] for each in asked] for name in asked[0]})
        take(twin, plain, (x, y), case.loss)
        if System is not DHO2:
            assert_same_factors(factors(optimizer), factors(plain), rtol=1e-9)
        assert_near(model, twin, atol=1e-11)


@each_kronecker
def test_accumulation_that_is_denied_shows(System: Any) -> None:
    """The control: loss / 2 makes G four times smaller."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model, accumulation_steps=1)
    (x, y) = BATCHES[0]
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        (cross_entropy(model(part_x), part_y) / 2).backward()
    optimizer.step()
    torch.testing.assert_close(factors(optimizer)["4"][1] * 4, expected["4"][1])


@each_kronecker
def test_unequal_micro_batches_are_weighted_by_examples(System: Any) -> None:
    """A sum of losses has gradients that do not depend on how the batch is cut."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model, loss_reduction="sum")
    x, y = BATCHES[0]
    for part in (slice(0, 3), slice(3, 8)):
        functional.cross_entropy(model(x[part]), y[part], reduction="sum").backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
@pytest.mark.parametrize("n", [1, 4, 8])
def test_gradient_factors_do_not_depend_on_the_size_of_the_batch(System: Any, n: int) -> None:
    """A batch of n copies of one example has the factors of that example."""
    x, y = MLP.batch(1)
    found = first_factors(System, MLP, (x.repeat(n, 1), y.repeat(n)))
    assert_same_factors(found, reference(MLP.model(), (x, y)))


@each_kronecker
def test_accumulation_with_loss_scaling(System: Any) -> None:
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    scaler = SCALERS["torch.amp"]()
    optimizer = make(System, model, accumulation_steps=2, grad_scaler=scaler)
    (x, y) = BATCHES[0]
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        scaler.scale(cross_entropy(model(part_x), part_y) / 2).backward()
    scaler.step(optimizer)
    assert_same_factors(factors(optimizer), expected)


# Forwards that are not training, and training that is not in training mode.


def validate(model: nn.Module, batch: Batch) -> None:
    model.eval()
    with torch.no_grad():
        model(batch[0])
    with torch.inference_mode():
        model(batch[0])
    model.train()


def forward_without_backward(model: nn.Module, batch: Batch) -> None:
    cross_entropy(model(batch[0]), batch[1])


def no_grad_in_training_mode(model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        model(batch[0])


def refresh_batch_norm(model: nn.Module, batch: Batch) -> None:
    update_bn([batch[0]], model)


@each_kronecker
@pytest.mark.parametrize(
    ("forward", "fisher"),
    [
        (validate, "empirical"),
        (validate, "sampled"),
        (no_grad_in_training_mode, "empirical"),
        (no_grad_in_training_mode, "sampled"),
        (refresh_batch_norm, "empirical"),
        (refresh_batch_norm, "sampled"),
        (forward_without_backward, "empirical"),
        (forward_without_backward, "sampled"),
    ],
)
def test_a_forward_that_sees_no_backward_changes_no_factor(
    System: Any, forward: Callable[[nn.Module, Batch], None], fisher: str
) -> None:
    case = ZOO["batch_norm"]
    model = case.model()
    optimizer = make(System, model, fisher=fisher)
    first, other, *_ = case.batches(3)
    take(model, optimizer, first)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    parameters = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    forward(model, other)
    optimizer.step()
    assert same(model.parameters(), parameters)
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry["curvature"].items():
            if isinstance(value, Tensor):
                assert torch.equal(value, before[index]["curvature"][key])


@each_kronecker
def test_validation_between_forward_and_backward_changes_nothing(System: Any) -> None:
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    validate(model, BATCHES[1])
    forward_without_backward(model, BATCHES[2])
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)
    assert weights(optimizer) == {1}


@each_kronecker
def test_a_model_in_eval_mode_that_trains_is_preconditioned(System: Any) -> None:
    """Fine-tuning with frozen batch norm: `requires_grad` counts, not `training`."""
    case = ZOO["batch_norm"]
    model = case.model().eval()
    expected = reference(model, case.batch())
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    assert_same_factors(factors(optimizer), expected)


def average(model: nn.Module, batch: Batch) -> None:
    ema = AveragedModel(model)
    cross_entropy(ema(batch[0]), batch[1]).backward()
    ema.update_parameters(model)


@each_system
@pytest.mark.parametrize("when", ["before the forward", "before the backward", "before the step"])
@pytest.mark.parametrize(
    "disturb", [validate, no_grad_in_training_mode, forward_without_backward, average]
)
def test_a_step_is_what_it_would_be_without_passes_beside_it(
    System: Any, disturb: Callable[[nn.Module, Batch], None], when: str
) -> None:
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    for (x, y), other in pairwise(BATCHES):
        optimizer.zero_grad()
        if when == "before the forward":
            disturb(model, other)
        loss = cross_entropy(model(x), y)
        if when == "before the backward":
            disturb(model, other)
            optimizer.zero_grad()
        loss.backward()
        if when == "before the step":
            disturb(model, other)
        optimizer.step(**asking(model, optimizer, (x, y)))
        take(twin, plain, (x, y))
        assert same(model, twin)
        if System is not DHO2 or plain.curvature.refreshes:
            assert_same_curvature(curvature_of(optimizer), curvature_of(plain), rtol=0)


@eigenpairs_only
def test_batch_norm_has_the_running_statistics_of_training_alone(System: Any) -> None:
    """The curvature's passes are not among them; a model in eval mode stays there, and trains."""
    case = ZOO["batch_norm"]
    model, twin = case.model(), case.model()
    optimizer = make(System, model)
    for batch in case.batches(4):
        twin.load_state_dict(model.state_dict())
        take(model, optimizer, batch)
        twin(batch[0])
        assert same(model.buffers(), twin.buffers())
    assert optimizer.curvature.refreshes == 2
    model.eval()
    before = copy.deepcopy(model)
    for batch in case.batches(2):
        take(model, optimizer, batch)
    assert optimizer.curvature.refreshes == 3
    assert not any(part.training for part in model.modules())
    assert same(model.buffers(), before.buffers())
    assert not any(map(torch.equal, model.parameters(), before.parameters()))


# Activations: in place, checkpointed, offloaded.


@each_kronecker
@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardtanh], ids=lambda a: a.__name__
)
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_in_place_activation_after_a_layer_equals_the_plain_one(
    System: Any, activation: Any, fisher: str
) -> None:
    x, y = ZOO["conv"].batch()
    models = []
    for inplace in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 2), activation(inplace=inplace), nn.Flatten(),
            nn.Linear(64, 6), activation(inplace=inplace), nn.Linear(6, CLASSES),
        ).double()  # fmt: skip
        optimizer = make(System, model, fisher=fisher, likelihood=fixed_labels(y))
        expected = reference(copy.deepcopy(models[0][0]), (x, y)) if models else None
        start = copy.deepcopy(model)
        take(model, optimizer, (x, y))
        models.append((start, model, factors(optimizer)))
        if expected:
            assert_same_factors(factors(optimizer), expected)
    assert same(models[0][1], models[1][1])
    assert_same_factors(models[1][2], models[0][2])


@eigenpairs_only
@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardtanh], ids=lambda a: a.__name__
)
def test_in_place_activations_train_as_plain_ones(System: Any, activation: Any) -> None:
    models = []
    for inplace in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 2), activation(inplace=inplace), nn.Flatten(),
            nn.Linear(64, 6), activation(inplace=inplace), nn.Linear(6, CLASSES),
        ).double()  # fmt: skip
        optimizer = make(System, model)
        for batch in ZOO["conv"].batches(3):
            take(model, optimizer, batch)
        assert optimizer.curvature.refreshes == 1
        models.append(model)
    assert_near(*models)


def fixed_labels(y: Tensor) -> Callable[[Any], Tensor]:
    """A likelihood with the labels of the data: "sampled" then has the empirical factors."""
    return lambda outputs: functional.cross_entropy(
        outputs.flatten(0, -2).double(), y.flatten(), reduction="sum"
    )


@each_kronecker
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_equals_plain(System: Any, reentrant: bool) -> None:
    """The forward runs twice, the statistics count once."""
    models = []
    for mode in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(mode).double()
        optimizer = make(System, model)
        for batch in BATCHES:
            take(model, optimizer, batch)
        assert weights(optimizer) == {round((1 - 0.95**4) / 0.05, 12)}
        models.append((model, factors(optimizer)))
    assert_same_factors(models[1][1], models[0][1])
    for p, q in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@eigenpairs_only
def test_non_reentrant_checkpointing_trains_as_plain(System: Any) -> None:
    models = []
    for mode in (None, False):
        torch.manual_seed(0)
        model = Checkpointed(mode).double()
        optimizer = make(System, model)
        for batch in BATCHES:
            take(model, optimizer, batch)
        models.append(model)
    assert_near(*models)


@eigenpairs_only
def test_reentrant_checkpointing_is_refused_with_the_remedy_and_may_be_left_out_of_the_curvature(
    System: Any,
) -> None:
    """Nothing has changed then, and the step may be taken again."""
    torch.manual_seed(0)
    model = Checkpointed(True).double()
    optimizer = make(System, model, warmup_steps=0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CurvatureError, match=r"checkpoint\(\.\.\., use_reentrant=False\)"):
        take(model, optimizer, BATCHES[0])
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())

    def loss() -> Tensor:
        model.reentrant = None
        try:
            return cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
        finally:
            model.reentrant = True

    optimizer.step(curvature_closure=loss)
    torch.manual_seed(0)
    plain = Checkpointed(None).double()
    take(plain, make(System, plain, warmup_steps=0), BATCHES[0])
    assert_near(model, plain)


@eigenpairs_only
def test_offloaded_activations_train_as_plain_ones(System: Any) -> None:
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    for batch in BATCHES:
        with save_on_cpu():
            take(model, optimizer, batch)
        take(twin, plain, batch)
    assert_near(model, twin)


class Repeated(nn.Module):
    """One layer applied twice, each time in a checkpoint of its own."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            if self.reentrant is None:
                x = self.part(x)
            else:
                x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.head(x)


@each_kronecker
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_layer_used_twice_in_checkpoints_has_the_lumped_statistics(
    System: Any, reentrant: bool | None
) -> None:
    torch.manual_seed(0)
    model = Repeated(reentrant).double()
    plain = copy.deepcopy(model)
    plain.reentrant = None
    expected = reference(plain, BATCHES[0])
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_checkpointed_activations_are_not_held(System: Any) -> None:
    """The memory that non-reentrant checkpointing frees stays free."""
    for mode, freed in ((None, False), (False, True)):
        model = Checkpointed(mode).double()
        alive = inputs_of(model.middle[1])
        optimizer = make(System, model)
        loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
        gc.collect()
        assert [ref.expired() for ref in alive] == [freed]
        loss.backward()
        optimizer.step()
        assert "middle.1" in factors(optimizer)


@each_kronecker
def test_inputs_are_saved_through_the_saved_tensor_hooks_in_force(System: Any) -> None:
    """Offloading takes our copy of the input along, as it takes autograd's own."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    alive = inputs_of(model[2])
    optimizer = make(System, model)
    with saved_tensors_hooks(torch.clone, lambda packed: packed):
        loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    gc.collect()
    assert [ref.expired() for ref in alive] == [True]
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_save_on_cpu_equals_plain(System: Any) -> None:
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    with save_on_cpu():
        loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)


# Layers used several times, or not at all; tied and frozen ones.


@each_kronecker
@pytest.mark.parametrize("name", ["shared_linear", "shared_conv"])
def test_a_layer_used_twice_has_the_lumped_statistics(System: Any, name: str) -> None:
    case = ZOO[name]
    assert_same_factors(first_factors(System, case), reference(case.model(), case.batch()))


class TiedLinears(nn.Module):
    """Two modules with one weight and one bias, or without a bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)
        self.a, self.b = nn.Linear(6, 6, bias=bias), nn.Linear(6, 6, bias=bias)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(self.first(x))))))


@each_kronecker
@pytest.mark.parametrize("bias", [True, False])
def test_tied_layers_are_one_block_with_the_lumped_statistics(System: Any, bias: bool) -> None:
    torch.manual_seed(0)
    model = TiedLinears(bias).double()
    uses = captured(model, BATCHES[0][0], lambda out: cross_entropy(out, BATCHES[0][1]), "a", "b")
    expected = layer_factors(model.a, [*uses["a"], *uses["b"]])
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    assert factors(optimizer).keys() == {"first", "a = b", "head"}
    assert_same_factors({"tied": factors(optimizer)["a = b"]}, {"tied": expected})
    names = [row.name for row in optimizer.summary().rows]
    assert len(names) == len(set(names)) == 3


@each_kronecker
def test_tied_weights_of_different_kinds_go_to_the_base(System: Any) -> None:
    case = ZOO["tied"]
    model = case.model()
    optimizer = make(System, model)
    take(model, optimizer, case.batch(), case.loss)
    gradient = model.head.weight.grad.clone()
    take(model, optimizer, case.batch(), case.loss)
    assert "hidden" in factors(optimizer)
    rows = {row.name: row for row in optimizer.summary().rows}
    assert rows["embedding"].status == "base" or rows["head"].status == "base"
    assert bool(gradient.isfinite().all())


@each_kronecker
def test_a_layer_unused_in_a_forward_keeps_what_it_knows(System: Any) -> None:
    """Its gradient is None, as for the base alone; the others are preconditioned."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.skip = False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.head(x if self.skip else torch.tanh(self.middle(x)))

    model = Optional().double()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    known, weight = factors(optimizer), model.middle.weight.detach().clone()
    model.skip = True
    expected = reference(model, BATCHES[1], cross_entropy, "first", "head")
    take(model, optimizer, BATCHES[1])
    now = factors(optimizer)
    assert_same_factors({"m": now["middle"]}, {"m": known["middle"]}, rtol=0)
    assert torch.equal(model.middle.weight, weight)
    for name, pair in expected.items():
        for old, new, average in zip(known[name], pair, now[name], strict=True):
            torch.testing.assert_close(average, (0.95 * old + new) / 1.95)
    model.skip = False
    take(model, optimizer, BATCHES[2])
    assert not torch.equal(model.middle.weight, weight)


@each_kronecker
def test_a_layer_that_is_never_used_takes_nothing_from_the_others(System: Any) -> None:
    case = ZOO["unused"]
    model = case.model()
    expected = reference(model, case.batch(), cross_entropy, "first", "head")
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    found = factors(optimizer)
    assert_same_factors({name: found[name] for name in expected}, expected)
    assert model.unused.weight.grad is None


@eigenpairs_only
@pytest.mark.parametrize("packed_below", [2, flat.PACKED_BELOW])
@pytest.mark.parametrize("base", BASES)
def test_a_layer_without_a_gradient_stays_as_it_is(
    System: Any, base: str, packed_below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is None, as for the base alone: eigenvectors that are not exact reach it not."""
    Base, options = BASES[base]
    case = ZOO["unused"]
    model = case.model()
    monkeypatch.setattr(flat, "PACKED_BELOW", packed_below)
    optimizer = make(System, model, base=Base, lanczos_iterations=5, lanczos_tol=1.0, **options)
    unused = [p.detach().clone() for p in model.unused.parameters()]
    used = [p.detach().clone() for p in model.first.parameters()]
    for batch in case.batches(4):
        take(model, optimizer, batch)
    assert optimizer.curvature.refreshes == 2
    assert model.unused.weight.grad is None
    assert same(model.unused.parameters(), unused)
    assert not same(model.first.parameters(), used)


@eigenpairs_only
def test_frozen_parameters_rest_and_thawed_ones_are_spanned_again(System: Any) -> None:
    """Each change drops the eigenpairs, and the base goes on alone until the next refresh."""
    model = MLP.model()
    optimizer = make(System, model, momentum=0.9)
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
    size = sum(p.numel() for p in model.parameters())
    middle = sum(p.numel() for p in model[2].parameters())
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, size)
    for frozen in (True, False):
        model[2].requires_grad_(not frozen)
        status = {row.name: row.status for row in optimizer.summary().rows}
        assert (status["2.weight"] == "frozen") == frozen
        weights = copy.deepcopy(model)
        with pytest.warns(SecondOrderWarning, match="the parameters that train have changed"):
            take(model, optimizer, BATCHES[2])
        assert not curvature_of(optimizer)
        take(model, optimizer, BATCHES[3])
        vectors = curvature_of(optimizer)["eigenpairs"][1]
        assert vectors.shape == (4, size - middle if frozen else size)
        assert same(model[2], weights[2]) == frozen
        assert not same(model[0], weights[0])
        saved = optimizer.state_dict()["state"]
        assert ("eigenvectors" in saved[2]["curvature"]) != frozen


@eigenpairs_only
@pytest.mark.parametrize("what", ["layer", "bias"])
def test_what_is_frozen_at_construction_is_not_spanned_until_it_thaws(
    System: Any, what: str
) -> None:
    model = MLP.model()
    parts = list(model[0].parameters()) if what == "layer" else [model[0].bias]
    for p in parts:
        p.requires_grad_(False)
    optimizer = make(System, list(model.parameters()), model=model)
    before = [p.detach().clone() for p in parts]
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
    size = sum(p.numel() for p in model.parameters())
    held = sum(p.numel() for p in parts)
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, size - held)
    assert same(parts, before)
    for p in parts:
        p.requires_grad_(True)
    for batch in BATCHES[2:]:
        take(model, optimizer, batch)
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, size)
    assert not any(map(torch.equal, parts, before))


NETWORKS = ("shared_linear", "tied", "lora", "norms", "transformer", "attention", "language_model")


@eigenpairs_only
@pytest.mark.parametrize("name", NETWORKS)
def test_any_network_learns_its_batch(System: Any, name: str) -> None:
    """Tied, shared and frozen weights, norms, attention, embeddings: all are one vector."""
    case = ZOO[name]
    model = case.model()
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    optimizer = make(System, model, base=torch.optim.Adam, lr=0.03)
    losses = [float(take(model, optimizer, case.batch(), case.loss)) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    assert optimizer.curvature.refreshes == 10
    assert optimizer.curvature.failures == 0
    assert same([p for p in model.parameters() if not p.requires_grad], frozen)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert curvature_of(optimizer)["eigenpairs"][1].shape == (4, trained)


@each_kronecker
def test_freeze_train_and_unfreeze(System: Any) -> None:
    """`requires_grad` is looked at in each step: a frozen layer rests, a thawed one is back."""
    model = MLP.model()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    known, frozen = factors(optimizer), model[2].weight.detach().clone()
    model[2].requires_grad_(False)
    assert {row.name: row.status for row in optimizer.summary().rows}["2"] == "frozen"
    for batch in BATCHES[1:3]:
        take(model, optimizer, batch)
    assert torch.equal(model[2].weight, frozen)
    assert not torch.equal(factors(optimizer)["0"][0], known["0"][0])
    model[2].requires_grad_(True)
    expected = reference(model, BATCHES[3], cross_entropy, "2")["2"]
    take(model, optimizer, BATCHES[3])
    assert not torch.equal(model[2].weight, frozen)
    # It may have kept what it knew or not: the new statistic is in, and nothing of between.
    weight = float(optimizer.state[model[2].weight]["curvature"]["average_weight"])
    assert weight in (1, 1.95)
    for old, new, average in zip(known["2"], expected, factors(optimizer)["2"], strict=True):
        torch.testing.assert_close(average, ((weight - 1) * old + new) / weight)


@each_kronecker
def test_the_input_of_a_frozen_layer_is_not_held_and_its_passes_do_not_count(System: Any) -> None:
    """Autograd saves no input for a frozen weight, and neither do we."""
    model = MLP.model()
    optimizer = make(System, model, accumulation_steps=1)
    model[2].requires_grad_(False)
    alive = inputs_of(model[2])
    linear_only = nn.Sequential(model[0], model[2])  # tanh would keep its own output
    loss = linear_only(BATCHES[0][0]).square().mean()
    gc.collect()
    assert [ref.expired() for ref in alive] == [True]
    loss.backward()
    model[2].requires_grad_(True)
    expected = reference(model, BATCHES[1], cross_entropy, "2")
    cross_entropy(model(BATCHES[1][0]), BATCHES[1][1]).backward()  # without zero_grad between
    optimizer.step()
    assert_same_factors({"2": factors(optimizer)["2"]}, expected)


@each_kronecker
def test_layers_frozen_at_construction_and_thawed_later(System: Any) -> None:
    """Given as parameters, they are in the groups from the start."""
    model = MLP.model()
    model[0].requires_grad_(False)
    optimizer = make(System, list(model.parameters()), model=model)
    take(model, optimizer, BATCHES[0])
    assert {row.name: row.status for row in optimizer.summary().rows}["0"] == "frozen"
    model[0].requires_grad_(True)
    expected = reference(model, BATCHES[1], cross_entropy, "0")
    take(model, optimizer, BATCHES[1])
    assert_same_factors({"0": factors(optimizer)["0"]}, expected)
    assert {row.name: row.status for row in optimizer.summary().rows}["0"] == "preconditioned"


@each_kronecker
@pytest.mark.parametrize("when", ["at construction", "later"])
def test_one_frozen_bias(System: Any, when: str) -> None:
    """A loses its homogeneous coordinate, the weight is preconditioned, the bias stays."""
    model = MLP.model()
    if when == "at construction":
        model[2].bias.requires_grad_(False)
    optimizer = make(System, model)
    if when == "later":
        take(model, optimizer, BATCHES[0])
        model[2].bias.requires_grad_(False)
    bias, expected = model[2].bias.detach().clone(), reference(model, BATCHES[1])
    take(model, optimizer, BATCHES[1])
    A, G = expected["2"]
    assert_same_factors({"2": factors(optimizer)["2"]}, {"2": (A[:, :-1, :-1], G)})
    assert torch.equal(model[2].bias, bias)
    assert optimizer.state[model[2].weight]["curvature"]["A"] is not None
    model[2].bias.requires_grad_(True)
    take(model, optimizer, BATCHES[2])
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@each_kronecker
def test_a_bias_whose_weight_is_frozen_is_trained_by_the_base(System: Any) -> None:
    model = MLP.model()
    model[2].weight.requires_grad_(False)
    x, y = BATCHES[0]
    plain = copy.deepcopy(model)
    cross_entropy(plain(x), y).backward()
    take(model, make(System, model), (x, y))
    expected = plain[2].bias - LR * plain[2].bias.grad
    torch.testing.assert_close(model[2].bias, expected, rtol=1e-12, atol=1e-14)


@each_kronecker
def test_low_rank_adapters_beside_frozen_layers(System: Any) -> None:
    case = ZOO["lora"]
    model = case.model()
    names = ("0.down", "0.up", "2.down", "2.up")
    expected = reference(model, case.batch(), cross_entropy, *names)
    frozen = model[0].frozen.weight.detach().clone()
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    assert_same_factors(factors(optimizer), expected)
    assert torch.equal(model[0].frozen.weight, frozen)


# Attention, and modules that have no factors.


@each_kronecker
def test_a_transformer_encoder_layer_trains_and_out_proj_is_named_once(System: Any) -> None:
    """`nn.MultiheadAttention` reads `out_proj.weight` and never calls the module."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), encoder, Pool(), nn.Linear(8, CLASSES)).double()
    x, y = torch.randn(16, 3, 4, dtype=torch.float64), torch.randint(CLASSES, (16,))
    projection = encoder.self_attn.out_proj.weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(System, model, lr=0.1, kl_clip=1e-2)
        losses = [float(take(model, optimizer, (x, y))) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(encoder.self_attn.out_proj.weight, projection)
    named = [text for text in messages(caught) if "out_proj" in text]
    assert len(named) == 1
    assert "'1.self_attn.out_proj'" in named[0]
    assert {"1.linear1", "1.linear2"} <= factors(optimizer).keys()


@each_kronecker
def test_the_summary_says_which_layers_gave_no_statistics(System: Any) -> None:
    """After a step that `out_proj` took no part in, it is the base's, and counts as such."""
    case = ZOO["transformer"]
    model = case.model()
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    summary = optimizer.summary()
    rows = {row.name: row for row in summary.rows}
    assert rows["1.up"].status == "preconditioned"
    assert rows["1.attention.out_proj"].status != "preconditioned"
    ours = sum(row.parameters for row in summary.rows if row.name in ("0", "1.up", "1.down", "3"))
    total = sum(p.numel() for p in model.parameters())
    assert summary.preconditioned_share == pytest.approx(ours / total)


@each_kronecker
def test_a_layer_without_statistics_is_named_once_also_when_others_come_and_go(
    System: Any,
) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.never, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.head(torch.tanh(self.late(x)) if self.steps > 2 else x)

    model = Late().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(System, model)
        for batch in BATCHES:
            take(model, optimizer, batch)
    assert sum("'never'" in text for text in messages(caught)) == 1
    assert sum("'late'" in text for text in messages(caught)) == 1


@each_kronecker
def test_unsupported_modules_go_to_the_base_and_are_listed_once(System: Any) -> None:
    case = ZOO["transformer"]
    model = case.model()
    start = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(System, model)
        for batch in case.batches(3):
            take(model, optimizer, batch)
        optimizer.summary()
    texts = messages(caught)
    for name in ("1.norm1 (LayerNorm)", "1.norm2 (LayerNorm)", "1.attention (MultiheadAttention)"):
        assert sum(name in text for text in texts) == 1
    rows = {row.name: row for row in optimizer.summary().rows}
    assert rows["1.norm1"].status == rows["1.attention"].status == "base"
    assert "LayerNorm" in rows["1.norm1"].detail
    assert sum(row.parameters for row in rows.values()) == sum(
        p.numel() for p in model.parameters()
    )
    assert not torch.equal(model[1].norm1.weight, start[1].norm1.weight)
    assert not torch.equal(model[1].attention.in_proj_weight, start[1].attention.in_proj_weight)


@each_kronecker
def test_what_the_base_has_gets_its_gradient_as_it_is(System: Any) -> None:
    case = ZOO["norms"]
    model = case.model()
    plain = copy.deepcopy(model)
    x, y = case.batch()
    cross_entropy(plain(x), y).backward()
    take(model, make(System, model, skip_layers=["7", "Conv*"]), (x, y))
    for index in (0, 1, 5, 7):  # convolution, group norm, layer norm, the last Linear
        for p, q in zip(model[index].parameters(), plain[index].parameters(), strict=True):
            torch.testing.assert_close(p, q - LR * q.grad, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(model[4].weight, plain[4].weight - LR * plain[4].weight.grad)


# torch.compile.


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_variant
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("given", ["the model", "the compiled model"])
def test_compiled_model_when_the_optimizer_is_made_before_the_first_run(
    System: Any, options: dict[str, Any], given: str
) -> None:
    model, twin = MLP.model(), MLP.model()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = make(System, model if given == "the model" else compiled, **options)
    plain = make(System, twin, **options)
    for batch in BATCHES[:3]:
        take(compiled, optimizer, batch)
        take(twin, plain, batch)
    assert_same_curvature(curvature_of(optimizer), curvature_of(plain), rtol=1e-9)
    assert_near(model, twin)


@eigenpairs_only
@pytest.mark.usefixtures("dynamo")
def test_eigenpairs_do_not_care_when_the_model_was_compiled_nor_give_way_to_it(
    System: Any,
) -> None:
    """Nothing is hung on the model; the closure must evaluate the one that is not compiled."""
    model = MLP.model()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(BATCHES[0][0])
    optimizer = make(System, compiled, warmup_steps=0)
    x, y = BATCHES[0]
    cross_entropy(compiled(x), y).backward()
    with pytest.raises(CurvatureError, match="evaluate the module that is not compiled"):
        optimizer.step(curvature_closure=lambda: cross_entropy(compiled(x), y))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        take(compiled, optimizer, BATCHES[0])
    assert optimizer.curvature.refreshes == 1


@each_kronecker
@pytest.mark.usefixtures("dynamo")
def test_inductor(System: Any) -> None:
    """Slow, for its C++ compiler, whose kernels do not care for hooks that eager would run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, CLASSES), nn.ReLU(inplace=True)).double()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model)
    optimizer, plain = make(System, compiled), make(System, twin)
    try:
        take(compiled, optimizer, BATCHES[0])
    except Exception as error:
        if "CppCompile" in repr(error) or "InvalidCxxCompiler" in repr(error):
            pytest.skip("no C++ compiler")
        raise
    take(twin, plain, BATCHES[0])
    assert_same_factors(factors(optimizer), factors(plain), rtol=1e-8)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-12)


@each_kronecker
@pytest.mark.usefixtures("dynamo")
def test_compiled_model_that_ran_before_the_optimizer_was_made_gives_a_warning_with_the_remedy(
    System: Any,
) -> None:
    """Hooks added after the first run never fire: the base trains on, and says so."""
    model = MLP.model()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(BATCHES[0][0])
    optimizer = make(System, model)
    with pytest.warns(SecondOrderWarning, match="optimizer before torch.compile's first run"):
        take(compiled, optimizer, BATCHES[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)  # once
        take(compiled, optimizer, BATCHES[1])


# torch.func, higher derivatives.


@each_kronecker
def test_function_transforms_work_on_a_watched_model_and_leave_no_statistics(System: Any) -> None:
    """`torch.func.grad` and `vmap` of it: per-example gradients of a model in training."""
    model = MLP.model()
    x, y = BATCHES[0]
    expected = reference(model, BATCHES[1])
    optimizer = make(System, model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    assert gradients["0.weight"].shape == (len(x), *model[0].weight.shape)
    take(model, optimizer, BATCHES[1])
    assert_same_factors(factors(optimizer), expected)


# Layouts.


CONVOLUTIONS = [name for name in ZOO if name.startswith("conv")]
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of a batch


@each_kronecker
@pytest.mark.parametrize(
    ("name", "channels_last"),
    [
        *((name, False) for name in CONVOLUTIONS),
        *((name, True) for name in CONVOLUTIONS if name != "conv1d"),
    ],
)
def test_convolutions_of_every_kind_in_both_layouts(
    System: Any, name: str, channels_last: bool
) -> None:
    """Grouped, dilated, circular, "same": factors from patches one by one, and a dense solve."""
    case = ZOO[name]
    x, y = case.batch(4)
    plain, model = case.model(), case.model()
    if channels_last:
        layout = LAYOUTS[x.dim()]
        model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    expected = reference(plain, (x, y))
    cross_entropy(plain(x), y).backward()
    optimizer = make(System, model)
    take(model, optimizer, (x, y))
    assert_same_factors(factors(optimizer), expected)
    for layer, (A, G) in expected.items():
        old, new = plain.get_submodule(layer), model.get_submodule(layer)
        bias = None if old.bias is None else old.bias.grad
        P = damped_dense_solve(A, G, to_matrix(old, old.weight.grad, bias), DAMPING)
        for start, change, found in zip(
            parameters_of(old), from_matrix(old, P), parameters_of(new), strict=True
        ):
            if found is not None:
                torch.testing.assert_close(found, start - LR * change, rtol=1e-8, atol=1e-10)


@eigenpairs_only
@pytest.mark.parametrize("packed_below", [2, flat.PACKED_BELOW])
@pytest.mark.parametrize("base", ["SGD", "Adam"])
@pytest.mark.parametrize("name", ["conv", "conv3d"])
def test_channels_last_trains_as_contiguous(
    System: Any, name: str, base: str, packed_below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters packed together, and each by itself where it is, as large ones are."""
    Base, options = BASES[base]
    case = ZOO[name]
    plain, model = case.model(), case.model()
    layout = LAYOUTS[case.batch()[0].dim()]
    model = model.to(memory_format=layout)
    assert not all(p.is_contiguous() for p in model.parameters())
    expected = make(System, plain, base=Base, **options)
    for batch in case.batches(4):
        take(plain, expected, batch)
    monkeypatch.setattr(flat, "PACKED_BELOW", packed_below)
    optimizer = make(System, model, base=Base, **options)
    for x, y in case.batches(4):
        take(model, optimizer, (x.to(memory_format=layout), y))
    assert len(optimizer._curvature.vector.chunks) == (
        1 if packed_below > 2 else len(list(model.parameters()))
    )
    assert optimizer.curvature.refreshes == 2
    assert_near(model, plain, rtol=1e-7, atol=1e-9)


@each_kronecker
def test_a_non_contiguous_sequence_into_a_linear(System: Any) -> None:
    class Transposed(nn.Module):
        """Positions first, as attention has them: (N, T, d) -> (T, N, d) and back."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.transpose(0, 1))
            return self.head(torch.tanh(x).transpose(0, 1))

    case = ZOO["sequence_mlp"]
    model = Transposed().double()
    expected = reference(model, case.batch(), case.loss)
    optimizer = make(System, model)
    take(model, optimizer, case.batch(), case.loss)
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_input_by_keyword(System: Any) -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    model = Keyword().double()
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    x = torch.cat([BATCHES[0][0], torch.ones(8, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(factors(optimizer)["layer"][0][0], x.T @ x / len(x))


# The sampled Fisher.


def sampled(System: Any, model: nn.Module, likelihood: Any = "categorical", **options: Any) -> Any:
    return make(System, model, fisher="sampled", likelihood=likelihood, **options)


@each_kronecker
def test_sampled_fisher_touches_no_gradient_and_no_random_state(System: Any) -> None:
    """Labels come from a generator of their own, gradients from a backward of their own."""
    model, twin = MLP.model(), MLP.model()
    x, y = BATCHES[0]
    optimizer = sampled(System, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state = torch.get_rng_state()
    loss = cross_entropy(model(x), y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    cross_entropy(twin(x), y).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-15)


@each_kronecker
def test_sampled_labels_are_drawn_anew_each_step_and_the_same_in_each_run(System: Any) -> None:
    runs = []
    for _ in range(2):
        model = MLP.model()
        optimizer = sampled(System, model, lr=0.0, factor_decay=0.0)
        seen = []
        for _ in range(3):
            take(model, optimizer, BATCHES[0])
            seen.append(factors(optimizer)["4"][1])
        runs.append(seen)
        torch.rand(7)  # whatever else the run draws
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][1], runs[0][2])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@each_kronecker
def test_sampled_labels_of_micro_batches_are_drawn_one_by_one(System: Any) -> None:
    """Two passes of one batch with the same labels would be as one."""
    found = []
    for passes in (1, 2):
        model, (x, y) = MLP.model(), BATCHES[0]
        optimizer = sampled(System, model, lr=0.0)
        for _ in range(passes):
            cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append(factors(optimizer)["4"][1])
    assert not torch.allclose(found[0], found[1], rtol=1e-3)


@each_kronecker
@pytest.mark.parametrize("name", ["mlp", "inplace", "conv_strided", "shared_linear", "batch_norm"])
def test_sampled_fisher_with_the_datas_labels_is_the_empirical_one(System: Any, name: str) -> None:
    case = ZOO[name]
    model = case.model()
    batch = case.batch()
    plain = case.model()
    if name == "inplace":
        plain[1].inplace = False  # the reference's captured output is a copy anyway
    expected = reference(plain, batch)
    optimizer = sampled(System, model, fixed_labels(batch[1]))
    take(model, optimizer, batch)
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_sampled_fisher_under_non_reentrant_checkpointing(System: Any) -> None:
    x, y = BATCHES[0]
    torch.manual_seed(0)
    model = Checkpointed(False).double()
    plain = copy.deepcopy(model)
    plain.reentrant = None
    expected = reference(plain, (x, y))
    optimizer = sampled(System, model, fixed_labels(y))
    take(model, optimizer, (x, y))
    assert_same_factors(factors(optimizer), expected)
    assert weights(optimizer) == {1}


@each_kronecker
def test_sampled_fisher_under_autocast(System: Any) -> None:
    case = ZOO["conv"]
    x, y = case.batch(32)
    expected = reference(case.model(), (x, y))
    model = case.model(torch.float32)
    own = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
    optimizer = sampled(System, model, fixed_labels(y), **own)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(x.float()), y)
    loss.backward()
    optimizer.step()
    for name, found in factors(optimizer).items():
        for actual, right in zip(found, expected[name], strict=True):
            assert float((actual - right).norm() / right.norm()) < 2e-2
    # And with labels of its own, in half precision logits.
    optimizer = sampled(System, case.model(torch.float32), **own)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(optimizer._training.model(x.float()), y)
    loss.backward()
    optimizer.step()
    assert all(bool(f.isfinite().all()) for pair in factors(optimizer).values() for f in pair)


@each_kronecker
def test_sampled_fisher_is_told_neither_of_scaling_nor_of_accumulation(System: Any) -> None:
    """Its loss is its own: neither S nor 1/k is in it."""
    model = MLP.model()
    x, y = BATCHES[0]
    expected = reference(model, (x, y))
    scaler = SCALERS["torch.amp"]()
    halves = iter([y[:4], y[4:]])
    optimizer = sampled(
        System,
        model,
        lambda outputs: functional.cross_entropy(outputs, next(halves), reduction="sum"),
        accumulation_steps=2,
        grad_scaler=scaler,
    )
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        scaler.scale(cross_entropy(model(part_x), part_y) / 2).backward()
    scaler.step(optimizer)
    assert_same_factors(factors(optimizer), expected)


class Wrapped(nn.Module):
    """Returns its logits in a form of the caller's choosing."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(5, CLASSES), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layer(x))


class Output:
    """As transformers has it."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda logits: logits,
    "dict": lambda logits: {"hidden": logits * 2, "logits": logits},
    "tuple": lambda logits: (logits, logits * 2),
    "object": Output,
}


def logits_of(output: Any) -> Tensor:
    if isinstance(output, (dict, tuple)):
        return output["logits"] if isinstance(output, dict) else output[0]
    return output if isinstance(output, Tensor) else output.logits


@each_kronecker
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("form", FORMS)
def test_sampled_fisher_finds_the_logits(System: Any, form: str, likelihood: str) -> None:
    found = []
    for shape in ("tensor", form):
        torch.manual_seed(0)
        model = Wrapped(FORMS[shape]).double()
        optimizer = sampled(System, model, likelihood)
        logits_of(model(BATCHES[0][0])).sum().backward()
        optimizer.step()
        found.append(factors(optimizer))
    assert_same_factors(found[1], found[0], rtol=0)
    assert float(found[0]["layer"][1].abs().sum()) > 0


@each_kronecker
@pytest.mark.parametrize(
    "form", [lambda logits: {"hidden": logits}, lambda logits: 3, lambda logits: (3, logits)]
)
def test_sampled_fisher_refuses_outputs_without_logits_and_names_the_remedy(
    System: Any, form: Callable[[Tensor], Any]
) -> None:
    model = Wrapped(form).double()
    optimizer = sampled(System, model)
    with pytest.raises(TypeError, match="pass likelihood= a callable that takes the output"):
        model(BATCHES[0][0])
    del optimizer


@each_kronecker
def test_sampled_fisher_with_a_callable_takes_any_output(System: Any) -> None:
    x, y = BATCHES[0]
    torch.manual_seed(0)
    model = Wrapped(lambda logits: [3, {"scores": logits}]).double()
    labels = fixed_labels(y)
    optimizer = sampled(System, model, lambda output: labels(output[1]["scores"]))
    plain = Wrapped(FORMS["tensor"]).double()
    plain.load_state_dict(model.state_dict())
    expected = reference(plain, (x, y))
    model(x)[1]["scores"].sum().backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_sampled_fisher_tells_when_the_model_itself_is_never_called(System: Any) -> None:
    model = MLP.model()
    optimizer = sampled(System, model)
    x, y = BATCHES[0]
    for layer in model:
        x = layer(x)
    cross_entropy(x, y).backward()
    with pytest.warns(SecondOrderWarning, match="needs the model itself to be called"):
        optimizer.step()


@each_kronecker
def test_sampled_fisher_survives_zero_grad_between_forward_and_backward(System: Any) -> None:
    """Some training loops reset gradients there; only completed passes are dropped."""
    model = MLP.model()
    optimizer = sampled(System, model)
    x, y = BATCHES[0]
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert all(float(G.abs().sum()) > 0 for _, G in factors(optimizer).values())


@each_kronecker
def test_sampled_fisher_holds_no_input_of_a_layer_called_by_itself(System: Any) -> None:
    model = MLP.model()
    optimizer = sampled(System, model)
    take(model, optimizer, BATCHES[0])
    alive = inputs_of(model[2])
    model[2](model[0](BATCHES[1][0]))
    gc.collect()
    assert [ref.expired() for ref in alive] == [True]


@each_kronecker
def test_sampled_fisher_of_a_model_that_detaches_its_logits(System: Any) -> None:
    """There is nothing to differentiate then: no statistics, and no error from inside a forward."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.probe, self.layer = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.probe(x).detach(), self.layer(x)

    model = Detached().double()
    optimizer = sampled(System, model)
    x, y = BATCHES[0]
    cross_entropy(model(x)[1], y).backward()
    optimizer.step()
    assert not any(float(G.abs().sum()) for _, G in factors(optimizer).values())
