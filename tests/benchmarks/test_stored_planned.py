"""The page about planning has the figures of the stored comparison of plans with steps."""

from __future__ import annotations

import pytest
from stored import ROOT, rows, stored

RUN = stored("planned")
MODELS = ("mlp", "convolutions", "transformer", "tokens", "resnet", "autoencoder")


def of_steps(processes: int, *models: str) -> list[float]:
    found = [r for r in RUN["rows"] if r["processes"] == processes and r["model"] in models]
    return [r["step"][0] / r["step"][1] for r in found]


@pytest.mark.parametrize("model", MODELS)
def test_the_page_has_the_stored_comparison(model: str) -> None:
    cells = rows("docs/planning.md", "model", "one process", "two processes")[model]
    for processes, cell in enumerate(cells, 1):
        ratios = of_steps(processes, model)
        assert len(ratios) == (2, 6)[processes - 1]
        assert cell == f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_bytes_and_memory_were_equal_and_times_as_the_page_says() -> None:
    assert RUN["bytes_equal"] == RUN["memory_equal"] == RUN["steps"] == len(RUN["rows"])
    page = (ROOT / "docs" / "planning.md").read_text().replace("\n", " ")
    within = [sum(abs(r - 1) <= 0.3 for r in of_steps(n, *MODELS)) for n in (1, 2)]
    assert f"process {within[0]} of 12 are within 30 %, on two {within[1]} of 36" in page
    assert f"a step {RUN['stages_within']} of {RUN['stages']}" in page
