"""What the optimizers are compared on, and one training of it: tasks on data that is at hand.

The learning rate is constant, or rises and then falls by a cosine to a twentieth where the task
says so. Seconds are processor time of training alone, in one thread. The tasks on which defaults
were chosen are here; the others are in `unseen`.
"""

from __future__ import annotations

import json
import math
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
from task import OF_LANGUAGE, Task
from unseen import NEW, UNSEEN, regression

__all__ = [
    "TASKS",
    "FlattenedMuon",
    "Job",
    "Run",
    "Setting",
    "basis",
    "final",
    "has_data",
    "paired",
    "restored",
    "run_all",
    "seconds_to",
    "steps_to",
    "stored_tasks",
    "train",
    "tuned",
]

Setting = tuple[float, dict[str, Any]]
"""A learning rate, and an optimizer's other keywords."""
Name = TypeVar("Name")


@dataclass(frozen=True)
class Job:
    """What is to be trained, and how.

    Attributes:
        task: Its name in :data:`TASKS`.
        optimizer: Its name; KAISA and its kin are followed by their base's, as in "KAISA, AdamW".
        lr: The peak of its learning rate.
        seed: Of the model and of the order of the batches.
        options: The optimizer's keywords; a ``factor_decay`` per step is a mapping of its fields.
        warmup: Steps in which the learning rate rises, beside what the task's own schedule does.
        threads: Of the process that trains.
        device: "cpu", or "cuda".
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
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return rise * TASKS[self.task]().share_of_rate(step)


@dataclass
class Run:
    """A job done.

    Attributes:
        job: Which.
        losses: At every judgement.
        seconds: At every judgement, without those of judging: of processor time, or on a GPU of
            wall-clock time.
        end: What the task measures at the end, by name.
        accounts: Seconds of wall-clock time by account, if the optimizer measures them. The account
            "elsewhere" has the passes and the batches; no account has the judgements.
        refresh_interval: Steps between two refreshes of a layer at the end: the median over layers.
    """

    job: Job
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    end: dict[str, float] = field(default_factory=dict)
    accounts: dict[str, float] = field(default_factory=dict)
    refresh_interval: float | None = None


class Pair:
    """Two optimizers that step together."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


