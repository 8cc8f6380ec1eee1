"""The tasks that the optimizers are compared on, and the function that trains on a task.

The learning rate is constant, or it rises and then falls along a cosine to a twentieth of its peak
if the task has a warm-up. Seconds are CPU time of the training steps, in one thread. Default
settings were chosen on the tasks of this file. `unseen.py` and `images.py` have further tasks.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer, _muon
from tqdm import tqdm

import digits
import language_model
import reporting
import second_order
from images import IMAGES, MissingDataError
from muon import newton_schulz
from second_order.optimizers.config import PerStep
from second_order.utils.stages import recorded_by
from soap import SOAP
from stage_seconds import StageSeconds
from task import LANGUAGE_KEYWORDS, Task
from unseen import NEW, UNSEEN, regression

__all__ = [
    "TASKS",
    "FlattenedMuon",
    "Job",
    "Run",
    "Setting",
    "basis",
    "final_loss",
    "has_data",
    "mean_difference",
    "restore_run",
    "run_all",
    "seconds_to",
    "steps_to",
    "stored_tasks",
    "train",
    "tune",
]

Setting = tuple[float, dict[str, Any]]
"""A learning rate, and an optimizer's other keywords."""
Name = TypeVar("Name")


@dataclass(frozen=True)
class Job:
    """A training run: the task, the optimizer and its hyperparameters.

    Attributes:
        task: Name of the task in :data:`TASKS`.
        optimizer: Name of the optimizer. The base optimizer follows, as in "KAISA, AdamW".
        lr: Peak of the learning rate.
        seed: Seed of the model and of the order of the batches.
        options: Keywords of the optimizer. A ``factor_decay`` per step is a mapping of its fields.
        warmup: Steps of an additional warm-up, on top of the task's schedule.
        threads: Number of threads of the process.
        device: "cpu" or "cuda".
    """

    task: str
    optimizer: str
    lr: float
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    warmup: int = 0
    threads: int = 1
    device: str = "cpu"

    def share_of_rate(self, step: int) -> float:
        """The learning rate of a step, as a share of its peak."""
        warmup_share = 1.0
        if self.warmup:
            warmup_share = min(1.0, (step + 1) / self.warmup)
        return warmup_share * TASKS[self.task]().share_of_rate(step)


@dataclass
class Run:
    """The result of a job.

    Attributes:
        job: The job.
        losses: The loss at each evaluation.
        seconds: Seconds of training until each evaluation: CPU time, or wall-clock time on a GPU.
        end: Metrics of the trained model by name.
        accounts: Wall-clock seconds by timer region, for optimizers of this package. "elsewhere"
            has the forward and backward passes and the batches, but not the evaluations.
        refresh_interval: Median over layers of the final refresh interval.
    """

    job: Job
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    end: dict[str, float] = field(default_factory=dict)
    accounts: dict[str, float] = field(default_factory=dict)
    refresh_interval: float | None = None


class OptimizerPair:
    """Two optimizers that step together."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self.first = first
        self.second = second
        self.param_groups = [*first.param_groups, *second.param_groups]

    def zero_grad(self) -> None:
        self.first.zero_grad()
        self.second.zero_grad()

    def step(self) -> None:
        self.first.step()
        self.second.step()


class FlattenedMuon(Optimizer):
    """Muon for matrices and convolutional kernels.

    A kernel is orthogonalized as a matrix ``(out, in * height * width)``. The class does not
    inherit from `torch.optim.Muon`, because that class only accepts matrices.

    Args:
        params: Weights with two or more dimensions.
        lr: The learning rate, which Muon scales to match the step length of AdamW.
        weight_decay: Decoupled weight decay. The default is that of AdamW.
        momentum: Decay of the running average of gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step. A closure is not called."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: Mapping[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        # The matrices are views, so Muon's function updates the kernel in place.
        with patch.object(_muon, "_zeropower_via_newtonschulz", newton_schulz):
            _muon.muon(
                [p.view(len(p), -1)],
                [p.grad.flatten(1)],
                [state["momentum_buffer"].view(len(p), -1)],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                nesterov=True,
                ns_coefficients=(_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C),
                ns_steps=_muon.DEFAULT_NS_STEPS,
                eps=_muon.EPS,
                adjust_lr_fn="match_rms_adamw",
                has_complex=False,
            )


