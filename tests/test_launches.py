"""The device operations of a step, on a fake device: every optimizer, base and main option.

A step without a refresh makes the host neither synchronize nor upload, launches no more operations
for more layers of equal shape, and trains as on the CPU. Counts are those above the base alone.
Another process runs all cases, because the fake device exists once per process.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_device import NAME, Seen, pretend_device
from separate_process import found_once_by
from separate_process import run as run_command
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import launches
from second_order import (
    DHO2,
    DPKFAC,
    KAISA,
    MRDHO2,
    AuxBase,
    DecayingClip,
    DistKFAC,
    PerStep,
    TraceRule,
)
from second_order.lanczos import Outputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pool import Forks

pytestmark = pytest.mark.timeout(900)  # the first of them runs all cases

WIDTH = 16
CLASSES = 5
STEPS = 6
LONG = 10
FEW = 2
EVERY = 2
REFRESH = 4

# -------------------------------------------------------------------- the bounds

# Transformers of `make launches`: the bounds at 4 and at 16 blocks, and the aim.
#   quiet        launches of a quiet step(); some 20 of them bound batches of outliers
#   passes       of forward and backward for statistics, beyond the model's, a layer
#   statistics   of step() with statistics due, beyond those of a quiet one
#   refresh      of step() with a refresh due
#   waits        of the host, then
#   iteration    launches of one of Lanczos's, beyond those of the product
BOUNDS = [
    ("KAISA inverse", "quiet", 55, 55, 45),
    ("KAISA inverse, SGD", "quiet", 50, None, 45),
    ("KAISA eigen", "quiet", 68, 68, 60),
    ("DPKFAC inverse", "quiet", 59, None, 45),
    ("DistKFAC inverse", "quiet", 62, None, 45),
    ("DHO2", "quiet", 30, None, 30),
    ("KAISA inverse", "passes", 4, 4, 4),
    ("DistKFAC inverse", "passes", 5.9, None, 4),  # norms have exact blocks
    ("KAISA inverse", "statistics", 60, 60, 60),
    ("KAISA eigen", "statistics", 60, 60, 60),
    ("DistKFAC inverse", "statistics", 63, None, 60),
    ("KAISA inverse", "refresh", 300, 300, 300),
    ("KAISA eigen", "refresh", 300, 300, 300),
    ("DistKFAC inverse", "refresh", 300, 458, 300),  # each result is copied
    ("KAISA inverse", "waits", 1, 1, 1),
    ("KAISA eigen", "waits", 6, 6, 6),  # one, and one for each size of a factor
    ("DistKFAC inverse", "waits", 2, None, 1),
    ("DHO2", "waits", 2, None, 1),  # the coefficients, and whether the eigenvectors are finite
    ("DHO2", "iteration", 12, None, 12),
]
# Launches that one more block adds to a quiet step: 0 in all other cases.
GROWS = {"doubly factored": 6}  # an L's factors are not stacked

# -------------------------------------------------------------------- the models


class Residual(nn.Module):
    """x plus what some modules make of it."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Lone(nn.Module):
    """A matrix outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix)


class Tied(nn.Module):
    """A table of tokens that is also the head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.body = nn.Sequential(*(linear() for _ in range(blocks)))

    def to(self, *args: Any, **kwargs: Any) -> Tied:
        """Tied where it is: unlike CUDA, the pretended device gets new parameters, one each."""
        moved = super().to(*args, **kwargs)
        moved.head.weight = moved.table.weight
        return moved

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x > 0).sum(-1) % CLASSES
        return self.head(self.body(self.table(tokens)))


def linear() -> nn.Module:
    return Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True)


def convolution() -> nn.Module:
    return Residual(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Tanh())


