"""On a CUDA device, every optimizer trains as on the CPU, and few steps synchronize."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, measure
from second_order.kronecker.solvers import Problem, attempt_all, cholesky_inverse, eigh
from second_order.kronecker.storage import unpack_upper_triangular
from second_order.lanczos.lanczos import Pairs

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
]
WIDE: dict[str, Any] = {"factor_dtype": torch.float64}
EVERY: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 4, **WIDE}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "inverse": (KAISA, {**EVERY, "solver": "inverse"}),
    "eigen": (KAISA, {**EVERY, "solver": "eigen"}),
    "Adam": (KAISA, {**EVERY, "base": torch.optim.Adam, "lr": 1e-3}),
    "drift": (KAISA, WIDE),
    "DPKFAC": (DPKFAC, EVERY),
    "DistKFAC": (DistKFAC, {**EVERY, "max_staleness": 0}),
    "DHO2": (DHO2, {"curvature_interval": 4, "warmup_steps": 0, "lanczos_iterations": 10}),
    "MRDHO2": (MRDHO2, {"epoch_steps": 4}),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 5)
    ).double()


def trained(System: Any, options: dict[str, Any], device: str, steps: int = 12) -> Tensor:
    """The parameters after some steps."""
    model = network().to(device)
    x = torch.randn(steps, 8, 2, 6, 6, dtype=torch.float64).to(device)
    y = torch.randint(5, (steps, 8)).to(device)
    with System(model, **{"lr": 0.05, **options}) as optimizer:
        if System in (DHO2, MRDHO2):
            optimizer.curvature_closure = lambda: cross_entropy(model(x[0]), y[0])
        for xi, yi in zip(x, y, strict=True):
            optimizer.zero_grad()
            cross_entropy(model(xi), yi).backward()
            optimizer.step()
    return parameters_to_vector(model.parameters()).detach().cpu()


@pytest.mark.parametrize("name", CASES)
def test_a_device_trains_as_the_cpu_does(name: str) -> None:
    System, options = CASES[name]
    here, there = (trained(System, options, device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("System", [KAISA, DPKFAC])
@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_a_step_without_a_refresh_does_not_synchronize(System: Any, solver: str) -> None:
    model = network().cuda()
    x = torch.randn(8, 2, 6, 6, dtype=torch.float64).cuda()
    y = torch.randint(5, (8,)).cuda()
    rare: dict[str, Any] = {"factor_update_steps": 100, "inv_update_steps": 100}
    optimizer = System(model, lr=0.05, solver=solver, **rare)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(6):  # the first five are not bounded
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def found_on(device: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
    """The factors of a network of masked tokens, and their eigenvalues."""
    torch.manual_seed(0)
    layers = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11, bias=False)
    model = nn.Sequential(*layers).to(dtype).to(device)
    tokens = torch.randint(11, (3, 4, 6))
    labels = tokens.roll(1, -1)
    labels[:, 1, 4:] = -100
    loss = None if options["factors"] == "inputs" else masked_loss
    found = measure(model, list(zip(tokens, labels, strict=True)), loss=loss, **options)
    every = {f"{name} {k}": getattr(of, k) for name, of in found.items() for k in of.stored}
    corrected = {f"{name} Λ": of.corrected for name, of in found.items()}
    return {name: t.cpu() for name, t in (every | corrected).items() if t is not None}


def masked_loss(output: Tensor, batch: Any) -> Tensor:
    labels = batch[1].flatten()
    counts = labels != -100
    return cross_entropy(output.flatten(0, 1)[counts].float(), labels[counts], reduction="none")


@pytest.mark.parametrize("keep", ["device", "cpu"])
@pytest.mark.parametrize(
    ("factors", "dtype", "within"),
    [
        ("inputs", torch.float32, 1e-4),
        ("inputs", torch.bfloat16, 2e-2),
        ("kfac", torch.float32, 1e-4),
        ("kfac", torch.bfloat16, 2e-2),
        ("ekfac", torch.float64, 1e-7),  # another rounding has other eigenvectors
    ],
)
def test_a_device_measures_what_the_cpu_does(
    factors: str, dtype: torch.dtype, within: float, keep: str
) -> None:
    options: dict[str, Any] = {"factors": factors, "keep": keep, "progress": False}
    here, there = (found_on(device, dtype, options) for device in ("cpu", "cuda"))
    assert here.keys() == there.keys()
    for name, factor in here.items():
        size = factor.abs().max().item()
        torch.testing.assert_close(there[name], factor, rtol=within, atol=within * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decompositions_are_valid_on_the_device(dtype: torch.dtype) -> None:
    root = torch.randn(3, 40, 40, dtype=dtype).cuda()
    (vectors, values), positive = eigh(root @ root.mT)
    assert bool(positive.all())
    close = {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(vectors * values.unsqueeze(-2) @ vectors.mT, root @ root.mT, **close)


def steps_of(
    model: nn.Module,
    optimizer: Any,
    batches: Any,
    *,
    wrapped: Any = nullcontext,
    scaler: Any = None,
) -> Tensor:
    """The parameters after one step for each batch."""
    for x, y in batches:
        optimizer.zero_grad()
        with wrapped():
            loss = cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return parameters_to_vector(model.parameters()).detach().cpu()


def drawn(steps: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Batches on the device."""
    torch.manual_seed(1)
    x = torch.randn(steps, 8, 2, 6, 6, dtype=dtype).cuda()
    y = torch.randint(5, (steps, 8)).cuda()
    return list(zip(x, y, strict=True))