MATRIX_LAYERS = nn.Linear, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear, recurrent and convolutional layers, without the last linear layer.

    If the last linear layer is the only layer, the result has its weights.
    """
    layers = [
        m
        for m in model.modules()
        if isinstance(m, MATRIX_LAYERS) and next(m.parameters()).requires_grad
    ]
    last = [m for m in layers if isinstance(m, nn.Linear)][-1]
    hidden_layers = [m for m in layers if m is not last] or [last]
    matrices = []
    for layer in hidden_layers:
        matrices += [p for p in layer.parameters(recurse=False) if p.dim() > 1]
    return matrices


def muon(model: nn.Module, lr: float, weight_decay: float = 0.01, **options: Any) -> OptimizerPair:
    """Muon for the hidden matrices, and AdamW for all other parameters."""
    matrices = hidden_matrices(model)
    matrix_set = set(matrices)
    other_params = [p for p in model.parameters() if p not in matrix_set]
    return OptimizerPair(
        FlattenedMuon(matrices, lr=lr, weight_decay=weight_decay),
        AdamW(other_params, lr=lr, weight_decay=weight_decay, **options),
    )


def build(job: Job, model: nn.Module) -> Any:
    """Make the optimizer of a job, with the options of the task and of the job."""
    # The job's options override those of the task.
    system, _, base = job.optimizer.rpartition(", ")
    options: dict[str, Any] = {}
    if base == "SGD":
        options["momentum"] = 0.9
    options |= TASKS[job.task]().keywords.get(base, {})
    options |= job.options
    if isinstance(options.get("factor_decay"), dict):
        options["factor_decay"] = PerStep(**options["factor_decay"])

    bases: dict[str, Any] = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW, "Muon": FlattenedMuon}
    if system:
        if base == "Muon":
            options["aux_base"] = AdamW
        return getattr(second_order, system)(model, lr=job.lr, base=bases[base], **options)
    if base == "Muon":
        return muon(model, job.lr, **options)
    return (bases | {"SOAP": SOAP})[base](model.parameters(), lr=job.lr, **options)


def train(job: Job, on_end: Callable[[Any], None] = lambda optimizer: None) -> Run:
    """Run a job until its last step or its first non-finite loss.

    Args:
        job: The job.
        on_end: A function that is called with the optimizer at the end.
    """
    torch.set_num_threads(job.threads)
    task = TASKS[job.task]()
    on_cpu = job.device == "cpu"
    now = time.process_time
    if not on_cpu:
        task = task.on(job.device)
        now = time.perf_counter

    torch.manual_seed(job.seed)
    model = task.make()
    optimizer = build(job, model)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    run = Run(job)
    seconds = 0.0
    evaluation_seconds = 0.0
    timer = StageSeconds()
    with recorded_by(timer.stage):
        for step, batch in zip(range(task.steps), task.batches(job.seed), strict=False):
            # Take a step. Only its time counts.
            start = now()
            for group, peak in zip(optimizer.param_groups, peak_rates, strict=True):
                group["lr"] = peak * job.share_of_rate(step)
            optimizer.zero_grad()
            task.loss_of(model, batch).backward()
            optimizer.step()
            is_evaluated = (step + 1) % task.every == 0
            if is_evaluated and not on_cpu:
                torch.cuda.synchronize()
            seconds += now() - start

            # Evaluate the model.
            if is_evaluated:
                evaluation_start = time.perf_counter()
                model.eval()
                with torch.no_grad():
                    run.losses.append(float(f"{task.judge(model):.5g}"))
                model.train()
                run.seconds.append(round(seconds, 3))
                evaluation_seconds += time.perf_counter() - evaluation_start
                if not math.isfinite(run.losses[-1]):
                    break
    timer.stop()

    if task.at_end is not None:
        model.eval()
        run.end = {name: float(f"{value:.5g}") for name, value in task.at_end(model).items()}
    read_metrics(run, optimizer, timer, evaluation_seconds)
    on_end(optimizer)
    return run


def read_metrics(run: Run, optimizer: Any, timer: StageSeconds, evaluation_seconds: float) -> None:
    """Store the seconds by timer region and the refresh interval, if it is a K-FAC optimizer.

    Args:
        run: The run that receives the numbers.
        optimizer: The optimizer of the run.
        timer: The timer of the steps.
        evaluation_seconds: Seconds of the evaluations, which the timer counted between steps.
    """
    if not isinstance(optimizer, second_order.SecondOrderOptimizer):
        return
    timer.seconds["elsewhere"] -= evaluation_seconds
    run.accounts = {stage: round(value, 4) for stage, value in timer.seconds.items()}
    interval = optimizer.metrics().get("drift/interval", math.nan)
    if math.isfinite(interval):
        run.refresh_interval = interval


def run_all(jobs: Iterable[Job], processes: int) -> list[Run]:
    """Run jobs in a pool of processes."""
    jobs = list(jobs)
    # The processes are spawned: on CUDA builds of torch, autograd does not work in forks.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn) as pool:
        return list(tqdm(pool.map(train, jobs), total=len(jobs), leave=False))


def final_loss(run: Run) -> float:
    """The loss at the end of a run, or infinity if the run diverged."""
    loss = run.end.get("loss", run.losses[-1])
    return loss if math.isfinite(loss) else math.inf


def steps_to(run: Run, target: float) -> float:
    """Steps until the loss first reaches a target, or infinity."""
    every = TASKS[run.job.task]().every
    for evaluation, loss in enumerate(run.losses, 1):
        if loss <= target:
            return evaluation * every
    return math.inf


def seconds_to(run: Run, target: float) -> float:
    """Seconds of training until the loss first reaches a target, or infinity."""
    for loss, seconds in zip(run.losses, run.seconds, strict=True):
        if loss <= target:
            return seconds
    return math.inf


def tune(
    grids: Mapping[Name, Sequence[Setting]],
    make_job: Callable[[Name, Setting, int], Job],
    seeds: Sequence[int],
    processes: int,
    loss_of: Callable[[Run], float] = final_loss,
) -> tuple[dict[Name, Setting], list[tuple[Name, Run]]]:
    """Find the setting of each grid with the smallest mean loss over seeds.

    Args:
        grids: The settings to try, by name.
        make_job: A function from a name, a setting and a seed to a job.
        seeds: The seeds that all settings are tried on.
        processes: Number of training runs at a time.
        loss_of: The loss of a run that is minimized.

    Returns:
        The best setting by name, and all runs with their names.
    """
    cells = []
    jobs = []
    for name, grid in grids.items():
        for index, setting in enumerate(grid):
            for seed in seeds:
                cells.append((name, index))
                jobs.append(make_job(name, setting, seed))
    runs = run_all(jobs, processes)

    sums = {name: [0.0] * len(grid) for name, grid in grids.items()}
    for (name, index), run in zip(cells, runs, strict=True):
        sums[name][index] += loss_of(run)
    best = {}
    for name, losses in sums.items():
        best[name] = grids[name][losses.index(min(losses))]
    return best, [(name, run) for (name, _), run in zip(cells, runs, strict=True)]


def mean_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """Mean of the differences a - b per seed, and its standard error.

    The result is None if a difference is not finite, or if there is only one seed.
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if not all(math.isfinite(difference) for difference in differences) or len(differences) < 2:
        return None
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), error


