"""What Lanczos and DHO2 cost and buy, each figure beside what was asked and beside its floor.

    export PYTHONPATH=examples:benchmarks/speed
    python benchmarks/progress/curvature.py                              all of it, some minutes
    python benchmarks/progress/curvature.py --only valley overhead
    python benchmarks/progress/curvature.py --only training --seeds 2

valley     the loss of a quadratic after 200 steps, DHO2 and its base, each at its best learning
           rate; the floor is the base where the steep directions are at their minimum already
products   Hessian-vector products to the 10 largest and 3 smallest eigenpairs (the floor is one
           for each pair), and the time of one product (the floor: one call of autograd)
overhead   a step between refreshes; the floor is four bare passes over the eigenvectors
memory     elements of the Lanczos basis and of the eigenvectors on each of P processes
training   steps and seconds to the targets of `progress.py`

One thread. Times are medians of the processor's time, so that other work on the machine counts
less; what is compared takes turns.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from tqdm import tqdm

import curvature_cost as cost
import digits
import progress
from curvature_cost import LARGEST, SMALLEST, table, tanh_network
from progress import Setting, adam, sgd
from second_order import DHO2
from second_order.fosi.eigenpairs import FRESH
from second_order.lanczos import eigenpairs
from second_order.lanczos.lanczos import normal

Record = dict[str, Any]

# ---------------------------------------------------------------------------------------- valley

VALLEYS = (((10.0, 100.0), 0.0), ((1e3, 1e4), 0.0), ((1e3, 1e4), 0.9))
RATES = tuple(10 ** (exponent / 10) for exponent in range(-50, 11))


def descend(make: Callable[[nn.Parameter], Optimizer], H: Tensor, x: Tensor, steps: int) -> float:
    """½ xᵀHx after some steps."""
    p = nn.Parameter(x.clone())
    optimizer = make(p)
    for _ in range(steps):
        p.grad = H @ p.detach()
        optimizer.step()
    end = p.detach()
    return float(0.5 * end @ H @ end)


def valley(
    steep: tuple[float, float],
    momentum: float,
    rates: Sequence[float] = RATES,
    scales: Sequence[float] = (0.1, 1.0),
    steps: int = 200,
) -> Record:
    """90 eigenvalues over 0.1..1 and 10 over a steeper range: the best loss of each optimizer."""
    generator = torch.Generator().manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(100, 100, generator=generator, dtype=torch.float64))
    values = torch.cat([torch.linspace(0.1, 1.0, 90), torch.linspace(*steep, 10)]).double()
    H = Q @ torch.diag(values) @ Q.t()
    H = (H + H.t()) / 2
    x = torch.randn(100, generator=generator, dtype=torch.float64)
    flat = Q[:, :90] @ (Q[:, :90].t() @ x)
    H_flat = Q[:, :90] @ torch.diag(values[:90]) @ Q[:, :90].t()

    def base(lr: float) -> Callable[[nn.Parameter], Optimizer]:
        return lambda p: SGD([p], lr=lr, momentum=momentum)

    def dho2(lr: float, scale: float) -> Callable[[nn.Parameter], Optimizer]:
        return lambda p: DHO2(
            [p],
            lr=lr,
            momentum=momentum,
            warmup_steps=0,
            curvature_interval=100,
            newton_scale=scale,
            lanczos_iterations=100,
            curvature_closure=lambda: 0.5 * p @ H @ p,
        )

    def best(losses: dict[float, float]) -> Record:
        rate = min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf)
        return {"lr": rate, "loss": losses[rate]}

    ours = {
        scale: best({lr: descend(dho2(lr, scale), H, x, steps) for lr in rates}) for scale in scales
    }
    alone = best({lr: descend(base(lr), H, x, steps) for lr in rates})
    floor = best({lr: descend(base(lr), H_flat, flat, steps) for lr in rates})
    return {
        "steep": list(steep),
        "momentum": momentum,
        "start": float(0.5 * x @ H @ x),
        "base": alone,
        "dho2": {str(scale): result for scale, result in ours.items()},
        "floor": floor,
        "times smaller": {str(s): alone["loss"] / result["loss"] for s, result in ours.items()},
    }


def valley_table(records: Sequence[Record]) -> Table:
    result = table(
        "½ xᵀHx after 200 steps, best learning rate of each; asked: 1,000 times smaller",
        ("steep eigenvalues", "momentum", "SGD alone", "α", "DHO2", "times smaller", "floor"),
    )
    for record in records:
        low, high = record["steep"]
        for scale, ours in record["dho2"].items():
            result.add_row(
                f"{low:g} to {high:g}",
                f"{record['momentum']}",
                f"{record['base']['loss']:.2g} (lr {record['base']['lr']:.2g})",
                scale,
                f"{ours['loss']:.2g} (lr {ours['lr']:.2g})",
                f"{record['times smaller'][scale]:.2g}",
                f"{record['floor']['loss']:.2g}",
            )
    return result


# -------------------------------------------------------------------------------------- products

MOST_PRODUCTS = 66
MARKS, GAPS = {"early": 20, "midway": 150, "late": 400}, (10, 20, 50)


def as_dho2(old: Any) -> Tensor:
    """The sum of the old vectors, and a tenth of a random one."""
    count, size = old.eigenvectors.shape
    old_part: Tensor = old.eigenvectors.sum(0) / math.sqrt(count)
    return old_part + FRESH * normal(size, 0, 1 / math.sqrt(size))


STARTS: dict[str, Callable[[Any], Tensor]] = {
    "DHO2's": as_dho2,
    "sum": lambda old: old.eigenvectors.sum(0),
    "weighted 1/|θ|": lambda old: old.eigenvalues.abs().reciprocal().float() @ old.eigenvectors,
}


def count_products(
    lr: float,
    seed: int,
    batch: int = 256,
    marks: dict[str, int] | None = None,
    gaps: Sequence[int] = GAPS,
    widths: Sequence[int] = (64, 100, 32, 10),
) -> list[Record]:
    """Products to a tolerance of 1e-2 along a training, from a random start and from old pairs."""
    marks = MARKS if marks is None else marks
    torch.manual_seed(seed)
    data, model = digits.load_split(), tanh_network(*widths)
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    x, y = data.train_images[:batch], data.train_labels[:batch]

    def pairs(start: Tensor | None = None) -> Any:
        return eigenpairs(
            lambda: cross_entropy(model(x), y),
            model,
            largest=LARGEST,
            smallest=SMALLEST,
            iterations=400,
            tol=1e-2,
            start=start,
            seed=seed,
        )

    found, records = {}, []
    wanted = {mark - gap for mark in marks.values() for gap in (0, *gaps)}
    order = digits.batches(len(data.train_images), 64, seed=seed)
    for step, indices in zip(range(max(marks.values()) + 1), order, strict=False):
        if step in wanted:
            found[step] = pairs()
        for name in [name for name, mark in marks.items() if mark == step]:
            warm = {
                start: {
                    str(gap): pairs(make(found[step - gap])).products
                    for gap in gaps
                    if step - gap in found
                }
                for start, make in STARTS.items()
            }
            what = {"when": name, "step": step, "lr": lr, "seed": seed, "batch": batch}
            records.append({**what, "cold": found[step].products, "warm": warm})
        optimizer.zero_grad()
        cross_entropy(model(data.train_images[indices]), data.train_labels[indices]).backward()
        optimizer.step()
    return records


def products_table(records: Sequence[Record]) -> Table:
    result = table(
        f"Products to 1e-2, median (most) of rates and seeds; asked: at most {MOST_PRODUCTS} cold, "
        f"fewer warm; floor: {LARGEST + SMALLEST}",
        ("batch", "when", "cold", "start", *(f"{gap} steps old" for gap in GAPS), "fewer in"),
    )

    def shown(counts: Sequence[int]) -> str:
        return f"{statistics.median(counts):g} ({max(counts)})" if counts else ""

    for batch in dict.fromkeys(record["batch"] for record in records):
        for when in MARKS:
            ours = [r for r in records if r["when"] == when and r["batch"] == batch]
            for start in STARTS:
                pairs = [(w, r["cold"]) for r in ours for w in r["warm"][start].values()]
                result.add_row(
                    str(batch),
                    when,
                    shown([r["cold"] for r in ours]),
                    start,
                    *(
                        shown(
                            [r["warm"][start][str(g)] for r in ours if str(g) in r["warm"][start]]
                        )
                        for g in GAPS
                    ),
                    f"{sum(w < cold for w, cold in pairs)} of {len(pairs)}",
                )
    return result


# -------------------------------------------------------------------------------------- training


def dho2(name: str, model_name: str, steps: int = 300, **options: Any) -> Setting:
    """DHO2 on a curvature batch of the first training examples."""
    label = ", ".join(
        f"{key} {value}" for key, value in options.items() if key in ("lr", "curvature_interval")
    )

    def build(model: nn.Module) -> Optimizer:
        def loss() -> Tensor:
            if model_name == "autoencoder":
                images = digits.autoencoder_images()[:600]
                return digits.autoencoder_loss(model(images), images)
            return cross_entropy(model(x), y)

        data = digits.load_split()
        x, y = data.train_images[:256], data.train_labels[:256]
        return DHO2(model, curvature_closure=loss, **options)

    return Setting(name, label, build, steps)


def training_settings(model: str) -> list[Setting]:
    over_sgd, over_adam = "DHO2 over SGD", "DHO2 over Adam"
    if model == "autoencoder":
        steps, often = 1200, {"curvature_interval": 50, "warmup_steps": 50}
        ours = [
            *(
                dho2(over_sgd, model, steps, lr=lr, momentum=0.9, **often)
                for lr in (0.02, 0.03, 0.05)
            ),
            *(dho2(over_adam, model, steps, lr=lr, base=Adam, **often) for lr in (0.003, 0.01)),
            dho2("DHO2, defaults", model, steps, lr=0.1, momentum=0.9),
        ]
        return [sgd(0.03, 2000), adam(0.01, 2000), *ours]
    return [
        *map(sgd, (0.01, 0.03, 0.1, 0.2, 0.3)),
        *map(adam, (0.001, 0.003, 0.01)),
        *(
            dho2(over_sgd, model, lr=lr, momentum=0.9, curvature_interval=every, warmup_steps=50)
            for lr in (0.02, 0.03, 0.05, 0.1)
            for every in (50, 100)
        ),
        *(
            dho2(over_adam, model, lr=lr, base=Adam, curvature_interval=50, warmup_steps=50)
            for lr in (0.003, 0.01)
        ),
        dho2("DHO2, defaults", model, lr=0.1, momentum=0.9),
    ]


def training(model: str, settings: Sequence[Setting], seeds: int) -> list[progress.Run]:
    work = [(setting, seed) for setting in settings for seed in range(seeds)]
    return [
        progress.run_autoencoder(setting, seed, time.process_time)
        if model == "autoencoder"
        else progress.run_classifier(model, setting, seed, clock=time.process_time)
        for setting, seed in tqdm(work, desc=model, leave=False)
    ]


# ----------------------------------------------------------------------------------- all of them


def rounded(value: Any) -> Any:
    """Numbers to four digits, and nothing that is not finite: not what JSON knows."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def run(section: str, options: argparse.Namespace, console: Console) -> Any:
    """Measure a section other than training, print its tables; what is to be kept of it."""
    if section == "valley":
        valleys = [valley(*each) for each in tqdm(VALLEYS, desc=section, leave=False)]
        console.print(valley_table(valleys))
        return valleys
    if section == "products":
        batches = [(256, lr) for lr in (0.01, 0.03, 0.1)] + [(1437, 0.1)]
        trainings = [(lr, seed, batch) for batch, lr in batches for seed in range(options.seeds)]
        counts = [r for t in tqdm(trainings, desc=section, leave=False) for r in count_products(*t)]
        console.print(products_table(counts))
        times = [
            {**cost.product_times(name, model, loss, options.repeats), "asked": asked}
            for name, asked, model, loss in cost.timed_networks()
        ]
        console.print(cost.times_table(times))
        return {"counts": counts, "times": times}
    if section == "overhead":
        steps = [
            {"shapes": name, **cost.overhead(shapes, repeats=10 * options.repeats)}
            for name, shapes in cost.MILLION.items()
        ]
        console.print(cost.overhead_table(steps))
        return steps
    kept = [cost.memory(processes) for processes in (1, 2, 4)]
    console.print(cost.memory_table(kept))
    return kept


