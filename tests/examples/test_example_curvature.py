"""The examples of `second_order.measure`: what they print is true."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import cross_entropy

import compression
import continual
import influence
import laplace_digits
from digits import load_split
from second_order import measure

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG"


def test_influence_predicts_the_effect_of_removing_a_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And better than gradients without curvature do."""
    influence.main(
        ["--seeds", "7", "--examples", "100", "--queries", "12", "--groups", "16", "--starts", "2"]
    )
    found = re.search(r"EK-FAC (\S+), plain (\S+),", capsys.readouterr().out)
    assert found is not None
    ekfac, plain = map(float, found.groups())
    assert ekfac > max(0.5, plain)


def test_spearman_is_the_correlation_of_ranks() -> None:
    a, b = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    ranks = torch.stack([a, b]).argsort(-1).argsort(-1).double()
    expected = [torch.corrcoef(ranks[:, i])[0, 1] for i in range(3)]
    assert torch.allclose(influence.spearman(a, b), torch.stack(expected))


def test_compressed_directions_change_the_outputs_least() -> None:
    """No projection of this rank changes the outputs less, for inputs of low rank."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 9, generator=generator)
    mixed = torch.randn(9, 4, generator=generator)
    x = mixed @ torch.randn(4, 50, generator=generator)  # A is of rank 4
    u = compression.directions(weight, x @ x.T / 50)[:, :2]
    plain = compression.directions(weight)[:, :2]
    changes = [float((weight @ x - v @ (v.T @ weight @ x)).norm()) for v in (u, plain)]
    least = float(torch.linalg.svdvals(weight @ x)[2:].norm())
    assert changes[0] == pytest.approx(least, rel=1e-4)
    assert changes[1] > 1.01 * least


def test_compression_draws_its_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "compression.png"
    words = f"--seeds 7 --steps 80 --windows 16 --output {picture}"
    compression.main(words.split())
    output = capsys.readouterr().out
    assert picture.read_bytes().startswith(PNG)
    whole = float(re.findall(r"held-out loss (\S+);", output)[0])
    curves = {
        name: [float(loss) for loss in line.split()]
        for name, line in re.findall(r"(plain SVD|whitened) +(.*)", output)
    }
    assert whole < 3.0
    assert curves["whitened"][0] < curves["plain SVD"][0]
    assert all(each[-1] == pytest.approx(whole, abs=0.02) for each in curves.values())


def test_compression_to_full_rank_changes_nothing() -> None:
    model = compression.train(seed=0, steps=2)
    name = "model.layers.0.mlp.down_proj"
    vectors = {name: compression.directions(model.get_parameter(f"{name}.weight").detach())}
    text = compression.load_text(held_out=True)
    windows = compression.random_windows(text, 16, 64, torch.Generator().manual_seed(0))
    whole = compression.loss_of(model, windows)
    same = compression.loss_of(compression.compress(model, vectors, 64), windows)
    less = compression.loss_of(compression.compress(model, vectors, 1), windows)
    assert torch.allclose(whole, same, rtol=1e-5)
    assert not torch.allclose(whole, less, rtol=1e-5)


def test_penalties_keep_the_accuracy_on_the_first_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(continual, "CHOOSING", (100,))
    few = {"none": [(0.0, 0.0)], "identity": [(0.3, 0.0)], "EK-FAC": [(3e3, 0.1), (1e-9, 0.1)]}
    monkeypatch.setattr(continual, "CHOICES", few)
    continual.main(["--seeds", "7", "--steps", "120"])
    output = capsys.readouterr().out
    rows = re.findall(r"^(\S+) +(\S+) +\S+ +(\S+)% +(\S+)% +\S+%$", output, re.MULTILINE)
    first = {name: float(accuracy) for name, _, accuracy, _ in rows}
    assert list(first) == list(few)
    assert first["none"] < first["EK-FAC"] - 20
    assert {name: float(strength) for name, strength, _, _ in rows}["EK-FAC"] == 3e3


def test_laplace_is_less_overconfident_on_distorted_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(laplace_digits, "SAMPLES", 50)
    monkeypatch.setattr(laplace_digits, "PRECISIONS", (1.0, 10.0))
    picture = tmp_path / "laplace.png"
    laplace_digits.main(["--seeds", "7", "--steps", "600", "--output", str(picture)])
    assert picture.read_bytes().startswith(PNG)
    rows = re.findall(r"(\w+) +(\S+)% +(\S+) +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [row[0] for row in rows] == [*laplace_digits.COLORS] * 2
    for of_kind in (rows[:3], rows[3:]):
        loss, error = ({name: float(row[i]) for name, *row in of_kind} for i in (1, 2))
        assert loss["Laplace"] < loss["MAP"]
        assert error["Laplace"] < error["MAP"]


def test_predictions_are_those_of_the_dense_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits have the covariance (N F + δ)⁻¹, up to the error of the samples."""
    monkeypatch.setattr(laplace_digits, "SAMPLES", 4000)
    torch.manual_seed(0)
    last = torch.nn.Linear(4, 3)
    features = torch.randn(20, 4)
    last.weight.data *= 4.0
    curvature = measure(torch.nn.Sequential(last), [features], factors="kfac", progress=False)
    found = laplace_digits.laplace(last, curvature, 20, 0.5, features[:1]).detach()
    covariance = (20 * curvature["0"].to_dense() + 0.5 * torch.eye(15)).inverse()
    jacobian = torch.cat([torch.kron(torch.eye(3), features[:1]), torch.eye(3)], 1)
    spread = torch.linalg.cholesky(jacobian @ covariance @ jacobian.T)
    logits = last(features[:1]) + torch.randn(50_000, 3) @ spread.T
    expected = logits.softmax(1).mean(0)
    assert torch.allclose(found[0], expected, atol=0.01)
    assert not torch.allclose(last(features[:1]).softmax(1)[0], expected, atol=0.02)


def test_the_calibration_of_known_probabilities() -> None:
    p = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.6, 0.4]])
    share, confidence, accuracy = laplace_digits.reliability(p, torch.tensor([0, 1, 0]))
    assert share[[6, 9]].tolist() == pytest.approx([1 / 3, 2 / 3])
    assert confidence[[6, 9]].tolist() == pytest.approx([0.6, 0.95])
    assert accuracy[[6, 9]].tolist() == pytest.approx([1.0, 0.5])
    loss = laplace_digits.mean_loss(p, torch.tensor([0, 1, 0]))
    assert loss == pytest.approx(float(cross_entropy(p.log(), torch.tensor([0, 1, 0]))))


def test_a_rotation_by_zero_degrees_changes_nothing() -> None:
    images = load_split().test_images[:5]
    assert torch.allclose(laplace_digits.distort(images, 0.0, 0.0), images, atol=1e-5)
    assert not torch.allclose(laplace_digits.distort(images, 45.0, 0.0), images, atol=0.1)
