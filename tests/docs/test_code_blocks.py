"""Every code block of the documentation runs.

A Python block that begins with a docstring such as ``"python train.py"`` is a complete script. It
runs with that command in an empty folder.

All other Python blocks of a page run in order in one namespace. The page's file in `preambles/`
defines the names that the page takes for granted, such as ``model``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from page_scripts import COMMAND, ROOT, assert_prints, blocks, python_blocks, run_script, scripts
from pool import Forks

PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
# Pages whose blocks another test runs.
TESTED_ELSEWHERE = {
    "docs/reference/api.md": "tests/docs/test_reference_pages.py",
    "docs/how-to/curvature.md": "tests/docs/test_curvature_page.py",
    "docs/how-to/frameworks.md": "tests/docs/test_frameworks_page.py",
    "docs/how-to/migrate.md": "tests/docs/test_migrate_page.py",
}
# Pages whose complete script another test runs.
SCRIPTS_TESTED_ELSEWHERE = {
    "docs/how-to/checkpoints.md": "tests/docs/test_checkpoints_page.py",
    "docs/how-to/curvature.md": "tests/docs/test_curvature_page.py",
    "docs/how-to/frameworks.md": "tests/docs/test_frameworks_page.py",
    "docs/how-to/fsdp-compile.md": "tests/docs/test_fsdp_page.py",
    "docs/how-to/pinns.md": "tests/docs/test_pinn_page.py",
    "docs/how-to/tune.md": "tests/docs/test_tune_page.py",
    "docs/start/quickstart.md": "tests/docs/test_quickstart.py",
}
# Pages whose scripts print numbers that do not depend on the machine.
EXACT = {"docs/evidence/planning.md"}
LANGUAGES = {"python", "sh", "text", "console", "diff", "yaml", "bibtex"}

pytestmark = [pytest.mark.filterwarnings("ignore")]


def preamble(page: str) -> str:
    """Python that runs before the first block of a page."""
    name = page.removeprefix("docs/").removesuffix(".md").replace("/", "_").replace("-", "_")
    path = Path(__file__).parent / "preambles" / f"{name}.py"
    return path.read_text("utf-8") if path.exists() else ""


def test_every_page_that_another_test_runs_has_that_test() -> None:
    assert SCRIPTS_TESTED_ELSEWHERE.keys() <= {page for page in PAGES if scripts(page)}
    for path in (*TESTED_ELSEWHERE.values(), *SCRIPTS_TESTED_ELSEWHERE.values()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_has_a_known_language(page: str) -> None:
    assert {language for language, _ in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", [page for page in PAGES if page not in TESTED_ELSEWHERE])
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(preamble(page), f"preamble of {page}", "exec"), names)
    for code in python_blocks(page):
        if not COMMAND.match(code):
            exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if scripts(page) and page not in SCRIPTS_TESTED_ELSEWHERE]
)
def test_a_complete_script_prints_what_its_page_shows(
    page: str, tmp_path: Path, forks: Forks
) -> None:
    for code, shown in scripts(page):
        assert_prints(run_script(code, tmp_path, forks), shown, rel=0.0 if page in EXACT else 0.1)
