"""The networks of the papers, and the memory of KAISA's second-order state in them.

    python benchmarks/speed/papers.py              a table; seconds

Networks are on the meta device. Beside each count stands what the paper has measured on 64 GPUs
(Pauloski et al. 2022, Table 6.6), which has the allocator and further buffers in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from second_order.planning.counts import Case
from second_order.planning.memory import activation_bytes, largest_batch
from second_order.planning.network import Network
from second_order.planning.systems import Planned, kaisa
from workloads import ResNet, basic_block, bottleneck, resnet50

__all__ = ["MEASURED", "Measured", "batches", "bert_large", "overheads", "resnet"]

MB, FLOAT = 1e6, 4
RANKS = 64
PLAIN_BATCH = 128  # examples a rank that SGD has in Table 6.4


def resnet(depth: int) -> ResNet:
    """A ResNet for images of 224 x 224, of 18, 50, 101 or 152 layers."""
    if depth == 50:
        return resnet50()
    depths = {18: (2, 2, 2, 2), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    stem = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    if depth == 18:
        return ResNet((64, 128, 256, 512), depths, basic_block, 1, stem, classes=1000)
    return ResNet((64, 128, 256, 512), depths, bottleneck, 4, stem, classes=1000)


def bert_large() -> nn.Module:
    """The parameters of BERT-Large uncased with its two heads for pre-training; no forward."""
    width, hidden, vocabulary = 1024, 4096, 30522

    def normed() -> nn.Module:
        return nn.LayerNorm(width)

    def block() -> nn.Module:
        square = (nn.Linear(width, width) for _ in range(4))  # queries, keys, values, outputs
        narrow, wide = nn.Linear(hidden, width), nn.Linear(width, hidden)
        return nn.Sequential(*square, normed(), wide, narrow, normed())

    embeddings = [nn.Embedding(n, width) for n in (vocabulary, 512, 2)]
    decoder = nn.Linear(width, vocabulary)
    decoder.weight = embeddings[0].weight
    return nn.ModuleDict(
        {
            "embeddings": nn.Sequential(*embeddings, normed()),
            "layers": nn.Sequential(*(block() for _ in range(24))),
            "pooler": nn.Linear(width, width),
            "head": nn.Sequential(nn.Linear(width, width), normed(), decoder),
            "next_sentence": nn.Linear(width, 2),
        }
    )


@dataclass(frozen=True)
class Measured:
    """A row of the paper's table.

    Attributes:
        build: Makes the network.
        plain: MB in training with SGD, or LAMB.
        least: MB with KAISA, one gradient worker a layer.
        most: MB with KAISA, all ranks gradient workers.
        options: KAISA's keywords, besides those of all rows.
    """

    build: Callable[[], nn.Module]
    plain: int
    least: int
    most: int
    options: dict[str, Any]


# The embedding and the prediction head have no factors there; two bytes, as of float16.
_BERT: dict[str, Any] = {
    "skip_layers": ["embeddings", "head"],
    "factor_dtype": torch.bfloat16,
    "inv_dtype": torch.bfloat16,
}
MEASURED = {
    "ResNet-18": Measured(partial(resnet, 18), 2454, 2838, 3260, {}),
    "ResNet-50": Measured(partial(resnet, 50), 4762, 5396, 6608, {}),
    "ResNet-101": Measured(partial(resnet, 101), 6313, 7463, 8755, {}),
    "ResNet-152": Measured(partial(resnet, 152), 6620, 8204, 9092, {}),
    "BERT-Large": Measured(bert_large, 8254, 9555, 12038, _BERT),
    "BERT-Large, triangles": Measured(
        bert_large, 8254, 9555, 12038, {**_BERT, "symmetry_aware": True}
    ),
}


def as_published(fraction: float, **options: Any) -> Planned:
    """KAISA as its paper has it: eigendecompositions, whole matrices, factors on every rank."""
    chosen = {"solver": "eigen", "symmetry_aware": False, **options}
    return kaisa(grad_worker_fraction=fraction, **chosen)


def network_of(row: Measured) -> Network:
    """The network of a row."""
    with torch.device("meta"):
        return as_published(1.0, **row.options).network(row.build())


def overheads(row: Measured, network: Network) -> dict[float, tuple[float, int]]:
    """Bytes of factors and inverses by the fraction of gradient workers: mean and most."""
    found = {}
    for fraction in (1 / RANKS, 0.5, 1.0):
        planned = as_published(fraction, **row.options)
        shares = Case(network, planned, RANKS).everybody()
        held = [(s.work.nbytes("factors", "inverses"), s.ranks) for s in shares]
        mean = sum(nbytes * ranks for nbytes, ranks in held) / RANKS
        found[fraction] = mean, max(nbytes for nbytes, _ in held)
    return found


def batches(network: Network, model: nn.Module, plain: int) -> dict[str, dict[float, int]]:
    """The batches that KAISA leaves room for where plain SGD with momentum has ``plain`` examples.

    Returns:
        By setting, "as published" or "triangles", by fraction of gradient workers: examples a rank.
    """
    with torch.device("meta"):
        per_example = activation_bytes(model, [torch.empty(2, 3, 224, 224)])
    budget = 3 * FLOAT * network.gradient_elements + plain * per_example
    settings: dict[str, Callable[[float], Planned]] = {
        "as published": as_published,
        "triangles": partial(_sparing, factor_exchange="reduce"),
    }
    found: dict[str, dict[float, int]] = {}
    for name, planned in settings.items():
        cases = {f: Case(network, planned(f), RANKS) for f in (1 / RANKS, 0.5, 1.0)}
        works = {f: c.everybody(statistics=True, refresh=True) for f, c in cases.items()}
        found[name] = {
            f: largest_batch(budget, [s.work for s in shares], per_example)
            for f, shares in works.items()
        }
    return found


def _sparing(fraction: float, **options: Any) -> Planned:
    """KAISA with the defaults here."""
    return kaisa(grad_worker_fraction=fraction, **options)


def main() -> None:
    """Print the tables."""
    table = Table(title=f"MB of KAISA's state on {RANKS} ranks: counted (measured in the paper)")
    for name in ("network", "least, mean", "least, most", "all workers"):
        table.add_column(name, justify="left" if name == "network" else "right")
    for name, row in MEASURED.items():
        found = overheads(row, network_of(row))
        (mean, most), (everywhere, _) = found[1 / RANKS], found[1.0]
        table.add_row(
            name,
            f"{mean / MB:,.0f} ({row.least - row.plain:,})",
            f"{most / MB:,.0f}",
            f"{everywhere / MB:,.0f} ({row.most - row.plain:,})",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    with torch.device("meta"):
        model = resnet(50)
    network = as_published(1.0).network(model, momentum=0.9)
    for name, examples in batches(network, model, PLAIN_BATCH).items():
        said = ", ".join(f"{fraction:.3g}: {batch}" for fraction, batch in examples.items())
        console.print(f"ResNet-50, where SGD has {PLAIN_BATCH} examples a rank; {name}: {said}")


if __name__ == "__main__":
    main()