class FlattenedMuon(Optimizer):
    """Muon that also takes convolutional kernels.

    A kernel is orthogonalized as a matrix ``(out, in * height * width)``. The class does not
    inherit from `torch.optim.Muon`, because that class takes matrices only.

    Args:
        params: Weights with two or more dimensions.
        lr: The learning rate, which Muon scales to match the step length of AdamW.
        weight_decay: Decoupled; the default is AdamW's.
        momentum: The weight of the past in the running average of gradients.
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
        """Take one step; a closure is not called."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)

    def _step(self, p: Tensor, group: Mapping[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        # Views of the tensors, so that the step changes the kernel itself.
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


HAVE_MATRICES = nn.Linear, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear, recurrent and convolutional layers, except those of the last linear layer.

    If a model has no other such layer, they are the weights of that one.
    """
    layers = [
        m
        for m in model.modules()
        if isinstance(m, HAVE_MATRICES) and next(m.parameters()).requires_grad
    ]
    last = [m for m in layers if isinstance(m, nn.Linear)][-1]
    chosen = [m for m in layers if m is not last] or [last]
    return [p for m in chosen for p in m.parameters(recurse=False) if p.dim() > 1]


def muon(model: nn.Module, lr: float, weight_decay: float = 0.01, **options: Any) -> Pair:
    """Muon for the hidden matrices, AdamW for the rest; with AdamW's weight decay."""
    matrices = hidden_matrices(model)
    hidden = set(matrices)
    rest = [p for p in model.parameters() if p not in hidden]
    return Pair(
        FlattenedMuon(matrices, lr=lr, weight_decay=weight_decay),
        AdamW(rest, lr=lr, weight_decay=weight_decay, **options),
    )


def build(job: Job, model: nn.Module) -> Any:
    """The optimizer of a job, with the momentum and decay that its task is trained with."""
    system, _, base = job.optimizer.rpartition(", ")
    momentum = {"momentum": 0.9} if base == "SGD" else {}
    options = {**momentum, **TASKS[job.task]().keywords.get(base, {}), **job.options}
    bases: dict[str, Any] = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW, "Muon": FlattenedMuon}
    if isinstance(options.get("factor_decay"), dict):
        options["factor_decay"] = PerStep(**options["factor_decay"])
    if system:
        if base == "Muon":
            options["aux_base"] = AdamW
        return getattr(second_order, system)(model, lr=job.lr, base=bases[base], **options)
    if base == "Muon":
        return muon(model, job.lr, **options)
    return (bases | {"SOAP": SOAP})[base](model.parameters(), lr=job.lr, **options)


def train(job: Job, ended: Callable[[Any], None] = lambda optimizer: None) -> Run:
    """Do a job, to its last step or to the first loss that is not finite.

    Args:
        job: What is to be trained.
        ended: Is called with the optimizer after that.
    """
    torch.set_num_threads(job.threads)
    on_cpu = job.device == "cpu"
    now = time.process_time if on_cpu else time.perf_counter
    task = TASKS[job.task]() if on_cpu else TASKS[job.task]().on(job.device)
    torch.manual_seed(job.seed)
    model = task.make()
    optimizer = build(job, model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    run = Run(job)
    seconds = 0.0
    judging = 0.0  # wall-clock seconds of the judgements
    timer = StageSeconds()
    with recorded_by(timer.stage):
        for step, batch in zip(range(task.steps), task.batches(job.seed), strict=False):
            start = now()
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * job.share_of_rate(step)
            optimizer.zero_grad()
            task.loss_of(model, batch).backward()
            optimizer.step()
            judged = (step + 1) % task.every == 0
            if judged and not on_cpu:
                torch.cuda.synchronize()
            seconds += now() - start
            if judged:
                paused_at = time.perf_counter()
                model.eval()
                with torch.no_grad():
                    run.losses.append(float(f"{task.judge(model):.5g}"))
                model.train()
                run.seconds.append(round(seconds, 3))
                judging += time.perf_counter() - paused_at
                if not math.isfinite(run.losses[-1]):
                    break
    timer.stop()
    if task.at_end is not None:
        model.eval()
        run.end = {name: float(f"{found:.5g}") for name, found in task.at_end(model).items()}
    read_metrics(run, optimizer, timer, judging)
    ended(optimizer)
    return run


def read_metrics(run: Run, optimizer: Any, timer: StageSeconds, judging: float) -> None:
    """Note the seconds by stage and the refresh interval, if the optimizer is one of ours.

    Args:
        run: Gets the numbers.
        optimizer: That of the run.
        timer: Has timed the steps.
        judging: Seconds of judgements, which the timer counted as time between steps.
    """
    if not isinstance(optimizer, second_order.SecondOrderOptimizer):
        return
    timer.seconds["elsewhere"] -= judging
    run.accounts = {stage: round(value, 4) for stage, value in timer.seconds.items()}
    interval = optimizer.metrics().get("drift/interval", math.nan)
    if math.isfinite(interval):
        run.refresh_interval = interval


def run_all(jobs: Iterable[Job], processes: int) -> list[Run]:
    """Do jobs, so many at a time."""
    jobs = list(jobs)
    with ProcessPoolExecutor(processes) as pool:
        return list(tqdm(pool.map(train, jobs), total=len(jobs), leave=False))


def final(run: Run) -> float:
    """The loss at the end; infinite for a run that broke off."""
    found = run.end.get("loss", run.losses[-1])
    return found if math.isfinite(found) else math.inf


def steps_to(run: Run, loss: float) -> float:
    """Steps until a loss was first met; infinite if it never was."""
    every = TASKS[run.job.task]().every
    met = (i for i, found in enumerate(run.losses, 1) if found <= loss)
    return next(met, math.inf) * every


def seconds_to(run: Run, loss: float) -> float:
    """Processor seconds until a loss was first met; infinite if it never was."""
    pairs = zip(run.losses, run.seconds, strict=True)
    return next((seconds for found, seconds in pairs if found <= loss), math.inf)


def tuned(
    grids: Mapping[Name, Sequence[Setting]],
    job: Callable[[Name, Setting, int], Job],
    seeds: Sequence[int],
    processes: int,
    loss_of: Callable[[Run], float] = final,
) -> tuple[dict[Name, Setting], list[tuple[Name, Run]]]:
    """By name, the setting of a grid with the least mean loss over seeds; and all runs.

    Args:
        grids: Settings, by name.
        job: The training of a name, a setting and a seed.
        seeds: On which all settings are tried.
        processes: Trainings at a time.
        loss_of: By which a run is judged.
    """
    cells = [(n, i, seed) for n, grid in grids.items() for i in range(len(grid)) for seed in seeds]
    runs = run_all((job(name, grids[name][i], seed) for name, i, seed in cells), processes)
    sums = {name: [0.0] * len(grid) for name, grid in grids.items()}
    for (name, i, _), run in zip(cells, runs, strict=True):
        sums[name][i] += loss_of(run)
    best = {name: grids[name][found.index(min(found))] for name, found in sums.items()}
    return best, [(name, run) for (name, *_), run in zip(cells, runs, strict=True)]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float] | None:
    """Mean of the differences, seed by seed, and its standard error; None if there is none."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if not all(map(math.isfinite, differences)) or len(differences) < 2:
        return None
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), error


# ---------------------------------------------------------------------------------------- the tasks


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter."""
    return next(model.parameters()).device


@cache
def language(of: language_model.Size) -> Task:
    """Characters of the standard library's source; judged on files that are held out."""
    windows = language_model.held_out(of)
    return Task(
        partial(language_model.Transformer, of),
        partial(language_model.batches, of),
        language_model.next_loss,
        lambda model: language_model.next_loss(model, windows.to(device_of(model))).item(),
        of.steps,
        10,
        of.warmup,
        OF_LANGUAGE,
    )


@cache
def autoencoder() -> Task:
    """The deep autoencoder on the digits; judged on what it is trained on."""
    images = digits.autoencoder_images()
    return Task(
        digits.autoencoder,
        lambda seed: digits.batches(len(images), 256, seed=seed),
        lambda model, i: digits.autoencoder_loss(model(images[i]), images[i]),
        lambda model: digits.autoencoder_loss(model(images), images).item(),
        500,
        5,
    )


@cache
def classifier(make: Callable[[], nn.Module], steps: int) -> Task:
    """Digits; judged by the loss on the training images."""
    data = digits.load_split()
    x = data.train_images
    y = data.train_labels
    return Task(
        make,
        lambda seed: digits.batches(len(x), 64, seed=seed),
        lambda model, i: cross_entropy(model(x[i]), y[i]),
        lambda model: cross_entropy(model(x), y).item(),
        steps,
        5,
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
        same = width_in == width and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.relu(self.skip(x) + self.branch(x))
        return result


def residual_network() -> nn.Module:
    """Three residual blocks, widths 8, 16 and 32."""
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
    """Regression on scikit-learn's diabetes data, standardised; judged on the training rows."""
    features, target = load_diabetes(return_X_y=True, scaled=False)
    x, y = (torch.from_numpy(part).float() for part in (features, target.reshape(-1, 1)))
    x, y = ((part - part.mean(0)) / part.std(0) for part in (x, y))
    return Task(
        lambda: nn.Sequential(
            nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        ),
        lambda seed: digits.batches(len(x), 64, seed=seed),
        lambda model, i: mse_loss(model(x[i]), y[i]),
        lambda model: mse_loss(model(x), y).item(),
        300,
        5,
    )


@cache
def mixed() -> Task:
    """Regression with products and waves of eight inputs, two of them skewed, beside eight idle."""
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
    """Whether the data of a task are there; if not, print how to get them."""
    try:
        TASKS[task]()
    except MissingDataError as error:
        print(f"{task} is left out: {error}")
        return False
    return True


def stored_tasks(path: Path | None, tasks: Iterable[str]) -> dict[str, Any]:
    """What a stored file, if it is there, has of these tasks, by name."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text("utf-8"))["tasks"]
    return {task: record[task] for task in tasks if task in record}


def restored(stored: Mapping[str, Any]) -> Run:
    """A run from what was stored of it."""
    parts = {key: value for key, value in stored.items() if key != "name"}
    return Run(**{**parts, "job": Job(**stored["job"])})


def basis(task: str, grids: Any, tuned_on: Iterable[int], seeds: int) -> dict[str, Any]:
    """All that the runs of rivals depend on, in the types of JSON.

    Stored runs of rivals can be reused if theirs is the same. It has the processor and the version
    of torch, because seconds depend on them.
    """
    machine = reporting.machine()
    found = {
        "grids": grids,
        "tuned on": list(tuned_on),
        "seeds": seeds,
        "steps": TASKS[task]().steps,
        "keywords": TASKS[task]().keywords,
        "cpu": machine["cpu"],
        "torch": machine["torch"],
    }
    result: dict[str, Any] = json.loads(json.dumps(found))
    return result
