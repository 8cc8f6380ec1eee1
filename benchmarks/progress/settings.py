"""What the options do, on the digits: the runs behind the advice in the documentation.

    export PYTHONPATH=examples:benchmarks/speed
    python benchmarks/progress/settings.py                    all of it, some minutes
    python benchmarks/progress/settings.py --only intervals --seeds 2

intervals  statistics and solves at every step, beside the defaults' 10 / 100 and others; "inverse"
clip       the bound κ for batches of 32 to all 1,437 images, with two dampings
binding    at which of the first 200 steps the default clip shortens a step
spectrum   how unevenly the curvature of a layer is spread over its directions
fisher     empirical and sampled labels, with fresh inverses in the first steps and without
distkfac   its default clip, a looser one, and the paper's schedule
late       DistKFAC: the highest losses after convergence, by the memory of its factors
large      seconds to invert a factor of 9,217 rows

Steps are counted one by one, the loss is that of all training images. KAISA and DistKFAC have lr
0.1 and momentum 0.9; all else is default but what a row names.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from tqdm import tqdm

import digits
import progress
from curvature import rounded
from curvature_cost import table
from progress import Setting, fresh_first
from second_order import KAISA, DecayingClip, DistKFAC
from speed import machine

Record = dict[str, Any]
MODELS: dict[str, Callable[[], nn.Module]] = {
    **progress.CLASSIFIERS,
    "autoencoder": digits.autoencoder,
}
TARGETS = {
    "mlp": ("97 %", "loss 0.05", "loss 0.01"),
    "conv": ("97 %", "loss 0.05", "loss 0.01"),
    "autoencoder": ("loss 20",),
}
STEPS = {"mlp": 300, "conv": 300, "autoencoder": 400}
BATCH = {"mlp": 64, "conv": 64, "autoencoder": 256}
NEVER = math.inf

# ---------------------------------------------------------------------------------------- training


class Data:
    """Training images with the loss that a network has on them."""

    def __init__(self, model: str) -> None:
        self.autoencodes = model == "autoencoder"
        if self.autoencodes:
            self.images = digits.autoencoder_images()
        else:
            self.split = digits.load_split()
            self.images = self.split.train_images

    def loss(self, network: nn.Module, indices: Tensor | slice = slice(None)) -> Tensor:
        images = self.images[indices]
        if self.autoencodes:
            return digits.autoencoder_loss(network(images), images)
        return cross_entropy(network(images), self.split.train_labels[indices])

    @torch.no_grad()
    def reached(self, network: nn.Module, targets: Sequence[str]) -> tuple[float, list[str]]:
        """The training loss, and the targets that are met."""
        loss = self.loss(network).item()
        met = [t for t in targets if t.startswith("loss") and loss <= float(t.split()[1])]
        if "97 %" in targets:
            guesses = network(self.split.test_images).argmax(1)
            right = (guesses == self.split.test_labels).float().mean().item()
            met += ["97 %"] if right >= 0.97 else []
        return loss, met


Interval: TypeAlias = int | Callable[[int], int] | None


def at(factors: Interval, inverses: Interval) -> Record:
    """Intervals from the first step on; None for those by drift."""
    return {"factor_update_steps": factors, "inv_update_steps": inverses}


def fresh(factors: int, inverses: int) -> Record:
    """The same after the first steps, each of which has both."""
    return at(fresh_first(factors), fresh_first(inverses))


# What is not varied. It is said here, so that the stored runs stay what they are.
STATED: dict[type[KAISA] | type[DistKFAC], Record] = {
    KAISA: {"solver": "eigen", "factor_decay": 0.95, **fresh(10, 100)},
    DistKFAC: {"factor_decay": 0.9, **fresh(20, 20)},
}


def setting(label: str, steps: int, kind: type[KAISA] | type[DistKFAC], options: Record) -> Setting:
    same = {"lr": 0.1, "momentum": 0.9, "damping": 2.0, "kl_clip": 1e-4, **STATED[kind]}

    def build(network: nn.Module) -> Optimizer:
        return kind(network, **{**same, **options})

    return Setting(kind.__name__, label, build, steps)


def steps_to(
    model: str,
    label: str,
    seeds: int,
    options: Record,
    *,
    kind: type[KAISA] | type[DistKFAC] = KAISA,
    batch: int | None = None,
    steps: int | None = None,
    targets: tuple[str, ...] | None = None,
) -> Record:
    """For each seed the step at which each target is first met; None for never."""
    data, wanted = Data(model), targets or TARGETS[model]
    row: Record = {"model": model, "label": label, "batch": batch or BATCH[model]}
    found: dict[str, list[int | None]] = {target: [] for target in wanted}
    for seed in range(seeds):
        run = progress.train(
            setting(label, steps or STEPS[model], kind, options),
            seed,
            MODELS[model],
            data.loss,
            lambda network: data.reached(network, wanted),
            row["batch"],
            len(data.images),
            wanted,
            every=1,
        )
        for target in wanted:
            found[target].append(run.steps_to.get(target))
    return {**row, "steps": found}


def median(steps: Sequence[int | None]) -> float:
    """Of the seeds; never is later than any step."""
    return statistics.median(NEVER if step is None else step for step in steps)


def shown(steps: Sequence[int | None]) -> str:
    middle = median(steps)
    return "never" if math.isinf(middle) else f"{middle:g}"


def steps_table(title: str, rows: Sequence[Record]) -> Table:
    targets = list(dict.fromkeys(target for row in rows for target in row["steps"]))
    result = table(f"{title}: median steps to a target", ("model", "batch", "setting", *targets))
    for row in rows:
        cells = (shown(row["steps"][t]) if t in row["steps"] else "" for t in targets)
        result.add_row(row["model"], str(row["batch"]), row["label"], *cells)
    return result


# ---------------------------------------------------------------------------------------- sections

INTERVALS: dict[str, Record] = {
    "1 / 1": at(1, 1),
    "10 / 100": {},
    "10 / 100, inverse": {"solver": "inverse"},
    "10 / 20": fresh(10, 20),
    "10 / 100, no warm-up": at(10, 100),
    "by drift": at(None, None),
}
CLIPS = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
BATCHES = (32, 64, 128, 512, 1437)
DAMPINGS = (2.0, 0.5)


def intervals(seeds: int) -> list[Record]:
    work = [(model, label) for model in MODELS for label in INTERVALS]
    return [
        steps_to(model, label, seeds, INTERVALS[label])
        for model, label in tqdm(work, desc="intervals", leave=False)
    ]


def clip(seeds: int) -> list[Record]:
    work = [(b, damping, kappa) for b in BATCHES for damping in DAMPINGS for kappa in CLIPS]
    return [
        steps_to(
            "mlp",
            f"clip {kappa:g}, damping {damping:g}",
            seeds,
            {"kl_clip": kappa, "damping": damping},
            batch=batch,
            steps=150,
            targets=("loss 0.05",),
        )
        | {"kl_clip": kappa, "damping": damping}
        for batch, damping, kappa in tqdm(work, desc="clip", leave=False)
    ]


def fisher(seeds: int) -> list[Record]:
    work = [(labels, warm_up) for labels in ("empirical", "sampled") for warm_up in (20, 0)]
    return [
        steps_to(
            "autoencoder",
            f"{labels}, warm-up {warm_up}",
            seeds,
            {"fisher": labels, "likelihood": "bernoulli", **({} if warm_up else at(10, 100))},
            targets=("loss 26", "loss 20"),
        )
        for labels, warm_up in tqdm(work, desc="fisher", leave=False)
    ]


def distkfac(seeds: int) -> list[Record]:
    """With statistics every 10 steps; the paper's schedule falls each half epoch."""
    half = {"mlp": 1437 // 64 // 2, "autoencoder": 1797 // 256 // 2}
    rows = []
    for model in tqdm(half, desc="distkfac", leave=False):
        paper = DecayingClip(start=0.01, decay=0.96, every=half[model])
        for label, kappa in (("1e-4", 1e-4), ("1e-3", 1e-3), ("the paper's schedule", paper)):
            options = {"kl_clip": kappa, "async_inverse": False, **fresh(10, 20)}
            rows.append(steps_to(model, f"clip {label}", seeds, options, kind=DistKFAC))
    return rows


def not_finite_last(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def binding(seeds: int, steps: int = 200, models: Sequence[str] = tuple(MODELS)) -> list[Record]:
    """At which steps νP·∇ lr² is above κ: there ν < 1, as it would otherwise be P·∇ lr²."""
    rows = []
    for model in tqdm(models, desc="binding", leave=False):
        data = Data(model)
        for seed in range(seeds):
            torch.manual_seed(seed)
            network = MODELS[model]()
            optimizer = setting("", steps, KAISA, {}).build(network)
            bound = []
            batches = digits.batches(len(data.images), BATCH[model], seed=seed)
            for _, indices in zip(range(steps), batches, strict=False):
                optimizer.zero_grad()
                data.loss(network, indices).backward()
                before = [grad_of(p).clone() for p in network.parameters()]
                optimizer.step()
                after = [grad_of(p) for p in network.parameters()]
                change = sum(float((a * b).sum()) for a, b in zip(after, before, strict=True))
                bound.append(0.1**2 * change > 1e-4 * (1 + 1e-4))
            first = bound.index(False) if False in bound else len(bound)
            row = {"model": model, "seed": seed, "bound at first": first, "bound": sum(bound)}
            rows.append(row)
    return rows


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def binding_table(rows: Sequence[Record]) -> Table:
    result = table(
        "The first steps at which the clip binds, and all of 200",
        ("model", "seed", "first", "of 200"),
    )
    for row in rows:
        result.add_row(
            row["model"], str(row["seed"]), str(row["bound at first"]), str(row["bound"])
        )
    return result


def spectrum(seeds: int) -> list[Record]:
    """Of A ⊗ G after 20 steps of the MLP: all products of their eigenvalues."""
    rows = []
    data = Data("mlp")
    for seed in tqdm(range(seeds), desc="spectrum", leave=False):
        torch.manual_seed(seed)
        network = digits.mlp()
        options: Record = {"solver": "eigen", "symmetry_aware": False, **at(1, 1)}
        stated: Record = {"damping": 0.5, "kl_clip": 1e-4, "factor_decay": 0.95}
        optimizer = KAISA(network, lr=0.1, momentum=0.9, **stated, **options)
        batches = digits.batches(len(data.images), 64, seed=seed)
        for _, indices in zip(range(20), batches, strict=False):
            optimizer.zero_grad()
            data.loss(network, indices).backward()
            optimizer.step()
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                a, g = (optimizer.state[module.weight]["curvature"][k].double() for k in "AG")
                values = torch.outer(*(eigenvalues(factor) for factor in (a, g))).flatten()
                high = values > 2 * values.mean()
                row = {
                    "seed": seed,
                    "layer": name,
                    "largest over mean": float(values.max() / values.mean()),
                    "share above twice the mean": float(high.double().mean()),
                    "curvature of those": float(values[high].sum() / values.sum()),
                }
                rows.append(row)
    return rows


def eigenvalues(factor: Tensor) -> Tensor:
    result: Tensor = torch.linalg.eigvalsh(factor.squeeze(0)).clamp_min(0.0)
    return result


def spectrum_table(rows: Sequence[Record]) -> Table:
    names = ("largest over mean", "share above twice the mean", "curvature of those")
    result = table("A ⊗ G of the MLP's layers after 20 steps", ("layer", "seed", *names))
    for row in rows:
        result.add_row(row["layer"], str(row["seed"]), *(f"{row[name]:.3g}" for name in names))
    return result


LATE: dict[str, Record] = {
    "1 / 1, 0.95": {**at(1, 1), "factor_decay": 0.95},
    "20 / 20, 0.95": {"factor_decay": 0.95},
    "20 / 20, 0.9": {},
    "20 / 20, None": {"factor_decay": None},
}


def late(seeds: int, steps: int = 300, models: Sequence[str] = ("mlp", "conv")) -> list[Record]:
    """The highest training loss of the last third of the steps, every fifth looked at."""
    work = [(model, label) for model in models for label in LATE]
    return [
        {
            "model": model,
            "label": label,
            "highest": [highest_at_last(model, LATE[label], seed, steps) for seed in range(seeds)],
        }
        for model, label in tqdm(work, desc="late", leave=False)
    ]


def highest_at_last(model: str, options: Record, seed: int, steps: int) -> float:
    data = Data(model)
    losses = progress.train(
        setting("", steps, DistKFAC, {**options, "async_inverse": False}),
        seed,
        MODELS[model],
        data.loss,
        lambda network: data.reached(network, ()),
        BATCH[model],
        len(data.images),
        ("none",),
    ).losses
    return max(losses[len(losses) * 2 // 3 :], key=not_finite_last)


def late_table(rows: Sequence[Record]) -> Table:
    result = table(
        "Highest training loss of the last third: median and worst of the seeds",
        ("model", "intervals, factor_decay", "median", "worst"),
    )
    for row in rows:
        middle, worst = statistics.median(row["highest"]), max(row["highest"])
        result.add_row(row["model"], row["label"], f"{middle:.2g}", f"{worst:.2g}")
    return result


LARGE = 9217  # AlexNet's first Linear: 256 channels at 6 x 6 locations, and a bias


def large(rows: int = LARGE) -> Record:
    """Processor time of one thread, float32, for a damped second moment of so many rows."""
    x = torch.randn(rows // 4, rows, generator=torch.Generator().manual_seed(0))
    factor = x.t() @ x / len(x)
    factor.diagonal().add_(0.1)
    start = time.process_time()
    torch.cholesky_inverse(torch.linalg.cholesky(factor))
    return {"rows": rows, "inverse": time.process_time() - start}


def large_table(row: Record) -> Table:
    result = table("Seconds for one factor", ("rows", "Cholesky inverse"))
    result.add_row(str(row["rows"]), f"{row['inverse']:.1f}")
    return result


SECTIONS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Table]]] = {
    "intervals": (intervals, lambda rows: steps_table("Intervals", rows)),
    "clip": (clip, lambda rows: steps_table("Clip and batch", rows)),
    "binding": (binding, binding_table),
    "spectrum": (spectrum, spectrum_table),
    "fisher": (fisher, lambda rows: steps_table("Labels", rows)),
    "distkfac": (distkfac, lambda rows: steps_table("DistKFAC's clip", rows)),
    "late": (late, late_table),
    "large": (lambda seeds: large(), large_table),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections, print their tables, and put what they found into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="put the sections into this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120)
    record: Record = {}
    if options.json and options.json.exists():
        record = json.loads(options.json.read_text())
    record["machine"] = machine()
    for section in options.only:
        measure, draw = SECTIONS[section]
        found = measure(options.seeds)
        console.print(draw(found))
        record[section] = rounded(found)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
