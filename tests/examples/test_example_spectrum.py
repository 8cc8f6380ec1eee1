"""The example that looks at the Hessian of a network while it trains."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spectrum

ARGUMENTS = "--early 1 --late 6 --examples 64 --largest 3 --smallest 1 --iterations 30 --probes 2"


def test_prints_eigenvalues_and_draws_the_density(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "spectrum.png"
    monkeypatch.setattr("sys.argv", ["spectrum.py", *ARGUMENTS.split(), "--output", str(picture)])
    monkeypatch.delenv("RANK", raising=False)
    snapshots: list[spectrum.Snapshot] = []
    draw: Callable[..., None] = spectrum.draw
    monkeypatch.setattr(
        spectrum, "draw", lambda axes, snapshot: (snapshots.append(snapshot), draw(axes, snapshot))
    )
    spectrum.main()
    output = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [snapshot.step for snapshot in snapshots] == [1, 6]
    assert snapshots[1].loss < snapshots[0].loss
    for snapshot in snapshots:
        values = snapshot.pairs.eigenvalues
        assert values.isfinite().all()
        assert (values[:-2].diff() <= 0).all()  # three largest in descending order, one smallest
        assert values[-1] < 0 < values[0]
        assert snapshot.density.size == 17_226
        weights = snapshot.density.weights.sum(dim=1)
        assert torch.allclose(weights, torch.ones_like(weights))
        assert math.isclose(snapshot.density.nodes.max(), values[0], rel_tol=0.05)
        assert all(f"{value:11.4f}" in output for value in values.tolist())
        assert f"after {snapshot.step} steps" in output