def train(model: str, options: argparse.Namespace, console: Console) -> list[Record]:
    """Train with every setting, print the table; the runs."""
    runs = training(model, training_settings(model), options.seeds)
    classifier = model in progress.CLASSIFIERS
    targets = progress.CLASSIFIER_TARGETS if classifier else progress.AUTOENCODER_TARGETS
    console.print(progress.table(model, runs, targets))
    return [{k: v for k, v in asdict(run).items() if k != "losses"} for run in runs]


MODELS = (*progress.CLASSIFIERS, "autoencoder")
SECTIONS = ("valley", "products", "overhead", "memory", "training")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections, print their tables, and write what they found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="to train")
    parser.add_argument("--seeds", type=int, default=5, help="of every training")
    parser.add_argument("--repeats", type=int, default=11, help="of what is timed")
    parser.add_argument("--json", type=Path, help="put the sections into this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 140)
    record: Record = {}
    if options.json and options.json.exists():
        record = json.loads(options.json.read_text())
    record["machine"] = f"{platform.machine()}, torch {torch.__version__}, one thread"

    def keep() -> None:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(record, indent=1) + "\n")

    for section in options.only:
        if section == "training":
            for model in options.models:
                found = rounded(train(model, options, console))
                record[section] = {**record.get(section, {}), model: found}
                keep()
        else:
            record[section] = rounded(run(section, options, console))
            keep()


if __name__ == "__main__":
    main()