class Images(nn.Sequential):
    """Rows as images of 2 by 2 with four channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 4, 2, 2))


def stack(block: Callable[[], nn.Module], blocks: int) -> nn.Module:
    return nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(WIDTH, CLASSES))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "linear": partial(stack, linear),
    "lone": partial(stack, Lone),
    "attention": partial(stack, attention),
    "tied": Tied,
    "convolution": lambda blocks: Images(
        nn.Conv2d(4, WIDTH, 1),
        *(convolution() for _ in range(blocks)),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, CLASSES),
    ),
}
# --------------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    """A training: an optimizer with options on a model; ``passes`` to a step."""

    system: Any
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "linear"
    passes: int = 1
    dtype: torch.dtype = torch.float32
    scaled: bool = False
    base_waits: bool = False

    @property
    def due(self) -> bool:
        """Whether something falls due every so many steps, and not by drift."""
        every = {"factor_update_steps", "curvature_interval", "epoch_steps"}
        return bool(every & self.options.keys())

    @property
    def alone(self) -> Case:
        """The same of its base."""
        excluded = {*launches.ADAMW, *launches.SGD, "capturable", "aux_base"}
        base = {k: v for k, v in self.options.items() if k in excluded}
        own = self.model, self.passes, self.dtype, self.scaled
        return Case(KAISA, {"skip_layers": ["*"], **base}, *own)


class Asking(KAISA):
    """Looks at a number in each step."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].sum().item()
        return super().step(closure)


