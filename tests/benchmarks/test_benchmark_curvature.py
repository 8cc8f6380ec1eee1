"""The curvature benchmark: every section at a small size, and the arithmetic of its tables."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

import curvature
import curvature_cost as cost
import digits
import progress

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table


def shown(table: Table) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_valley_gains_a_thousandfold_and_the_floor_is_below_the_base() -> None:
    record = curvature.valley((10.0, 100.0), 0.0, rates=(0.01, 0.1, 1.0), scales=(1.0,))
    assert record["times smaller"]["1.0"] >= 1_000
    assert record["floor"]["loss"] < record["base"]["loss"] < record["start"]
    assert "10 to 100" in shown(curvature.valley_table([record]))


def test_products_are_counted_from_cold_and_from_every_start() -> None:
    records = curvature.count_products(
        0.1, 0, batch=64, marks={"early": 6}, gaps=(2,), widths=(64, 8, 10)
    )
    (record,) = records
    least = cost.LARGEST + cost.SMALLEST
    assert record["step"] == 6
    assert record["cold"] >= least
    assert set(record["warm"]) == set(curvature.STARTS)
    assert all(least <= warm["2"] < 400 for warm in record["warm"].values())
    assert "of 1" in shown(curvature.products_table(records))


def test_products_are_timed_beside_gradients() -> None:
    torch.manual_seed(0)
    model, x, y = cost.tanh_network(64, 4, 10), torch.randn(8, 64), torch.arange(8)
    record = cost.product_times("tiny", model, partial(lambda: cross_entropy(model(x), y)), 3)
    ms = record["milliseconds"]
    assert record["parameters"] == 64 * 4 + 4 + 40 + 10
    assert record["ratio"]["product"] == pytest.approx(ms["product"] / ms["gradient"])
    assert "tiny" in shown(cost.times_table([{**record, "asked": 1.8}]))


def test_overhead_is_of_steps_between_refreshes() -> None:
    record = cost.overhead([(30, 20), (20,)], rank=3, repeats=3)
    assert (record["parameters"], record["vectors"]) == (620, 3)
    assert set(record["milliseconds"]) == {"base", "dho2", "floor"}
    assert "tiny" in shown(cost.overhead_table([{**record, "shapes": "tiny"}]))


def test_one_process_keeps_all_of_the_basis() -> None:
    record = cost.basis_elements((64, 8, 10))
    n, m, r = 610, 52, 13
    assert (record["n"], record["m"], record["r"]) == (n, m, r)
    assert record["kept"] == {"D": n * m, "V̂ by row": n * r, "V̂ by column": n * r}
    assert f"{n * m:,}" in shown(cost.memory_table([{**record, "processes": 1}]))


@pytest.mark.parametrize("model", ["mlp", "conv", "autoencoder"])
def test_training_compares_every_optimizer(model: str) -> None:
    names = [setting.optimizer for setting in curvature.training_settings(model)]
    assert list(dict.fromkeys(names)) == [
        "SGD",
        "Adam",
        "DHO2 over SGD",
        "DHO2 over Adam",
        "DHO2, defaults",
    ]


@pytest.mark.parametrize("model", ["mlp", "autoencoder"])
def test_training_runs_through_a_refresh(model: str) -> None:
    options: dict[str, Any] = {"lr": 0.01, "warmup_steps": 3, "lanczos_iterations": 12}
    (run,) = curvature.training(model, [curvature.dho2("DHO2", model, 5, **options)], seeds=1)
    assert (run.optimizer, run.setting, len(run.losses)) == ("DHO2", "lr 0.01", 1)
    classifier = model in progress.CLASSIFIERS
    targets = progress.CLASSIFIER_TARGETS if classifier else progress.AUTOENCODER_TARGETS
    assert "never" in shown(progress.table(model, [run], targets))


def test_sections_are_added_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature, "run", lambda section, *_: [1.23456e-9, float("inf"), section])
    threads = torch.get_num_threads()
    try:
        for section in ("valley", "memory"):
            curvature.main(["--only", section, "--json", str(tmp_path / "new" / "c.json")])
    finally:
        torch.set_num_threads(threads)
    record = json.loads((tmp_path / "new" / "c.json").read_text())
    assert record["valley"] == [1.235e-9, None, "valley"]
    assert record["memory"][2] == "memory"
    assert record["machine"].endswith("one thread")
    assert len(digits.load_split().train_images) == 1437  # the second batch of `products`