# ---------------------------------------------------------------------------------------- the tasks


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter."""
    return next(model.parameters()).device


@cache
def language(size: language_model.Size) -> Task:
    """Predict characters of the standard library's source. Evaluated on held-out files."""
    windows = language_model.held_out(size)
    return Task(
        make=partial(language_model.Transformer, size),
        batches=partial(language_model.batches, size),
        loss_of=language_model.next_loss,
        judge=lambda model: language_model.next_loss(model, windows.to(device_of(model))).item(),
        steps=size.steps,
        every=10,
        warmup=size.warmup,
        keywords=LANGUAGE_KEYWORDS,
    )


@cache
def autoencoder() -> Task:
    """The deep autoencoder on the digits. Evaluated on the training images."""
    images = digits.autoencoder_images()
    return Task(
        make=digits.autoencoder,
        batches=lambda seed: digits.batches(len(images), 256, seed=seed),
        loss_of=lambda model, i: digits.autoencoder_loss(model(images[i]), images[i]),
        judge=lambda model: digits.autoencoder_loss(model(images), images).item(),
        steps=500,
        every=5,
    )


@cache
def classifier(make: Callable[[], nn.Module], steps: int) -> Task:
    """Classify digits. Evaluated on the training images."""
    data = digits.load_split()
    x = data.train_images
    y = data.train_labels
    return Task(
        make=make,
        batches=lambda seed: digits.batches(len(x), 64, seed=seed),
        loss_of=lambda model, i: cross_entropy(model(x[i]), y[i]),
        judge=lambda model: cross_entropy(model(x), y).item(),
        steps=steps,
        every=5,
    )


