"""The cost of `measure`: time next to bare passes, memory by owner, and calculated sizes.

    make measured

Time: we measure a Llama-like model with padded batches, on one thread. The floor of "inputs" is the
bare forward pass and the products for A. The floor of "kfac" is a forward and backward pass and the
products for A and G. All variants take turns, because other processes on the machine then slow down
all of them.

Memory: processes run an MLP. Their peak above the memory after bare forward passes is compared with
the bytes of all triangles.

By calculation: the triangles of models on the meta device, with the owners that `measure` assigns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import reporting
from second_order import measure
from second_order.distributed.assignment import balance_costs
from second_order.measuring.layers import find_layers

LENGTH = 128
BATCH_SIZE = 8
BATCHES = 4
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
RANKS = 4
WIDTH = 2048
DEPTH = 8
LARGE = {
    "Llama 7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "Llama 70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def llama(**config: Any) -> nn.Module:
    """A Llama model of the package transformers, with random weights."""
    import transformers  # noqa: PLC0415

    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    return model


def batches() -> list[dict[str, Tensor]]:
    """Batches of random tokens. The second half of a quarter of the rows is padding."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for _ in range(BATCHES):
        tokens = torch.randint(1000, (BATCH_SIZE, LENGTH), generator=generator)
        mask = torch.ones_like(tokens)
        mask[: BATCH_SIZE // 4, LENGTH // 2 :] = 0
        result.append({"input_ids": tokens, "attention_mask": mask})
    return result


def losses(output: Any, batch: Any) -> Tensor:
    """The losses of the next tokens, without padding."""
    is_token = batch["attention_mask"][:, 1:] != 0
    logits = output.logits[:, :-1][is_token]
    targets = batch["input_ids"][:, 1:][is_token]
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def median_seconds(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median times of functions that take turns. The first round does not count."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in samples.items()}


def measure_times(sizes: dict[str, int], rounds: int) -> dict[str, float]:
    """Seconds of a pass over the data, and of the parts of its floor."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = llama(vocab_size=1000, **sizes)
    data = batches()
    model.eval()

    def forward() -> None:
        with torch.no_grad():
            [model(**batch) for batch in data]

    def forward_and_backward() -> None:
        for batch in data:
            model.zero_grad()
            losses(model(**batch), batch).sum().backward()

    # G has a row for every token. A has none for padding.
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    rows = torch.randn(BATCH_SIZE * LENGTH, max(max(m.weight.shape) for m in linear))
    num_tokens = int(data[0]["attention_mask"].sum())

    def product(count: int, dim: int) -> None:
        x = rows[:count, :dim].contiguous()
        total = torch.zeros(dim, dim)
        torch.addmm(total, x.mT, x, out=total)

    def products_of_a() -> None:
        for _ in data:
            for m in linear:
                product(num_tokens, m.in_features)

    def products_of_a_and_g() -> None:
        for _ in data:
            for m in linear:
                product(num_tokens, m.in_features)
                product(len(rows), m.out_features)

    def measure_inputs() -> None:
        measure(model, data, layers=["Linear"], progress=False)

    def measure_kfac() -> None:
        measure(model, data, layers=["Linear"], factors="kfac", loss=losses, progress=False)

    functions: dict[str, Callable[[], Any]] = {
        "forward": forward,
        "forward and backward": forward_and_backward,
        "products of A": products_of_a,
        "of A and G": products_of_a_and_g,
        "inputs": measure_inputs,
        "kfac": measure_kfac,
    }
    return median_seconds(functions, rounds)


def mlp(width: int, depth: int) -> nn.Module:
    """Linear layers of one width."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def resident_bytes(key: str) -> int:
    """Resident memory of this process: "VmRSS" is the current value, and "VmHWM" the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if key in line]
    return int(line.split()[1]) * 1024


class RankMemory(NamedTuple):
    """Bytes by which the peak of a process grows, and bytes of its factors."""

    peak: int
    factors: int


def _measure_rank(
    rank: int, ranks: int, width: int, depth: int, keep: Any, address: str, results: Any
) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    model = mlp(width, depth)
    data = [torch.randn(64, width) for _ in range(3)]

    # The first calls load libraries. Reset the peak after them.
    with torch.no_grad():
        for x in data:
            model(x)
    measure(mlp(8, 2), [torch.randn(4, 8)], keep=keep, progress=False)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")

    result = measure(model, data, keep=keep, progress=False)
    results.put(RankMemory(resident_bytes("VmHWM") - before, result.report.nbytes))
    results.close()
    results.join_thread()


def measure_memory(ranks: int, width: int, depth: int, keep: str, folder: Path) -> dict[str, float]:
    """Largest growth of a process's peak, and bytes of its factors and of all triangles."""
    address = (folder / f"{keep}-{ranks}").absolute().as_uri()
    # With these settings, freed memory returns to the system, so the peak has no freed memory.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_ARENA_MAX": "1"}

    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = []
    for rank in range(ranks):
        arguments = (rank, ranks, width, depth, keep, address, queue)
        processes.append(context.Process(target=_measure_rank, args=arguments))
    for process in processes:
        process.start()
    results: list[RankMemory] = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return {
        "peak": max(result.peak for result in results),
        "factors": max(result.factors for result in results),
        "triangles": 4 * depth * width * (width + 1) // 2,
        "a layer": 4 * width**2,
    }


def calculate_sizes(config: dict[str, Any], inputs: bool, ranks: int) -> dict[str, float]:
    """Bytes of all triangles, of one process's triangles, and of the largest product."""
    with torch.device("meta"):
        model = llama(**config)
    layers = find_layers(model, ["*layers*"], inputs, 1).layers

    costs = []
    largest = 0
    for layer in layers:
        factor_names = "A" if inputs else layer.shape.factor_names
        dims = [layer.shape.dims[name] for name in factor_names]
        costs.append(sum(4 * n * (n + 1) // 2 for n in dims))
        largest = max(largest, *(4 * n**2 for n in dims))

    loads = [0] * ranks
    for cost, rank in zip(costs, balance_costs(costs, ranks), strict=True):
        loads[rank] += cost
    return {"triangles": sum(costs), "a process of 8": max(loads), "largest product": largest}


def cells(rows: dict[str, dict[str, float]], keys: Sequence[str], unit: int) -> list[list[str]]:
    """Rows of a table: the name, then some of the entries in a unit of bytes."""
    result = []
    for name, row in rows.items():
        result.append([name, *(f"{row[key] / unit:.2f}" for key in keys)])
    return result


def main() -> None:
    """Measure all three, print the tables, and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models and one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder for rendezvous files")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    arguments = parser.parse_args()

    # A tiny run has smaller models, and calculates no sizes.
    sizes = SIZES
    rounds = arguments.rounds
    width = WIDTH
    depth = DEPTH
    large_models = LARGE
    if arguments.tiny:
        sizes = {key: n if key.startswith("num") else n // 8 for key, n in SIZES.items()}
        rounds = 1
        width = 64
        depth = 4
        large_models = {}

    seconds = measure_times(sizes, rounds)
    memory = {}
    for keep, ranks in (("device", 1), ("owner", RANKS)):
        memory[f"{keep}, {ranks}"] = measure_memory(ranks, width, depth, keep, arguments.folder)
    calculated = {}
    for name, config in large_models.items():
        for factors in ("inputs", "kfac"):
            calculated[f"{name}, {factors}"] = calculate_sizes(config, factors == "inputs", 8)
    reporting.store(
        arguments.json, tiny=arguments.tiny, seconds=seconds, memory=memory, paper=calculated
    )

    floors = {
        "inputs": seconds["forward"] + seconds["products of A"],
        "kfac": seconds["forward and backward"] + seconds["of A and G"],
    }
    time_rows = []
    for name, floor in floors.items():
        milliseconds = [f"{1e3 * seconds[name]:.0f}", f"{1e3 * floor:.0f}"]
        time_rows.append([name, *milliseconds, f"{seconds[name] / floor:.2f}"])
    columns: tuple[str, ...] = ("factors", "ms", "floor, ms", "ratio")
    tables = [reporting.table("one pass over the data", columns, time_rows)]
    columns = ("keep, processes", "peak", "factors", "triangles")
    tables.append(reporting.table("MiB", columns, cells(memory, columns[1:], 2**20)))
    columns = ("model, factors", "triangles", "a process of 8", "largest product")
    title = "GiB by calculation, with owners"
    tables.append(reporting.table(title, columns, cells(calculated, columns[1:], 2**30)))
    reporting.show(*tables)


if __name__ == "__main__":
    main()
