"""What Lanczos and DHO2 cost: the time of a product and of a step, and the memory of a basis.

Times are medians of the processor's time: one thread, which has nothing to wait for. What is
compared takes turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import digits
from second_order import DHO2
from second_order.distributed.collectives import World
from second_order.lanczos import Hessian
from second_order.lanczos.spectrum import default_iterations, extreme_pairs
from second_order.lanczos.vector_space import RowSpace
from workloads import WORKLOADS

LARGEST, SMALLEST = 10, 3

Record = dict[str, Any]


def tanh_network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def in_turn(
    calls: dict[str, Callable[[], object]], repeats: int, before: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Milliseconds of calls that take turns, a few first ones left out."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, repeats):
        if before is not None:
            before()
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn >= 0:
                times[name].append(1000 * (time.process_time() - start))
    return times


def table(title: str, columns: Sequence[str]) -> Table:
    """An empty table, its first column to the left."""
    result = Table(title=title)
    for i, column in enumerate(columns):
        result.add_column(column, justify="right" if i else "left")
    return result


# ------------------------------------------------------------------------------- time of a product


def product_times(name: str, model: nn.Module, loss: Callable[[], Tensor], repeats: int) -> Record:
    """Milliseconds of a gradient, of a product, and of the bare second derivative."""
    params = list(model.parameters())
    v = torch.randn(sum(p.numel() for p in params))
    parts = [
        part.view(p.shape)
        for part, p in zip(v.split([p.numel() for p in params]), params, strict=True)
    ]
    gradient = torch.autograd.grad(loss(), params, create_graph=True)
    with Hessian(loss, params, mode="retained", model=model) as H:
        milliseconds = in_turn(
            {
                "gradient": lambda: torch.autograd.grad(loss(), params),
                "product": lambda: H.product(v),
                "floor": lambda: torch.autograd.grad(gradient, params, parts, retain_graph=True),
            },
            repeats,
        )
    medians = {what: statistics.median(times) for what, times in milliseconds.items()}
    ratios = {what: medians[what] / medians["gradient"] for what in ("product", "floor")}
    return {"network": name, "parameters": len(v), "milliseconds": medians, "ratio": ratios}


def timed_networks() -> Iterator[tuple[str, float, nn.Module, Callable[[], Tensor]]]:
    """Each with the ratio that is asked for."""
    data = digits.load_split()
    x, y = data.train_images[:256], data.train_labels[:256]
    for name, asked in (("mlp", 1.8), ("conv_net", 3.0)):
        torch.manual_seed(0)
        model: nn.Module = getattr(digits, name)()
        yield f"digits {name}, 256", asked, model, partial(lambda m: cross_entropy(m(x), y), model)
    for name, asked in (("mlp", 1.8), ("resnet20", 3.0)):
        workload = WORKLOADS[name]
        model, batch = workload.model(), workload.batch()
        title = f"{name}, {workload.inputs[0]}"
        yield title, asked, model, partial(workload.loss, model, batch)


def times_table(records: Sequence[Record]) -> Table:
    result = table(
        "Milliseconds of one product and of one gradient",
        ("network, batch", "parameters", "gradient", "product", "ratio", "asked", "floor"),
    )
    for record in records:
        ms, ratio = record["milliseconds"], record["ratio"]
        result.add_row(
            record["network"],
            f"{record['parameters']:,}",
            f"{ms['gradient']:.2f}",
            f"{ms['product']:.2f}",
            f"{ratio['product']:.2f}",
            f"{record['asked']}",
            f"{ratio['floor']:.2f}",
        )
    return result


# -------------------------------------------------------------------------------------- overhead

MILLION: dict[str, list[tuple[int, ...]]] = {
    "3 Linear, 1,000,518": [(577, 577), (577,)] * 3,
    "one matrix, 1,000,000": [(1000, 1000)],
    "400 matrices, 1,000,000": [(50, 50)] * 400,
}


def overhead(shapes: Sequence[tuple[int, ...]], rank: int = 10, repeats: int = 101) -> Record:
    """Milliseconds of a step between refreshes, of the base's alone, and of four passes over V̂."""
    torch.manual_seed(0)
    params = [[nn.Parameter(0.01 * torch.randn(shape)) for shape in shapes] for _ in range(2)]
    gradients = [1e-3 * torch.randn(shape) for shape in shapes]
    curvatures = [torch.rand(shape) for shape in shapes]
    base = SGD(params[0], lr=1e-3, momentum=0.9)
    optimizer = DHO2(
        params[1],
        lr=1e-3,
        momentum=0.9,
        largest=rank,
        warmup_steps=0,
        curvature_interval=10**9,
        newton_scale=1e-3,
        lanczos_iterations=rank + 2,
        curvature_closure=lambda: sum(
            (c * p.square()).sum() for c, p in zip(curvatures, params[1], strict=True)
        ),
    )

    def fill() -> None:
        for each in params:
            for p, gradient in zip(each, gradients, strict=True):
                p.grad = gradient.clone() if p.grad is None else p.grad.copy_(gradient)

    fill()
    optimizer.step()
    assert optimizer._curvature.subspace is not None
    V = optimizer._curvature.subspace.basis.vectors
    x = torch.randn(V.shape[1])

    def passes() -> None:
        for _ in range(2):
            x.addmv_(V.t(), V @ x, alpha=-1)

    milliseconds = in_turn(
        {"base": base.step, "dho2": optimizer.step, "floor": passes}, repeats, fill
    )
    rounds = zip(*milliseconds.values(), strict=True)
    return {
        "parameters": V.shape[1],
        "vectors": len(V),
        "milliseconds": {what: statistics.median(times) for what, times in milliseconds.items()},
        "ratio": statistics.median((dho2 - alone) / floor for alone, dho2, floor in rounds),
    }


