"""The generated pages of docs/reference are those that `make reference` would write."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from page_scripts import run_fork
from pool import Forks

import second_order
from second_order import KAISA

ROOT = Path(__file__).parents[2]
pytest.importorskip("transformers")  # the API page has a class that derives from one of its classes


def load_script() -> ModuleType:
    """The script, which is in no package."""
    path = ROOT / "docs" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_reference = load_script()
API = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
OPTIONS = (ROOT / "docs" / "reference" / "options.md").read_text("utf-8")


def test_the_generated_pages_are_up_to_date(tmp_path: Path, forks: Forks) -> None:
    """In a process of its own, because other tests may have replaced imported modules."""
    run_fork(ROOT / "docs" / "make_reference.py", [str(tmp_path)], forks, num_ranks=0)
    for page in make_reference.PAGES:
        committed = (ROOT / "docs" / "reference" / page).read_text("utf-8")
        assert committed == (tmp_path / page).read_text("utf-8"), "run `make reference`"


def test_every_block_of_the_api_page_compiles() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", API, re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(make_reference.PUBLIC)
    for block in blocks:
        compile(block, "api.md", "exec")


@pytest.mark.parametrize("module", [second_order, second_order.export, second_order.lanczos])
def test_the_api_page_has_every_public_name(module: ModuleType) -> None:
    names = {f"{module.__name__}.{name}" for name in module.__all__}
    modules = {"second_order.export", "second_order.lanczos"}
    assert names - modules <= make_reference.PUBLIC


def test_the_api_page_has_every_public_method() -> None:
    assert "class KAISA(SecondOrderOptimizer):" in API
    for name in ("step", "summary", "metrics", "consolidate", "state_dict", "close"):
        assert re.search(rf"^    def {name}\(", API, re.MULTILINE), name
    assert "    def curvature(" in API, "a method of the private class between the two"


def test_the_options_page_shows_resolved_defaults() -> None:
    def row(name: str) -> list[str]:
        (line,) = re.findall(rf"^\| `{name}` \|(.*)\|$", OPTIONS, re.MULTILINE)
        return [cell.strip() for cell in line.split("|")]

    model = torch.nn.Linear(3, 2, bias=False)
    for column, base in ((1, torch.optim.SGD), (2, torch.optim.AdamW)):
        options = KAISA(model, lr=0.1, base=base)._curvature._options
        decay = options.factor_decay.decay
        assert row("factor_decay")[column].startswith(f"`PerStep({decay}")
        assert row("unsupported_layers")[column] == f'`"{options.unsupported_layers}"`'
    assert row("damping")[1] == f"`{options.damping}`"
    described = inspect.getdoc(KAISA) or ""
    assert f"damping: {row('damping')[3]}." in described
