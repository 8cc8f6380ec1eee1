"""All measurements that need a GPU, in one command of at most eight minutes.

    make gpu                     on a CUDA device
    make gpu ARGS="--tiny"       small models on the CPU, to check that the command runs

tests        the CUDA tests of the test suite
nccl         KAISA and DPKFAC in an NCCL group of one rank, compared with no group
steps        step times of three models, next to AdamW, Muon and bare library calls
waits        synchronizations and launches per step, counted by the profiler or on a fake device
precision    time and error of factors in TF32 and float32, and models in bfloat16

Each part runs in a separate process with a time limit. The file is written after each part, so a
part that fails doesn't lose the results of earlier parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.profiler import ProfilerActivity, profile

import reporting
from floor import Layer, Stopwatch, capture_layers, factors, solve_times, statistics_times
from instruments import peak_bytes
from launches import Muon, pretend_device
from measure import KINDS, Training, interval
from second_order import DHO2, DPKFAC, KAISA, SecondOrderWarning
from workloads import WORKLOADS, Batch, ResNet, Transformer, Workload

THIS_FILE = Path(__file__).resolve()
ROOT = THIS_FILE.parents[2]
LIMITS = {"tests": 110, "nccl": 50, "steps": 180, "waits": 60, "precision": 50}  # seconds
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCH = "cudaLaunchKernel"  # also the beginning of the name of its newer form
VOCABULARY = 4096
WIDTH = 768


# ------------------------------------------------------------------------------------- the models


@dataclass(frozen=True)
class Text(Workload):
    """A language model's workload: the inputs are tokens, the targets the tokens after them."""

    def batch(self, rank: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(1 + rank)
        tokens = torch.randint(self.classes, self.inputs, generator=generator).to(self.device)
        return tokens, tokens.roll(-1, 1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, targets = batch
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks of causal attention, and a Linear layer."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, length: int) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, "gelu")
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(layer(batch_first=True, norm_first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(len(positions), x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def workloads(tiny: bool) -> list[Workload]:
    """The three models, or small models of the same kinds on the CPU."""
    if not tiny:
        gpt = partial(GPT, 12, WIDTH, 12, VOCABULARY, 512)
        text = Text("gpt-12", gpt, (8, 512), VOCABULARY, "cuda", autocast=True)
        return [WORKLOADS["transformer-768"], text, WORKLOADS["resnet50"]]
    return [
        Workload("transformer", partial(Transformer, 1, 16, 2, 32), (4, 8, 16)),
        Text("gpt", partial(GPT, 1, 16, 2, 20, 8), (4, 8), 20),
        Workload("resnet", partial(ResNet, (4, 8), (1, 1)), (4, 3, 8, 8)),
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def muon(model: nn.Module) -> Muon:
    return Muon(model, (m for m in model.modules() if isinstance(m, nn.Linear)))


def kfac(System: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Any]:
    """A function that makes a K-FAC optimizer over AdamW, with the cycle of three kinds."""
    return lambda model: System(
        model,
        lr=1e-4,
        base=torch.optim.AdamW,
        foreach=True,
        factor_update_steps=interval("full", "statistics"),
        inv_update_steps=interval("full"),
        **options,
    )


KFAC_OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "KAISA inverse": kfac(KAISA, solver="inverse"),
    "KAISA eigen": kfac(KAISA, solver="eigen"),
    "DPKFAC inverse": kfac(DPKFAC, solver="inverse"),
}


def dho2(model: nn.Module) -> DHO2:
    return DHO2(
        model,
        lr=1e-4,
        base=torch.optim.AdamW,
        foreach=True,
        curvature_interval=len(KINDS),
        warmup_steps=0,
        num_largest=4,
        lanczos_iterations=12,
    )


def training_runs(workload: Workload, names: Iterable[str]) -> Iterable[tuple[str, Training]]:
    """Yield a training run with each optimizer, and close the optimizer after it."""
    makers = {"AdamW": adamw, "Muon": muon, **KFAC_OPTIMIZERS, "DHO2": dho2}
    for name in names:
        training = Training(workload, makers[name])
        if name == "DHO2":
            # The closure does not refer to the optimizer, so the optimizer can be freed.
            model = training.model
            batch = training.batch
            training.optimizer.curvature_closure = lambda m=model, b=batch: workload.loss(m, b)
        yield name, training
        if hasattr(training.optimizer, "close"):
            training.optimizer.close()


# -------------------------------------------------------------------------------------- the parts


def tests(_tiny: bool) -> dict[str, Any]:
    """Run the CUDA tests of the test suite. Without a GPU, they are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_cuda.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {"exit": run.returncode, "output": run.stdout.splitlines()[-30:]}


def nccl(tiny: bool) -> dict[str, Any]:
    """Relative difference of the parameters with a group of one rank and without, by system."""
    workload = workloads(tiny)[0]
    differences = {}
    for name in ("KAISA inverse", "DPKFAC inverse"):
        final_params = []
        for uses_group in (False, True):
            if uses_group:
                with tempfile.TemporaryDirectory() as folder:
                    dist.init_process_group(
                        "gloo" if tiny else "nccl",
                        init_method=f"file://{folder}/rendezvous",
                        rank=0,
                        world_size=1,
                    )
            for _, training in training_runs(workload, [name]):
                for _ in KINDS:
                    training.step()
                training.require_finite()
                params = training.model.parameters()
                final_params.append(parameters_to_vector(params).detach())
            if uses_group:
                dist.destroy_process_group()
        alone, in_group = final_params
        differences[name] = ((in_group - alone).norm() / alone.norm()).item()
    return differences


def steps(tiny: bool) -> dict[str, Any]:
    """Milliseconds of each kind of step, peak bytes, and the floor of bare calls, by model."""
    repeats = 1 if tiny else 3
    rows: dict[str, Any] = {}
    for workload in workloads(tiny):
        # Time the steps of each optimizer after one cycle as warm-up.
        row = rows[workload.name] = {}
        for name, training in training_runs(workload, ("AdamW", "Muon", *KFAC_OPTIMIZERS, "DHO2")):
            if workload.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            for _ in KINDS:
                training.step()
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for kind in KINDS * repeats:
                times[kind].append(training.time_step())
            training.require_finite()
            medians = {kind: statistics.median(samples) for kind, samples in times.items()}
            row[name] = {**medians, "peak_bytes": peak_bytes(workload.device)}

        # Time the same work as bare library calls.
        watch = Stopwatch(workload.device, repeats)
        layers = capture_layers(workload)
        row["bare calls"] = statistics_times(watch, layers)
        row["bare calls"] |= solve_times(watch, [factors(layer) for layer in layers])

        # If the next model exceeds the time limit, these rows are still stored.
        print(json.dumps(rows), flush=True)
    return rows


def count_next_step(training: Training) -> dict[str, int]:
    """Synchronizations and launches of a training run's next step, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as result:
        training.step()
    names = [event.name for event in result.events() or []]
    return {
        "waits": sum(name in WAITS for name in names),
        "launches": sum(name.startswith(LAUNCH) for name in names),
    }


def waits(tiny: bool) -> dict[str, Any]:
    """Synchronizations and launches of each kind of step on a GPU, or on a fake device."""
    models = workloads(tiny)
    names = ("KAISA inverse", "DPKFAC inverse")
    count = count_on_gpu
    if tiny:
        models = models[:1]  # test_launches.py covers the other models
        names = ("KAISA inverse", "DHO2")
        count = count_on_fake_device

    rows: dict[str, Any] = {}
    for workload in models:
        rows[workload.name] = {}
        for name in names:
            rows[workload.name][name] = count(workload, name)
        print(json.dumps(rows), flush=True)
    return rows


def count_on_gpu(workload: Workload, name: str) -> dict[str, dict[str, int]]:
    """Synchronizations and launches by kind of step, as the profiler counts them."""
    counts: dict[str, dict[str, int]] = {}
    for _, training in training_runs(workload, [name]):
        for _ in KINDS:
            training.step()
        for kind in KINDS:
            counts[kind] = count_next_step(training)
    return counts


def count_on_fake_device(workload: Workload, name: str) -> dict[str, dict[str, int]]:
    """Synchronizations, uploads and launches by kind of step, as the fake device counts them."""
    counts: dict[str, dict[str, int]] = {}
    with pretend_device() as device:
        for _, training in training_runs(replace(workload, device="pretend"), [name]):
            for _ in KINDS:
                training.step()
            for kind in KINDS:
                device.clear()
                training.step()
                counts[kind] = {
                    "waits": device.syncs.total(),
                    "uploads": device.uploads.total(),
                    "launches": device.kernels.total(),
                }
    return counts


def to_float64(layer: Layer) -> Layer:
    """The same layer with inputs and output gradients in float64."""
    return replace(layer, x=layer.x.double(), grad=layer.grad.double())


def factor_errors(layers: list[Layer], exact: list[tuple[Tensor, Tensor]]) -> Iterable[float]:
    """Relative errors of A and G of all layers."""
    for layer, exact_factors in zip(layers, exact, strict=True):
        for factor, exact_factor in zip(factors(layer), exact_factors, strict=True):
            yield ((factor - exact_factor).norm() / exact_factor.norm()).item()


def precision(tiny: bool) -> dict[str, Any]:
    """Time and error of the factors in TF32 and float32, and training runs in bfloat16."""
    # Compute the factors in both precisions, and compare them with factors in float64.
    workload = workloads(tiny)[0]
    layers = capture_layers(workload)
    exact = [factors(to_float64(layer)) for layer in layers]
    results = {}
    matmul = torch.backends.cuda.matmul
    previous = matmul.fp32_precision
    for setting in ("ieee", "tf32"):
        matmul.fp32_precision = setting
        milliseconds = statistics_times(Stopwatch(workload.device, 3), layers)["statistics"]
        largest_error = max(factor_errors(layers, exact))
        results[setting] = {"milliseconds": milliseconds, "largest relative error": largest_error}
    matmul.fp32_precision = previous

    # Train a model whose parameters and inputs are in bfloat16.
    narrow = replace(workload, build=lambda: workload.build().bfloat16(), autocast=True)
    for name, training in training_runs(narrow, ("AdamW", "KAISA inverse")):
        inputs, targets = training.batch
        training.batch = (inputs.bfloat16(), targets)
        losses = []
        for _ in range(4 * len(KINDS)):
            training.step()
            losses.append(training.loss.item())
        results[f"bfloat16, {name}"] = {"first loss": losses[0], "last loss": losses[-1]}
    return results


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    part.__name__: part for part in (tests, nccl, steps, waits, precision)
}


# --------------------------------------------------------------------------------- the processes


def run_part(part: str, tiny: bool) -> dict[str, Any]:
    """Run a part in a new process, and return its results or how it failed."""
    command = [sys.executable, str(THIS_FILE), "--part", part]
    limit = LIMITS[part]
    if tiny:
        command.append("--tiny")
        limit *= 4

    # Stop the process at its time limit.
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**os.environ})
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        printed = [line for line in stdout.read().splitlines() if line.startswith("{")]
        errors = stderr.read().splitlines()[-12:]

    # The last line has all results so far.
    seconds = time.monotonic() - start
    result: dict[str, Any] = {"seconds": seconds, "exit": process.returncode}
    if process.returncode:
        result["failed"] = errors or ["no result"]
    if printed:
        result |= json.loads(printed[-1])
    return result


def format_value(value: Any) -> str:
    """A cell of the table."""
    if isinstance(value, dict):
        return "  ".join(f"{key} {format_value(entry)}" for key, entry in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def table_rows(record: dict[str, Any]) -> list[list[str]]:
    """The rows of the table: the part, the model and the optimizer, and the figures."""
    rows = []
    for part, results in record.items():
        for name, value in results.items():
            if part in ("steps", "waits") and isinstance(value, dict):
                for optimizer, figures in value.items():
                    rows.append([part, f"{name}: {optimizer}", format_value(figures)])
            else:
                rows.append([part, name, format_value(value)])
    return rows


def main() -> None:
    """Run each part in a new process, print the table, and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--part", choices=PARTS, help="run one part in this process")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the record to this file")
    arguments = parser.parse_args()
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("there is no CUDA device; use --tiny to run the same code on the CPU")
    if arguments.part:
        warnings.simplefilter("ignore", SecondOrderWarning)
        print(json.dumps(PARTS[arguments.part](arguments.tiny)))
        return

    record: dict[str, Any] = {}
    for part in arguments.parts:
        record[part] = run_part(part, arguments.tiny)
        reporting.store(arguments.json, tiny=arguments.tiny, **record)

    title = "small models on the CPU"
    if not arguments.tiny:
        title = torch.cuda.get_device_name()
    columns = ("part", "measurement", "result")
    reporting.show(reporting.table(title, columns, table_rows(record), left=3))
    if any(result["exit"] for result in record.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
