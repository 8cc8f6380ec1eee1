"""Every term of the glossary links to a section that uses it."""

from __future__ import annotations

import re

import pytest
from page_scripts import ROOT

PAGE = ROOT / "docs" / "reference" / "glossary.md"
TEXT = PAGE.read_text("utf-8")
ROW = re.compile(r"^\| \[(?P<term>[^]]+)\](?:\((?P<url>[^)]+)\)|\[(?P<label>\w+)\]) \|", re.M)
URLS = dict(re.findall(r"^\[(\w+)\]: (\S+)$", TEXT, re.M))
TERMS = {match["term"]: match["url"] or URLS[match["label"]] for match in ROW.finditer(TEXT)}


def slug(heading: str) -> str:
    """The anchor that mkdocs gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def section(url: str) -> str:
    """The heading and the text that a link leads to, up to the next heading of its level."""
    path, _, anchor = url.partition("#")
    text = (PAGE.parent / path).read_text("utf-8")
    if not anchor:
        return text
    for match in re.finditer(r"^(#+) (.+)$", text, re.M):
        if slug(match[2]) == anchor:
            level = len(match[1])
            return re.split(rf"^#{{1,{level}}} ", text[match.end(1) :], flags=re.M)[0]
    raise AssertionError(f"no section {url}")


def test_terms_are_sorted() -> None:
    assert len(TERMS) > 20
    assert list(TERMS) == sorted(TERMS, key=str.lower)


@pytest.mark.parametrize("term", TERMS)
def test_the_section_of_a_term_uses_it(term: str) -> None:
    words = term.lower().split()
    text = section(TERMS[term]).lower()
    # The words of a term may be inflected, or stand in another order.
    missing = [word for word in words if word.rstrip(",")[:5] not in text]
    assert not missing