class Residual(nn.Module):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip: nn.Module = nn.Identity()
        if width_in != width or stride != 1:
            self.skip = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.relu(self.skip(x) + self.branch(x))
        return result


def residual_network() -> nn.Module:
    """Three residual blocks of widths 8, 16 and 32."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        Residual(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


@cache
def tabular() -> Task:
    """Regression on scikit-learn's diabetes data, standardized. Evaluated on the training rows."""
    features, targets = load_diabetes(return_X_y=True, scaled=False)
    x = torch.from_numpy(features).float()
    y = torch.from_numpy(targets.reshape(-1, 1)).float()
    x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean(0)) / y.std(0)

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    return Task(
        make=make,
        batches=lambda seed: digits.batches(len(x), 64, seed=seed),
        loss_of=lambda model, i: mse_loss(model(x[i]), y[i]),
        judge=lambda model: mse_loss(model(x), y).item(),
        steps=300,
        every=5,
    )


@cache
def mixed() -> Task:
    """Regression on products and waves of eight inputs, two of them skewed. Eight are unused."""
    generator = torch.Generator().manual_seed(11)
    x = torch.rand(10_000, 16, generator=generator) * 2 - 1
    x[:, :2] = -(1 - x[:, :2]).div(2).clamp_min(1e-3).log()
    a, b, c, d, e, f, g, h = x[:, :8].unbind(1)
    y = a * c + (torch.pi * d * e).sin() + b.sqrt() * f.sign() + g.abs() * h
    y = y + 0.2 * torch.randn(len(y), generator=generator)
    return regression((x, y), 800, 0.2)


TASKS: dict[str, Callable[[], Task]] = {
    "language": partial(language, language_model.SIZES["small"]),
    "language, 4 layers": partial(language, language_model.SIZES["full"]),
    **{
        f"language, width {width}": partial(
            language, language_model.Size(1, width, width // 32, 64, 8, 150, 15)
        )
        for width in (64, 128, 256, 512)
    },
    "autoencoder": autoencoder,
    "digits conv": partial(classifier, digits.conv_net, 300),
    "digits MLP": partial(classifier, digits.mlp, 300),
    "residual network": partial(classifier, residual_network, 200),
    "tabular": tabular,
    "mixed": mixed,
    **UNSEEN,
    **NEW,
    **{name: cache(make) for name, make in IMAGES.items()},
}


# ------------------------------------------------------------------------------------ stored runs


def has_data(task: str) -> bool:
    """Whether the data of a task exist. If not, print how to get them."""
    try:
        TASKS[task]()
    except MissingDataError as error:
        print(f"{task} is skipped: {error}")
        return False
    return True


def stored_tasks(path: Path | None, tasks: Iterable[str]) -> dict[str, Any]:
    """The records of these tasks in a stored file, by name. Empty without a file."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text("utf-8"))["tasks"]
    return {task: record[task] for task in tasks if task in record}


def restore_run(stored: Mapping[str, Any]) -> Run:
    """Make a run from its stored fields."""
    fields = {key: value for key, value in stored.items() if key != "name"}
    fields["job"] = Job(**stored["job"])
    return Run(**fields)


def basis(task: str, grids: Any, tuned_on: Iterable[int], seeds: int) -> dict[str, Any]:
    """All that the rivals' runs depend on, in the types of JSON.

    Stored runs can be reused if their basis is the same. The basis has the processor and the
    version of torch, because seconds depend on them.
    """
    machine = reporting.machine()
    settings = {
        "grids": grids,
        "tuned on": list(tuned_on),
        "seeds": seeds,
        "steps": TASKS[task]().steps,
        "keywords": TASKS[task]().keywords,
        "cpu": machine["cpu"],
        "torch": machine["torch"],
    }
    result: dict[str, Any] = json.loads(json.dumps(settings))
    return result