@pytest.mark.parametrize("setting", ["old", "new"])
def test_the_precision_of_the_callers_products_stays(setting: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if setting == "old":
        torch.set_float32_matmul_precision("high")
    else:
        matmul.fp32_precision = "tf32"
    try:
        model = network().float().cuda()
        narrow = partial(torch.autocast, "cuda", torch.bfloat16)
        for solver, wrapped in (("inverse", nullcontext), ("eigen", narrow)):
            often: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 4}
            with KAISA(model, lr=0.05, **often, solver=solver) as optimizer:
                steps_of(model, optimizer, drawn(4), wrapped=wrapped)
        assert matmul.fp32_precision == "tf32"
        if setting == "old":
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        if setting == "old":
            torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before


def test_a_grad_scaler_skips_steps_that_overflow() -> None:
    model = network().float().cuda()
    batches = drawn(8)
    batches[4] = batches[4][0] * 1e30, batches[4][1]  # statistics are due
    before = parameters_to_vector(model.parameters()).detach().cpu()
    half = partial(torch.autocast, "cuda", torch.float16)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    with KAISA(model, lr=0.05, **EVERY, grad_scaler=scaler) as optimizer:
        found = steps_of(model, optimizer, batches, wrapped=half, scaler=scaler)
    assert bool(found.isfinite().all())
    assert scaler.get_scale() == 2.0**9
    assert not torch.equal(found, before)


@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC, DHO2])
def test_a_checkpoint_moves_between_devices(System: Any) -> None:
    options = EVERY if System is KAISA else CASES[System.__name__][1]
    batches = drawn(12, torch.float64)

    def made(device: str) -> tuple[nn.Module, Any]:
        model = network().to(device)
        optimizer = System(model, lr=0.05, **options)
        if System is DHO2:
            x, y = (part.to(device) for part in batches[0])
            optimizer.curvature_closure = lambda: cross_entropy(model(x), y)
        return model, optimizer

    model, optimizer = made("cuda")
    with optimizer:
        steps_of(model, optimizer, batches[:6])
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        file = io.BytesIO()
        torch.save(saved, file)
        there = steps_of(model, optimizer, batches[6:])
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    model, optimizer = made("cpu")
    with optimizer:
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        here = steps_of(model, optimizer, [(x.cpu(), y.cpu()) for x, y in batches[6:]])
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-9)


def test_a_compiled_model_trains_as_an_eager_one() -> None:
    batches = drawn(6)
    ends = []
    for compiled in (False, True):
        model = network().float().cuda()
        with KAISA(model, lr=0.05, **EVERY) as optimizer:
            called = torch.compile(model) if compiled else model
            ends.append(steps_of(called, optimizer, batches))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


def test_solves_on_a_stream_of_their_own() -> None:
    ends = []
    for device in ("cpu", "cuda"):
        model = network().cuda()
        options: dict[str, Any] = {**EVERY, "max_staleness": 0, "inverse_device": device}
        with DistKFAC(model, lr=0.05, **options) as optimizer:
            ends.append(steps_of(model, optimizer, drawn(12, torch.float64)))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-9)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of one rank over NCCL."""
    with TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])
@pytest.mark.parametrize("wrapper", ["none", "DDP", "FSDP2"])
def test_nccl_trains_as_one_process_does(System: Any, wrapper: str) -> None:
    options = dict(EVERY if System is KAISA else CASES[System.__name__][1])
    if wrapper == "FSDP2" and System is KAISA:
        options["factor_exchange"] = "reduce"
    batches = drawn(8, torch.float64)

    def end(wrapper: str) -> Tensor:
        model: nn.Module = network().cuda()
        if wrapper == "DDP":
            model = DistributedDataParallel(model)
        if wrapper == "FSDP2":
            fully_shard(model)
        with System(model, lr=0.05, **options) as optimizer:
            steps_of(model, optimizer, batches)
        return torch.cat([whole(p).flatten() for p in model.parameters()])

    alone = end("none")
    with group_of_one():
        grouped = end(wrapper)
    torch.testing.assert_close(grouped, alone, rtol=1e-7, atol=1e-10)


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter, which may be sharded."""
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach().cpu()


