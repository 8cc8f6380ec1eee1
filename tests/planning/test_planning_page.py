"""The script of the page on planning prints what the page shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stored_runs import ROOT

if TYPE_CHECKING:
    import pytest


def test_the_script_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "evidence" / "planning.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, "plan.py", "exec"), {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == shown.splitlines()
