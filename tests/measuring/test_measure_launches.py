"""What `measure` asks of a device for a batch, by the pretended one, beyond the bare passes.

Counts are those of a layer more: of transformers with four blocks less those with two. All cases
are run by one other process: the pretended device exists once in each.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from apart import found_by
from pretended import NAME, Seen, pretend_device
from torch import Tensor, nn

from second_order import measure
from second_order.kronecker.fisher import sampled_loss

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH, HEADS, WORDS, ENTRIES, LENGTH = 8, 2, 11, 4, 6
LAYERS = 6  # of a block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        parts = (of(y).unflatten(-1, (HEADS, -1)) for of in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        x = x + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        output: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return output


def model_of(blocks: int, dtype: torch.dtype) -> nn.Module:
    ends = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    model = nn.Sequential(ends[0], *(Block() for _ in range(blocks)), ends[1])
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
    for batches in (2, 4, 8):  # what comes once, the first time, counts for nothing
        data = [batch_of(masked) for _ in range(batches)]
        seen.clear()
        measure(model, data, factors=factors, call=lambda m, b: m(b["x"]), progress=False)
        found.append(totals(seen))
    return [(most - few) / 4 for few, most in zip(*found[1:], strict=True)]


def cases() -> Iterator[tuple[str, Any]]:
    """By name, launches beyond the floor, waits and uploads of a batch, at 2 and 4 blocks."""
    torch.manual_seed(0)
    with pretend_device() as seen:
        for factors in ("inputs", "kfac"):
            for masked in (False, True):
                for dtype in (torch.float32, torch.bfloat16):
                    counts = {}
                    for blocks in (2, 4):
                        model = model_of(blocks, dtype)
                        ours = of_a_batch(seen, model, factors, masked)
                        floor = bare(seen, model, factors)
                        counts[blocks] = [ours[0] - floor[0], *ours[1:]]
                    name = f"{factors}, {'masked' if masked else 'whole'}, {dtype}"
                    yield name, [counts[2], counts[4]]


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    found: dict[str, Any] = found_by(__file__)
    return found


@pytest.mark.parametrize("masked", ["whole", "masked"])
@pytest.mark.parametrize("factors", ["inputs", "kfac"])
def test_a_layer_takes_three_launches_more(
    counted: dict[str, Any], factors: str, masked: str
) -> None:
    few, most = counted[f"{factors}, {masked}, torch.float32"]
    assert 0 < (most[0] - few[0]) / (2 * LAYERS) <= 3
    few, most = counted[f"{factors}, {masked}, torch.bfloat16"]  # whose rows are widened
    assert 0 < (most[0] - few[0]) / (2 * LAYERS) <= (3 if factors == "inputs" else 5)


@pytest.mark.parametrize("factors", ["inputs", "kfac"])
def test_nothing_is_waited_for_and_uploads_do_not_grow(
    counted: dict[str, Any], factors: str
) -> None:
    for name in (each for each in counted if each.startswith(factors)):
        (_, waits, uploads), (_, more_waits, more_uploads) = counted[name]
        assert waits == more_waits == 0
        assert uploads == more_uploads <= 3


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dict(cases())))
