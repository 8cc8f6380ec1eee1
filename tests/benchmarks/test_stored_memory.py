"""The page's table of memory is that of the stored run."""

from __future__ import annotations

import pytest
from stored_runs import rows, stored, text_of

import memory

PAGE = "docs/evidence/benchmarks.md"
LABELS = {
    "with `factor_dtype=torch.bfloat16`": "KAISA over AdamW, bfloat16 factors",
    'with `skip_layers=["head"]`': "KAISA over AdamW, without the head",
    "on 4 ranks": "KAISA over AdamW, 4 ranks",
}
COLUMNS = {
    "language model": "language",
    "ResNet-50": "resnet50",
    "transformer": "transformer-768",
}


def measured() -> dict[str, dict[str, memory.Row]]:
    """The stored rows by model, then by optimizer."""
    found: dict[str, dict[str, memory.Row]] = {}
    for entry in stored("memory")["rows"]:
        row = memory.Row(**entry)
        found.setdefault(row.model, {})[row.optimizer] = row
    return found


def test_the_table_of_the_page() -> None:
    record = measured()
    table = rows(PAGE, "optimizer", *COLUMNS)
    assert [LABELS.get(label, label) for label in table] == list(memory.OPTIMIZERS)
    for label, cells in table.items():
        found = [record[model][LABELS.get(label, label)] for model in COLUMNS.values()]
        assert cells == [f"{row.per_parameter():.1f}" for row in found], label


def test_the_order_of_optimizers_by_memory_is_as_stated() -> None:
    page = text_of(PAGE)
    record = measured()
    assert "KAISA stores less than SOAP and Shampoo, and more than AdamW" in page
    for found in record.values():
        state = {name: row.per_parameter() for name, row in found.items()}
        of_kaisa = [value for name, value in state.items() if name.startswith("KAISA")]
        assert state["AdamW"] < min(of_kaisa)
        assert max(of_kaisa) < min(state["SOAP"], state["Shampoo"])
    language = record["language"]["KAISA over AdamW"]
    assert language.last_step / language.parameters == pytest.approx(4, abs=0.05)
    assert "also keeps 4 bytes before some refreshes, unless `step_scale=False`" in page


def test_the_stored_run_has_every_model_and_counts_what_was_allocated() -> None:
    record = measured()
    assert record.keys() == memory.MODELS.keys() == set(COLUMNS.values())
    for found in record.values():
        assert list(found) == list(memory.OPTIMIZERS)
        for row in found.values():
            counted = row.state + row.last_step
            assert row.allocated == pytest.approx(counted, abs=0.7 * row.parameters)


def test_the_options_of_the_page_are_those_that_were_measured() -> None:
    page = text_of(PAGE)
    _, *ranks = memory.OPTIMIZERS["KAISA over AdamW, 4 ranks"].options.items()
    for name, value in ranks:
        quoted = f'"{value}"' if isinstance(value, str) else value
        assert f"`{name}={quoted}`" in page
    assert f"two blocks of width {memory.WIDE.width} and {memory.WIDE_VOCABULARY:,} outputs" in page
    assert memory.WIDE.layers == 2