def overhead_table(records: Sequence[Record]) -> Table:
    result = table(
        "Milliseconds of a step between refreshes, 10 vectors; asked: at most 1.15 floors on top",
        ("parameters", "SGD alone", "DHO2", "floor: 4 passes", "(DHO2 − SGD) / floor"),
    )
    for record in records:
        ms = record["milliseconds"]
        times = (f"{ms[what]:.2f}" for what in ("base", "dho2", "floor"))
        result.add_row(record["shapes"], *times, f"{record['ratio']:.2f}")
    return result


# ---------------------------------------------------------------------------------------- memory


def basis_elements(widths: Sequence[int] = (64, 100, 32, 10)) -> Record:
    """What this process keeps: of D during a refresh, of V̂ after it."""
    torch.manual_seed(0)
    data, model = digits.load_split(), tanh_network(*widths)

    def loss() -> Tensor:
        return cross_entropy(model(data.train_images[:64]), data.train_labels[:64])

    params = list(model.parameters())
    with RowSpace(Hessian(loss, params, model=model), World(), torch.float32) as space:
        start = space.random(0, 1.0)
        pairs = extreme_pairs(space, start, LARGEST, SMALLEST, tol=0.0)
        size, D = space.size, pairs.basis
    m, r = default_iterations(size, LARGEST + SMALLEST), LARGEST + SMALLEST
    kept = {"D": D.untyped_storage().nbytes() // 4}
    for layout in ("row", "column"):
        optimizer = DHO2(
            model,
            lr=0.1,
            largest=LARGEST,
            smallest=SMALLEST,
            warmup_steps=0,
            layout=layout,
            curvature_closure=loss,
        )
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        subspace = optimizer._curvature.subspace
        assert subspace is not None
        kept[f"V̂ by {layout}"] = subspace.basis.vectors.untyped_storage().nbytes() // 4
    return {"n": size, "m": m, "r": r, "kept": kept, "dtype": str(D.dtype)}


def memory(processes: int) -> Record:
    """The most that one of some processes keeps; they are started for it."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "elements"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *launcher, __file__, str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
        parts = [json.loads(path.read_text()) for path in output.parent.iterdir()]
    kept = {what: max(part["kept"][what] for part in parts) for what in parts[0]["kept"]}
    return {**parts[0], "kept": kept, "processes": processes}


def work(output: Path) -> None:
    """One of the processes of `memory`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    path = output.with_suffix(f".{dist.get_rank()}")
    path.write_text(json.dumps(basis_elements()))
    dist.destroy_process_group()


def memory_table(records: Sequence[Record]) -> Table:
    n, m, r = (records[0][what] for what in ("n", "m", "r"))
    result = table(
        f"Elements of a process, most of all (asked: nm/P and nr/P), n = {n:,}, m = {m}, r = {r}",
        ("P", "D", "asked", *(f"V̂ by {layout}" for layout in ("row", "column")), "asked"),
    )
    for record in records:
        P, kept = record["processes"], record["kept"]
        asked = (f"{n * m / P:,.0f}", f"{n * r / P:,.0f}")
        numbers = [f"{count:,}" for count in kept.values()]
        result.add_row(str(P), numbers[0], asked[0], *numbers[1:], asked[1])
    return result


if __name__ == "__main__":
    work(Path(sys.argv[1]))
