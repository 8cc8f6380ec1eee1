"""Batched statistics of many layers equal those of each layer: pairs, sums and averages."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from factor_checks import bring, close, factor_shape, kind_of, pair_statistics
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from second_order import KAISA
from second_order.kronecker import autograd, statistics
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import (
    KroneckerFactors,
    StagedStatistics,
    StatisticsSums,
    close_pass,
    collect_sums,
    update_running_averages,
)
from second_order.kronecker.layers import FactorShape, full_row_mask, to_row_mask
from second_order.kronecker.rows import BackwardPass
from second_order.kronecker.statistics import Pair, StatisticsCollector
from second_order.kronecker.storage import as_stack

if TYPE_CHECKING:
    from collections.abc import Sequence

F64 = torch.float64
CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**16)
SIZES = [(3, 2), (3, 2), (2, 3), (3, 2)]  # of Linears
CALLS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 1), st.sampled_from(["plain", "dead", "nan"])),
    max_size=12,
)


def staged_layers(bias: bool) -> list[StagedStatistics]:
    shapes = [factor_shape(nn.Linear(*size, bias=bias), bias) for size in SIZES]
    return [StagedStatistics(shape, CPU, F64) for shape in shapes]


def pair(layer: int, kind: str) -> tuple[Tensor, Tensor]:
    """Inputs and gradients of three sequences, some of whose positions are not examples."""
    x, d = (torch.randn(3, 2, n, dtype=F64) for n in SIZES[layer])
    d[0, 1] = 0.0
    if kind != "plain":
        d[:] = 0.0 if kind == "dead" else torch.nan
    return x, d


def layers_of(bias: bool) -> list[KroneckerBlock]:
    found = []
    for index, size in enumerate(SIZES):
        layer = nn.Linear(*size, bias=bias, dtype=F64)
        found.append(KroneckerBlock([str(index)], [layer], layer.bias, F64, [kind_of(layer)]))
    return found


def collector(layers: Sequence[KroneckerBlock], **options: Any) -> StatisticsCollector:
    arguments: dict[str, Any] = {
        "approximation": "expand",
        "reduction": lambda: "sum",
        "gradient_scale": lambda _: 1.0,
        "comparisons_due": lambda: 2,
    }
    made = StatisticsCollector(**{**arguments, **options})
    made.set_blocks(layers)
    return made


def keep(
    made: StatisticsCollector, block: KroneckerBlock, x: Tensor, d: Tensor, rows: BackwardPass
) -> Pair:
    """Keep a pair of a pass, as `consume` does."""
    module = block.modules[0]
    seen = block.gradient_rows(module, x, d)
    group = rows.record_rows(seen, module, has_label_per_row=False, read_gradient=False)
    pair = Pair(
        block=block,
        module=module,
        x=x,
        d=d,
        backward_pass=rows,
        group=group,
        unrecorded_gradient=seen.gradient,
    )
    block.staged.record_pair(rows.number)
    made._queued_pairs.append(pair)
    return pair


@given(
    calls=CALLS,
    bias=st.booleans(),
    approximation=st.sampled_from(["expand", "reduce"]),
    terms=st.sampled_from([None, 5.0, "tensor"]),
    scale=st.sampled_from([1.0, 2.0, "tensor"]),
    together=st.booleans(),
    seed=SEEDS,
)
def test_queued_pairs_give_the_sums_of_single_pairs(
    calls: list[tuple[int, int, str]],
    bias: bool,
    approximation: Any,
    terms: Any,
    scale: Any,
    together: bool,
    seed: int,
) -> None:
    """Layers called again, passes of a step, rows and whole pairs without a gradient, NaN."""
    torch.manual_seed(seed)
    scale = torch.tensor(0.5, dtype=F64) if scale == "tensor" else scale
    terms = torch.tensor(7, dtype=torch.int64) if terms == "tensor" else terms
    blocks = layers_of(bias)
    found = [block.staged for block in blocks]
    expected = staged_layers(bias)
    made = collector(blocks, approximation=approximation, gradient_scale=lambda _: scale)
    passes = {0: BackwardPass(0), 1: BackwardPass(1)}
    seen: list[tuple[int, int, Pair]] = []
    for layer, pass_id, kind in calls:
        stored_pair = keep(made, blocks[layer], *pair(layer, kind), passes[pass_id])
        seen.append((layer, pass_id, stored_pair))
    with pytest.MonkeyPatch.context() as patch:
        if not together:
            patch.setattr(statistics, "max_stacked_elements", lambda _: 0)
        made.sum_pairs()
    for layer, pass_id, stored_pair in seen:
        mask = stored_pair.backward_pass.find_mask(stored_pair.group)
        live = full_row_mask(stored_pair.group.num_rows) if mask is None else to_row_mask(mask)
        options = {"has_bias": bias, "approximation": approximation}
        each = pair_statistics(
            stored_pair.module, stored_pair.x, stored_pair.d, dtype=F64, row_mask=live, **options
        )
        expected[layer].record_pair(pass_id)
        bring(expected[layer], each, scale, pass_id)
    for pass_id in passes:
        for layers in (found, expected):
            close_pass(layers, pass_id, terms)
    for a, b in zip(collect_sums(found, 2), collect_sums(expected, 2), strict=True):
        close([a.head, *a.factors.values()], [b.head, *b.factors.values()])
    dropped = [[int(each.dropped) for each in layers] for layers in (found, expected)]
    assert dropped[0] == dropped[1]


def test_a_queued_pair_belongs_to_the_step_that_captured_it() -> None:
    """Pairs that were cleared or changed in place are left out; the latter with a warning."""
    blocks = layers_of(True)[:2]
    made = collector(blocks)
    rows = BackwardPass(0)
    for i, block in enumerate(blocks):
        keep(made, block, *pair(i, "plain"), rows)
    blocks[0].staged.clear()
    made.sum_pairs()
    heads = [each.head[1] for each in collect_sums([block.staged for block in blocks])]
    assert list(map(float, heads)) == [0.0, 5.0]
    x, d = pair(0, "plain")
    keep(made, blocks[0], x, d, rows)
    x.zero_()
    with pytest.warns(UserWarning, match=r"layer '0'.* in place.*skip_layers"):
        made.sum_pairs()
    assert float(collect_sums([blocks[0].staged])[0].head[1]) == 0


def test_pairs_are_queued_until_the_pass_ends_or_a_size_is_reached() -> None:
    (block, *_) = layers_of(False)
    made = collector([block], sampled=True)

    def add(x: Tensor) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(autograd, "call_after_pass", lambda work: None)
            made.consume(block.modules[0], x, torch.ones(1, 2, dtype=F64), 0)
        return len(made._queued_pairs)

    ones = torch.ones(1, 3, dtype=F64)
    assert [add(ones) for _ in range(2)] == [1, 2]
    # The rows' gradients are all there. A slice's memory is not its own.
    assert add(torch.ones(2**19, 2, 3, dtype=F64)[:1, 0]) == 0
    assert add(ones) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "max_queued_bytes", lambda _: 0)
        assert add(ones) == 0
    assert float(collect_sums([block.staged])[0].head[0]) == 5


def averages(shapes: Sequence[FactorShape], dtype: torch.dtype) -> list[KroneckerFactors]:
    return [KroneckerFactors(shape, CPU, dtype) for shape in shapes]


def drawn_sums(shape: FactorShape, dtype: torch.dtype, examples: int) -> StatisticsSums:
    factors = {k: torch.rand(shape.stored_shape(k)).to(dtype) for k in shape.factor_names}
    size = 2 + len(factors) * shape.groups
    head = torch.rand(size, dtype=torch.promote_types(dtype, torch.float32))
    head[:2] = examples
    return StatisticsSums(factors, head)


SHAPES = st.lists(
    st.sampled_from(
        [
            FactorShape(1, 2, 3),
            FactorShape(1, 3, 3),
            FactorShape(2, 2, 3),
            FactorShape(1, 4, 3, diagonal_a=True),
            FactorShape(1, 2, 3, gradient_factored=True),
            FactorShape(1, 4, 3, locations=2),
        ]
    ),
    max_size=8,
)


@given(shapes=SHAPES, dtype=st.sampled_from([F64, torch.bfloat16]), steps=SEEDS, seed=SEEDS)
def test_batched_averages_equal_single_ones_bit_for_bit(
    shapes: list[FactorShape], dtype: torch.dtype, steps: int, seed: int
) -> None:
    """Layers without an example, and layers that are replaced in between."""
    torch.manual_seed(seed)
    together = averages(shapes, dtype)
    alone = averages(shapes, dtype)
    for step in range(3):
        counts = [(steps >> (step + i)) % 4 for i in range(len(shapes))]
        sums = [drawn_sums(s, dtype, n) for s, n in zip(shapes, counts, strict=True)]
        copies = [
            StatisticsSums({k: t.clone() for k, t in each.factors.items()}, each.head.clone())
            for each in sums
        ]
        update_running_averages(together, sums, 0.9)
        for each, copy in zip(alone, copies, strict=True):
            update_running_averages([each], [copy], 0.9)
        for a, b in zip(together, alone, strict=True):
            for name in ("weight", "means", "examples"):
                assert torch.equal(getattr(a, name), getattr(b, name))
            for letter in a.shape.factor_names:
                assert torch.equal(a.stored[letter], b.stored[letter])
        if shapes and step == 1:  # as a checkpoint does
            together[-1].entries["A"] = together[-1].stored["A"].clone()


def test_a_stack_of_contiguous_tensors_is_a_view() -> None:
    base = torch.arange(12.0).view(4, 3)
    rows = list(base.unbind())
    for parts in (rows, rows[1:3], rows[::2], [row[1:] for row in rows]):
        stack = as_stack(parts)
        assert torch.equal(stack, torch.stack(parts))
        assert stack.data_ptr() == parts[0].data_ptr()
    square = torch.arange(8.0).view(2, 2, 2)
    for parts in (
        rows[::-1],
        [rows[0], rows[1], rows[3]],
        [rows[0]] * 2,
        [rows[0], base[1] + 0],
        [square[0], square[1].mT],
    ):
        stack = as_stack(parts)
        assert torch.equal(stack, torch.stack(parts))
        assert stack.data_ptr() != parts[0].data_ptr()


def test_the_state_refers_to_the_stacks() -> None:
    """After a checkpoint is loaded, and as layers are frozen, nothing is kept twice."""

    def train(optimizer: KAISA, model: nn.Module) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    def trained() -> tuple[KAISA, nn.Sequential]:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        return KAISA(model, lr=0.1, factor_update_steps=1, inv_update_steps=100), model

    first, model = trained()
    train(first, model)
    saved = deepcopy(first.state_dict())
    first.close()
    optimizer, model = trained()
    optimizer.load_state_dict(saved)
    blocks = optimizer._curvature.layers.blocks
    for frozen in (None, 1):
        if frozen is not None:
            model[frozen].requires_grad_(False)
        train(optimizer, model)
        found = [block.stored("A") for block in blocks]
        places = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in found
            if t is not None
        }
        assert sum(places.values()) == sum(t.nbytes for t in found if t is not None)
        for block, stored in zip(blocks, found, strict=True):
            assert optimizer.state[block.weight]["curvature"]["A"] is stored
    optimizer.close()
