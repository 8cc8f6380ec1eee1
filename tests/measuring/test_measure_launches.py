"""The device operations of `measure` for a batch, beyond those of the passes, on a fake device.

Counts are those of a layer more: of transformers with four blocks less those with two. All cases
are run by one other process: the pretended device exists once in each.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_device import NAME, Seen, pretend_device
from separate_process import found_once_by
from torch import Tensor, nn

from second_order import measure
from second_order.kronecker.fisher import sampled_loss
from second_order.measuring.sums import WIDENING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pool import Forks

WIDTH = 8
HEADS = 2
WORDS = 11
ENTRIES = 4
LENGTH = 6
LAYERS = 6  # of a block

WIDENING.add(NAME)


class Block(nn.Module):
    def __init__(self, biases: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, biases) for _ in range(4))
        self.up = nn.Linear(WIDTH, 2 * WIDTH, biases)
        self.down = nn.Linear(2 * WIDTH, WIDTH, biases)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        parts = (of(y).unflatten(-1, (HEADS, -1)) for of in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        x = x + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        output: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return output


def model_of(blocks: int, dtype: torch.dtype, biases: bool) -> nn.Module:
    ends = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=biases)
    model = nn.Sequential(ends[0], *(Block(biases) for _ in range(blocks)), ends[1])
    return model.to(dtype).to(NAME)


def batch_of(masked: bool) -> dict[str, Tensor]:
    mask = torch.ones(ENTRIES, LENGTH, dtype=torch.long)
    mask[1, 4:] = 0
    tokens = {"x": torch.randint(WORDS, (ENTRIES, LENGTH))}
    return tokens | ({"attention_mask": mask} if masked else {})


def totals(seen: Seen) -> list[float]:
    return [each.total() for each in (seen.kernels, seen.syncs, seen.uploads)]


def bare(seen: Seen, model: nn.Module, factors: str) -> list[float]:
    """The passes alone; backward without gradients of weights."""
    x = torch.randint(WORDS, (ENTRIES, LENGTH)).to(NAME)
    model.requires_grad_(False)
    seen.clear()
    if factors == "inputs":
        with torch.no_grad():
            model(x)
        return totals(seen)
    first, *rest = model
    h = first(x).requires_grad_()
    for module in rest:
        h = module(h)
    sampled_loss(h, "categorical", 0).backward()
    return totals(seen)


def of_a_batch(seen: Seen, model: nn.Module, factors: Any, masked: bool) -> list[float]:
    found = []
    for batches in (2, 2, 3):  # what comes once, the first time, counts for nothing
        data = [batch_of(masked) for _ in range(batches)]
        seen.clear()
        measure(model, data, factors=factors, call=lambda m, b: m(b["x"]), progress=False)
        found.append(totals(seen))
    return [most - few for few, most in zip(*found[1:], strict=True)]


def difference_of_narrow_products() -> float:
    """The difference of A from the device, which accumulates in float32, and from the CPU."""
    model = model_of(1, torch.bfloat16, True)
    data = [batch_of(True) for _ in range(3)]

    def inputs(model: nn.Module) -> list[Tensor]:
        found = measure(model, data, call=lambda m, b: m(b["x"]), progress=False)
        return [layer.A.cpu() for layer in found.values()]

    pairs = zip(inputs(model), inputs(model.cpu()), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def solves(keep: Any) -> list[str]:
    """Devices of all that is found with EK-FAC, which solves."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(NAME)
    data = [torch.randn(4, 3) for _ in range(2)]
    options = {"keep": keep, "progress": False}
    found = measure(model, data, factors="ekfac", likelihood="gaussian", **options)
    found.solve({name: p.detach() for name, p in model.named_parameters()}, damping=0.1)
    return sorted({t.device.type for layer in found.values() for t in layer.tensors().values()})


def of_two_devices() -> list[list[str]]:
    """Devices of each layer's factors, of a model on two."""

    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3).to(NAME)
            self.b = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.b(self.a(x).cpu())
            return output

    data = [torch.randn(4, 3) for _ in range(2)]
    found = measure(Parted(), data, factors="kfac", likelihood="gaussian", progress=False)
    return [sorted({t.device.type for t in of.stored.values()}) for of in found.values()]


def cases() -> Iterator[tuple[str, Any]]:
    """Yield launches above the floor, synchronizations and uploads, for 2 and 4 blocks."""
    torch.manual_seed(0)
    with pretend_device() as seen:
        yield "difference", difference_of_narrow_products()
        yield "two devices", of_two_devices()
        for keep in ("device", "cpu"):
            yield keep, solves(keep)
        for factors in ("inputs", "kfac"):
            for masked in (False, True):
                for of in ("float32", "float32 with biases", "bfloat16"):
                    counts = {}
                    for blocks in (2, 4):
                        model = model_of(blocks, getattr(torch, of.split()[0]), "biases" in of)
                        measured = of_a_batch(seen, model, factors, masked)
                        floor = bare(seen, model, factors)
                        counts[blocks] = [measured[0] - floor[0], *measured[1:]]
                    name = f"{factors}, {'masked' if masked else 'whole'}, {of}"
                    yield name, [counts[2], counts[4]]


@pytest.fixture(scope="module")
def counted(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = found_once_by(forks, __file__, tmp_path_factory)
    return found


@pytest.mark.parametrize("of", ["float32", "float32 with biases", "bfloat16"])
@pytest.mark.parametrize("masked", ["whole", "masked"])
@pytest.mark.parametrize("factors", ["inputs", "kfac"])
def test_each_layer_adds_few_launches(
    counted: dict[str, Any], factors: str, masked: str, of: str
) -> None:
    few, most = counted[f"{factors}, {masked}, {of}"]
    assert 0 < (most[0] - few[0]) / (2 * LAYERS) <= {"inputs": 3, "kfac": 6}[factors]


def test_low_precision_products_are_accumulated_in_float32(counted: dict[str, Any]) -> None:
    assert counted["difference"] < 1e-6


def test_each_layers_results_are_on_one_device(counted: dict[str, Any]) -> None:
    assert counted["device"] == [NAME]
    assert counted["cpu"] == ["cpu"]
    assert counted["two devices"] == [[NAME], ["cpu"]]


@pytest.mark.parametrize("factors", ["inputs", "kfac"])
def test_measure_does_not_synchronize_and_uploads_do_not_grow(
    counted: dict[str, Any], factors: str
) -> None:
    for name in (each for each in counted if each.startswith(factors)):
        (_, waits, uploads), (_, more_waits, more_uploads) = counted[name]
        assert waits == more_waits == 0
        assert uploads == more_uploads <= 3


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dict(cases())))