class Looping(KAISA):
    """Does something for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(1.0)
        return super().step(closure)


class Uploading(KAISA):
    """Sends the device a number in each step."""

    def step(self, closure: Any = None) -> Any:
        p = self.param_groups[0]["params"][0]
        p.grad.add_(torch.zeros(p.shape).to(p.device))
        return super().step(closure)


MOMENTUM: dict[str, Any] = {"base": torch.optim.SGD, "lr": 0.05, "momentum": 0.9, "foreach": True}
ADAMW: dict[str, Any] = {"base": torch.optim.AdamW, "lr": 1e-3, "foreach": True}
DUE = {"factor_update_steps": EVERY, "inv_update_steps": REFRESH}
PAIRS = {
    "curvature_interval": REFRESH,
    "warmup_steps": 0,
    "num_largest": 2,
    "lanczos_iterations": 4,
}


def on_device(number: float) -> Callable[[str], Tensor]:
    return lambda device: torch.tensor(number, device=device)


def kfac(system: Any = KAISA, model: str = "linear", **options: Any) -> Case:
    base = {} if "base" in options else MOMENTUM
    own = {
        name: options.pop(name)
        for name in ("passes", "dtype", "scaled", "base_waits")
        if name in options
    }
    return Case(system, {**DUE, **base, **options}, model, **own)


def dho2(system: Any = DHO2, **options: Any) -> Case:
    due = {**PAIRS, "epoch_steps": REFRESH} if system is MRDHO2 else PAIRS
    due = {k: v for k, v in due.items() if system is DHO2 or k != "curvature_interval"}
    return Case(system, {**due, **({} if "base" in options else MOMENTUM), **options})


CASES = {
    "KAISA inverse": kfac(),
    "KAISA eigen": kfac(solver="eigen"),
    "AdamW": kfac(**ADAMW),
    "AdamW, capturable": kfac(**ADAMW, capturable=True),
    "Adam": kfac(base=torch.optim.Adam, lr=1e-3),
    "RMSprop": kfac(base=torch.optim.RMSprop, lr=1e-3),
    "SGD with nothing set": Case(KAISA, {**DUE, "lr": 0.05}),
    "AdamW beside": kfac(aux_base=AuxBase(torch.optim.AdamW, kwargs={"lr": 1e-3})),
    "no clip": kfac(kl_clip=None),
    "clip": kfac(kl_clip=1e-3),
    "clip that decays": kfac(kl_clip=DecayingClip()),
    "clip, AdamW, eigen": kfac(**ADAMW, kl_clip=1e-3, solver="eigen"),
    "factors in float64": kfac(factor_dtype=torch.float64),
    "factors in bfloat16": kfac(factor_dtype=torch.bfloat16),
    "GradScaler": kfac(scaled=True, base_waits=True),
    "sum over the step": kfac(loss_reduction="step_mean"),
    "sampled": kfac(fisher="categorical"),
    "exact blocks": kfac(precondition_norms=True),
    "lone matrices": kfac(model="lone", unsupported_layers="gradient_factors"),
    "by trace": kfac(inv_update_steps=TraceRule()),
    "by drift": Case(KAISA, MOMENTUM),
    "some layers alone": kfac(skip_layers=["0.*"]),
    "too large": kfac(max_factor_dim=WIDTH - 1, unsupported_layers="gradient_factors"),
    "sum, remembered by steps": kfac(loss_reduction="sum", factor_decay=PerStep(0.9)),
    "damping of its own, by step": kfac(
        relative_damping=False, damping=lambda step: 0.5 / (1 + step)
    ),
    "rate on the device": kfac(**{**ADAMW, "lr": on_device(1e-3)}, capturable=True),
    "rate on the device, SGD": kfac(lr=on_device(0.05), base_waits=True, momentum=0.9),
    "two rates on the device": kfac(
        **{**ADAMW, "lr": on_device(1e-3)},
        kl_clip=1e-3,
        capturable=True,
        aux_base=AuxBase(torch.optim.AdamW, kwargs={"lr": on_device(2e-3)}),
    ),
    "scale of the gradient": kfac(grafting="gradient"),
    "Newton's scale, AdamW": kfac(**ADAMW, grafting="none"),
    "two passes": kfac(passes=2),
    "tied": kfac(model="tied"),
    "convolutions": kfac(model="convolution"),
    "convolutions, reduce": kfac(model="convolution", kfac_approx="reduce"),
    "attention": kfac(model="attention"),
    "bfloat16": kfac(dtype=torch.bfloat16),
    "bfloat16, AdamW, eigen": kfac(**ADAMW, dtype=torch.bfloat16, solver="eigen"),
    "float64": kfac(dtype=torch.float64),
    "DPKFAC inverse": kfac(DPKFAC),
    "DistKFAC inverse": kfac(DistKFAC, async_inverse=False),
    "DistKFAC eigen": kfac(DistKFAC, async_inverse=False, solver="eigen"),
    "DistKFAC, cheap": kfac(
        DistKFAC, model="convolution", async_inverse=False, conv_factors="cheap"
    ),
    "doubly factored": kfac(
        DistKFAC, async_inverse=False, doubly_factored={f"{i}.body.1": (4, 4) for i in range(2)}
    ),
    "DHO2": dho2(),
    "DHO2, AdamW": dho2(**ADAMW),
    "DHO2, plain momentum": dho2(subspace_momentum=0.0),
    "DHO2, the base's momentum": dho2(subspace_momentum="base"),
    "DHO2, no trust region": dho2(trust_region=False),
    "DHO2, both ends": dho2(num_smallest=1),
    "DHO2, Gauss-Newton": dho2(curvature="gauss-newton"),
    "DHO2, bounded rate": dho2(lr_scale_clip=2.0),
    "MRDHO2": dho2(MRDHO2),
    "Muon": kfac(base=torch.optim.Muon, lr=1e-3, aux_base=torch.optim.AdamW, foreach=True),
}
CONTROLS = {"asking": kfac(Asking), "looping": kfac(Looping), "uploading": kfac(Uploading)}

# --------------------------------------------- what the other process does


def prepared(case: Case, device: str, blocks: int) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and a scaler."""
    torch.manual_seed(0)
    model = MODELS[case.model](blocks).to(case.dtype).to(device)
    case_options = copy.deepcopy(case.options)
    if callable(case_options.get("lr")):
        case_options["lr"] = case_options["lr"](device)
    aux_base = case_options.get("aux_base")
    if isinstance(aux_base, AuxBase) and callable(aux_base.kwargs["lr"]):
        case_options["aux_base"] = AuxBase(
            aux_base.optimizer_class, kwargs={"lr": aux_base.kwargs["lr"](device)}
        )
    if device == "cpu" and case_options.pop("capturable", None):
        case_options["foreach"] = False
    if "doubly_factored" in case_options:
        case_options["doubly_factored"] = {f"{i}.body.1": (4, 4) for i in range(blocks)}
    scaler = torch.amp.GradScaler(device, init_scale=16.0) if case.scaled else None
    return model, case.system(model, **case_options, grad_scaler=scaler), scaler


