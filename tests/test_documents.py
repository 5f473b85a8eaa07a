"""The documents a reader is given: the files, headings and make targets that they name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
# `make batch` is a span's name.
_TARGET = r"(?:^    |`)make (?!batch`)([a-z-]+)"
_FILE = r"`((?:tests|service|clients|protos|deploy|docs)/[\w./-]+)`"


def found(pattern: str) -> Iterator[object]:
    """A parameter for each document and match outside of code blocks."""
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for match in sorted(set(re.findall(pattern, text, re.MULTILINE))):
            yield pytest.param(path, match, id=f"{path.name}-{match}")


def anchors(path: Path) -> set[str]:
    """The headings of a document as links name them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("path", "target"), list(found(_TARGET)))
def test_every_make_target_that_is_named_exists(path: Path, target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("path", "link"), list(found(r"\]\((?!\w+://)([^)\s]+)\)")))
def test_every_link_leads_somewhere(path: Path, link: str) -> None:
    file, _, anchor = link.partition("#")
    target = (path.parent / file).resolve() if file else path
    assert target.exists()
    if anchor:
        assert anchor in anchors(target)


@pytest.mark.parametrize(("path", "file"), list(found(_FILE)))
def test_every_file_that_is_named_exists(path: Path, file: str) -> None:
    assert (ROOT / file).exists()
