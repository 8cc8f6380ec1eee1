"""Parts of many combinations: which values meet."""

from __future__ import annotations

import itertools

import pytest
import woven as module
from woven import woven


@pytest.mark.parametrize(("sizes", "part"), [((2, 4, 6), 2), ((3, 3, 3), 3), ((4,), 2)])
@pytest.mark.parametrize("first", [0, 1])
def test_all_but_one_meet_in_every_way(
    sizes: tuple[int, ...], part: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THOROUGH", False)
    factors = [range(size) for size in sizes]
    everything = set(itertools.product(*factors))
    chosen = woven(*factors, part=part, first=first)
    assert len(set(chosen)) == len(chosen) == len(everything) / part
    for left_out in range(len(sizes)):
        others = [each[:left_out] + each[left_out + 1 :] for each in chosen]
        assert set(others) == {each[:left_out] + each[left_out + 1 :] for each in everything}
    monkeypatch.setattr(module, "THOROUGH", True)
    assert set(woven(*factors, part=part, first=first)) == everything