def trained(
    case: Case, seen: Seen, device: str, blocks: int, steps: int
) -> tuple[Tensor, list[list[Counter[str]]]]:
    """Parameters after the steps, and the operations of each: launches, waits, uploads, passes."""
    model, optimizer, scaler = prepared(case, device, blocks)
    shape = (steps, case.passes, 8, 3, WIDTH) if case.model == "attention" else None
    x = torch.randn(shape or (steps, case.passes, 24, WIDTH), dtype=case.dtype).to(device)
    y = torch.randint(CLASSES, (steps, case.passes, 24)).to(device)

    def loss(i: int, j: int) -> Tensor:
        return cross_entropy(model(x[i, j]).flatten(0, -2), y[i, j]) / case.passes

    def outputs() -> Outputs:
        return Outputs(model(x[0, 0]).flatten(0, -2), lambda z: cross_entropy(z, y[0, 0]))

    if isinstance(optimizer, DHO2 | MRDHO2):
        products = case.options.get("curvature") == "gauss-newton"
        optimizer.curvature_closure = outputs if products else partial(loss, 0, 0)
    requests: list[list[Counter[str]]] = []
    torch.manual_seed(1)
    for i in range(steps):
        optimizer.zero_grad()
        seen.clear()
        for j in range(case.passes):
            (scaler.scale(loss(i, j)) if scaler else loss(i, j)).backward()
        passes = seen.kernels.copy()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        requests.append([each.copy() for each in (seen.kernels, seen.syncs, seen.uploads, passes)])
    optimizer.close()
    end = parameters_to_vector(model.parameters()).detach().cpu().double()
    return end, requests


def quiet(
    case: Case, requests: list[list[Counter[str]]], alone: list[list[Counter[str]]]
) -> list[list[Counter[str]]]:
    """The operations of steps without a refresh; with drift, of plain passes only."""
    if case.due:
        return [each for i, each in enumerate(requests) if i % EVERY]
    return [each for each in requests if each[3].total() == alone[-1][3].total()]


BASES: dict[tuple[str, int], list[list[Counter[str]]]] = {}  # the operations of bases alone


