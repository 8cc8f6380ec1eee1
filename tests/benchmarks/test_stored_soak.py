"""Long runs: what the script measures is what there is, and the stored run is flat."""

from __future__ import annotations

import statistics
from itertools import pairwise

from stored_runs import stored, text_of

import soak


def test_a_short_run_is_measured() -> None:
    windows = soak.train("KAISA", 50)
    assert len(windows) == soak.WINDOWS
    assert all(window["megabytes"] > 50 and window["objects"] > 0 for window in windows)
    assert all(window["threads"] >= 1 and window["milliseconds"] > 0 for window in windows)


def test_growing_memory_is_detected() -> None:
    growing_list: list[object] = []
    counts = []
    for _ in range(3):
        growing_list += [[j] for j in range(1000)]
        counts.append(soak.measured([1.0], 1.0)["objects"])
    assert all(later - sooner >= 1000 for sooner, later in pairwise(counts))


def test_the_stored_run_is_flat() -> None:
    """Memory, objects, threads and files, as the page says; and the time of a step."""
    run = stored("soak")
    assert run["steps"] == 50_000
    assert run["runs"].keys() == soak.SYSTEMS.keys()
    for windows in run["runs"].values():
        warm = windows[1:]
        assert max(w["megabytes"] for w in warm) < 1.01 * min(w["megabytes"] for w in warm)
        for name in ("objects", "tensors", "threads", "files"):
            assert soak.growth(windows, name) == 1.0
        first, last = ([w["milliseconds"] for w in half] for half in (warm[:3], warm[-3:]))
        assert statistics.median(last) < 1.25 * statistics.median(first)
    page = text_of("docs/evidence/reliability.md")
    assert "Memory stays within 1 %, and time per step within 25 %" in page
