"""Plans beside what comes true: how a comparison is judged."""

from __future__ import annotations

from typing import Any

import planned


def row(foretold: float, found: float, *, sent: int = 8, kept: int = 4) -> dict[str, Any]:
    stages = {"solve": [foretold, found], "base": [1.0, 1e-3]}
    memory = [[4, 4], [kept, 4]]
    sizes = [[{"solve_exchange": 8, "compare": 0}, {}], [{"solve_exchange": sent}, {}]]
    words = {"model": "mlp", "setting": "KAISA COMM-OPT, eigen", "processes": 2}
    return {**words, "stages": stages, "step": [foretold, found], "bytes": sizes, "memory": memory}


def test_a_verdict_counts_what_holds() -> None:
    rows = [row(1.2, 1.0), row(2.0, 1.0, sent=9), row(0.5, 1.0, kept=5)]
    found = planned.verdict(rows)
    assert (found["steps"], found["steps_within"]) == (3, 1)
    assert (found["stages"], found["stages_within"]) == (3, 1), "short stages do not count"
    assert found["worst_steps"] == [0.5, 2.0]
    assert (found["bytes_equal"], found["memory_equal"]) == (2, 2)


def test_what_differs_is_said() -> None:
    assert "differ" not in planned.said(row(1.0, 1.0))
    assert "bytes differ" in planned.said(row(1.0, 1.0, sent=9))
    lines = planned.said(row(1.5, 1.0, kept=5)).splitlines()
    assert lines[0].endswith("1500.00 ms foretold, 1000.00 ms found")
    assert "1.50" in lines[1]
    assert "memory differ" in lines[-1]


def test_models_take_their_batches() -> None:
    for name in ("tokens", "convolutions", "autoencoder"):
        model = planned.MODELS[name]
        ((x, y),) = model.batches(1, rank=0)
        assert model.build()(x).shape == (len(y), model.classes)
