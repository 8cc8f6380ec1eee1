"""Everything that a GPU should answer, in one command under eight minutes: one table, one JSON.

    make gpu                     on a CUDA device
    make gpu ARGS="--tiny"       the same lines on the CPU, by small models: does the command run?

tests        the suite's CUDA tests
nccl         KAISA and DPKFAC in a group of one rank over NCCL: the parameters that one process gets
steps        quiet, statistics and refresh steps of three models beside AdamW, Muon and bare calls
waits        waits of the host and launches, by the profiler; without a GPU, on a pretended one
precision    TF32 in the products of factors, on and off: time and error; models in bfloat16

Each part is a process of its own that is ended at its limit, and the file is written anew after
each: what has been measured is kept whatever comes next.
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
from floor import Stopwatch, captured, factors, solve_times, statistics_times
from instruments import peak_bytes
from launches import Muon, pretend_device
from measure import KINDS, Training, interval
from second_order import DHO2, DPKFAC, KAISA, SecondOrderWarning
from workloads import WORKLOADS, Batch, ResNet, Transformer, Workload

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
LIMITS = {"tests": 110, "nccl": 50, "steps": 180, "waits": 60, "precision": 50}  # seconds
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCH = "cudaLaunchKernel"  # and its newer form, which begins alike
VOCABULARY = 4096
WIDTH = 768


# ------------------------------------------------------------------------------------- the models


@dataclass(frozen=True)
class Text(Workload):
    """A workload whose inputs are tokens, each to be told from those before it."""

    def batch(self, rank: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(1 + rank)
        tokens = torch.randint(self.classes, self.inputs, generator=generator).to(self.device)
        return tokens, tokens.roll(-1, 1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class GPT(nn.Module):
    """Tokens and their places, blocks of causal attention, and a Linear to the next token."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, length: int) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, "gelu")
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(layer(batch_first=True, norm_first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def workloads(tiny: bool) -> list[Workload]:
    """The three models, or small ones of the same kinds on the CPU."""
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
    """Makes a K-FAC optimizer over AdamW, whose steps come in the cycle of three kinds."""
    return lambda model: System(
        model,
        lr=1e-4,
        base=torch.optim.AdamW,
        foreach=True,
        factor_update_steps=interval("full", "statistics"),
        inv_update_steps=interval("full"),
        **options,
    )


OURS: dict[str, Callable[[nn.Module], Any]] = {
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


def trainings(workload: Workload, names: Iterable[str]) -> Iterable[tuple[str, Training]]:
    """A training by each optimizer, made when its turn comes."""
    makes = {"AdamW": adamw, "Muon": muon, **OURS, "DHO2": dho2}
    for name in names:
        training = Training(workload, makes[name])
        if name == "DHO2":  # no closure holds the optimizer: it goes with the training
            model = training.model
            batch = training.batch
            training.optimizer.curvature_closure = lambda m=model, b=batch: workload.loss(m, b)
        yield name, training
        if hasattr(training.optimizer, "close"):
            training.optimizer.close()


# -------------------------------------------------------------------------------------- the parts


def tests(_tiny: bool) -> dict[str, Any]:
    """The suite's CUDA tests, which a tiny run skips."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_cuda.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {"exit": run.returncode, "said": run.stdout.splitlines()[-30:]}


def nccl(tiny: bool) -> dict[str, Any]:
    """The largest relative difference of parameters that a group of one rank makes, by system."""
    workload = workloads(tiny)[0]
    found = {}
    for name in ("KAISA inverse", "DPKFAC inverse"):
        ends = []
        for grouped in (False, True):
            if grouped:
                with tempfile.TemporaryDirectory() as folder:
                    dist.init_process_group(
                        "gloo" if tiny else "nccl",
                        init_method=f"file://{folder}/rendezvous",
                        rank=0,
                        world_size=1,
                    )
            for _, training in trainings(workload, [name]):
                for _ in KINDS:
                    training.step()
                training.require_finite()
                ends.append(parameters_to_vector(training.model.parameters()).detach())
            if grouped:
                dist.destroy_process_group()
        found[name] = ((ends[1] - ends[0]).norm() / ends[0].norm()).item()
    return found


def steps(tiny: bool) -> dict[str, Any]:
    """Milliseconds of each kind of step, peak bytes, and the floor of bare calls, by model."""
    rows: dict[str, Any] = {}
    for workload in workloads(tiny):
        row = rows[workload.name] = {}
        for name, training in trainings(workload, ("AdamW", "Muon", *OURS, "DHO2")):
            if workload.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            for _ in KINDS:
                training.step()
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for kind in KINDS * (1 if tiny else 3):
                times[kind].append(training.timed())
            training.require_finite()
            medians = {kind: statistics.median(each) for kind, each in times.items()}
            row[name] = {**medians, "peak_bytes": peak_bytes(workload.device)}
        watch = Stopwatch(workload.device, 1 if tiny else 3)
        layers = captured(workload)
        row["bare calls"] = statistics_times(watch, layers)
        row["bare calls"] |= solve_times(watch, [factors(layer) for layer in layers])
        print(json.dumps(rows), flush=True)  # kept if the next model is cut off
    return rows


def counted(training: Training) -> dict[str, int]:
    """Waits and launches of the coming step of a training, by CUDA's own functions."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as result:
        training.step()
    names = [event.name for event in result.events() or []]
    return {
        "waits": sum(name in WAITS for name in names),
        "launches": sum(name.startswith(LAUNCH) for name in names),
    }


def waits(tiny: bool) -> dict[str, Any]:
    """Waits and launches of each kind of step: a GPU's, or a pretended device's."""
    rows: dict[str, Any] = {}
    models = workloads(tiny)[:1] if tiny else workloads(tiny)  # test_launches.py has the others
    for workload in models:
        row = rows[workload.name] = {}
        for name in ("KAISA inverse", "DHO2" if tiny else "DPKFAC inverse"):
            row[name] = pretended(workload, name) if tiny else profiled(workload, name)
        print(json.dumps(rows), flush=True)
    return rows


def profiled(workload: Workload, name: str) -> dict[str, dict[str, int]]:
    """Waits and launches by kind of step, as the profiler counts them."""
    found: dict[str, dict[str, int]] = {}
    for _, training in trainings(workload, [name]):
        for _ in KINDS:
            training.step()
        for kind in KINDS:
            found[kind] = counted(training)
    return found


def pretended(workload: Workload, name: str) -> dict[str, dict[str, int]]:
    """Waits, uploads and launches by kind of step, as the pretended device counts them."""
    found: dict[str, dict[str, int]] = {}
    with pretend_device() as seen:
        for _, training in trainings(replace(workload, device="pretend"), [name]):
            for _ in KINDS:
                training.step()
            for kind in KINDS:
                seen.clear()
                training.step()
                found[kind] = {
                    "waits": seen.syncs.total(),
                    "uploads": seen.uploads.total(),
                    "launches": seen.kernels.total(),
                }
    return found


def precision(tiny: bool) -> dict[str, Any]:
    """Factors by products in TF32 and in float32; a training in bfloat16."""
    workload = workloads(tiny)[0]
    layers = captured(workload)
    found = {}
    exact = [factors(replace(each, x=each.x.double(), grad=each.grad.double())) for each in layers]
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    for setting in ("ieee", "tf32"):
        matmul.fp32_precision = setting
        milliseconds = statistics_times(Stopwatch(workload.device, 3), layers)["statistics"]
        errors = [
            ((one - other).norm() / other.norm()).item()
            for layer, sound in zip(layers, exact, strict=True)
            for one, other in zip(factors(layer), sound, strict=True)
        ]
        found[setting] = {"milliseconds": milliseconds, "largest relative error": max(errors)}
    matmul.fp32_precision = before
    narrow = replace(workload, build=lambda: workload.build().bfloat16(), autocast=True)
    for name, training in trainings(narrow, ("AdamW", "KAISA inverse")):
        training.batch = training.batch[0].bfloat16(), training.batch[1]
        losses = []
        for _ in range(4 * len(KINDS)):
            training.step()
            losses.append(training.loss.item())
        found[f"bfloat16, {name}"] = {"first loss": losses[0], "last loss": losses[-1]}
    return found


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    part.__name__: part for part in (tests, nccl, steps, waits, precision)
}


# ------------------------------------------------------------------------------------- in its turn


def measured(part: str, tiny: bool) -> dict[str, Any]:
    """What a part finds, in a process of its own, or how it failed."""
    command = [sys.executable, str(HERE), "--part", part, *(["--tiny"] if tiny else [])]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ})
        try:
            process.wait(LIMITS[part] * (4 if tiny else 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        said = err.read().splitlines()[-12:]
    found = json.loads(lines[-1]) if lines else {}
    failed = {"failed": said or ["no result"]} if process.returncode else {}
    return {"seconds": time.monotonic() - start, "exit": process.returncode, **failed, **found}


def lines(record: dict[str, Any]) -> list[list[str]]:
    """The rows of the table: part, of what, and figures."""

    def told(value: Any) -> str:
        if isinstance(value, dict):
            return "  ".join(f"{key} {told(each)}" for key, each in value.items())
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    rows = []
    for part, found in record.items():
        for name, value in found.items():
            if part in ("steps", "waits") and isinstance(value, dict):
                rows += [[part, f"{name}: {each}", told(v)] for each, v in value.items()]
            else:
                rows.append([part, name, told(value)])
    return rows


def main() -> None:
    """Run each part in a process of its own, print the table, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--part", choices=PARTS, help="one part alone, here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("there is no CUDA device; --tiny runs the same lines on the CPU")
    if arguments.part:
        warnings.simplefilter("ignore", SecondOrderWarning)
        print(json.dumps(PARTS[arguments.part](arguments.tiny)))
        return
    record: dict[str, Any] = {}
    for part in arguments.parts:
        record[part] = measured(part, arguments.tiny)
        reporting.store(arguments.json, tiny=arguments.tiny, **record)
    title = "by small models on the CPU" if arguments.tiny else torch.cuda.get_device_name()
    reporting.show(reporting.table(title, ("part", "of", "found"), lines(record), left=3))
    if any(found["exit"] for found in record.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
