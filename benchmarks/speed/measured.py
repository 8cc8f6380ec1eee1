"""What `measure` costs: time beside bare passes, memory by owner, and large models on paper.

    make measured

Time: a Llama-like model with padded batches, one thread. The floor of "inputs" is the bare forward
pass and one product of each layer's rows with themselves, that of "kfac" forward and backward as a
training has them, and both products. Rounds take turns, so that what else the machine does falls
on all alike. Memory: processes of an MLP, whose peak above what bare forward passes leave is
compared with the bytes of all triangles. On paper: triangles of models on the meta device, by the
owners that `measure` would choose.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import reporting
from second_order import measure
from second_order.distributed.assignment import balance_costs
from second_order.measuring.layers import find_layers

LENGTH = 128
ENTRIES = 8
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
    """A model of transformers' with random weights, or without any on the meta device."""
    import transformers  # noqa: PLC0415

    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    return model


def batches() -> list[dict[str, Tensor]]:
    """Tokens, of which a quarter of the entries' are padding."""
    drawn = torch.Generator().manual_seed(0)
    found = []
    for _ in range(BATCHES):
        tokens = torch.randint(1000, (ENTRIES, LENGTH), generator=drawn)
        mask = torch.ones_like(tokens)
        mask[: ENTRIES // 4, LENGTH // 2 :] = 0
        found.append({"input_ids": tokens, "attention_mask": mask})
    return found


def losses(output: Any, batch: Any) -> Tensor:
    """The losses of the next tokens, without padding."""
    counts = batch["attention_mask"][:, 1:] != 0
    logits = output.logits[:, :-1][counts]
    return nn.functional.cross_entropy(logits, batch["input_ids"][:, 1:][counts], reduction="none")


def seconds(*works: Callable[[], Any], rounds: int) -> list[float]:
    """The median time of each, in turns; the first round does not count."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for times, work in zip(found, works, strict=True):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return [statistics.median(times[1:]) for times in found]


def times(sizes: dict[str, int], rounds: int) -> dict[str, float]:
    """Seconds of a pass over the data, and of what it cannot do without."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = llama(vocab_size=1000, **sizes)
    data = batches()
    model.eval()

    def forward() -> None:
        with torch.no_grad():
            [model(**batch) for batch in data]

    def both() -> None:
        for batch in data:
            model.zero_grad()
            losses(model(**batch), batch).sum().backward()

    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    rows = torch.randn(ENTRIES * LENGTH, max(max(m.weight.shape) for m in linear))
    counted = int(data[0]["attention_mask"].sum())

    def product(count: int, dim: int) -> None:
        x = rows[:count, :dim].contiguous()
        total = torch.zeros(dim, dim)
        torch.addmm(total, x.mT, x, out=total)

    def inputs_floor() -> None:
        for _ in data:
            for m in linear:
                product(counted, m.in_features)

    def pairs_floor() -> None:
        for _ in data:
            for m in linear:
                product(counted, m.in_features)
                product(len(rows), m.out_features)

    options: dict[str, Any] = {"progress": False}
    found = seconds(
        forward,
        both,
        inputs_floor,
        pairs_floor,
        lambda: measure(model, data, layers=["Linear"], **options),
        lambda: measure(model, data, layers=["Linear"], factors="kfac", loss=losses, **options),
        rounds=rounds,
    )
    names = ["forward", "forward and backward", "products of A", "of A and G", "inputs", "kfac"]
    return dict(zip(names, found, strict=True))


def mlp(width: int, depth: int) -> nn.Module:
    """Linears of one width."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def resident(which: str) -> int:
    """Bytes of this process's memory: "VmRSS" now, "VmHWM" at most since the peak was forgotten."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if which in x]
    return int(line.split()[1]) * 1024


def _rank(rank: int, ranks: int, width: int, depth: int, keep: Any, where: str, out: Any) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    model = mlp(width, depth)
    data = [torch.randn(64, width) for _ in range(3)]
    with torch.no_grad():
        [model(x) for x in data]
    small = measure(mlp(8, 2), [torch.randn(4, 8)], keep=keep, progress=False)  # what is loaded
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    found = measure(model, data, keep=keep, progress=False)
    out.put((rank, resident("VmHWM") - before, found.report.nbytes, len(small)))
    out.close()
    out.join_thread()


def memory(ranks: int, width: int, depth: int, keep: str, folder: Path) -> dict[str, float]:
    """Bytes by which the peak of a process grows, and of its factors, and of all triangles."""
    where = (folder / f"{keep}-{ranks}").absolute().as_uri()
    # What is freed is given back, so that the peak is of what lives.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_ARENA_MAX": "1"}
    context = mp.get_context("spawn")
    out = context.Queue()
    arguments = (ranks, width, depth, keep, where, out)
    processes = [context.Process(target=_rank, args=(r, *arguments)) for r in range(ranks)]
    for process in processes:
        process.start()
    found = [out.get() for _ in processes]
    for process in processes:
        process.join()
    return {
        "peak": max(each[1] for each in found),
        "factors": max(each[2] for each in found),
        "triangles": 4 * depth * width * (width + 1) // 2,
        "a layer": 4 * width**2,
    }


def on_paper(config: dict[str, Any], inputs: bool, ranks: int) -> dict[str, float]:
    """Bytes of all triangles, of a process's by owner, and of the largest layer's products."""
    with torch.device("meta"):
        model = llama(**config)
    layers = find_layers(model, ["*layers*"], inputs, 1).layers
    costs = []
    largest = 0
    for layer in layers:
        letters = "A" if inputs else layer.shape.factor_names
        costs.append(sum(4 * n * (n + 1) // 2 for n in map(layer.shape.dims.get, letters) if n))
        largest = max(largest, *(4 * layer.shape.dims[letter] ** 2 for letter in letters))
    loads = [0] * ranks
    for cost, rank in zip(costs, balance_costs(costs, ranks), strict=True):
        loads[rank] += cost
    return {"triangles": sum(costs), "a process of 8": max(loads), "largest product": largest}


def _scaled(rows: dict[str, dict[str, float]], keys: Sequence[str], by: int) -> list[list[str]]:
    return [[name, *(f"{row[key] / by:.2f}" for key in keys)] for name, row in rows.items()]


def main() -> None:
    """Measure all three, print the tables, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="for processes to meet")
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    sizes = {key: n if key.startswith("num") else n // 8 for key, n in SIZES.items()}
    found = times(sizes if tiny else SIZES, 1 if tiny else arguments.rounds)
    floors = {
        "inputs": found["forward"] + found["products of A"],
        "kfac": found["forward and backward"] + found["of A and G"],
    }
    width, depth = (64, 4) if tiny else (WIDTH, DEPTH)
    kept = {
        f"{keep}, {ranks}": memory(ranks, width, depth, keep, arguments.folder)
        for keep, ranks in (("device", 1), ("owner", RANKS))
    }
    paper = {
        f"{name}, {factors}": on_paper(config, factors == "inputs", 8)
        for name, config in ({} if tiny else LARGE).items()
        for factors in ("inputs", "kfac")
    }
    reporting.store(arguments.json, tiny=tiny, seconds=found, memory=kept, paper=paper)
    passes = [
        (k, f"{1e3 * found[k]:.0f}", f"{1e3 * floor:.0f}", f"{found[k] / floor:.2f}")
        for k, floor in floors.items()
    ]
    columns: tuple[str, ...] = ("a pass", "ms", "floor, ms", "ratio")
    shown = [reporting.table("one pass over the data", columns, passes)]
    columns = ("keep, processes", "peak", "factors", "triangles")
    shown.append(reporting.table("MiB", columns, _scaled(kept, columns[1:], 2**20)))
    columns = ("model, factors", "triangles", "a process of 8", "largest product")
    shown.append(
        reporting.table("GiB on paper, by owner", columns, _scaled(paper, columns[1:], 2**30))
    )
    reporting.show(*shown)


if __name__ == "__main__":
    main()
