"""The stored runs of what `measure` costs, and what it is good for, are what the page says."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import measured

ROOT = Path(__file__).resolve().parents[2]
STORED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/measured.json").read_text())
USES: dict[str, list[str]] = json.loads(
    (ROOT / "benchmarks/results/curvature_uses.json").read_text()
)["printed"]
PAGE = " ".join((ROOT / "docs/how-to/curvature.md").read_text("utf-8").split())


def test_time_is_near_its_floor() -> None:
    found = STORED["seconds"]
    floors = {
        "inputs": found["forward"] + found["products of A"],
        "kfac": found["forward and backward"] + found["of A and G"],
    }
    for name, bound in (("inputs", 1.35), ("kfac", 1.25)):
        assert found[name] < bound * floors[name]


def largest_peak(memory: dict[str, float], ranks: int) -> float:
    """An owner's triangles, and less than one full matrix of a layer."""
    return memory["triangles"] / ranks + memory["a layer"] + 2**20


def test_owners_store_their_share_and_little_more() -> None:
    assert STORED["memory"].keys() == {"device, 1", "owner, 4"}
    found = STORED["memory"]["owner, 4"]
    assert found["peak"] < largest_peak(found, ranks=4)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak")
def test_a_pass_now_stays_below_this_peak(tmp_path: Path) -> None:
    with patch.dict(os.environ):
        found = measured.measure_memory(2, width=2048, depth=4, keep="owner", folder=tmp_path)
    assert found["factors"] == found["triangles"] / 2
    assert found["peak"] < largest_peak(found, ranks=2)


def test_a_large_model_equals_the_computed_sizes() -> None:
    sizes = STORED["paper"]["Llama 7B, kfac"]
    triangles = sizes["triangles"] / 2**30
    owned = sizes["a process of 8"] / 2**30
    sentence = f"{triangles:.2f} GiB of triangles, or {owned:.2f} GiB on each of 8 ranks"
    assert sentence in PAGE


def test_influence_figures_equal_the_stored_run() -> None:
    found = [re.findall(r"0\.\d+", line) for line in USES["influence"] if "seed" in line]
    for column in zip(*found, strict=True):
        assert "{}, {} and {}".format(*column) in PAGE


def test_compression_figures_equal_the_stored_run() -> None:
    ranks = USES["compression"][2].split()[1:]
    means: dict[str, dict[str, str]] = {}
    for kind in ("plain SVD", "whitened"):
        own_lines = [line for line in USES["compression"] if line.strip().startswith(kind)]
        rows = [[float(n) for n in re.findall(r"\d\.\d+", line)] for line in own_lines]
        averages = (f"{sum(column) / len(rows):.2f}" for column in zip(*rows, strict=True))
        means[kind] = dict(zip(ranks, averages, strict=True))
    sentence = f"at rank 16 of 64 is {means['whitened']['16']} against {means['plain SVD']['16']}"
    assert sentence in PAGE


def test_continual_learning_figures_equal_the_stored_run() -> None:
    rows = [line.split() for line in USES["continual"][3:]]
    means = {row[0]: row[-1].replace("%", " %") for row in rows}
    assert f"EK-FAC's F, we got a mean test accuracy of {means['EK-FAC']}." in PAGE
    assert f"With the diagonal of F it was {means['diagonal']}, and without" in PAGE
    assert f"without a penalty {means['none']}." in PAGE


def test_calibration_figures_equal_the_stored_run() -> None:
    found: dict[str, dict[str, str]] = {"as in training": {}, "rotated more": {}}
    for line in USES["laplace"][-6:]:
        kind = next(kind for kind in found if line.startswith(kind))
        method, *_, error = line.removeprefix(kind).split()
        found[kind][method] = error
    errors = found["as in training"]
    sentence = f"(ECE) from {errors['MAP']} to {errors['Laplace']}"
    assert sentence in PAGE
    assert f"A single temperature was better: {errors['temperature']}" in PAGE
    assert errors["temperature"] < errors["Laplace"] < errors["MAP"]
    errors = found["rotated more"]
    assert "Laplace had the smallest error, but was still overconfident" in PAGE
    assert min(errors, key=lambda method: float(errors[method])) == "Laplace"