def test_capturable_bases_and_rates_on_the_device_train_as_plain_ones() -> None:
    ends = []
    for on_device in (False, True):
        model = network().float().cuda()
        options: dict[str, Any] = {"base": torch.optim.AdamW, "capturable": on_device}
        lr = torch.tensor(1e-3, device="cuda") if on_device else 1e-3
        optimizer = KAISA(model, lr=lr, factor_update_steps=5, inv_update_steps=10, **options)
        steps_of(model, optimizer, drawn(25))
        ends.append(parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


def test_a_step_is_refused_while_a_graph_is_recorded() -> None:
    model = network().float().cuda()
    optimizer = KAISA(model, lr=0.05)
    steps_of(model, optimizer, drawn(1))
    with (
        pytest.raises(RuntimeError, match="cannot be recorded in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@pytest.mark.parametrize("decompose", [eigh, cholesky_inverse])
@pytest.mark.parametrize("dim", [3, 40, 700])
def test_bad_members_of_a_batch_are_repaired_or_reported(decompose: Any, dim: int) -> None:
    """The members have rank one, tiny, huge, equal or non-finite values, next to a valid one."""
    torch.manual_seed(0)
    root = torch.randn(dim, dim)
    positive = root @ root.mT + torch.eye(dim)
    column = torch.randn(dim, 1)
    identity = torch.eye(dim)
    members = [
        positive,
        column @ column.mT + 0.1 * identity,
        1e-25 * positive,
        1e25 * positive,
        identity,
    ]
    broken = positive.clone()
    broken[0, 1] = torch.nan
    stored = torch.stack([*members, broken]).cuda()
    problems = [Problem(stored[i : i + 1], dim, torch.float32) for i in range(len(stored))]
    found = attempt_all(problems, decompose).finish()
    assert found[-1] is None
    for parts, matrix in zip(found[:-1], members, strict=True):
        assert parts is not None
        exact = matrix.double()
        if decompose is eigh:
            vectors, values = (part[0].double().cpu() for part in parts)
            again = vectors * values @ vectors.mT
            assert (again - exact).norm() < 1e-4 * exact.norm()
        else:
            inverse = torch.linalg.inv(exact)
            condition = torch.linalg.cond(exact).item()
            error = (parts[0][0].double().cpu() - inverse).norm()
            assert error < max(1e-6 * condition, 1e-4) * inverse.norm()


@pytest.mark.parametrize("narrow", [False, True])
def test_statistics_lose_nothing_by_tf32(narrow: bool) -> None:
    """bfloat16 rows are summed in TF32, which represents them; float32 rows never are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200, bias=False)).cuda()
    x = torch.randn(500, 300).cuda()
    autocast = partial(torch.autocast, "cuda", torch.bfloat16, enabled=narrow)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with KAISA(model, lr=0.0, factor_update_steps=1, inv_update_steps=1) as optimizer:
            with autocast():
                model(x).square().mean().backward()
            optimizer.step()
            packed = optimizer.state_dict()["state"][0]["curvature"]["A"]
    finally:
        matmul.fp32_precision = before
    rows = (x.bfloat16() if narrow else x).double().cpu()
    exact = rows.mT @ rows / len(rows)
    found = unpack_upper_triangular(packed, 300)[0].double().cpu()
    assert (found - exact).norm() < 1e-5 * exact.norm()


def test_autocast_does_not_round_eigenvectors() -> None:
    torch.manual_seed(0)
    pairs = Pairs(
        values=torch.zeros(3, dtype=torch.float64),
        residuals=torch.zeros(3, dtype=torch.float64),
        bounds=torch.zeros(3, dtype=torch.float64),
        num_largest=3,
        products=5,
        basis=torch.randn(5, 300).cuda(),
        combination=torch.randn(5, 3).cuda(),
    )
    expected = pairs.vectors()
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(pairs.vectors(), expected)