def run(name: str) -> dict[str, Any]:
    """Return the results of a case, or its error."""
    case = (CASES | CONTROLS)[name]
    steps, few = (STEPS, FEW) if case.due else (LONG, LONG)
    warnings.simplefilter("ignore")
    try:
        with pretend_device() as seen:  # first: autograd's threads are those of the devices known
            here, requests = trained(case, seen, NAME, 2, steps)
            _, more = trained(case, seen, NAME, 3, few)
            for blocks in (2, 3):
                if (repr(case.alone), blocks) not in BASES:
                    _, BASES[repr(case.alone), blocks] = trained(
                        case.alone, seen, NAME, blocks, FEW
                    )
        plain, wider = (BASES[repr(case.alone), blocks] for blocks in (2, 3))
        there, _ = trained(case, Seen(), "cpu", 2, steps)
        calm = quiet(case, requests, plain)
        usual = plain[-1] if case.base_waits else [Counter()] * 3
        return {
            "difference": ((here - there).norm() / there.norm()).item(),
            "waits": dict(sum((each[1] - usual[1] for each in calm), Counter[str]())),
            "uploads": dict(sum((each[2] - usual[2] for each in calm), Counter[str]())),
            "launches": [beyond(case, requests[: len(more)], plain), beyond(case, more, wider)],
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def beyond(case: Case, requests: list[list[Counter[str]]], alone: list[list[Counter[str]]]) -> int:
    """The most launches of a step without a refresh, beyond those of the base alone."""
    return max(each[0].total() for each in quiet(case, requests, alone)) - alone[-1][0].total()


def transformer(name: str, blocks: int) -> dict[str, float]:
    """Return the counts of one system that `BOUNDS` limits."""
    warnings.simplefilter("ignore")
    kinds = launches.count_operations(launches.SYSTEMS[name], blocks)
    quiet, due, refresh = (kinds[kind] for kind in ("quiet", "statistics", "refresh"))
    return {
        "quiet": quiet["step"],
        "passes": (due["passes"] - quiet["passes"]) / (6 * blocks + 3),
        "statistics": due["step"] - quiet["step"],
        "refresh": refresh["step"],
        "waits": refresh["waits"],
        "iteration": iteration() if name == "DHO2" else 0,
    }


def iteration() -> float:
    """Launches of an iteration of Lanczos's beyond its product's, of one narrow block."""
    options: dict[str, Any] = {**launches.ADAMW, **launches.PAIRS, "curvature_interval": REFRESH}
    counts = [
        launches.count_operations(
            partial(DHO2, **{**options, "lanczos_iterations": n, "lanczos_tol": 0.0}), 1, 8, 1
        )["first"]["step"]
        for n in (5, 8)
    ]
    with pretend_device() as seen:
        model = launches.Transformer(1, 8).to(NAME)
        params = list(model.parameters())
        tokens = torch.randint(50, (8, 16)).to(NAME)
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        gradients = torch.autograd.grad(loss, params, create_graph=True)
        seen.clear()
        torch.autograd.grad(gradients, params, params, retain_graph=True)
        return (counts[1] - counts[0]) / 3 - seen.kernels.total()


def main() -> None:
    """Run all cases, and say what was found."""
    torch.set_num_threads(1)
    sizes = {(name, n): None for n in (16, 4) for name, _, *most, _ in BOUNDS if most[n == 16]}
    with multiprocessing.get_context("fork").Pool(2) as pool:
        large = [pool.apply_async(transformer, size) for size in sizes]
        cases = {name: pool.apply_async(run, (name,)) for name in CASES | CONTROLS}
        counted = {f"{n} {name}": each.get() for (name, n), each in zip(sizes, large, strict=True)}
        found = counted | {name: each.get() for name, each in cases.items()}
        pool.close()
        pool.join()
    sys.stdout.write(json.dumps(found))


# ----------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def found(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results by case."""
    # Other tests reach the same lines, and counting them takes half as long again.
    cases: dict[str, Any] = found_once_by(forks, __file__, tmp_path_factory, is_counted=False)
    return cases


@pytest.mark.parametrize("name", CASES)
def test_no_operand_is_on_another_device(found: dict[str, Any], name: str) -> None:
    assert "error" not in found[name], found[name]


@pytest.mark.parametrize("name", CASES)
def test_a_step_without_a_refresh_neither_synchronizes_nor_uploads(
    found: dict[str, Any], name: str
) -> None:
    assert (found[name]["waits"], found[name]["uploads"]) == ({}, {})


@pytest.mark.parametrize("name", CASES)
def test_a_step_without_a_refresh_launches_no_more_with_more_layers(
    found: dict[str, Any], name: str
) -> None:
    two, three = found[name]["launches"]
    assert three - two <= GROWS.get(name, 0)


@pytest.mark.parametrize("name", CASES)
def test_a_device_trains_as_the_cpu_does(found: dict[str, Any], name: str) -> None:
    rounded = "bfloat16" in name or name == "Muon"
    assert found[name]["difference"] < (3e-3 if rounded else 1e-5)


@pytest.mark.parametrize(("system", "what", "small", "large", "aim"), BOUNDS)
def test_operations_of_a_transformer_stay_within_their_bounds(
    found: dict[str, Any], system: str, what: str, small: float, large: float | None, aim: int
) -> None:
    for blocks, most in ((4, small), (16, large)):
        if most is not None:
            requests = found[f"{blocks} {system}"][what]
            assert requests <= most, f"{system}, {blocks} blocks: {what} {requests}, aimed at {aim}"


def test_synchronizations_uploads_and_loops_are_detected(found: dict[str, Any]) -> None:
    assert found["asking"]["waits"]
    assert found["uploading"]["uploads"]
    two, three = found["looping"]["launches"]
    assert three > two


def test_the_command_runs_by_small_models(forks: Forks, tmp_path: Path) -> None:
    record = tmp_path / "launches.json"
    systems = ["SGD", "KAISA eigen"]
    arguments = ["--tiny", "--json", record, "--systems", *systems]
    completed = run_command(forks, launches.__file__, *arguments)
    counted = json.loads(record.read_text())["rows"]
    assert {(row["system"], row["blocks"], row["kind"]) for row in counted} == {
        (system, blocks, kind) for system in systems for blocks in (1, 2) for kind in launches.KINDS
    }
    assert all(system in completed for system in systems)


if __name__ == "__main__":
    main()
